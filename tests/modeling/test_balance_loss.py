"""The sequence-wise balance loss, and the accounting of every part of the loss over micro-batches."""

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from modeling_dsv4.balance_loss import mean_over_labels, sequence_balance
from modeling_dsv4.moe import Dsv4TopKRouter
from tests.modeling.tiny_model import IMAGE, new_model, some_ids
from tests.modeling.v4_models import load as load_v4
from tests.modeling.v4_models import with_mtp


@pytest.mark.parametrize("normalize", [False, True])
def test_by_hand(normalize):
    """f, P and their product written out, token by token."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 4, dtype=torch.float64, generator=generator)
    indices = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(10)]).view(2, 5, 2)
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    scores = np.sqrt(np.log1p(np.exp(logits.numpy())))
    for row, found in enumerate(sequence_balance(logits, indices, real, normalize=normalize)):
        tokens = [t for t in range(5) if real[row, t]]
        expected = 0.0
        for expert in range(4):
            f = sum(expert in indices[row, t].tolist() for t in tokens) / len(tokens) * (4 / 2 if normalize else 1)
            expected += f * sum(scores[row, t, expert] / scores[row, t].sum() for t in tokens) / len(tokens)
        assert found.item() == pytest.approx(expected, abs=1e-12)


def test_a_balanced_sequence_gives_one_when_normalised():
    logits, indices = torch.zeros(1, 4, 4), torch.arange(4).view(1, 4, 1)
    assert sequence_balance(logits, indices, torch.ones(1, 4).bool(), normalize=True).item() == pytest.approx(1)
    assert sequence_balance(logits, indices, torch.zeros(1, 4).bool()).item() == 0  # padding alone


def test_micro_batches_add_up_to_the_mean_over_labels():
    labels = torch.tensor([[1, -100, 2], [-100, -100, -100], [3, 4, 5]])
    balance = torch.tensor([[2.0], [7.0], [1.0]]).expand(3, 3)
    assert mean_over_labels(balance, labels, None).item() == pytest.approx((2 * 2 + 3 * 1) / 5)
    parts = [mean_over_labels(balance[rows], labels[rows], 5) for rows in (slice(1), slice(1, 3))]
    assert sum(parts).item() == pytest.approx(7 / 5)
    assert mean_over_labels(balance, torch.full_like(labels, -100), None).item() == 0


def tiny_v41(**settings):
    model = new_model(torch.float64)
    for key, value in settings.items():
        setattr(model.config.text_config, key, value)
    return model.train()


@pytest.fixture(scope="module")
def v4_with_mtp(tmp_path_factory):
    folder = with_mtp().write(tmp_path_factory.mktemp("v4") / "mtp")
    model = load_v4(folder, dtype=torch.float64).train()
    model.config.balance_loss_weight = 0.3
    return model


def padded_batch():
    """Four rows of unequal length and labels."""
    ids, mask = some_ids(4, 24, seed=5), torch.ones(4, 24, dtype=torch.long)
    for row, length in enumerate((24, 9, 17, 5)):
        mask[row, length:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :10] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_four_micro_batches_are_one_batch(family, v4_with_mtp):
    """Every part of the loss, and the gradients, with unequal numbers of labels (`num_items_in_batch`)."""
    model = tiny_v41(balance_loss_weight=0.3) if family == "v41" else v4_with_mtp
    batch = padded_batch()
    items = (batch["labels"][:, 1:] != -100).sum()
    model.zero_grad()
    whole = model(**batch, num_items_in_batch=items)
    whole.loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    names = {"lm", "balance"} | ({"mtp"} if family == "v4" else set())
    assert set(whole.loss_parts) == names and all(part > 0 for part in whole.loss_parts.values())
    torch.testing.assert_close(sum(whole.loss_parts.values()), whole.loss.detach(), rtol=0, atol=1e-6)
    model.zero_grad()
    parts = dict.fromkeys(names, 0.0)
    for row in range(4):
        out = model(**{k: v[row : row + 1] for k, v in batch.items()}, num_items_in_batch=items)
        out.loss.backward()
        parts = {name: parts[name] + out.loss_parts[name].item() for name in names}
    assert parts == pytest.approx({n: p.item() for n, p in whole.loss_parts.items()}, abs=1e-6)
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_shifted_labels_alone_give_the_whole_loss(family, v4_with_mtp):
    model = tiny_v41(balance_loss_weight=0.3) if family == "v41" else v4_with_mtp
    batch = padded_batch()
    with torch.no_grad():
        expected = model(**batch)
        shifted = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
        found = model(**batch, shift_labels=shifted)
    assert found.loss_parts.keys() == expected.loss_parts.keys()
    assert found.loss.item() == expected.loss.item()


def test_the_loss_is_the_sum_over_layers_of_each_sequence_and_reaches_every_router():
    model = tiny_v41(balance_loss_weight=0.5)
    batch = padded_batch()
    batch["input_ids"][0, 4:8] = IMAGE
    routed = []
    for router in (m for m in model.modules() if isinstance(m, Dsv4TopKRouter)):
        router.register_forward_hook(lambda _, args, output: routed.append((output[0], output[2])))
    out = model(**batch)
    counts = (batch["labels"][:, 1:] != -100).sum(-1).double()
    real = batch["attention_mask"].bool()
    by_hand = sum(sequence_balance(*(t.unflatten(0, (4, -1)) for t in pair), real) for pair in routed)
    torch.testing.assert_close(out.aux_loss, (counts * by_hand).sum() / counts.sum(), rtol=0, atol=1e-9)
    torch.testing.assert_close(out.loss_parts["balance"], 0.5 * out.aux_loss.detach())
    out.aux_loss.backward()
    assert all(m.weight.grad.any() for m in model.modules() if isinstance(m, Dsv4TopKRouter))
    assert model.lm_head.weight.grad is None
    assert model.eval()(**batch).aux_loss is None  # evaluation: the loss of the next token alone


@pytest.mark.parametrize("router_logits", [False, True])
def test_with_checkpointing_it_is_the_same(router_logits):
    """Hooks of the forward pass are gone when layers run again; rows are padded on the left, so that columns move."""
    gradients, losses, logits = [], [], []
    for checkpointing in (False, True):
        model, batch = tiny_v41(balance_loss_weight=0.3), padded_batch()
        batch = {key: value.flip(1) for key, value in batch.items()}
        if checkpointing:
            model.gradient_checkpointing_enable()
        out = model(**batch, output_router_logits=router_logits)
        out.loss.backward()
        losses.append(out.loss.item())
        logits.append(out.router_logits)
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert losses[0] == losses[1] and gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
    if router_logits:
        assert len(logits[0]) == 8 and all(torch.equal(*pair) for pair in zip(*logits, strict=True))


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_packed_documents_are_sequences_of_their_own(family, v4_with_mtp):
    """Every part of the loss of one row with three documents is that of the documents in rows."""
    model = tiny_v41(balance_loss_weight=0.3) if family == "v41" else v4_with_mtp
    documents = [some_ids(1, length, seed=length)[0] for length in (9, 14, 6)]
    ids = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions, labels=ids).loss_parts
        shifted = torch.cat([torch.cat([d[1:], torch.tensor([-100])]) for d in documents])[None]
        again = model(ids, position_ids=positions, shift_labels=shifted).loss_parts
        counts = {"lm": [len(d) - 1 for d in documents], "mtp": [len(d) - 2 for d in documents]}
        alone = [model(d[None], labels=d[None]).loss_parts for d in documents]
    for name, found in packed.items():
        count = counts.get(name, counts["lm"])
        expected = sum(n * part[name].item() for n, part in zip(count, alone, strict=True)) / sum(count)
        assert found.item() == pytest.approx(expected, rel=1e-5), name
        assert again[name].item() == pytest.approx(expected, rel=1e-5), name


def test_labels_and_their_number_may_lie_on_other_devices():
    """A model that is spread over devices: Trainer counts on the first, the last layers' values lie on the last."""
    with FakeTensorMode():
        values, labels = torch.empty(2, 3, device="cuda:1"), torch.empty(2, 3, dtype=torch.long, device="cuda:0")
        total = torch.empty((), dtype=torch.long, device="cuda:0")
        assert mean_over_labels(values, labels, total).device == values.device
