"""A float model that trains to be packed computes what the packed model computes, and its gradients pass straight through."""

import pytest
import torch

import modeling_dsv4
from modeling_dsv4.fp_codecs import round_fp8_tiles
from modeling_dsv4.quantization import simulate_packing
from modeling_dsv4.training import QatScheduleCallback
from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41, load_case

CLASSES = {"v41": modeling_dsv4.Dsv41ForCausalLM, "v4": modeling_dsv4.Dsv4ForCausalLM}
FOLDERS = {"v41": CHECKPOINT_V41, "v4": CHECKPOINT_V4}
PACKED = modeling_dsv4.Dsv4QuantizationConfig


def load(family, *, dequantize):
    options = PACKED(dequantize=dequantize)
    return CLASSES[family].from_pretrained(FOLDERS[family], dtype=torch.float32, quantization_config=options).eval()


def formats(family):
    return PACKED() if family == "v41" else PACKED(weight_block_size=(128, 128), expert_dtype=None)


@pytest.fixture(scope="module")
def ids():
    return torch.as_tensor(load_case("text_17")["input_ids"]).long()


@pytest.mark.parametrize("family", ["v41", "v4"])
@torch.no_grad()
def test_it_computes_what_the_packed_model_computes(family, ids):
    """Released weights, each a little smaller: rounding brings every one of them back to the released value."""
    expected = load(family, dequantize=False)(ids).logits
    model = load(family, dequantize=True)
    stored = {name: tensor.shape for name, tensor in load(family, dequantize=False).state_dict().items()}
    packed = [name for name in stored if f"{name}_scale_inv" in stored]
    assert len(packed) > 50
    before = model(ids).logits
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if name in packed or ".experts." in name:
            weight.mul_(1 - 1e-4 * torch.rand(weight.shape, generator=generator))
    simulate_packing(model, formats(family))
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=2e-5)
    simulate_packing(model, None)
    near = (model(ids).logits - expected).abs().max()
    assert near > 1e-4  # neither the weights nor the inputs of layers are rounded any more
    assert (model(ids).logits - before).abs().max() > 0


def test_gradients_pass_straight_through(ids):
    """The gradient is that of a model which holds the rounded weights, at the rounded weights."""
    model, other = (load("v41", dequantize=True) for _ in range(2))
    with torch.no_grad():
        for weight, same in zip(model.parameters(), other.parameters(), strict=True):
            same.copy_(weight.mul_(1.03))  # off every grid
    simulate_packing(model, PACKED(quantize_activations=False))
    with torch.no_grad():
        for module, twin in zip(model.modules(), other.modules(), strict=True):
            for weight in twin.parameters(recurse=False):
                if getattr(module, "round_weight", None) is not None:
                    rows = weight if weight.ndim == 3 else weight[None]
                    weight.copy_(torch.stack([module.round_weight(matrix) for matrix in rows]).view_as(weight))
    losses = [m(ids, labels=ids).loss for m in (model, other)]
    assert losses[0] == losses[1]
    for loss in losses:
        loss.backward()
    moved = 0
    for (name, weight), twin in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (weight.grad is None) == (twin.grad is None) == (".indexer." in name), name
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, twin.grad, rtol=0, atol=1e-7, msg=name)
            moved += not torch.equal(weight, twin)
    assert moved > 50


def test_a_tile_is_rounded_to_what_its_scale_can_hold():
    weight = torch.randn(40, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rounded = round_fp8_tiles(weight, block_size=(32, 32))
    tile = rounded.detach()[:32, :32]
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    top = weight.detach()[:32, :32].abs().max()
    scale = 2 ** torch.ceil(torch.log2(top / 448))
    nearest = (tile[..., None] / scale - codes[codes.isfinite()]).abs().amin(-1)
    assert rounded.dtype == torch.float64 and nearest.max() == 0
    assert (tile - weight.detach()[:32, :32]).abs().max() <= 16 * scale  # half a step at the top of the format
    rounded.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_formats_that_cannot_be_written_are_refused():
    with pytest.raises(ValueError, match="scale_fmt is 'float'; accepted for training: 'ue8m0'"):
        simulate_packing(torch.nn.Linear(1, 1), PACKED(scale_fmt="float"))


def test_packed_modules_are_left_alone(ids):
    model = load("v41", dequantize=False)
    with torch.no_grad():
        before = model(ids).logits
        simulate_packing(model, PACKED())
        simulate_packing(model, None)
        assert torch.equal(model(ids).logits, before)


def test_the_schedule_drives_caches_weights_and_inputs():
    model = load("v41", dequantize=True)
    callback, seen = QatScheduleCallback(1, quantization=PACKED()), []
    linear = model.model.layers[0].self_attn.q_a_proj

    def state():
        seen.append(
            (model.config.text_config.cache_rounding, linear.round_weight is not None, linear.quantize_activations)
        )

    class State:
        global_step = 0

    callback.on_train_begin(None, State, None, model=model)
    state()
    for State.global_step in (0, 1):
        callback.on_step_begin(None, State, None)
        state()
        callback.on_step_end(None, State, None)
        state()
    callback.on_train_end(None, State, None)
    state()
    assert seen == [(True,) * 3, (False,) * 3, (True,) * 3, (True,) * 3, (True,) * 3, (True,) * 3]
