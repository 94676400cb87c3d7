"""Comparisons with `deepseek-recipe`, the official toolkit: generated conversations, answers, images, and time."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from processing_dsv4.chat_encoding import ChatOptions, render_conversation
from processing_dsv4.response_parsing import ResponseStart

from . import conversations

recipe = pytest.importorskip(
    "deepseek_recipe", reason="needs the official toolkit: pip install deepseek-recipe==0.2.0"
)

IMAGE_TOKEN = "<｜deepseek_image｜>"
SEEDS = st.integers(0, 2**63)
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


class Official:
    """The toolkit, set up for the released tokenizer."""

    def __init__(self, tokenizer_json: str):
        self.special = recipe.SpecialTokens(image=IMAGE_TOKEN)
        self.options = recipe.ConversionOptions().with_special_tokens(self.special)
        tokenizer = recipe.Tokenizer.from_str(tokenizer_json)
        self.encodings = {
            "v41": recipe.DeepseekV41Encoding().with_special_tokens(self.special).with_tokenizer(tokenizer),
            "v4": recipe.DeepseekV4Encoding().with_special_tokens(self.special).with_tokenizer(tokenizer),
        }

    def convert(self, body: dict):
        return recipe.ChatCompletionRequest(body).convert(self.options).conversation

    def parse(self, text: str, start: ResponseStart) -> tuple[str, str, list]:
        stage = {
            "reasoning": recipe.ThinkingInitialStage.ReasoningStart,
            "reasoning_continued": recipe.ThinkingInitialStage.ReasoningContinuation,
            "content_continued": recipe.ThinkingInitialStage.ContentContinuation,
        }.get(start.state)
        options = recipe.ParsingOptions(
            parse_tool_calls=start.parse_calls,
            starts_in_tool_calls=start.state == "calls",
            parse_json_output=start.json_output,
            **({"thinking_initial_stage": stage} if stage else {}),
        )
        body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "x"}]}
        request = recipe.ChatCompletionRequest(body).convert(self.options)
        stream = recipe.StreamProcessor(recipe.ChatCompletionRequest.chunk_generator(request, "id", "m"), options)
        response = recipe.ChatCompletionResponse("id", "m", 0, 0, 0)
        chunks = [recipe.InferenceChunk.ready(), recipe.InferenceChunk.text(text, 1)]
        chunks.append(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
        for chunk in chunks:
            for event in stream.push(chunk):
                response.accumulate(event)
        for event in stream.finish():
            response.accumulate(event)
        import json

        message = json.loads(response.to_json())["choices"][0]["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
        return message["content"], message.get("reasoning_content") or "", calls


@pytest.fixture(scope="module")
def official(released_folder) -> Official:
    return Official((released_folder / "tokenizer.json").read_text(encoding="utf-8"))


def _compare(seed: int, version: str, official: Official, processor) -> bool:
    """Compare one generated request; returns whether it was accepted."""
    body = conversations.request(random.Random(seed), version)
    messages, tools, options = conversations.to_transformers(body)
    try:
        conversation = official.convert(body)
    except (ValueError, recipe.ConversionError) as error:
        refused = str(error)
    else:
        refused = None
    if refused is not None:
        with pytest.raises((ValueError, TypeError)):
            render_conversation(messages, tools, ChatOptions(**options), version)
            pytest.fail(f"the official conversion refuses this: {refused}", pytrace=False)
        return False
    rendered = official.encodings[version].render_conversation(conversation)
    ours = render_conversation(messages, tools, ChatOptions(**options), version)
    assert ours.text == rendered.prompt
    assert ours.special_ranges == list(rendered.special_ranges)
    ids, _ = processor._encoder.encode(ours.pieces)
    assert ids == official.encodings[version].encode(conversation)
    added = set(processor.tokenizer.get_added_vocab().values())
    written = [processor.tokenizer.convert_tokens_to_ids(piece.text) for piece in ours.pieces if piece.token]
    assert [token for token in ids if token in added] == written
    assert len(ours.images) == (len(rendered.image_sources) if version == "v41" else 0)
    return True


@settings(max_examples=200, **COMMON)
@given(seed=SEEDS)
def test_generated_conversations(seed, official, processor):
    _compare(seed, "v41" if seed % 4 else "v4", official, processor)


@pytest.mark.slow
@settings(max_examples=2000, **COMMON)
@given(seed=SEEDS)
def test_two_thousand_generated_conversations(seed, official, processor):
    _compare(seed, "v41" if seed % 4 else "v4", official, processor)


def test_most_generated_conversations_are_accepted(official, processor):
    """The comparison would be empty if the generator only made refused requests."""
    accepted = sum(_compare(seed, "v41", official, processor) for seed in range(60))
    assert accepted >= 40
