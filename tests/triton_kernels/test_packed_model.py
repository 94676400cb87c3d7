"""Whole packed models on a GPU: kernels on and off, experts on the host and beside their layers."""

from pathlib import Path

import pytest
import torch

import modeling_dsv4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CHECKPOINTS = Path(__file__).parents[1] / "golden" / "ckpt"
IDS = torch.tensor([[5, 9, 17, 33, 4, 11, 50, 3]])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("folder", "name"), [("v41_base_s11", "Dsv41ForCausalLM"), ("v4_base_s5", "Dsv4ForCausalLM")])
@torch.no_grad()
def test_logits_and_tokens_do_not_depend_on_kernels(folder, name, dtype, bound):
    model = getattr(modeling_dsv4, name).from_pretrained(CHECKPOINTS / folder, dtype=dtype, device_map={"": 0}).eval()
    ids = IDS.cuda()
    model.set_kernels("off")
    expected, tokens = model(ids).logits, model.generate(ids, max_new_tokens=8, do_sample=False)
    for placed in (False, True):
        if placed:
            assert model.place_experts()
        model.set_kernels("auto")
        assert (model(ids).logits - expected).abs().max() < bound * expected.abs().max()
        if dtype == torch.float32:
            assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), tokens)
