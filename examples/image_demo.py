"""The pictures of `make demo`: two real photographs, a question each, and what an image costs.

    python -m examples.image_demo CKPT      any folder in the released layout

The photographs are those that scikit-learn installs (`PHOTOGRAPHS`), so nothing is downloaded. Times are of one image
each: `process` from pixels to patches and prompt, `encode` through vision tower and projector, `answer` for the prompt
and all new tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoProcessor
from transformers.utils import logging

import processing_dsv4  # noqa: F401  (registers the processor)
from modeling_dsv4 import Dsv41ForConditionalGeneration

# Name of the photograph -> question.
PHOTOGRAPHS = {"china.jpg": "What kind of building is this?", "flower.jpg": "Which colours does this flower have?"}
NEW_TOKENS = 32


def positive(text: str) -> int:
    """Read a command-line number of 1 or more."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def checkpoint_folder(path: str | Path) -> Path:
    """Return a folder with a config.json; `OSError` for another name, which transformers would look up on the Hub."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise OSError(f"{folder} has no config.json; accepted: a folder in the released layout.")
    return folder


@dataclass
class PictureAnswer:
    """What one photograph gave: sizes in pixels, patches and prompt tokens, times in seconds, and the answer."""

    name: str
    width: int
    height: int
    grid: tuple[int, int]
    text_tokens: int
    image_tokens: int
    process: float
    encode: float
    answer: float
    question: str
    text: str


def photographs() -> dict[str, Image.Image]:
    r"""Return the photographs by name.

    Raises:
        OSError: if scikit-learn, which ships them, is not installed.
    """
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise OSError(f"the photographs are scikit-learn's; pip install scikit-learn ({error})") from error
    found = load_sample_images()
    names = [Path(name).name for name in found.filenames]
    return {name: Image.fromarray(pixels) for name, pixels in zip(names, found.images, strict=True)}


def ask(model, processor, name: str, image: Image.Image, new_tokens: int = NEW_TOKENS) -> PictureAnswer:
    r"""Ask the question of one photograph, greedily and without thinking first.

    Args:
        model (`Dsv41ForConditionalGeneration`) and processor (`Dsv41Processor`): of the same folder.
        name (`str`): a key of `PHOTOGRAPHS`.
        image (`PIL.Image.Image`): the photograph.
        new_tokens (`int`, *optional*, defaults to 32): tokens of the answer, at most.
    """
    question = PHOTOGRAPHS[name]
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    times = [time.perf_counter()]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
        enable_thinking=False,
    ).to(model.device)
    times.append(time.perf_counter())
    pictures = {key: inputs.pop(key) for key in processor.image_processor.model_input_names}
    with torch.no_grad():
        encoded = model.get_image_features(**pictures)
    times.append(time.perf_counter())
    out = model.generate(**inputs, mm_encoder_outputs={"image": encoded}, do_sample=False, max_new_tokens=new_tokens)
    times.append(time.perf_counter())
    ids = inputs["input_ids"][0]
    image_tokens = int((ids == model.config.image_token_id).sum())
    process, encode, answer = (after - before for before, after in zip(times, times[1:], strict=False))
    return PictureAnswer(
        name=name,
        width=image.width,
        height=image.height,
        grid=tuple(pictures["image_grid_hw"][0].tolist()),
        text_tokens=len(ids) - image_tokens,
        image_tokens=image_tokens,
        process=process,
        encode=encode,
        answer=answer,
        question=question,
        text=processor.parse_response(out[0, len(ids) :], prefix=ids)["content"],
    )


def ask_all(folder: Path, *, new_tokens: int = NEW_TOKENS) -> list[PictureAnswer]:
    r"""Load a checkpoint packed, with its processor, and ask about every photograph.

    Args:
        folder (`Path`): released layout.
        new_tokens (`int`, *optional*, defaults to 32): tokens of an answer, at most.

    Raises:
        OSError, ValueError: if the folder is not such a checkpoint, or scikit-learn is not installed.
    """
    checkpoint_folder(folder)
    images = photographs()
    processor = AutoProcessor.from_pretrained(folder)
    model = Dsv41ForConditionalGeneration.from_pretrained(folder, dtype="auto").eval()
    # The first conversation makes a copy of the tokenizer without control tokens; no image should pay for that.
    processor.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=True)
    return [ask(model, processor, name, images[name], new_tokens) for name in PHOTOGRAPHS]


def picture_table(results: list[PictureAnswer]) -> str:
    """Return the answers and what they cost as text."""
    lines = [
        f"{'photograph':<12}{'pixels':>11}{'patches':>10}{'prompt':>8} = {'text':>4} + {'image':>5} tok"
        f"{'process':>12}{'encode':>12}{'answer':>12}"
    ]
    lines += [
        f"{r.name:<12}{f'{r.width}x{r.height}':>11}{f'{r.grid[1]}x{r.grid[0]}':>10}{r.text_tokens + r.image_tokens:>8}"
        f" = {r.text_tokens:>4} + {r.image_tokens:>5} tok"
        + "".join(f"{1000 * seconds:>9,.1f} ms" for seconds in (r.process, r.encode, r.answer))
        for r in results
    ]
    lines += [f"\n{r.name}\n  {r.question}\n  -> {r.text!r}" for r in results]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 when done, 1 when the folder is no released-layout checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m examples.image_demo", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", metavar="CKPT", help="folder in the released layout")
    parser.add_argument("--new-tokens", type=positive, default=NEW_TOKENS, metavar="N", help=f"default: {NEW_TOKENS}")
    arguments = parser.parse_args(argv)
    logging.disable_progress_bar()
    try:
        print(picture_table(ask_all(Path(arguments.checkpoint), new_tokens=arguments.new_tokens)))
    except (OSError, ValueError) as error:
        print(f"image_demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
