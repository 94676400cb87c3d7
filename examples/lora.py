"""Adapters over a packed checkpoint with TRL's `SFTTrainer`: conversations with and without an image.

    python -m examples.lora                 on the demo's own checkpoint (random weights)
    python -m examples.lora CKPT            on any V4.1 folder in the released layout

The base stays packed in FP8 and FP4; factors go to the attention projections and to every routed expert. The examples are
learned by heart: what is shown is that adapters reach every part, are saved, and load again over the packed base.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoProcessor, set_seed
from transformers.utils import logging

import processing_dsv4  # noqa: F401  (registers the processor)
from examples.demo import given_or_own
from examples.image_demo import PHOTOGRAPHS, photographs, positive
from modeling_dsv4 import Dsv41ForConditionalGeneration
from modeling_dsv4.training import Dsv4DataCollator, Dsv4OptimizerFactory, lora_layers

TARGETS = ["q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj", "experts"]
ANSWERS = dict(zip(PHOTOGRAPHS, ("a Chinese temple", "red and yellow"), strict=True))
TEXTS = {"Who runs past the mill?": "The river.", "Who reads at night?": "The miller."}
STEPS, LEARNING_RATE = 40, 1e-2
NEW_TOKENS = 24


def conversations() -> list[list[dict]]:
    """Return two conversations about photographs and two of text alone."""
    pictures = photographs()
    asked = [
        ([{"type": "image", "image": pictures[name]}, {"type": "text", "text": question}], ANSWERS[name])
        for name, question in PHOTOGRAPHS.items()
    ]
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in [*asked, *TEXTS.items()]
    ]


def endless() -> Iterator[dict]:
    """Yield the conversations again and again, as the collator takes them."""
    return ({"messages": conversation} for conversation in cycle(conversations()))


@torch.no_grad()
def answer(model, processor, conversation: list[dict], new_tokens: int = NEW_TOKENS) -> str:
    """Answer the question of a conversation greedily, in at most `new_tokens` tokens."""
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    chat = processor.apply_chat_template(conversation[:1], enable_thinking=False, **options).to(model.device)
    prompt = chat["input_ids"][0]
    output = model.generate(**chat, max_new_tokens=new_tokens, do_sample=False)[0]
    return processor.parse_response(output[len(prompt) :], prefix=prompt)["content"]


def train(model, processor, adapter: Path, *, steps: int = STEPS, progress: bool = True) -> list[float]:
    r"""Train adapters on the conversations and save them.

    Args:
        model (`Dsv41ForConditionalGeneration`): packed; wrapped in place.
        processor (`Dsv41Processor`): of the same folder.
        adapter (`Path`): folder to save to.
        steps (`int`, *optional*), progress (`bool`, *optional*).

    Returns:
        `list[float]`: the loss of every step.

    Raises:
        OSError: if TRL is not installed.
    """
    try:
        from datasets import IterableDataset
        from trl import SFTConfig, SFTTrainer
    except ImportError as error:
        raise OSError(f"SFTTrainer is TRL's; pip install trl ({error})") from error
    settings = SFTConfig(
        str(adapter.with_name("run")),
        max_steps=steps,
        per_device_train_batch_size=2,
        logging_steps=1,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        activation_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=not progress,
        # The collator renders conversations itself, images included.
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = SFTTrainer(
        model,
        settings,
        train_dataset=IterableDataset.from_generator(endless),
        data_collator=Dsv4DataCollator(processor, chat_options={"enable_thinking": False}),
        processing_class=processor.tokenizer,
        peft_config=lora_layers(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS)),
        optimizer_cls_and_kwargs=(Dsv4OptimizerFactory, {"lr": LEARNING_RATE, "report": False}),
    )
    trainer.train()
    trainer.save_model(adapter)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def load(folder: Path) -> Dsv41ForConditionalGeneration:
    """Load a checkpoint packed; in float32, so that small updates of the adapters count."""
    return Dsv41ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def main(argv: list[str] | None = None) -> int:
    """Run it; 0 when done, 1 when the folder is no checkpoint or something is not installed."""
    parser = argparse.ArgumentParser(prog="python -m examples.lora", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", metavar="CKPT", help="V4.1 folder (default: the demo's own)")
    parser.add_argument("--steps", type=positive, default=STEPS, metavar="N", help=f"default: {STEPS}")
    arguments = parser.parse_args(argv)
    logging.disable_progress_bar()
    set_seed(0)
    try:
        folder = given_or_own(arguments.checkpoint)
        processor, base = AutoProcessor.from_pretrained(folder), load(folder)
        examples = conversations()
        before = [answer(base, processor, example) for example in examples]
        with TemporaryDirectory() as temporary:
            adapter = Path(temporary) / "adapter"
            losses = train(base, processor, adapter, steps=arguments.steps)
            size = sum(file.stat().st_size for file in adapter.glob("*.safetensors"))
            base = load(folder)
            adapted = PeftModel.from_pretrained(base, adapter, config=lora_layers(base, adapter)).eval()
        # Two steps see all conversations once: those about photographs, then those of text alone.
        first, last = (sum(some) / len(some) for some in (losses[:2], losses[-2:]))
        print(f"loss {first:.2f} -> {last:.3f} in {len(losses)} steps; adapter {size / 1e6:.1f} MB, loaded again")
        for example, was in zip(examples, before, strict=True):
            question = example[0]["content"]
            text = question if isinstance(question, str) else question[-1]["text"]
            print(f"\n{text}\n  before  {was!r}\n  after   {answer(adapted, processor, example)!r}")
    except (OSError, ValueError) as error:
        print(f"lora: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
