"""The cache of a whole model: after any schedule it equals one that never saw the dropped tokens."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from modeling_dsv4 import Dsv4Cache, Dsv41TextConfig
from tests.modeling.mechanism_models import tiny_config, tiny_model

ROLLBACK = 5
# float64: pieces differ from a whole by 1e-13, and a wrong entry by 1e-3 or more.
BOUND = 1e-9


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=[None, 48], ids=["growing", "fixed"])
def max_length(request):
    return request.param


class Rows:
    """What a cache stands for: the tokens of every row, and which columns are real."""

    def __init__(self, batch, rollback=ROLLBACK):
        self.tokens = [[] for _ in range(batch)]
        self.mask = [[] for _ in range(batch)]
        self.droppable, self.rollback, self.recording = [0] * batch, rollback, False
        self.fresh = 0

    @property
    def columns(self):
        return len(self.mask[0])

    def append(self, model, cache, pads):
        """Call the model with one column per entry of `pads[b]` (True = padding); return the states of real tokens."""
        columns = len(pads[0])
        ids = torch.full((len(pads), columns), 2)
        for b, row in enumerate(pads):
            for s, pad in enumerate(row):
                if not pad:
                    self.fresh += 1
                    ids[b, s] = 3 + (self.fresh * 37 + b) % 125
                    self.tokens[b].append(int(ids[b, s]))
                self.mask[b].append(not pad)
        bound = self.rollback + (columns if self.recording else 0)
        added = [columns - sum(row) for row in pads]
        self.droppable = [min(d + n, bound) for d, n in zip(self.droppable, added, strict=True)]
        out = model(ids, attention_mask=torch.tensor(self.mask).long(), cache=cache).last_hidden_state
        return [out[b, ~torch.tensor(row)] for b, row in enumerate(pads)]

    def drop(self, counts):
        for b, count in enumerate(counts):
            del self.tokens[b][len(self.tokens[b]) - count :]
        self.droppable = [min(d - c, self.rollback) for d, c in zip(self.droppable, counts, strict=True)]

    def crop(self, count):
        counts = [sum(row[self.columns - count :]) for row in self.mask]
        self.drop(counts)
        self.mask = [row[: self.columns - count] for row in self.mask]

    def crop_rows(self, counts):
        self.drop(counts)
        for row, tokens in zip(self.mask, self.tokens, strict=True):
            left = len(tokens)
            for i, real in enumerate(row):
                row[i] = real and left > 0
                left -= row[i]
        while self.columns and not any(row[-1] for row in self.mask):
            self.mask = [row[:-1] for row in self.mask]

    def take(self, indices):
        for name in ("tokens", "mask"):
            setattr(self, name, [list(getattr(self, name)[i]) for i in indices])
        self.droppable = [self.droppable[i] for i in indices]


def assert_same_as_alone(model, cache, rows, probe=3):
    """Continue every row by `probe` tokens: equal to a run of the row alone, in one call, without a cache."""
    assert cache.get_seq_length() == rows.columns and cache.lengths.tolist() == [len(row) for row in rows.tokens]
    states = [rows.append(model, cache, [[False] * count for _ in rows.tokens]) for count in (probe - 1, 1)]
    for row, *found in zip(rows.tokens, *states, strict=True):
        alone = model(torch.tensor([row]), use_cache=False).last_hidden_state[0, -probe:]
        assert (torch.cat(found) - alone).abs().max() < BOUND


def _draw_pads(data, batch, first):
    columns = data.draw(st.integers(1, 7), label="columns")
    pads = [[False] * columns for _ in range(batch)]
    for row in pads:
        count = data.draw(st.integers(0, columns - 1 if first else columns), label="pads")
        side = data.draw(st.sampled_from(["left", "right"]))
        row[:] = [True] * count + [False] * (columns - count)
        if side == "right":
            row.reverse()
    return pads


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_schedule_leaves_what_the_surviving_tokens_would(model, data):
    batch = data.draw(st.integers(1, 3), label="batch")
    kv_format, max_length = data.draw(st.sampled_from(["packed", "float"])), data.draw(st.sampled_from([None, 48]))
    cache, rows = Dsv4Cache(model.config, kv_format, ROLLBACK, max_length), Rows(batch)
    if data.draw(st.booleans(), label="recording"):
        cache.activate_past_recording()
        rows.recording = True
    rows.append(model, cache, _draw_pads(data, batch, True))
    for _ in range(data.draw(st.integers(1, 5), label="steps")):
        action = data.draw(st.sampled_from(["append", "append", "crop", "crop_rows", "select", "copy"]))
        if action == "append":
            rows.append(model, cache, _draw_pads(data, len(rows.tokens), False))
        elif action == "crop":
            legal = [
                n for n in range(max(rows.columns, 1))
                if all(sum(row[rows.columns - n :]) <= d for row, d in zip(rows.mask, rows.droppable, strict=True))
            ]  # fmt: skip
            count = data.draw(st.sampled_from(legal), label="crop")
            cache.crop(-count)
            rows.crop(count)
        elif action == "crop_rows":
            counts = [data.draw(st.integers(0, d), label="crop_rows") for d in rows.droppable]
            cache.crop_rows(torch.tensor(counts))
            rows.crop_rows(counts)
        elif action == "select":
            indices = data.draw(st.lists(st.integers(0, len(rows.tokens) - 1), min_size=1, max_size=3))
            cache.reorder_cache(torch.tensor(indices))
            rows.take(indices)
        else:
            cache = copy.deepcopy(cache)
        assert cache.get_seq_length() == rows.columns
        assert cache.lengths.tolist() == [len(row) for row in rows.tokens]
        assert cache._droppable.tolist() == rows.droppable
    assert_same_as_alone(model, cache, rows)


def _filled(model, batch=2, columns=11, rollback=ROLLBACK, **options):
    cache, rows = Dsv4Cache(model.config, rollback=rollback, **options), Rows(batch, rollback)
    pads = [[s < b for s in range(columns)] for b in range(batch)]
    rows.append(model, cache, pads)
    return cache, rows


@pytest.mark.parametrize(("length", "count"), [(1, 1), (2, 1), (3, 5), (7, 1), (8, 3), (9, 2), (12, 5), (13, 4)])
def test_crop_over_every_group_border(model, length, count, max_length):
    cache, rows = _filled(model, 1, length, max_length=max_length)
    if count >= length:
        cache.crop(-count)
        assert not cache.is_initialized and cache.get_seq_length() == 0
        return
    cache.crop(-count)
    rows.crop(count)
    assert_same_as_alone(model, cache, rows, probe=2)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["packed", "float"])
@pytest.mark.parametrize("count", range(1, 17))
def test_crop_of_every_count_at_every_offset(model, count, kv_format, max_length):
    """Both places in a group of two, and every place of the window of eight; rows with one more pad than the row before."""
    for length in range(24, 32):
        cache, rows = _filled(model, 2, length, rollback=16, kv_format=kv_format, max_length=max_length)
        cache.crop(-count)
        rows.crop(count)
        assert_same_as_alone(model, cache, rows, probe=2)


@pytest.mark.parametrize("count", [0, 3, 8])
def test_a_verification_may_drop_what_it_appended(model, count, max_length):
    cache, rows = Dsv4Cache(model.config, rollback=0, max_length=max_length), Rows(2, rollback=0)
    rows.recording = True
    rows.append(model, cache, [[False] * 10] * 2)
    with pytest.raises(ValueError, match="at most"):
        cache.crop(-1)
    cache.activate_past_recording()
    assert cache.is_recording_past()
    rows.append(model, cache, [[False] * 8] * 2)
    cache.crop(-count)
    rows.crop(count)
    if max_length is None:
        assert cache.layers[0].window.parts[0].shape[1] == 7  # trimmed: the window and nothing more
    with pytest.raises(ValueError, match="rollback=0"):
        cache.crop(-1)
    assert_same_as_alone(model, cache, rows)


def test_recording_starts_before_a_padded_prompt(model, max_length):
    cache, rows = Dsv4Cache(model.config, rollback=2, max_length=max_length), Rows(2, rollback=2)
    cache.activate_past_recording()
    rows.recording = True
    rows.append(model, cache, [[False] * 3 + [True] * 6, [False] * 9])
    cache.crop_rows(torch.tensor([1, 4]))
    rows.crop_rows([1, 4])
    assert_same_as_alone(model, cache, rows)


# ---- the rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_rows_are_reordered_selected_and_repeated(model, name, max_length):
    cache, rows = _filled(model, 3, max_length=max_length)
    if name == "batch_repeat_interleave":
        cache.batch_repeat_interleave(2)
        rows.take([0, 0, 1, 1, 2, 2])
    else:
        indices = [2, 0, 2] if name == "reorder_cache" else [1, 2]
        getattr(cache, name)(torch.tensor(indices))
        rows.take(indices)
    assert cache.batch_size == len(rows.tokens)
    assert_same_as_alone(model, cache, rows)


@pytest.mark.parametrize("kv_format", ["packed", "float"])
def test_filled_in_inference_mode_it_can_be_continued_outside(model, kv_format, max_length):
    with torch.inference_mode():
        cache, rows = _filled(model, kv_format=kv_format, max_length=max_length)
        cache.reorder_cache(torch.tensor([1, 0]))
    rows.take([1, 0])
    assert_same_as_alone(model, cache, rows)


def test_copies_are_independent(model, max_length):
    cache, rows = _filled(model, max_length=max_length)
    other, other_rows = copy.deepcopy(cache), copy.deepcopy(rows)
    assert all(layer._owner is other for layer in other.layers)
    other_rows.fresh = 60  # another suffix
    for _ in range(2):  # decoded in turn
        rows.append(model, cache, [[False] * 2] * 2)
        other_rows.append(model, other, [[False] * 3] * 2)
    assert_same_as_alone(model, cache, rows)
    assert_same_as_alone(model, other, other_rows)


def test_reset_makes_an_empty_cache(model, max_length):
    cache, _ = _filled(model, max_length=max_length)
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.is_initialized and cache.batch_size == -1
    assert sum(cache.nbytes(allocated=True).values()) == 0
    rows = Rows(3)
    rows.append(model, cache, [[False] * 4] * 3)
    assert_same_as_alone(model, cache, rows)


@pytest.mark.parametrize("kv_format", ["packed", "float"])
def test_saved_caches_continue(model, tmp_path, kv_format, max_length):
    cache, rows = _filled(model, kv_format=kv_format, max_length=max_length)
    cache.crop(-2)
    rows.crop(2)
    path = str(tmp_path / "cache.safetensors")
    cache.save(path)
    other = Dsv4Cache.load(path, model.config)
    assert (other.kv_format, other.rollback, other.max_length) == (kv_format, ROLLBACK, max_length)
    assert other.nbytes(allocated=True) == cache.nbytes(allocated=True)
    assert other._droppable.tolist() == rows.droppable
    copied = copy.deepcopy(rows)
    assert_same_as_alone(model, other.to("cpu"), rows)
    assert_same_as_alone(model, cache, copied)


def test_an_empty_cache_can_be_saved_and_moved(model, tmp_path):
    cache, path = Dsv4Cache(model.config, rollback=ROLLBACK), str(tmp_path / "empty.safetensors")
    cache.to("cpu").save(path)
    other, rows = Dsv4Cache.load(path, model.config), Rows(1)
    rows.append(model, other, [[False] * 5])
    assert_same_as_alone(model, other, rows)


def test_packed_and_float_caches_give_the_same_values(model):
    outputs = []
    for kv_format in ("packed", "float"):
        cache, rows = _filled(model, kv_format=kv_format)
        outputs.append(torch.cat(rows.append(model, cache, [[False] * 3] * 2)))
    assert torch.equal(*outputs)


def test_without_rounding_a_float_cache_is_used():
    model = tiny_model(cache_rounding=False)
    cache, rows = _filled(model, kv_format="float")
    assert_same_as_alone(model, cache, rows)
    with pytest.raises(ValueError, match="cache_rounding=False"):
        Dsv4Cache(model.config, "packed")


# ---- capacity and bytes --------------------------------------------------------------------------------------------------


def test_fixed_capacity_is_allocated_once_and_refused_beyond(model):
    cache, rows = _filled(model, 2, 9, max_length=14)
    addresses = [layer.store.entries.parts[0].data_ptr() for layer in cache.layers if layer.store]
    sizes = [layer.store.entries.parts[0].shape[1] for layer in cache.layers if layer.store]
    assert sizes == [7, 14] and cache.get_max_length() == 14
    rows.append(model, cache, [[False] * 3] * 2)
    assert addresses == [layer.store.entries.parts[0].data_ptr() for layer in cache.layers if layer.store]
    before = cache.nbytes(allocated=True)
    with pytest.raises(ValueError, match=r"made for 14 tokens \(max_length\); it holds 12 and 3 more"):
        model(torch.ones(2, 3).long(), cache=cache)
    assert cache.get_seq_length() == 12 and cache.nbytes(allocated=True) == before
    assert_same_as_alone(model, cache, rows, probe=2)


def _simulate(config, tokens, rollback=16, call=1 << 16):
    """Fill a cache of a configuration with random values in calls of some length, without a model."""
    cache, device = Dsv4Cache(config, rollback=rollback), torch.device("cpu")
    values = {
        size: torch.randn(1, call, size, dtype=torch.bfloat16) for size in (config.head_dim, config.index_head_dim)
    }
    for start in range(0, tokens, call):
        count = min(call, tokens - start)
        layout = cache.layout(None, 1, count, device)
        for index, layer in enumerate(cache.layers):
            if start + count == tokens:  # a window holds its last tokens only
                layer.window.append(
                    values[config.head_dim][:, : min(count, 256)], cache.layout(None, 1, min(count, 256), device)
                )
            if layer.store is not None:
                first, after = (torch.tensor([n // config.ratio(index)]) for n in (start, start + count))
                for store, width in (
                    (layer.store.entries, config.head_dim),
                    (layer.store.index_keys, config.index_head_dim),
                ):
                    store.write(values[width][:, : int(after - first)], first, after, int(after))
        cache.advance(layout, None)
    return cache


@pytest.mark.parametrize(
    "tokens", [4096, pytest.param(1 << 16, marks=pytest.mark.slow), pytest.param(1 << 20, marks=pytest.mark.slow)]
)
def test_released_bytes_follow_the_closed_form(tokens):
    config = Dsv41TextConfig(num_nextn_predict_layers=0, compress_ratios=Dsv41TextConfig().compress_ratios[:40])
    short = _simulate(config, 256).nbytes()
    cache = _simulate(config, tokens)
    long, allocated = cache.nbytes(), cache.nbytes(allocated=True)
    # 288 B an entry (512 nibbles, 32 scales) and 68 B a key (128 nibbles, 4 scales); three sources of ratio 2, one of 1.
    slope = sum(long[part] - short[part] for part in long) / (tokens - 256)
    print(f"{tokens} tokens: {slope} B a token; used {long}; allocated {allocated}")
    assert slope == 3 * (288 + 68) / 2 + (288 + 68) == 890
    assert long["compressed"] == tokens * 288 * 5 // 2 and long["index"] == tokens * 68 * 5 // 2
    # 512 bytes and 16 scales a token, for the tokens that a query or a rollback may need.
    assert long["window"] == short["window"] == 40 * (127 + 16) * 528
    assert long["draft"] == 0
    assert all(long[part] <= allocated[part] <= 2 * long[part] for part in long)


def test_bytes_in_use_and_allocated(model, max_length):
    assert sum(Dsv4Cache(model.config).nbytes().values()) == 0
    cache, rows = _filled(model, 2, 11, max_length=max_length)
    used, allocated = cache.nbytes(), cache.nbytes(allocated=True)
    assert set(used) == set(allocated) == {"window", "compressed", "index", "draft", "state"}
    entry, key, token = 16 + 2, 16 + 1, 32 + 1  # bytes at 32 channels: NVFP4, MXFP4, FP8
    counts = sum(len(row) // 2 for row in rows.tokens), sum(len(row) for row in rows.tokens)
    assert used["compressed"] == sum(counts) * entry and used["index"] == sum(counts) * key
    entries = 16 + 16 if max_length is None else 24 + 48
    assert allocated["compressed"] == 2 * entries * entry and allocated["index"] == 2 * entries * key
    extra = ROLLBACK + (max_length or 0)  # of a ring; the fixed one has room for the longest verification
    assert used["window"] == 5 * 2 * 11 * token and allocated["window"] == 5 * 2 * (7 + extra) * token
    # Open group: values and gates of 32 channels in float64; n-gram ids; lengths, droppable, mask.
    assert allocated["state"] == 2 * (1 + extra) * 64 * 8 + 2 * (2 + extra) * 8 + 2 * 2 * 8 + 2 * 11
    stored = [part for p in cache._parts for part in p.parts]
    masks = [cache.lengths, cache._droppable, cache.column_mask]
    assert sum(t.untyped_storage().nbytes() for t in stored + masks) == sum(allocated.values())


def test_a_growing_cache_copies_rarely(model):
    cache, rows = _filled(model, 1, 13)
    seen = set()
    for _ in range(10):
        model(torch.tensor([[5]]), cache=cache)
        seen.add(cache.layers[3].store.entries.parts[0].data_ptr())
    assert cache.get_seq_length() == 23 and len(seen) == 2


# ---- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_format": "int8"}, r"kv_format is 'int8'; accepted: \('packed', 'float'\)"),
        ({"rollback": -1}, "rollback is -1"),
        ({"rollback": 1.5}, "rollback is 1.5"),
        ({"max_length": 0}, "max_length is 0"),
        ({"max_length": "many"}, "max_length is 'many'"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Dsv4Cache(tiny_config(), **options)


def test_wrong_crops_are_refused_and_change_nothing(model):
    cache, rows = _filled(model)
    for call, message in (
        (lambda: cache.crop(3), "negative"),
        (lambda: cache.crop(-(ROLLBACK + 1)), r"at most \[5, 5\]"),
        (lambda: cache.crop_rows(torch.tensor([0, ROLLBACK + 1])), r"at most \[5, 5\]"),
        (lambda: cache.crop_rows(torch.tensor([0, -1])), "counts >= 0"),
        (lambda: cache.crop_rows(torch.tensor([1])), "accepted: 2 counts"),
        (lambda: Dsv4Cache(model.config).crop_rows(torch.tensor([0])), "empty cache"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    cache.crop(torch.tensor(-1))  # transformers passes 0-d tensors
    rows.crop(1)
    Dsv4Cache(model.config).crop(-3)
    assert_same_as_alone(model, cache, rows)


def test_another_batch_and_foreign_calls_are_refused(model):
    cache, _ = _filled(model)
    with pytest.raises(ValueError, match="the call has 3 rows; accepted: 2"):
        model(torch.ones(3, 1).long(), cache=cache)
    for call in (
        lambda: cache.update(None, None, 0),
        lambda: cache.layers[0].update(None, None),
        lambda: cache.layers[0].lazy_initialization(None, None),
    ):
        with pytest.raises(TypeError, match="Dsv4Cache"):
            call()


def test_foreign_files_are_refused(model, tmp_path):
    from safetensors.torch import save_file

    cache, _ = _filled(model)
    path, foreign, broken = (str(tmp_path / name) for name in ("cache", "foreign", "broken"))
    cache.save(path)
    save_file({"x": torch.zeros(1)}, foreign)
    with open(path, "rb") as whole, open(broken, "wb") as half:
        half.write(whole.read()[:-100])
    for wrong in (foreign, broken):
        with pytest.raises(OSError, match=wrong):
            Dsv4Cache.load(wrong, model.config)
    half_depth = {
        "num_hidden_layers": 3,
        "compress_ratios": [0, 2, 2],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": -1,
    }
    other_sources = {
        "kv_source_layer_ids": [2, 3],
        "index_source_layer_ids": [2, 3],
        "compress_ratios": [0, 0, 2, 1, 1],
    }
    for changes in ({"sliding_window": 9}, {"head_dim": 64}, {"engram_max_ngram_size": 4}, half_depth, other_sources):
        if "engram_max_ngram_size" in changes:
            changes = changes | {"engram_num_embeddings": [900]}
        with pytest.raises(OSError, match="another configuration"):
            Dsv4Cache.load(path, tiny_config(**changes))


def test_recording_ends_with_reset_and_through_any_layer():
    cache = Dsv4Cache(tiny_config())
    cache.activate_past_recording()
    assert all(layer.record_past for layer in cache.layers) and cache.is_recording_past()
    cache.layers[0].record_past = False  # what `generate` does when drafting ends
    assert not cache.record_past
    cache.activate_past_recording()
    cache.reset()
    assert not cache.record_past


def test_a_cache_of_another_rounding_or_rope_is_refused(tmp_path):
    config = tiny_config()
    cache = Dsv4Cache(config, "float")
    cache.save(str(tmp_path / "cache.safetensors"))
    for key, value in (
        ("cache_rounding", False),
        ("qk_rope_head_dim", config.get_text_config().qk_rope_head_dim // 2),
    ):
        other = copy.deepcopy(config)
        setattr(other.get_text_config(), key, value)
        with pytest.raises(OSError, match="another configuration"):
            Dsv4Cache.load(str(tmp_path / "cache.safetensors"), other)


@pytest.mark.parametrize("about", ['{"kv_format": "float"}', "{"])
def test_damaged_metadata_is_no_saved_cache(tmp_path, about):
    path = str(tmp_path / "cache.safetensors")
    save_file({"lengths": torch.zeros(1, dtype=torch.long)}, path, metadata={"dsv4_cache": about})
    with pytest.raises(OSError, match="is not a saved Dsv4Cache"):
        Dsv4Cache.load(path, tiny_config())
