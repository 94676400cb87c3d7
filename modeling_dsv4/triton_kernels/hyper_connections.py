"""One site of the hyper-connections: the streams are read once and written once.

    pass     X' = M . X + C y, x = A_carried . X', and of each piece of the width: partial sums of fn . X', X'^2 and x^2
    finish   sums the pieces, coefficients with Sinkhorn in registers, pre-norm of x and its rounding to FP8 (multi-pass: first
             x = A . X')

The pass is bound by the bytes of the streams, so the projection must not cost: bfloat16 streams meet `fn` on tensor
cores as two bfloat16 parts (16 bits of each weight, sums in float32), float32 streams in three TF32 products.

Sources: V4.1 report section 2.4.1, contract section 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .hyper_connections_gradient import site_gradient
from .number_formats import cast, narrowed, round_fp8, widened
from .stream_tiles import INTERPRETED, column, columns_of, in_parts, load_streams, side_by_side

# Up to so many tokens a call is bound by launches and by the bytes of `fn`.
SMALL = 64


@triton.jit
def _project(weight, x, sums):
    """Add `weight @ x.T` to `sums`: weight `[K, D]`, of the dtype of x or float32, x `[T, D]`."""
    if x.dtype == tl.float32:
        sums = tl.dot(weight, x.T, sums, input_precision="tf32x3")
    elif weight.dtype == tl.float32:
        high, low = in_parts(weight, x)
        x = x.to(high.dtype).T
        sums = tl.dot(low, x, tl.dot(high, x, sums))
    elif INTERPRETED:
        sums = tl.dot(weight.to(tl.float32), x.to(tl.float32).T, sums)
    else:
        sums = tl.dot(weight, x.T, sums)
    return sums


@triton.jit
def _parts_kernel(fn_ptr, parts_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(fn_ptr + at, mask=at < size, other=0.0)
    high = values.to(parts_ptr.dtype.element_ty)
    tl.store(parts_ptr + at, high, mask=at < size)
    tl.store(parts_ptr + size + at, (values - high.to(tl.float32)).to(high.dtype), mask=at < size)


@triton.jit
def _pass_kernel(
    streams_ptr, output_ptr, post_ptr, comb_ptr, pre_ptr, fn_ptr, settled_ptr, x_ptr, sums_ptr, tokens,
    D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PARTS: tl.constexpr, PENDING: tl.constexpr,
    CARRIED: tl.constexpr, PIECES: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0) % PIECES
    rows = tl.program_id(0) // PIECES * BT + tl.arange(0, BT)
    real = rows < tokens
    kept = tl.arange(0, KP)
    part = tl.arange(0, PARTS * KP)
    beside = tl.arange(0, N * BD)
    if PENDING:
        post = columns_of(post_ptr, rows, real, N)
        comb = columns_of(comb_ptr, rows, real, N * N)
    if CARRIED:
        pre = columns_of(pre_ptr, rows, real, N)
    sums = tl.zeros([PARTS * KP, BT], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    x_squares = tl.zeros([BT], tl.float32)
    row_start = rows[:, None].to(tl.int64) * D
    # The pieces take turns, so that programs that run together write neighbouring columns.
    first = piece * BD + tl.arange(0, BD)
    inside = real[:, None] & (first < D)[None, :]
    loaded = load_streams(streams_ptr, output_ptr, row_start, first, inside, N, D, PENDING)
    for start in tl.range(0, D, PIECES * BD, num_stages=STAGES):
        columns = first + start
        inside = real[:, None] & (columns < D)[None, :]
        column = start + piece * BD + beside % BD
        at_fn = (part // KP * K + part % KP)[:, None] * (N * D) + (beside // BD * D + column)[None, :]
        weight = tl.load(fn_ptr + at_fn, mask=(part % KP < K)[:, None] & (column < D)[None, :], other=0.0)
        wide = ()
        for j in tl.static_range(N + PENDING):
            wide = wide + (widened(loaded[j]),)
        x = tl.zeros([BT, BD], tl.float32)
        squared = tl.zeros([BT, BD], tl.float32)
        settled = ()
        for k in tl.static_range(N):
            if PENDING:
                mixed = post[k] * wide[N]
                for j in tl.static_range(N):
                    mixed += comb[j * N + k] * wide[j]
                settled = settled + (narrowed(mixed, settled_ptr.dtype.element_ty),)
                tl.store(settled_ptr + row_start * N + (k * D + columns)[None, :], settled[k], mask=inside)
            else:
                settled = settled + (loaded[k],)
            value = widened(settled[k])
            squared += value * value
            if CARRIED:
                x += pre[k] * value
        squares += tl.sum(squared, 1)
        if CARRIED:
            rounded = narrowed(x, x_ptr.dtype.element_ty)
            tl.store(x_ptr + row_start + columns[None, :], rounded, mask=inside)
            value = widened(rounded)
            x_squares += tl.sum(value * value, 1)
        # The next tiles are on their way while the matrix unit works.
        columns += PIECES * BD
        inside = real[:, None] & (columns < D)[None, :]
        loaded = load_streams(streams_ptr, output_ptr, row_start, columns, inside, N, D, PENDING)
        sums = _project(weight, side_by_side(settled, N), sums)
    if PARTS == 2:
        sums = tl.sum(sums.reshape(2, KP, BT), axis=0)
    at_sums = (piece * tokens + rows) * (K + 2)
    tl.store(sums_ptr + at_sums[None, :] + kept[:, None], sums, mask=real[None, :] & (kept < K)[:, None])
    tl.store(sums_ptr + at_sums + K, squares, mask=real)
    tl.store(sums_ptr + at_sums + K + 1, x_squares, mask=real)


@triton.jit
def _sinkhorn(logits, eps, ITERATIONS: tl.constexpr):
    """`sinkhorn_normalize` of `[T, N, N]`."""
    matrix = tl.exp(logits - tl.max(logits, axis=2, keep_dims=True))
    matrix = matrix / tl.sum(matrix, axis=2, keep_dims=True) + eps
    matrix = matrix / (tl.sum(matrix, axis=1, keep_dims=True) + eps)
    for _ in tl.range(ITERATIONS - 1):
        matrix = matrix / (tl.sum(matrix, axis=2, keep_dims=True) + eps)
        matrix = matrix / (tl.sum(matrix, axis=1, keep_dims=True) + eps)
    return matrix


@triton.jit
def _finish_kernel(
    settled_ptr, sums_ptr, base_ptr, scale_ptr, norm_ptr, x_ptr, rounded_ptr, pre_ptr, post_ptr, comb_ptr, tokens, eps,
    norm_eps, D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ITERATIONS: tl.constexpr, CARRIED: tl.constexpr,
    NORM: tl.constexpr, ROUND: tl.constexpr, PIECES: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    # The last tokens first: what the pass wrote of them is still in the cache.
    rows = (tl.num_programs(0) - 1 - tl.program_id(0)) * BT + tl.arange(0, BT)
    real = rows < tokens
    of_pre = tl.arange(0, N)
    of_comb = tl.arange(0, N * N)  # flat, so that a matrix stays within a warp
    piece = tl.arange(0, PIECES)
    at_sums = sums_ptr + (piece[:, None] * tokens + rows[None, :]) * (K + 2)
    squares = tl.sum(tl.load(at_sums + K, mask=real[None, :], other=0.0), 0)
    x_squares = tl.zeros([BT], tl.float32)
    if CARRIED:
        x_squares = tl.sum(tl.load(at_sums + K + 1, mask=real[None, :], other=0.0), 0)
    at_pre = at_sums[:, :, None] + of_pre[None, None, :]
    pre = tl.sum(tl.load(at_pre, mask=real[None, :, None], other=0.0), 0)
    post = tl.sum(tl.load(at_pre + N, mask=real[None, :, None], other=0.0), 0)
    at_comb = at_sums[:, :, None] + 2 * N + of_comb[None, None, :]
    comb = tl.sum(tl.load(at_comb, mask=real[None, :, None], other=0.0), 0)
    inverse = tl.rsqrt(squares / (N * D) + norm_eps)
    base_pre = tl.load(base_ptr + of_pre)[None, :]
    base_post = tl.load(base_ptr + N + of_pre)[None, :]
    base_comb = tl.load(base_ptr + 2 * N + of_comb)[None, :]
    pre = tl.sigmoid(pre * inverse[:, None] * tl.load(scale_ptr) + base_pre) + eps
    post = 2 * tl.sigmoid(post * inverse[:, None] * tl.load(scale_ptr + 1) + base_post)
    comb = comb * inverse[:, None] * tl.load(scale_ptr + 2) + base_comb
    comb = _sinkhorn(comb.reshape(BT, N, N), eps, ITERATIONS).reshape(BT, N * N)
    tl.store(pre_ptr + rows[:, None] * N + of_pre[None, :], pre, mask=real[:, None])
    tl.store(post_ptr + rows[:, None] * N + of_pre[None, :], post, mask=real[:, None])
    tl.store(comb_ptr + rows[:, None] * (N * N) + of_comb[None, :], comb, mask=real[:, None])
    row_start = rows[:, None].to(tl.int64) * D
    if not CARRIED:
        for start in range(0, D, BD):
            columns = start + tl.arange(0, BD)
            mask = real[:, None] & (columns < D)[None, :]
            x = tl.zeros([BT, BD], tl.float32)
            for k in tl.static_range(N):
                settled = tl.load(settled_ptr + row_start * N + k * D + columns[None, :], mask=mask, other=0.0)
                x += column(pre, k, N) * settled.to(tl.float32)
            rounded = x.to(x_ptr.dtype.element_ty)
            tl.store(x_ptr + row_start + columns[None, :], rounded, mask=mask)
            wide = rounded.to(tl.float32)
            x_squares += tl.sum(wide * wide, 1)
        tl.store(sums_ptr + rows * (K + 2) + K + 1, x_squares, mask=real)  # the pass left 0 there
        tl.debug_barrier()
    if NORM:
        inverse = tl.rsqrt(x_squares / D + norm_eps)
        for start in range(0, D, BD):
            columns = start + tl.arange(0, BD)
            mask = real[:, None] & (columns < D)[None, :]
            at = x_ptr + row_start + columns[None, :]
            x = tl.load(at, mask=mask, other=0.0).to(tl.float32) * inverse[:, None]
            weight = tl.load(norm_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
            x = (x * weight[None, :]).to(x_ptr.dtype.element_ty)
            tl.store(at, x, mask=mask)
            if ROUND > 0:
                blocks = tl.reshape(x.to(tl.float32), [BT * BD // ROUND, ROUND])
                value = tl.reshape(cast(round_fp8(blocks), x.dtype), [BT, BD])
                tl.store(rounded_ptr + row_start + columns[None, :], value, mask=mask)


class _Site(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, streams, output, post, comb, pre, fn, base, scale, norm_weight):
        pending = None if output is None else (output, post, comb)
        *found, sums = _run_site(streams, pending, pre, fn, base, scale, norm_weight, settings)
        settled, _, own_pre, *_ = found
        used_pre = own_pre if pre is None else pre
        iterations, eps, norm_eps, _ = settings
        ctx.settings = pre is not None, iterations, eps, norm_eps
        # Without an expansion the streams are an output too, which is an input: one copy is kept.
        kept = None if output is None else settled
        ctx.save_for_backward(streams, output, post, comb, used_pre, fn, base, scale, norm_weight, kept, sums)
        return tuple(found if found[-1] is not None else found[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        settled, x, pre, post, comb, *rounded = grads
        grads = settled, sum(rounded, x), pre, post, comb  # straight through the rounding
        *saved, settled, sums = ctx.saved_tensors
        needs_parameters = ctx.needs_input_grad[6] or ctx.needs_input_grad[9]
        settled = saved[0] if settled is None else settled
        return None, *site_gradient((*saved, settled, sums), grads, ctx.settings, needs_parameters)


def hyper_connection_site(
    streams: torch.Tensor,
    pending: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    pre: torch.Tensor | None,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    round_block: int | None = None,
) -> tuple[torch.Tensor, ...]:
    r"""Run a whole site: settle the streams, predict the coefficients from them, collapse them, normalise.

    Args:
        streams (`torch.Tensor` of shape `[..., N, D]`, bfloat16 or float32): N a power of two.
        pending (*optional*): output `[..., D]`, post `[..., N]` and comb `[..., N, N]` of the sublayer before.
        pre (`torch.Tensor` of shape `[..., N]`, float32, *optional*): by which to collapse; `None`: the site's own.
        fn (`[N * (N + 2), N * D]`), base (`[N * (N + 2)]`), scale (`[3]`): float32, or what the kernel widens to it.
        norm_weight (`torch.Tensor` of shape `[D]`, *optional*): of the sublayer's RMSNorm, whose eps is `norm_eps`.
        iterations, eps: of Sinkhorn.
        round_block (`int`, *optional*): channels per scale of the rounding of normalised x; `None`: it is not rounded.

    Returns:
        Settled streams `[..., N, D]`, x `[..., D]`, in float32 pre `[..., N]`, post `[..., N]` and comb `[..., N, N]`; with
        `round_block` and a norm also x rounded to FP8 `[..., D]`.

    Numerics: bfloat16 streams meet 16 bits of each weight of `fn`; coefficients within 2e-5 of the reference.
    """
    streams = streams.contiguous()
    pending = (None, None, None) if pending is None else [part.contiguous() for part in pending]
    pre = None if pre is None else pre.contiguous()
    fn, base, scale = (t.float() for t in (fn, base, scale))  # of a model that was cast as a whole
    settings = iterations, eps, norm_eps, None if norm_weight is None else round_block
    return _Site.apply(settings, streams, *pending, pre, fn, base, scale, norm_weight)


hyper_connection_site.has_backward = True


def _run_site(streams, pending, pre, fn, base, scale, norm_weight, settings):
    """Return X', x, pre, post, comb, rounded x or `None`, and the sums of the pieces `[pieces, tokens, K + 2]`."""
    iterations, eps, norm_eps, round_block = settings
    *shape, n, d = streams.shape
    tokens, k = streams.numel() // (n * d), n * (n + 2)
    settled = streams if pending is None else torch.empty_like(streams)
    x = streams.new_empty(*shape, d)
    rounded = None if round_block is None else torch.empty_like(x)
    own_pre, post = (base.new_empty(*shape, n) for _ in range(2))
    comb = base.new_empty(*shape, n, n)
    pass_tile, pieces, finish_tile = _tiles(tokens, d, streams.dtype)
    sums = base.new_empty(pieces, tokens, k + 2)
    # Many tokens would split `fn` many times.
    parts = 1 if tokens <= SMALL or streams.dtype == torch.float32 else 2
    if parts == 2:
        split = streams.new_empty(2, *fn.shape)
        _parts_kernel[(triton.cdiv(fn.numel(), 1024),)](fn, split, fn.numel(), BLOCK=1024)
        fn = split
    output, pending_post, pending_comb = (streams, base, base) if pending is None else pending
    _pass_kernel[(pieces * triton.cdiv(tokens, pass_tile["BT"]),)](
        streams, output, pending_post, pending_comb, base if pre is None else pre, fn, settled, x, sums, tokens,
        D=d, N=n, K=k, KP=max(16, triton.next_power_of_2(k)), PARTS=parts, PENDING=pending is not None, CARRIED=pre is not None,
        PIECES=pieces, **pass_tile,
    )  # fmt: skip
    _finish_kernel[(triton.cdiv(tokens, finish_tile["BT"]),)](
        settled, sums, base, scale, base if norm_weight is None else norm_weight, x, x if rounded is None else rounded,
        own_pre, post, comb, tokens, eps, norm_eps, D=d, N=n, K=k, ITERATIONS=iterations, CARRIED=pre is not None,
        NORM=norm_weight is not None, ROUND=round_block or 0, PIECES=pieces, **finish_tile,
    )  # fmt: skip
    return settled, x, own_pre, post, comb, rounded, sums


def _tiles(tokens, d, dtype):
    """Block sizes of the pass, the number of its pieces (a power of two), and block sizes of the finish.

    On an H200, 8192 tokens of width 5120 (bfloat16) take 0.34 ms, 0.05 of them the finish; a copy of as many bytes
    takes 0.20. A thread has one token's coefficients and eight columns, so that two programs of eight warps fit. What
    bounds the pass is the shape of the tile: 64 bytes of a row at a time cost even bare loads and stores 0.32 to 0.37
    ms, 256 bytes 0.21; but a wider tile has fewer tokens and reads `fn` more often (16 tokens: 0.41 ms for the pass
    alone). Few tokens are spread over the width.
    """
    size = dtype.itemsize
    if tokens <= SMALL:
        tile = {"BT": 16, "BD": 64 // size, "STAGES": 1, "num_warps": 4}
        finish = {"BT": 1, "BD": max(128, triton.next_power_of_2(d)), "num_warps": 8}  # a block of a rounding at least
        pieces = 128
    else:
        tile = {"BT": 64, "BD": 64 // size, "STAGES": 2, "num_warps": 8}
        finish = {"BT": 4, "BD": 1024, "num_warps": 4}
        pieces = min(32, triton.next_power_of_2(triton.cdiv(1024, triton.cdiv(tokens, tile["BT"]))))
    pieces = min(pieces, triton.next_power_of_2(triton.cdiv(d, tile["BD"])))
    return tile, pieces, finish
