"""The part of `make demo` that learns: a small V4.1 is trained from scratch to read handwritten digits.

    python -m examples.digits                        train, save packed, reload, answer, draw
    python -m examples.digits --optimizer adamw      the same with AdamW for every parameter

The digits are the 1,797 scans that scikit-learn installs, four fifths to learn from, as chats of a question, an image and
an answer in words. All mechanisms are on: Engram, compressed attention with Reindex and candidates, hyper-connections,
routed experts with a bias per modality, a vision tower from scratch, and every rounding that the released layout asks
for. What is trained in float is saved packed (FP8, FP4), loaded packed, and asked about digits it has not seen.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image, ImageDraw
from tqdm import tqdm
from transformers import AutoProcessor, TrainingArguments, set_seed
from transformers.utils import logging

import processing_dsv4  # noqa: F401  (registers the processor)
from convert.released import to_released
from convert.shards import write_json
from convert.small_tokenizer import small_tokenizer_files
from convert.tiny import released_config_dict, small_config
from examples.image_demo import positive
from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41ForConditionalGeneration
from modeling_dsv4.training import (
    Dsv4DataCollator,
    Dsv4Trainer,
    QatScheduleCallback,
    RouterBiasCallback,
)

OWN_FOLDER = Path(__file__).resolve().parents[1] / ".demo" / "digits"
QUESTION = "Which digit?"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LEARNING_RATES = {"muon": 4e-3, "adamw": 2e-3}
STEPS, BATCH = 450, 16
BIAS_SPEED = 1e-2  # ten times the report's: there are hundreds of steps, not millions

# A window layer, a ratio-2 source with Engram, its reader, the ratio-1 candidate source, and a layer that selects anew.
TEXT = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 2, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "engram_layer_ids": [1],
    "engram_vocab_size": 500,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 0,
    "dspark_target_layer_ids": [],
}
VISION = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_image_tokens": 64,
    "min_pixels": 84 * 84,
}


def digits() -> tuple[list[tuple[Image.Image, str]], list[tuple[Image.Image, str]]]:
    r"""Return the images to learn from and the held-out fifth, each with its word.

    Raises:
        OSError: if scikit-learn, which ships them, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise OSError(f"the digits are scikit-learn's; pip install scikit-learn ({error})") from error
    found = load_digits()
    order = torch.randperm(len(found.images), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [
        (Image.fromarray((found.images[i] * (255 / 16)).astype("uint8")).convert("RGB"), WORDS[found.target[i]])
        for i in order
    ]
    held_out = len(pairs) // 5
    return pairs[held_out:], pairs[:held_out]


def chat(processor, image: Image.Image, answer: str | None = None) -> dict:
    """Return the tensors of a question about an image, or of the whole conversation with its answer."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        enable_thinking=False,
        add_generation_prompt=answer is None,
        return_assistant_tokens_mask=answer is not None,
    )


def make_folder(folder: Path):
    """Write tokenizer and config.json into a new folder; return the configuration and the processor it opens with."""
    folder.mkdir(parents=True, exist_ok=True)
    files = small_tokenizer_files()
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    config = small_config(files, TEXT, VISION)
    write_json(folder / "config.json", released_config_dict(config))
    return config, AutoProcessor.from_pretrained(folder)


def new_model(config, processor, seed: int) -> Dsv41ForConditionalGeneration:
    """Return a model with fresh weights in float32."""
    set_seed(seed)
    model = Dsv41ForConditionalGeneration(config)
    model.set_tokenizer(processor.tokenizer)
    return model


def train(model, processor, examples: list[dict], *, optimizer: str, steps: int, seed: int, progress: bool = True):
    r"""Train all weights; the second half of the steps rounds weights and inputs as the packed folder will.

    Args:
        model (`Dsv41ForConditionalGeneration`): float; changed in place. processor (`Dsv41Processor`): of the same folder.
        examples (`list[dict]`): see `chat`.
        optimizer (`str`): "muon" (and Sinkhorn, by the rules of `build_param_groups`) or "adamw" for everything.
        steps, seed (`int`). progress (`bool`, *optional*, defaults to `True`): show a bar.

    Returns:
        `list[float]`: losses, one every ten steps.
    """
    settings = {"report": False, "vision_lr_scale": 1.0}
    if optimizer == "adamw":
        settings["rules"] = {"": {"algorithm": "adamw"}}
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            learning_rate=LEARNING_RATES[optimizer],
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={"num_decay_steps": steps // 2},
            warmup_steps=min(10, steps // 4),
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=not progress,
            remove_unused_columns=False,
            seed=seed,
        )
        trainer = Dsv4Trainer(
            model,
            arguments,
            train_dataset=examples,
            data_collator=Dsv4DataCollator(processor),
            optimizer_settings=settings,
            callbacks=[
                RouterBiasCallback(BIAS_SPEED),
                QatScheduleCallback(steps // 2, quantization=Dsv4QuantizationConfig()),
            ],
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def answers(
    model, processor, images: list[Image.Image], *, kv_format: str = "packed", progress: bool = True
) -> list[str]:
    """Ask about every image, in batches, through `generate` with the given form of the cache; return what was said."""
    said = []
    prompts = [chat(processor, image) for image in images]
    for start in tqdm(range(0, len(prompts), 64), desc=f"answers, {kv_format} cache", disable=not progress):
        rows = prompts[start : start + 64]  # all of one length: one question, one size of image
        batch = {key: torch.cat([row[key] for row in rows]).to(model.device) for key in rows[0]}
        out = model.generate(**batch, do_sample=False, max_new_tokens=8, kv_format=kv_format)
        length = batch["input_ids"].shape[1]
        said += [processor.parse_response(row[length:], prefix=row[:length])["content"] for row in out]
    return said


def save_packed(model, source: Path, folder: Path) -> None:
    """Save the float weights beside the tokenizer in `source`, and all of it in the released layout in `folder`."""
    model.save_pretrained(source)
    shutil.rmtree(folder, ignore_errors=True)
    to_released(source, folder, progress=False)


def draw(images: list[Image.Image], said: list[str], words: list[str], file: Path, columns: int = 12) -> None:
    """Draw images with what was said about them, wrong answers in red."""
    side, line = 72, 14
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * side, rows * (side + line)), "white")
    pen = ImageDraw.Draw(sheet)
    for place, (image, answer, word) in enumerate(zip(images, said, words, strict=True)):
        x, y = place % columns * side, place // columns * (side + line)
        sheet.paste(image.resize((side - 4, side - 4), Image.Resampling.NEAREST), (x + 2, y + 2))
        pen.text((x + side // 2, y + side), answer[:12], fill="black" if answer == word else "red", anchor="ma")
    sheet.save(file)


@dataclass
class Outcome:
    """What one training gave: losses at start and end, share of right answers for each form of the cache, costs."""

    optimizer: str
    seed: int
    losses: list[float]
    accuracy: dict[str, float]
    seconds: float
    cpu_seconds: float

    def __str__(self) -> str:
        shares = ", ".join(f"{100 * share:.1f} % ({kv} cache)" for kv, share in self.accuracy.items())
        return (
            f"{self.optimizer:<6} seed {self.seed}: loss {self.losses[0]:.2f} -> {self.losses[-1]:.3f}, held-out digits "
            f"right after packing: {shares}; trained in {self.seconds:.0f} s ({self.cpu_seconds:.0f} s of CPU)"
        )


def learn(
    folder: Path, *, optimizer: str = "muon", steps: int = STEPS, seed: int = 0, progress: bool = True
) -> Outcome:
    r"""Train, save packed into `folder`, reload, answer the held-out digits with both forms of the cache, and draw them.

    Args:
        folder (`Path`): replaced by the checkpoint in the released layout, and `digits.png`.
        optimizer (`str`): "muon" or "adamw". steps, seed (`int`). progress (`bool`): show bars.

    Raises:
        OSError: if scikit-learn is not installed.
    """
    learned, held_out = digits()
    with TemporaryDirectory() as source:
        config, processor = make_folder(Path(source))
        model = new_model(config, processor, seed)
        examples = [chat(processor, image, word) for image, word in learned]
        start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
        losses = train(model, processor, examples, optimizer=optimizer, steps=steps, seed=seed, progress=progress)
        seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_utime - used
        save_packed(model, Path(source), folder)
    processor = AutoProcessor.from_pretrained(folder)
    model = Dsv41ForConditionalGeneration.from_pretrained(folder, dtype="auto").eval()
    images, words = zip(*held_out, strict=True)
    accuracy = {}
    for kv_format in ("packed", "float"):
        said = answers(model, processor, images, kv_format=kv_format, progress=progress)
        accuracy[kv_format] = sum(map(str.__eq__, said, words)) / len(words)
    draw(images, said, words, folder / "digits.png")
    return Outcome(optimizer, seed, losses, accuracy, seconds, used)


def main(argv: list[str] | None = None) -> int:
    """Run it; 0 when done, 1 when the digits are not installed."""
    parser = argparse.ArgumentParser(prog="python -m examples.digits", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--optimizer", choices=tuple(LEARNING_RATES), default="muon", help="default: muon, with Sinkhorn for tables"
    )
    parser.add_argument("--steps", type=positive, default=STEPS, metavar="N", help=f"default: {STEPS}")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--compare", action="store_true", help="both optimizers, three seeds each, nothing kept")
    arguments = parser.parse_args(argv)
    logging.disable_progress_bar()
    runs = [(arguments.optimizer, arguments.seed)]
    if arguments.compare:
        runs = [(optimizer, seed) for seed in range(3) for optimizer in LEARNING_RATES]
    try:
        for optimizer, seed in runs:
            with TemporaryDirectory() as temporary:
                folder = Path(temporary) if arguments.compare else OWN_FOLDER
                print(learn(folder, optimizer=optimizer, steps=arguments.steps, seed=seed))
    except OSError as error:
        print(f"digits: {error}", file=sys.stderr)
        return 1
    if not arguments.compare:
        print(f"the checkpoint and a picture of all answers: {OWN_FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
