"""Routing and experts in float64, one token at a time (V4.1 contract section 7)."""

import numpy as np

from .mhc import sigmoid


def route(x, gate_weight, bias, count, factor):
    """Return (expert ids by biased score descending, their weights) for one token x [D].

    The score is sqrt(softplus(logit)); the bias takes part in the choice only; weights are normalised, times `factor`.
    """
    scores = np.sqrt(np.logaddexp(0.0, gate_weight @ x))
    order = sorted(range(len(scores)), key=lambda e: (-(scores[e] + bias[e]), e))[:count]
    chosen = scores[order]
    return order, chosen / (chosen.sum() + 1e-20) * factor


def expert(x, w1, w2, w3, limit, weight=1.0, round_input=None):
    """Return w2(silu(g) * u * weight) of one token, g = w1(x) clamped above, u = w3(x) clamped on both sides.

    `round_input` is applied to the inputs of the three matrices; the weight of a routed expert comes before that of w2.
    """
    rounded = round_input or (lambda v: v)
    x = rounded(x)
    g = np.minimum(w1 @ x, limit)
    u = np.clip(w3 @ x, -limit, limit)
    return w2 @ rounded(g * sigmoid(g) * u * weight)
