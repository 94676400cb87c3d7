"""The V4.1 vision tower and aligner in float64, one image at a time, and image spans (contract sections 10 and 11)."""

import math

import numpy as np

from .mhc import sigmoid, softmax

NORM_EPS = 1e-6  # fixed in the release, unlike the text model's
START, CONTENT, NEWLINE, END = 0, 1, 2, 3  # roles inside an image span; text is -1


def _norm(x, weight):
    return weight * (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + NORM_EPS))


def _linear(weights, name, x):
    result = x @ weights[f"{name}.weight"].T
    return result + weights[f"{name}.bias"] if f"{name}.bias" in weights else result


def angles(rows, columns, head_dim, theta):
    """Return the rotary angles [rows * columns, head_dim / 2], row angles first, patches in reading order."""
    freqs = [theta ** (-2 * i / (head_dim // 2)) for i in range(head_dim // 4)]
    return np.array([[r * f for f in freqs] + [c * f for f in freqs] for r in range(rows) for c in range(columns)])


def rotate(x, angle):
    """Rotate x [P, head_dim]; channel i is paired with channel i + head_dim / 2."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(weights, name, x, angle, heads):
    """Return the full attention [P, D] among the patches of one image."""
    q, k, v = np.split(_linear(weights, f"{name}.wqkv", x), 3, axis=-1)
    width, parts = x.shape[1] // heads, []
    for h in range(heads):
        at = slice(h * width, (h + 1) * width)
        scores = rotate(q[:, at], angle) @ rotate(k[:, at], angle).T * width**-0.5
        parts.append(softmax(scores) @ v[:, at])
    return _linear(weights, f"{name}.wo", np.concatenate(parts, axis=-1))


def mlp(weights, name, x):
    """Return w2(silu(gate) * up); the first half of w1's rows is the gate."""
    gate, up = np.split(_linear(weights, f"{name}.w1", x), 2, axis=-1)
    return _linear(weights, f"{name}.w2", gate * sigmoid(gate) * up)


def unshuffle(features, rows, columns, factor):
    """Return [content tokens, D * factor^2]: blocks in reading order, padded with zeros at the bottom and right.

    A block is flattened channel first, then row, then column.
    """
    width = features.shape[1]
    down, across = -(-rows // factor), -(-columns // factor)
    grid = np.zeros((down * factor, across * factor, width))
    grid[:rows, :columns] = features.reshape(rows, columns, width)
    blocks = []
    for r in range(down):
        for c in range(across):
            block = grid[r * factor : (r + 1) * factor, c * factor : (c + 1) * factor]
            blocks.append(block.transpose(2, 0, 1).reshape(-1))
    return np.array(blocks)


def image_features(weights, vision_config, pixels, rows, columns):
    """Return the content embeddings [content tokens, D] of one image of patches [rows * columns, 3, p, p]."""
    heads = vision_config["num_attention_heads"]
    angle = angles(rows, columns, vision_config["hidden_size"] // heads, vision_config["rope_theta"])
    x = _linear(weights, "vision.patch_embed.proj", np.asarray(pixels, np.float64).reshape(rows * columns, -1))
    for i in range(vision_config["num_hidden_layers"]):
        name = f"vision.blocks.{i}"
        x = x + attention(weights, f"{name}.attn", _norm(x, weights[f"{name}.norm1.weight"]), angle, heads)
        x = x + mlp(weights, f"{name}.mlp", _norm(x, weights[f"{name}.norm2.weight"]))
    x = unshuffle(_norm(x, weights["vision.norm.weight"]), rows, columns, vision_config["downsample_ratio"])
    x = _linear(weights, "aligner.w1", x)
    gelu = np.vectorize(lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)
    return _linear(weights, "aligner.w2", gelu)


def features_of(weights, vision_config, pixel_values, grid):
    """Return the content embeddings of several images, one after the other; `grid` [images, 2] counts patches."""
    result, start = [], 0
    for rows, columns in np.asarray(grid):
        count = int(rows * columns)
        result.append(
            image_features(weights, vision_config, pixel_values[start : start + count], int(rows), int(columns))
        )
        start += count
    return np.concatenate(result)


def roles(rows, columns, factor):
    """Return the roles of an image span of this patch grid: start, rows of content and a newline each, end."""
    down, across = -(-rows // factor), -(-columns // factor)
    return [START] + ([CONTENT] * across + [NEWLINE]) * down + [END]


def span_embeddings(weights, types, features):
    """Return the embeddings [B, S, D] of image positions by their roles [B, S] (zeros at text); content in reading order."""
    delimiters = {START: "image_start", NEWLINE: "image_newline", END: "image_end"}
    result = np.zeros((*types.shape, features.shape[1]))
    used = 0
    for b, s in np.ndindex(*types.shape):
        if types[b, s] == CONTENT:
            result[b, s] = features[used]
            used += 1
        elif types[b, s] in delimiters:
            result[b, s] = weights[delimiters[int(types[b, s])]]
    return result
