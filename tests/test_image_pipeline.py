"""From pictures to answers: Auto classes and pipelines on a folder in the released layout, and inputs of every kind."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoProcessor,
    pipeline,
)

from modeling_dsv4 import Dsv41ForCausalLM, Dsv41ForConditionalGeneration, Dsv41Model
from processing_dsv4 import Dsv41ImageProcessor, Dsv41Processor
from tests import golden_cases as golden
from tests.reference import text_model
from tests.reference import vision as oracle

ROOT = Path(__file__).resolve().parents[1]
RELEASED_FILES = {path.name for path in golden.CHECKPOINT_V41.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A released-layout folder: weights, config.json and the tokenizer, nothing of a processor."""
    copied = tmp_path_factory.mktemp("released") / "v41"
    shutil.copytree(golden.CHECKPOINT_V41, copied)
    return copied


@pytest.fixture(scope="module")
def processor(folder):
    return AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    """Packed, as released."""
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def picture(width=60, height=40, seed=0, mode="RGB"):
    """Noise of any mode."""
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(values[..., 0] if channels == 1 else values, mode=mode)


def question(*images, text="What is this?"):
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def inputs_of(processor, *conversations):
    return processor.apply_chat_template(
        list(conversations), tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )


# ---- Auto classes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "auto, ours",
    [
        (AutoModel, Dsv41Model),
        (AutoModelForCausalLM, Dsv41ForCausalLM),
        (AutoModelForImageTextToText, Dsv41ForConditionalGeneration),
        (AutoModelForMultimodalLM, Dsv41ForConditionalGeneration),
    ],
)
def test_auto_models(auto, ours, folder):
    model = auto.from_pretrained(folder)
    assert type(model) is ours and model.config.model_type == "deepseek_v41"
    assert ("image" in model.input_modalities) == (ours is not Dsv41ForCausalLM)


def test_auto_processors(folder, processor, tmp_path):
    """The processor's settings come from config.json; saving it gives a folder that both Auto classes open."""
    assert {path.name for path in folder.iterdir()} == RELEASED_FILES
    assert type(processor) is Dsv41Processor and type(processor.image_processor) is Dsv41ImageProcessor
    vision = golden.load_json(folder / "config.json")["vision_config"]
    for name in ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels", "max_wh_ratio"):
        assert getattr(processor.image_processor, name) == vision[name]
    # Without a preprocessor_config.json transformers does not look further unless told where.
    image_processor = AutoImageProcessor.from_pretrained(folder, image_processor_filename="config.json")
    processor.save_pretrained(tmp_path)
    for found in (image_processor, AutoImageProcessor.from_pretrained(tmp_path)):
        assert type(found) is Dsv41ImageProcessor and found.patch_size == vision["patch_size"]
    assert type(AutoProcessor.from_pretrained(tmp_path)) is Dsv41Processor


def test_imports_in_any_order_and_twice(folder):
    """Registration can run again, and works whichever package comes first: each order in a fork of a fresh process."""
    script = (
        "import importlib, os, sys\n"
        "from transformers import AutoConfig, AutoProcessor, modeling_utils, processing_utils\n"
        "from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as mapping\n"
        "names = ['modeling_dsv4', 'processing_dsv4']\n"
        "if child := os.fork():\n"
        "    names.reverse()\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "assert not set(names) & set(sys.modules)\n"
        "modules = [importlib.import_module(name) for name in names]\n"
        "for name in names: importlib.reload(sys.modules[name])\n"
        "for name in [n for n in sys.modules if n.split('.')[0] in names]: del sys.modules[name]\n"
        "modules = [importlib.import_module(name) for name in names]\n"
        "config = AutoConfig.from_pretrained(sys.argv[1])\n"
        "print(type(config).__name__, mapping[type(config)].__name__, type(AutoProcessor.from_pretrained(sys.argv[1])).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == 2 * ["Dsv41Config", "Dsv41ForConditionalGeneration", "Dsv41Processor"]


# ---- pipelines ----------------------------------------------------------------------------------------------------------


def test_pipeline_image_text_to_text(folder, model, processor):
    """A picture and a question, end to end: the answer that processor and `generate` give, step by step."""
    pipe = pipeline("image-text-to-text", model=str(folder))
    assert type(pipe.model) is Dsv41ForConditionalGeneration and type(pipe.processor) is Dsv41Processor
    conversation = question(picture(), text="Colours?")
    options = {"max_new_tokens": 5, "do_sample": False}
    answer = pipe(text=conversation, return_full_text=False, generate_kwargs=options)[0]["generated_text"]
    inputs = inputs_of(processor, conversation)
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) > 3
    out = model.generate(**inputs, **options)
    expected = processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == expected
    other = pipe(
        text=question(picture(40, 60, seed=7), text="Colours?"), return_full_text=False, generate_kwargs=options
    )
    assert other[0]["generated_text"] != answer


def test_pipeline_with_a_prompt_string_and_batches(model, processor):
    pipe = pipeline("image-text-to-text", model=model, processor=processor)
    options = {"max_new_tokens": 4, "do_sample": False}
    (result,) = pipe(picture(), text=f"{processor.image_token}What?", generate_kwargs=options)
    assert result["generated_text"].startswith(f"{processor.image_token}What?")
    conversations = [question(picture(seed=1)), question(picture(30, 50, seed=2), picture(seed=3), text="Both?")]
    together = pipe(text=conversations, batch_size=2, return_full_text=False, generate_kwargs=options)
    assert [len(answers) for answers in together] == [1, 1]


def test_pipeline_text_generation(folder):
    """The text class answers beside the image class, from the same folder."""
    pipe = pipeline("text-generation", model=str(folder))
    assert type(pipe.model) is Dsv41ForCausalLM
    assert pipe("Hello", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("Hello")


def test_image_model_with_text_alone(folder, model, processor):
    """A conversation without images: the answer of the text class, which alone may write image tokens."""
    inputs = inputs_of(processor, question(text="Hello?"))
    assert "pixel_values" not in inputs
    text = AutoModelForCausalLM.from_pretrained(folder).eval()
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = text.generate(**inputs, **options, suppress_tokens=[model.config.image_token_id])
    assert torch.equal(model.generate(**inputs, **options), expected)


# ---- K10: inputs of every kind ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def float_model(folder):
    from modeling_dsv4 import Dsv4QuantizationConfig

    settings = Dsv4QuantizationConfig(dequantize=True)
    return Dsv41ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, quantization_config=settings
    ).eval()


@pytest.fixture(scope="module")
def weights():
    return text_model.load_checkpoint(golden.CHECKPOINT_V41)


def span_of(model, inputs):
    """Embeddings of the one image's span, from the model."""
    with torch.no_grad():
        plan = inputs["image_unshuffle_index"]
        return model.get_image_features(inputs["pixel_values"], inputs["image_grid_hw"], plan).pooler_output[0]


SIZES = [(1, 1), (1, 7), (13, 14), (60, 40), (333, 77), (5000, 10), (10, 5000)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_images_of_every_size(size, float_model, processor, weights):
    """Positions in the prompt, embeddings and the oracle's features agree; the model answers."""
    inputs = inputs_of(processor, question(picture(*size)))
    places = int((inputs["input_ids"] == float_model.config.image_token_id).sum())
    (rows, columns), settings = inputs["image_grid_hw"][0].tolist(), float_model.config.vision_config
    roles = oracle.roles(rows, columns, settings.downsample_ratio)
    span = span_of(float_model, inputs)
    assert places == len(roles) == len(span) <= settings.max_image_tokens
    expected = oracle.image_features(weights, settings.to_dict(), inputs["pixel_values"].numpy(), rows, columns)
    content = span[torch.tensor(roles) == oracle.CONTENT].numpy()
    assert np.abs(content - expected).max() <= 2e-5
    with torch.no_grad():
        logits = float_model(**inputs).logits
    assert bool(torch.isfinite(logits).all())


def same_picture_in_many_forms():
    """The same pixels as grey, palette, 16-bit, with full alpha, and as arrays in every layout."""
    grey = picture(48, 36, seed=5, mode="L")
    rgb = grey.convert("RGB")
    values = np.asarray(rgb)
    yield "RGB", rgb
    yield "grey", grey
    yield "grey and alpha", grey.convert("LA")
    yield "opaque RGBA", rgb.convert("RGBA")
    yield "palette", grey.convert("P")
    yield "16-bit grey", Image.fromarray(np.asarray(grey).astype(np.uint16) * 256 + 17)
    yield "HWC array", values
    yield "CHW array", values.transpose(2, 0, 1)
    yield "CHW tensor", torch.tensor(values.transpose(2, 0, 1).copy())
    yield "CHW floats from 0 to 1", (values.transpose(2, 0, 1) / 255).astype(np.float32)
    yield "HW array", np.asarray(grey)


def test_every_form_of_a_picture_gives_the_same_answer(float_model, processor):
    results = {name: inputs_of(processor, question(form)) for name, form in same_picture_in_many_forms()}
    expected = span_of(float_model, results["RGB"])
    for name, inputs in results.items():
        assert torch.equal(inputs["input_ids"], results["RGB"]["input_ids"]), name
        assert torch.equal(span_of(float_model, inputs), expected), name


def test_colours_that_are_converted(float_model, processor):
    """CMYK and transparency change pixels, as PIL and the official API convert them, and nothing else."""
    cmyk = picture(48, 36, seed=6, mode="CMYK")
    clear = picture(48, 36, seed=6, mode="RGBA")
    white = Image.new("RGBA", clear.size, "white")
    for form, plain in ((cmyk, cmyk.convert("RGB")), (clear, Image.alpha_composite(white, clear).convert("RGB"))):
        spans = [span_of(float_model, inputs_of(processor, question(image))) for image in (form, plain)]
        assert torch.equal(*spans)


def test_the_processors_plan_is_the_models(float_model, processor):
    """Handing the plan over or leaving it out gives the same logits; so does the order of several images."""
    inputs = inputs_of(
        processor, question(picture(60, 40), picture(31, 90, seed=1)), question(picture(20, 20, seed=2))
    )
    without = {name: value for name, value in inputs.items() if name != "image_unshuffle_index"}
    with torch.no_grad():
        assert torch.equal(float_model(**inputs).logits, float_model(**without).logits)


def test_batches_of_conversations_equal_single_ones(float_model, processor):
    """Left padding, two, no and one image: the answers of the rows alone."""
    conversations = [
        question(picture(60, 40), picture(31, 90, seed=1), text="Compare."),
        question(text="Hello?"),
        question(picture(20, 20, seed=2)),
    ]
    options = {"max_new_tokens": 4, "do_sample": False}
    together = inputs_of(processor, *conversations)
    out = float_model.generate(**together, **options)[:, together["input_ids"].shape[1] :]
    for index, conversation in enumerate(conversations):
        alone = inputs_of(processor, conversation)
        expected = float_model.generate(**alone, **options)[0, alone["input_ids"].shape[1] :]
        assert out[index, : len(expected)].tolist() == expected.tolist()
