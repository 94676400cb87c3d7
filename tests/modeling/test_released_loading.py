"""Loading and saving released-layout folders: bytes, floats, every door, every fault by name."""

import copy
import importlib
import logging
import os
import pathlib
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import modeling_dsv4
from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41Config, Dsv41ForCausalLM, Dsv41Model, Dsv41TextModel
from modeling_dsv4.configuration_common import PACKED_METHOD
from modeling_dsv4.host_tensors import HostTensors, host_modules
from modeling_dsv4.moe import Dsv4PackedExperts
from modeling_dsv4.quantization import PACKED_DTYPES
from tests.golden_cases import CHECKPOINT_V41, load_json
from tests.reference import formats
from tests.released_folders import Folder, same_bytes, small_folder, stored_tensors

IDS = torch.arange(20, 37)[None]
DEQUANTIZE = Dsv4QuantizationConfig(dequantize=True)
ABSENT = re.compile(r"^(mtp|vision|aligner)\.|^image_")
LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads /proc, which Linux has")


@pytest.fixture(scope="module")
def golden():
    """Four layers of the golden checkpoint: enough for everything that does not depend on a layer's mode."""
    return small_folder()


@pytest.fixture(scope="module")
def small(golden, tmp_path_factory):
    return golden.write(tmp_path_factory.mktemp("small") / "ckpt")


def text_part(folder):
    """Released name -> tensor of a folder, without the parts that the text classes lack."""
    return {name: tensor for name, tensor in stored_tensors(folder).items() if not ABSENT.search(name)}


@pytest.fixture(scope="module")
def stored(small):
    return text_part(small)


def load(folder, model_class=Dsv41ForCausalLM, **options):
    return model_class.from_pretrained(folder, **options)


def logits(model):
    with torch.no_grad():
        output = model(IDS)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def released_state(model):
    return {model.weight_names.to_released(name): tensor for name, tensor in model.state_dict().items()}


def assert_packed_bytes(model, stored):
    """Every packed tensor of the model holds the file's bytes, in the file's dtype."""
    state = released_state(model)
    packed = [name for name in state if stored[name].dtype in PACKED_DTYPES]
    assert len(packed) == sum(t.dtype in PACKED_DTYPES for n, t in stored.items() if n in state) > 200
    for name in packed:
        assert same_bytes(state[name].cpu(), stored[name]), name


@pytest.fixture(scope="module")
def packed(small):
    return load(small)


@pytest.fixture(scope="module")
def expected(packed):
    return logits(packed)


# ---- packed: the file's bytes, on the mapping ------------------------------------------------------------------------


def test_packed_load_keeps_every_byte():
    stored = text_part(CHECKPOINT_V41)
    state = released_state(load(CHECKPOINT_V41))
    assert state.keys() == stored.keys()
    for name, tensor in stored.items():
        if tensor.dtype in PACKED_DTYPES or tensor.dtype == torch.bfloat16:
            assert same_bytes(state[name], tensor), name
        else:  # float32 stays float32 where the release computes in it
            assert state[name].dtype == torch.float32 and torch.equal(state[name], tensor), name


def test_packed_load_beside_the_code_of_a_hub_folder(small, tmp_path, monkeypatch):
    """A folder's own code registers its quantiser over the package's, which must pack the package's modules too."""
    code = tmp_path / "folder_code"
    shutil.copytree(pathlib.Path(modeling_dsv4.__file__).parent, code, ignore=shutil.ignore_patterns("*_kernels"))
    (code / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.setitem(registry, PACKED_METHOD, registry[PACKED_METHOD])
    importlib.import_module("folder_code.quantization").register_quantizer()
    assert AUTO_QUANTIZER_MAPPING[PACKED_METHOD].__module__ == "folder_code.quantization"
    model = Dsv41ForCausalLM.from_pretrained(small, dtype=torch.float32)
    assert (
        model.model.layers[0].self_attn.q_a_proj.is_packed
        and not model.model.layers[0].self_attn.q_a_proj.weight.requires_grad
    )
    assert isinstance(model.model.layers[0].mlp.experts, Dsv4PackedExperts)
    assert (
        set(host_modules(model)) == {name for name, m in model.named_modules() if isinstance(m, HostTensors)} != set()
    )


def test_packed_tensors_need_no_gradient(packed):
    assert not [n for n, p in packed.named_parameters() if p.dtype in PACKED_DTYPES and p.requires_grad]
    assert [n for n, p in packed.named_parameters() if p.requires_grad]


def file_ranges(folder):
    """Address ranges of this process that are mapped from files of `folder`."""
    ranges = []
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(str(folder)):
            start, stop = (int(x, 16) for x in fields[0].split("-"))
            ranges.append((start, stop))
    return ranges


@LINUX
@pytest.mark.parametrize("options", [{}, {"device_map": {"": "cpu"}}, {"device_map": "auto"}], ids=str)
def test_packed_tensors_lie_in_the_mapped_files(golden, tmp_path, options):
    folder = golden.write(tmp_path / "ckpt")
    model = load(folder, **options)
    ranges = file_ranges(folder)
    assert ranges
    for name, tensor in model.state_dict().items():
        inside = any(start <= tensor.data_ptr() < stop for start, stop in ranges)
        # The tables of names that stay float32 are views too: nothing at all was copied.
        assert inside, name


def anonymous_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


@LINUX
def test_loading_takes_no_memory_of_its_own(tmp_path, golden, small):
    """A 200 MB table in the file: anonymous memory grows by a small part of it."""
    folder = golden.copy()
    rows = 6_000_000
    folder.config["text_config"]["engram_num_embeddings"] = [rows]
    folder["layers.1.engram.embed.weight"] = torch.zeros(rows, 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
    folder["layers.1.engram.embed.scale"] = torch.full((rows, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    path = folder.write(tmp_path / "ckpt")
    del folder
    load(small)  # whatever a first load allocates once
    before = anonymous_bytes()
    model = load(path)
    grown = anonymous_bytes() - before
    print(f"anonymous memory +{grown / 2**20:.1f} MiB for a file of {rows * 33 / 2**20:.0f} MiB")
    assert grown < 24 << 20
    assert logits(model).isfinite().all() and anonymous_bytes() - before < 100 << 20


def test_disable_mmap_reads_the_same_bytes(golden, stored, tmp_path):
    folder = golden.write(tmp_path / "ckpt")
    model = load(folder, disable_mmap=True)
    assert_packed_bytes(model, stored)
    if sys.platform == "linux":
        assert not file_ranges(folder)


# ---- dequantised: the reference's numbers, bit for bit ------------------------------------------------------------------


def reference_weight(stored, name):
    """Float64 value of a stored weight, by the table-driven reference."""
    weight, scale = stored[name], stored.get(name.removesuffix(".weight") + ".scale")
    if weight.dtype == torch.int8:
        return formats.dequantize_fp4_rows(weight.numpy(), scale.view(torch.uint8).numpy())
    if weight.dtype == torch.float8_e4m3fn:
        codes, scales = weight.view(torch.uint8).numpy(), scale.view(torch.uint8).numpy()
        return (formats.dequantize_fp8_rows if "engram.embed" in name else formats.dequantize_fp8_tiles)(codes, scales)
    return weight.double().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dequantised_floats_equal_the_reference_bit_for_bit(small, dtype):
    folder = CHECKPOINT_V41 if dtype == torch.float32 else small
    stored = text_part(folder)
    model = load(folder, dtype=dtype, quantization_config=DEQUANTIZE)
    state = model.state_dict()
    assert not [name for name, tensor in state.items() if tensor.dtype in PACKED_DTYPES]
    checked = set()
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        expected = torch.from_numpy(reference_weight(stored, name))
        ours = model.weight_names.to_ours(name)
        match = re.match(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", ours)
        if match:
            bank = f"{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}"
            found = state[bank][int(match[2])]
            half = len(found) // 2
            found = {"gate": found[:half], "up": found[half:], "down": found}[match[3]]
            checked.add(bank)
        else:
            found = state[ours]
            checked.add(ours)
        assert found.shape == expected.shape, name
        assert torch.equal(found.double(), expected.to(found.dtype).double()), name
        if tensor.dtype in PACKED_DTYPES:  # every product of a code and a power of two is exact
            assert torch.equal(found.double(), expected), name
    assert checked == state.keys()


def test_float_model_computes_what_the_packed_one_does(small):
    both = Dsv4QuantizationConfig(dequantize=True, quantize_activations=True)
    a = logits(load(small, dtype=torch.float32))
    b = logits(load(small, dtype=torch.float32, quantization_config=both))
    c = logits(load(small, dtype=torch.float32, quantization_config=DEQUANTIZE))
    assert (a - b).abs().max() < 1e-4 < (a - c).abs().max()
    plain = Dsv4QuantizationConfig(quantize_activations=False)
    d = logits(load(small, dtype=torch.float32, quantization_config=plain))
    assert (c - d).abs().max() < 1e-4


# ---- every class, prefix and dtype -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prefixed(golden, tmp_path_factory):
    folder = golden.copy()
    folder.rename(lambda name: "model." + name)
    return folder.write(tmp_path_factory.mktemp("prefixed") / "ckpt")


CLASSES = {
    Dsv41TextModel: Dsv41TextModel,
    Dsv41ForCausalLM: Dsv41ForCausalLM,
    AutoModel: Dsv41Model,
    AutoModelForCausalLM: Dsv41ForCausalLM,
}


MATRIX = [(c, d) for c in (Dsv41TextModel, Dsv41ForCausalLM) for d in (torch.float32, torch.bfloat16, "auto")]
MATRIX += [(AutoModel, "auto"), (AutoModelForCausalLM, torch.float32)]


# The fast run takes every class and dtype packed or as floats, in turn.
@pytest.mark.parametrize(
    ("model_class", "dtype", "dequantize"),
    [
        pytest.param(c, d, dequantize, marks=pytest.mark.slow if (i + dequantize) % 2 else ())
        for i, (c, d) in enumerate(MATRIX)
        for dequantize in (False, True)
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_every_class_prefix_and_dtype(model_class, dequantize, dtype, small, prefixed):
    options = {"dtype": dtype} | ({"quantization_config": DEQUANTIZE} if dequantize else {})
    models = [load(folder, model_class, **options) for folder in (small, prefixed)]
    wanted = torch.bfloat16 if dtype == "auto" else dtype
    assert [type(model) for model in models] == [CLASSES[model_class]] * 2
    first, second = (model.state_dict() for model in models)
    assert models[0].dtype == wanted and first.keys() == second.keys()
    assert all(same_bytes(first[name], second[name]) for name in first)
    assert first[next(n for n in first if n.endswith("embed_tokens.weight"))].dtype == wanted
    if not dequantize:
        assert {t.dtype for t in first.values()} >= set(PACKED_DTYPES)
    one, other = map(logits, models)
    assert torch.equal(one, other) and one.isfinite().all()


@pytest.mark.parametrize("model_class", [Dsv41TextModel, Dsv41ForCausalLM], ids=lambda c: c.__name__)
def test_parts_left_on_disk_are_listed(model_class, small, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    load(small, model_class)
    found = re.findall(
        r"leaves (\d+) tensors of the checkpoint on disk, as it is meant to: the ([\w ]+), which", caplog.text
    )
    head = {("1", "prediction head")} if model_class is Dsv41TextModel else set()
    assert (
        set(found) == {("26", "vision tower"), ("169", "drafter")} | head
        and "AutoModelForImageTextToText" in caplog.text
    )


def test_ours_and_released_names_load_alike(golden, packed, tmp_path, expected):
    folder = golden.copy()
    folder.keep(lambda name: not ABSENT.search(name))
    folder.rename(packed.weight_names.to_ours)
    again = load(folder.write(tmp_path / "ours"))
    assert torch.equal(logits(again), expected)


# ---- placement and casts never touch packed bytes -----------------------------------------------------------------------


@pytest.mark.parametrize("dequantize", [False, True], ids=["packed", "float"])
def test_layers_offloaded_to_disk_compute_the_same(dequantize, small, tmp_path):
    options = {"quantization_config": DEQUANTIZE} if dequantize else {}
    model = load(small, device_map={"": "disk"}, offload_folder=str(tmp_path), **options)
    assert torch.equal(logits(model), logits(load(small, **options)))


DEVICE_MAPS = [{"": "cpu"}, "cpu", "auto", {"model.embed_tokens": "cpu", "model": "cpu", "lm_head": "cpu"}]


@pytest.mark.parametrize("device_map", DEVICE_MAPS, ids=str)
def test_device_maps_on_the_cpu(device_map, small, expected, stored):
    model = load(small, device_map=device_map)
    assert_packed_bytes(model, stored)
    assert torch.equal(logits(model), expected)


CASTS = {
    "to float32": lambda m: m.to(torch.float32),
    "to bfloat16": lambda m: m.to(torch.bfloat16),
    "to float64": lambda m: m.to(dtype=torch.float64),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "cpu": lambda m: m.cpu(),
    "to cpu": lambda m: m.to("cpu"),
    "deepcopy": copy.deepcopy,
    "requires_grad_": lambda m: m.requires_grad_(True),
    "train": lambda m: m.train(),
    "zero_grad": lambda m: m.zero_grad() or m,
    "share_memory": lambda m: m.share_memory(),
    "apply": lambda m: m.apply(lambda module: None),
    "own state dict": lambda m: m.load_state_dict(m.state_dict()) and m,
    "init_weights": lambda m: m.init_weights() or m,
}


@pytest.mark.parametrize("cast", CASTS)
def test_casts_leave_packed_bytes(cast, small, stored):
    model = CASTS[cast](load(small))
    assert_packed_bytes(model, stored)
    assert logits(model.eval()).isfinite().all()


@pytest.mark.parametrize("cast", ["half", "float"])
def test_casts_that_transformers_refuses_leave_packed_bytes(cast, small, stored):
    model = load(small)
    with pytest.raises(ValueError, match=cast):
        getattr(model, cast)()
    assert_packed_bytes(model, stored)
    getattr(model.model.layers, cast)()  # the parts themselves may be cast
    assert_packed_bytes(model, stored)


def test_cast_changes_the_float_part_only(small):
    model = load(small).to(torch.float32)
    assert model.model.embed_tokens.weight.dtype == torch.float32
    assert torch.allclose(logits(model), logits(load(small, dtype=torch.float32)), atol=1e-5)


def test_deepcopy_shares_host_bytes_and_owns_the_rest(packed):
    twin = copy.deepcopy(packed)
    for path, module in host_modules(packed).items():
        for name in module.host_names():
            assert twin.get_submodule(path).host_tensor(name).data_ptr() == module.host_tensor(name).data_ptr()
    with torch.no_grad():
        twin.model.norm.weight.fill_(3.0)
    assert not torch.equal(twin.model.norm.weight, packed.model.norm.weight)
    assert isinstance(twin.model.layers[0].mlp.experts, HostTensors)


def test_in_place_training_never_reaches_the_file(golden, tmp_path):
    folder = golden.write(tmp_path / "ckpt")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    model = load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
        model.model.layers[0].mlp.experts.host_tensor("0.gate_proj.weight").fill_(7)
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}


def test_files_may_be_deleted_after_loading(golden, tmp_path, expected):
    folder = golden.write(tmp_path / "ckpt")
    model = load(folder)
    for file in folder.iterdir():
        file.unlink()
    assert torch.equal(logits(model), expected)


# ---- saving ------------------------------------------------------------------------------------------------------------


def assert_saved_like(folder, stored):
    saved = stored_tensors(folder)
    assert saved.keys() == stored.keys()
    assert all(same_bytes(saved[name], stored[name]) for name in stored)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "100KB"}], ids=str)
def test_packed_model_is_saved_byte_for_byte(packed, small, stored, tmp_path, options, expected):
    packed.save_pretrained(tmp_path / "out", **options)
    assert_saved_like(tmp_path / "out", stored)
    config = load_json(tmp_path / "out" / "config.json")
    source = load_json(small / "config.json")
    assert config["quantization_config"] == source["quantization_config"]
    assert (config["architectures"], config["model_type"]) == (source["architectures"], source["model_type"])
    # What is not there is not promised.
    assert "vision_config" not in config and config["text_config"]["num_nextn_predict_layers"] == 0
    (tmp_path / "out" / "tokenizer.json").write_bytes((CHECKPOINT_V41 / "tokenizer.json").read_bytes())
    again = load(tmp_path / "out")
    assert torch.equal(logits(again), expected)
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == bool(options)


def test_saving_into_the_source_folder(golden, stored, tmp_path):
    folder = golden.write(tmp_path / "ckpt")
    load(folder).save_pretrained(folder, max_shard_size="1MB")
    written = load_json(folder / "model.safetensors.index.json")["weight_map"]
    assert written.keys() == stored.keys()
    assert_packed_bytes(load(folder), stored)


def test_base_class_alone_saves_released_names(small, stored, tmp_path):
    model = load(small, Dsv41TextModel)
    model.save_pretrained(tmp_path)
    assert_saved_like(tmp_path, {name: tensor for name, tensor in stored.items() if name != "head.weight"})
    again = load(tmp_path, Dsv41TextModel)
    again.set_tokenizer(Tokenizer.from_file(str(CHECKPOINT_V41 / "tokenizer.json")))
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(ValueError, match=r"missing from .*: head.weight"):
        load(tmp_path)


@pytest.mark.parametrize("original", [True, False], ids=["released names", "our names"])
def test_float_model_saves_and_reloads(small, tmp_path, stored, original):
    model = load(small, dtype=torch.float32, quantization_config=DEQUANTIZE)
    model.save_pretrained(tmp_path, save_original_format=original)
    assert "quantization_config" not in load_json(tmp_path / "config.json")
    names = stored_tensors(tmp_path).keys()
    floats = {name for name in stored if not name.endswith(".scale")}
    assert names == (floats if original else model.state_dict().keys())
    again = load(tmp_path, dtype=torch.float32)
    assert all(same_bytes(a, again.state_dict()[n]) for n, a in model.state_dict().items())


@pytest.mark.parametrize("from_packed_config", [True, False], ids=["config of packed files", "own config"])
@pytest.mark.parametrize("model_class", [Dsv41TextModel, Dsv41ForCausalLM], ids=lambda c: c.__name__)
def test_fresh_model_saves_and_reloads(small, tmp_path, model_class, from_packed_config):
    config = Dsv41Config.from_pretrained(small)
    if not from_packed_config:
        config = Dsv41Config(text_config=config.text_config.to_dict())
    model = model_class(config).float()
    model.save_pretrained(tmp_path / "1")
    again = load(tmp_path / "1", model_class, dtype=torch.float32)
    assert all(same_bytes(a, again.state_dict()[n]) for n, a in model.state_dict().items())
    again.save_pretrained(tmp_path / "2")
    first, second = stored_tensors(tmp_path / "1"), stored_tensors(tmp_path / "2")
    assert first.keys() == second.keys() and all(same_bytes(first[n], second[n]) for n in first)
    configs = [load_json(tmp_path / turn / "config.json") for turn in "12"]
    for config in configs:  # `.float()` reaches the top-level dtype only, which is the one that loading reads
        config["text_config"].pop("dtype", None)
    assert configs[0] == configs[1] and configs[0]["dtype"] == "float32"


def test_fresh_model_has_the_initialisation_of_the_paper():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Dsv41Config.from_pretrained(CHECKPOINT_V41), dtype=torch.float32)
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith(("_hc.base", "sinks", "e_score_correction_bias", "e_score_correction_bias_vl")):
            assert not tensor.any(), name
        elif name.endswith(("norm.weight", "q_weight", "k_weight")):
            assert (tensor == 1).all(), name
        elif name.endswith("_hc.scale"):
            assert (tensor == tensor.flatten()[0]).all() and 0 < tensor.flatten()[0] < 0.1, name
        else:
            assert tensor.std().item() == pytest.approx(0.02, rel=0.25), name


# ---- float checkpoints in the released layout ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def float_folder(golden, stored, tmp_path_factory):
    """The golden model as BF16, one matrix per expert, no quantization_config."""
    folder = golden.copy()
    del folder.config["quantization_config"]
    folder.keep(lambda name: not name.endswith(".scale") and not ABSENT.search(name))
    for name in list(stored):
        if stored[name].dtype in PACKED_DTYPES and not name.endswith(".scale"):
            folder[name] = torch.from_numpy(np.ascontiguousarray(reference_weight(stored, name))).bfloat16()
    return folder.write(tmp_path_factory.mktemp("float") / "ckpt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float_layout_equals_the_dequantised_model(small, float_folder, dtype):
    model, expected = load(float_folder, dtype=dtype), load(small, dtype=dtype, quantization_config=DEQUANTIZE)
    assert all(same_bytes(a, model.state_dict()[n]) for n, a in expected.state_dict().items())
    assert torch.equal(logits(model), logits(expected))


def test_float_checkpoint_under_a_packed_config_can_be_dequantised(float_folder, tmp_path):
    folder = Folder(float_folder)
    folder.config["quantization_config"] = {"quant_method": "fp8"}
    path = folder.write(tmp_path / "mixed")
    model = load(path, dtype=torch.bfloat16, quantization_config=DEQUANTIZE)
    assert torch.equal(logits(model), logits(load(float_folder, dtype=torch.bfloat16)))
    with pytest.raises(ValueError, match=r"tensors are missing from .*mixed: .*\.scale"):
        load(path)
