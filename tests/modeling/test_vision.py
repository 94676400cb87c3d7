"""The vision tower, the unshuffle, the projector and image spans, against the float64 oracle and written-out cases."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_dsv4.vision import (
    Dsv41MultiModalProjector,
    Dsv41VisionTower,
    image_span,
    patch_angles,
    rotate_halves,
    unshuffle,
    unshuffle_index,
)
from processing_dsv4 import image_layout
from tests import golden_cases as golden
from tests.reference import text_model
from tests.reference import vision as oracle

from .image_models import golden_model, grid_of, random_patches, tiny_config, tiny_model

GRIDS = [(1, 1), (1, 5), (5, 1), (2, 2), (3, 3), (4, 6), (5, 3), (7, 8)]


@cache
def oracle_weights():
    return text_model.load_checkpoint(golden.CHECKPOINT_V41)


@cache
def vision_settings():
    return text_model.load_config(golden.CHECKPOINT_V41)["vision_config"]


def content_of(spans, grid, ratio):
    """Take the content out of spans, by the oracle's roles."""
    found = []
    for span, (rows, columns) in zip(spans, grid.tolist(), strict=True):
        found.append(span[torch.tensor(oracle.roles(rows, columns, ratio)) == oracle.CONTENT])
    return torch.cat(found)


# ---- positions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim, theta", [(16, 10000.0), (64, 10000.0), (8, 100.0)])
def test_patch_angles_equal_the_oracle(head_dim, theta):
    angles = patch_angles(grid_of(*GRIDS), head_dim, theta)
    expected = np.concatenate([oracle.angles(rows, columns, head_dim, theta) for rows, columns in GRIDS])
    assert angles.dtype == torch.float32 and angles.shape == (sum(r * c for r, c in GRIDS), head_dim // 2)
    np.testing.assert_allclose(angles.numpy(), expected, rtol=2e-7, atol=0)


def test_patch_angles_written_out():
    """Two rows of three patches, two frequencies per axis: rows first, then columns; every image starts at (0, 0)."""
    angles = patch_angles(grid_of((2, 3), (1, 2)), 8, 100.0)
    expected = [[r, r * 0.1, c, c * 0.1] for r, c in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 0), (0, 1)]]
    torch.testing.assert_close(angles, torch.tensor(expected), rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rotate_halves_pairs_the_halves(dtype, bound):
    x = torch.randn(6, 3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    angles = patch_angles(grid_of((2, 3)), 16, 10000.0)
    # Sine and cosine have the precision of the angles.
    turned = rotate_halves(x, angles.double() if dtype == torch.float64 else angles)
    assert turned.dtype == dtype
    for head in range(3):
        expected = oracle.rotate(x[:, head].double().numpy(), angles.double().numpy())
        np.testing.assert_allclose(turned[:, head].double().numpy(), expected, atol=bound)
    one_hot = torch.zeros(1, 1, 16)
    one_hot[..., 3] = 1.0
    turned = rotate_halves(one_hot, torch.full((1, 8), math.pi / 2))
    assert turned[0, 0].abs().round().nonzero().flatten().tolist() == [3 + 8]


def test_attention_knows_distances_only():
    """Rotary scores depend on differences of rows and columns: shifting all patches changes no score."""
    query, key = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    angles = patch_angles(grid_of((9, 9)), 16, 10000.0).double()

    def score(at_query, at_key):
        place = lambda rc: angles[9 * rc[0] + rc[1]][None]  # noqa: E731
        return float((rotate_halves(query, place(at_query)) * rotate_halves(key, place(at_key))).sum())

    assert score((1, 2), (3, 1)) == pytest.approx(score((5, 7), (7, 6)), abs=1e-5)
    assert score((1, 2), (3, 1)) != pytest.approx(score((1, 2), (1, 3)), abs=1e-2)


# ---- unshuffle ----------------------------------------------------------------------------------------------------------


def test_unshuffle_plan_written_out():
    assert unshuffle_index(grid_of((2, 3)), 2).tolist() == [[0, 1, 3, 4], [2, -1, 5, -1]]
    assert unshuffle_index(grid_of((3, 2)), 2).tolist() == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert unshuffle_index(grid_of((1, 1)), 3).tolist() == [[0, -1, -1, -1, -1, -1, -1, -1, -1]]
    assert unshuffle_index(grid_of((4, 4)), 3).tolist() == [
        [0, 1, 2, 4, 5, 6, 8, 9, 10],
        [3, -1, -1, 7, -1, -1, 11, -1, -1],
        [12, 13, 14, -1, -1, -1, -1, -1, -1],
        [15, -1, -1, -1, -1, -1, -1, -1, -1],
    ]
    # Places count inside each image, so joining images changes none.
    assert unshuffle_index(grid_of((2, 2), (1, 2)), 2).tolist() == [[0, 1, 2, 3], [0, 1, -1, -1]]


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_unshuffle_plan_equals_the_processors(ratio):
    """The one twin: the image processor makes the same plan, and so does a loop over cells."""
    for rows in range(1, 14):
        for columns in range(1, 14):
            ours = unshuffle_index(grid_of((rows, columns)), ratio)
            theirs = image_layout.unshuffle_index(rows, columns, ratio)
            assert ours.dtype == torch.int64 and np.array_equal(ours.numpy(), theirs)
            loop = [
                [
                    columns * r + c if r < rows and c < columns else -1
                    for r in range(top, top + ratio)
                    for c in range(left, left + ratio)
                ]
                for top in range(0, rows, ratio)
                for left in range(0, columns, ratio)
            ]
            assert ours.tolist() == loop


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 100)), min_size=1, max_size=4), st.integers(1, 5))
def test_unshuffle_plan_of_many_images_equals_the_processors(sizes, ratio):
    expected = np.concatenate([image_layout.unshuffle_index(rows, columns, ratio) for rows, columns in sizes])
    assert np.array_equal(unshuffle_index(grid_of(*sizes), ratio).numpy(), expected)


def test_unshuffle_is_channel_major_and_pads_with_zeros():
    features = torch.arange(1.0, 13.0).view(6, 2)  # patch i has the channels 2i + 1 and 2i + 2
    cells = unshuffle(features, unshuffle_index(grid_of((2, 3)), 2))
    assert cells.tolist() == [
        [1, 3, 7, 9, 2, 4, 8, 10],  # all places of channel 0, then all of channel 1
        [5, 0, 11, 0, 6, 0, 12, 0],
    ]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("ratio", [2, 3])
def test_unshuffle_equals_the_oracle(grid, ratio):
    features = torch.randn(grid[0] * grid[1], 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    cells = unshuffle(features, unshuffle_index(grid_of(grid), ratio))
    assert np.array_equal(cells.numpy(), oracle.unshuffle(features.numpy(), *grid, ratio))


# ---- projector and spans ------------------------------------------------------------------------------------------------


def test_projector_uses_the_exact_gelu():
    """tanh GELU would differ by up to 5e-4; the bound is far below."""
    projector = Dsv41MultiModalProjector(tiny_config(hidden_size=12, num_attention_heads=3).vision_config, 48).double()
    with torch.no_grad():  # an identity around the activation: 12 channels of 4 places
        projector.linear_1.weight.copy_(torch.eye(48))
        projector.linear_2.weight.copy_(torch.eye(48))
        projector.linear_1.bias.zero_()
        projector.linear_2.bias.zero_()
        values = torch.linspace(-6, 6, 48, dtype=torch.float64)
        result = projector(values[None])[0]
    expected = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in values.tolist()]
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-14)


def test_span_written_out():
    cells = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
    start, newline, end = torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([-3.0])
    assert image_span(cells, 3, start, newline, end).flatten().tolist() == [-1, 1, 2, 3, -2, 4, 5, 6, -2, -3]
    assert image_span(cells, 1, start, newline, end).flatten().tolist() == [
        -1, 1, -2, 2, -2, 3, -2, 4, -2, 5, -2, 6, -2, -3,
    ]  # fmt: skip
    assert image_span(cells[:1], 1, start, newline, end).flatten().tolist() == [-1, 1, -2, -3]


@pytest.mark.parametrize("grid", GRIDS)
def test_spans_have_the_oracles_roles_and_the_processors_length(grid):
    """Delimiters stand where the oracle puts them, content in reading order between them."""
    model, ratio = tiny_model(), 2
    with torch.no_grad():
        (span,) = model.get_image_features(random_patches(grid_of(grid), 2), grid_of(grid)).pooler_output
    roles = oracle.roles(*grid, ratio)
    assert len(span) == image_layout.count_image_tokens(-(-grid[0] // ratio), -(-grid[1] // ratio))
    delimiters = {
        oracle.START: model.model.image_start,
        oracle.NEWLINE: model.model.image_newline,
        oracle.END: model.model.image_end,
    }
    for embedding, role in zip(span, roles, strict=True):
        for other, delimiter in delimiters.items():
            assert torch.equal(embedding, delimiter) == (role == other)


# ---- the whole path -----------------------------------------------------------------------------------------------------


def test_features_of_the_golden_case():
    """Golden features (NeMo AutoModel) within 1e-4; the oracle within 1e-5."""
    case, model = golden.load_case("image"), golden_model()
    grid = torch.as_tensor(case["image_grid_hws"]).long()
    with torch.no_grad():
        spans = model.get_image_features(torch.as_tensor(case["pixel_values"]), grid).pooler_output
    content = content_of(spans, grid, model.config.vision_config.downsample_ratio).numpy()
    assert np.abs(content - case["vision_features"]).max() <= 1e-4
    expected = oracle.features_of(oracle_weights(), vision_settings(), case["pixel_values"], case["image_grid_hws"])
    assert np.abs(content - expected).max() <= 1e-5


@pytest.mark.parametrize("grid", GRIDS)
def test_features_equal_the_oracle_for_every_shape(grid):
    model = golden_model()
    pixels = random_patches(grid_of(grid), vision_settings()["patch_size"], seed=sum(grid))
    with torch.no_grad():
        spans = model.get_image_features(pixels, grid_of(grid)).pooler_output
    expected = oracle.image_features(oracle_weights(), vision_settings(), pixels.numpy(), *grid)
    assert np.abs(content_of(spans, grid_of(grid), 2).numpy() - expected).max() <= 1e-5


def test_delimiters_are_the_checkpoints():
    grid = grid_of((3, 4))
    with torch.no_grad():
        (span,) = golden_model().get_image_features(random_patches(grid, 4), grid).pooler_output
    for position, name in ((0, "image_start"), (3, "image_newline"), (6, "image_newline"), (7, "image_end")):
        assert np.array_equal(span[position].numpy(), oracle_weights()[name].astype(np.float32))


def test_an_image_sees_no_other_image():
    """Attention stays inside an image: changing one moves no bit of the others, and order does not matter."""
    model, sizes = golden_model(), [(4, 6), (5, 3), (3, 3)]
    grid = grid_of(*sizes)
    pixels = random_patches(grid, 4)
    with torch.no_grad():
        before = model.get_image_features(pixels, grid).pooler_output
        changed = pixels.clone()
        changed[24 : 24 + 15] = -changed[24 : 24 + 15]
        after = model.get_image_features(changed, grid).pooler_output
        turned = model.get_image_features(torch.cat([pixels[39:], pixels[:39]]), grid_of((3, 3), *sizes[:2]))
    assert torch.equal(before[0], after[0]) and torch.equal(before[2], after[2])
    assert not torch.allclose(before[1], after[1], atol=1e-2)
    for image, again in zip([before[2], *before[:2]], turned.pooler_output, strict=True):
        torch.testing.assert_close(image, again, atol=1e-6, rtol=0)


def test_every_patch_of_an_image_reaches_every_cell():
    """Full attention, not causal and not windowed: the first and last patch move all cells of their image."""
    model, grid = tiny_model(), grid_of((4, 5))
    pixels = random_patches(grid, 2, dtype=torch.float64)
    with torch.no_grad():
        before = content_of(model.get_image_features(pixels, grid).pooler_output, grid, 2)
        for patch in (0, 19):
            changed = pixels.clone()
            changed[patch] += 1.0
            after = content_of(model.get_image_features(changed, grid).pooler_output, grid, 2)
            assert bool(((after - before).abs().amax(-1) > 1e-9).all())


def test_patches_are_flattened_channel_first():
    """The patch embedding reads [3, p, p] as channel, row, column."""
    tower = Dsv41VisionTower(tiny_config().vision_config).double()
    with torch.no_grad():
        tower.patch_embed.bias.zero_()
        tower.patch_embed.weight.zero_()
        for i in range(12):
            tower.patch_embed.weight[i, i] = 1.0
        seen = []
        handle = tower.patch_embed.register_forward_hook(lambda module, args, output: seen.append(output))
        patch = torch.arange(12.0, dtype=torch.float64).view(1, 3, 2, 2)
        tower(patch, grid_of((1, 1)))
        handle.remove()
    expected = [float(patch[0, c, y, x]) for c in range(3) for y in range(2) for x in range(2)]
    assert seen[0][0, :12].tolist() == expected


def test_pixels_of_any_dtype_give_the_dtype_of_the_tower():
    model, grid = golden_model(), grid_of((3, 4))
    pixels = random_patches(grid, 4).bfloat16()
    with torch.no_grad():
        out = model.get_image_features(pixels, grid)
        same = model.get_image_features(pixels.float(), grid)
    assert out.last_hidden_state.dtype == torch.float32
    assert torch.equal(out.pooler_output[0], same.pooler_output[0])


def test_result_of_get_image_features():
    """`last_hidden_state` has one row per patch; a plan of the image processor changes nothing; a tuple on request."""
    model, grid = golden_model(), grid_of((4, 6), (5, 3))
    pixels = random_patches(grid, 4)
    plan = np.concatenate([image_layout.unshuffle_index(*size, 2) for size in grid.tolist()])
    with torch.no_grad():
        out = model.get_image_features(pixels, grid)
        planned = model.get_image_features(pixels, grid, torch.as_tensor(plan))
        parts = model.get_image_features(pixels, grid, return_dict=False)
    assert out.last_hidden_state.shape == (39, 48)
    assert [len(span) for span in out.pooler_output] == [2 * 4 + 2, 3 * 3 + 2]
    assert all(torch.equal(a, b) for a, b in zip(out.pooler_output, planned.pooler_output, strict=True))
    assert isinstance(parts, tuple) and torch.equal(parts[0], out.last_hidden_state)


def test_inputs_that_contradict_each_other_are_refused():
    model, grid = tiny_model(), grid_of((4, 5))
    pixels = random_patches(grid, 2, dtype=torch.float64)
    for wrong in (pixels[:-1], pixels.flatten(1), pixels[None], pixels[..., :-1], pixels[:, :2]):
        with pytest.raises(ValueError, match="pixel_values has shape .*20, 3, patch, patch"):
            model.get_image_features(wrong, grid)
    for plan in (torch.zeros(5, 4), torch.zeros(6, 9)):
        with pytest.raises(ValueError, match=r"image_unshuffle_index has shape .*accepted: \[6, 4\]"):
            model.get_image_features(pixels, grid, plan.long())
    for row in (-2, 20):
        with pytest.raises(ValueError, match="image_unshuffle_index names rows beyond an image's patches"):
            model.get_image_features(pixels, grid, torch.full((6, 4), row))
    for wrong in (grid[0], grid[:0], grid.float(), -grid, grid_of((0, 5))):
        with pytest.raises(ValueError, match="image_grid_hw is .*accepted: patch rows and columns"):
            model.get_image_features(pixels, wrong)
