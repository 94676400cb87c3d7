"""Sizes, boxes, plans and roles, against slow exact arithmetic that shares nothing with the package."""

import hashlib
import json
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from processing_dsv4.image_layout import (
    ResizePlan,
    cell_grid,
    count_image_tokens,
    fit_box,
    low_detail_size,
    plan_resize,
    unshuffle_index,
)
from tests.reference import vision as oracle

from .conftest import GOLDENS

EXPECTED = json.loads((GOLDENS / "images" / "expected.json").read_text(encoding="utf-8"))["images"]


def exact_size(height: int, width: int, limit: int = 1024, area: int = 295936) -> tuple[int, int]:
    """The one-pass rule with exact integers and fractions and with loops instead of roots.

    Only the last product is in floats: the rule is stated in them, and the official toolkit rounds the same way where
    the exact product is a whole number of patches (2171 x 2112 becomes 1288 x 1260, not 1302 x 1260).
    """
    if height * width < area:
        # trunc(w * sqrt(M / (w h))) = floor(sqrt(M w / h))
        width, height = math.isqrt(area * width // height), math.isqrt(area * height // width)
    up_height, up_width = -(-height // 14) * 14, -(-width // 14) * 14
    rows, columns = -(-up_height // 42), -(-up_width // 42)
    if rows * (columns + 1) + 2 <= limit:
        return up_height, up_width
    ratio = Fraction(height, width)
    columns = 0
    while (columns + 1) * ratio * (columns + 2) <= limit - 2:
        columns += 1
    rows = 0
    while (rows + 1) * ((rows + 1) / ratio + 1) <= limit - 2:
        rows += 1
    if columns < 1:
        return (limit - 2) // 2 * 42, 42
    if rows < 1:
        return 42, (limit - 3) * 42
    scale = min(columns * 42 / width, rows * 42 / height)
    return 14 * int(height * scale // 14), 14 * int(width * scale // 14)


def sampled_sizes(count: int):
    rng = random.Random(20261129)
    for _ in range(count):
        if rng.random() < 0.5:
            yield rng.randint(1, 3000), rng.randint(1, 3000)
        else:
            yield round(2 ** rng.uniform(0, 13)), round(2 ** rng.uniform(0, 13))


def check_sizes(count: int):
    for height, width in sampled_sizes(count):
        plan = plan_resize(height, width)
        assert (plan.height, plan.width) == exact_size(height, width), (height, width)
        rows = sum(1 for _ in range(0, plan.height, 42))
        columns = sum(1 for _ in range(0, plan.width, 42))
        tokens = 1 + sum(columns + 1 for _ in range(rows)) + 1
        assert count_image_tokens(*cell_grid(plan.height, plan.width, 14, 3)) == tokens
        assert plan.height % 14 == plan.width % 14 == 0 and rows >= 1 and columns >= 1 and tokens <= 1024


def test_sampled_sizes():
    check_sizes(4000)


@pytest.mark.slow
def test_64000_sampled_sizes():
    check_sizes(64000)


@pytest.mark.parametrize("image", EXPECTED, ids=lambda image: image["file"])
def test_goldens(image):
    plan = plan_resize(image["height"], image["width"])
    assert [plan.height, plan.width] == image["resized"]
    box = image["content_box"]
    assert fit_box(image["height"], image["width"], plan) == (box["top"], box["left"], box["height"], box["width"])
    assert list(cell_grid(*image["resized"], 14, 3)) == image["grid_tokens_hw"]


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (8, 186, (112, 2632)),
        (1303, 1303, (1302, 1302)),
        (1302, 1302, (1302, 1302)),
        (544, 544, (546, 546)),
        (8192, 1, (21462, 42)),
        (1, 8192, (42, 42882)),
    ],
)
def test_known_sizes(height, width, expected):
    plan = plan_resize(height, width)
    assert (plan.height, plan.width) == expected and not plan.stretch


def test_ratio_limit():
    assert plan_resize(100, 1000, max_wh_ratio=4) == ResizePlan(*plan_resize(100, 400)[:2], True)
    assert not plan_resize(1000, 100, max_wh_ratio=4).stretch
    assert fit_box(100, 1000, ResizePlan(280, 1120, True)) == (0, 0, 280, 1120)


def test_other_settings():
    for height, width in [(1, 1), (20, 30), (500, 3), (3, 500), (64, 64)]:
        plan = plan_resize(height, width, patch_size=4, downsample_ratio=2, max_image_tokens=64, min_pixels=256)
        assert plan.height % 4 == plan.width % 4 == 0
        assert 3 <= count_image_tokens(*cell_grid(plan.height, plan.width, 4, 2)) <= 64


def test_empty_images_are_refused():
    for height, width in [(0, 5), (5, 0), (-1, 5)]:
        with pytest.raises(ValueError, match="pixel"):
            plan_resize(height, width)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((512, 512), (512, 512)),
        ((100, 4096), (13, 512)),
        ((100, 4097), (12, 512)),
        ((4096, 1), (512, 1)),
        ((600, 1200), (256, 512)),
    ],
)
def test_low_detail(size, expected):
    assert low_detail_size(*size) == expected
    assert low_detail_size(*size[::-1]) == expected[::-1]


def test_boxes_stay_inside_and_are_centred():
    for height, width in sampled_sizes(2000):
        plan = plan_resize(height, width)
        top, left, content_height, content_width = fit_box(height, width, plan)
        assert content_height >= 1 and content_width >= 1
        assert content_height == plan.height or content_width == plan.width
        assert abs(plan.height - content_height - 2 * top) <= 1 and abs(plan.width - content_width - 2 * left) <= 1
        assert 0 <= top <= plan.height - content_height and 0 <= left <= plan.width - content_width


@pytest.mark.parametrize("downsample", [1, 2, 3, 4])
def test_unshuffle_plan_against_a_written_out_loop(downsample):
    for rows in range(1, 9):
        for columns in range(1, 9):
            expected = []
            for top in range(0, rows, downsample):
                for left in range(0, columns, downsample):
                    cell = []
                    for row in range(top, top + downsample):
                        for column in range(left, left + downsample):
                            inside = row < rows and column < columns
                            cell.append(row * columns + column if inside else -1)
                    expected.append(cell)
            plan = unshuffle_index(rows, columns, downsample)
            assert plan.dtype == np.int64 and plan.tolist() == expected


def test_every_patch_is_used_once():
    for rows, columns in [(39, 39), (93, 93), (15, 215), (35, 46)]:
        plan = unshuffle_index(rows, columns, 3)
        assert sorted(plan[plan >= 0].tolist()) == list(range(rows * columns))
        assert plan.shape == (math.ceil(rows / 3) * math.ceil(columns / 3), 9)


@pytest.mark.parametrize("image", EXPECTED, ids=lambda image: image["file"])
def test_roles(image):
    roles = np.array(oracle.roles(*image["grid_patches_hw"], 3))
    assert len(roles) == image["num_image_tokens"]
    assert hashlib.sha256(roles.astype(np.int8).tobytes()).hexdigest() == image["token_types_sha256"]
    assert (roles == 1).sum() == len(unshuffle_index(*image["grid_patches_hw"], 3))
