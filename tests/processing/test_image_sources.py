"""Images from every kind of source, and clear errors for those that are none."""

import base64
import io
import urllib.parse

import numpy as np
import pytest
import torch
from PIL import Image

from processing_dsv4 import image_sources
from processing_dsv4.image_sources import array_to_pil, open_image

from .conftest import GOLDENS

PNG = (GOLDENS / "images" / "grad_100x37.png").read_bytes()
REFERENCE = np.asarray(Image.open(io.BytesIO(PNG)).convert("RGB"))


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def sources(tmp_path):
    path = tmp_path / "a picture.png"
    path.write_bytes(PNG)
    text = base64.b64encode(PNG).decode()
    yield "pil", Image.open(io.BytesIO(PNG))
    yield "bytes", PNG
    yield "bytearray", bytearray(PNG)
    yield "file", io.BytesIO(PNG)
    yield "path", path
    yield "path text", str(path)
    yield "base64", text
    yield "data url", "data:image/png;base64," + text
    yield "data url, case and line breaks", "DATA:image/PNG;BASE64," + text[:50] + "\n" + text[50:]
    yield "data url, percent", "data:image/png," + urllib.parse.quote_from_bytes(PNG)
    yield "data url, escaped base64", "data:image/png;base64," + urllib.parse.quote(text)
    yield "array", REFERENCE
    yield "array, channels first", np.moveaxis(REFERENCE, -1, 0)
    yield "floats", REFERENCE.astype(np.float32) / 255
    yield "tensor", torch.from_numpy(REFERENCE.copy()).permute(2, 0, 1)
    yield "half tensor", torch.from_numpy(REFERENCE.copy()).permute(2, 0, 1).double() / 255
    yield "wide integers", REFERENCE.astype(np.int64)


def test_every_source_gives_the_same_pixels(tmp_path):
    for name, source in sources(tmp_path):
        assert np.array_equal(np.asarray(open_image(source).convert("RGB")), REFERENCE), name


def test_urls_go_through_the_loader_of_transformers(monkeypatch):
    seen = []
    monkeypatch.setattr(image_sources, "load_image", lambda url: seen.append(url) or Image.new("RGB", (3, 2)))
    assert open_image("https://a.example/b.png").size == (3, 2)
    assert open_image("HTTPS://a.example/B.png").size == (3, 2)
    assert seen == ["https://a.example/b.png", "https://a.example/B.png"]


@pytest.mark.parametrize("kind", ["WEBP", "JPEG", "GIF", "PNG"])
def test_formats(kind):
    assert open_image(encoded(Image.new("RGB", (9, 5), "red"), kind)).size == (9, 5)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (b"", "empty"),
        (b"not an image", "unsupported"),
        (PNG[:60], "damaged|truncated"),
        (PNG[: len(PNG) // 2], "truncated|damaged"),
        (encoded(Image.new("RGB", (4, 4)), "BMP"), "unsupported.*PNG"),
        (encoded(Image.new("RGB", (4, 4)), "TIFF"), "unsupported"),
        ("no such file.png", "not a URL"),
        ("", "no image"),
        ("data:image/png;base64,!!", "base64"),
        ("data:text/plain,hello", "data URL"),
        ("data:image/png;base64,", "empty"),
        (np.zeros((0, 5, 3), np.uint8), "empty"),
        (np.zeros((5,), np.uint8), r"\[H, W\]"),
        (np.zeros((5, 5, 7), np.uint8), "1 to 4 channels"),
        (np.full((5, 5, 3), 1.5, np.float32), "0 to 1"),
        (np.full((5, 5, 3), np.nan, np.float32), "0 to 1"),
        (np.full((5, 5, 3), -1, np.int64), "0 to 255"),
        (np.zeros((5, 5), np.complex64), "complex64"),
        (Image.new("RGB", (9000, 2)), "8192"),
        (encoded(Image.new("L", (2, 9000))), "8192"),
        (Image.new("RGB", (0, 2)), "empty"),
    ],
)
def test_refused_sources(source, match):
    with pytest.raises(ValueError, match=match):
        open_image(source)


def test_refused_types():
    for bad in (None, 3, {"image": 1}, object()):
        with pytest.raises(TypeError, match="image"):
            open_image(bad)


def test_missing_path(tmp_path):
    with pytest.raises(ValueError, match="no image file"):
        open_image(tmp_path / "none.png")


def test_limits_can_be_changed(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(PNG)
    for source in (lambda: PNG, lambda: path, lambda: io.BytesIO(PNG)):
        with pytest.raises(ValueError, match="bytes"):
            open_image(source(), max_bytes=100)
        assert open_image(source(), max_bytes=None).size == (100, 37)
    assert open_image(Image.new("RGB", (9000, 2)), max_side=None).size == (9000, 2)


def test_orientation():
    path = GOLDENS / "images" / "exif6_160x100.jpg"
    assert open_image(path).size == (160, 100)
    assert open_image(path, upright=True).size == (100, 160)


def test_first_frame_of_animations():
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        data = encoded(
            frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
        )
        assert open_image(data).convert("RGB").getpixel((0, 0)) == (255, 0, 0), kind


def test_array_layouts():
    grey = np.arange(30, dtype=np.uint8).reshape(5, 6)
    assert array_to_pil(grey).mode == array_to_pil(grey[None]).mode == array_to_pil(grey[..., None]).mode == "L"
    assert array_to_pil(np.zeros((5, 6, 2), np.uint8)).mode == "LA"
    assert array_to_pil(np.zeros((5, 6, 4), np.uint8)).mode == "RGBA"
    assert np.array_equal(np.asarray(array_to_pil(grey.astype(np.uint16) * 256)), grey)
    assert np.array_equal(np.asarray(array_to_pil(grey > 5)), (grey > 5) * 255)
    square = np.zeros((3, 9, 3), np.uint8)
    assert array_to_pil(square).size == (3, 9)
    assert array_to_pil(square, channels_first=False).size == (9, 3)
    with pytest.raises(ValueError, match="channels"):
        array_to_pil(np.zeros((3, 9, 9), np.uint8), channels_first=False)
