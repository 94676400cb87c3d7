"""Whole packed models on a GPU: kernels on and off, experts on the host and beside their layers."""

from pathlib import Path

import pytest
import torch

import modeling_dsv4
from modeling_dsv4.quantization import set_activation_rounding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CHECKPOINTS = Path(__file__).parents[1] / "golden" / "ckpt"
MODELS = [("v41_base_s11", "Dsv41ForCausalLM"), ("v4_base_s5", "Dsv4ForCausalLM")]


def load(folder, name, dtype):
    model = getattr(modeling_dsv4, name).from_pretrained(CHECKPOINTS / folder, dtype=dtype, device_map={"": 0}).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 250, (2, 40), generator=generator).cuda()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return model, ids, mask


def run(model, ids, mask, kv_format):
    """Logits of the real tokens: a prompt of two rows, steps, and a call of several tokens."""
    if kv_format is None:
        return model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    cache, parts = modeling_dsv4.Dsv4Cache(model.config, kv_format), []
    for start, stop in ((0, 30), (30, 31), (31, 32), (32, 40)):
        parts.append(model(ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache).logits)
    return torch.cat(parts, 1)[mask.bool()]


@pytest.mark.parametrize("kv_format", [None, "float"])
@pytest.mark.parametrize(("folder", "name"), MODELS)
@torch.no_grad()
def test_float32_logits_and_tokens_do_not_depend_on_kernels(folder, name, kv_format):
    """Without the roundings of cache and inputs, which a difference of 1e-7 may tip."""
    model, ids, mask = load(folder, name, torch.float32)
    model.config.get_text_config().cache_rounding = False
    set_activation_rounding(model, False)
    model.set_kernels("off")
    greedy = {"max_new_tokens": 8, "do_sample": False, "kv_format": "float"}
    expected, tokens = run(model, ids, mask, kv_format), model.generate(ids, **greedy)
    for placed in (False, True):
        if placed:
            assert model.place_experts()
        model.set_kernels("auto")
        assert (run(model, ids, mask, kv_format) - expected).abs().max() < 1e-5 * expected.abs().max()
        assert torch.equal(model.generate(ids, **greedy), tokens)


@pytest.mark.parametrize(("folder", "name"), MODELS)
@torch.no_grad()
def test_float32_logits_of_a_packed_cache(folder, name):
    """A tipped code shows in the tokens that see it; all others are equal."""
    model, ids, mask = load(folder, name, torch.float32)
    model.set_kernels("off")
    expected = run(model, ids, mask, "packed")
    assert model.place_experts()
    model.set_kernels("auto")
    apart = (run(model, ids, mask, "packed") - expected).abs().amax(-1) / expected.abs().max()
    assert apart.median() < 1e-5 and apart.max() < 0.05


@pytest.mark.parametrize("kv_format", [None, "packed", "float"])
@pytest.mark.parametrize(("folder", "name"), MODELS)
@torch.no_grad()
def test_bfloat16_is_as_far_from_float32_with_kernels_as_without(folder, name, kv_format):
    """A rounding tips a code or an expert now and then, in both; a mistake would be far off everywhere."""
    model, ids, mask = load(folder, name, torch.float32)
    model.set_kernels("off")
    exact = run(model, ids, mask, kv_format)
    model, ids, mask = load(folder, name, torch.bfloat16)
    assert model.place_experts()
    errors = {}
    for source in ("off", "auto"):
        model.set_kernels(source)
        errors[source] = (run(model, ids, mask, kv_format) - exact).square().mean().sqrt().item()
    assert 0 < errors["auto"] < 1.3 * errors["off"] < 0.5 * exact.square().mean().sqrt()
