"""Batches for training: conversations or processed examples to padded rows, or to one row without padding."""

from dataclasses import dataclass, field
from typing import Any

import torch

IGNORED_LABEL = -100
_IMAGE_KEYS = ("pixel_values", "image_grid_hw", "image_unshuffle_index")
_LEARNED_PARTS = ("assistant", "all")


@dataclass
class Dsv4DataCollator:
    r"""Collates training examples of DeepSeek-V4.1 and V4.

    An example is a dict with one of

    - `messages` (and optionally `tools`): a conversation, rendered by the processor when it is collated;
    - `input_ids`, and optionally `labels`, `assistant_masks` and image features, as the processor returns them for one
      conversation (a leading batch dimension of 1 is accepted).

    Labels that an example does not bring are made from its ids: what an assistant wrote (`learn="assistant"`) or all
    (`learn="all"`), never padding and never image positions. They are not shifted; the model shifts them.

    With a `Trainer`, set `remove_unused_columns=False`: it would take away `messages`, `tools` and `assistant_masks`,
    which no model has as an argument.

    Args:
        processor (`Dsv41Processor` or `PreTrainedTokenizerBase`):
            Gives the pad token and, for conversations and images, the chat format and the image token.
        flatten (`bool`, *optional*, defaults to `False`):
            Join all examples into one row with `position_ids` that begin anew at each of them, instead of padding. The
            first label of each example is ignored, so none is predicted from another.
        learn (`str`, *optional*, defaults to `"assistant"`): `"assistant"` or `"all"`.
        max_length (`int`, *optional*): examples are cut to this many tokens; cutting an image is refused.
        pad_to_multiple_of (`int`, *optional*): round the length of rows up to a multiple.
        padding_side (`str`, *optional*, defaults to `"right"`): `"right"` or `"left"`.
        chat_options (`dict`, *optional*):
            Arguments of `apply_chat_template` for conversations. By default the reasoning of the last answer is kept.

    Calling it returns a dict of tensors: `input_ids`, `labels` `[rows, tokens]`, int64; `attention_mask` of the same
    shape, or `position_ids` if flattened; and, if any example has images, `pixel_values`, `image_grid_hw` and
    `image_unshuffle_index` of all of them, in order.

    Raises:
        ValueError: for unknown options, empty batches, and examples that lack ids, masks or images.
    """

    processor: Any
    flatten: bool = False
    learn: str = "assistant"
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    padding_side: str = "right"
    chat_options: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.learn not in _LEARNED_PARTS:
            raise ValueError(f"learn must be one of {list(_LEARNED_PARTS)}, got {self.learn!r}")
        if self.padding_side not in ("left", "right"):
            raise ValueError(f"padding_side must be 'left' or 'right', got {self.padding_side!r}")
        for name in ("max_length", "pad_to_multiple_of"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer or None, got {value!r}")
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self._pad_token_id = getattr(tokenizer, "pad_token_id", None)
        if self._pad_token_id is None:
            raise ValueError("processor must be a processor or a tokenizer with a pad token")
        self._image_token_id = getattr(self.processor, "image_token_id", None)

    def __call__(self, features: list[dict], return_tensors: str | None = None) -> dict[str, torch.Tensor]:
        if return_tensors not in (None, "pt"):
            raise ValueError(f"return_tensors must be 'pt' or None, got {return_tensors!r}")
        if not features:
            raise ValueError("features is empty; a batch needs at least one example")
        examples = [self._example(feature, index) for index, feature in enumerate(features)]
        batch = self._flattened(examples) if self.flatten else self._padded(examples)
        for key in _IMAGE_KEYS:
            values = [example[key] for example in examples if key in example]
            if values:
                batch[key] = torch.cat(values)
        return batch

    def _example(self, feature: dict, index: int) -> dict[str, torch.Tensor]:
        """Return ids, labels and image features of one example, as tensors without a batch dimension."""
        where = f"features[{index}]"
        if "messages" in feature:
            feature = self._encoded(feature)
        if "input_ids" not in feature:
            raise ValueError(f"{where} has neither 'input_ids' nor 'messages'; got the keys {sorted(feature)}")
        ids = _row(feature["input_ids"], where, "input_ids")
        images = {key: torch.as_tensor(feature[key]) for key in _IMAGE_KEYS if feature.get(key) is not None}
        is_image = torch.zeros_like(ids, dtype=torch.bool)
        if self._image_token_id is not None:
            is_image = ids == self._image_token_id
        if bool(is_image.any()) and "pixel_values" not in images:
            raise ValueError(f"{where} has image tokens but no 'pixel_values'")
        labels = self._labels(feature, ids, is_image, where)
        keep = torch.ones_like(ids, dtype=torch.bool)
        if feature.get("attention_mask") is not None:
            keep = _row(feature["attention_mask"], where, "attention_mask").bool()
        ids, labels, is_image = ids[keep], labels[keep], is_image[keep]
        if ids.numel() == 0:
            raise ValueError(f"{where} has no tokens")
        if self.max_length is not None and ids.numel() > self.max_length:
            if bool(is_image[self.max_length :].any()):
                raise ValueError(
                    f"{where} has {ids.numel()} tokens; cutting it to max_length={self.max_length} would cut an image"
                )
            ids, labels = ids[: self.max_length], labels[: self.max_length]
        return {"input_ids": ids, "labels": labels, **images}

    def _encoded(self, feature: dict) -> dict:
        if not hasattr(self.processor, "image_processor"):
            raise ValueError("examples with 'messages' need a processor; a tokenizer was given")
        options = {"keep_last_reasoning": True, **self.chat_options}
        return self.processor.apply_chat_template(
            feature["messages"],
            tools=feature.get("tools"),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **options,
        )

    def _labels(self, feature: dict, ids: torch.Tensor, is_image: torch.Tensor, where: str) -> torch.Tensor:
        if feature.get("labels") is not None:
            labels = _row(feature["labels"], where, "labels")
            if labels.shape != ids.shape:
                raise ValueError(f"{where}: labels has {labels.numel()} entries, input_ids has {ids.numel()}")
            return labels
        learned = ~is_image
        if self.learn == "assistant":
            if feature.get("assistant_masks") is None:
                raise ValueError(
                    f"{where} needs 'labels' or 'assistant_masks' for learn='assistant'; or use learn='all'"
                )
            mask = _row(feature["assistant_masks"], where, "assistant_masks")
            if mask.shape != ids.shape:
                raise ValueError(f"{where}: assistant_masks has {mask.numel()} entries, input_ids has {ids.numel()}")
            learned = learned & mask.bool()
        return torch.where(learned, ids, IGNORED_LABEL)

    def _length(self, length: int) -> int:
        multiple = self.pad_to_multiple_of or 1
        return -(-length // multiple) * multiple

    def _padded(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        width = self._length(max(example["input_ids"].numel() for example in examples))
        shape = (len(examples), width)
        ids = torch.full(shape, self._pad_token_id, dtype=torch.int64)
        labels = torch.full(shape, IGNORED_LABEL, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.int64)
        for row, example in enumerate(examples):
            count = example["input_ids"].numel()
            place = slice(width - count, width) if self.padding_side == "left" else slice(0, count)
            ids[row, place] = example["input_ids"]
            labels[row, place] = example["labels"]
            mask[row, place] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def _flattened(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        ids, labels, positions = [], [], []
        for example in examples:
            count = example["input_ids"].numel()
            first_ignored = example["labels"].clone()
            first_ignored[0] = IGNORED_LABEL
            ids.append(example["input_ids"])
            labels.append(first_ignored)
            positions.append(torch.arange(count))
        total = sum(part.numel() for part in ids)
        extra = self._length(total) - total
        if extra:
            # Padding is an example of its own, so that no real token sees it.
            ids.append(torch.full((extra,), self._pad_token_id, dtype=torch.int64))
            labels.append(torch.full((extra,), IGNORED_LABEL, dtype=torch.int64))
            positions.append(torch.arange(extra))
        return {
            "input_ids": torch.cat(ids)[None],
            "position_ids": torch.cat(positions)[None],
            "labels": torch.cat(labels)[None],
        }


def _row(values, where: str, name: str) -> torch.Tensor:
    """Return `values` as an int64 row; a leading dimension of 1 is dropped."""
    row = torch.as_tensor(values)
    if row.dim() == 2 and row.shape[0] == 1:
        row = row[0]
    if row.dim() != 1:
        raise ValueError(f"{where}[{name!r}] must be one row of tokens, got the shape {list(row.shape)}")
    return row.to(torch.int64)
