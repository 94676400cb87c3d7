"""Gradients of every kind of text parameter against central differences in float64; vision is in test_image_gradients."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.modeling import v4_models
from tests.modeling.tiny_model import IMAGE, new_model, some_ids

# Two layers with everything: Engram, a window, gated compression with a selection.
TWO_V41 = {
    "num_hidden_layers": 2, "compress_ratios": [0, 2], "kv_source_layer_ids": [1], "index_source_layer_ids": [1],
    "candidate_source_layer_id": -1, "engram_layer_ids": [1], "engram_num_embeddings": [384], "cache_rounding": False,
}  # fmt: skip
# Overlapping and wide groups, a hash table and a chosen route, the MTP layer.
TWO_V4 = v4_models.SMALL | {
    "num_hidden_layers": 2, "compress_ratios": [4, 16, 0], "num_hash_layers": 1, "num_nextn_predict_layers": 1,
    "cache_rounding": False,
}  # fmt: skip


def model_and_ids(family):
    if family == "v4":
        return v4_models.random_model(**TWO_V4), v4_models.some_ids(2, 20, seed=2) % 128
    ids = some_ids(2, 20, seed=2)
    ids[1, 5:9] = IMAGE
    return new_model(torch.float64, **TWO_V41), ids


def loss_of(model, ids):
    """Next token, its successor (V4) and balance, in float64: the model's own cross entropy is float32."""
    labels = ids.masked_fill(ids == IMAGE, -100)
    out = model.model(ids, use_cache=False, output_streams=True, output_balance=True)
    loss = cross_entropy(model.lm_head(out.last_hidden_state)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    if hasattr(model.model, "mtp"):
        after = model.lm_head(model.model.predict_after_next(out.streams, ids))
        loss = loss + 0.3 * cross_entropy(after[:, :-1].flatten(0, 1), labels[:, 2:].flatten())
    return loss + 0.1 * out.balance[:, 0].sum()


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_every_parameter_along_a_random_direction(family):
    model, ids = model_and_ids(family)
    model.zero_grad()
    loss_of(model, ids).backward()
    random, step, silent = torch.Generator().manual_seed(0), 1e-6, []
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        direction /= direction.norm()
        with torch.no_grad():
            parameter += step * direction
            above = loss_of(model, ids)
            parameter -= 2 * step * direction
            below = loss_of(model, ids)
            parameter += step * direction
        slope = float(above - below) / (2 * step)
        if parameter.grad is None:
            silent.append(name)
            assert slope == 0, name
        else:
            assert float((parameter.grad * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-8), name
            assert parameter.grad.any(), name
    assert silent and all(".indexer." in name for name in silent)  # a choice has no gradient
