"""Losses of the drafter against the float64 oracle; which parameters learn; packed documents, accumulation, Trainer."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

from modeling_dsv4 import Dsv4Cache
from modeling_dsv4.draft_losses import DraftBatch, DraftTraining, draft_losses, sample_anchors
from modeling_dsv4.training import Dsv4Trainer
from tests.modeling.draft_models import drafting_model
from tests.modeling.test_dspark import oracle_run
from tests.modeling.tiny_model import PAD, new_model, some_ids
from tests.reference import drafter

ORACLE = 5e-6


def training_model():
    """A copy of the tiny drafting model, in training mode."""
    return copy.deepcopy(drafting_model(3)).train()


def losses_of(model, ids, labels, anchors, features=None, logits=None, positions=None, real=None, items=None):
    """The losses at given anchors `[B, A]` (-1 = none)."""
    if features is None:
        with torch.no_grad():
            out = model(ids, attention_mask=real, output_draft_features=True, use_cache=False)
        features, logits = out.draft_features, out.logits
    batch = DraftBatch.make(ids, labels, real, positions)
    places = anchors.clamp(min=0), anchors >= 0
    return draft_losses(
        model.drafter, model.get_input_embeddings(), model.lm_head, features, logits, batch, places, items
    )


def test_losses_equal_the_oracle():
    ids, weights, config, features, record = oracle_run()
    model, labels = drafting_model(5), ids.clone()
    labels[0, [6, 17]] = -100
    anchors = [0, 4, 9, 15, 27]
    expected, targets = np.zeros(3), 0
    for anchor in anchors:
        block = drafter.Block(weights, config, features, int(ids[0, anchor]), anchor)
        steps = [k for k in range(5) if anchor + 1 + k < 30]
        per_step = [
            drafter.block_losses(_Shifted(block, k), [int(ids[0, anchor + k])], [int(ids[0, anchor + 1 + k])],
                                 record["logits"][0, anchor + k][None])
            for k in steps if labels[0, anchor + 1 + k] != -100
        ]  # fmt: skip
        expected, targets = expected + np.sum(per_step, axis=0), targets + len(per_step)
    with torch.no_grad():
        got = losses_of(model, ids, labels, torch.tensor([[*anchors, -1]]))
    np.testing.assert_allclose([float(x) for x in got], expected / targets, atol=ORACLE)


class _Shifted:
    """A block whose step 0 is step k."""

    def __init__(self, block, k):
        self.block, self.k, self.base = block, k, block.base[k:]

    def markov(self, step, previous):
        return self.block.markov(step + self.k, previous)

    def confidence(self, step, previous):
        return self.block.confidence(step + self.k, previous)


@torch.no_grad()
def test_rows_in_one_batch_or_several_with_padding():
    model, ids = drafting_model(3), some_ids(2, 20, seed=4)
    labels, anchors = ids.clone(), torch.tensor([[3, 8, 16], [2, 11, -1]])
    labels[1, 12:], labels[:, 0] = -100, -100
    whole = losses_of(model, ids, labels, anchors)
    count = int((labels[:, 1:] != -100).sum())
    parts = [losses_of(model, *(t[i : i + 1] for t in (ids, labels, anchors)), items=count) for i in (0, 1)]
    for a, *b in zip(whole, *parts, strict=True):
        torch.testing.assert_close(a, sum(b))
    padded, mask = (torch.nn.functional.pad(t, (4, 0), value=PAD) for t in (ids, torch.ones_like(ids)))
    got = losses_of(
        model, padded, torch.nn.functional.pad(labels, (4, 0), value=-100), anchors + 4 * (anchors >= 0), real=mask
    )
    torch.testing.assert_close(torch.stack(got), torch.stack(whole))


@torch.no_grad()
def test_packed_documents_equal_separate_ones():
    """No context, target or position crosses into the next document."""
    model, a, b = drafting_model(3), some_ids(1, 11, seed=1), some_ids(1, 9, seed=2)
    anchors = torch.tensor([[2, 8, 9]]), torch.tensor([[0, 3, 7]])
    outs = [model(ids, output_draft_features=True, use_cache=False) for ids in (a, b)]
    alone = [losses_of(model, ids, ids, at, out.draft_features, out.logits, items=18)
             for ids, at, out in zip((a, b), anchors, outs, strict=True)]  # fmt: skip
    ids = torch.cat([a, b], 1)
    features, logits = (torch.cat([o[key] for o in outs], 1) for key in ("draft_features", "logits"))
    positions, labels = torch.cat([torch.arange(11), torch.arange(9)])[None], ids.clone()
    labels[0, 11] = -100  # the first token of a document has no label, as the collator says
    whole = model(ids, position_ids=positions, output_draft_features=True, use_cache=False)
    torch.testing.assert_close(whole.draft_features, features, atol=1e-9, rtol=0)
    packed = losses_of(
        model, ids, labels, torch.cat([anchors[0], anchors[1] + 11], 1), features, logits, positions, items=18
    )
    # A row weighs its targets alike: 5 of the first document, 7 of the second, 18 labels.
    for got, first, second in zip(packed, *alone, strict=True):
        torch.testing.assert_close(got, (first * 6 / 10 + second * 7 / 8) * 18 / 13)


def test_anchors_are_places_whose_successor_is_learned():
    torch.manual_seed(0)
    ids = some_ids(3, 12)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :9], mask[1, :8], labels[1, :8], labels[2] = -100, 0, -100, -100
    positions = torch.arange(12).repeat(3, 1) % 6
    seen = set()
    for _ in range(50):
        columns, valid = sample_anchors(DraftBatch.make(ids, labels, mask), 3)
        assert valid.sum(-1).tolist() == [3, 3, 0]
        seen |= set(zip(valid.nonzero()[:, 0].tolist(), columns[valid].tolist(), strict=True))
    assert seen == {(0, c) for c in (8, 9, 10)} | {(1, c) for c in (8, 9, 10)}
    columns, valid = sample_anchors(DraftBatch.make(ids, ids, None, positions), 12)
    assert valid.sum(-1).tolist() == [10, 10, 10] and not {5, 11} & set(columns[valid].tolist())


# ---- which parameters learn -----------------------------------------------------------------------------------------------------


def gradients(model, ids, settings):
    """Loss and gradients of a training forward with the same anchors each time."""
    model.zero_grad()
    if settings is not None:
        settings.apply(model)
    torch.manual_seed(0)
    out = model(ids, labels=ids)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


@cache
def all_gradients():
    ids = some_ids(2, 16, seed=4)
    names = [name for name, _ in drafting_model(3).named_parameters() if ".mtp." in name]
    plain = gradients(training_model(), ids, None)
    return (
        names,
        plain,
        *(gradients(training_model(), ids, DraftTraining(stage, anchors=5)) for stage in ("frozen", "joint")),
    )


def test_a_frozen_backbone_learns_nothing_and_the_drafter_all():
    names, _, (out, grads), _ = all_gradients()
    silent = [n for n in names if n not in grads]
    assert grads.keys() <= set(names)
    # The last site's own pre is the collapse; experts and rows of the embedding may not have been met.
    assert all("experts" in name for name in silent)
    assert torch.allclose(
        out.loss, out.draft_losses.base + out.draft_losses.markov + 0.1 * out.draft_losses.confidence
    )


def test_the_joint_stage_leaves_the_backbone_its_own_gradient():
    names, (plain, plain_grads), (_, frozen_grads), (out, grads) = all_gradients()
    assert grads.keys() == plain_grads.keys() | frozen_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, frozen_grads[name] if name in names else plain_grads[name])
    torch.testing.assert_close(out.loss, plain.loss + DraftTraining().total(out.draft_losses))


def test_evaluation_is_that_of_the_model():
    model, ids = drafting_model(3), some_ids(1, 9)
    twin = copy.deepcopy(model)
    DraftTraining("joint").apply(twin)
    with torch.no_grad():
        assert torch.equal(twin.eval()(ids, labels=ids).loss, model(ids, labels=ids).loss)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": "both"}, "stage is 'both'; accepted"),
        ({"anchors": 0}, "anchors is 0"),
        ({"markov_weight": -1}, "markov_weight is -1"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        DraftTraining(**arguments)


def test_a_model_without_a_drafter_is_refused():
    with pytest.raises(ValueError, match="without a DSpark drafter"):
        DraftTraining().apply(new_model())
    model = training_model()
    DraftTraining().apply(model)
    ids = some_ids(1, 9)
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="input_ids is None while a drafter is trained"):
        model(inputs_embeds=embeds, labels=ids)
    with pytest.raises(ValueError, match="shift_labels came without labels while a drafter is trained"):
        model(ids, shift_labels=ids)
    cache = Dsv4Cache(model.config)
    with torch.no_grad():
        model(ids, cache=cache)
    with pytest.raises(ValueError, match="cache holds 9 tokens while a drafter is trained"):
        model(ids, labels=ids, cache=cache)
    assert cache.get_seq_length() == 9


def test_padding_is_read_from_a_causal_mask_too():
    """A 2-D mask and the 4-D one made from it give the same tokens, positions and documents."""
    ids, mask = some_ids(2, 8), torch.ones(2, 8, dtype=torch.bool)
    mask[0, :3] = False
    causal = torch.ones(8, 8, dtype=torch.bool).tril() & mask[:, None, None]
    for given, expected in zip(DraftBatch.make(ids, ids, causal), DraftBatch.make(ids, ids, mask), strict=True):
        assert torch.equal(given, expected)


@pytest.mark.parametrize("stage", ["frozen", "joint"])
def test_trainer(stage, tmp_path):
    """The drafter learns a text by heart; frozen, nothing else moves."""
    model = training_model().float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = some_ids(1, 24, seed=4)[0]
    rows = [{"input_ids": ids, "labels": ids} for _ in range(8)]
    arguments = TrainingArguments(
        tmp_path, max_steps=8, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=2e-2,
        save_strategy="no", report_to=[], use_cpu=True, logging_steps=1, lr_scheduler_type="constant", disable_tqdm=True,
    )  # fmt: skip
    trainer = Dsv4Trainer(
        model=model, args=arguments, train_dataset=rows, draft_training=DraftTraining(stage, anchors=8)
    )
    trainer.train()
    history = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"{stage}: loss {history[0]:.2f} -> {history[-1]:.2f}")
    assert history[-1] < 0.5 * history[0]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any(".mtp." in name for name in moved)
    assert any(".mtp." not in name for name in moved) == (stage == "joint")
