"""LoRA on every kind of layer, over float and packed weights: what is adapted, its maths, saving, merging, refusals."""

import logging

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from transformers import AutoProcessor

import modeling_dsv4
import processing_dsv4  # noqa: F401  (registers the processor)
from modeling_dsv4.pretrained_model import logger
from modeling_dsv4.training import Dsv4DataCollator, Dsv4OptimizerFactory, build_param_groups, lora_layers
from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41, load_case

TARGETS = ["q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj", "experts", "up_proj", "qkv", "linear_1"]


def load(family="v41", *, dequantize=False):
    cls, folder = {
        "v41": (modeling_dsv4.Dsv41ForConditionalGeneration, CHECKPOINT_V41),
        "v4": (modeling_dsv4.Dsv4ForCausalLM, CHECKPOINT_V4),
    }[family]
    # Neither inputs nor cached values are rounded, so that packed, float and merged weights give the same numbers.
    options = modeling_dsv4.Dsv4QuantizationConfig(dequantize=dequantize, quantize_activations=False)
    model = cls.from_pretrained(folder, dtype=torch.float32, quantization_config=options).eval()
    model.config.get_text_config().cache_rounding = False
    return model


def adapted(model, targets=TARGETS, seed=0, **settings):
    """A model with adapters that do something."""
    model = get_peft_model(
        model, lora_layers(model, LoraConfig(r=3, lora_alpha=5, target_modules=targets, **settings))
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def image_inputs():
    case = load_case("image")
    return {
        "input_ids": torch.as_tensor(case["input_ids"]).long(),
        "attention_mask": torch.as_tensor(case["attention_mask"]).long(),
        "pixel_values": torch.as_tensor(case["pixel_values"]),
        "image_grid_hw": torch.as_tensor(case["image_grid_hws"]).long(),
    }


def text_inputs():
    return {"input_ids": torch.as_tensor(load_case("text_17")["input_ids"]).long()}


@torch.no_grad()
def logits(model, inputs):
    """Logits of the real positions."""
    found = model(**inputs).logits
    return found[inputs["attention_mask"].bool()] if "attention_mask" in inputs else found


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_every_factor_gets_a_gradient_over_packed_weights(family):
    model = adapted(load(family))
    inputs = image_inputs() if family == "v41" else text_inputs()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    kinds = {target for target in TARGETS if any(f".{target}.lora_A" in name for name in trained)}
    assert kinds == set(TARGETS) - ({"qkv", "linear_1"} if family == "v4" else set())
    for name, parameter in trained.items():
        is_indexer = ".indexer." in name  # the language-model loss never reaches it
        assert (parameter.grad is not None and bool(parameter.grad.any())) != is_indexer, name
    routed = [parameter for group in build_param_groups(model, report=False) for parameter in group["params"]]
    assert {id(parameter) for parameter in routed} == {id(parameter) for parameter in trained.values()}


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_packed_and_float_bases_agree_and_merging_changes_nothing(family, tmp_path):
    inputs = image_inputs() if family == "v41" else text_inputs()
    base = load(family)
    without = logits(base, inputs)
    packed = adapted(base)
    expected = logits(packed, inputs)
    assert (expected - without).abs().max() > 0.1
    packed.save_pretrained(tmp_path)
    model = load(family, dequantize=True)
    model = PeftModel.from_pretrained(model, tmp_path, config=lora_layers(model, tmp_path)).eval()
    torch.testing.assert_close(logits(model, inputs), expected, rtol=0, atol=2e-5)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model, inputs), without, rtol=0, atol=2e-5)
    model.merge_adapter()
    torch.testing.assert_close(logits(model, inputs), expected, rtol=0, atol=1e-4)
    with model.disable_adapter():  # takes merged adapters out
        torch.testing.assert_close(logits(model, inputs), without, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits(model, inputs), expected, rtol=0, atol=1e-4)
    merged = model.merge_and_unload(safe_merge=True)
    assert type(merged) is type(base) and not any("lora" in name for name, _ in merged.named_modules())
    torch.testing.assert_close(logits(merged, inputs), expected, rtol=0, atol=1e-4)
    for merge in (packed.merge_adapter, packed.merge_and_unload):
        with pytest.raises(ValueError, match="holds packed weights.*dequantize=True.*convert released"):
            merge()
    torch.testing.assert_close(logits(packed, inputs), expected, rtol=0, atol=0)  # the refusal changed nothing


def test_the_delta_of_every_expert_and_group_is_its_own():
    """By hand: W_e + scaling * B_e A_e written into a float model that has no adapters."""
    packed, plain = adapted(load(), ["experts", "o_a_proj"]), load(dequantize=True)
    layers = packed.base_model.model.model.language_model.layers
    scaling = 5 / 3
    with torch.no_grad():
        for layer, twin in zip(layers, plain.model.language_model.layers, strict=True):
            first, second = layer.mlp.experts.lora_A["default"], layer.mlp.experts.lora_B["default"]
            for expert in range(len(twin.mlp.experts.gate_up_proj)):
                twin.mlp.experts.gate_up_proj[expert] += scaling * second.gate_up[expert] @ first.gate_up[expert]
                twin.mlp.experts.down_proj[expert] += scaling * second.down[expert] @ first.down[expert]
            output = layer.self_attn.o_a_proj
            twin.self_attn.o_a_proj.weight += (
                scaling * output.lora_B["default"].weight @ output.lora_A["default"].weight
            )
    torch.testing.assert_close(logits(packed, text_inputs()), logits(plain, text_inputs()), rtol=0, atol=2e-5)


def test_a_fresh_adapter_changes_nothing_and_two_can_be_switched():
    model, inputs = load(), text_inputs()
    before = logits(model, inputs)
    config = lora_layers(model, LoraConfig(r=2, target_modules=TARGETS, lora_dropout=0.1))
    model = get_peft_model(model, config).eval()
    assert torch.equal(logits(model, inputs), before)
    model.add_adapter("other", lora_layers(model, LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)))
    assert torch.equal(logits(model, inputs), before)
    model.set_adapter("other")
    assert not torch.equal(logits(model, inputs), before)
    model.set_adapter("default")
    assert torch.equal(logits(model, inputs), before)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("adapters", [True, False])
def test_that_packed_weights_are_frozen_is_said_where_it_is_not_meant(adapters, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    logger.warning_once.cache_clear()
    model = load()
    (adapted(model) if adapters else model).train()
    assert ("frozen in training" in caplog.text) is not adapters


def test_all_linear_with_a_plain_config_trains_over_packed_weights():
    model = get_peft_model(load(), LoraConfig(r=2, target_modules="all-linear"))
    inputs = text_inputs()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    names = {name for name, p in model.named_parameters() if p.grad is not None}
    assert any(".self_attn.q_b_proj.lora_B" in name for name in names) and not any("o_a_proj" in n for n in names)
    with pytest.raises(ValueError, match="Dsv4GroupedLinear"):
        get_peft_model(load(), LoraConfig(r=2, target_modules=["o_a_proj"]))


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"lora_bias": True}, {"init_lora_weights": "olora"}], ids=lambda s: next(iter(s))
)
def test_variants_that_experts_have_not_are_refused(settings):
    model = load()
    with pytest.raises(ValueError, match="use_dora|lora_bias|init_lora_weights"):
        get_peft_model(model, lora_layers(model, LoraConfig(target_modules=["experts"], **settings)))


def test_packed_weights_never_become_trainable():
    model = load()
    model.requires_grad_(True)
    model.model.language_model.layers[0].self_attn.q_a_proj.requires_grad_(True)
    trainable = {p.dtype for p in model.parameters() if p.requires_grad}
    assert trainable == {torch.float32}
    assert {p.dtype for p in model.parameters()} > trainable


@pytest.mark.parametrize("dequantize", [False, True], ids=["packed", "float"])
def test_checkpointing_gives_the_same_gradients(dequantize):
    """Over several Reindex layers and a vision tower; every layer runs twice."""
    model, inputs = adapted(load(dequantize=dequantize)).train(), image_inputs()
    runs, gradients = [], []
    parts = model.base_model.model.model
    norms = [layer.input_layernorm for layer in parts.language_model.layers]
    norms += [layer.norm1 for layer in parts.vision_tower.layers]
    for norm in norms:  # inside the layers: hooks of a checkpointed module itself run once
        norm.register_forward_pre_hook(lambda *_: runs.append(1))
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 100
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
    assert len(runs) == 3 * len(norms)


def test_trl_trains_adapters_over_the_packed_release_with_text_and_images(tmp_path):
    """`SFTTrainer`, 10 steps: the loss falls; the saved adapter loads, and merged into a float model serves the same."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    processor = AutoProcessor.from_pretrained(CHECKPOINT_V41)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8))
    question = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
    examples = [
        processor.apply_chat_template(
            [{"role": "user", "content": content}, {"role": "assistant", "content": answer}],
            tokenize=True, return_dict=True, return_assistant_tokens_mask=True, enable_thinking=False,
        )
        for content, answer in ((question, "a river"), ("Who reads?", "the reader"))
    ]  # fmt: skip
    rows = [{k: np.asarray(v).tolist() for k, v in example.items()} for example in examples]
    keys = {key for row in rows for key in row}
    data = datasets.Dataset.from_list([{key: row.get(key) for key in keys} for row in rows] * 4)
    settings = trl.SFTConfig(
        str(tmp_path / "run"), max_steps=10, per_device_train_batch_size=2, learning_rate=0.02, logging_steps=1,
        lr_scheduler_type="constant", use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False, remove_unused_columns=False, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    model = load()
    trainer = trl.SFTTrainer(
        model,
        settings,
        train_dataset=data,
        data_collator=Dsv4DataCollator(processor),
        processing_class=processor.tokenizer,
        peft_config=lora_layers(model, LoraConfig(r=4, target_modules=TARGETS)),
        optimizer_cls_and_kwargs=(Dsv4OptimizerFactory, {"lr": 0.02, "report": False}),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10 and losses[-1] < 0.5 * losses[0], losses
    trainer.save_model(tmp_path / "adapter")
    batch = Dsv4DataCollator(processor)([dict(row) for row in rows])
    batch.pop("labels")
    expected = logits(trainer.model.eval(), batch)
    float_model = load(dequantize=True)
    merged = PeftModel.from_pretrained(
        float_model, tmp_path / "adapter", config=lora_layers(float_model, tmp_path / "adapter")
    ).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    served = modeling_dsv4.Dsv41ForConditionalGeneration.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    served.set_tokenizer(processor.tokenizer)
    torch.testing.assert_close(logits(served.eval(), batch), expected, rtol=0, atol=1e-3)
