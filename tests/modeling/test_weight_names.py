"""The name table, against the full inventory of the released files, and the released model on the meta device."""

import re
import resource
import time
from collections import Counter
from itertools import product
from math import prod

import pytest
import torch

from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41Config, Dsv41ForCausalLM, Dsv41TextModel
from modeling_dsv4.host_tensors import HostTensors
from modeling_dsv4.quantization import Dsv4HfQuantizer
from modeling_dsv4.weight_names import OPTIONAL_PARTS, WeightNames
from tests.golden_cases import GOLDEN, load_json

INVENTORY = load_json(GOLDEN / "tensors_v41_flash.json")
DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}
# (language prefix, vision prefix) of the model classes.
CLASSES = {
    "text model": ("", None),
    "text with head": ("model.", None),
    "text and image": ("language_model.", ""),
    "text and image with head": ("model.language_model.", "model."),
}


def numbers(text):
    """The numbers of a range such as "0..19" or "2,8,14"."""
    if ".." in text:
        low, high = map(int, text.split(".."))
        return range(low, high + 1)
    return [int(part) for part in text.split(",")]


def expand(row):
    """Every tensor name of a row of the inventory."""
    holes = list(row["ranges"])
    for values in product(*(numbers(row["ranges"][hole]) for hole in holes)):
        yield row["name"].format(**dict(zip(holes, values, strict=True)))


@pytest.fixture(scope="module")
def inventory():
    """Released name -> (dtype, shape, group, kind) of all tensors."""
    table = {}
    for row in INVENTORY["tensors"]:
        names = list(expand(row))
        assert len(names) == row["count"], row["name"]
        for name in names:
            assert name not in table
            table[name] = DTYPES[row["dtype"]], tuple(row["shape"]), row["group"], row["kind"]
    return table


def test_inventory_is_complete(inventory):
    assert len(inventory) == 96085
    assert sum(prod(shape) * dtype.itemsize for dtype, shape, _, _ in inventory.values()) == 510_286_023_000


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CLASSES)
def test_every_released_name_round_trips(case, inventory):
    names = WeightNames(*CLASSES[case])
    vision = CLASSES[case][1] is not None
    ours = {}
    for name in inventory:
        target = names.to_ours(name)
        if not vision and OPTIONAL_PARTS["vision"].search(name):
            assert target is None
            continue
        assert target is not None, name
        assert names.to_released(target) == name
        ours[target] = name
        if ".experts." in name and ".experts.0." not in name:
            continue  # the other experts differ from the first in their number only
        assert names.to_ours("model." + name) == target, name
        # Names already in their form stay as they are.
        assert names.to_ours(target) == target and names.to_released(name) == name
    assert len(ours) == len(inventory) - (0 if vision else 266)


@pytest.mark.parametrize("case", CLASSES)
def test_numbers_keep_their_places(case):
    names = WeightNames(*CLASSES[case])
    prefix = CLASSES[case][0]
    assert names.to_ours("layers.7.ffn.experts.301.w3.scale") == (
        f"{prefix}layers.7.mlp.experts.301.up_proj.weight_scale_inv"
    )
    assert names.to_ours("mtp.2.ffn.experts.11.w2.weight") == f"{prefix}mtp.2.mlp.experts.11.down_proj.weight"


@pytest.mark.parametrize("case", CLASSES)
@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.wq_c.weight",  # no such matrix
        "layers.0.attn.q_norm.scale",  # norms have no scale
        "layers.0.attn.attn_sink.weight",  # a bare parameter
        "layers.x.attn.wq_a.weight",  # not a number
        "layers.0.0.attn.wq_a.weight",
        "layers.0.ffn.experts.w1.weight",  # no expert number
        "model.model.embed.weight",  # a doubled prefix
        "embed",
        "",
        "mtp.0.attn.compressor.wkv.weight",  # drafts have no compressor
        "vision.blocks.0.norm1.bias",
    ],
)
def test_unknown_names_are_none(case, name):
    names = WeightNames(*CLASSES[case])
    assert names.to_ours(name) is None and names.to_released(name) is None


def test_fused_banks_are_known_but_have_no_released_name():
    names = WeightNames("model.")
    for bank in ("gate_up_proj", "down_proj"):
        name = f"model.layers.3.mlp.experts.{bank}"
        assert names.to_ours(name) == name and names.to_released(name) is None


def test_optional_parts_cover_what_the_text_classes_lack(inventory):
    left = Counter()
    for name, (_, _, group, _) in inventory.items():
        parts = [part for part, pattern in OPTIONAL_PARTS.items() if pattern.search(name)]
        left[tuple(parts), group] += 1
    assert left[("drafts",), "dspark"] == 2401
    assert left[("vision",), "vision"] == 266
    assert left[("prediction head",), "head"] == 1  # the text model alone
    assert all(parts == () or group in ("dspark", "vision", "head") for parts, group in left)
    assert left[(), "head"] == 1  # the final norm belongs to every class


# ---- the released model, without memory --------------------------------------------------------------------------------


def build(model_class):
    """The released configuration, packed as a load packs it, on the meta device; (model, seconds, bytes of memory)."""
    config = Dsv41Config.from_pretrained(GOLDEN / "config_v41_flash.json")
    quantization = Dsv4QuantizationConfig(**config.to_dict()["quantization_config"])
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = model_class(config)
        finally:
            torch.set_default_dtype(previous)
        Dsv4HfQuantizer(quantization, pre_quantized=True).preprocess_model(model=model, dtype=torch.bfloat16)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return model, time.perf_counter() - start, grown


@pytest.fixture(scope="module")
def released_model():
    return build(Dsv41ForCausalLM)


@pytest.mark.parametrize("model_class", [Dsv41ForCausalLM, Dsv41TextModel])
def test_released_model_has_exactly_the_inventory(model_class, inventory, released_model):
    model = released_model[0] if model_class is Dsv41ForCausalLM else build(model_class)[0]
    absent = ("drafts", "vision") if model_class is Dsv41ForCausalLM else ("drafts", "vision", "prediction head")
    expected = {
        name: (dtype, shape)
        for name, (dtype, shape, _, _) in inventory.items()
        if not any(OPTIONAL_PARTS[part].search(name) for part in absent)
    }
    found = {}
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == "meta"
        released = model.weight_names.to_released(name)
        assert released is not None, name
        found[released] = tensor.dtype, tuple(tensor.shape)
    assert found.keys() == expected.keys()
    # The promotions of the release are made where a value is used; what is held has the stored dtype.
    assert {n: found[n] for n in found if found[n] != expected[n]} == {}
    assert len(found) == 96085 - 2401 - 266 - (model_class is Dsv41TextModel)


def test_released_model_is_built_quickly_and_without_memory(released_model):
    _, seconds, grown = released_model
    print(f"released configuration on meta: {seconds:.1f} s, +{grown / 2**20:.0f} MiB")
    assert seconds < 60 and grown < 1 << 30


def test_parameter_sums(inventory, released_model):
    model = released_model[0]
    sums = Counter()
    for name, tensor in model.state_dict().items():
        _, _, group, kind = inventory[model.weight_names.to_released(name)]
        if kind == "param":
            sums[group] += tensor.numel() * (2 if tensor.dtype == torch.int8 else 1)
    table = sums.pop("engram_table")
    assert table == 196_613_849_600
    assert sum(sums.values()) == 551_880_835_184
    assert dict(sums) == {
        group: count
        for group, count in INVENTORY["summary"]["params_by_group"].items()
        if group not in ("engram_table", "dspark", "vision")
    }
    # The selection biases are buffers, which `num_parameters` does not count: 40 layers, 2 modalities, 384 experts.
    assert model.num_parameters() == table + sum(sums.values()) - 40 * 2 * 384
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model.num_parameters(only_trainable=True) == trainable


def test_tables_and_experts_are_on_the_host_and_the_rest_is_not(released_model):
    model = released_model[0]
    host = {f"{path}.{n}" for path, m in model.named_modules() if isinstance(m, HostTensors) for n in m.host_names()}
    assert len(host) == 40 * 384 * 6 + 4
    assert all(re.search(r"\.mlp\.experts\.\d+\.|\.engram\.embedding\.", name) for name in host)
    assert not host & {name for name, _ in model.named_parameters()}
