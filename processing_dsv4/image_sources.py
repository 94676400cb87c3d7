"""From whatever a caller calls an image to a PIL image.

Accepted are PIL images, arrays and tensors, encoded bytes, open files, paths, data URLs, base64 and http(s) URLs. Data
URLs are decoded here; the network is only reached through transformers' own loader. Sizes are checked before anything
is decoded, but for what that loader fetches.
"""

import base64
import binascii
import io
import os
import urllib.parse

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers.image_utils import load_image

# Encoded formats that the official API accepts. Others would only widen the surface for hostile files; a caller who
# wants one opens it and passes the PIL image.
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
MAX_BYTES = 32 * 1024 * 1024
MAX_SIDE = 8192
MAX_IMAGES = 600


def open_image(
    source,
    max_side: int | None = MAX_SIDE,
    max_bytes: int | None = MAX_BYTES,
    upright: bool = False,
    channels_first: bool | None = None,
):
    """Open one image.

    Args:
        source (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor`, `bytes`, open binary file, `str` or `os.PathLike`):
            Arrays are `[H, W]`, `[H, W, C]` or `[C, H, W]` with 1 to 4 channels, uint8, uint16, bool, or floats from 0
            to 1. A string is an http(s) URL, a data URL, a path, or base64. What a URL names comes through
            transformers' loader: in RGB without transparency, and already upright.
        max_side (`int`, *optional*, defaults to 8192): limit of width and height in pixels; None lifts it.
        max_bytes (`int`, *optional*, defaults to 33554432): limit of encoded bytes; None lifts it.
        upright (`bool`, *optional*, defaults to `False`): turn the image as its EXIF orientation says.
        channels_first (`bool`, *optional*): where an array has its channels; None finds out.

    Returns:
        `PIL.Image.Image`, decoded, of any mode; the first frame of an animation in a file.

    Raises:
        ValueError: for empty, truncated, unsupported and too large images.
        TypeError: for things that are no images.
    """
    image = _to_pil(source, max_bytes, channels_first)
    _check_size(image.width, image.height, max_side)
    try:
        image.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"the image is truncated or damaged: {error}") from error
    return ImageOps.exif_transpose(image) if upright else image


def _to_pil(source, max_bytes: int | None, channels_first: bool | None):
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _decode(bytes(source), max_bytes)
    if isinstance(source, os.PathLike):
        return _open_path(os.fspath(source), max_bytes)
    if isinstance(source, str):
        return _open_text(source, max_bytes)
    if hasattr(source, "read"):
        data = source.read() if max_bytes is None else source.read(max_bytes + 1)
        return _decode(data, max_bytes)
    if hasattr(source, "detach"):
        tensor = source.detach().cpu()
        source = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(source, np.ndarray):
        return array_to_pil(source, channels_first)
    raise TypeError(
        "an image must be a PIL image, an array, a tensor, bytes, an open file, a path or a URL, "
        f"got {type(source).__name__}"
    )


def _open_text(source: str, max_bytes):
    scheme, _, rest = source.partition("://")
    if scheme.lower() in ("http", "https"):
        # transformers' loader is the only one that touches the network; it returns RGB, already upright.
        return load_image(f"{scheme.lower()}://{rest}")
    if source[:5].lower() == "data:":
        return _decode(_data_url_bytes(source), max_bytes)
    if len(source) < 4096 and os.path.isfile(source):
        return _open_path(source, max_bytes)
    data = _base64_bytes(source)
    if not data:
        raise ValueError(f"no image found: {source[:80]!r} is not a URL, an existing file or base64")
    return _decode(data, max_bytes)


def _data_url_bytes(url: str) -> bytes:
    header, comma, body = url.partition(",")
    if not comma or not header[5:].lower().startswith("image/"):
        raise ValueError(f"a data URL of an image starts with 'data:image/<format>;base64,', got {url[:60]!r}")
    if header.lower().endswith(";base64"):
        data = _base64_bytes(urllib.parse.unquote(body))
        if data is None:
            raise ValueError(f"the data URL {url[:40]!r}... does not hold valid base64")
        return data
    return urllib.parse.unquote_to_bytes(body)


def _base64_bytes(text: str) -> bytes | None:
    text = "".join(text.split())
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def _open_path(path: str, max_bytes):
    if not os.path.isfile(path):
        raise ValueError(f"no image file at {path!r}")
    if max_bytes is not None and os.path.getsize(path) > max_bytes:
        raise ValueError(
            f"the image file {path!r} has {os.path.getsize(path)} bytes; at most {max_bytes} are accepted"
        )
    with open(path, "rb") as file:
        return _decode(file.read(), max_bytes)


def _decode(data: bytes, max_bytes):
    if not data:
        raise ValueError("the image is empty: it has no bytes")
    if max_bytes is not None and len(data) > max_bytes:
        raise ValueError(f"the image has more than {max_bytes} encoded bytes, which is the limit")
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"unsupported or damaged image data; accepted formats are {list(FORMATS)}") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"the image is damaged or too large: {error}") from error


def _check_size(width: int, height: int, max_side) -> None:
    if width < 1 or height < 1:
        raise ValueError(f"the image is empty: {width} x {height} pixels")
    if max_side is not None and max(width, height) > max_side:
        raise ValueError(f"the image has {width} x {height} pixels; a side may have at most {max_side}")


def array_to_pil(array: np.ndarray, channels_first: bool | None = None):
    """Turn an array into a PIL image.

    Args:
        array (`np.ndarray` of shape `[H, W]`, `[H, W, C]` or `[C, H, W]`):
            uint8, uint16 (the upper byte counts), bool, or floats from 0 to 1; C from 1 to 4 means grey, grey and
            alpha, RGB, RGBA.
        channels_first (`bool`, *optional*): where the channels are; None finds out, and prefers the first axis.

    Returns:
        `PIL.Image.Image` of mode L, LA, RGB or RGBA.

    Raises:
        ValueError: for other shapes, types and values.
    """
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise ValueError(f"an image array must be [H, W], [H, W, C] or [C, H, W] and not empty, got {array.shape}")
    if array.ndim == 3:
        first = array.shape[0] in (1, 2, 3, 4) if channels_first is None else channels_first
        if first:
            array = np.moveaxis(array, 0, -1)
        if array.shape[-1] not in (1, 2, 3, 4):
            raise ValueError(f"an image array must have 1 to 4 channels, got the shape {array.shape}")
        if array.shape[-1] == 1:
            array = array[..., 0]
    return Image.fromarray(np.ascontiguousarray(_bytes_of(array)))


def _bytes_of(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if array.dtype == np.uint16:
        return (array >> 8).astype(np.uint8)
    if np.issubdtype(array.dtype, np.integer):
        if array.min() < 0 or array.max() > 255:
            raise ValueError(f"an image array of type {array.dtype} must hold values from 0 to 255")
        return array.astype(np.uint8)
    if np.issubdtype(array.dtype, np.floating):
        if not (array.min() >= 0 and array.max() <= 1):
            raise ValueError(f"an image array of type {array.dtype} must hold values from 0 to 1")
        return np.rint(array * 255).astype(np.uint8)
    raise ValueError(f"an image array must hold integers, bools or floats, got {array.dtype}")
