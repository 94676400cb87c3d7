"""The sequence-wise balance loss, and the accounting of every part of the loss over micro-batches."""

import numpy as np
import pytest
import torch

from modeling_dsv4.balance_loss import sequence_balance, sequence_shares
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


def test_shares_of_a_batch_add_up():
    labels = torch.tensor([[1, -100, 2], [-100, -100, -100], [3, 4, 5]])
    assert sequence_shares(labels, None).tolist() == pytest.approx([0.4, 0, 0.6])
    parts = [sequence_shares(labels[:1], 5), sequence_shares(labels[1:], torch.tensor(5))]
    torch.testing.assert_close(torch.cat(parts), sequence_shares(labels, None))


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
    shares = sequence_shares(batch["labels"][:, 1:], None).double()
    real = batch["attention_mask"].bool()
    by_hand = sum(sequence_balance(*(t.unflatten(0, (4, -1)) for t in pair), real) for pair in routed)
    torch.testing.assert_close(out.aux_loss, (shares * by_hand).sum(), rtol=0, atol=1e-9)
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
