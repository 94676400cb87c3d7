"""Every door of transformers and its neighbours, opened once: `README.md` has the table, made of these tests.

The docstring of a test is its row: the door, a colon, and what is tried. `python -m tests.test_doors` prints the table.
"""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoProcessor,
    AutoTokenizer,
    TextStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)

import modeling_dsv4
import processing_dsv4
from tests import golden_cases as golden
from tests.convert.test_push_to_hub import REPOSITORY, hub  # noqa: F401  (hub is a fixture)
from tests.modeling.tiny_model import FIVE_LAYERS, five_layer_model, new_model, some_ids
from tests.released_folders import contents
from tests.training.ranks import on_ranks

README = Path(__file__).parents[1] / "README.md"
FOLDER = golden.CHECKPOINT_V41  # in the released layout, packed
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
# Without it: inputs of packed layers are rounded to FP8 as the release does.
EXACT_INPUTS = modeling_dsv4.Dsv4QuantizationConfig(quantize_activations=False)


def load(door, **options):
    return door.from_pretrained(FOLDER, dtype=torch.float32, **options).eval()


@pytest.fixture(scope="module")
def text_model():
    return load(AutoModelForCausalLM)


@pytest.fixture(scope="module")
def image_model():
    return load(AutoModelForImageTextToText, quantization_config=EXACT_INPUTS)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def inputs(tokenizer):
    return tokenizer("The river runs past the mill, the river runs past", return_tensors="pt")


@pytest.fixture(scope="module")
def greedy(text_model, inputs):
    return text_model.generate(**inputs, **GREEDY)


def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8))


def question(image=None):
    content = [] if image is None else [{"type": "image", "image": image}]
    return [{"role": "user", "content": [*content, {"type": "text", "text": "What is it?"}]}]


def image_case():
    case = golden.load_case("image")
    tensors = {name: torch.as_tensor(case[name]) for name in ("input_ids", "attention_mask", "pixel_values")}
    return case, tensors | {"image_grid_hw": torch.as_tensor(case["image_grid_hws"]).long()}


def new_tokens(model, chat):
    """Greedy answer to a chat, without its prompt."""
    return model.generate(**chat, **GREEDY)[0, chat["input_ids"].shape[1] :]


CHAT = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}


# ---- Auto classes ----------------------------------------------------------------------------------------------------


def test_auto_config(tmp_path):
    """AutoConfig: the released `config.json`, whose text, image and quantisation keys are written back as they were."""
    config = AutoConfig.from_pretrained(FOLDER)
    assert type(config) is modeling_dsv4.Dsv41Config
    config.save_pretrained(tmp_path)
    released, written = (golden.load_json(folder / "config.json") for folder in (FOLDER, tmp_path))
    for key in ("model_type", "architectures", "text_config", "vision_config", "quantization_config"):
        assert written[key] == released[key], key


@torch.no_grad()
def test_auto_model(text_model, inputs):
    """AutoModel: its hidden states under the head of the causal model give that model's logits."""
    model = load(AutoModel)
    assert type(model) is modeling_dsv4.Dsv41Model
    logits = text_model.lm_head(model(**inputs).last_hidden_state)
    torch.testing.assert_close(logits, text_model(**inputs).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_auto_model_for_causal_lm(text_model):
    """AutoModelForCausalLM: packed, within 2e-4 of logits that an independent implementation computed."""
    assert type(text_model) is modeling_dsv4.Dsv41ForCausalLM
    case = golden.load_case("text_17", "lin8")
    logits = text_model(torch.as_tensor(case["input_ids"]).long()).logits
    assert golden.logit_errors(case, logits).max() < golden.LOGIT_BOUND["lin8"]


@torch.no_grad()
def test_auto_model_for_image_text_to_text(image_model):
    """AutoModelForImageTextToText: an image in the prompt, logits as independent implementations have them."""
    assert type(image_model) is modeling_dsv4.Dsv41ForConditionalGeneration
    case, tensors = image_case()
    golden.assert_case("image", "qdq", case, {"logits": image_model(**tensors).logits})


@torch.no_grad()
def test_auto_model_for_multimodal_lm(image_model):
    """AutoModelForMultimodalLM: the same class and the same logits as for image-text-to-text."""
    model, (_, tensors) = load(AutoModelForMultimodalLM, quantization_config=EXACT_INPUTS), image_case()
    assert type(model) is type(image_model)
    assert torch.equal(model(**tensors).logits, image_model(**tensors).logits)


def test_auto_tokenizer(tokenizer):
    """AutoTokenizer: text there and back, Chinese and emoji included."""
    text = "def f(x): return x  # 长江 and 🌊\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_auto_processor(processor):
    """AutoProcessor: a chat with an image has the tokens that its grid of patches needs."""
    assert type(processor) is processing_dsv4.Dsv41Processor
    chat = processor.apply_chat_template(question(picture()), **CHAT)
    rows, columns = (-(-chat["image_grid_hw"][0] // 2)).tolist()
    assert int((chat["input_ids"] == processor.image_token_id).sum()) == rows * (columns + 1) + 2


def test_auto_image_processor(processor, tmp_path):
    """AutoImageProcessor: of a saved processor (a released folder names none); the processor's patches of a picture."""
    processor.save_pretrained(tmp_path)
    image_processor = AutoImageProcessor.from_pretrained(tmp_path)
    assert type(image_processor) is processing_dsv4.Dsv41ImageProcessor
    found = image_processor([picture()], return_tensors="pt")
    chat = processor.apply_chat_template(question(picture()), **CHAT)
    assert torch.equal(found["pixel_values"], chat["pixel_values"])


# ---- pipelines and generate --------------------------------------------------------------------------------------------


def test_pipeline_text_generation(text_model, processor):
    """pipeline("text-generation"): a chat, answered as `generate` answers it."""
    pipe = pipeline("text-generation", model=text_model, tokenizer=processor.tokenizer)
    said = pipe(question(), **GREEDY)[0]["generated_text"][-1]
    chat = processor.apply_chat_template(question(), **CHAT)
    assert said == processor.parse_response(new_tokens(text_model, chat), prefix=chat["input_ids"][0])


def test_pipeline_image_text_to_text(image_model, processor):
    """pipeline("image-text-to-text"): a chat with an image, answered as `generate` answers it."""
    pipe = pipeline("image-text-to-text", model=image_model, processor=processor)
    said = pipe(question(picture()), generate_kwargs=GREEDY)[0]["generated_text"][-1]
    chat = processor.apply_chat_template(question(picture()), **CHAT)
    assert said == processor.parse_response(new_tokens(image_model, chat), prefix=chat["input_ids"][0])


def test_text_streamer(text_model, tokenizer, inputs, greedy, capsys):
    """TextStreamer: what it prints is what is returned."""
    text_model.generate(**inputs, **GREEDY, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(greedy[0, inputs["input_ids"].shape[1] :])


def test_beams():
    """Beams: three with the cache are the three without one."""
    with_cache, without = (
        five_layer_model().generate(some_ids(1, 9), **GREEDY, **{"num_beams": 3, "num_return_sequences": 3} | cache)
        for cache in ({}, {"use_cache": False})
    )
    assert torch.equal(with_cache, without) and len(torch.unique(with_cache, dim=0)) == 3


def test_sampling():
    """Sampling: repeats with the seed, differs without, and at `top_k=1` is greedy."""
    model, ids = five_layer_model(), some_ids(1, 9)

    def sample(seed, **options):
        torch.manual_seed(seed)
        return model.generate(ids, **GREEDY | {"do_sample": True, "num_return_sequences": 4} | options)

    assert torch.equal(sample(0), sample(0)) and not torch.equal(sample(0), sample(1))
    assert torch.equal(sample(0, top_k=1, num_return_sequences=1), model.generate(ids, **GREEDY))


def test_assisted():
    """Assisted generation: another model drafts, the tokens are the greedy ones."""
    model, assistant, ids = five_layer_model(), new_model(torch.float64, seed=1, **FIVE_LAYERS), some_ids(1, 9)
    assert torch.equal(model.generate(ids, **GREEDY, assistant_model=assistant), model.generate(ids, **GREEDY))


def test_prompt_lookup(text_model, inputs, greedy):
    """Prompt lookup: n-grams of the prompt are the drafts, the tokens are the greedy ones."""
    assert torch.equal(text_model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=3), greedy)


# ---- training ------------------------------------------------------------------------------------------------------------


def settings(folder, cls=TrainingArguments, **changes):
    return cls(
        str(folder), max_steps=4, per_device_train_batch_size=2, learning_rate=3e-3, logging_steps=1,
        lr_scheduler_type="constant", use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **changes,
    )  # fmt: skip


def rows():
    ids = some_ids(2, 16).tolist()
    return [{"input_ids": row, "labels": row, "attention_mask": [1] * 16} for row in ids] * 4


def assert_learned(trainer):
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.1, losses


def test_trainer(tmp_path):
    """Trainer: transformers' own, its AdamW, a float model; the loss falls."""
    assert_learned(Trainer(new_model(**FIVE_LAYERS), settings(tmp_path), train_dataset=rows()))


def test_sft_trainer(tmp_path, tokenizer):
    """SFTTrainer: adapters over packed weights; the loss falls."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from peft import LoraConfig

    model = load(AutoModelForCausalLM)
    texts = datasets.Dataset.from_list([{"text": "The river runs past the mill."}] * 8)
    options = settings(tmp_path, trl.SFTConfig, bf16=False, gradient_checkpointing=False)
    options.learning_rate = 0.05
    lora = LoraConfig(r=4, target_modules=["q_b_proj", "o_b_proj"])
    trainer = trl.SFTTrainer(model, options, train_dataset=texts, processing_class=tokenizer, peft_config=lora)
    assert_learned(trainer)


def test_peft(tmp_path, inputs):
    """PEFT: an adapter on projections and packed experts, saved and loaded again, gives its logits."""
    from peft import LoraConfig, PeftModel, get_peft_model

    from modeling_dsv4.training import lora_layers

    targets = LoraConfig(r=2, target_modules=["q_b_proj", "experts"], init_lora_weights=False)
    base = load(AutoModelForCausalLM)
    plain = base(**inputs).logits
    adapted = get_peft_model(base, lora_layers(base, targets)).eval()
    expected = adapted(**inputs).logits
    adapted.save_pretrained(tmp_path)
    base = load(AutoModelForCausalLM)
    found = PeftModel.from_pretrained(base, tmp_path, config=lora_layers(base, tmp_path))(**inputs).logits
    assert torch.equal(found, expected) and not torch.equal(plain, expected)


def run_fsdp2():
    from accelerate import Accelerator

    from tests.training.test_trainer import pretend_accelerator_fsdp2

    accelerator = Accelerator(cpu=True)
    pretend_accelerator_fsdp2(layers=None)
    model = new_model(**FIVE_LAYERS).train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = some_ids(2, 12)[torch.distributed.get_rank()][None]
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    kinds = {type(p).__name__ for p in model.parameters()}
    return loss.detach(), kinds, model.get_parameter("model.layers.3.mlp.gate.weight").full_tensor().detach()


def test_accelerate_fsdp2():
    """accelerate FSDP2: a step on two gloo processes is the step of one (accelerate is told to shard on CPU)."""
    model, ids = new_model(**FIVE_LAYERS).train(), some_ids(2, 12)
    losses = [model(row[None], labels=row[None]).loss for row in ids]
    torch.stack(losses).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = model.model.layers[3].mlp.gate.weight
    for (loss, kinds, weight), alone in zip(on_ranks(2, run_fsdp2), losses, strict=True):
        assert kinds == {"DTensor"}
        torch.testing.assert_close(loss, alone.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(weight, expected.detach(), rtol=0, atol=1e-5)


def test_gradient_checkpointing():
    """Gradient checkpointing: layers run twice, gradients stay the same bits."""
    model, ids, runs, found = new_model(**FIVE_LAYERS).train(), some_ids(2, 12), [], []
    model.model.layers[2].input_layernorm.register_forward_pre_hook(lambda *_: runs.append(1))
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert len(runs) == 3 and len(found[0]) > 50
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


# ---- compiling, exporting, saving --------------------------------------------------------------------------------------

# One layer, a source of entries: every graph costs a second.
ONE_LAYER = {
    "num_hidden_layers": 1, "compress_ratios": [2], "kv_source_layer_ids": [0], "index_source_layer_ids": [0],
    "candidate_source_layer_id": -1, "engram_layer_ids": [], "engram_num_embeddings": [], "n_routed_experts": 2,
}  # fmt: skip


# The experts end a graph, and what is around them is traced again from every frame: the whole model eight times.
@pytest.mark.parametrize("part", ["model.layers.0", pytest.param("", marks=pytest.mark.slow, id="whole")])
@torch.no_grad()
def test_compiled_decode_step(part):
    """torch.compile: a decode step in several graphs, logits as without."""
    model, ids, graphs = new_model(**ONE_LAYER), some_ids(1, 12), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def after_the_prompt():
        cache = modeling_dsv4.Dsv4Cache(model.config, max_length=32)
        model(ids[:, :-1], cache=cache)
        return {"input_ids": ids[:, -1:], "cache": cache}

    expected, inputs = model(**after_the_prompt()).logits, after_the_prompt()
    model.get_submodule(part).compile(backend=backend)
    found = model(**inputs).logits
    assert len(graphs) > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_torch_export():
    """torch.export: a forward without cache and padding; the program gives the same logits for other tokens."""
    model, ids = new_model(**ONE_LAYER), some_ids(2, 12)
    program = torch.export.export(model, (ids[:1],), {"use_cache": False})
    assert torch.equal(program.module()(ids[1:], use_cache=False).logits, model(ids[1:], use_cache=False).logits)


def test_push_to_hub(hub, text_model, tmp_path):  # noqa: F811
    """push_to_hub: a dry run, the client replaced; the upload is what `save_pretrained` writes, byte for byte."""
    text_model.save_pretrained(tmp_path)
    text_model.push_to_hub(REPOSITORY)
    ((repository, uploaded),) = hub.uploads
    uploaded.pop("README.md")  # transformers adds a card where the repository has none
    assert repository == REPOSITORY and uploaded == contents(tmp_path)


def test_safetensors_only(text_model, tmp_path):
    """safetensors only: nothing else is written, and a folder of pickled weights is refused."""
    text_model.save_pretrained(tmp_path / "saved")
    weights = {path.suffix for path in (tmp_path / "saved").iterdir()} - {".json"}
    assert weights == {".safetensors"}
    shutil.copytree(FOLDER, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors*"))
    torch.save({"norm.weight": torch.ones(96)}, tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(OSError, match="no file named model.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "pickled")


# ---- the table -----------------------------------------------------------------------------------------------------------


def doors():
    """The table of README.md: a row for every test here but the last."""
    yield "| door | what is tried | test |"
    yield "|---|---|---|"
    for name, test in vars(sys.modules[__name__]).items():
        if name.startswith("test_") and name != "test_the_table_of_the_readme":
            door, tried = re.fullmatch(r"(.+?): (.+)\.", test.__doc__).groups()
            yield f"| {door} | {tried} | `{name}` |"


def test_the_table_of_the_readme():
    section = README.read_text(encoding="utf-8").partition("\n## Doors\n")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("|")] == list(doors())


if __name__ == "__main__":
    print("\n".join(doors()))
