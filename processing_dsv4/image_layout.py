"""Sizes of images, and where their pieces go: the arithmetic of the image processor, without any pixel.

A resized image is a grid of patches; three by three patches (the downsample ratio) form a cell, and each cell becomes
one token. In the prompt an image is a start token, then for every row of cells its content tokens and a newline token,
then an end token.

Legend: p patch size in pixels, d downsample ratio in patches, c = p·d cell size in pixels, N limit of tokens.
"""

import math
from typing import NamedTuple

import numpy as np

# Detail levels of an image. "low" reduces its long side to LOW_DETAIL_SIDE pixels first, the others mean the same.
DETAILS = ("low", "high", "original", "auto")
LOW_DETAIL_SIDE = 512


class ResizePlan(NamedTuple):
    """Target size in pixels, and whether the image is stretched to it (instead of fitted and padded)."""

    height: int
    width: int
    stretch: bool = False


def cell_grid(height: int, width: int, patch_size: int, downsample_ratio: int) -> tuple[int, int]:
    """Return (rows, columns) of cells of an image of `height` x `width` pixels."""
    rows, columns = math.ceil(height / patch_size), math.ceil(width / patch_size)
    return math.ceil(rows / downsample_ratio), math.ceil(columns / downsample_ratio)


def count_image_tokens(rows: int, columns: int) -> int:
    """Return how many tokens an image of `rows` x `columns` cells takes in the prompt, newlines and ends included."""
    return rows * (columns + 1) + 2


def plan_resize(
    height: int,
    width: int,
    *,
    patch_size: int = 14,
    downsample_ratio: int = 3,
    max_image_tokens: int = 1024,
    min_pixels: int = 544 * 544,
    max_wh_ratio: float | None = None,
) -> ResizePlan:
    """Choose the size to which an image is resized.

    Implements the one-pass rule of the V4.1 reference: small images grow to `min_pixels`, sides are rounded up to
    patches, and an image with too many tokens shrinks to the largest size that keeps its aspect.

    Args:
        height, width (`int`): size of the image in pixels, at least 1.
        patch_size (`int`): side of a patch in pixels.
        downsample_ratio (`int`): side of a cell in patches.
        max_image_tokens (`int`): limit of prompt tokens, newlines and ends included.
        min_pixels (`int`): area in pixels up to which small images are enlarged.
        max_wh_ratio (`float`, *optional*): wider images are stretched to this ratio of width to height.

    Returns:
        `ResizePlan`: both sides are multiples of `patch_size`.

    Raises:
        ValueError: if a side is below 1.
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image needs at least one pixel, got height {height} and width {width}")
    stretch = max_wh_ratio is not None and width >= height * max_wh_ratio
    if stretch:
        width = height * max_wh_ratio
    if width * height < min_pixels:
        factor = math.sqrt(min_pixels / (width * height))
        width, height = int(width * factor), int(height * factor)
    out_height = patch_size * math.ceil(height / patch_size)
    out_width = patch_size * math.ceil(width / patch_size)
    tokens = count_image_tokens(*cell_grid(out_height, out_width, patch_size, downsample_ratio))
    if tokens > max_image_tokens:
        out_height, out_width = _shrink(height, width, patch_size, downsample_ratio, max_image_tokens)
    return ResizePlan(out_height, out_width, stretch)


def _shrink(height, width, patch_size: int, downsample_ratio: int, max_tokens: int) -> tuple[int, int]:
    """Largest size in patches that keeps the aspect and the token limit: rows·(columns + 1) + 2 <= limit."""
    cell = patch_size * downsample_ratio
    ratio = height / width
    columns = math.sqrt((max_tokens - 2) / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        return (max_tokens - 2) // 2 * cell, cell
    if rows < 1:
        return cell, (max_tokens - 3) * cell
    scale = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    return (
        patch_size * math.floor(height * scale / patch_size),
        patch_size * math.floor(width * scale / patch_size),
    )


def low_detail_size(height: int, width: int) -> tuple[int, int]:
    """Return the size of an image of low detail: the long side is at most 512 pixels, the other is rounded half up."""
    side, longest = LOW_DETAIL_SIDE, max(height, width)
    if longest <= side:
        return height, width
    short = max(1, (2 * min(height, width) * side + longest) // (2 * longest))
    return (side, short) if height >= width else (short, side)


def fit_box(height: int, width: int, plan: ResizePlan) -> tuple[int, int, int, int]:
    """Where the content of an image goes inside its target size.

    Args:
        height, width (`int`): size of the image.
        plan (`ResizePlan`): its target.

    Returns:
        `(top, left, content height, content width)` in pixels: centred, aspect kept, ties rounded to even.
    """
    out_height, out_width = plan.height, plan.width
    if plan.stretch or width * out_height == height * out_width:
        return 0, 0, out_height, out_width
    # Floats, and this order of operations: the goldens hang on the rounding of these products.
    aspect, target = width / height, out_width / out_height
    if aspect > target:
        content = max(1, round(height / width * out_width))
        return round((out_height - content) * 0.5), 0, content, out_width
    if aspect < target:
        content = max(1, round(width / height * out_height))
        return 0, round((out_width - content) * 0.5), out_height, content
    return 0, 0, out_height, out_width


def unshuffle_index(patch_rows: int, patch_columns: int, downsample_ratio: int) -> np.ndarray:
    """Plan the pixel-unshuffle of one image.

    Args:
        patch_rows, patch_columns (`int`): the grid of patches.
        downsample_ratio (`int`): d, the side of a cell in patches.

    Returns:
        `np.ndarray` of shape `[content tokens, d * d]`, int64: for every content token, in reading order, the patches
        of its cell in reading order, as positions among the patches of this image; -1 where the cell reaches beyond
        the image, which means zeros.
    """
    d = downsample_ratio
    rows, columns = cell_grid(patch_rows, patch_columns, 1, d)
    grid = np.full((rows * d, columns * d), -1, dtype=np.int64)
    grid[:patch_rows, :patch_columns] = np.arange(patch_rows * patch_columns).reshape(patch_rows, patch_columns)
    return np.ascontiguousarray(grid.reshape(rows, d, columns, d).transpose(0, 2, 1, 3)).reshape(rows * columns, d * d)
