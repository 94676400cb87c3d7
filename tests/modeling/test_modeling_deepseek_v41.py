"""Arguments, outputs, loss and training of the V4.1 text classes, on the tiny configuration.

Equality is tested in float64, see test_fault_kinds. `tests/reference` is the oracle.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, StaticCache

from modeling_dsv4 import Dsv4Cache
from tests.modeling import v4_models
from tests.modeling.tiny_model import (
    EXACT,
    IMAGE,
    LENGTH,
    ORACLE,
    new_model,
    oracle_row,
    run,
    shared_model,
    some_ids,
    tiny_config,
    two_rows,
)


@pytest.fixture
def model():
    """The shared float64 model; not to be changed."""
    return shared_model(torch.float64)


@pytest.fixture
def ids():
    """Two rows of ids; the second has an image span and repeats n-grams of the first."""
    return two_rows()


# ---- arguments and outputs ---------------------------------------------------------------------------------------------------


def test_position_ids_are_checked(model, ids):
    plain = run(model, ids).logits
    positions = torch.arange(LENGTH)[None]
    assert torch.equal(run(model, ids, position_ids=positions).logits, plain)
    with pytest.raises(ValueError, match="of each packed document from 0"):
        run(model, ids, position_ids=positions + 1)
    with pytest.raises(ValueError, match="position_ids has shape"):
        run(model, ids, position_ids=positions[:, :-1])
    cache = Dsv4Cache(model.config, "float")
    run(model, ids[:, :7], cache=cache)
    with pytest.raises(ValueError, match="position_ids must count"):
        run(model, ids[:, 7:8], position_ids=torch.zeros(1, 1, dtype=torch.long), cache=cache)


@pytest.mark.parametrize("spelling", ["cache", "past_key_values"])
def test_both_spellings_of_the_cache(model, ids, spelling):
    expected = run(model, ids).logits
    cache = Dsv4Cache(model.config, "float")
    for part in (ids[:, :30], ids[:, 30:]):
        out = run(model, part, **{spelling: cache})
    assert out.cache is cache and out.past_key_values is cache
    assert cache.get_seq_length() == LENGTH
    torch.testing.assert_close(out.logits, expected[:, 30:], atol=EXACT, rtol=0)


def test_logits_to_keep(model, ids):
    logits = run(model, ids).logits
    assert torch.equal(run(model, ids, logits_to_keep=0).logits, logits)
    torch.testing.assert_close(run(model, ids, logits_to_keep=3).logits, logits[:, -3:], atol=EXACT, rtol=0)
    at = torch.tensor([4, 0, 17])
    torch.testing.assert_close(run(model, ids, logits_to_keep=at).logits, logits[:, at], atol=EXACT, rtol=0)
    with pytest.raises(ValueError, match="logits_to_keep is 3 with labels; accepted: 0"):
        run(model, ids, labels=ids, logits_to_keep=3)
    with pytest.raises(ValueError, match=r"labels have shape \[2, 7\]; accepted"):
        run(model, ids, labels=ids[:, :7])


def test_hidden_states_are_collapsed_layer_inputs_and_the_final_state(model):
    ids, expected = oracle_row()
    states = run(model, ids, output_hidden_states=True).hidden_states
    assert len(states) == 9
    for layer, state in enumerate(states[:-1]):
        assert np.abs(state.numpy() - expected[f"layer_input.{layer}"]).max() < 10 * ORACLE  # values up to 20
    assert np.abs(states[-1].numpy() - expected["final_hidden"]).max() < ORACLE
    torch.testing.assert_close(states[0], model.get_input_embeddings()(ids).detach())
    torch.testing.assert_close(model.lm_head(states[-1]).detach(), run(model, ids).logits, atol=EXACT, rtol=0)


def test_selections_and_router_logits(model):
    ids, expected = oracle_row()
    out = run(model, ids, output_selections=True, output_router_logits=True)
    assert list(out.selections) == [2, 4, 5, 6, 7] and len(out.router_logits) == 8
    for layer, chosen in out.selections.items():
        assert np.array_equal(np.sort(chosen, -1), np.sort(expected[f"topk.{layer}"], -1))
    plain = run(model, ids)
    model.config.output_hidden_states = True
    assert len(run(model, ids).hidden_states) == 9
    model.config.output_hidden_states = False
    assert plain.hidden_states is None and plain.router_logits is None and plain.selections is None


def test_tuples_instead_of_outputs(model, ids):
    logits, cache = run(model, ids, return_dict=False)[:2]
    assert torch.equal(logits, run(model, ids).logits) and isinstance(cache, Dsv4Cache)


def test_inputs_embeds(model, ids):
    embeds, expected = model.get_input_embeddings()(ids).detach(), run(model, ids).logits
    assert torch.equal(run(model, ids, inputs_embeds=embeds).logits, expected)
    with pytest.raises(ValueError, match="inputs_embeds without input_ids.*n-grams"):
        run(model, None, inputs_embeds=embeds)
    with pytest.raises(ValueError, match="both None"):
        run(model, None)
    without = new_model(torch.float64, engram_layer_ids=[], engram_num_embeddings=[])
    text = ids[:1]
    embeds = without.get_input_embeddings()(text).detach()
    assert torch.equal(run(without, None, inputs_embeds=embeds).logits, run(without, text).logits)


def test_attention_weights_are_refused(model, ids):
    with pytest.raises(ValueError, match="output_attentions"):
        run(model, ids, output_attentions=True)


@pytest.mark.parametrize("bad", ["exactly", None, "bounded!"])
def test_an_unknown_replay_is_refused(model, ids, bad):
    with pytest.raises(ValueError, match="decoder_replay is"):
        run(model, ids, decoder_replay=bad)


@pytest.mark.parametrize("kind", ["dynamic", "static", "tuple"])
def test_other_caches_are_refused_by_name(model, ids, kind):
    caches = {
        "dynamic": lambda: DynamicCache(),
        "static": lambda: StaticCache(config=model.config.text_config, max_cache_len=64),
        "tuple": lambda: ((torch.zeros(1), torch.zeros(1)),),
    }
    cache = caches[kind]()
    with pytest.raises(ValueError, match=f"cache is a {type(cache).__name__}; accepted: Dsv4Cache"):
        run(model, ids, cache=cache)


# ---- loss and training -------------------------------------------------------------------------------------------------------


def _labels(ids):
    labels = ids.clone()
    labels[0, 5:9] = -100
    labels[1, -3:] = -100
    return labels


def _by_hand(logits, labels):
    """Summed cross entropy of the next token, written out, and the number of tokens it counts."""
    total, count = 0.0, 0
    for row, targets in zip(logits.double(), labels, strict=True):
        for t in range(len(targets) - 1):
            if targets[t + 1] != -100:
                total += row[t].exp().sum().log() - row[t, targets[t + 1]]
                count += 1
    return total, count


def test_loss_is_the_cross_entropy_of_the_next_token(model, ids):
    labels = _labels(ids)
    out = run(model, ids, labels=labels)
    total, count = _by_hand(out.logits, labels)
    # transformers' loss function works in float32.
    torch.testing.assert_close(out.loss.double(), total / count, atol=1e-5, rtol=0)
    for items in (7, torch.tensor(300)):
        loss = run(model, ids, labels=labels, num_items_in_batch=items).loss
        torch.testing.assert_close(loss.double(), total / items, atol=1e-4, rtol=1e-6)


def test_labels_that_are_shifted_already(model, ids):
    labels = _labels(ids)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    expected = run(model, ids, labels=labels).loss
    assert run(model, ids, shift_labels=shifted).loss == expected
    assert run(model, ids, labels=ids, shift_labels=shifted).loss == expected


def test_one_batch_equals_its_micro_batches():
    """`num_items_in_batch` makes accumulation exact for rows of unequal length."""
    model, ids = new_model(torch.float64).train(), some_ids(2, 12, seed=3)
    labels = ids.clone()
    labels[0, :6] = -100
    items = (labels[:, 1:] != -100).sum()

    def gradients(parts):
        model.zero_grad()
        for part in parts:
            model(ids[part], labels=labels[part], num_items_in_batch=items).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    whole, split = gradients([slice(0, 2)]), gradients([slice(0, 1), slice(1, 2)])
    assert set(whole) == set(split)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, atol=1e-6, rtol=1e-5)  # the loss itself is float32


def test_no_cache_is_made_while_training(ids):
    model = new_model()
    assert model.train()(ids).cache is None
    assert isinstance(model(ids, use_cache=True).cache, Dsv4Cache)
    assert isinstance(run(model.eval(), ids).cache, Dsv4Cache)
    assert run(model, ids, use_cache=False).cache is None
    model.config.text_config.use_cache = False
    assert run(model, ids).cache is None


def test_gradient_checkpointing_gives_the_same_gradients():
    model, ids = new_model(torch.float64).train(), some_ids(2, 21, seed=3)
    ids[1, 4:8] = IMAGE
    calls = []

    def gradients():
        calls.clear()
        model.zero_grad()
        hook = model.model.layers[4].self_attn.register_forward_hook(lambda *a: calls.append(1))
        model(ids, labels=ids).loss.backward()
        hook.remove()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    assert len(calls) == 1
    model.activation_checkpointing_enable()
    checkpointed = gradients()
    assert len(calls) == 2  # really recomputed
    assert set(plain) == set(checkpointed)
    for name, gradient in plain.items():
        assert torch.equal(checkpointed[name], gradient), name


def test_gradient_checkpointing_and_caches_exclude_each_other():
    """The recompute would append every token a second time."""
    model, ids = new_model().train(), some_ids(2, 9)
    model.activation_checkpointing_enable()
    assert model(ids, use_cache=True).cache is None
    with pytest.raises(ValueError, match="fill it twice"):
        model(ids, cache=Dsv4Cache(model.config))
    assert isinstance(run(model.eval(), ids).cache, Dsv4Cache)
    model.activation_checkpointing_disable()
    assert isinstance(model.train()(ids, use_cache=True).cache, Dsv4Cache)


def test_reentrant_checkpointing_is_replaced():
    """The reentrant form would lose every gradient through the tuples that layers hand on."""
    gradients = []
    for options in ({"use_reentrant": False}, {"use_reentrant": True}):
        model, ids = new_model(torch.float64).train(), some_ids(2, 11, seed=3)
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_every_parameter_but_the_indexer_learns():
    model, ids = new_model().train(), some_ids(4, 33, seed=3)
    model(ids, labels=ids).loss.backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert all(".indexer." in name for name in silent), silent


@pytest.mark.parametrize("kv_format", ["float", "packed"])
def test_training_through_a_given_cache_has_the_gradients_of_the_new_tokens(kv_format):
    """With an empty cache nothing is missing: the gradients equal those without one."""
    model, ids = new_model(torch.float64).train(), some_ids(2, 17, seed=3)

    def gradients(**options):
        model.zero_grad()
        model(ids, labels=ids, **options).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain, cached = gradients(), gradients(cache=Dsv4Cache(model.config, kv_format))
    for name, gradient in plain.items():
        torch.testing.assert_close(cached[name], gradient, atol=EXACT, rtol=1e-9)


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_autocast_leaves_routers_mixing_and_logits_in_float32(family):
    """`Trainer(bf16=True)` runs float32 weights under autocast: what the release computes in float32 stays there."""
    model = shared_model() if family == "v41" else v4_models.small_model(torch.float32)
    layer, seen = model.model.layers[3], {}
    parts = {"router": layer.mlp.gate, "mixing": layer.attn_hc, "head": model.lm_head}
    hooks = [
        part.register_forward_hook(lambda module, args, output, name=name: seen.update({name: (args, output)}))
        for name, part in parts.items()
    ]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(some_ids(1, 12, seed=1), use_cache=False)
    for hook in hooks:
        hook.remove()
    for name, part in parts.items():
        args, output = seen[name]
        with torch.no_grad():
            expected = part(*args)
        pairs = [(output, expected)] if isinstance(output, torch.Tensor) else zip(output, expected, strict=True)
        for found, wanted in pairs:
            if wanted is None:
                assert found is None
                continue
            assert found.dtype == wanted.dtype != torch.bfloat16 and torch.equal(found, wanted), name
            assert wanted.any(), name


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": torch.zeros(1, 0).long()}, r"shapes \[\[1, 0\]\]; accepted: \[B, S\]"),
        ({"input_ids": torch.zeros(0, 3).long()}, r"shapes \[\[0, 3\]\]"),
        ({"input_ids": torch.arange(5)}, r"shapes \[\[5\]\]"),
        ({"input_ids": torch.ones(1, 9).long(), "inputs_embeds": torch.ones(1, 5, 64)}, r"\[\[1, 9\], \[1, 5, 64\]\]"),
        ({"input_ids": torch.ones(1, 9).long(), "inputs_embeds": torch.ones(1, 9, 63)}, r"accepted: \[B, S\] and \[B, S, 64\]"),
        ({"input_ids": torch.ones(1, 9).long(), "pixel_values": torch.ones(4, 3, 2, 2)}, "pixel_values were given to a text"),
        ({"input_ids": torch.ones(1, 9).long(), "cache": Dsv4Cache(tiny_config(compress_ratios=[0, 0, 4, 4, 4, 1, 1, 1]))}, "cache was made for layers that pool"),
    ],
)  # fmt: skip
def test_inputs_of_another_shape_are_refused(model, inputs, message):
    with pytest.raises(ValueError, match=message):
        model(**inputs)
