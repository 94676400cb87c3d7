"""A chat in the terminal, about an image or without one; the answer appears token by token.

python -m examples.chat                                  with the demo's own checkpoint (noise), questions typed in
python -m examples.chat CKPT --image photo.jpg           about an image
echo "What is this?" | python -m examples.chat CKPT      questions from a pipe, one a line
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

import torch
from transformers import AutoProcessor, TextStreamer
from transformers.utils import logging

import processing_dsv4  # noqa: F401  (registers the processor)
from examples.demo import given_or_own
from examples.image_demo import positive
from modeling_dsv4 import Dsv41ForConditionalGeneration

NEW_TOKENS = 64


@torch.no_grad()
def ask(model, processor, messages: list[dict], *, new_tokens: int, thinks: bool, streamer=None) -> dict:
    r"""Return the message that answers a conversation, greedily.

    Args:
        model (`Dsv41ForConditionalGeneration`) and processor (`Dsv41Processor`): of the same folder.
        messages (`list[dict]`): the conversation so far, ending with a question.
        new_tokens (`int`): at most. thinks (`bool`): think before the answer.
        streamer (`TextStreamer`, *optional*): prints the answer while it is made.
    """
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    chat = processor.apply_chat_template(messages, enable_thinking=thinks, **options).to(model.device)
    output = model.generate(**chat, max_new_tokens=new_tokens, do_sample=False, streamer=streamer)
    prompt = chat["input_ids"][0]
    return processor.parse_response(output[0, len(prompt) :], prefix=prompt)


def talk(model, processor, questions: Iterable[str], image: str | None = None, **options) -> list[dict]:
    """Answer every line that is not empty, the first one about `image`; return the conversation."""
    streamer = TextStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    shown = [] if image is None else [{"type": "image", "path": image}]
    messages: list[dict] = []
    for question in filter(None, map(str.strip, questions)):
        print(f"> {question}")
        messages.append({"role": "user", "content": [*shown, {"type": "text", "text": question}]})
        messages.append(ask(model, processor, messages, streamer=streamer, **options))
        shown = []
    return messages


def main(argv: list[str] | None = None) -> int:
    """Run it; 0 at the end of the input, 1 when the folder is no checkpoint or the image cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m examples.chat", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", metavar="CKPT", help="V4.1 folder (default: the demo's own)")
    parser.add_argument("--image", metavar="FILE", help="shown with the first question")
    parser.add_argument("--think", action="store_true", help="think before an answer")
    parser.add_argument("--new-tokens", type=positive, default=NEW_TOKENS, metavar="N", help=f"default: {NEW_TOKENS}")
    arguments = parser.parse_args(argv)
    logging.disable_progress_bar()
    try:
        folder = given_or_own(arguments.checkpoint)
        processor = AutoProcessor.from_pretrained(folder)
        model = Dsv41ForConditionalGeneration.from_pretrained(folder, dtype="auto").eval()
        options = {"new_tokens": arguments.new_tokens, "thinks": arguments.think}
        talk(model, processor, sys.stdin, arguments.image, **options)
    except (OSError, ValueError) as error:
        print(f"chat: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
