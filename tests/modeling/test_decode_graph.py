"""Steps of decoding in a cache of fixed capacity: they wait for no value, keep every address, and change no token."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from modeling_dsv4 import Dsv4Cache
from modeling_dsv4.decode_graph import DecodeGraph, can_capture, is_step
from modeling_dsv4.moe import Dsv4Experts
from tests.modeling import draft_models, tiny_model, v4_models

MODELS = {
    "v41": tiny_model.five_layer_model,
    "v4": lambda: v4_models.small_model(torch.float64),
    "v41-dspark": lambda: draft_models.drafting_model(),
    "v4-mtp": lambda: v4_models.drafting_model("mtp"),
}
WAITS = {
    "_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal", "bincount",
    "is_nonzero", "repeat_interleave",
}  # fmt: skip


class NoHostReads(TorchDispatchMode):
    """Raises where an operation reads a value on the host or has a shape that depends on values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            i is not None and i.dtype == torch.bool for a in args if isinstance(a, (list, tuple)) for i in a
        )
        if name in WAITS or by_mask:
            raise AssertionError(f"{name} waits for a value")
        return function(*args, **kwargs or {})


@pytest.fixture(params=["packed", "float"])
def kv_format(request):
    return request.param


@pytest.fixture(params=list(MODELS))
def model(request):
    return MODELS[request.param]()


ONE_FORMAT_EACH = [("v41", "packed"), ("v4", "float"), ("v41-dspark", "float"), ("v4-mtp", "packed")]
IN_TURN = [
    pytest.param(name, kv_format, marks=() if (name, kv_format) in ONE_FORMAT_EACH else pytest.mark.slow)
    for name in MODELS
    for kv_format in ("packed", "float")
]


@pytest.fixture
def experts_apart(monkeypatch):
    """Experts on the host choose their weights there; those on a GPU are `Dsv4Experts.grouped`."""
    forward = Dsv4Experts.forward

    def apart(*args, **kwargs):
        with _disable_current_modes():
            return forward(*args, **kwargs)

    monkeypatch.setattr(Dsv4Experts, "forward", apart)


def prompt(batch=3, length=13):
    """Rows of different lengths, padding on either side."""
    ids = tiny_model.some_ids(batch, length, seed=4)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 2 * row] = 0
    mask[-1] = mask[-1].flip(0)
    return ids, mask


def addresses(cache):
    return [tensor.data_ptr() for tensor in cache.tensors]


@pytest.mark.parametrize(("model", "kv_format"), IN_TURN, indirect=True)
@torch.no_grad()
def test_a_step_waits_for_no_value_and_keeps_every_address(model, kv_format, experts_apart):
    ids, mask = prompt()
    cache = Dsv4Cache(model.config, kv_format, max_length=40)
    model(ids, attention_mask=mask, cache=cache)
    before = addresses(cache)
    for step in range(6):
        if step == 3:
            cache.crop(-2)
        with NoHostReads():
            model(tiny_model.some_ids(3, 1, seed=step), cache=cache)
    assert addresses(cache) == before and cache.get_seq_length() == 13 + 6 - 2


@torch.no_grad()
def test_a_growing_cache_does_wait(experts_apart):
    model, cache = MODELS["v41"](), Dsv4Cache(MODELS["v41"]().config)
    model(prompt()[0], cache=cache)
    with NoHostReads(), pytest.raises(AssertionError, match="waits for a value"):
        model(tiny_model.some_ids(3, 1), cache=cache)


# ---- the same as a growing cache ------------------------------------------------------------------------------------------


def contents(cache):
    """What a cache holds of each row: the stored bytes of its entries and of the last tokens of every ring."""
    found = [cache.lengths, cache._droppable]
    for row, length in enumerate(cache.lengths.tolist()):
        for part in cache._parts:
            if hasattr(part, "size"):
                positions = torch.arange(max(0, length - part.size + cache.rollback), length)
                found += [stored[row, positions % stored.shape[1]] for stored in part.parts or ()]
        for store in (layer.store for layer in cache.layers if layer.store is not None):
            for part in (p for p in (store.entries, store.index_keys) if p is not None):
                found += [stored[row, : length // store.ratio] for stored in part.parts]
    return found


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "kv_format"),
    [
        pytest.param("v41", "float", marks=pytest.mark.slow),
        ("v41-dspark", "packed"),
        ("v4", "float"),
        pytest.param("v4-mtp", "packed", marks=pytest.mark.slow),
    ],
)
def test_fixed_capacity_changes_no_byte_and_no_token(name, kv_format):
    """A padded prompt, a chunk, steps, a crop of columns, of each row its own, drafts being dropped, rows in turn."""
    model, (ids, mask) = MODELS[name](), prompt()
    caches = [Dsv4Cache(model.config, kv_format, max_length=n) for n in (None, 60)]

    def call(ids, mask=None):
        logits = [model(ids, attention_mask=mask, cache=cache).logits for cache in caches]
        torch.testing.assert_close(*logits, atol=1e-9, rtol=0)
        assert torch.equal(*(found.argmax(-1) for found in logits))

    def same():
        for growing, fixed in zip(*map(contents, caches), strict=True):
            # Packed bytes are the same; numbers that are kept unrounded are the same sums with zeros between.
            torch.testing.assert_close(fixed, growing, atol=1e-9 if growing.is_floating_point() else 0, rtol=0)

    def each(function):
        for cache in caches:
            function(cache)

    def steps(count):
        for step in range(count):
            call(tiny_model.some_ids(caches[0].batch_size, 1, seed=step))
        same()

    call(ids, mask)
    steps(2)
    call(tiny_model.some_ids(3, 5, seed=1))
    steps(9)
    each(lambda cache: cache.crop(-3))
    steps(2)
    each(lambda cache: cache.crop_rows(torch.tensor([0, 2, 1])))
    steps(3)
    each(lambda cache: cache.activate_past_recording())
    call(tiny_model.some_ids(3, 6, seed=2))
    each(lambda cache: cache.crop_rows(torch.tensor([4, 0, 6])))
    each(lambda cache: setattr(cache, "record_past", False))
    steps(1)
    each(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2, 1])))
    caches[:] = copy.deepcopy(caches)
    steps(4)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"use_mtp": True}, {"prompt_lookup_num_tokens": 3}],
    ids=lambda o: "".join(o),
)
@pytest.mark.parametrize("name", ["v41-dspark", "v4-mtp"])
def test_generate_gives_the_same_tokens_and_continues(name, options):
    model, (ids, mask) = MODELS[name](), prompt(1 if "prompt_lookup_num_tokens" in options else 3)
    settings = {
        "do_sample": False,
        "max_new_tokens": 5,
        "return_dict_in_generate": True,
        "eos_token_id": None,
    } | options
    sequences = []
    # Prompt lookup looks past the end.
    for max_length in (None, 13 + 5 + 4 + 5 + (3 if "prompt_lookup_num_tokens" in options else 0)):
        cache = Dsv4Cache(model.config, max_length=max_length)
        first = model.generate(ids, attention_mask=mask, cache=cache, **settings).sequences
        longer = torch.cat([first, tiny_model.some_ids(len(ids), 4, seed=9)], dim=1)
        more = torch.cat([mask, mask.new_ones(len(ids), longer.shape[1] - mask.shape[1])], dim=1)
        sequences.append(model.generate(longer, attention_mask=more, cache=cache, **settings).sequences)
    assert torch.equal(*sequences) and sequences[0].shape[1] == 13 + 5 + 4 + 5


# ---- the graph ----------------------------------------------------------------------------------------------------------


def test_what_is_a_step_and_what_can_be_captured():
    model, ids = MODELS["v41"](), tiny_model.some_ids(1, 1)
    cache = Dsv4Cache(model.config, max_length=9)
    assert not can_capture(model)  # on the host
    with torch.no_grad():
        assert not is_step({"input_ids": ids, "cache": cache})  # nothing allocated yet, and on the host
        graph = DecodeGraph(model)
        torch.testing.assert_close(graph(input_ids=ids, cache=cache).logits, model(ids, use_cache=False).logits)
    assert cache.get_seq_length() == 1


@pytest.mark.parametrize("quantize", [False, True])
def test_grouped_experts_equal_the_bank(quantize):
    """Rows that two experts share, experts without rows, and experts that lie on another rank."""
    bank = Dsv4Experts(tiny_model.tiny_config().text_config).float()
    bank.quantize_activations = quantize
    generator = torch.Generator().manual_seed(0)
    for parameter in bank.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    x, weights = torch.randn(5, 64, generator=generator), torch.rand(5, 3, generator=generator)
    indices = torch.stack([torch.randperm(9, generator=generator)[:3] for _ in range(5)])
    assert (indices == bank.num_experts).any()
    with torch.no_grad():
        torch.testing.assert_close(bank.grouped(x, indices, weights), bank(x, indices, weights), atol=2e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v41", "v4"])
def test_a_step_compiles_as_one_graph(name, monkeypatch):
    """Whatever its length; with experts as on a GPU."""
    monkeypatch.setattr(Dsv4Experts, "waits_for_host", lambda *_: False)
    model, ids = copy.deepcopy(MODELS[name]()).bfloat16(), tiny_model.some_ids(2, 15)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model.__call__, backend="eager", fullgraph=True)
    caches = [Dsv4Cache(model.config, max_length=40) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :9], cache=cache)
        for token in ids[:, 9:].split(1, dim=1):
            logits = [call(input_ids=token, cache=c).logits for call, c in zip((model, compiled), caches, strict=True)]
            assert torch.equal(*logits)
    assert caches[1].get_seq_length() == 15 and caches[1].lengths.tolist() == [15, 15]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # for a first length, and for all others


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_replayed_steps_give_the_tokens_of_eager_ones(model, kv_format, batch, monkeypatch):
    model, (ids, mask) = copy.deepcopy(model).to("cuda", torch.bfloat16), prompt(batch, 17 + batch)
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(self), replay(self)))
    settings = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "return_dict_in_generate": True}
    outputs = []
    for disable_compile in (True, False):
        cache = Dsv4Cache(model.config, kv_format, max_length=90)
        inputs = {"cache": cache, "disable_compile": disable_compile, "output_logits": True} | settings
        out = model.generate(ids.cuda(), attention_mask=mask.cuda(), **inputs)
        cache.crop(-3)
        more = torch.cat([mask.cuda(), mask.new_ones(batch, 20).cuda()], dim=1)
        longer = model.generate(out.sequences, attention_mask=more, **inputs)
        outputs.append((out.sequences, longer.sequences, *out.logits, *longer.logits, *contents(cache)))
    assert len(replays) == 2 * 18 and len(set(replays)) == 2  # of 19 steps each, the first ran as it is
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
