"""`convert info`: the numbers of the releases from their config.json alone, against the released inventories."""

import json
from collections import Counter
from fractions import Fraction
from functools import cache

import pytest
import torch

from convert.__main__ import main
from convert.info import Machine, ModelSizes
from modeling_dsv4 import Dsv4Cache, Dsv4Config, Dsv4ForCausalLM, Dsv41Config, Dsv41ForCausalLM
from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41, GOLDEN, load_json

CONFIGS = {"v41_flash": Dsv41Config, "v4_flash": Dsv4Config, "v4_pro": Dsv4Config}
IS_PARAMETER = {"BF16": 1, "F32": 1, "F8_E4M3": 1, "I8": 2, "F8_E8M0": 0, "I64": 0}


@cache
def released(name):
    return ModelSizes(CONFIGS[name](**load_json(GOLDEN / f"config_{name}.json")))


def inventory(name, wanted=lambda row: True):
    """Parameters of the released inventory: `(all, those of routed experts)` of the rows that are wanted."""
    total = Counter()
    for row in load_json(GOLDEN / f"tensors_{name}.json")["tensors"]:
        count = row["count"] * IS_PARAMETER[row["dtype"]]
        for size in row["shape"]:
            count *= size
        if wanted(row):
            total[".experts." in row["name"]] += count
    return total[False], total[True]


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_bytes_are_those_of_the_inventory(name):
    found = released(name).rows
    assert sum(row.parameters for row in found) == sum(inventory(name))
    assert len(found) == sum(row["count"] for row in load_json(GOLDEN / f"tensors_{name}.json")["tensors"])
    groups = Counter()
    for row in found:
        groups[row.group] += row.parameters
    if name == "v41_flash":
        tables = inventory(name, lambda row: row["group"] == "engram_table")[0]
        assert groups["Engram tables"] == tables and groups["drafts"] == sum(
            inventory(name, lambda row: row["name"].startswith("mtp."))
        )


def test_activated_parameters_of_the_release():
    """16.13 B a token in decode; 7.90 B in prefill: the encoder, and what the layer at the cut keeps of every token."""
    found = released("v41_flash").activated()
    assert f"{found.prefill / 1e9:.2f} {found.decode / 1e9:.2f}" == "7.90 16.13"
    # Again from the inventory: 6 of 384 experts, 24 rows of 256 channels in each of two Engram layers.
    no_tables = lambda row: not row["name"].startswith(("embed", "vision", "aligner", "image", "mtp"))  # noqa: E731
    rest, experts = inventory("v41_flash", lambda row: no_tables(row) and row["group"] != "engram_table")
    assert found.decode == rest + experts * 6 // 384 + 2 * 24 * 256
    encoder, experts = inventory("v41_flash", lambda row: row["group"] in ("encoder", "engram_resident"))
    at_the_cut = 2 * 512 * 5120 + 2 * 512 + 128 * 512 + 128  # compressor, window, index key, each with its norm
    assert found.prefill == encoder + experts * 6 // 384 + 2 * 24 * 256 + at_the_cut


@pytest.mark.parametrize(("name", "decode"), [("v4_flash", "13.27"), ("v4_pro", "48.85")])
def test_v4_prefills_with_all_layers(name, decode):
    found = released(name).activated()
    assert f"{found.decode / 1e9:.2f}" == decode
    head = sum(row.parameters for row in released(name).rows if row.group == "head")
    assert found.decode - found.prefill == head


def test_the_cache_of_the_release():
    size = released("v41_flash").cache()
    assert size.per_token == 890 and size.windows == 40 * (127 + 16) * 528


@pytest.mark.parametrize(
    ("model_class", "checkpoint"), [(Dsv41ForCausalLM, CHECKPOINT_V41), (Dsv4ForCausalLM, CHECKPOINT_V4)]
)
def test_the_cache_grows_as_told(model_class, checkpoint):
    model = model_class.from_pretrained(checkpoint, dtype="auto").eval()
    told, sizes = ModelSizes(model.config).cache(), []
    for length in (32, 48):  # beyond every window, multiples of every ratio
        filled = Dsv4Cache(model.config)
        with torch.no_grad():
            model(torch.full((1, length), 20), cache=filled)
        sizes.append(filled.nbytes())
    grown = sum(sizes[1][part] - sizes[0][part] for part in ("window", "compressed", "index"))
    assert Fraction(grown, 16) == told.per_token
    assert sizes[1]["window"] == told.windows


MACHINES = {
    "a laptop": (Machine(16 * 10**9), 0, 'device_map="cpu"', "16.00 GB of RAM hold 3% of the file pages"),
    "one accelerator": (Machine(10**12, (80 * 10**9,)), 11, '{"": 0}', "all file pages fit"),
    "two small ones": (Machine(10**12, (8 * 10**9,) * 2), 11, '"auto"', "the experts of 0 of 40 layers"),
    "one too small": (Machine(10**12, (8 * 10**9,)), 0, 'device_map="cpu"', "does not fit on 1 accelerators"),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_resident_where(machine):
    given, dense_gb, device_map, comment = MACHINES[machine]
    sizes = released("v41_flash")
    found = sizes.residency(given)
    assert round(found.accelerator / 1e9) == dense_gb
    drafts = sum(row.bytes for row in sizes.rows if row.group == "drafts")
    assert found.file_pages + found.accelerator == sum(row.bytes for row in sizes.rows) - drafts
    assert device_map in found.device_map and comment in found.comment


def test_the_command(tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((GOLDEN / "config_v41_flash.json").read_bytes())
    assert main(["info", str(tmp_path / "config.json"), "--gpu", "80GB", "--ram", "256GB"]) == 0
    out = capsys.readouterr().out
    assert (
        "no weights beside config.json" in out and "activated per token: 7.90 B in prefill, 16.13 B in decode" in out
    )
    assert "cache: 890 bytes a token" in out and "kernels: " in out and "763.21 B   510.29 GB" in out
    assert main(["info", str(CHECKPOINT_V4)]) == 0
    assert "of weight files" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert main(["info", str(tmp_path)]) == 1
    assert "config.json: model_type is 'llama'; accepted: deepseek_v41, deepseek_v4." in capsys.readouterr().err
    assert main(["info", str(tmp_path / "nowhere")]) == 1 and main(["info", str(tmp_path), "--ram", "x"]) == 1
