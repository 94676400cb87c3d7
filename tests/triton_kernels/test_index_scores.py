"""Index scores over packed and float keys, and selection by them, against the reference maths and the indexer."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from modeling_dsv4 import sparse_attention as reference
from modeling_dsv4.attention import Dsv4Indexer
from modeling_dsv4.cache_storage import INDEX_MXFP4, UNROUNDED, EntryView
from modeling_dsv4.fp_codecs import dequantize_mxfp4, quantize_mxfp4, round_mxfp4
from modeling_dsv4.kernel_seam import KernelSet
from tests.modeling.mechanism_models import fill, tiny_config
from tests.reference import attention as oracle


@pytest.fixture
def kernels(poisoned):
    from modeling_dsv4.triton_kernels import index_scores

    return index_scores


def make_inputs(tokens, columns, heads, channels, dtype, device, seed=0):
    """Queries, packed keys with room behind them, the same keys as floats, weights, visible entries of ragged rows."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    queries = round_mxfp4(random(2, tokens, heads, channels)).to(device, dtype)
    keys = random(2, columns + 5, channels) * 2.0 ** torch.randint(-3, 4, (2, columns + 5, 1), generator=generator)
    packed = tuple(part[:, :columns].to(device) for part in map(torch.Tensor.contiguous, quantize_mxfp4(keys)))
    visible = torch.randint(0, columns + 1, (2, tokens), generator=generator)
    visible[0, 0], visible[-1, -1] = columns, 0
    return (
        queries,
        packed,
        dequantize_mxfp4(*packed).to(dtype),
        random(2, tokens, heads).to(device, dtype),
        visible.to(device),
    )


def assert_scores(found, expected, dtype):
    """Equal, but for the order of float32 sums: an ulp in float32, and the rounding of few of the head sums."""
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        return
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)
    assert (found != expected).float().mean() < 0.005


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "columns", "heads", "channels"), [(1, 130, 8, 128), (3, 70, 4, 32), (5, 33, 3, 16), (2, 300, 2, 48)]
)
def test_scores_are_those_of_the_reference(kernels, device, tokens, columns, heads, channels, dtype):
    queries, packed, floats, weights, visible = make_inputs(tokens, columns, heads, channels, dtype, device)
    expected = reference.index_scores(queries, floats, weights)
    seen = torch.arange(columns, device=device) < visible[..., None]
    for keys in (packed, (floats,)):
        found = kernels.index_scores(queries, keys, weights, visible)
        assert found.dtype == dtype and found.shape == expected.shape
        assert_scores(found[seen], expected[seen], dtype)
        assert seen.any() and found[seen].any()


def test_scores_are_those_of_the_oracle(kernels, device):
    queries, packed, floats, weights, visible = make_inputs(2, 40, 4, 64, torch.float32, device)
    found = kernels.index_scores(queries, packed, weights, torch.full_like(visible, 40))
    for row in range(2):
        for token in range(2):
            args = queries[row, token], floats[row], weights[row, token]
            expected = oracle.index_scores(*(t.double().cpu().numpy() for t in args))
            np.testing.assert_allclose(found[row, token].cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_of_a_pool(kernels, device, dtype):
    queries, packed, floats, weights, visible = make_inputs(3, 70, 4, 32, dtype, device)
    pool = torch.tensor([0, 3, 7, 17, -1], device=device, dtype=torch.int32).repeat(2, 3, 1)
    pool[0, 1] = torch.tensor([1, -1, -1, -1, -1])
    entries = reference.expand_blocks(pool.long(), block_size=4)
    hidden = (entries < 0) | (entries >= visible[..., None])
    expected = reference.index_scores(queries, floats, weights).gather(-1, entries.clamp(0, 69))
    for keys in (packed, (floats,)):
        found = kernels.index_scores(queries, keys, weights, visible, pool, 4)
        assert (found[hidden] == float("-inf")).all()
        assert_scores(found[~hidden], expected[~hidden], dtype)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the interpreter takes minutes and does not run the assembly"
)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 32), (3, 32), (19, 32), (1, 64), (6, 64)])
def test_released_sizes(kernels, device, tokens, heads):
    queries, packed, floats, weights, visible = make_inputs(tokens, 9000, heads, 128, torch.bfloat16, device)
    expected = reference.index_scores(*(t.cpu() for t in (queries, floats, weights))).to(device)
    seen = torch.arange(9000, device=device) < visible[..., None]
    for keys in (packed, (floats,)):
        scores = kernels.index_scores(queries, keys, weights, visible)
        assert_scores(scores[seen], expected[seen], torch.bfloat16)
        scores = scores.masked_fill(~seen, float("-inf"))
        found, pool = kernels.select_entries(queries, keys, weights, visible, k=512, block_size=8, pool_blocks=256)
        assert torch.equal(found, reference.select_topk(scores, 512).int())
        assert torch.equal(pool, reference.select_candidate_blocks(scores, visible, block_size=8, k=256).int())
        found, _ = kernels.select_entries(queries, keys, weights, visible, k=512, pool=pool, block_size=8)
        entries = reference.expand_blocks(pool.long(), block_size=8)
        near = scores.gather(-1, entries.clamp(0, 8999)).masked_fill(entries < 0, float("-inf"))
        chosen = reference.select_topk(near, 512)
        assert torch.equal(found, torch.where(chosen < 0, -1, entries.gather(-1, chosen.clamp(min=0))).int())


def test_tiles_of_queries_and_rows_without_entries(kernels, device, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_SCORES", 2 * 40 * 2)  # two queries of both rows
    queries, packed, _, weights, visible = make_inputs(5, 40, 4, 32, torch.bfloat16, device)
    found, pool = kernels.select_entries(queries, packed, weights, visible, k=6, block_size=4, pool_blocks=3)
    scores = kernels.index_scores(queries, packed, weights, visible)
    scores = scores.masked_fill(torch.arange(40, device=device) >= visible[..., None], float("-inf"))
    assert torch.equal(found, reference.select_topk(scores, 6).int())
    assert torch.equal(pool, reference.select_candidate_blocks(scores, visible, block_size=4, k=3).int())
    none = tuple(part[:, :0] for part in packed)
    found, pool = kernels.select_entries(queries, none, weights, 0 * visible, k=6, block_size=4, pool_blocks=3)
    assert found.shape == (2, 5, 0) and pool.tolist() == [[[-1]] * 5] * 2


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("layer", [1, 3, 4])  # every second entry; the source of candidates; among them
def test_the_indexer_selects_the_same(repository, device, poisoned, layer, packed):
    config = tiny_config(index_topk=4, candidate_topk_blocks=4)
    indexer = fill(Dsv4Indexer(config, layer), seed=3).to(device, torch.bfloat16)
    generator = torch.Generator().manual_seed(layer)
    x, latent, keys = (
        torch.randn(2, n, w, generator=generator).to(device, torch.bfloat16) for n, w in ((5, 64), (5, 32), (60, 32))
    )
    position = torch.tensor([[55, 56, 57, 58, 59], [0, 1, 2, 30, 70]], device=device)
    table = tuple(torch.full((2, 5, 4), v, device=device) for v in (0.6, 0.8))
    codec = INDEX_MXFP4 if packed else UNROUNDED
    view = EntryView(codec.encode(INDEX_MXFP4.rounded(keys)), codec, torch.bfloat16)
    pool = torch.tensor([0, 3, 9, -1], device=device, dtype=torch.int32).repeat(2, 5, 1)
    args = x, latent, table, view, pool, INDEX_MXFP4, SimpleNamespace(position_ids=position)
    results = []
    for kernels in (None, KernelSet(str(repository))):
        indexer.kernels = kernels
        with torch.no_grad():
            results.append(indexer(*args))
    (expected, expected_pool), (found, found_pool) = results
    assert torch.equal(found, expected) and (found >= 0).any()
    assert (found_pool is None) == (layer != 3) and (found_pool is None or torch.equal(found_pool, expected_pool))
