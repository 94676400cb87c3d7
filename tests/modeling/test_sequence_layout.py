"""Row layout and masks: any padding, every accepted mask, refused masks, position ids."""

import pytest
import torch

from modeling_dsv4.sequence_layout import (
    SequenceLayout,
    follows_layout,
    read_attention_mask,
    take_rows_from,
)

# Rows with padding on the left, on the right, on both sides, inside, and none.
MIXED = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 1],
        [1, 1, 1, 1, 1, 1],
    ]
).bool()


def _layout(valid, past=None):
    past = torch.zeros(len(valid), dtype=torch.long) if past is None else torch.tensor(past)
    return SequenceLayout.from_mask(valid, past, valid.shape[1])


def _causal(keep, queries):
    """A causal `[B, 1, queries, T]` boolean mask of `keep` `[B, T]`, one element at a time."""
    batch, total = keep.shape
    mask = torch.zeros(batch, 1, queries, total, dtype=torch.bool)
    for b in range(batch):
        for q in range(queries):
            for t in range(total):
                mask[b, 0, q, t] = keep[b, t] and t <= total - queries + q
    return mask


def _additive(mask, dtype=torch.float32, low=None):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min if low is None else low)


# ---- layout ------------------------------------------------------------------------------------------------------------


def test_real_tokens_come_first_in_order_and_go_back():
    layout = _layout(MIXED)
    x = torch.arange(30.0).view(5, 6)[..., None].expand(5, 6, 3)
    shifted = layout.shift(x)
    for b, row in enumerate(MIXED):
        wanted = x[b, row]
        assert torch.equal(shifted[b, : len(wanted)], wanted)
        assert layout.real[b].tolist() == [i < len(wanted) for i in range(6)]
    assert torch.equal(layout.unshift(shifted), x)
    assert layout.new.tolist() == [4, 4, 2, 4, 6] and layout.is_ragged
    assert layout.position_ids.tolist() == [list(range(6))] * 5


@pytest.mark.parametrize("trailing", [(), (4,), (2, 3)])
def test_shift_takes_any_trailing_shape(trailing):
    layout = _layout(MIXED)
    x = torch.randn(5, 6, *trailing, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layout.unshift(layout.shift(x)), x)
    assert torch.equal(layout.shift(x)[0, :4], x[0, 2:])


def test_right_padding_moves_nothing_and_no_mask_means_all_real():
    right = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    layout = _layout(right)
    assert layout.order is None and layout.is_ragged and layout.new.tolist() == [3, 4]
    x = torch.randn(2, 4)
    assert layout.shift(x) is x and layout.unshift(x) is x
    layout = SequenceLayout.from_mask(None, torch.tensor([3, 5]), 4)
    assert not layout.is_ragged and layout.new.tolist() == [4, 4] and layout.order is None


def test_only_rows_without_past_or_padding_are_known_to_be_whole():
    none = torch.zeros(2, dtype=torch.long)
    whole = SequenceLayout.from_mask(None, none, 6, begins=True)
    assert whole.is_whole and whole.tail(6).is_whole and not whole.tail(3).is_whole
    assert not SequenceLayout.from_mask(None, none + 4, 6).is_whole
    assert not SequenceLayout.from_mask(MIXED[:2], none, 6, begins=True).is_whole


def test_positions_and_lengths_continue_the_past():
    layout = _layout(torch.tensor([[0, 1, 1], [1, 1, 1]]).bool(), past=[7, 2])
    assert layout.position_ids.tolist() == [[7, 8, 9], [2, 3, 4]]
    assert layout.lengths.tolist() == [9, 5]


def test_take_rows_from_starts_each_row_at_its_own_column():
    x = torch.arange(24).view(2, 6, 2)
    found = take_rows_from(x, torch.tensor([1, 3]), 3)
    assert torch.equal(found, torch.stack([x[0, 1:4], x[1, 3:6]]))
    assert take_rows_from(x, torch.tensor([0, 0]), 0).shape == (2, 0, 2)


# ---- masks that are read -----------------------------------------------------------------------------------------------


def _spellings(keep, queries):
    """The accepted spellings of one padding."""
    causal = _causal(keep, queries)
    return {
        "bool": keep,
        "int": keep.long(),
        "float": keep.float(),
        "4-D bool": causal,
        "4-D additive": _additive(causal),
        "4-D additive bfloat16": _additive(causal, torch.bfloat16),
        "4-D additive inf": _additive(causal, low=float("-inf")),
    }


@pytest.mark.parametrize("name", list(_spellings(MIXED, 6)))
@pytest.mark.parametrize("rows", [[0], [1], [2], [0, 1, 2], [0, 4], [3]])
def test_every_spelling_reads_as_the_same_padding(rows, name):
    keep = MIXED[rows]
    found = read_attention_mask(_spellings(keep, 6)[name], len(rows), 6, 0, None)
    assert torch.equal(found, keep)


@pytest.mark.parametrize("name", list(_spellings(MIXED, 6)))
def test_without_padding_nothing_is_returned(name):
    full = torch.ones(2, 5, dtype=torch.bool)
    assert read_attention_mask(_spellings(full, 5)[name], 2, 5, 0, None) is None
    assert read_attention_mask(None, 2, 5, 0, None) is None


@pytest.mark.parametrize("name", list(_spellings(MIXED, 6)))
def test_continued_masks_are_compared_with_the_past(name):
    seen = MIXED[:, :4]
    found = read_attention_mask(_spellings(MIXED, 2)[name], 5, 2, 4, seen)
    assert torch.equal(found, MIXED[:, 4:])
    other = seen.clone()
    other[2, 0] = ~other[2, 0]
    with pytest.raises(ValueError, match="differs from the mask"):
        read_attention_mask(_spellings(MIXED, 2)[name], 5, 2, 4, other)
    with pytest.raises(ValueError, match="differs from the mask"):
        read_attention_mask(_spellings(MIXED, 2)[name], 5, 2, 4, None)


def test_one_row_serves_a_batch():
    keep = torch.tensor([[0, 1, 1]])
    assert torch.equal(read_attention_mask(keep, 4, 3, 0, None), keep.bool().expand(4, 3))
    assert torch.equal(read_attention_mask(_causal(keep.bool(), 3), 4, 3, 0, None), keep.bool().expand(4, 3))


def test_padded_queries_may_be_filled_in_any_way():
    keep = torch.tensor([[0, 0, 1, 1]]).bool()
    for value in (False, True):
        mask = _causal(keep, 4)
        mask[:, :, :2] = value
        assert torch.equal(read_attention_mask(mask, 1, 4, 0, None), keep)


# ---- masks that are refused ----------------------------------------------------------------------------------------------


def _refused():
    causal = _causal(torch.ones(2, 6, dtype=torch.bool), 6)
    window = causal & torch.ones(6, 6, dtype=torch.bool).triu(-2)
    bidirectional = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    future = causal.clone()
    future[1, 0, 2, 3] = True
    hole = causal.clone()
    hole[0, 0, 4, 1] = False
    documents = causal.clone()
    documents[:, :, 3:, :3] = False
    return {
        "sliding window": window,
        "bidirectional": bidirectional,
        "one future token": future,
        "one hidden token": hole,
        "packed documents": documents,
        "packed documents, additive": _additive(documents),
        "two heads": causal.expand(2, 2, 6, 6),
        "short keys": causal[..., :5],
        "short queries": causal[:, :, 1:],
        "2-D too short": torch.ones(2, 5),
        "2-D too long": torch.ones(2, 7),
        "2-D wrong batch": torch.ones(3, 6),
        "4-D wrong batch": causal[:1].expand(3, 1, 6, 6),
        "3-D": causal[:, 0],
        "1-D": torch.ones(6),
        "an empty row": torch.tensor([[1] * 6, [0] * 6]),
        "packed documents, the first of one token": causal
        & torch.tensor([[q == 0 or t > 0 for t in range(6)] for q in range(6)]),
        "4-D integers": causal.long(),
    }


@pytest.mark.parametrize("name", list(_refused()))
def test_other_masks_are_refused(name):
    with pytest.raises(ValueError, match="attention_mask"):
        read_attention_mask(_refused()[name], 2, 6, 0, None)


def test_integer_4d_masks_are_refused_in_a_decoding_step():
    # 0 and 1 are both >= 0: read as an additive mask, nothing would be hidden.
    mask = torch.tensor([[[[0, 1, 1]]]])
    with pytest.raises(ValueError, match="int64"):
        read_attention_mask(mask, 1, 1, 2, torch.tensor([[False, True]]))


def test_a_row_may_be_silent_later_but_not_at_first():
    keep = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    assert torch.equal(read_attention_mask(keep, 2, 2, 2, None), keep[:, 2:])
    with pytest.raises(ValueError, match="without a single real token"):
        read_attention_mask(torch.tensor([[0, 0], [1, 1]]), 2, 2, 0, None)


# ---- position ids --------------------------------------------------------------------------------------------------------


def test_position_ids_of_real_tokens_must_be_those_of_the_layout():
    layout = _layout(MIXED)
    given = (MIXED.long().cumsum(-1) - 1).masked_fill(~MIXED, 1)
    assert follows_layout(given, layout) and follows_layout(None, layout)
    wrong = given.clone()
    wrong[3, 2] += 1
    assert not follows_layout(wrong, layout)
    assert follows_layout(given.masked_fill(~MIXED, 99), layout)


def test_position_ids_continue_and_may_be_one_row():
    layout = SequenceLayout.from_mask(None, torch.tensor([4, 4]), 3)
    assert follows_layout(torch.tensor([[4, 5, 6]]), layout)
    assert follows_layout(torch.tensor([[4, 5, 6]] * 2), layout)
    assert not any(follows_layout(torch.tensor(wrong), layout) for wrong in ([[0, 1, 2]], [[4, 5, 0]], [[5, 6, 7]]))


# ---- packed documents ----------------------------------------------------------------------------------------------------


def test_every_document_gets_a_row():
    valid = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]]).bool()
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [7, 0, 0, 1, 7, 7]])
    layout = SequenceLayout.from_documents(positions, valid)
    assert layout.is_packed and layout.is_ragged and layout.new.tolist() == [3, 1, 2, 1, 2]
    x = torch.arange(12).view(2, 6, 1)
    rows = [row[:n].flatten().tolist() for row, n in zip(layout.shift(x), layout.new, strict=True)]
    assert rows == [[0, 1, 2], [3], [4, 5], [7], [8, 9]]
    assert torch.equal(layout.unshift(layout.shift(x))[valid], x[valid])
    assert torch.equal(layout.unshift(layout.position_ids)[valid], positions[valid])


@pytest.mark.parametrize("positions", [[1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 1, 2], [0, 2, 0, 1]])
def test_documents_count_from_zero(positions):
    with pytest.raises(ValueError, match="of each packed document from 0"):
        SequenceLayout.from_documents(torch.tensor([positions]), torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="of each packed document from 0"):  # the second row goes on from the first
        SequenceLayout.from_documents(torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(2, 4), (3,), (2, 3, 1), (3, 3)])
def test_position_ids_of_another_shape_are_refused(shape):
    layout = SequenceLayout.from_mask(None, torch.tensor([0, 0]), 3)
    with pytest.raises(ValueError, match="position_ids"):
        follows_layout(torch.arange(3).expand(shape) if len(shape) == 1 else torch.zeros(shape).long(), layout)


def test_a_two_dimensional_additive_mask_is_refused():
    """Read as numbers it would mean the opposite: 0 for real tokens, -inf for padding."""
    mask = torch.tensor([[float("-inf"), 0.0, 0.0]])
    with pytest.raises(ValueError, match="two dimensions and negative values"):
        read_attention_mask(mask, 1, 3, 0, None)
