"""Cost of index work and of prefill, as ratios in one run with the bound that each is held against (CPU)."""

import time

import pytest
import torch

from modeling_dsv4 import Dsv4Cache, Dsv41TextConfig, Dsv41TextModel
from modeling_dsv4.attention import Dsv4Indexer
from modeling_dsv4.cache import cache_codecs
from modeling_dsv4.cache_storage import EntryStore
from modeling_dsv4.decoder_replay import decoder_tokens
from modeling_dsv4.rotary import rotary_frequencies, rotary_table
from modeling_dsv4.sequence_layout import SequenceLayout

pytestmark = pytest.mark.benchmark


def seconds(*functions, repeats=5):
    """Least CPU time of each function; they take turns, so that a busy machine slows all of them."""
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, spent in zip(functions, times, strict=True):
            start = time.process_time()
            function()
            spent.append(time.process_time() - start)
    return [min(spent) for spent in times]


@torch.no_grad()
def test_a_reindex_query_costs_the_same_at_every_length():
    """At most 1.2 times between 20K, 200K and 1M entries: the layer reads its 16,384 candidates only."""
    config = Dsv41TextConfig(hidden_size=256, q_lora_rank=128)
    indexer = Dsv4Indexer(config, 24).float()
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    codec, found = cache_codecs(config, "packed")["index"], {}
    x, latent = torch.randn(1, 1, 256), torch.randn(1, 1, 128)
    for count in (20_000, 200_000, 1_000_000):
        store, zero = EntryStore(codec, count), torch.zeros(1).long()
        for first in range(0, count, 20_000):
            counts = torch.tensor([first + 20_000])
            keys = store.write(torch.randn(1, 20_000, config.index_head_dim), zero + first, counts, first + 20_000)
        layout = SequenceLayout(torch.tensor([count - 1]), torch.tensor([1]), 1)
        frequencies = rotary_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.yarn)
        table = rotary_table(layout.position_ids, frequencies)
        blocks = torch.randperm(count // config.candidate_block_size)[: config.candidate_topk_blocks].sort().values
        args = x, latent, table, keys, blocks[None, None].int(), codec, layout
        (found[count],) = seconds(lambda args=args: indexer(*args), repeats=20)
    for count, each in found.items():
        print(f"\nReindex, one query, {count:>9,} entries: {1e3 * each:.2f} ms", end="")
    ratio = max(found.values()) / min(found.values())
    print(f"\nlargest to smallest: {ratio:.3f} (bound 1.2)")
    assert ratio <= 1.2


@torch.no_grad()
@pytest.mark.parametrize(("windows", "bound"), [(32, 0.75), (256, 0.60)])
def test_exact_replay_beside_full(windows, bound):
    """Prefill of a narrow model with the released schedule of 40 layers; the window is 32 tokens."""
    window = 32
    config = Dsv41TextConfig(
        vocab_size=128, hidden_size=128, moe_intermediate_size=64, num_attention_heads=4, head_dim=64, qk_rope_head_dim=16,
        q_lora_rank=64, o_lora_rank=32, o_groups=2, n_routed_experts=8, num_experts_per_tok=2, sliding_window=window,
        index_n_heads=4, index_head_dim=32, index_topk=16, candidate_topk_blocks=64, candidate_block_size=8,
        engram_layer_ids=[1, 14], engram_num_embeddings=[400, 560], engram_vocab_size=50, engram_n_heads=2, engram_head_dim=32,
        engram_compressed_vocab_size=128, num_nextn_predict_layers=0,
        compress_ratios=Dsv41TextConfig.RELEASED_SCHEDULE["compress_ratios"][:40],
    )  # fmt: skip
    model, tokens = Dsv41TextModel(config).eval(), windows * window
    ids = torch.randint(3, 128, (1, tokens))

    def prefill(mode):
        return model(ids, cache=Dsv4Cache(config, rollback=0), logits_to_keep=1, decoder_replay=mode)

    sizes = {"tokens": tokens, "keep": 1, "rollback": 0, "window": window, "layers": 20}
    work = {mode: 20 * tokens + sum(decoder_tokens(mode, **sizes)) for mode in ("full", "exact")}
    spent = seconds(lambda: prefill("full"), lambda: prefill("exact"), repeats=3 if windows < 100 else 1)
    times = dict(zip(("full", "exact"), spent, strict=True))
    ratio = times["exact"] / times["full"]
    print(
        f"\n{windows} windows: exact {times['exact']:.2f} s, full {times['full']:.2f} s, ratio {ratio:.3f} (bound {bound}); "
        f"token-layers {work['exact']:,} of {work['full']:,} = {work['exact'] / work['full']:.3f}"
    )
    assert ratio <= bound
