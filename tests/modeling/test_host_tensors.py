"""Tensors on the host: where device maps put them, what offloading leaves alone, and how pages are asked for."""

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from safetensors.torch import save_file

from modeling_dsv4 import Dsv4ForCausalLM, Dsv4QuantizationConfig, Dsv41ForCausalLM
from modeling_dsv4.checkpoint_map import map_checkpoint
from modeling_dsv4.host_tensors import host_modules, read_ahead
from tests.golden_cases import CHECKPOINT_V4
from tests.released_folders import small_folder

CPU = torch.device("cpu")
IDS = torch.arange(20, 37)[None]
TABLE, BANK = "model.layers.1.engram.embedding", "model.layers.0.mlp.experts"
DEQUANTIZE = Dsv4QuantizationConfig(dequantize=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_folder().write(tmp_path_factory.mktemp("small") / "ckpt")


def load(folder, model_class=Dsv41ForCausalLM, **options):
    return model_class.from_pretrained(folder, **options)


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.fixture(scope="module")
def packed(folder):
    return load(folder)


def elsewhere(model):
    """Names of the host modules that have a tensor off the CPU."""
    modules = host_modules(model).items()
    return {n for n, m in modules if any(m.host_tensor(t).device != CPU for t in m.host_names())}


# ---- placement -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [(), (TABLE,), (BANK, TABLE)], ids=len)
def test_a_device_map_moves_the_host_modules_that_it_names_and_no_other(folder, named):
    model = load(folder, device_map={"": "meta"} | dict.fromkeys(named, "meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert elsewhere(model) == set(named)


def test_a_device_map_may_not_name_a_part_of_a_host_module(folder):
    with pytest.raises(ValueError, match=rf"device_map names '{TABLE}.weight'; accepted: '{TABLE}', the whole module"):
        load(folder, device_map={"": "cpu", f"{TABLE}.weight": "cpu"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_named_modules_compute_the_same_on_an_accelerator(folder):
    on_host = load(folder, device_map={"": 0})
    moved = load(folder, device_map={"": 0, TABLE: 0, BANK: 0})
    assert (elsewhere(on_host), elsewhere(moved)) == (set(), {TABLE, BANK})
    with torch.no_grad():
        found, expected = (model(IDS.to("cuda")).logits for model in (moved, on_host))
    assert torch.equal(found, expected) and found.any()


# ---- offloading ------------------------------------------------------------------------------------------------------------


def alternating(model):
    """Every other layer on the disk, and the head."""
    places = {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    layers = {f"model.layers.{i}": ("cpu", "disk")[i % 2] for i in range(len(model.model.layers))}
    return places | layers | {"lm_head": "disk"}


MAPS = {
    "disk": lambda model: {"device_map": {"": "disk"}},
    "every other layer on the disk": lambda model: {"device_map": alternating(model)},
    "named on the disk": lambda model: {"device_map": alternating(model) | {TABLE: "disk", BANK: "disk"}},
    "auto, some on the disk": lambda model: {"device_map": "auto", "max_memory": {"cpu": "300KB"}},
    "auto, all on the disk": lambda model: {"device_map": "auto", "max_memory": {"cpu": "10KB"}},
    "balanced": lambda model: {"device_map": "balanced"},
}


@pytest.mark.parametrize("places", MAPS)
def test_device_maps_leave_host_tensors_in_the_files(places, folder, packed, tmp_path):
    options = MAPS[places](packed)
    model = load(folder, offload_folder=str(tmp_path), **options)
    assert not elsewhere(model) and torch.equal(logits(model), logits(packed))
    on_disk = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    assert bool(on_disk) == ("disk" in places)
    if os.path.exists("/proc/self/maps"):
        lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
        mapped = [[int(x, 16) for x in f[0].split("-")] for f in lines if len(f) == 6 and f[5].startswith(str(folder))]
        for module in host_modules(model).values():
            for name in module.host_names():
                assert any(start <= module.host_tensor(name).data_ptr() < stop for start, stop in mapped)


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_accelerate_offloads_a_loaded_model(offload, folder, packed, tmp_path):
    options = {"offload_dir": str(tmp_path)} if offload is disk_offload else {}
    model = offload(load(folder), execution_device=CPU, **options)
    assert not elsewhere(model) and {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.equal(logits(model), logits(packed))


def test_offloaded_float_models_and_v4_compute_the_same(folder, packed, tmp_path):
    float_model = load(folder, quantization_config=DEQUANTIZE)
    again = load(folder, quantization_config=DEQUANTIZE, device_map=alternating(packed), offload_folder=tmp_path / "1")
    assert torch.equal(logits(again), logits(float_model))
    v4 = load(CHECKPOINT_V4, Dsv4ForCausalLM)
    again = load(CHECKPOINT_V4, Dsv4ForCausalLM, device_map=alternating(v4), offload_folder=tmp_path / "2")
    assert torch.equal(logits(again), logits(v4)) and not elsewhere(again)


# ---- pages ---------------------------------------------------------------------------------------------------------------


def resident_pages(tensor):
    """Which pages of a mapped tensor are in memory."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    vector = np.zeros(tensor.nbytes // mmap.PAGESIZE, dtype=np.uint8)
    mincore = ctypes.CDLL(None).mincore
    assert not mincore(ctypes.c_void_p(start), ctypes.c_size_t(tensor.nbytes), vector.ctypes.data_as(ctypes.c_void_p))
    return set(np.flatnonzero(vector & 1).tolist())


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs a system that can forget the pages of a file")
@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([100, 200, 201, 300], {100, 101, 200, 201, 202, 300, 301}),  # the header shifts every row across two pages
        (None, set(range(1024))),
    ],
)
def test_read_ahead_asks_for_the_pages_of_the_rows_alone(tmp_path, rows, wanted):
    file = str(tmp_path / "table.safetensors")
    save_file({"t": torch.zeros(1024, mmap.PAGESIZE, dtype=torch.uint8)}, file)
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tensor = map_checkpoint([file])[0]["t"]
    before = resident_pages(tensor)
    if len(before) > 64:
        pytest.skip("this file system keeps the pages of a file in memory")
    read_ahead(tensor, None if rows is None else torch.tensor(rows))
    deadline = time.monotonic() + 10
    while not wanted <= resident_pages(tensor) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert wanted <= resident_pages(tensor) <= wanted | before


def test_read_ahead_changes_nothing():
    table = torch.arange(10).view(5, 2)
    for tensor in (table, torch.empty(0), torch.empty(3, device="meta")):
        read_ahead(tensor)
    for rows in ([0, 1, 4], []):
        read_ahead(table, torch.tensor(rows, dtype=torch.long))
    assert torch.equal(table, torch.arange(10).view(5, 2))
