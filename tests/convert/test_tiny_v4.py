"""V4: the derived inventory against the released ones, and random checkpoints that both implementations read."""

import itertools
import json
import math

import pytest
import torch
from transformers import AutoTokenizer

from convert.inventory import payload_bytes, released_tensors, shard_part
from convert.shards import INDEX_NAME
from convert.tiny import make_tiny
from modeling_dsv4 import Dsv4Config, Dsv4ForCausalLM, Dsv4QuantizationConfig
from modeling_dsv4.checkpoint_map import DTYPES, check_index, map_checkpoint
from tests.golden_cases import GOLDEN, load_json
from tests.modeling.test_weight_names import expand
from tests.reference import v4_model


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_every_released_tensor_has_its_name_shape_and_dtype(name):
    released = load_json(GOLDEN / f"tensors_v4_{name}.json")
    expected = {
        tensor: (tuple(row["shape"]), DTYPES[row["dtype"]]) for row in released["tensors"] for tensor in expand(row)
    }
    config = Dsv4Config(**load_json(GOLDEN / f"config_v4_{name}.json"))
    derived = released_tensors(config)
    assert derived == expected and len(derived) == released["summary"]["tensors"]
    assert payload_bytes(derived) == released["summary"]["bytes"]
    parts = [part for part, _ in itertools.groupby(derived, key=shard_part)]
    assert parts == ["embed", *(f"layers.{i}" for i in range(config.num_hidden_layers)), "head", "mtp.0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint", seed=3, family="v4", progress=False)


@pytest.fixture(scope="module")
def mapped(folder):
    tensors, entries = map_checkpoint(sorted(map(str, folder.glob("*.safetensors"))))
    check_index(json.loads((folder / INDEX_NAME).read_text())["weight_map"], entries)
    return tensors


def test_the_config_has_exactly_the_released_keys(folder):
    written, released = load_json(folder / "config.json"), load_json(GOLDEN / "config_v4_flash.json")
    assert written.keys() == released.keys()
    for key in (
        "architectures",
        "model_type",
        "quantization_config",
        "expert_dtype",
        "torch_dtype",
        "transformers_version",
    ):
        assert written[key] == released[key], key


def test_it_holds_exactly_the_tensors_of_its_config(folder, mapped):
    derived = released_tensors(Dsv4Config.from_pretrained(folder))
    assert {name: (tuple(t.shape), t.dtype) for name, t in mapped.items()} == derived


def test_tables_give_every_token_different_experts(folder, mapped):
    config = load_json(folder / "config.json")
    tables = [t for name, t in mapped.items() if name.endswith("tid2eid")]
    assert len(tables) == config["num_hash_layers"]
    for table in tables:
        assert table.shape == (config["vocab_size"], config["num_experts_per_tok"])
        assert all(len(set(row)) == len(row) for row in table.tolist())
        assert set(table.flatten().tolist()) == set(range(config["n_routed_experts"]))
    assert not torch.equal(tables[0], tables[1])


def test_bytes_follow_from_the_arguments(folder, tmp_path):
    again = make_tiny(tmp_path / "again", seed=3, family="v4", progress=False)
    other = make_tiny(tmp_path / "other", seed=4, family="v4", progress=False)
    for path in sorted(folder.iterdir()):
        assert (again / path.name).read_bytes() == path.read_bytes()
        if path.suffix == ".safetensors":
            assert (other / path.name).read_bytes() != path.read_bytes()


@pytest.mark.parametrize("dequantize", [False, True])
def test_the_model_loads_it_and_logits_stay_of_order_one(folder, dequantize):
    options = Dsv4QuantizationConfig(dequantize=dequantize)
    model = Dsv4ForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=options).eval()
    ids = AutoTokenizer.from_pretrained(folder)("The river runs past the old mill.", return_tensors="pt").input_ids
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    spread = [hidden.std().item() for hidden in out.hidden_states]
    assert all(0.3 < value < 20 and math.isfinite(value) for value in spread), spread
    assert 0.7 < out.logits.std() < 1.4
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_the_oracle_reads_it_too(folder):
    """Two programs read the same files: the model, in float64, and the oracle, MTP layer included."""
    options = Dsv4QuantizationConfig(dequantize=True)
    model = Dsv4ForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=options).double().eval()
    ids = torch.arange(10, 43)[None]
    expected = v4_model.forward(
        v4_model.load_checkpoint(folder), load_json(folder / "config.json"), ids[0].tolist(), mtp=True
    )
    with torch.no_grad():
        streams = model.model(ids, output_streams=True).streams
        after_next = model.lm_head(model.model.predict_after_next(streams, ids))
        torch.testing.assert_close(model(ids).logits[0], torch.from_numpy(expected["logits"]), atol=1e-10, rtol=0)
    torch.testing.assert_close(after_next[0], torch.from_numpy(expected["mtp_logits"]), atol=1e-10, rtol=0)
