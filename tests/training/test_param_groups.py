"""Routing by role: the released models on the meta device, a tiny one, adapters, wrappers, and what is refused."""

import pytest
import torch

from modeling_dsv4.training import Dsv4Optimizer, build_param_groups

from .standin import build_tree, namespace, released, set_gradients, tiny_v41


def flash(family):
    config, tensors, total = released(family)
    return build_tree(tensors, config, device="meta"), total


def table(groups):
    """name -> what its group says, for one layer's worth of looking up."""
    result = {}
    for group in groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            splits = group.get("row_splits")
            result[name] = (group["algorithm"], splits, group["weight_decay"], group["lr_scale"], tuple(p.shape))
    return result


def find(routes, suffix):
    found = {route[:4] for name, route in routes.items() if f".{name}".endswith(f".{suffix}")}
    assert len(found) == 1, (suffix, found)
    return found.pop()


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_every_released_parameter_is_in_exactly_one_group(family):
    model, total = flash(family)
    groups = build_param_groups(model, report=False)
    placed = [id(p) for group in groups for p in group["params"]]
    assert sorted(placed) == sorted(id(p) for p in model.parameters())
    names = [name for group in groups for name in group["names"]]
    assert len(names) == len(set(names)) == len(placed)
    # With the correction biases (buffers here), the inventory's parameter count.
    biases = sum(b.numel() for name, b in model.named_buffers() if "bias" in name)
    assert sum(p.numel() for group in groups for p in group["params"]) + biases == total


# What V4.1 §2.5 says, role by role: (algorithm, row_splits, weight decay, learning-rate factor).
V41 = {
    "embed_tokens.weight": ("sinkhorn", None, 0.0, 1.0),
    "lm_head.weight": ("sinkhorn", None, 0.0, 1.0),
    "engram.embedding.weight": ("sinkhorn", None, 0.0, 1.0),
    "markov_head.embed.weight": ("sinkhorn", None, 0.0, 1.0),
    "markov_head.head.weight": ("sinkhorn", None, 0.0, 1.0),
    "confidence_head.proj.weight": ("adamw", None, 0.1, 1.0),
    "engram.kv_proj.weight": ("muon", (5120,) * 5, 0.1, 1.0),
    "engram.q_weight": ("adamw", None, 0.1, 1.0),
    "engram.k_weight": ("adamw", None, 0.1, 1.0),
    "self_attn.q_a_proj.weight": ("muon", None, 0.1, 1.0),
    "self_attn.q_b_proj.weight": ("muon", (512,) * 64, 0.1, 1.0),
    "self_attn.kv_proj.weight": ("muon", None, 0.1, 1.0),
    "self_attn.o_a_proj.weight": ("muon", (1024,) * 8, 0.1, 1.0),
    "self_attn.o_b_proj.weight": ("muon", None, 0.1, 1.0),
    "compressor.kv_proj.weight": ("muon", None, 0.1, 1.0),
    "compressor.gate_proj.weight": ("muon", None, 0.1, 1.0),
    "indexer.q_b_proj.weight": ("muon", (128,) * 32, 0.1, 1.0),
    "indexer.k_proj.weight": ("muon", None, 0.1, 1.0),
    "indexer.weights_proj.weight": ("muon", None, 0.1, 1.0),
    "mlp.gate.weight": ("muon", None, 0.1, 1.0),
    "mlp.experts.gate_up_proj": ("muon", (2304, 2304), 0.1, 1.0),
    "mlp.experts.down_proj": ("muon", None, 0.1, 1.0),
    "shared_experts.gate_proj.weight": ("muon", None, 0.1, 1.0),
    "shared_experts.down_proj.weight": ("muon", None, 0.1, 1.0),
    "attn_hc.fn": ("muon", None, 0.1, 1.0),
    "attn_hc.base": ("adamw", None, 0.0, 1.0),
    "ffn_hc.scale": ("adamw", None, 0.0, 1.0),
    "self_attn.sinks": ("adamw", None, 0.0, 1.0),
    "input_layernorm.weight": ("adamw", None, 0.1, 1.0),
    "q_a_norm.weight": ("adamw", None, 0.1, 1.0),
    "main_norm.weight": ("adamw", None, 0.1, 1.0),
    "main_proj.weight": ("muon", None, 0.1, 1.0),
    "patch_embed.weight": ("muon", None, 0.1, 0.1),
    "patch_embed.bias": ("adamw", None, 0.0, 0.1),
    "attn.qkv.weight": ("muon", (64,) * 32 + (1024,), 0.1, 0.1),
    "attn.qkv.bias": ("adamw", None, 0.0, 0.1),
    "layers.3.attn.proj.weight": ("muon", None, 0.1, 0.1),
    "layers.3.mlp.gate_up_proj.weight": ("muon", (2816, 2816), 0.1, 0.1),
    "layers.3.mlp.down_proj.weight": ("muon", None, 0.1, 0.1),
    "layers.3.norm1.weight": ("adamw", None, 0.1, 0.1),
    "vision_tower.norm.weight": ("adamw", None, 0.1, 1.0),
    "linear_1.weight": ("muon", None, 0.1, 1.0),
    "linear_2.bias": ("adamw", None, 0.0, 1.0),
    "image_newline": ("adamw", None, 0.0, 1.0),
}
# V4 (report §2.4): AdamW for embedding and head, decay on all of AdamW's, whole query matrices.
V4 = {
    "embed_tokens.weight": ("adamw", None, 0.1, 1.0),
    "lm_head.weight": ("adamw", None, 0.1, 1.0),
    "self_attn.q_b_proj.weight": ("muon", None, 0.1, 1.0),
    "self_attn.o_a_proj.weight": ("muon", (1024,) * 8, 0.1, 1.0),
    "layers.2.self_attn.compressor.kv_proj.weight": ("muon", (512, 512), 0.1, 1.0),
    "layers.3.self_attn.compressor.kv_proj.weight": ("muon", None, 0.1, 1.0),
    "layers.2.self_attn.indexer.compressor.gate_proj.weight": ("muon", (128, 128), 0.1, 1.0),
    "indexer.q_b_proj.weight": ("muon", None, 0.1, 1.0),
    "mlp.experts.gate_up_proj": ("muon", (2048, 2048), 0.1, 1.0),
    "position_bias": ("adamw", None, 0.1, 1.0),
    "hc_head.fn": ("muon", None, 0.1, 1.0),
    "hc_head.base": ("adamw", None, 0.1, 1.0),
    "self_attn.sinks": ("adamw", None, 0.1, 1.0),
    "e_proj.weight": ("muon", None, 0.1, 1.0),
    "enorm.weight": ("adamw", None, 0.1, 1.0),
    "kv_norm.weight": ("adamw", None, 0.1, 1.0),
}


@pytest.mark.parametrize(("family", "expected"), [("v41", V41), ("v4", V4)])
def test_roles_of_the_released_models(family, expected):
    routes = table(build_param_groups(flash(family)[0], report=False))
    assert {suffix: find(routes, suffix) for suffix in expected} == expected


def test_correction_biases_and_tables_belong_to_no_group():
    names = [name for group in build_param_groups(flash("v4")[0], report=False) for name in group["names"]]
    assert not [name for name in names if "e_score_correction_bias" in name or "tid2eid" in name]


def test_the_printed_report(capsys):
    model, _ = flash("v41")
    groups = build_param_groups(model)
    text = capsys.readouterr().out
    assert groups[0]["routing"] in text
    row = next(line for line in text.splitlines() if line.startswith("query by heads"))
    # 40 layers and 3 draft blocks of 64 heads: 43 * 64 * 10 (4 * 512^2 * 1280 + 2 * 512^3) operations.
    flops = 43 * 64 * 10 * (4 * 512**2 * 1280 + 2 * 512**3)
    assert row.split() == [
        "query",
        "by",
        "heads",
        "muon",
        "64",
        "x",
        "512",
        "43",
        f"{43 * 32768 * 1280:,}",
        "1",
        "0.1",
        "7.21",
        "GB",
        f"{flops:.3g}",
    ]
    assert (
        "32 x 64 + 1024" in text and "rules without a trainable parameter: indexer compressor, position bias" in text
    )
    assert "matrices on AdamW" in text and "engram gains" in text
    build_param_groups(model, report=False)
    assert capsys.readouterr().out == ""


def tiny(**changes):
    config, tensors = tiny_v41(**changes)
    return build_tree(tensors, config)


def test_first_group_is_text_and_vision_comes_last():
    groups = build_param_groups(tiny(), lr=1.0, report=False)
    roles = [group["role"] for group in groups]
    assert roles == sorted(roles) and {"text", "vision"} == set(roles)
    assert {group["lr"] for group in groups if group["role"] == "vision"} == {0.1}
    assert "routing" in groups[0] and not any("routing" in group for group in groups[1:])


def test_the_hash_tells_routings_apart_and_nothing_else():
    def routing(model, **options):
        return build_param_groups(model, report=False, **options)[0]["routing"]

    base = routing(tiny())
    assert routing(tiny()) == base
    assert routing(tiny(), lr=3.0, weight_decay=0.2, vision_lr_scale=0.2) == base
    assert routing(tiny(), rules={r"\.attn_hc\.fn$": {"row_splits": (2, 2, 4)}}) != base
    frozen = tiny()
    next(frozen.parameters()).requires_grad_(False)
    assert routing(frozen) != base


@pytest.mark.parametrize("attribute", ["module", "_orig_mod", "_checkpoint_wrapped_module"])
def test_names_do_not_depend_on_wrappers(attribute):
    model = tiny()
    wrapper = torch.nn.Module()
    wrapper.add_module(attribute, model)
    wrapper.config = model.config
    plain, wrapped = build_param_groups(tiny(), report=False), build_param_groups(wrapper, report=False)
    assert [g["names"] for g in plain] == [g["names"] for g in wrapped]
    assert plain[0]["routing"] == wrapped[0]["routing"]


def test_the_config_is_found_inside_a_data_parallel_wrapper():
    wrapper = torch.nn.Module()
    wrapper.module = tiny()
    assert (
        build_param_groups(wrapper, report=False)[0]["routing"]
        == build_param_groups(tiny(), report=False)[0]["routing"]
    )


def test_user_rules_replace_splits_algorithms_and_options():
    groups = build_param_groups(
        tiny(),
        report=False,
        rules={
            r"\.attn_hc\.fn$": {"row_splits": (2, 2, 4)},
            r"^lm_head": {"algorithm": "adamw", "weight_decay": 0.05, "betas": (0.8, 0.9)},
        },
        muon={"ns_dtype": "float32"},
        sinkhorn={"rows": "touched"},
    )
    routes = table(groups)
    assert find(routes, "attn_hc.fn")[:2] == ("muon", (2, 2, 4))
    assert find(routes, "lm_head.weight")[:3] == ("adamw", None, 0.05)
    by_algorithm = {
        algorithm: [g for g in groups if g["algorithm"] == algorithm] for algorithm in ("muon", "sinkhorn")
    }
    assert all(g["ns_dtype"] == "float32" for g in by_algorithm["muon"])
    assert all(g["rows"] == "touched" for g in by_algorithm["sinkhorn"])
    assert Dsv4Optimizer(groups, lr=1e-3).param_groups[0]["lr"] == 1e-3


def test_a_user_rule_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"match no trainable parameter: \['q_c_proj'\]"):
        build_param_groups(tiny(), report=False, rules={"q_c_proj": {"algorithm": "adamw"}})


@pytest.mark.parametrize(
    ("old", "new", "label"),
    [
        ("self_attn.q_b_proj", "self_attn.q_up_proj", "query by heads"),
        ("indexer.q_b_proj", "indexer.q_up_proj", "indexer query"),
        ("engram.kv_proj", "engram.wkv", "engram projection"),
        ("experts.", "expert_bank.", "experts gate and up"),
    ],
)
def test_a_renamed_part_is_refused_instead_of_losing_its_rule(old, new, label):
    config, tensors = tiny_v41()
    renamed = {name.replace(old, new): value for name, value in tensors.items()}
    with pytest.raises(ValueError, match=f"match nothing.*{label}"):
        build_param_groups(build_tree(renamed, config), report=False)


def test_parts_that_the_config_does_not_promise_may_be_absent():
    config, tensors = tiny_v41(engram_layer_ids=[], index_source_layer_ids=[])
    kept = {n: v for n, v in tensors.items() if ".engram." not in n and ".indexer." not in n and "vision" not in n}
    model = build_tree(kept, config)
    routed = [parameter for group in build_param_groups(model, report=False) for parameter in group["params"]]
    assert {id(parameter) for parameter in routed} == {id(parameter) for parameter in model.parameters()}


def test_splits_that_contradict_the_config_are_refused():
    model = tiny()
    model.config.text_config.num_attention_heads = 5
    with pytest.raises(ValueError, match=r"q_b_proj.*40 rows by the config.*has 32"):
        build_param_groups(model, report=False)


def test_packed_and_four_dimensional_parameters_are_refused_by_name():
    model = tiny()
    model.packed = torch.nn.Parameter(torch.ones(2, 2).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"packed \(torch.float8_e4m3fn\)"):
        build_param_groups(model, report=False)
    model.packed.requires_grad_(False)
    model.kernel = torch.nn.Parameter(torch.ones(1, 1, 2, 2))
    with pytest.raises(ValueError, match=r"kernel \(4 dimensions\)"):
        build_param_groups(model, report=False)


def test_other_families_frozen_models_and_missing_configs_are_refused():
    model = tiny()
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_param_groups(model, report=False)
    model.config = namespace({"model_type": "llama"})
    with pytest.raises(ValueError, match="llama"):
        build_param_groups(model, report=False)
    del model.config
    with pytest.raises(ValueError, match="config"):
        build_param_groups(model, report=False)
    with pytest.raises(ValueError, match="muon_a"):
        build_param_groups(tiny(), report=False, lora="muon_a")


def test_unknown_names_go_by_shape_and_are_reported(capsys):
    model = tiny()
    model.score = torch.nn.Linear(16, 3)
    model.gain = torch.nn.Parameter(torch.ones(()))
    routes = table(build_param_groups(model))
    assert routes["score.weight"][:3] == ("muon", None, 0.1)
    assert routes["gain"][0] == "adamw" and routes["gain"][2] == 0.0
    assert "named by no rule (shape decided): gain, score.weight" in capsys.readouterr().out


def lora_model():
    """Names and shapes as PEFT makes them: linear layers, an expert bank, an embedding, a saved module."""
    config, tensors = tiny_v41()
    layer = "model.language_model.layers.0."
    renamed = {}
    for name, value in tensors.items():
        for target in (layer + "self_attn.q_b_proj.", layer + "mlp.experts."):
            name = name.replace(target, target + "base_layer.")
        renamed[f"base_model.model.{name}"] = value
    f32, top = torch.float32, f"base_model.model.{layer}"
    adapters = {
        top + "self_attn.q_b_proj.lora_A.default.weight": ((2, 12), f32),
        top + "self_attn.q_b_proj.lora_B.default.weight": ((32, 2), f32),
        top + "self_attn.q_b_proj.lora_magnitude_vector.default.weight": ((32,), f32),
        top + "mlp.experts.lora_A.default.weight": ((12, 16), f32),
        top + "mlp.experts.lora_B.default.weight": ((20, 12), f32),
        top + "mlp.experts.base_layer.lora_A.default.weight": ((12, 10), f32),
        top + "mlp.experts.base_layer.lora_B.default.weight": ((16, 12), f32),
        "base_model.model.model.language_model.embed_tokens.lora_embedding_A.default": ((2, 40), f32),
        "base_model.model.model.language_model.embed_tokens.lora_embedding_B.default": ((16, 2), f32),
        "base_model.model.lm_head.modules_to_save.default.weight": ((40, 16), f32),
    }
    model = build_tree({**renamed, **adapters}, config)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name or "modules_to_save" in name)
    return model


@pytest.mark.parametrize(
    ("mode", "a", "b"),
    [
        ("adamw", ("adamw", None, 0.0), ("adamw", None, 0.0)),
        ("muon_b", ("adamw", None, 0.0), ("muon", (8,) * 4, 0.0)),
        ("muon", ("muon", None, 0.0), ("muon", (8,) * 4, 0.0)),
    ],
)
def test_adapters(mode, a, b):
    routes = table(build_param_groups(lora_model(), report=False, lora=mode))
    assert find(routes, "q_b_proj.lora_A.default.weight")[:3] == a
    assert find(routes, "q_b_proj.lora_B.default.weight")[:3] == b
    for bank in ("experts", "experts.base_layer"):
        for part in "AB":
            assert find(routes, f"{bank}.lora_{part}.default.weight")[:3] == ("adamw", None, 0.0)
    assert find(routes, "lora_embedding_A.default")[:3] == ("adamw", None, 0.0)
    assert len(routes) == sum(p.requires_grad for p in lora_model().parameters())
    assert find(routes, "lora_magnitude_vector.default.weight")[:3] == ("adamw", None, 0.0)
    assert routes["lm_head.weight"][0] == "sinkhorn"


def test_tied_weights_are_in_one_group_once():
    model = tiny()
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    groups = build_param_groups(model, report=False)
    placed = [id(p) for group in groups for p in group["params"]]
    assert len(placed) == len(set(placed)) == len(list(model.parameters()))


def test_a_tiny_model_takes_a_step_in_every_group():
    model = tiny()
    optimizer = Dsv4Optimizer(build_param_groups(model, report=False), lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    set_gradients(model, 0)
    optimizer.step()
    for group in optimizer.param_groups:
        if group["algorithm"] == "adamw" or group["lr_scale"] != 1.0:
            continue
        for name, p in zip(group["names"], group["params"], strict=True):
            change = before[name] * (1 - 1e-2 * group["weight_decay"]) - p.detach()
            rms = change.square().mean().sqrt().item()
            # Every matrix is moved by lr * 0.18 RMS: full-rank gradients, each block with its own factor.
            assert rms == pytest.approx(0.18e-2, rel=0.02), name
