"""Attention layers with kernels and without: the same outputs and the same cache, prefill and decoding."""

import functools

import pytest
import torch

from modeling_dsv4 import Dsv4Cache
from modeling_dsv4.attention import LayerContext, RingView, SharedState
from modeling_dsv4.rotary import rotary_table
from tests.modeling import tiny_model, v4_models

# Layers that attend a window alone, make entries and select, and take both as they are; V4: both kinds of entries.
LAYERS = {"v41": (0, 2, 3), "v4": (1, 2)}


@functools.cache
def make_model(family):
    return (
        tiny_model.new_model(torch.float32)
        if family == "v41"
        else v4_models.random_model(torch.float32, **v4_models.SMALL)
    )


def run_layers(model, layers, calls, kv_format, device):
    """Outputs of some layers for several calls `(x [B, S, H], valid [B, S] or None)`, the state handed on, and the cache."""
    config = model.config.get_text_config()
    frequencies = dict.fromkeys(
        ("main", "compress"), torch.linspace(1, 0.01, config.qk_rope_head_dim // 2, device=device)
    )
    kept = None if kv_format is None else Dsv4Cache(model.config, kv_format=kv_format)
    outputs = []
    for x, valid in calls:
        layout = (kept or Dsv4Cache(model.config)).layout(valid, *x.shape[:2], device)
        tables = {name: rotary_table(layout.position_ids, f) for name, f in frequencies.items()}
        context, state = LayerContext(layout, tables, frequencies), SharedState()
        for layer in layers:
            part = None if kept is None else kept.layers[layer]
            out, state = model.model.layers[layer].self_attn(layout.shift(x), state, context, part)
            outputs.append(out[layout.real])
        if kept is not None:
            kept.advance(layout, valid)
    return outputs, kept


@pytest.fixture
def calls(device):
    """A ragged prompt and one more token of two rows."""
    torch.manual_seed(0)
    width = {family: make_model(family).config.get_text_config().hidden_size for family in LAYERS}
    valid = torch.ones(2, 5, dtype=torch.bool, device=device)
    valid[0, :2] = False
    return {
        family: [(torch.randn(2, n, size, device=device), valid if n == 5 else None) for n in (5, 1)]
        for family, size in width.items()
    }


@pytest.mark.parametrize(
    "family, kv_format",
    [
        ("v41", "packed"),
        pytest.param("v41", "float", marks=pytest.mark.slow),
        ("v4", "packed"),
        pytest.param("v4", None, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_layers_with_kernels_are_those_without(calls, repository, device, family, kv_format):
    model, calls = make_model(family).to(device), calls[family] if kv_format else calls[family][:1]
    model.set_kernels("off")
    expected, plain = run_layers(model, LAYERS[family], calls, kv_format, device)
    model.set_kernels(repository)
    for layer in LAYERS[family]:
        model.model.layers[layer].self_attn.kv_norm.kernels = None  # it may differ in the last bit of what is stored
    found, kept = run_layers(model, LAYERS[family], calls, kv_format, device)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    if kept is not None:
        assert kept.nbytes() == plain.nbytes()
        # Of the first layer, whose input is the same.
        windows = (cache.layers[LAYERS[family][0]].window.parts for cache in (kept, plain))
        assert all(torch.equal(a, b) for a, b in zip(*windows, strict=True))


def test_decoding_reads_the_ring_and_a_long_call_the_values(calls, repository, device):
    model = make_model("v41").to(device)
    model.set_kernels(repository)
    attention, config = model.model.layers[0].self_attn, model.config.get_text_config()
    kept = Dsv4Cache(model.config)
    table = rotary_table(
        torch.arange(40, device=device)[None], torch.ones(config.qk_rope_head_dim // 2, device=device)
    )
    found = []
    for tokens in (40, 1):
        x = torch.randn(2, tokens, config.hidden_size, device=device)
        layout = kept.layout(None, 2, tokens, device)
        context = LayerContext(layout, {"main": tuple(part[:, :tokens] for part in table)}, {})
        with torch.no_grad():
            found.append(
                attention._keep_window(x, context.tables["main"], kept.layers[0].window.codec, context, kept.layers[0])
            )
        kept.advance(layout, None)
    assert found[0].shape[1] == kept.layers[0].window.size + 40 and isinstance(found[1], RingView)


def test_gradients_with_kernels_are_those_without(calls, repository, device):
    model, grads = make_model("v41").to(device), []
    for source in ("off", repository):
        model.set_kernels(source)
        x = calls["v41"][0][0].clone().requires_grad_()
        outputs, _ = run_layers(model, LAYERS["v41"], [(x, None)], None, device)
        sinks = model.model.layers[2].self_attn.sinks
        grads.append(torch.autograd.grad(sum(out.square().sum() for out in outputs), (x, sinks)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
