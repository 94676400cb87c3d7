"""DeepSeek-ViT and the projector: images of any size to embeddings of the language model.

        pixel_values [P, 3, p, p] ──linear──> [P, V] ──blocks──> [P, V] ──3x3 unshuffle──> [cells, 9 V] ──MLP──> [cells, H]

Patches of all images are one list; attention stays inside an image. The language model sees an image as a span: start,
then the cells of each row and a newline, then end; the three delimiters are learned vectors.

Sources: V4.1 report section 2.1.1, contract sections 10 and 11.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .layers import Dsv4RMSNorm
from .sparse_attention import wide

# Hard-coded in the release (contract section 3).
VISION_NORM_EPS = 1e-6


def patch_angles(image_grid_hw: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    r"""Return the rotation angles of every patch: its row on the first half of the pairs, its column on the second.

    Implements contract section 10: [row * f, col * f], f_i = theta ** (-2i / (head_dim / 2)).

    Args:
        image_grid_hw (`torch.Tensor` of shape `[images, 2]`, integer): patch rows and columns of each image.
        head_dim (`int`): channels of a head, a multiple of 4.
        theta (`float`): base.

    Returns:
        `torch.Tensor` of shape `[P, head_dim // 2]`, float32: radians.
    """
    device = image_grid_hw.device
    half = head_dim // 2
    frequencies = (1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float64, device=device) / half)).float()
    angles = []
    for height, width in image_grid_hw.tolist():
        place = torch.arange(height * width, device=device)
        rows, cols = (place // width)[:, None].float(), (place % width)[:, None].float()
        angles.append(torch.cat([rows * frequencies, cols * frequencies], dim=-1))
    return torch.cat(angles)


def rotate_halves(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    r"""Rotate channel i together with channel i + D / 2 (contract section 10), in float32 or wider.

    Args:
        x (`torch.Tensor` of shape `[P, heads, D]`, any float dtype).
        angles (`torch.Tensor` of shape `[P, D // 2]`, float32): radians.

    Returns:
        `torch.Tensor` of the shape and dtype of `x`.
    """
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = wide(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def unshuffle_index(image_grid_hw: torch.Tensor, ratio: int) -> torch.Tensor:
    r"""Return, for every cell, the rows of its own image's patches in its neighbourhood, in reading order.

    Twin of the plan that the image processor makes, for callers who have only the grid.

    Args:
        image_grid_hw (`torch.Tensor` of shape `[images, 2]`, integer): patch rows and columns.
        ratio (`int`): cells are `ratio` x `ratio` patches; ragged ones are filled with -1 (zeros).

    Returns:
        `torch.Tensor` of shape `[cells, ratio * ratio]`, int64.
    """
    plans = []
    for height, width in image_grid_hw.tolist():
        place = torch.arange(height * width, device=image_grid_hw.device).view(height, width)
        place = F.pad(place, (0, -width % ratio, 0, -height % ratio), value=-1)
        cells = place.unflatten(0, (-1, ratio)).unflatten(2, (-1, ratio)).transpose(1, 2)
        plans.append(cells.reshape(-1, ratio * ratio))
    return torch.cat(plans)


def unshuffle(features: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    r"""Gather the patches of one image into cells, channel-major (channel, then place in the cell).

    Args:
        features (`torch.Tensor` of shape `[patches, V]`): of one image.
        index (`torch.Tensor` of shape `[cells, R]`, int64): rows of `features`, -1 = zeros.

    Returns:
        `torch.Tensor` of shape `[cells, V * R]`, dtype of `features`.
    """
    padded = torch.cat([features, features.new_zeros(1, features.shape[-1])])
    return padded[index].transpose(1, 2).flatten(1)


def check_images(
    pixel_values: torch.Tensor, image_grid_hw: torch.Tensor, index: torch.Tensor | None, *, patch_size: int, ratio: int
) -> None:
    """Raise a `ValueError` unless patches, grid and plan (`unshuffle_index`, `None`: made from the grid) fit each other."""
    grid = image_grid_hw
    if grid.ndim != 2 or grid.shape[-1] != 2 or 0 in grid.shape or grid.is_floating_point() or bool((grid < 1).any()):
        raise ValueError(
            f"image_grid_hw is {grid.tolist()}; accepted: patch rows and columns of each image, integers >= 1."
        )
    sizes, counts = grid.prod(-1), (-(-grid // ratio)).prod(-1)
    patches = int(sizes.sum())
    if pixel_values.shape != (patches, 3, patch_size, patch_size):
        raise ValueError(
            f"pixel_values has shape {list(pixel_values.shape)}; accepted: [{patches}, 3, patch, patch] with a patch of "
            f"{patch_size}, the patches of image_grid_hw {grid.tolist()}."
        )
    if index is None:
        return
    accepted = [int(counts.sum()), ratio**2]
    if list(index.shape) != accepted:
        raise ValueError(f"image_unshuffle_index has shape {list(index.shape)}; accepted: {accepted}.")
    of_cell = sizes.repeat_interleave(counts)[:, None].to(index.device)
    if bool(((index < -1) | (index >= of_cell)).any()):
        raise ValueError(
            "image_unshuffle_index names rows beyond an image's patches; accepted: its rows, or -1 = zeros."
        )


class Dsv41VisionAttention(nn.Module):
    """Full attention inside each image (contract section 10)."""

    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        r"""Attend.

        Args:
            x (`torch.Tensor` of shape `[P, V]`). angles (`[P, head_dim // 2]`, float32). sizes: patches of each image.
        """
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        query, key = rotate_halves(query, angles), rotate_halves(key, angles)
        images = zip(*(t.transpose(0, 1).split(sizes, dim=1) for t in (query, key, value)), strict=True)
        outputs = [F.scaled_dot_product_attention(q[None], k[None], v[None])[0] for q, k, v in images]
        return self.proj(torch.cat(outputs, dim=1).transpose(0, 1).flatten(1))


class Dsv41VisionMLP(nn.Module):
    """SwiGLU: the first half of `gate_up_proj` is the gate."""

    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Dsv41VisionLayer(GradientCheckpointingLayer):
    """Pre-norm attention and MLP."""

    def __init__(self, config):
        super().__init__()
        self.norm1 = Dsv4RMSNorm(config.hidden_size, VISION_NORM_EPS)
        self.attn = Dsv41VisionAttention(config)
        self.norm2 = Dsv4RMSNorm(config.hidden_size, VISION_NORM_EPS)
        self.mlp = Dsv41VisionMLP(config)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), angles, sizes)
        return x + self.mlp(self.norm2(x))


class Dsv41VisionTower(nn.Module):
    """Linear patch embedding, blocks, final norm; no class token and no learned positions."""

    def __init__(self, config):
        super().__init__()
        self.head_dim, self.theta = config.hidden_size // config.num_attention_heads, config.rope_theta
        self.patch_embed = nn.Linear(3 * config.patch_size**2, config.hidden_size)
        self.layers = nn.ModuleList([Dsv41VisionLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = Dsv4RMSNorm(config.hidden_size, VISION_NORM_EPS)
        # Before the learning rate decays, only the final norm and the projector train (V4.1 report section 2.5).
        self.freeze_vision = False

    def forward(self, pixel_values: torch.Tensor, image_grid_hw: torch.Tensor) -> torch.Tensor:
        r"""Encode the patches of all images.

        Args:
            pixel_values (`torch.Tensor` of shape `[P, 3, p, p]`, any float dtype): patches, row-major per image.
            image_grid_hw (`torch.Tensor` of shape `[images, 2]`, integer): patch rows and columns; products sum to P.

        Returns:
            `torch.Tensor` of shape `[P, V]`.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_vision):
            x = self.patch_embed(pixel_values.flatten(1).to(self.patch_embed.weight.dtype))
            # The grid may still be on the host.
            angles = patch_angles(image_grid_hw, self.head_dim, self.theta).to(x.device)
            sizes = image_grid_hw.prod(-1).tolist()
            for layer in self.layers:
                x = layer(x, angles, sizes)
        return self.norm(x)


class Dsv41MultiModalProjector(nn.Module):
    """Two linear layers with an exact GELU between them, from cells to the language model's width."""

    def __init__(self, vision_config, hidden_size: int):
        super().__init__()
        cell = vision_config.hidden_size * vision_config.downsample_ratio**2
        self.linear_1 = nn.Linear(cell, hidden_size)
        self.linear_2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, cells: torch.Tensor) -> torch.Tensor:
        """Map `[cells, V * ratio ** 2]` to `[cells, H]`."""
        return self.linear_2(F.gelu(self.linear_1(cells)))


def image_span(cells: torch.Tensor, columns: int, start: torch.Tensor, newline: torch.Tensor, end: torch.Tensor):
    r"""Return the embeddings of one image's span: start, each row of cells and a newline, end.

    Args:
        cells (`torch.Tensor` of shape `[rows * columns, H]`): reading order.
        columns (`int`): cells of a row.
        start, newline, end (`torch.Tensor` of shape `[H]`).

    Returns:
        `torch.Tensor` of shape `[rows * (columns + 1) + 2, H]`.
    """
    rows = cells.unflatten(0, (-1, columns))
    rows = torch.cat([rows, newline.expand(len(rows), 1, -1)], dim=1).flatten(0, 1)
    return torch.cat([start[None], rows, end[None]])
