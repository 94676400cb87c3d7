"""The real model on two ranks: transformers' expert-parallel and FSDP2 plans, and FSDP2 as accelerate applies it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import modeling_dsv4
from modeling_dsv4.training import Dsv4OptimizerFactory
from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41
from tests.modeling.tiny_model import new_model, some_ids

from .ranks import on_ranks
from .test_trainer import pretend_accelerator_fsdp2

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
# All streams are equal before the first site, so how it mixes them (the last part of its numbers) changes nothing: of the
# rounding noise that is its gradient AdamW makes whole steps.
WITHOUT_MIXING = {"model.layers.0.attn_hc.base": slice(8), "model.layers.0.attn_hc.scale": slice(2)}
CLASSES = {
    "v41": (modeling_dsv4.Dsv41ForCausalLM, CHECKPOINT_V41),
    "v4": (modeling_dsv4.Dsv4ForCausalLM, CHECKPOINT_V4),
}


def load(family, **options):
    cls, folder = CLASSES[family]
    quantization = modeling_dsv4.Dsv4QuantizationConfig(dequantize=True)
    model = cls.from_pretrained(folder, dtype=torch.float32, quantization_config=quantization, **options)
    model.config.get_text_config().cache_rounding = False
    return model.train()


def ids():
    return some_ids(2, 20, seed=3)


def run_plan(family, device):
    model = load(family, distributed_config=DistributedConfig(ep_size=2, fsdp_size=2))
    experts = model.model.layers[3].mlp.experts
    rank = dist.get_rank()
    row = ids()[rank : rank + 1].to(device)
    out = model(row, labels=row)
    out.loss.backward()
    gradients = {n: p.grad.full_tensor().cpu() for n, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach().cpu(), gradients, tuple(experts.gate_up_proj.to_local().shape)


@pytest.mark.parametrize(
    ("family", "device", "backend"),
    [
        ("v41", "cpu", "gloo"),
        pytest.param("v4", "cpu", "gloo", marks=pytest.mark.slow),
        pytest.param("v41", "cuda", "nccl", marks=[pytest.mark.gpu, two_gpus]),
        pytest.param("v4", "cuda", "nccl", marks=[pytest.mark.gpu, two_gpus]),
    ],
)
def test_expert_parallel_by_transformers_plan_equals_one_process(family, device, backend):
    """Half of the experts and half of everything else on each rank, which see a row each."""
    model, rows = load(family), ids()
    losses = [model(rows[i : i + 1], labels=rows[i : i + 1]).loss for i in range(2)]
    torch.stack(losses).mean().backward()
    logits = model(rows).logits.detach()
    whole = model.model.layers[3].mlp.experts.gate_up_proj.shape
    for rank, (found, gradients, held) in enumerate(on_ranks(2, run_plan, family, device, backend=backend)):
        assert held == (whole[0] // 2, *whole[1:])
        torch.testing.assert_close(found, logits[rank : rank + 1], rtol=0, atol=1e-4)
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert (gradients[name] - gradient).abs().max() <= 1e-3 * gradient.abs().max(), name


def two_steps(model, optimizer, share=slice(None)):
    for seed in range(2):
        rows = some_ids(2, 20, seed=seed)[share]
        losses = [model(row[None], labels=row[None]).loss for row in rows]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()


def run_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    pretend_accelerator_fsdp2(layers=None)
    model = new_model(torch.float64).train()
    model.config.text_config.cache_rounding = False
    optimizer = Dsv4OptimizerFactory()(model, lr=1e-3, report=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank = dist.get_rank()
    two_steps(model, optimizer, slice(rank, rank + 1))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def test_fsdp2_through_accelerate_equals_one_process():
    model = new_model(torch.float64).train()
    model.config.text_config.cache_rounding = False
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    two_steps(model, Dsv4OptimizerFactory()(model, lr=1e-3, report=False))
    for result in on_ranks(2, run_accelerate):
        for name, parameter in model.named_parameters():
            moved = (parameter.detach() - before[name]).abs().max()
            assert (result[name] - parameter.detach()).abs().max() <= 1e-3 * moved, name


def launch(folder, launcher, kinds, **environment):
    """Run `fsdp_run` in fresh processes and return what it wrote for every kind of checkpoint."""
    folder.mkdir()
    command = [sys.executable, *launcher, "-m", "tests.training.fsdp_run", str(folder), *kinds]
    with open(folder / "log", "w") as log:
        root = Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT)
    assert done.returncode == 0, (folder / "log").read_text()[-4000:]
    return [torch.load(folder / f"{kind}.pt") for kind in kinds]


@pytest.mark.gpu
@two_gpus
def test_trainer_under_fsdp2_on_two_gpus_equals_one_process_saves_and_resumes(tmp_path):
    kinds = ["FULL_STATE_DICT", "SHARDED_STATE_DICT"]
    (alone,) = launch(tmp_path / "alone", [], ["alone"], CUDA_VISIBLE_DEVICES="0")
    both = launch(tmp_path / "both", ["-m", "torch.distributed.run", "--nproc-per-node", "2"], kinds)
    for kind, result in zip(kinds, both, strict=True):
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        for name, value in alone["weights"].items():
            difference = (result["weights"][name] - value)[WITHOUT_MIXING.get(name, ...)].abs().max()
            assert difference <= 1e-9 * value.abs().max(), (kind, name, difference)
            assert torch.equal(result["resumed"][name], result["weights"][name]), (kind, name)
    saved = modeling_dsv4.Dsv41ForCausalLM.from_pretrained(tmp_path / "both" / "FULL_STATE_DICT" / "saved")
    for name, value in saved.state_dict().items():
        assert torch.equal(value, both[0]["weights"][name].to(value.dtype)), name
