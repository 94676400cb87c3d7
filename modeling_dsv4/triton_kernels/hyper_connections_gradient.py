"""Gradients of a hyper-connection site, in four passes; what is cheap is computed again.

    sums           <w gx, X'_k> and <x, X'_k> of each token: what norm and collapse need
    coefficients   back through Sinkhorn, sigmoids and the root mean square to the projection: dp = d(fn . X')
    streams        D_k = gX'_k + A_k dx + fn^T dp + c X'_k;  dX_j = sum_k M_jk D_k, dy = sum_k C_k D_k, dC_k = <y, D_k>,
                   dM_jk = <X_j, D_k>
    parameters     dfn = dp^T X', dw = sum over tokens of gx x / rms(x)

Sums over tokens and pieces are made of partial sums in a fixed order: results do not change between runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .stream_tiles import columns_of, in_parts


@triton.jit
def _sums_kernel(
    settled_ptr, pre_ptr, norm_ptr, grad_x_ptr, out_ptr, tokens,
    D: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(1)
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    real = rows < tokens
    pre = columns_of(pre_ptr, rows, real, N)
    row_start = rows[:, None].to(tl.int64) * D
    index = tl.arange(0, N)[None, :]
    with_grad = tl.zeros([BT, N], tl.float32)
    with_x = tl.zeros([BT, N], tl.float32)
    for start in tl.range(0, WIDTH, BD):
        columns = piece * WIDTH + start + tl.arange(0, BD)
        mask = real[:, None] & (columns < D)[None, :]
        grad = tl.load(grad_x_ptr + row_start + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            grad *= tl.load(norm_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        x = tl.zeros([BT, BD], tl.float32)
        settled = ()
        for k in tl.static_range(N):
            at = row_start * N + k * D + columns[None, :]
            settled = settled + (tl.load(settled_ptr + at, mask=mask, other=0.0).to(tl.float32),)
            x += pre[k] * settled[k]
        for k in tl.static_range(N):
            with_grad += tl.where(index == k, tl.sum(grad * settled[k], 1)[:, None], 0.0)
            with_x += tl.where(index == k, tl.sum(x * settled[k], 1)[:, None], 0.0)
    at = (piece * tokens + rows[:, None]) * (2 * N) + index
    tl.store(out_ptr + at, with_grad, mask=real[:, None])
    tl.store(out_ptr + at + N, with_x, mask=real[:, None])


@triton.jit
def _undo_step(grad, matrix, eps, AXIS: tl.constexpr):
    """Gradient of `matrix` from that of `matrix / (its sums over AXIS + eps)`."""
    total = tl.sum(matrix, axis=AXIS, keep_dims=True) + eps
    return (grad - tl.sum(grad * matrix / total, axis=AXIS, keep_dims=True)) / total


@triton.jit
def _sinkhorn_gradient(logits, grad, scratch, mask, eps, SIZE: tl.constexpr, ITERATIONS: tl.constexpr):
    """Gradient of the logits; `scratch` points to room for the 2 * ITERATIONS - 1 matrices before each step."""
    soft = tl.exp(logits - tl.max(logits, axis=2, keep_dims=True))
    soft = soft / tl.sum(soft, axis=2, keep_dims=True)
    matrix = soft + eps
    for step in tl.range(ITERATIONS - 1):
        tl.store(scratch + 2 * step * SIZE, matrix, mask=mask)
        matrix = matrix / (tl.sum(matrix, axis=1, keep_dims=True) + eps)
        tl.store(scratch + (2 * step + 1) * SIZE, matrix, mask=mask)
        matrix = matrix / (tl.sum(matrix, axis=2, keep_dims=True) + eps)
    grad = _undo_step(grad, matrix, eps, 1)
    tl.debug_barrier()
    for back in tl.range(ITERATIONS - 1):
        step = ITERATIONS - 2 - back
        grad = _undo_step(grad, tl.load(scratch + (2 * step + 1) * SIZE, mask=mask, other=1.0), eps, 2)
        grad = _undo_step(grad, tl.load(scratch + 2 * step * SIZE, mask=mask, other=1.0), eps, 1)
    return soft * (grad - tl.sum(grad * soft, axis=2, keep_dims=True))


@triton.jit
def _coefficient_kernel(
    sums_ptr, products_ptr, base_ptr, scale_ptr, pre_ptr, grad_pre_ptr, grad_post_ptr, grad_comb_ptr, scratch_ptr,
    projected_ptr, biases_ptr, scales_ptr, factors_ptr, carried_ptr, tokens, eps, norm_eps,
    D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ITERATIONS: tl.constexpr, CARRIED: tl.constexpr, NORM: tl.constexpr,
    PIECES: tl.constexpr, PRODUCT_PIECES: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    real = rows < tokens
    flat, cube = real[:, None], real[:, None, None]
    of_pre = tl.arange(0, N)[None, :]
    of_comb = (tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])[None]
    row_n, row_k = rows[:, None] * N + of_pre, rows[:, None] * K + of_pre
    pre = tl.zeros([BT, N], tl.float32)
    post = tl.zeros([BT, N], tl.float32)
    comb = tl.zeros([BT, N, N], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    x_squares = tl.zeros([BT], tl.float32)
    for piece in range(PIECES):
        at = sums_ptr + (piece * tokens + rows) * (K + 2)
        pre += tl.load(at[:, None] + of_pre, mask=flat, other=0.0)
        post += tl.load(at[:, None] + N + of_pre, mask=flat, other=0.0)
        comb += tl.load(at[:, None, None] + 2 * N + of_comb, mask=cube, other=0.0)
        squares += tl.load(at + K, mask=real, other=0.0)
        x_squares += tl.load(at + K + 1, mask=real, other=0.0)
    with_grad = tl.zeros([BT, N], tl.float32)
    with_x = tl.zeros([BT, N], tl.float32)
    for piece in range(PRODUCT_PIECES):
        at = (piece * tokens + rows[:, None]) * (2 * N) + of_pre
        with_grad += tl.load(products_ptr + at, mask=flat, other=0.0)
        with_x += tl.load(products_ptr + at + N, mask=flat, other=0.0)
    # x = sum_k A_k X'_k and, with the norm, dx = inverse * w gx - drop * x.
    grad_used = with_grad
    if NORM:
        used = tl.load(pre_ptr + row_n, mask=flat, other=0.0)
        inverse = tl.rsqrt(x_squares / D + norm_eps)
        drop = inverse * inverse * inverse * tl.sum(used * with_grad, 1) / D
        grad_used = inverse[:, None] * with_grad - drop[:, None] * with_x
        tl.store(factors_ptr + rows * 3, inverse, mask=real)
        tl.store(factors_ptr + rows * 3 + 1, drop, mask=real)
    grad_pre = tl.load(grad_pre_ptr + row_n, mask=flat, other=0.0)
    if CARRIED:
        tl.store(carried_ptr + row_n, grad_used, mask=flat)
    else:
        grad_pre += grad_used
    rms = tl.rsqrt(squares / (N * D) + norm_eps)
    scale_pre, scale_post, scale_comb = tl.load(scale_ptr), tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)
    pre, post, comb = pre * rms[:, None], post * rms[:, None], comb * rms[:, None, None]
    half = tl.sigmoid(pre * scale_pre + tl.load(base_ptr + of_pre))
    grad_pre *= half * (1 - half)
    half = tl.sigmoid(post * scale_post + tl.load(base_ptr + N + of_pre))
    grad_post = 2 * half * (1 - half) * tl.load(grad_post_ptr + row_n, mask=flat, other=0.0)
    grad_comb = tl.load(grad_comb_ptr + rows[:, None, None] * (N * N) + of_comb, mask=cube, other=0.0)
    scratch = scratch_ptr + rows[:, None, None] * ((2 * ITERATIONS - 1) * N * N) + of_comb
    logits = comb * scale_comb + tl.load(base_ptr + 2 * N + of_comb)
    grad_comb = _sinkhorn_gradient(logits, grad_comb, scratch, cube, eps, N * N, ITERATIONS)
    # Of the logits z = u s + b: bias, scale, u; then u = p / rms(X') gives p and a multiple of X'.
    tl.store(biases_ptr + row_k, grad_pre, mask=flat)
    tl.store(biases_ptr + row_k + N, grad_post, mask=flat)
    row_comb = rows[:, None, None] * K + 2 * N + of_comb
    tl.store(biases_ptr + row_comb, grad_comb, mask=cube)
    of_scale_pre, of_scale_post = tl.sum(grad_pre * pre, 1), tl.sum(grad_post * post, 1)
    of_scale_comb = tl.sum(tl.sum(grad_comb * comb, 2), 1)
    tl.store(scales_ptr + rows * 3, of_scale_pre, mask=real)
    tl.store(scales_ptr + rows * 3 + 1, of_scale_post, mask=real)
    tl.store(scales_ptr + rows * 3 + 2, of_scale_comb, mask=real)
    tl.store(projected_ptr + row_k, grad_pre * scale_pre * rms[:, None], mask=flat)
    tl.store(projected_ptr + row_k + N, grad_post * scale_post * rms[:, None], mask=flat)
    tl.store(projected_ptr + row_comb, grad_comb * scale_comb * rms[:, None, None], mask=cube)
    shrink = of_scale_pre * scale_pre + of_scale_post * scale_post + of_scale_comb * scale_comb
    tl.store(factors_ptr + rows * 3 + 2, -shrink * rms * rms / (N * D), mask=real)


@triton.jit
def _stream_kernel(
    streams_ptr, output_ptr, post_ptr, comb_ptr, pre_ptr, fn_ptr, norm_ptr, settled_ptr, grad_settled_ptr, grad_x_ptr,
    projected_ptr, factors_ptr, grad_streams_ptr, grad_output_ptr, grad_post_ptr, grad_comb_ptr, tokens,
    D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PENDING: tl.constexpr, NORM: tl.constexpr,
    WIDTH: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(1)
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    real = rows < tokens
    kept = tl.arange(0, KP)
    pre = columns_of(pre_ptr, rows, real, N)
    if PENDING:
        post = columns_of(post_ptr, rows, real, N)
        comb = columns_of(comb_ptr, rows, real, N * N)
        grad_post = tl.zeros([BT, N], tl.float32)
        grad_comb = tl.zeros([BT, N * N], tl.float32)
    at_projected = projected_ptr + rows[:, None] * K + kept[None, :]
    projected = tl.load(at_projected, mask=real[:, None] & (kept < K)[None, :], other=0.0)
    inverse = tl.load(factors_ptr + rows * 3, mask=real, other=0.0)[:, None]
    drop = tl.load(factors_ptr + rows * 3 + 1, mask=real, other=0.0)[:, None]
    multiple = tl.load(factors_ptr + rows * 3 + 2, mask=real, other=0.0)[:, None]
    row_start = rows[:, None].to(tl.int64) * D
    for start in tl.range(0, WIDTH, BD):
        columns = piece * WIDTH + start + tl.arange(0, BD)
        mask = real[:, None] & (columns < D)[None, :]
        at = row_start + columns[None, :]
        at_streams = row_start * N + columns[None, :]
        grad_x = tl.load(grad_x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        settled = ()
        for k in tl.static_range(N):
            settled = settled + (tl.load(settled_ptr + at_streams + k * D, mask=mask, other=0.0),)
        if NORM:
            x = tl.zeros([BT, BD], tl.float32)
            for k in tl.static_range(N):
                x += pre[k] * settled[k].to(tl.float32)
            weight = tl.load(norm_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
            grad_x = inverse * grad_x * weight - drop * x
        if PENDING:
            output = tl.load(output_ptr + at, mask=mask, other=0.0).to(tl.float32)
            grad_output = tl.zeros([BT, BD], tl.float32)
            streams = ()
            grad_streams = ()
            for j in tl.static_range(N):
                streams = streams + (tl.load(streams_ptr + at_streams + j * D, mask=mask, other=0.0),)
                grad_streams = grad_streams + (tl.zeros([BT, BD], tl.float32),)
        for k in tl.static_range(N):
            at_fn = kept[:, None] * (N * D) + (k * D + columns)[None, :]
            fn = tl.load(fn_ptr + at_fn, mask=(kept < K)[:, None] & (columns < D)[None, :], other=0.0)
            grad = tl.load(grad_settled_ptr + at_streams + k * D, mask=mask, other=0.0).to(tl.float32)
            grad += pre[k] * grad_x + multiple * settled[k].to(tl.float32)
            grad += tl.dot(projected, fn, input_precision="tf32x3")
            if PENDING:
                grad_output += post[k] * grad
                grad_post += tl.where(tl.arange(0, N)[None, :] == k, tl.sum(grad * output, 1)[:, None], 0.0)
                mixed = ()
                for j in tl.static_range(N):
                    wide = streams[j].to(tl.float32)
                    mixed = mixed + (grad_streams[j] + comb[j * N + k] * grad,)
                    of_pair = tl.arange(0, N * N)[None, :] == j * N + k
                    grad_comb += tl.where(of_pair, tl.sum(grad * wide, 1)[:, None], 0.0)
                grad_streams = mixed
            else:
                tl.store(grad_streams_ptr + at_streams + k * D, grad.to(grad_streams_ptr.dtype.element_ty), mask=mask)
        if PENDING:
            tl.store(grad_output_ptr + at, grad_output.to(grad_output_ptr.dtype.element_ty), mask=mask)
            for j in tl.static_range(N):
                rounded = grad_streams[j].to(grad_streams_ptr.dtype.element_ty)
                tl.store(grad_streams_ptr + at_streams + j * D, rounded, mask=mask)
    if PENDING:
        row = (piece * tokens + rows)[:, None]
        tl.store(grad_post_ptr + row * N + tl.arange(0, N)[None, :], grad_post, mask=real[:, None])
        tl.store(grad_comb_ptr + row * (N * N) + tl.arange(0, N * N)[None, :], grad_comb, mask=real[:, None])


@triton.jit
def _parameter_kernel(
    settled_ptr, pre_ptr, grad_x_ptr, projected_ptr, factors_ptr, grad_fn_ptr, grad_norm_ptr, tokens,
    D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, NORM: tl.constexpr,
    TILES: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    k, chunk = tl.program_id(1), tl.program_id(2)
    columns = tl.program_id(0) * BD + tl.arange(0, BD)
    inside = columns < D
    kept = tl.arange(0, KP)
    grad_fn = tl.zeros([KP, BD], tl.float32)
    grad_norm = tl.zeros([BD], tl.float32)
    for tile in tl.range(TILES):
        rows = (chunk * TILES + tile) * BT + tl.arange(0, BT)
        real = rows < tokens
        mask = real[:, None] & inside[None, :]
        row_start = rows[:, None].to(tl.int64) * D
        settled = tl.load(settled_ptr + row_start * N + k * D + columns[None, :], mask=mask, other=0.0)
        at = rows[None, :] * K + kept[:, None]
        projected = tl.load(projected_ptr + at, mask=real[None, :] & (kept < K)[:, None], other=0.0)
        if settled.dtype == tl.float32:
            grad_fn = tl.dot(projected, settled, grad_fn, input_precision="tf32x3")
        else:
            high, low = in_parts(projected, settled)
            settled_part = settled.to(high.dtype)
            grad_fn = tl.dot(high, settled_part, tl.dot(low, settled_part, grad_fn))
        if NORM:
            grad = tl.load(grad_x_ptr + row_start + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            factor = tl.load(factors_ptr + rows * 3, mask=real, other=0.0)
            factor *= tl.load(pre_ptr + rows * N + k, mask=real, other=0.0)
            grad_norm += tl.sum(grad * settled.to(tl.float32) * factor[:, None], 0)
    at = (chunk * K + kept[:, None]) * (N * D) + k * D + columns[None, :]
    tl.store(grad_fn_ptr + at, grad_fn, mask=(kept < K)[:, None] & inside[None, :])
    if NORM:
        tl.store(grad_norm_ptr + (chunk * N + k) * D + columns, grad_norm, mask=inside)


def site_gradient(saved, grads, settings, needs_parameters):
    r"""Return the gradients of streams, output, post, comb, pre, fn, base, scale and norm weight (`None` where not there).

    Args:
        saved: streams, output, post, comb, pre (used to collapse), fn, base, scale, norm weight, settled streams, sums of
            the pieces `[pieces, tokens, K + 2]`; `None` for what the call had not.
        grads: of settled streams, x, pre, post, comb.
        settings: (carried, iterations, eps, norm_eps).
        needs_parameters (`bool`): whether `fn` or the norm weight need a gradient.
    """
    streams, output, post, comb, pre, fn, base, scale, norm_weight, settled, sums = saved
    grad_settled, grad_x, grad_pre, grad_post, grad_comb = (t.contiguous() for t in grads)
    carried, iterations, eps, norm_eps = settings
    *shape, n, d = settled.shape
    tokens, k = settled.numel() // (n * d), n * (n + 2)
    pending, norm = output is not None, norm_weight is not None
    sizes = {"D": d, "N": n}
    width = 64 * triton.cdiv(d, 64 * (4 if tokens > 64 else 16))
    pieces = triton.cdiv(d, width)
    block = {"WIDTH": width, "BT": 16, "BD": 64, "num_warps": 4}
    grid = (triton.cdiv(tokens, block["BT"]), pieces)
    given_norm = norm_weight if norm else base

    products = base.new_empty(pieces, tokens, 2 * n)
    _sums_kernel[grid](settled, pre, given_norm, grad_x, products, tokens, **sizes, NORM=norm, **block)

    projected, biases = (base.new_empty(tokens, k) for _ in range(2))
    scales, factors, carried_grad = base.new_empty(tokens, 3), base.new_empty(tokens, 3), base.new_empty(*shape, n)
    scratch = base.new_empty(tokens, 2 * iterations - 1, n, n)
    _coefficient_kernel[(triton.cdiv(tokens, 8),)](
        sums, products, base, scale, pre, grad_pre, grad_post, grad_comb, scratch,
        projected, biases, scales, factors, carried_grad, tokens, eps, norm_eps, **sizes, K=k, ITERATIONS=iterations,
        CARRIED=carried, NORM=norm, PIECES=len(sums), PRODUCT_PIECES=pieces, BT=8,
    )  # fmt: skip

    grad_streams = torch.empty_like(settled)
    grad_output = torch.empty_like(output) if pending else grad_streams
    of_post, of_comb = base.new_empty(pieces, *shape, n), base.new_empty(pieces, *shape, n, n)
    padded = max(16, triton.next_power_of_2(k))
    _stream_kernel[grid](
        streams, output if pending else streams, post if pending else base, comb if pending else base, pre, fn, given_norm,
        settled, grad_settled, grad_x, projected, factors, grad_streams, grad_output, of_post, of_comb, tokens,
        **sizes, K=k, KP=padded, PENDING=pending, NORM=norm, **block,
    )  # fmt: skip

    grad_fn = grad_norm = None
    if needs_parameters:
        tiles = triton.cdiv(tokens, 64)
        chunks = min(tiles, 4)
        of_fn, of_norm = base.new_empty(chunks, k, n * d), base.new_empty(chunks * n, d)
        _parameter_kernel[(triton.cdiv(d, 64), n, chunks)](
            settled, pre, grad_x, projected, factors, of_fn, of_norm, tokens,
            **sizes, K=k, KP=padded, NORM=norm, TILES=triton.cdiv(tiles, chunks), BT=64, BD=64,
        )  # fmt: skip
        grad_fn = of_fn.sum(0)
        grad_norm = of_norm.sum(0).to(norm_weight.dtype) if norm else None
    return (
        grad_streams,
        grad_output if pending else None,
        of_post.sum(0) if pending else None,
        of_comb.sum(0) if pending else None,
        carried_grad if carried else None,
        grad_fn,
        biases.sum(0),
        scales.sum(0),
        grad_norm,
    )
