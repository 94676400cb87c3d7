"""Gradients through vision tower, projector and delimiters: finite differences, sums, checkpointing."""

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from modeling_dsv4.vision import Dsv41VisionAttention

from .image_models import (
    batch_left,
    encode,
    image_inputs,
    tiny_model,
    vision_parameters,
)

UNMOVED = 1e-12  # float64: nothing but the order of sums


def loss_of(model, inputs):
    """Cross entropy of the text after its predecessor, in float64 (the model's own loss is float32)."""
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == model.config.image_token_id, -100)
    logits = model(**inputs).logits[:, :-1]
    assert logits.dtype == torch.float64
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def test_gradients_with_images_equal_finite_differences():
    """Along a random direction of every tensor of tower, projector and delimiters; two rows, three images."""
    model = tiny_model()
    inputs = batch_left([image_inputs(model, 2, (4, 5), 2, (3, 3), 5), image_inputs(model, 1, (2, 3), 6, seed=1)])
    parameters = vision_parameters(model)
    loss_of(model, inputs).backward()
    random, step = torch.Generator().manual_seed(0), 1e-5
    for name, parameter in parameters.items():
        direction = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        direction /= direction.norm()
        with torch.no_grad():
            parameter += step * direction
            above = loss_of(model, inputs)
            parameter -= 2 * step * direction
            below = loss_of(model, inputs)
            parameter += step * direction
        slope = float((above - below) / (2 * step))
        assert float((parameter.grad * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-9), name
        assert float(parameter.grad.abs().max()) > 1e-8, f"{name} gets no gradient"
    assert len(parameters) == 3 + 3 + 2 * 8 + 4


def test_gradient_of_pixels_equals_finite_differences():
    model = tiny_model()
    inputs = image_inputs(model, 2, (3, 5), 4)
    pixels = inputs["pixel_values"].requires_grad_()
    loss_of(model, inputs).backward()
    direction = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        above = loss_of(model, inputs | {"pixel_values": pixels + 1e-5 * direction})
        below = loss_of(model, inputs | {"pixel_values": pixels - 1e-5 * direction})
    assert float((pixels.grad * direction).sum()) == pytest.approx(float(above - below) / 2e-5, rel=1e-5)


def test_delimiter_gradients_are_sums_over_their_positions():
    """Newlines of all images share one vector: its gradient is the sum over the positions."""
    model = tiny_model()
    inputs = image_inputs(model, 2, (4, 5), 2, (3, 3), 4)
    encoded, rest = encode(model, inputs)
    spans = [span.requires_grad_() for span in encoded.pooler_output]
    given = {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=spans)}}
    loss_of(model, rest | given).backward()
    newlines = spans[0].grad[[4, 8]].sum(0) + spans[1].grad[[3, 6]].sum(0)
    model.zero_grad()
    loss_of(model, inputs).backward()
    torch.testing.assert_close(model.model.image_newline.grad, newlines, atol=1e-12, rtol=0)
    torch.testing.assert_close(model.model.image_end.grad, spans[0].grad[9] + spans[1].grad[7], atol=1e-12, rtol=0)


def test_gradient_checkpointing_of_the_tower(monkeypatch):
    """K12: equal gradients with and without, of every parameter; the recompute really happens."""
    calls = []
    original = Dsv41VisionAttention.forward
    monkeypatch.setattr(Dsv41VisionAttention, "forward", lambda self, *a: (calls.append(1), original(self, *a))[1])
    gradients = []
    for enabled in (False, True):
        model = tiny_model().train()
        inputs = image_inputs(model, 2, (4, 5), 2, (3, 3), 4)
        if enabled:
            model.gradient_checkpointing_enable()
        calls.clear()
        loss_of(model, inputs).backward()
        assert len(calls) == model.config.vision_config.num_hidden_layers * (2 if enabled else 1)
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys() and vision_parameters(model).keys() <= plain.keys()
    for name in plain:
        torch.testing.assert_close(checkpointed[name], plain[name], atol=UNMOVED, rtol=0)
