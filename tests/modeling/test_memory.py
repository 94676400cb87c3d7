"""Memory of a forward grows linearly with the length: no tensor of S x T scores, none of S x k entries."""

import pytest
import torch

from modeling_dsv4 import Dsv4Cache, attention
from tests.memory import allocations
from tests.modeling import tiny_model as v41
from tests.modeling import v4_models as v4

TILE = 1 << 16  # elements; small, so that what grows with the length shows
TOPK = 64
MODELS = {
    # 384 pool positions a query, of which 64 are selected.
    "v41": lambda: v41.new_model(**v41.FIVE_LAYERS, index_topk=TOPK, candidate_topk_blocks=48, candidate_block_size=8),
    "v41-dense": lambda: v41.new_model(**v41.FIVE_LAYERS | {"index_topk": None, "candidate_source_layer_id": -1}),
    "v4": lambda: v4.random_model(torch.float32, **(v4.SMALL | {"index_topk": TOPK})),
}


@torch.no_grad()
def forward(model, length, mode):
    ids = v41.some_ids(1, length)
    return allocations(lambda: model(ids, cache=Dsv4Cache(model.config), logits_to_keep=1, decoder_replay=mode))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("lengths", "mode"),
    [
        ((384, 768), "full"),
        pytest.param((512, 1024, 2048, 4096), "full", marks=pytest.mark.slow),
        pytest.param((512, 1024, 2048, 4096), "exact", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_peak_memory_is_linear(monkeypatch, name, lengths, mode):
    monkeypatch.setattr(attention, "MAX_TILE_ELEMENTS", TILE)
    model = MODELS[name]()
    found = [forward(model, length, mode) for length in lengths]
    for length, one in zip(lengths, found, strict=True):
        print(f"{name} {mode} S={length}: peak {one.peak / 2**20:.2f} MiB, largest {one.largest / 2**20:.2f} MiB")
    for short, long in zip(found, found[1:], strict=False):
        assert 1 < long.peak / short.peak <= 2.2 and long.largest / short.largest <= 2.2
    if name != "v4":  # of which one layer in two has an entry for four tokens, the others one for 128
        # A float32 score of every query and entry; the entries that every query selects.
        assert found[-1].largest < 4 * lengths[-1] * min(lengths[-1], TOPK * 32)
