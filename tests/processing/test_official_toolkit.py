"""Comparisons with `deepseek-recipe`, the official toolkit: generated conversations, answers, images, and time."""

import io
import json
import random
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from processing_dsv4.chat_encoding import ChatOptions, render_conversation
from processing_dsv4.response_parsing import ResponseStart, ResponseStream

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
        message = json.loads(response.to_json())["choices"][0]["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
        return message["content"], message.get("reasoning_content") or "", calls


class Pair:
    """Both sides of a comparison. hypothesis prints the arguments of a failing test, so the name is short."""

    def __init__(self, official: Official, processors: dict):
        self.official = official
        self.processors = processors

    def __repr__(self):
        return "pair"


@pytest.fixture(scope="module")
def official(released_folder) -> Official:
    return Official((released_folder / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pair(official, processors) -> Pair:
    return Pair(official, processors)


def _compare(seed: int, version: str, pair: Pair) -> bool:
    """Compare one generated request; returns whether it was accepted."""
    official, processor = pair.official, pair.processors["v41"]
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
def test_generated_conversations(seed, pair):
    _compare(seed, "v41" if seed % 4 else "v4", pair)


@pytest.mark.slow
@settings(max_examples=2000, **COMMON)
@given(seed=SEEDS)
def test_two_thousand_generated_conversations(seed, pair):
    _compare(seed, "v41" if seed % 4 else "v4", pair)


@pytest.mark.parametrize("version", ["v41", "v4"])
def test_most_generated_conversations_are_accepted(pair, version):
    """The comparison would be empty if the generator only made refused requests."""
    accepted = sum(_compare(seed, version, pair) for seed in range(60))
    assert accepted >= 40


# Fragments of answers. A lone "<" before newlines is left out: the official parser then keeps one newline that its own
# rule would remove.
FRAGMENTS = ["\n", "\n\n", " ", "a", 'é"\\', "</think>", "<think>", "<｜DSML｜", "</｜DSML｜", "<｜DSML｜ calls>"]
FRAGMENTS += [
    "</｜DSML｜ calls>",
    "<｜DSML｜tool_calls>",
    "</｜DSML｜tool_calls>",
    '<｜DSML｜ invoke name="',
    "calc",
    '">',
    '"',
]
FRAGMENTS += [
    '<｜DSML｜ invoke name="f">\n',
    "</｜DSML｜ invoke>",
    '<｜DSML｜ parameter name="k" string="true">',
    'true">',
]
FRAGMENTS += [
    '<｜DSML｜ parameter name="n" string="false">',
    "</｜DSML｜ parameter>",
    "parameter name=",
    "｜",
    "{",
    "[",
    "`",
]
FRAGMENTS += ['{"a":1}', "```json\n", "```\n", "\n```", " calls>", "\t"]


@settings(max_examples=300, **COMMON)
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    state=st.sampled_from(["reasoning", "reasoning_continued", "content", "content_continued", "calls"]),
    parse_calls=st.booleans(),
    json_output=st.booleans(),
    size=st.integers(1, 9),
)
def test_generated_answers(text, state, parse_calls, json_output, size, pair):
    thinking = state in ("reasoning", "reasoning_continued", "content_continued")
    start = ResponseStart(state, thinking, parse_calls or state == "calls", json_output)
    stream = ResponseStream(start)
    for position in range(0, len(text), size):
        stream.feed(text[position : position + size])
    message = stream.finalize()
    calls = [(name, "".join(arguments)) for name, arguments in stream._calls]
    assert (message["content"], message.get("reasoning_content", ""), calls) == pair.official.parse(text, start)


def _gradient(width: int, height: int) -> Image.Image:
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, (x + y) / 2], -1).astype(np.uint8))


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _official_image(data: bytes, detail: str = "high"):
    return recipe.OpenCvImagePreprocessor().preprocess(data, recipe.PreprocessOptions(detail, 8192, 512))


def test_sizes_and_pixels_of_images(processor):
    """The official preprocessor resizes without antialiasing and encodes lossily, so pixels agree to a few levels."""
    rng = random.Random(1)
    for index in range(12):
        # Up to 1 : 4. The API repeats the sizing rule until it is stable, which changes some skinnier images.
        width, height = (rng.randint(300, 1200), rng.randint(300, 1200)) if index else (2112, 2171)
        detail = rng.choice(["high", "low"])
        official = _official_image(_png(_gradient(width, height)), detail)
        ours = processor.image_processor(_gradient(width, height), detail=detail, return_tensors="np")
        rows, columns = ours["image_grid_hw"][0]
        assert (official.height, official.width) == (rows * 14, columns * 14)
        theirs = np.asarray(Image.open(io.BytesIO(official.data)).convert("RGB")).astype(float)
        patches = ours["pixel_values"].reshape(rows, columns, 3, 14, 14).transpose(0, 3, 1, 4, 2)
        pixels = (patches.reshape(rows * 14, columns * 14, 3) * 0.5 + 0.5) * 255
        assert np.abs(pixels - theirs).mean() < 3


# -- time ----------------------------------------------------------------------------------------------------------

MAX_PROMPT_RATIO = 5.0
MAX_IMAGE_RATIO = 1.5


def _best_of(count: int, work) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


@pytest.mark.benchmark
def test_time_of_prompts(pair):
    """1,000 chat requests to token ids, ours beside the official encoder in one run."""
    bodies = []
    for seed in range(2000):
        body = conversations.request(random.Random(seed))
        try:
            pair.official.convert(json.loads(json.dumps(body)))
        except (ValueError, recipe.ConversionError):
            continue
        bodies.append(json.dumps(body))
    bodies = bodies[:1000]
    assert len(bodies) == 1000
    processor = pair.processors["v41"]
    encoding = pair.official.encodings["v41"]
    requests = [conversations.to_transformers(json.loads(body)) for body in bodies]

    def official():
        for body in bodies:
            encoding.encode(pair.official.convert(body))

    def ours():
        for messages, tools, options in requests:
            prompt = render_conversation(messages, tools, ChatOptions(**options))
            processor._encoder.encode(prompt.pieces)

    ours()
    theirs, mine = _best_of(3, official), _best_of(3, ours)
    print(
        f"\n1000 prompts: ours {mine:.3f} s, official {theirs:.3f} s, ratio {mine / theirs:.2f} (bound {MAX_PROMPT_RATIO})"
    )
    assert mine / theirs <= MAX_PROMPT_RATIO


@pytest.mark.benchmark
def test_time_of_images(processor):
    """100 encoded images to patches, ours beside the official preprocessor (which stops at re-encoded images)."""
    rng = random.Random(2)
    files = []
    for _ in range(20):
        buffer = io.BytesIO()
        _gradient(rng.randint(300, 1400), rng.randint(300, 1400)).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    files = files * 5

    def official():
        for data in files:
            _official_image(data)

    def ours():
        for data in files:
            processor.image_processor(data, return_tensors="pt")

    theirs, mine = _best_of(2, official), _best_of(2, ours)
    rate = len(files) / mine
    print(
        f"\n100 images: ours {mine:.2f} s ({rate:.1f}/s), official {theirs:.2f} s, ratio {mine / theirs:.2f} (bound {MAX_IMAGE_RATIO})"
    )
    assert mine / theirs <= MAX_IMAGE_RATIO
