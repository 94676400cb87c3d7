"""The image processor: bit-exact patches, colors, detail levels, batches, errors, saving."""

import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from processing_dsv4 import Dsv41ImageProcessor
from processing_dsv4.image_processing_deepseek_v41 import to_rgb

from .conftest import GOLDENS, V41_CONFIG

IMAGES = GOLDENS / "images"
EXPECTED = json.loads((IMAGES / "expected.json").read_text(encoding="utf-8"))["images"]


@pytest.fixture(scope="module")
def image_processor():
    return Dsv41ImageProcessor()


def digest(patches: torch.Tensor) -> str:
    return hashlib.sha256(patches.to(torch.bfloat16).view(torch.int16).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("image", EXPECTED, ids=lambda image: image["file"])
def test_goldens(image_processor, image):
    """Bit-equal patches: in the colors of the official API, and in those of the reference."""
    api = image.get("alternative_official_colour", image)
    out = image_processor(str(IMAGES / image["file"]), return_tensors="pt")
    assert out["pixel_values"].dtype == torch.float32 and list(out["pixel_values"].shape) == image["patches_shape"]
    assert digest(out["pixel_values"]) == api["patches_sha256_le_bf16"]
    assert out["image_grid_hw"].tolist() == [image["grid_patches_hw"]]
    rows, columns = image["grid_tokens_hw"]
    assert list(out["image_unshuffle_index"].shape) == [rows * columns, 9]
    out = image_processor(str(IMAGES / image["file"]), color_rule="reference", return_tensors="pt")
    assert digest(out["pixel_values"]) == image["patches_sha256_le_bf16"]


@pytest.mark.parametrize("image", EXPECTED, ids=lambda image: image["file"])
def test_detail_levels(image_processor, image):
    size = image["height"], image["width"]
    for detail, official in image["official"].items():
        expected = official["height"], official["width"]
        assert image_processor.get_resized_size(*size, {"detail": detail}) == expected
        assert type(image_processor)(detail=detail).get_resized_size(*size) == expected
        assert image_processor.get_number_of_image_tokens(*size, {"detail": detail}) == official["image_tokens"]
        out = image_processor(str(IMAGES / image["file"]), detail=detail, return_tensors="np")
        grid = official["height"] // 14, official["width"] // 14
        assert out["image_grid_hw"].tolist() == [list(grid)]
        assert len(out["pixel_values"]) == image_processor.get_number_of_image_patches(*size, {"detail": detail})


def test_patches_are_the_pixels(image_processor):
    """Written out: patch by patch, channel by channel, row by row."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (28, 42, 3), dtype=np.uint8)
    out = image_processor(pixels, do_resize=False, return_tensors="np")["pixel_values"]
    for patch in range(6):
        for channel in range(3):
            for row in range(14):
                for column in range(14):
                    value = pixels[patch // 3 * 14 + row, patch % 3 * 14 + column, channel]
                    assert out[patch, channel, row, column] == np.float32((np.float32(value) / 255 - 0.5) / 0.5)


def test_several_images_are_joined(image_processor):
    files = [str(IMAGES / name) for name in ("px_1x1.png", "grad_100x37.png", "photo_640x480.jpg")]
    alone = [image_processor(file, return_tensors="pt") for file in files]
    for images in (files, [files[:1], files[1:]], [files[0], files[1:]]):
        joined = image_processor(images, return_tensors="pt")
        for key in ("pixel_values", "image_grid_hw", "image_unshuffle_index"):
            assert torch.equal(joined[key], torch.cat([one[key] for one in alone])), key
    mixed = image_processor(files, detail=["high", "low", "high"], return_tensors="pt")
    low = image_processor(files[1], detail="low", return_tensors="pt")
    assert mixed["image_grid_hw"].tolist() == [
        alone[0]["image_grid_hw"][0].tolist(),
        *low["image_grid_hw"].tolist(),
        alone[2]["image_grid_hw"][0].tolist(),
    ]


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (10, 5000), (5000, 10), (8192, 1), (1, 8192), (13, 14), (545, 543)])
def test_extreme_sizes(image_processor, size):
    out = image_processor(np.full((*size, 3), 200, np.uint8), return_tensors="np")
    rows, columns = out["image_grid_hw"][0]
    assert len(out["pixel_values"]) == rows * columns
    assert np.isfinite(out["pixel_values"]).all()
    assert out["pixel_values"].max() == np.float32((np.float32(200) / 255 - 0.5) / 0.5)


def test_layouts_of_arrays_and_tensors(image_processor):
    pixels = np.random.default_rng(1).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    expected = image_processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    tensor = torch.from_numpy(pixels)
    for image in (
        pixels,
        np.moveaxis(pixels, -1, 0),
        tensor,
        tensor.permute(2, 0, 1),
        tensor.permute(2, 0, 1).double() / 255,
    ):
        assert torch.equal(image_processor(image, return_tensors="pt")["pixel_values"], expected)
    batch = image_processor(np.stack([pixels, pixels]), return_tensors="pt")
    assert torch.equal(batch["pixel_values"], torch.cat([expected, expected]))
    thin = np.zeros((3, 9, 3), np.uint8)
    for image in (thin, torch.from_numpy(thin)):
        out = image_processor(image, input_data_format="channels_last")
        assert out["image_grid_hw"].tolist() == image_processor(Image.new("RGB", (9, 3)))["image_grid_hw"].tolist()


def test_colors():
    half = Image.new("RGBA", (1, 1), (200, 0, 0, 128))
    assert to_rgb(half).getpixel((0, 0)) == (227, 127, 127)
    assert to_rgb(half, "reference").getpixel((0, 0)) == (200, 0, 0)
    grey = Image.fromarray(np.array([[0x1234, 0xFFFF]], np.uint16))
    assert [to_rgb(grey).getpixel((x, 0)) for x in (0, 1)] == [(0x12,) * 3, (0xFF,) * 3]
    assert to_rgb(grey, "reference").getpixel((0, 0)) == (255,) * 3
    for mode in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "La", "CMYK", "YCbCr", "HSV", "LAB", "I", "I;16"):
        assert to_rgb(Image.new(mode, (2, 2))).mode == "RGB", mode
        assert to_rgb(Image.new(mode, (2, 2)), "reference").mode == "RGB", mode


def test_options_of_values(image_processor):
    image = Image.new("RGB", (14, 14), (255, 51, 0))
    raw = image_processor(image, do_resize=False, do_rescale=False, do_normalize=False, return_tensors="np")
    assert raw["pixel_values"][0, :, 0, 0].tolist() == [255.0, 51.0, 0.0]
    means = image_processor(
        image, do_resize=False, image_mean=[0.0, 0.2, 0.0], image_std=[1.0, 1.0, 2.0], return_tensors="np"
    )
    assert np.allclose(means["pixel_values"][0, :, 0, 0], [1.0, 0.0, 0.0])
    padded = image_processor(Image.new("RGB", (100, 37)), padding_color=[255, 0, 0], return_tensors="np")
    assert padded["pixel_values"][0, :, 0, 0].tolist() == [1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("images", "options", "match"),
    [
        ([], {}, "empty"),
        ([[]], {}, "empty"),
        (["px"] * 601, {}, "601 images"),
        ([["px"] * 2, ["px"] * 3], {"max_images": 2}, "3 images"),
        (["px"], {"detail": "huge"}, "huge"),
        (["px"], {"detail": ["high", "low"]}, "detail"),
        (["px"], {"color_rule": "other"}, "color_rule"),
        (["px"], {"patch_size": 0}, "patch_size"),
        (["px"], {"max_image_tokens": 3}, "max_image_tokens"),
        (["px"], {"do_resize": False}, "multiples"),
        (["px"], {"max_side": 10}, "at most 10"),
        ([b""], {}, "empty"),
    ],
)
def test_errors(image_processor, images, options, match):
    pixel = Image.new("RGB", (15, 15))

    def filled(item):
        return [filled(one) for one in item] if isinstance(item, list) else pixel if item == "px" else item

    with pytest.raises(ValueError, match=match):
        image_processor(filled(images), **options)


def test_requests_are_limited_each(image_processor):
    pixel = Image.new("RGB", (14, 14))
    found = image_processor([[pixel] * 2, [pixel] * 2], max_images=2, do_resize=False)
    assert len(found["image_grid_hw"]) == 4


def test_released_folder(tmp_path):
    settings = {
        "patch_size": 4,
        "downsample_ratio": 2,
        "max_image_tokens": 64,
        "min_pixels": 256,
        "max_wh_ratio": None,
    }
    (tmp_path / "config.json").write_text(json.dumps({**V41_CONFIG, "vision_config": settings}))
    loaded = Dsv41ImageProcessor.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in settings} == settings
    assert Dsv41ImageProcessor.from_pretrained(tmp_path, patch_size=8).patch_size == 8
    with pytest.raises(OSError):
        Dsv41ImageProcessor.from_pretrained(tmp_path / "nothing")


def test_saving(tmp_path, image_processor):
    Dsv41ImageProcessor(detail="low", max_images=None, patch_size=7).save_pretrained(tmp_path)
    loaded = AutoImageProcessor.from_pretrained(tmp_path)
    assert type(loaded) is Dsv41ImageProcessor
    assert (loaded.detail, loaded.max_images, loaded.patch_size) == ("low", None, 7)
    assert loaded.to_dict() == Dsv41ImageProcessor(detail="low", max_images=None, patch_size=7).to_dict()
    for reference in loaded.to_dict()["auto_map"].values():
        assert (tmp_path / f"{reference.split('.')[0]}.py").is_file()
