"""Acceptance: greedy by equality, sampling by the ratio of probabilities, whose result has the model's distribution."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from modeling_dsv4.draft_scheduler import DSparkScheduler
from modeling_dsv4.draft_verification import accept_drafts, draw, process_rows
from tests.modeling.draft_models import drafting_model
from tests.modeling.tiny_model import PAD, some_ids

LEAST = 1e-4  # smallest p-value: seeds are fixed, and hundreds of tests would need to run to see one by chance


def fits(counts, probabilities):
    """p-value of a chi-squared test; rare outcomes are put together."""
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    assert not counts[expected == 0].any()
    common = expected >= 5
    observed, expected = (torch.cat([t[common], t[~common].sum()[None]]).double() for t in (counts, expected))
    statistic = ((observed - expected)[expected > 0].square() / expected[expected > 0]).sum()
    freedom = torch.tensor((int((expected > 0).sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def test_greedy_takes_what_the_model_would_have_chosen():
    scores = torch.eye(8)[[3, 1, 4, 1, 5]]
    for drafts, n in (([3, 1, 4, 1], 4), ([3, 1, 4, 2], 3), ([0, 1, 4, 1], 0), ([], 0)):
        tokens, matches = accept_drafts(scores[: len(drafts) + 1], torch.tensor(drafts, dtype=torch.long), None)
        assert matches == n and tokens.tolist() == [3, 1, 4, 1, 5][: n + 1]


def test_sampled_tokens_have_the_distribution_of_the_model():
    """First and second token of 20,000 blocks, whose drafts come from another distribution."""
    torch.manual_seed(0)
    target, proposal = (torch.randn(3, 8) * 1.5 for _ in range(2))
    counts = torch.zeros(2, 8, dtype=torch.long)
    for _ in range(20_000):
        drafts = draw(proposal[:2], True)
        tokens, matches = accept_drafts(target, drafts, proposal[:2])
        assert len(tokens) == matches + 1
        for place, token in enumerate(tokens[:2]):
            counts[place, token] += 1
    p_values = [fits(c, t.softmax(-1)) for c, t in zip(counts, target, strict=False)]
    print(f"p-values {p_values}, {int(counts[1].sum())} second tokens")
    assert min(p_values) > LEAST


def test_equal_distributions_are_always_accepted():
    torch.manual_seed(0)
    scores = torch.randn(4, 16)
    assert all(accept_drafts(scores, draw(scores[:3], True), scores[:3])[1] == 3 for _ in range(200))


def test_processors_see_every_row_at_its_own_length():
    rows = [torch.tensor([PAD, 3, 4]), torch.tensor([5, 6, 7, 8]), torch.tensor([9, 9])]
    scores = torch.randn(3, 16)
    processor = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
    got = process_rows(processor, rows, scores, [True, True, False], PAD)
    for row in range(2):
        torch.testing.assert_close(got[row], processor(rows[row][None], scores[row : row + 1].clone())[0])
    assert torch.equal(got[2], scores[2])
    assert process_rows(LogitsProcessorList(), rows, scores, [True] * 3, PAD) is scores


# ---- a whole model --------------------------------------------------------------------------------------------------------

SAMPLING = {
    "cool": {"temperature": 0.7, "top_k": 6},
    "warm": {"temperature": 1.3, "top_k": 6},
    "nucleus": {"temperature": 1.0, "top_k": 0, "top_p": 0.25},
}


@torch.no_grad()
def exact_distribution(model, ids, options, depth=3):
    """Probabilities of each of the first `depth` tokens, by following every continuation that can be drawn."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(options["temperature"])])
    prefixes, weights, result = ids, torch.ones(1, dtype=torch.float64), []
    for _ in range(depth):
        logits = model(prefixes, use_cache=False).logits[:, -1].float()
        logits = warpers(prefixes, logits)
        if options["top_k"]:
            last = logits.topk(options["top_k"]).values[:, -1:]
            logits = logits.masked_fill(logits < last, -torch.inf)
        if "top_p" in options:
            logits = TopPLogitsWarper(options["top_p"])(prefixes, logits)
        joint = weights[:, None] * logits.softmax(-1).double()
        result.append(joint.sum(0))
        rows, tokens = joint.nonzero(as_tuple=True)
        prefixes, weights = torch.cat([prefixes[rows], tokens[:, None]], 1), joint[rows, tokens]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("drafts", ["none", "all", "scheduled"])
def test_twenty_thousand_samples(name, drafts):
    """Chi-squared of the first three tokens; the scheduler prices positions by a confidence head that knows nothing."""
    model, ids, options = drafting_model(3), some_ids(1, 6, seed=3), SAMPLING[name]
    expected, extra = exact_distribution(model, ids, options), {}
    if drafts != "none":
        extra = {"use_mtp": True, "return_dict_in_generate": True}
    if drafts == "scheduled":
        extra["draft_scheduler"] = DSparkScheduler({1: [1.0, 1.1, 1.4, 2.0]})
    torch.manual_seed(1)
    samples = []
    for _ in range(20):
        out = model.generate(
            ids, do_sample=True, max_new_tokens=3, num_return_sequences=1000, pad_token_id=PAD, eos_token_id=None,
            **options, **extra,
        )  # fmt: skip
        samples.append((out if drafts == "none" else out.sequences)[:, 6:])
    samples = torch.cat(samples)
    p_values = [fits(samples[:, i].bincount(minlength=128), expected[i]) for i in range(3)]
    print(f"{name}, {drafts}: p-values {[f'{p:.3f}' for p in p_values]}")
    assert len(samples) == 20_000 and min(p_values) > LEAST


@pytest.mark.parametrize("name", SAMPLING)
def test_samples_with_drafts_can_be_drawn_by_the_model(name):
    """Several sequences per prompt; every token is one that the warped model may give."""
    model, ids, options = drafting_model(3), some_ids(1, 6, seed=3), SAMPLING[name]
    torch.manual_seed(1)
    out = model.generate(
        ids, do_sample=True, max_new_tokens=3, num_return_sequences=4, pad_token_id=PAD, eos_token_id=None, use_mtp=True,
        **options,
    )  # fmt: skip
    possible = exact_distribution(model, ids, options, depth=1)[0] > 0
    assert out.shape == (4, 9) and possible[out[:, 6]].all()
