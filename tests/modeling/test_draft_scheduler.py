"""The choice of lengths against trying every one, its causality, calibration of the confidence, and the report."""

import itertools
import random

import pytest
import torch

from modeling_dsv4 import DSparkScheduler
from modeling_dsv4.draft_scheduler import DraftReport, convex_corners
from tests.modeling.draft_models import drafting_model, planned
from tests.modeling.tiny_model import PAD, new_model, some_ids

CONVEX = [1.0, 1.05, 1.2, 1.5, 2.0, 2.7]
FLAT, STEEP = [1.0] * 6, [1.0, 3, 5, 7, 9, 11]


def rate(lengths, survival, times):
    """Expected tokens per second of a choice, straight between the measured lengths."""
    gained = sum(1 + sum(row[:n]) for n, row in zip(lengths, survival, strict=True))
    mean = sum(lengths) / len(lengths)
    low = min(int(mean), len(times) - 2)
    return gained / (times[low] + (times[low + 1] - times[low]) * (mean - low))


@pytest.mark.parametrize("seed", range(5))
def test_choice_is_the_best_of_all(seed):
    torch.manual_seed(seed)
    scheduler, confidence = DSparkScheduler({3: CONVEX}), torch.randn(3, 5) * 2 + 1
    survival = scheduler.survival(confidence).tolist()
    chosen = scheduler.choose(confidence, [5, 5, 3])
    best = max(rate(c, survival, CONVEX) for c in itertools.product(range(6), range(6), range(4)))
    assert rate(chosen, survival, CONVEX) == pytest.approx(best)


def test_rows_share_what_a_step_may_cost():
    confidence = torch.tensor([[4.0] * 5, [-2.0] * 5, [1.0] * 5])
    assert DSparkScheduler({3: CONVEX}).choose(confidence, [5, 5, 5]) == [5, 0, 1]


def test_extremes():
    sure, hopeless = torch.full((1, 5), 20.0), torch.full((1, 5), -6.0)
    assert DSparkScheduler().choose(hopeless, [5]) == [5]  # no curve: every draft
    assert DSparkScheduler({1: FLAT}).choose(hopeless, [5]) == [5]  # verifying costs nothing
    assert DSparkScheduler({1: STEEP}).choose(sure, [5]) == [0]
    assert DSparkScheduler({1: CONVEX}).choose(sure, [5]) == [3]  # 4 tokens in 1.5, 5 in 2.0
    assert DSparkScheduler({1: CONVEX}).choose(hopeless, [5]) == [0]
    assert DSparkScheduler({1: CONVEX}).choose(None, [4]) == [4]  # a drafter without confidence
    assert DSparkScheduler({2: CONVEX}).choose(sure.repeat(2, 1), [-1, 2]) == [0, 2]  # a finished row, a short rest


def test_a_position_is_chosen_without_looking_at_what_follows():
    """The confidence of position i + 1 knows the token at i; verifying i must not depend on it, or samples are biased."""
    draw = random.Random(0)
    for seed in range(200):
        torch.manual_seed(seed)
        scheduler, confidence = DSparkScheduler({2: CONVEX}), torch.randn(2, 5) * 2
        row, position = draw.randrange(2), draw.randrange(4)
        other = confidence.clone()
        other[row, position + 1 :] = torch.randn(4 - position) * 4
        a, b = (scheduler.choose(c, [5, 5])[row] for c in (confidence, other))
        assert (a > position) == (b > position)


def test_convex_corners():
    assert convex_corners([1.0, 1.0, 3.0]) == [(0.0, 1.0), (1.0, 1.0), (2.0, 3.0)]
    assert convex_corners([1.0, 2.0, 2.5, 4.0]) == [(0.0, 1.0), (2.0, 2.5), (3.0, 4.0)]
    assert convex_corners([2.0, 1.0, 3.0]) == [(0.0, 1.0), (1.0, 1.0), (2.0, 3.0)]  # noise: more never costs less


def test_fit_finds_temperature_and_bias():
    torch.manual_seed(0)
    logits = torch.randn(20_000) * 3
    report = DraftReport(confidences=logits.tolist())
    report.outcomes = (torch.rand(20_000) < torch.sigmoid(logits / 2 - 0.7)).tolist()
    scheduler = DSparkScheduler().fit(report)
    assert scheduler.temperature == pytest.approx(2, rel=0.1) and scheduler.bias == pytest.approx(-0.7, abs=0.1)
    before = report.calibration_error
    report.scheduler = scheduler
    assert report.calibration_error < 0.02 < before
    with pytest.raises(ValueError, match="accepted: both kinds"):
        DSparkScheduler().fit(DraftReport(confidences=[1.0], outcomes=[True]))


@pytest.mark.parametrize(
    ("logits", "acceptance"),
    [
        (lambda x: x, lambda x: torch.sigmoid(1 - 2 * x)),  # the more confident, the more wrong
        (lambda x: 30 * x, lambda x: torch.full_like(x, 0.6)),
        (lambda x: 30 * x, lambda x: torch.sigmoid(1.5 * x - 0.5)),
        (lambda x: x + 8, lambda x: torch.full_like(x, 0.3)),
        (lambda x: x, lambda x: (x > 0.1).double()),  # separable
        (lambda x: torch.ones_like(x), lambda x: torch.full_like(x, 0.9)),
    ],
    ids=["opposite", "wide noise", "wide", "far off", "separable", "constant"],
)
def test_a_fit_is_never_worse_than_the_observed_share(logits, acceptance):
    torch.manual_seed(0)
    x = torch.randn(300, dtype=torch.float64)
    outcomes = torch.rand_like(x) < acceptance(x)
    report = DraftReport(confidences=logits(x).tolist(), outcomes=outcomes.tolist())
    scheduler, share = DSparkScheduler().fit(report), outcomes.double().mean()

    def surprise(predicted):
        return float(torch.nn.functional.binary_cross_entropy(predicted.expand(300), outcomes.double()))

    found = surprise(scheduler.acceptance(logits(x)))
    assert found <= surprise(share) + 1e-9
    assert found <= surprise(acceptance(x).clamp(0.02, 0.98)) + 0.01 or scheduler.temperature == float("inf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0}, "temperature is 0; accepted: a number > 0"),
        ({"latency": {0: [1.0, 2.0]}}, r"latency\[0\] is \[1.0, 2.0\]"),
        ({"latency": {1: [1.0]}}, r"latency\[1\] is \[1.0\]; accepted: batch size -> two or more seconds > 0"),
        ({"latency": {1: [1.0, -1.0]}}, "seconds > 0"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        DSparkScheduler(**arguments)


def test_calibrate_measures_every_length():
    scheduler = DSparkScheduler().calibrate(drafting_model(2), batch_sizes=(1, 2), prompt_length=5, repeats=1)
    assert {batch: len(times) for batch, times in scheduler.latency.items()} == {1: 3, 2: 3}
    assert all(t > 0 for times in scheduler.latency.values() for t in times)
    with pytest.raises(ValueError, match="model has no drafter"):
        DSparkScheduler().calibrate(new_model(torch.float64))
    with pytest.raises(ValueError, match="repeats is 0"):
        DSparkScheduler().calibrate(drafting_model(2), repeats=0)


# ---- with a model -------------------------------------------------------------------------------------------------------------

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None, "use_mtp": True}


def informed(model, wrong, knows):
    """A confidence head that knows where the drafts are wrong, or (`knows=False`) draws at random."""
    torch.manual_seed(0)

    def confidence(states, previous):
        length = informed.cache.lengths
        right = torch.tensor([[not wrong(int(n), s) for s in range(states.shape[1])] for n in length])
        return torch.where(right, 6.0, -6.0) if knows else torch.randn(states.shape[:2]) * 4

    return confidence


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_report_and_rates_of_an_informative_and_a_noise_head(batch, monkeypatch):
    """By the curve's seconds: the informed scheduler beats always five and always none; with noise it loses to it."""
    model, ids = drafting_model(5), some_ids(batch, 9, seed=8)
    plain = model.generate(ids, **GREEDY | {"use_mtp": False})

    def wrong(length, step):
        return step >= length % 4

    rates, drafter, inner = {}, model.drafter, type(model).draft

    def draft(self, tokens, cache, choose):
        informed.cache = cache
        return inner(self, tokens, cache, choose)

    monkeypatch.setattr(type(model), "draft", draft)
    for name, knows, curve in (
        ("informed", True, CONVEX),
        ("noise", False, CONVEX),
        ("five", True, FLAT),
        ("none", True, STEEP),
    ):
        monkeypatch.setattr(type(drafter), "confidence_logits", lambda s, *a, k=knows: informed(model, wrong, k)(*a))
        with planned(model, list(plain), wrong):
            out = model.generate(
                ids, **GREEDY, return_dict_in_generate=True, draft_scheduler=DSparkScheduler({batch: curve})
            )
        assert torch.equal(out.sequences, plain)
        report = out.draft_report
        seconds = report.steps * CONVEX[0] + sum(
            v * (CONVEX[i + 1] - CONVEX[i]) / batch for i, v in enumerate(report.verified)
        )
        rates[name] = (report.accepted + report.steps * batch) / seconds
        assert sum(report.accepted_by_position) == report.accepted and sum(report.verified) == report.drafted
        if name == "informed":
            assert report.calibration_error < 0.01 and report.accepted == report.drafted
            assert report.predicted_acceptance == pytest.approx(report.observed_acceptance, abs=0.02)
    print(f"batch {batch}: tokens per unit of time { ({n: round(r, 2) for n, r in rates.items()}) }")
    assert rates["informed"] > max(rates["five"], rates["none"]) and rates["noise"] < rates["informed"]
