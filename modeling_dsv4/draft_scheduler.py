"""How many draft tokens a step verifies, and what became of them.

A step yields one token and the accepted prefix of the verified drafts. The confidence head gives each position the
probability that it is accepted if those before it are; their running product is the survival of the prefix. The
scheduler adds positions, the likeliest first, as long as tokens per second rise by a measured latency curve.

Whether a position is verified must not depend on the token drafted there, or sampling would no longer have the model's
distribution. The confidence of a position is known before its token is drawn, and positions are added in the order in
which a row reveals them; so no look at later positions is taken, and latency is made convex, for which the first stop
is the best one.

Source: V4.1 report section 2.4.3.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers.utils import logging

CALIBRATION_BINS = 10
FIT_STEPS, FIT_DECAY = 100, 1e-5


@dataclass
class DraftReport:
    r"""What the drafts of a call of `generate` came to; position i is the i-th token of a draft.

    Args:
        steps (`int`): verifying forwards. drafted (`int`): tokens proposed; accepted (`int`): of them, kept.
        verified, accepted_by_position (lists of `int`): times that a position was verified, and kept.
        predicted (list of `float`): sum over the verified of the predicted survival.
        confidences, outcomes: of every position whose predecessors were accepted, its confidence logit and whether it was.
        scheduler (`DSparkScheduler`): says what a confidence logit predicts.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    outcomes: list[bool] = field(default_factory=list)
    scheduler: DSparkScheduler = field(default_factory=lambda: DSparkScheduler(), repr=False)

    @property
    def observed_acceptance(self) -> list[float]:
        """Share of the verified tokens of each position that were kept."""
        return [a / max(v, 1) for a, v in zip(self.accepted_by_position, self.verified, strict=True)]

    @property
    def predicted_acceptance(self) -> list[float] | None:
        """The same as the confidence head predicted it, `None` without one."""
        if not self.confidences:
            return None
        return [p / max(v, 1) for p, v in zip(self.predicted, self.verified, strict=True)]

    @property
    def calibration_error(self) -> float | None:
        """Mean distance of predicted and observed conditional acceptance over ten bins, weighted by their size."""
        if not self.confidences:
            return None
        predicted = self.scheduler.acceptance(torch.tensor(self.confidences))
        observed = torch.tensor(self.outcomes, dtype=predicted.dtype)
        bins = (predicted * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
        gaps = torch.zeros(CALIBRATION_BINS, dtype=predicted.dtype).index_add(0, bins, predicted - observed)
        return float(gaps.abs().sum() / len(predicted))

    def add(self, verified: int, accepted: int, confidence: torch.Tensor | None, cut: bool = False) -> None:
        r"""Count the drafts of one row in one step.

        Args:
            verified, accepted (`int`): drafts that were fed, and kept.
            confidence (`torch.Tensor` of shape `[K]`, *optional*): logits of the row.
            cut (`bool`, *optional*): the row ended at the last kept token, so nothing is known of the one after it.
        """
        missing = verified - len(self.verified)
        for counts in (self.verified, self.accepted_by_position, self.predicted):
            counts.extend([0] * missing)
        self.drafted += verified
        self.accepted += accepted
        known = accepted if cut else verified
        for position in range(known):
            self.verified[position] += 1
            self.accepted_by_position[position] += position < accepted
        if confidence is None:
            return
        survival = self.scheduler.survival(confidence[None])[0]
        for position in range(known):
            self.predicted[position] += float(survival[position])
        tested = min(known, accepted + 1)
        self.confidences += confidence[:tested].tolist()
        self.outcomes += [position < accepted for position in range(tested)]


class DSparkScheduler:
    r"""Chooses how many drafts each row verifies; give it to `generate(..., use_mtp=True, draft_scheduler=...)`.

    Without a latency curve every draft is verified. A confidence head learns what sampling keeps of a draft; greedy decoding
    keeps more, so `fit` the scheduler to a report of the decoding it is for.

    Args:
        latency (`dict[int, list[float]]`, *optional*): batch size -> seconds of a step that verifies 0, 1, … drafts per
            row; `calibrate` measures it.
        temperature, bias (`float`, *optional*): acceptance = sigmoid(logit / temperature + bias); `fit` sets them.

    Raises:
        ValueError: for a curve of fewer than two lengths, times that are not positive, or a temperature that is not.
    """

    def __init__(
        self, latency: dict[int, list[float]] | None = None, temperature: float = 1.0, bias: float = 0.0
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature!r}; accepted: a number > 0.")
        for batch, times in (latency or {}).items():
            if batch < 1 or len(times) < 2 or not all(t > 0 for t in times):
                raise ValueError(f"latency[{batch!r}] is {times!r}; accepted: batch size -> two or more seconds > 0.")
        self.latency, self.temperature, self.bias = dict(latency or {}), temperature, bias

    def acceptance(self, confidence: torch.Tensor) -> torch.Tensor:
        """Return the probability of acceptance given that of the drafts before, for confidence logits `[...]`."""
        return torch.sigmoid(confidence.double() / self.temperature + self.bias)

    def survival(self, confidence: torch.Tensor) -> torch.Tensor:
        """Return the probability that a draft and all before it are accepted, for confidence logits `[B, K]`."""
        return self.acceptance(confidence).cumprod(-1)

    def choose(self, confidence: torch.Tensor | None, limits: list[int]) -> list[int]:
        r"""Return how many drafts each row verifies.

        Args:
            confidence (`torch.Tensor` of shape `[B, K]`, *optional*): logits; without them each row takes its limit.
            limits (list of `int`): most drafts of each row, -1 for a row that is finished.
        """
        lengths = [max(limit, 0) for limit in limits]
        active = sum(limit >= 0 for limit in limits)
        if confidence is None or not self.latency or not active:
            return lengths
        survival, limits = self.survival(confidence).tolist(), lengths
        curve, rows = self._curve(len(limits)), len(limits)
        lengths, expected, seconds = [0] * rows, float(active), _at(curve, 0)
        heads = [(-survival[row][0], row) for row in range(rows) if limits[row]]
        heapq.heapify(heads)
        while heads:
            gain, row = heapq.heappop(heads)
            longer = _at(curve, (sum(lengths) + 1) / rows)
            if (expected - gain) * seconds <= expected * longer:
                break
            expected, seconds = expected - gain, longer
            lengths[row] += 1
            if lengths[row] < limits[row]:
                heapq.heappush(heads, (-survival[row][lengths[row]], row))
        return lengths

    def _curve(self, batch: int) -> list[tuple[float, float]]:
        """Corners (drafts per row, seconds) of the convex latency curve of the nearest measured batch size."""
        nearest = min(self.latency, key=lambda size: (abs(size - batch), size))
        return convex_corners(self.latency[nearest])

    @torch.no_grad()
    def calibrate(self, model, batch_sizes=(1,), prompt_length: int = 128, repeats: int = 5) -> DSparkScheduler:
        r"""Measure how long a step takes by batch size and verified length, and return the scheduler.

        Args:
            model: a language model of this package with a drafter.
            batch_sizes (sequence of `int`): to measure; other sizes take the nearest one's curve.
            prompt_length (`int`, *optional*): tokens in the cache. repeats (`int`, *optional*): the median is taken.

        Raises:
            ValueError: if the model has no drafter, or a number is not positive.
        """
        drafter = model.drafter
        if drafter is None:
            raise ValueError("model has no drafter; accepted: a model loaded with use_mtp=True.")
        for name, value in (
            ("prompt_length", prompt_length),
            ("repeats", repeats),
            *(("batch_sizes", b) for b in batch_sizes),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value!r}; accepted: 1 or more.")
        longest, device = drafter.block_size, model.device
        generator = torch.Generator().manual_seed(0)
        vocab = model.config.get_text_config().vocab_size
        image, measured = getattr(model.config, "image_token_id", None), {batch: [] for batch in batch_sizes}
        jobs = [(batch, length) for batch in batch_sizes for length in range(longest + 1)]
        for batch, length in logging.tqdm(jobs, desc="Measuring draft steps", disable=None):
            ids = torch.randint(vocab, (batch, prompt_length + length + 1), generator=generator).to(device)
            if image is not None:  # an image token asks for an image
                ids = ids.masked_fill(ids == image, (image + 1) % vocab)
            cache = model._new_cache()
            model(ids[:, :prompt_length], cache=cache, logits_to_keep=1)
            cache.activate_past_recording()
            times = [self._time_step(model, cache, ids[:, prompt_length:]) for _ in range(repeats + 1)][1:]
            measured[batch].append(sorted(times)[len(times) // 2])
        self.latency = self.latency | measured
        return self

    @staticmethod
    def _time_step(model, cache, ids: torch.Tensor) -> float:
        """Seconds of one verification of `ids` `[B, length + 1]` and the draft after it; the cache is left as it was."""
        _wait(ids.device)
        start = time.perf_counter()
        model(ids, cache=cache, logits_to_keep=ids.shape[1])
        model.draft(ids[:, -1], cache, lambda step, logits: logits.argmax(-1))
        cache.crop(-ids.shape[1])
        _wait(ids.device)
        return time.perf_counter() - start

    def fit(self, report: DraftReport) -> DSparkScheduler:
        r"""Set `temperature` and `bias` to the likeliest values for what a report observed, and return the scheduler.

        Where more confidence did not mean more acceptance, it is disregarded: every draft then has the observed share.

        Args:
            report (`DraftReport`): of a generation with a confidence head, with accepted and rejected drafts.

        Raises:
            ValueError: if it holds no confidences, or drafts of one outcome only.
        """
        if len(set(report.outcomes)) < 2:
            raise ValueError("report has no accepted and rejected drafts with confidences; accepted: both kinds.")
        outcomes, x = (torch.tensor(v, dtype=torch.float64) for v in (report.outcomes, report.confidences))
        mean, spread = x.mean(), x.std().clamp(min=1e-9)
        share = torch.logit(outcomes.mean())
        # Logistic regression with a little weight decay, which keeps the slope of separable outcomes finite.
        weights = torch.stack([torch.zeros_like(share), share]).requires_grad_()
        optimizer = torch.optim.LBFGS([weights], max_iter=FIT_STEPS, line_search_fn="strong_wolfe")

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            logits = weights[0] * (x - mean) / spread + weights[1]
            value = F.binary_cross_entropy_with_logits(logits, outcomes) + FIT_DECAY * weights[0].square()
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        slope, level = weights.detach().tolist()
        slope /= float(spread)
        if slope > 0:
            self.temperature, self.bias = 1 / slope, level - slope * float(mean)
        else:
            self.temperature, self.bias = math.inf, float(share)
        return self


def convex_corners(times: list[float]) -> list[tuple[float, float]]:
    """Return the corners (index, value) of the largest convex, rising curve that lies nowhere above `times`."""
    rising = list(times)
    for i in range(len(rising) - 2, -1, -1):
        rising[i] = min(rising[i], rising[i + 1])
    corners: list[tuple[float, float]] = []
    for point in ((float(i), t) for i, t in enumerate(rising)):
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-1], point):
            corners.pop()
        corners.append(point)
    return corners


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def _at(corners: list[tuple[float, float]], x: float) -> float:
    """Value of the curve at `x`; beyond its end it goes on straight."""
    pairs = list(zip(corners, corners[1:], strict=False))
    a, b = next((pair for pair in pairs if x <= pair[1][0]), pairs[-1])
    return a[1] + _slope(a, b) * (x - a[0])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
