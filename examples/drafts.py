"""What drafts save: a small V4.1 and its drafter are trained on short stories, and continue others in every way.

    python -m examples.drafts

A sentence follows from an animal and a place, and the animal and place of the next one follow from both by a table: most
words are easy to guess ahead, one or two in a sentence are not. The model learns the stories first, then the drafter
learns beside the frozen model. Stories that begin elsewhere are then decoded greedily without drafts, with none, all or a
scheduled number of the drafts verified, by the trained confidence head and by a random one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm
from transformers import TrainingArguments, set_seed
from transformers.utils import logging

from modeling_dsv4 import DSparkScheduler, Dsv41Config, Dsv41ForCausalLM, Dsv41TextConfig
from modeling_dsv4.draft_scheduler import DraftReport
from modeling_dsv4.ngram_hash import engram_primes
from modeling_dsv4.training import DraftTraining, Dsv4Trainer, RouterBiasCallback

ANIMALS = {
    "fox": "runs fast", "owl": "sits still", "cat": "sleeps well", "dog": "digs deep", "hen": "walks slowly",
    "bee": "hums along", "ant": "crawls about", "elk": "stands proud", "cow": "chews grass", "pig": "rolls over",
}  # fmt: skip
PLACES = {
    "bridge": "under the old", "tower": "on the tall", "river": "by the wide", "forest": "in the dark",
    "house": "behind the red", "garden": "near the green", "market": "at the busy", "meadow": "across the bright",
    "harbour": "beside the cold", "tunnel": "through the long",
}  # fmt: skip
PAD, START, NOISE = SPECIAL = ("<pad>", "<start>", "<noise>")
WORDS = [*SPECIAL, "the", "."]
WORDS += sorted(
    {word for parts in (ANIMALS, PLACES) for pair in parts.items() for word in " ".join(pair).split()} - {"the"}
)
KINDS, SENTENCES = 10, 5
STEPS, DRAFT_STEPS, BATCH = 130, 80, 16
LEARNING_RATES = {"model": 4e-3, "drafter": 8e-3}
STEEP = [1.0, 1.3, 1.6, 1.9, 2.2, 2.5]  # seconds of a step where each verified draft costs three tenths of one

# A window layer, a ratio-2 source with Engram, the ratio-1 candidate source, a layer that selects anew; one draft stage.
TEXT = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 48,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "compress_ratios": [0, 2, 1, 1, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "engram_layer_ids": [1],
    "engram_vocab_size": 500,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_compressed_vocab_size": len(WORDS),
    "engram_pad_token_id": WORDS.index(PAD),
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 5,
    "dspark_noise_token_id": WORDS.index(NOISE),
    "dspark_target_layer_ids": [1, 3],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
    "hc_sinkhorn_iters": 4,
}


class Stories:
    """Sentences that follow each other by a table; a third of the beginnings is held out."""

    def __init__(self, kinds: int):
        self.animals, self.places = list(ANIMALS)[:kinds], list(PLACES)[:kinds]
        self.following = random.Random(0).sample(range(kinds**2), kinds**2)
        self.held_out = [state for state in range(kinds**2) if state % 3 == 2]
        self.learned = [state for state in range(kinds**2) if state % 3 != 2]

    def ids(self, state: int, sentences: int) -> torch.Tensor:
        """Return the tokens `[S]` of a story that begins at a state."""
        words = [START]
        for _ in range(sentences):
            animal, place = self.animals[state % len(self.animals)], self.places[state // len(self.animals)]
            words += f"the {animal} {ANIMALS[animal]} {PLACES[place]} {place} .".split()
            state = self.following[state]
        return torch.tensor([WORDS.index(word) for word in words])

    def rows(self, count: int, seed: int) -> list[dict]:
        """Return `count` stories to learn from."""
        states = random.Random(seed).choices(self.learned, k=count)
        return [{"input_ids": ids, "labels": ids} for ids in (self.ids(state, SENTENCES) for state in states)]


def new_model(seed: int, **changed) -> Dsv41ForCausalLM:
    """Return a model with a drafter and fresh weights in float32; `changed` are keys of its text config."""
    text = TEXT | changed
    sizes = engram_primes(Dsv41TextConfig(**text, engram_num_embeddings=[1]))
    text["engram_num_embeddings"] = [sum(map(sum, size)) for size in sizes]
    special = {"pad_token_id": WORDS.index(PAD), "bos_token_id": WORDS.index(START), "eos_token_id": None}
    set_seed(seed)
    config = Dsv41Config(text_config=text, vision_config=None, image_token_id=None, **special)
    return Dsv41ForCausalLM(config, use_mtp=True)


def train(
    model, rows: list[dict], *, steps: int, seed: int, draft: DraftTraining | None = None, progress: bool = True
):
    """Train all weights of a model but the drafter's, or, with `draft`, the drafter."""
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            learning_rate=LEARNING_RATES["drafter" if draft else "model"],
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={"num_decay_steps": steps // 2},
            warmup_steps=min(10, steps // 4),
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=not progress,
            seed=seed,
        )
        trainer = Dsv4Trainer(
            model,
            arguments,
            train_dataset=rows,
            draft_training=draft,
            optimizer_settings={"report": False},
            callbacks=[] if draft else [RouterBiasCallback(1e-2)],
        )
        trainer.train()
    return model.eval()


class Verifying(DSparkScheduler):
    """A scheduler that keeps what it chose, or verifies `always` drafts."""

    def __init__(self, latency=None, temperature: float = 1.0, bias: float = 0.0, always: int | None = None):
        super().__init__(latency, temperature, bias)
        self.always, self.chosen = always, []

    def choose(self, confidence, limits):
        """As `DSparkScheduler.choose`."""
        fixed = self.always is not None
        lengths = [min(self.always, limit) for limit in limits] if fixed else super().choose(confidence, limits)
        self.chosen += lengths
        return lengths


@dataclass
class Decoded:
    """What decoding came to: the texts, forwards of the model, seconds, what became of drafts, drafts of every step."""

    texts: list[torch.Tensor] = field(default_factory=list)
    forwards: int = 0
    seconds: float = 0.0
    report: DraftReport = field(default_factory=DraftReport)
    verified: list[int] = field(default_factory=list)

    def rate(self, curve: list[float]) -> float:
        """Tokens per second of the drafting steps, if they took the seconds of a curve."""
        tokens = self.report.accepted + self.report.steps
        return tokens / sum(curve[length] for length in self.verified)


def decode(model, prompts: list[torch.Tensor], tokens: int, scheduler: Verifying | None = None) -> Decoded:
    """Continue every prompt greedily by `tokens` tokens, with drafts if there is a scheduler."""
    found = Decoded(report=DraftReport(scheduler=scheduler))
    options = {"use_mtp": True, "draft_scheduler": scheduler} if scheduler else {}

    def count(*_):
        found.forwards += 1

    hook = model.model.register_forward_hook(count)
    start = time.perf_counter()
    for prompt in prompts:
        out = model.generate(
            prompt[None], max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, **options
        )
        found.texts.append(out.sequences[0])
        if scheduler:
            for name in ("steps", "drafted", "accepted", "confidences", "outcomes"):
                setattr(found.report, name, getattr(found.report, name) + getattr(out.draft_report, name))
    found.seconds = time.perf_counter() - start
    hook.remove()
    found.verified = scheduler.chosen if scheduler else []
    return found


def randomise_confidence(model, seed: int = 0) -> torch.Tensor:
    """Replace the weights of the confidence head by noise of the same length; return what they were."""
    weight = model.drafter[-1].confidence_head.proj.weight
    learned = weight.detach().clone()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        weight.copy_(noise * learned.norm() / noise.norm())
    return learned


def compare(
    model, stories: Stories, latencies: dict[str, list[float]], *, prompts: int, tokens: int, progress: bool = True
) -> dict[str, dict[str, Decoded]]:
    r"""Decode held-out stories in every way.

    Args:
        model, stories: trained on each other.
        latencies (`dict[str, list[float]]`): name -> seconds of a step by verified drafts.
        prompts, tokens (`int`): stories that are continued, and by how much. As many others are for fitting.

    Returns:
        `{curve: {way: Decoded}}`; ways that need no curve are the same in each.
    """
    asked = [stories.ids(state, 1) for state in stories.held_out[: 2 * prompts]]
    known, asked = asked[::2], asked[1::2]
    bar = tqdm(total=5 + 4 * len(latencies), desc="Decoding", disable=not progress)

    def run(texts, scheduler):
        result = decode(model, texts, tokens, scheduler)
        bar.update()
        return result

    ways = {"no drafts": None, "always 0": Verifying(always=0), "always 5": Verifying(always=5)}
    fixed = {name: run(asked, scheduler) for name, scheduler in ways.items()}
    found = {curve: dict(fixed) for curve in latencies}
    for head in ("trained", "noise"):
        learned = randomise_confidence(model) if head == "noise" else None
        fit = DSparkScheduler().fit(run(known, Verifying(always=5)).report)
        for curve, seconds in latencies.items():
            ways = found[curve]
            ways[f"scheduler, {head} head"] = run(asked, Verifying({1: seconds}))
            scheduler = Verifying({1: seconds}, fit.temperature, fit.bias)
            ways[f"scheduler, {head} head, fitted"] = run(asked, scheduler)
        if learned is not None:
            model.drafter[-1].confidence_head.proj.weight.data.copy_(learned)
    bar.close()
    return found


def table(found: dict[str, Decoded], curve: list[float]) -> str:
    """Return the ways to decode as lines of text; tokens per second are those of a curve of seconds by verified drafts."""
    rows = [["", "accepted", "verified", "error", "forwards", "saved", "tokens/s", "seconds"]]
    for name, way in found.items():
        steps, error = way.report.steps, way.report.calibration_error
        drafted = [way.report.accepted / steps, sum(way.verified) / steps, way.rate(curve)] if steps else []
        accepted, verified, rate = [f"{value:.2f}" for value in drafted] or [""] * 3
        saved = f"{1 - way.forwards / found['no drafts'].forwards:.0%}"
        error = "" if error is None else f"{error:.3f}"
        rows.append([name, accepted, verified, error, str(way.forwards), saved, rate, f"{way.seconds:.1f}"])
    return "\n".join(f"{name:<32}" + "".join(f"{cell:>10}" for cell in cells) for name, *cells in rows)


def main(argv: list[str] | None = None) -> int:
    """Run it; 0 when done."""
    parser = argparse.ArgumentParser(prog="python -m examples.drafts", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    seed = parser.parse_args(argv).seed
    logging.disable_progress_bar()
    stories, model = Stories(KINDS), new_model(seed)
    train(model, stories.rows(BATCH * STEPS, seed), steps=STEPS, seed=seed)
    rows = stories.rows(BATCH * DRAFT_STEPS, seed + 1)
    train(model, rows, steps=DRAFT_STEPS, seed=seed, draft=DraftTraining("frozen", anchors=8))
    measured = DSparkScheduler().calibrate(model, prompt_length=32, repeats=9).latency[1]
    latencies = {"as measured": measured, "where verifying is dear": STEEP}
    found = compare(model, stories, latencies, prompts=4, tokens=45)
    texts = found["as measured"]["no drafts"].texts
    print("\na story:", " ".join(WORDS[i] for i in texts[0][1:]))
    print(
        "accepted, verified: drafts a step. error: between predicted and observed acceptance. tokens/s: by the curve."
    )
    for name, ways in found.items():
        print(f"\nseconds of a step by verified drafts, {name}: {', '.join(f'{t:.3g}' for t in latencies[name])}")
        print(table(ways, latencies[name]))
        assert all(torch.equal(a, b) for way in ways.values() for a, b in zip(way.texts, texts, strict=True))
    print("\nevery way gave the same tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
