"""Processor of DeepSeek-V4.1: conversations with tools and images to model inputs, model output to messages."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import numpy as np
from transformers.configuration_utils import PreTrainedConfig
from transformers.processing_utils import (
    AudioKwargs,
    BatchFeature,
    ImagesKwargs,
    MultiModalData,
    ProcessingKwargs,
    ProcessorMixin,
    TextKwargs,
    VideosKwargs,
)
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast
from transformers.utils import logging

from .chat_encoding import ChatOptions, RenderedPrompt, render_conversation
from .chat_template import build_chat_template
from .chat_tokens import PieceEncoder, prepare_tokenizer
from .image_layout import cell_grid, count_image_tokens
from .image_processing_deepseek_v41 import Dsv41ImageProcessor, Dsv41ImageProcessorKwargs, flatten_images
from .prompt_constants import ASSISTANT, IMAGE, PROMPT_FORMATS, REMINDER, USER
from .response_parsing import ResponseStart, ResponseStream, parse_text, read_prompt, read_prompt_parts

logger = logging.get_logger(__name__)

_MODULE = "processing_deepseek_v41"


class Dsv41ProcessorKwargs(ProcessingKwargs, total=False):
    images_kwargs: Dsv41ImageProcessorKwargs
    _defaults = {"text_kwargs": {"return_mm_token_type_ids": False}, "images_kwargs": {}}


# Options of other modalities, which code that serves many models passes along.
_FOREIGN_NAMES = {*VideosKwargs.__annotations__, *AudioKwargs.__annotations__, "videos_kwargs", "audio_kwargs"}
# Names that `apply_chat_template` hands on to the processor when they are passed directly.
_PROCESSOR_NAMES = (
    *TextKwargs.__annotations__,
    *ImagesKwargs.__annotations__,
    *Dsv41ImageProcessorKwargs.__annotations__,
    "text_kwargs",
    "images_kwargs",
    "common_kwargs",
    "images",
    *_FOREIGN_NAMES,
)
# Options of tokenisation that make sense for ids that are already there.
_CHAT_TEXT_NAMES = (
    "padding",
    "padding_side",
    "pad_to_multiple_of",
    "truncation",
    "max_length",
    "return_attention_mask",
    "return_mm_token_type_ids",
    "add_special_tokens",
    "return_tensors",
)


class Dsv41Processor(ProcessorMixin):
    r"""Turns conversations into model inputs and model output into messages.

    Args:
        image_processor (`Dsv41ImageProcessor`, *optional*): default settings if None.
        tokenizer (`PreTrainedTokenizerFast`): the checkpoint's tokenizer. It is set up for chat in place: pad token,
            left padding, chat template, control tokens, and the nine V4.1 entries if it is the tokenizer of V4.
        chat_template (`str`, *optional*): a Jinja template to use instead of the official encoding.
        chat_format (`str`, *optional*, defaults to `"v41"`): `"v41"`, or `"v4"` for V4, which reads text only.

    [`from_pretrained`] also opens a folder in the released layout, which has no processor files.
    """

    valid_processor_kwargs = Dsv41ProcessorKwargs

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, chat_format="v41"):
        if chat_format not in PROMPT_FORMATS:
            raise ValueError(f"chat_format must be one of {list(PROMPT_FORMATS)}, got {chat_format!r}")
        if tokenizer is None:
            raise ValueError("tokenizer is missing; pass the tokenizer of the checkpoint")
        if image_processor is None:
            image_processor = Dsv41ImageProcessor()
        prepare_tokenizer(tokenizer, chat_format)
        self.chat_format = chat_format
        self.image_token = IMAGE
        self.image_token_id = tokenizer.get_added_vocab().get(IMAGE)
        self._encoder = PieceEncoder(tokenizer)
        super().__init__(image_processor, tokenizer, chat_template=chat_template or build_chat_template(chat_format))

    # -- loading -------------------------------------------------------------------------------------------------------

    @classmethod
    def get_processor_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Read the settings of the processor; the model's config.json says which chat format a bare folder has."""
        processor_dict, rest = super().get_processor_dict(pretrained_model_name_or_path, **dict(kwargs))
        if "chat_format" not in processor_dict:
            config, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **dict(kwargs))
            processor_dict["chat_format"] = "v4" if config.get("model_type") == "deepseek_v4" else "v41"
        return processor_dict, rest

    @classmethod
    def _get_arguments_from_pretrained(cls, pretrained_model_name_or_path, processor_dict=None, **kwargs):
        # The Auto classes would need a registered config and, for images, a file that the release does not have.
        shared = {key: value for key, value in kwargs.items() if key != "trust_remote_code"}
        return [
            Dsv41ImageProcessor.from_pretrained(pretrained_model_name_or_path, **dict(shared)),
            PreTrainedTokenizerFast.from_pretrained(pretrained_model_name_or_path, **dict(shared)),
        ]

    def to_dict(self) -> dict:
        # Also before saving, so that saved and loaded settings are the same.
        return {**super().to_dict(), "auto_map": {"AutoProcessor": f"{_MODULE}.{type(self).__name__}"}}

    # -- text and images -----------------------------------------------------------------------------------------------

    def __call__(self, images=None, text=None, **kwargs) -> BatchFeature:
        r"""Tokenise prompts that are already strings, and put images where the image token stands.

        The strings are tokenised as a whole, so control tokens in them are real, whoever wrote them; for conversations
        use [`apply_chat_template`], which is safe.

        Args:
            images (`ImageInput`, *optional*): one image for every image token of the text, in order.
            text (`str` or `list[str]`, *optional*): prompts.

        Returns:
            [`BatchFeature`] with `input_ids`, `attention_mask` (with text), and `pixel_values`, `image_grid_hw`,
            `image_unshuffle_index` (with images).

        Raises:
            ValueError: if neither is given, for video and audio, and if images and image tokens differ in number.
        """
        if any(kwargs.pop(name, None) is not None for name in ("videos", "audio")):
            raise ValueError(f"{type(self).__name__} reads text and images; videos and audio are not supported")
        if images is None and text is None:
            raise ValueError("pass text, images or both")
        kwargs.pop("sanitize_control_tokens", None)
        merged = self._merge_kwargs(Dsv41ProcessorKwargs, tokenizer_init_kwargs=self.tokenizer.init_kwargs, **kwargs)
        text_kwargs, images_kwargs = merged["text_kwargs"], merged["images_kwargs"]
        return_tensors = text_kwargs.pop("return_tensors", None)
        images_kwargs.pop("return_tensors", None)
        if text is None:
            return BatchFeature(dict(self.image_processor(images, **images_kwargs)), tensor_type=return_tensors)
        for name in ("return_length", "return_overflowing_tokens"):
            if text_kwargs.pop(name, False):
                raise ValueError(f"{name}=True is not supported: images change the length of a row after tokenisation")
        texts = [text] if isinstance(text, str) else list(text)
        if not texts or not all(isinstance(item, str) for item in texts):
            raise ValueError("text must be a string or a list of strings")
        pad_options = {name: text_kwargs.pop(name) for name in _CHAT_TEXT_NAMES if name in text_kwargs}
        add_special_tokens = pad_options.pop("add_special_tokens", True)
        rows = [self.tokenizer(item, add_special_tokens=add_special_tokens, **text_kwargs) for item in texts]
        ids = [row["input_ids"] for row in rows]
        extra = {name: [row[name] for row in rows] for name in rows[0] if name not in ("input_ids", "attention_mask")}
        passed = 0 if images is None else len(flatten_images(images))
        expected = sum(row.count(self.image_token_id) for row in ids)
        if expected != passed:
            raise ValueError(f"the text has {expected} image tokens ({IMAGE}), but {passed} images were passed")
        features = dict(self.image_processor(images, **images_kwargs)) if passed else {}
        counts = self._image_token_counts(features, images_kwargs)
        return self._collate(ids, extra, counts, features, pad_options, return_tensors)

    def _image_token_counts(self, features: Mapping, images_kwargs: Mapping) -> list[int]:
        """Prompt tokens of each image, from the patch grids."""
        d = images_kwargs.get("downsample_ratio", self.image_processor.downsample_ratio)
        return [
            count_image_tokens(*cell_grid(int(rows), int(columns), 1, d))
            for rows, columns in features.get("image_grid_hw", [])
        ]

    def _collate(self, ids, extra: dict[str, list], counts, features, options: dict, return_tensors) -> BatchFeature:
        """Expand image tokens, cut and pad the rows, and join them with the image features.

        `extra` has further values for every token of every row, which are expanded, cut and padded with the ids.
        """
        columns = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids], **extra}
        counts = iter(counts)
        plans = [self._plan_row(row, counts, options) for row in ids]
        columns = {
            name: [[row[at] for at in plan] for row, plan in zip(rows, plans, strict=True)]
            for name, rows in columns.items()
        }
        if options.get("return_mm_token_type_ids"):
            columns["mm_token_type_ids"] = [
                [int(token == self.image_token_id) for token in row] for row in columns["input_ids"]
            ]
        self._pad(columns, options, return_tensors)
        if options.get("return_attention_mask") is False:
            del columns["attention_mask"]
        return BatchFeature({**columns, **features}, tensor_type=return_tensors)

    def _plan_row(self, row: list[int], counts, options: Mapping) -> list[int]:
        """Return which position of a row stands at each position of the expanded and cut row."""
        plan = list(range(len(row)))
        if self.image_token_id in row:
            plan = []
            for at, token in enumerate(row):
                plan.extend([at] * (next(counts) if token == self.image_token_id else 1))
        limit = options.get("max_length") or self.tokenizer.model_max_length
        truncation = options.get("truncation")
        truncation = getattr(truncation, "value", truncation)
        if truncation in (None, False, "do_not_truncate") or len(plan) <= limit:
            return plan
        from_left = self.tokenizer.truncation_side == "left"
        kept, cut = (plan[-limit:], plan[:-limit]) if from_left else (plan[:limit], plan[limit:])
        if any(row[at] == self.image_token_id for at in cut):
            raise ValueError(f"truncation to max_length={limit} would cut an image; raise it or send fewer images")
        return kept

    def _pad(self, columns: dict[str, list], options: Mapping, return_tensors) -> None:
        rows = columns["input_ids"]
        longest = max(len(row) for row in rows)
        padding = options.get("padding")
        padding = getattr(padding, "value", padding)
        if padding is None:
            # A tensor needs rows of one length, so a batch is padded unless the caller says otherwise.
            padding = return_tensors is not None and len(rows) > 1
        if padding in (False, "do_not_pad"):
            return
        if padding == "max_length":
            if options.get("max_length") is None:
                raise ValueError("padding='max_length' needs max_length")
            longest = max(longest, options["max_length"])
        elif padding not in (True, "longest"):
            raise ValueError(f"padding must be a bool, 'longest', 'max_length' or 'do_not_pad', got {padding!r}")
        multiple = options.get("pad_to_multiple_of") or 1
        longest = -(-longest // multiple) * multiple
        if self.tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no pad token; set tokenizer.pad_token")
        side = options.get("padding_side") or self.tokenizer.padding_side
        fillers = {"input_ids": self.tokenizer.pad_token_id, "offset_mapping": (0, 0), "special_tokens_mask": 1}
        for name, values in columns.items():
            for index, row in enumerate(values):
                extra = [fillers.get(name, 0)] * (longest - len(row))
                values[index] = extra + row if side == "left" else row + extra

    # -- conversations -------------------------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        conversation,
        chat_template: str | None = None,
        tools: list | None = None,
        documents: list | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        return_assistant_tokens_mask: bool = False,
        tokenize: bool = False,
        return_tensors="auto",
        return_dict: bool = False,
        load_audio_from_video: bool = False,
        processor_kwargs: dict | None = None,
        sanitize_control_tokens: bool = False,
        *,
        enable_thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
        tool_choice: str | dict | None = None,
        response_format: dict | None = None,
        keep_last_reasoning: bool = False,
        **kwargs,
    ):
        r"""Render a conversation, or a batch of them, by the official rules, and tokenise it safely.

        Control tokens that messages, tools and documents spell stay text; images come from image parts only.

        Args:
            conversation (`list[dict]` or `list[list[dict]]`):
                Messages in the format of transformers or OpenAI. Images: `{"type": "image", "image" | "url" | "path" |
                "base64": ...}` or `{"type": "image_url", "image_url": {"url", "detail"}}`; `{"type": "image"}` alone
                takes the next of `processor_kwargs["images"]`. Each may have a `detail` ("low", "high", ...).
            chat_template (`str`, *optional*): another Jinja template; then all is left to transformers.
            tools (`list`, *optional*): definitions or Python functions.
            add_generation_prompt (`bool`): end with the header of an answer.
            continue_final_message (`bool` or `str`): leave the last message open, or its "reasoning_content".
            return_assistant_tokens_mask (`bool`): also return `assistant_masks`, 1 for tokens that an assistant wrote:
                reasoning, `</think>` after it, content, tool calls and the end of sentence. Needs `return_dict=True`.
            tokenize (`bool`): return token ids instead of text. The text alone is not safe to tokenise.
            return_tensors (`str`, *optional*): "pt" or "np"; by default lists.
            return_dict (`bool`): return all inputs of the model, not only `input_ids`. Needs `tokenize=True`.
            processor_kwargs (`dict`, *optional*): options of padding, truncation and image processing, and `images`.
            sanitize_control_tokens (`bool`): no effect, since this is always done.
            enable_thinking (`bool`, *optional*): by default yes, unless `reasoning_effort` is "none".
            reasoning_effort (`str` or `int`, *optional*): "none", "minimal" to "ultra", or, in V4.1, 1 to 100.
            tool_choice (`str` or `dict`, *optional*): "auto", "none", "required" or a named function.
            response_format (`dict`, *optional*): text, json_object, json_schema or regex, in the format of OpenAI.
            keep_last_reasoning (`bool`): keep the reasoning of the last answer, for training.

        Returns:
            `str` (a list for a batch); with `tokenize=True` the `input_ids` as a list of rows; with `return_dict=True`
            a [`BatchFeature`]. Rows of a batch are padded on the left.

        Raises:
            ValueError, TypeError: for conversations and options that the official conversion refuses.
        """
        processor_kwargs = dict(processor_kwargs or {})
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            enable_thinking=enable_thinking,
            reasoning_effort=reasoning_effort,
            tool_choice=tool_choice,
            response_format=response_format,
            keep_last_reasoning=keep_last_reasoning,
        )
        if not self._is_official(chat_template):
            # Only what was asked for: a template may take a variable that is None for one that is set.
            defaults = ChatOptions()._asdict()
            template_options = {name: value for name, value in options._asdict().items() if value != defaults[name]}
            return super().apply_chat_template(
                conversation,
                chat_template=chat_template,
                tools=tools,
                documents=documents,
                return_assistant_tokens_mask=return_assistant_tokens_mask,
                tokenize=tokenize,
                return_tensors=return_tensors,
                return_dict=return_dict,
                processor_kwargs=processor_kwargs,
                sanitize_control_tokens=sanitize_control_tokens,
                **template_options,
                **kwargs,
            )
        if documents:
            raise ValueError("documents are not part of this prompt format; put them into messages or tool results")
        unknown = [name for name in kwargs if name not in _PROCESSOR_NAMES]
        if unknown:
            raise TypeError(
                f"apply_chat_template got unknown arguments {unknown}; accepted: those of its signature (such as "
                f"enable_thinking, reasoning_effort, tools) and {sorted(_PROCESSOR_NAMES)}"
            )
        processor_kwargs.update(kwargs)
        if return_assistant_tokens_mask and not (tokenize and return_dict):
            raise ValueError("return_assistant_tokens_mask=True needs tokenize=True and return_dict=True")
        if return_assistant_tokens_mask and continue_final_message:
            raise ValueError("continue_final_message is not compatible with return_assistant_tokens_mask")
        conversations, is_batched = _as_batch(conversation)
        prompts = [render_conversation(messages, tools, options, self.chat_format) for messages in conversations]
        if not tokenize:
            texts = [prompt.text for prompt in prompts]
            return texts if is_batched else texts[0]
        return_tensors = None if return_tensors == "auto" else return_tensors
        return_tensors = processor_kwargs.pop("return_tensors", return_tensors)
        out = self._encode_prompts(prompts, processor_kwargs, return_assistant_tokens_mask, return_tensors)
        return out if return_dict else out["input_ids"]

    def _is_official(self, chat_template: str | None) -> bool:
        if chat_template is not None:
            return chat_template == build_chat_template(self.chat_format)
        if self.chat_template == build_chat_template(self.chat_format):
            return True
        logger.warning_once(
            "The processor has a chat template of its own, so conversations are rendered by it and not by the official "
            "encoder, and control tokens in messages are only text with sanitize_control_tokens=True. If this is not "
            "meant, set processor.chat_template to that of a new Dsv41Processor."
        )
        return False

    def _encode_prompts(self, prompts: list[RenderedPrompt], kwargs: dict, with_mask: bool, return_tensors):
        beside = kwargs.pop("images", None)
        text_options = dict(kwargs.pop("text_kwargs", {}))
        images_kwargs = dict(kwargs.pop("images_kwargs", {}))
        shared = dict(kwargs.pop("common_kwargs", {}))
        return_tensors = shared.pop("return_tensors", text_options.pop("return_tensors", return_tensors))
        for name, value in {**shared, **kwargs}.items():
            target = images_kwargs if name in Dsv41ImageProcessorKwargs.__annotations__ else text_options
            target[name] = value
        unknown = [name for name in text_options if name not in _CHAT_TEXT_NAMES and name not in _FOREIGN_NAMES]
        if unknown:
            raise ValueError(f"these options do not apply to conversations: {unknown}; use {list(_CHAT_TEXT_NAMES)}")
        features, counts = self._load_images(prompts, beside, images_kwargs)
        if self._encoder.tokenizer is not self.tokenizer:  # the tokenizer was replaced, or the processor copied
            self._encoder = PieceEncoder(self.tokenizer)
        encoded = [self._encoder.encode(prompt.pieces) for prompt in prompts]
        extra = {"assistant_masks": [mask for _, mask in encoded]} if with_mask else {}
        return self._collate([ids for ids, _ in encoded], extra, counts, features, text_options, return_tensors)

    def _load_images(self, prompts: list[RenderedPrompt], beside, images_kwargs: dict):
        """Process the images of all prompts; parts without a source take the images that were passed beside."""
        parts = [part for prompt in prompts for part in prompt.images]
        nothing = beside is None or (
            isinstance(beside, (list, tuple)) and all(_is_empty_list(item) for item in beside)
        )
        beside = [] if nothing else flatten_images(beside)
        missing = sum(part.source is None for part in parts)
        if missing != len(beside):
            raise ValueError(f"{missing} image parts name no source, but {len(beside)} images were passed beside them")
        if not parts:
            return {}, []
        if self.image_token_id is None:
            raise ValueError(f"the tokenizer has no image token {IMAGE}, so it cannot be used with images")
        limit = images_kwargs.pop("max_images", self.image_processor.max_images)
        for prompt in prompts:
            if limit is not None and len(prompt.images) > limit:
                raise ValueError(f"a conversation has {len(prompt.images)} images; at most {limit} are accepted")
        rest = iter(beside)
        sources = [part.source if part.source is not None else next(rest) for part in parts]
        images_kwargs.setdefault("detail", [part.detail for part in parts])
        images_kwargs.pop("return_tensors", None)
        features = dict(self.image_processor(sources, max_images=None, **images_kwargs))
        return features, self._image_token_counts(features, images_kwargs)

    # -- answers -------------------------------------------------------------------------------------------------------

    def parse_response(self, response, schema: dict | None = None, *, prefix=None, tools: list | None = None):
        r"""Turn model output into messages.

        Args:
            response (`str`, token ids, or a batch of either):
                What the model generated, without the prompt. The end of sentence and what follows it are left out.
            schema (`dict`, *optional*): a response template; then transformers' own parser is used.
            prefix (`str`, token ids, or a batch of either):
                The prompt, which tells where the answer begins: in its reasoning, in its content, in a tool call.
                A single one serves a whole batch. "" tells nothing.
            tools (`list`, *optional*):
                The tools of the request. A whole prompt shows itself whether tools are active, so they are only needed
                with a shorter prefix.

        Returns:
            `dict`, or a list of them for a batch: `{"role", "content", "reasoning_content", "tool_calls"}`.
            `reasoning_content` is there if the model was thinking, `tool_calls` if there are any. Arguments are a dict
            where they are valid JSON, else the text as far as it was written.

        Raises:
            ValueError: without `prefix`, and if a batch of prefixes does not fit the batch of responses.
        """
        if schema is not None:
            return super().parse_response(response, schema, prefix=prefix, tools=tools)
        responses, is_batched = _as_sequences(response)
        starts = self._response_starts(prefix, tools, len(responses))
        messages = [parse_text(self._answer_text(item), start) for item, start in zip(responses, starts, strict=True)]
        return messages if is_batched else messages[0]

    def get_response_parser(self, *, prefix, tools: list | None = None) -> ResponseStream:
        """Return a parser for one answer that is still being generated.

        Args:
            prefix (`str` or token ids): the prompt; see [`parse_response`].
            tools (`list`, *optional*): the tools of the request.

        Returns:
            `ResponseStream`: `feed(text)` returns events, `finalize()` the message.
        """
        return ResponseStream(self._response_starts(prefix, tools, 1)[0])

    def _response_starts(self, prefix, tools, count: int) -> list[ResponseStart]:
        if prefix is None:
            raise ValueError("prefix is missing: pass the prompt that was given to the model, or '' if there was none")
        prefixes, is_batched = _as_sequences(prefix)
        if not is_batched or len(prefixes) == 0:
            prefixes = (prefixes or [""]) * count
        if len(prefixes) != count:
            raise ValueError(f"got {count} responses but {len(prefixes)} prefixes; pass one, or one for each")
        return [self._response_start(item, tools) for item in prefixes]

    def _response_start(self, prefix, tools) -> ResponseStart:
        if isinstance(prefix, str):
            return read_prompt(prefix, tools)
        ids = [token for token in prefix if token != self.tokenizer.pad_token_id]
        vocabulary = self.tokenizer.get_added_vocab()
        turns = {vocabulary.get(token) for token in (USER, ASSISTANT, REMINDER)} - {None}
        head = next((at for at, token in enumerate(ids) if token in turns), len(ids))
        last = max((at for at, token in enumerate(ids) if token == vocabulary.get(ASSISTANT)), default=-1)
        return read_prompt_parts(self.tokenizer.decode(ids[:head]), self.tokenizer.decode(ids[last + 1 :]), tools)

    def _answer_text(self, response) -> str:
        if isinstance(response, str):
            return response
        eos, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        ids = response[: response.index(eos)] if eos in response else response
        while ids and ids[-1] == pad:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    # -- sizes, for serving --------------------------------------------------------------------------------------------

    def _get_num_multimodal_tokens(self, image_sizes=None, **kwargs) -> MultiModalData:
        """Return prompt tokens and patches of images.

        Args:
            image_sizes (`list[tuple[int, int]]`, *optional*): (height, width) of every image in pixels.

        Returns:
            `MultiModalData` with `num_image_tokens` and `num_image_patches`, one of each for every image.
        """
        if image_sizes is None:
            return MultiModalData()
        settings = {**kwargs.pop("images_kwargs", {}), **kwargs}
        processor = self.image_processor
        return MultiModalData(
            num_image_tokens=[processor.get_number_of_image_tokens(*size, settings) for size in image_sizes],
            num_image_patches=[processor.get_number_of_image_patches(*size, settings) for size in image_sizes],
        )


def _as_batch(conversation) -> tuple[list, bool]:
    """Return a list of conversations of plain dicts, and whether a batch was passed."""
    if not isinstance(conversation, (list, tuple)):
        return [_plain_messages(conversation)], False
    is_batched = bool(conversation) and (
        isinstance(conversation[0], (list, tuple)) or hasattr(conversation[0], "messages")
    )
    conversations = conversation if is_batched else [conversation]
    return [_plain_messages(item) for item in conversations], is_batched


def _plain_messages(messages):
    """Unwrap conversation objects, dataclasses and pydantic models (as API clients return them) into dicts."""
    messages = getattr(messages, "messages", messages)
    return [_plain(message) for message in messages] if isinstance(messages, (list, tuple)) else messages


def _plain(message):
    if isinstance(message, Mapping):
        return message
    if is_dataclass(message) and not isinstance(message, type):
        return {field.name: getattr(message, field.name) for field in fields(message)}
    if callable(getattr(message, "model_dump", None)):
        return message.model_dump()
    return message


def _is_empty_list(value) -> bool:
    return isinstance(value, (list, tuple)) and not value


def _as_sequences(value) -> tuple[list, bool]:
    """Return a list of strings or of lists of token ids, and whether a batch was passed."""
    if isinstance(value, str):
        return [value], False
    if hasattr(value, "tolist"):
        value = value.tolist()
    value = list(value)
    if value and isinstance(value[0], str):
        return value, True
    if value and (isinstance(value[0], (list, tuple)) or hasattr(value[0], "tolist") and np.ndim(value[0]) > 0):
        return [item.tolist() if hasattr(item, "tolist") else list(item) for item in value], True
    return [[int(token) for token in value]], False
