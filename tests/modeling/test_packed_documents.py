"""Documents that were packed one behind the other equal the same documents one by one: `position_ids` restart with each.

In float64, so that no code of a rounded value flips between the two.
"""

from functools import cache

import pytest
import torch

from modeling_dsv4 import Dsv4Cache
from tests.modeling import image_models, v4_models
from tests.modeling import tiny_model as v41

LENGTHS = (13, 1, 20, 7, 26)  # odd ones leave groups open; some are shorter than a window
LOSS = 1e-6  # relative: transformers' loss is taken in float32
MODELS = {
    "v41": lambda: v41.shared_model(torch.float64),
    "v41-dense": cache(lambda: v41.new_model(torch.float64, index_topk=None, candidate_source_layer_id=-1)),
    "v4": v4_models.small_model,
}


@pytest.fixture(params=MODELS)
def model(request):
    """A float64 model; not to be changed but for gradients."""
    return MODELS[request.param]()


def documents(seed=0):
    """Token ids of the documents; two begin with the same n-grams as the end of the one before."""
    rows = [v41.some_ids(1, length, seed=seed + length)[0] for length in LENGTHS]
    rows[2][:3], rows[4][:3] = rows[0][-3:], rows[3][-3:]
    return rows


def packed(rows):
    """`[1, S]` ids and positions."""
    return torch.cat(rows)[None], torch.cat([torch.arange(len(row)) for row in rows])[None]


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_outputs_are_those_of_each_document_alone(model):
    rows = documents()
    ids, positions = packed(rows)
    options = {"output_hidden_states": True, "output_router_logits": True, "output_selections": True}
    with torch.no_grad():
        together = model(ids, position_ids=positions, **options)
        assert together.cache is None
        start = 0
        for row in rows:
            one, part = model(row[None], **options), slice(start, start + len(row))
            assert (together.logits[:, part] - one.logits).abs().max() < v41.EXACT
            for a, b in zip(together.hidden_states, one.hidden_states, strict=True):
                assert (a[:, part] - b).abs().max() < v41.EXACT
            for a, b in zip(together.router_logits, one.router_logits, strict=True):
                assert (a[part] - b).abs().max() < v41.EXACT
            for layer, chosen in one.selections.items():
                assert torch.equal(together.selections[layer][:, part], chosen)
            start += len(row)
        mixed = model(ids).logits
    assert (mixed - together.logits)[:, LENGTHS[0] :].abs().max() > 0.1  # without the positions they see each other


def test_two_rows_of_documents_and_padding(model):
    rows = documents()
    ids, mask, positions = torch.full((2, 50), v41.PAD), torch.zeros(2, 50).long(), torch.ones(2, 50).long()
    for b, (parts, start) in enumerate(((rows[:3], 16), (rows[3:], 0))):
        row, position = packed(parts)
        place = slice(start, start + row.shape[1])
        ids[b, place], positions[b, place], mask[b, place] = row, position, 1
    with torch.no_grad():
        together = model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
        alone = torch.cat([model(row[None]).logits[0] for row in rows])
    assert (together - alone).abs().max() < v41.EXACT and alone.abs().max() > 0.1


def test_loss_and_gradients_are_those_of_each_document_alone(model):
    rows = documents(seed=3)
    ids, positions = packed(rows)
    wanted = sum(len(row) - 1 for row in rows)
    model.train()
    try:
        loss = model(ids, position_ids=positions, labels=ids, num_items_in_batch=wanted).loss
        loss.backward()
        together = gradients(model)
        alone = sum(model(row[None], labels=row[None], num_items_in_batch=wanted).loss for row in rows if len(row) > 1)
        alone.backward()
    finally:
        model.eval()
    assert abs(loss - alone) < LOSS * loss and loss > 1
    for name, gradient in gradients(model).items():
        assert (together[name] - gradient).abs().max() <= LOSS * max(1.0, gradient.abs().max()), name


def test_mtp_of_v4_stays_within_the_document(tmp_path):
    folder = v4_models.with_mtp().write(tmp_path / "ckpt")
    model = v4_models.load(folder, torch.float64).train()
    rows = [v4_models.some_ids(1, n, seed=n)[0] for n in (9, 2, 12)]
    ids, positions = packed(rows)
    with torch.no_grad():
        together = model(ids, position_ids=positions, labels=ids, num_items_in_batch=17).mtp_loss
        alone = sum(model(row[None], labels=row[None], num_items_in_batch=17).mtp_loss for row in rows)
    assert abs(together - alone) < LOSS * alone and alone > 1


def test_images_stay_in_their_document():
    model = image_models.tiny_model()
    grids = torch.tensor([[2, 4], [4, 2]])
    pixels = torch.randn(16, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = []
    for grid, length in zip(grids.tolist(), (15, 18), strict=True):
        row = v41.some_ids(1, length, seed=length, low=8)[0]
        row[3 : 3 + (grid[0] // 2) * (grid[1] // 2 + 1) + 2] = model.config.image_token_id
        rows.append(row)
    ids, positions = packed(rows)
    with torch.no_grad():
        together = model(ids, position_ids=positions, pixel_values=pixels, image_grid_hw=grids).logits[0]
        alone = [
            model(row[None], pixel_values=part, image_grid_hw=grid[None]).logits[0]
            for row, part, grid in zip(rows, pixels.split(8), grids, strict=True)
        ]
    assert (together - torch.cat(alone)).abs().max() < v41.EXACT and together.abs().max() > 0.1


def test_a_cache_is_refused(model):
    ids, positions = packed(documents())
    with pytest.raises(ValueError, match="use_cache is True and position_ids restart"):
        model(ids, position_ids=positions, use_cache=True)
    with pytest.raises(ValueError, match="accepted with a cache: rows of one document"):
        model(ids, position_ids=positions, cache=Dsv4Cache(model.config))
