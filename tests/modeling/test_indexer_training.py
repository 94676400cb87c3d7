"""Indexers learn to score as their layers attend, and nothing else learns from it."""

from functools import cache

import pytest
import torch

from tests.modeling import tiny_model as v41
from tests.modeling import v4_models as v4

WEIGHT = 0.7
MODELS = {
    "v41": cache(lambda: v41.new_model(torch.float64, hc_sinkhorn_iters=20, indexer_loss_weight=WEIGHT)),
    "v41-dense": cache(
        lambda: v41.new_model(
            torch.float64,
            hc_sinkhorn_iters=20,
            indexer_loss_weight=WEIGHT,
            index_topk=None,
            candidate_source_layer_id=-1,
        )
    ),
    "v4": cache(lambda: v4.random_model(**(v4.SMALL | {"indexer_loss_weight": WEIGHT, "index_topk": 4}))),
}
LOSS = 1e-6  # relative: transformers' loss is taken in float32


@pytest.fixture(params=MODELS)
def model(request):
    """A float64 model in training mode."""
    model = MODELS[request.param]().train()
    yield model
    model.zero_grad()
    model.eval()


def gradients(model, ids, **options):
    """Outputs and the gradient of every parameter that has one."""
    model.zero_grad()
    out = model(ids, labels=ids, **options)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def is_index(name):
    return ".indexer." in name


def test_only_indexers_learn_and_all_of_them(model):
    ids = v41.some_ids(2, 41, seed=2)
    out, found = gradients(model, ids)
    assert out.indexer_loss > 0.01
    assert abs(out.loss - out.loss_parts["lm"] - WEIGHT * out.indexer_loss) < 2 * LOSS * out.loss
    names = {name for name, p in model.named_parameters() if is_index(name)}
    if (
        model.config.get_text_config().index_topk == 2
    ):  # two entries that one layer selects may leave a bias of groups alone
        names = {name for name in names if "position_bias" not in name}
    assert {name for name in names if name not in found or not found[name].any()} == set()
    text = model.config.get_text_config()
    text.indexer_loss_weight = 0.0
    try:
        plain, without = gradients(model, ids)
    finally:
        text.indexer_loss_weight = WEIGHT
    assert plain.indexer_loss is None and not any(map(is_index, without))
    assert torch.equal(plain.logits, out.logits)
    for name, gradient in without.items():
        assert torch.equal(gradient, found[name]), name


def test_the_gradient_is_that_of_finite_differences(model):
    """Of one weight of every indexer matrix; what is selected does not change under so small a step."""
    ids = v41.some_ids(1, 30, seed=4)
    text = model.config.get_text_config()
    rounding, text.cache_rounding = text.cache_rounding, False  # straight-through gradients are no differences
    try:
        _, found = gradients(model, ids)
        for name, parameter in model.named_parameters():
            if not is_index(name) or name not in found:
                continue
            place = int(found[name].abs().argmax())
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    parameter.view(-1)[place] += step
                    values.append(float(model_divergence(model, ids)))
                    parameter.view(-1)[place] -= step
            expected = (values[0] - values[1]) / 2e-5
            assert abs(float(found[name].view(-1)[place]) - WEIGHT * expected) <= 1e-4 * abs(expected) + 1e-7, name
    finally:
        text.cache_rounding = rounding


def model_divergence(model, ids):
    """The mean over positions that have a label."""
    out = model.model(ids, output_divergence=True, use_cache=False)
    return out.divergence[:, :-1].mean()


def test_training_the_indexers_alone_lowers_the_divergence():
    model = v41.new_model(
        torch.float32, indexer_loss_weight=1.0, index_topk=None, candidate_source_layer_id=-1
    ).train()
    ids = v41.some_ids(4, 41, seed=6)
    optimizer = torch.optim.Adam([p for name, p in model.named_parameters() if is_index(name)], lr=3e-3)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).indexer_loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]


def test_gradient_checkpointing_changes_nothing(model):
    ids = v41.some_ids(2, 25, seed=7)
    out, plain = gradients(model, ids)
    model.gradient_checkpointing_enable()
    try:
        again, found = gradients(model, ids)
    finally:
        model.gradient_checkpointing_disable()
    assert torch.equal(out.indexer_loss, again.indexer_loss) and plain.keys() == found.keys()
    assert all((plain[name] - found[name]).abs().max() < 1e-12 for name in plain)


def test_packed_documents_and_micro_batches_add_up(model):
    rows = [v41.some_ids(1, n, seed=n)[0] for n in (20, 7, 14)]
    ids, positions = torch.cat(rows)[None], torch.cat([torch.arange(len(row)) for row in rows])[None]
    wanted = sum(len(row) - 1 for row in rows)
    together = model(ids, position_ids=positions, labels=ids, num_items_in_batch=wanted).indexer_loss
    alone = sum(model(row[None], labels=row[None], num_items_in_batch=wanted).indexer_loss for row in rows)
    assert abs(together - alone) < v41.EXACT and alone > 0.01


def test_the_candidate_restriction_can_come_late():
    model, ids = v41.new_model(torch.float64), v41.some_ids(1, 41, seed=1)
    text = model.config.text_config
    with torch.no_grad():
        restricted = model(ids, use_cache=False).logits
        source, text.candidate_source_layer_id = text.candidate_source_layer_id, -1
        lifted = model(ids, use_cache=False).logits
        assert (lifted - torch.as_tensor(v41.oracle_logits(model, ids))).abs().max() < v41.ORACLE
        text.candidate_source_layer_id = source
        assert torch.equal(model(ids, use_cache=False).logits, restricted)
    assert (lifted - restricted).abs().max() > 1e-3
