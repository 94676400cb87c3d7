"""The model card of a Hub folder, filled from the checkpoint's own facts.

Nothing is claimed that the folder does not say: licence, languages and base model come from the card that the source
had, and a licence that is not known is called so.
"""

from __future__ import annotations

from collections import Counter

import torch
import yaml
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import yaml_dump

from modeling_dsv4.token_map import STORED_MAP

from .checkpoint_folder import CheckpointFolder
from .info import ModelSizes, count_text, size_text

MODEL_CARD = "README.md"

FAMILIES = {"deepseek_v41": "DeepSeek-V4.1", "deepseek_v4": "DeepSeek-V4"}
FORMATS = {
    torch.int8: "FP4, two values a byte",
    torch.float8_e4m3fn: "FP8",
    torch.float8_e8m0fnu: "scales (E8M0)",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.int64: "tables of integers",
}

TEXT_USE = """
```python
from transformers import AutoModelForCausalLM, AutoProcessor

folder = "organisation/name"  # this repository, or a local copy
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")

messages = [{"role": "user", "content": "Why does the river run past the old mill?"}]
options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
inputs = processor.apply_chat_template(messages, **options)
output = model.generate(**inputs, max_new_tokens=100)
prompt = inputs["input_ids"][0]
print(processor.parse_response(output[0, len(prompt) :], prefix=prompt))
```
"""
IMAGE_USE = """
Images go through the same processor:

```python
from transformers import AutoModelForImageTextToText

model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True, dtype="auto")
content = [{"type": "image", "path": "photo.jpg"}, {"type": "text", "text": "What is this?"}]
inputs = processor.apply_chat_template([{"role": "user", "content": content}], **options)
output = model.generate(**inputs, max_new_tokens=100)
prompt = inputs["input_ids"][0]
print(processor.parse_response(output[0, len(prompt) :], prefix=prompt))
```
"""
WITHOUT_CODE = """
Without `trust_remote_code=True` transformers opens its own class for `deepseek_v4`. It has neither this processor nor
packed weights on CPU and older GPUs, where it expands them to BF16.
"""
WORKS = """
Packed weights stay packed in memory, on every device; experts and n-gram tables are memory-mapped and stay on the host.
Greedy decoding, sampling, beams, padded batches, prompts in chunks and continued caches work; static, quantized and paged
caches are refused. `processor.apply_chat_template` is the official prompt format with tools, reasoning efforts and
response formats; `parse_response` reads answers back. `generation_config.json` has the options `kv_format`,
`decoder_replay` and `use_mtp`.
"""
RELEASED_FORM = """
`architectures`, `model_type`, `quantization_config` and all tensors are in the released form, so engines that serve the
release (vLLM, SGLang) serve this folder.
""".strip()
OTHER_FORM = """
The tensors are not in the released form, which other engines (vLLM, SGLang) read; `python -m convert released` writes it.
""".strip()


def model_card(checkpoint: CheckpointFolder) -> str:
    r"""Return the README.md of the Hub folder of a checkpoint.

    Raises:
        OSError: if the front matter of the source's own card is broken; names the file.
    """
    config = checkpoint.config
    has_images = config.model_type == "deepseek_v41" and config.vision_config is not None
    in_released_form = checkpoint.is_packed and checkpoint.has_released_names
    sizes, stored = ModelSizes(config), stored_bytes(checkpoint)
    more_use = IMAGE_USE if has_images else WITHOUT_CODE if config.model_type == "deepseek_v4" else ""
    return f"""---
{yaml_dump(_metadata(checkpoint, has_images)).rstrip()}
---

# {FAMILIES[config.model_type]}, {count_text(sum(row.parameters for row in sizes.rows))} parameters

A checkpoint of {FAMILIES[config.model_type]} with the code that [transformers](https://github.com/huggingface/transformers)
needs to open it: {len(checkpoint.entries)} tensors, {size_text(sum(stored.values()))}. The tensors are the source's own
files; `config.json` is the source's with an `auto_map`, and with the digest of `{STORED_MAP}` where there is one.

## Use

Needs transformers 5.24 or a later 5.x, torch 2.11 or later, safetensors, tokenizers, numpy and Pillow; runs on CPU and GPU.
The Python files of this folder are executed on your machine: read them, and pin a `revision`.
{TEXT_USE}{more_use}{WORKS}
## Sizes

{_facts(sizes)}

{_parts(sizes)}

{_table(("stored as", "bytes"), [(name, size_text(size)) for name, size in stored.items()])}

## Other engines

{RELEASED_FORM if in_released_form else OTHER_FORM}
`original/` has the files of the source that were changed, and `original/hub_files.json` lists what was added:
`python -m convert released` undoes both.

## Licence

The weights: {"LICENSE" if "LICENSE" in checkpoint.files else "the `license` entry above"}. The Python files: Apache-2.0.
"""


def _metadata(checkpoint: CheckpointFolder, has_images: bool) -> dict:
    """Front matter: the source's own, and what follows from the checkpoint."""
    source = {}
    if MODEL_CARD in checkpoint.files:
        try:
            source = metadata_load(checkpoint.files[MODEL_CARD]) or {}
        except (ValueError, yaml.YAMLError) as error:
            raise OSError(f"{checkpoint.files[MODEL_CARD]} has broken front matter ({error}).") from error
    tags = [checkpoint.config.model_type, "custom_code", "conversational", "moe", "sparse-attention"]
    if checkpoint.config.get_text_config().engram_layer_ids:
        tags.append("engram")
    if checkpoint.is_packed:
        tags += ["fp8", "fp4"]
    own = source.get("tags") if isinstance(source.get("tags"), list) else []
    return {"license": "unknown"} | source | {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text" if has_images else "text-generation",
        "tags": [*tags, *(tag for tag in own if tag not in tags)],
    }  # fmt: skip


def stored_bytes(checkpoint: CheckpointFolder) -> dict[str, int]:
    """Return the bytes of each stored format."""
    sizes: dict[str, int] = {}
    for entry in checkpoint.entries.values():
        name = FORMATS.get(entry.dtype, str(entry.dtype).removeprefix("torch."))
        sizes[name] = sizes.get(name, 0) + entry.stop - entry.start
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _facts(sizes: ModelSizes) -> str:
    text, active = sizes.text, sizes.activated()
    facts = [
        f"{text.num_hidden_layers} layers, width {text.hidden_size}, vocabulary {text.vocab_size}",
        f"{text.n_routed_experts} routed experts a layer, {text.num_experts_per_tok} for each token, "
        f"{text.n_shared_experts} shared",
        f"parameters that a token activates: {count_text(active.prefill)} in prefill, {count_text(active.decode)} in decode",
        f"context of up to {text.max_position_embeddings} tokens; {float(sizes.cache().per_token):.6g} bytes of cache for each",
    ]
    quantization = getattr(sizes.config, "quantization_config", None)
    if quantization is not None:
        rows, columns = quantization.get("weight_block_size", (32, 32))
        facts.append(
            f"quantisation: FP8 with a scale for each {rows} x {columns} tile, inputs rounded to FP8 as released"
        )
    return "\n".join(f"- {fact}" for fact in facts)


def _parts(sizes: ModelSizes) -> str:
    parameters, stored = Counter(), Counter()
    for row in sizes.rows:
        parameters[row.group] += row.parameters
        stored[row.group] += row.bytes
    rows = [(part, count_text(count), size_text(stored[part])) for part, count in parameters.items()]
    return _table(("part", "parameters", "bytes, packed"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ("---",) * len(head), *rows])
