"""Single-pass mHC in float64 for one token at a time, and the properties that its matrices have (V4.1 contract section 4).

N streams of width D. One site maps its streams [N, D] to the input mix A [N], the output mix C [N] and the residual mix
M [N, N], whose first index is the source stream and whose second is the destination (the transpose of the seed's B).
"""

import numpy as np


def sigmoid(x):
    """Return 1 / (1 + exp(-x)) without overflow."""
    x = np.asarray(x, dtype=np.float64)
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def softmax(x, axis=-1):
    """Return the softmax of x along an axis."""
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def sinkhorn(logits, iterations=20, eps=1e-6):
    """Return the residual mix M [..., N, N] of logits [..., N, N].

    Softmax over the last axis, + eps, then a step over axis -2; afterwards `iterations - 1` pairs of steps, axis -1 then
    axis -2. A step divides by (sum + eps), so that the sums over axis -2 are the ones that end closest to 1.
    """
    m = softmax(np.asarray(logits, dtype=np.float64), axis=-1) + eps
    m = m / (m.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(axis=-1, keepdims=True) + eps)
        m = m / (m.sum(axis=-2, keepdims=True) + eps)
    return m


def sinkhorn_limit(logits, tolerance=1e-14, most=100_000):
    """Return the doubly stochastic matrix that the steps of `sinkhorn` approach with eps = 0."""
    m = softmax(np.asarray(logits, dtype=np.float64), axis=-1)
    for _ in range(most):
        m = m / m.sum(axis=-2, keepdims=True)
        m = m / m.sum(axis=-1, keepdims=True)
        if doubly_stochastic_error(m) <= tolerance:
            break
    return m


def coefficients(streams, fn, base, scale, *, iterations=20, hc_eps=1e-6, norm_eps=1e-20):
    """Return (A [N], C [N], M [N, N]) of one site from its own streams [N, D].

    `fn` is [N * (N + 2), N * D], `base` [N * (N + 2)], `scale` [3] (input, output, residual). The projection comes first and
    the division by the root mean square after it.
    """
    n = streams.shape[0]
    x = streams.reshape(-1)
    u = (fn @ x) / np.sqrt(np.mean(x * x) + norm_eps)
    z_pre = u[:n] * scale[0] + base[:n]
    z_post = u[n : 2 * n] * scale[1] + base[n : 2 * n]
    z_comb = (u[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
    return sigmoid(z_pre) + hc_eps, 2 * sigmoid(z_post), sinkhorn(z_comb, iterations, hc_eps)


def collapse(streams, mix):
    """Return the input [D] of a sublayer: sum over streams of mix[s] * streams[s]."""
    total = np.zeros(streams.shape[1])
    for s in range(streams.shape[0]):
        total += mix[s] * streams[s]
    return total


def expand(streams, output, post, comb):
    """Return the next streams [N, D]: post[k] * output + sum_j comb[j, k] * streams[j]."""
    n = streams.shape[0]
    result = np.zeros_like(streams)
    for k in range(n):
        result[k] = post[k] * output
        for j in range(n):
            result[k] += comb[j, k] * streams[j]
    return result


def first_mix(n):
    """Return the mix that layer 0's attention site reads with: the first stream alone."""
    return np.eye(n)[0]


def row_sum_error(m):
    """Return the largest |sum over the last axis - 1| (outgoing weight of a source stream)."""
    return float(np.abs(np.asarray(m, dtype=np.float64).sum(axis=-1) - 1).max())


def column_sum_error(m):
    """Return the largest |sum over axis -2 - 1| (incoming weight of a destination stream)."""
    return float(np.abs(np.asarray(m, dtype=np.float64).sum(axis=-2) - 1).max())


def doubly_stochastic_error(m):
    """Return the larger of the two sum errors, infinite if an entry is negative."""
    if np.min(m) < 0:
        return float("inf")
    return max(row_sum_error(m), column_sum_error(m))


def largest_gain(m):
    """Return the largest singular value over a batch [..., N, N]; 1 for a doubly stochastic matrix."""
    return float(np.linalg.svd(np.asarray(m, dtype=np.float64), compute_uv=False).max())


def chain(matrices):
    """Return the product of residual mixes in layer order, [N, N]: first index a stream at the start, second one at the end."""
    product = np.eye(np.shape(matrices[0])[-1])
    for m in matrices:
        product = product @ np.asarray(m, dtype=np.float64)
    return product
