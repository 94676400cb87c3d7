"""Image processor of DeepSeek-V4.1: pixels to patches, and the plan of the 3x3 pixel-unshuffle. Needs only PIL."""

from collections.abc import Mapping

import numpy as np
from PIL import Image
from transformers.configuration_utils import PreTrainedConfig
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.processing_utils import ImagesKwargs

from .image_layout import (
    DETAILS,
    cell_grid,
    count_image_tokens,
    fit_box,
    low_detail_size,
    plan_resize,
    unshuffle_index,
)
from .image_sources import MAX_BYTES, MAX_IMAGES, MAX_SIDE, open_image

_MODULE = "image_processing_deepseek_v41"

COLOR_RULES = ("api", "reference")
# Keys of `vision_config` in config.json that the image processor shares with the model.
_VISION_KEYS = ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels", "max_wh_ratio")


class Dsv41ImageProcessorKwargs(ImagesKwargs, total=False):
    r"""
    patch_size (`int`, *optional*, defaults to 14):
        Side of a patch in pixels.
    downsample_ratio (`int`, *optional*, defaults to 3):
        Side of a cell in patches; each cell becomes one token.
    max_image_tokens (`int`, *optional*, defaults to 1024):
        Limit of prompt tokens of an image, its newline, start and end tokens included.
    min_pixels (`int`, *optional*, defaults to 295936):
        Area in pixels up to which small images are enlarged.
    max_wh_ratio (`float`, *optional*):
        Images that are wider than this times their height are stretched to it. None: no limit.
    padding_color (`list[int]`, *optional*, defaults to `[127, 127, 127]`):
        RGB color around an image whose aspect is not that of its target.
    detail (`str` or `list[str]`, *optional*, defaults to `"high"`):
        Detail level, one for all images or one each: "low" reduces the long side to 512 pixels first; "high",
        "original" and "auto" mean the same.
    color_rule (`str`, *optional*, defaults to `"api"`):
        "api": transparency over white, 16-bit grey by its upper byte, as the official API does. "reference":
        transparency dropped, 16-bit grey clipped at 255, as the checkpoint's own code does.
    apply_exif_orientation (`bool`, *optional*, defaults to `False`):
        Turn images as their EXIF orientation says.
    max_side (`int`, *optional*, defaults to 8192):
        Limit of the sides of an image in pixels.
    max_bytes (`int`, *optional*, defaults to 33554432):
        Limit of the encoded bytes of an image.
    max_images (`int`, *optional*, defaults to 600):
        Limit of the images of one request; a nested list holds one request in each of its lists.
    """

    patch_size: int
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None
    padding_color: list[int] | tuple[int, ...]
    detail: str | list[str] | tuple[str, ...]
    color_rule: str
    apply_exif_orientation: bool
    max_side: int | None
    max_bytes: int | None
    max_images: int | None


class Dsv41ImageProcessor(PilBackend):
    r"""Cuts images into patches and plans how the model gathers them into tokens.

    Implements the image preprocessing of DeepSeek-V4.1: the one-pass sizing rule, bicubic resizing (PIL, antialiased)
    into a padded frame, values from -1 to 1, patches in reading order.

    Calling it with images returns:

    - `pixel_values` of shape `[patches, 3, p, p]`, float32: the patches of all images, row by row, image after image.
      Rounded to bfloat16 they are the reference's patches bit for bit.
    - `image_grid_hw` of shape `[images, 2]`, int64: rows and columns of patches.
    - `image_unshuffle_index` of shape `[content tokens, d * d]`, int64: for every content token the patches of its
      cell, in reading order, as positions among the patches of its own image; -1 means zeros.

    Images may be PIL images, arrays, tensors, bytes, open files, paths, URLs, or lists of these, nested once.
    """

    valid_kwargs = Dsv41ImageProcessorKwargs
    model_input_names = ["pixel_values", "image_grid_hw", "image_unshuffle_index"]

    do_resize = True
    do_rescale = True
    do_normalize = True
    do_convert_rgb = True
    resample = Image.Resampling.BICUBIC
    rescale_factor = 1 / 255
    image_mean = [0.5, 0.5, 0.5]
    image_std = [0.5, 0.5, 0.5]
    patch_size = 14
    downsample_ratio = 3
    max_image_tokens = 1024
    min_pixels = 544 * 544
    max_wh_ratio = None
    padding_color = [127, 127, 127]
    detail = "high"
    color_rule = "api"
    apply_exif_orientation = False
    max_side = MAX_SIDE
    max_bytes = MAX_BYTES
    max_images = MAX_IMAGES

    @classmethod
    def get_image_processor_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Read the settings; a folder in the released layout has them in the `vision_config` of its config.json."""
        try:
            return super().get_image_processor_dict(pretrained_model_name_or_path, **dict(kwargs))
        except OSError:
            config, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **dict(kwargs))
            if not config:
                raise
        vision = config.get("vision_config") or {}
        unused = ("cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "subfolder")
        rest = {key: value for key, value in kwargs.items() if key not in unused and not key.startswith("_")}
        return {key: vision[key] for key in _VISION_KEYS if vision.get(key) is not None}, rest

    def to_dict(self) -> dict:
        # Always the own entry and no other, so that saved and loaded settings are the same, alone and in a processor.
        return {**super().to_dict(), "auto_map": {"AutoImageProcessor": f"{_MODULE}.{type(self).__name__}"}}

    def fetch_images(self, image_url_or_urls):
        """Open images, or lists of them, as PIL images."""
        if isinstance(image_url_or_urls, (list, tuple)):
            return [self.fetch_images(item) for item in image_url_or_urls]
        return open_image(image_url_or_urls, self.max_side, self.max_bytes, bool(self.apply_exif_orientation))

    def get_resized_size(self, height: int, width: int, images_kwargs: dict | None = None) -> tuple[int, int]:
        """Return the (height, width) in pixels to which an image of this size is resized."""
        settings = self._settings(images_kwargs or {})
        plan = self._plan(height, width, settings["detail"] or "high", settings)[1]
        return plan.height, plan.width

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict | None = None) -> int:
        """Return how many patches an image of this size gives. Part of the interface that vLLM uses."""
        patch_size = self._settings(images_kwargs or {})["patch_size"]
        height, width = self.get_resized_size(height, width, images_kwargs)
        return (height // patch_size) * (width // patch_size)

    def get_number_of_image_tokens(self, height: int, width: int, images_kwargs: dict | None = None) -> int:
        """Return how many prompt tokens an image of this size takes, newline, start and end tokens included."""
        settings = self._settings(images_kwargs or {})
        size = self.get_resized_size(height, width, images_kwargs)
        return count_image_tokens(*cell_grid(*size, settings["patch_size"], settings["downsample_ratio"]))

    def _settings(self, overrides: Mapping) -> dict:
        return {name: overrides.get(name, getattr(self, name)) for name in self._valid_kwargs_names}

    @staticmethod
    def _plan(height: int, width: int, detail: str, settings: Mapping):
        if detail not in DETAILS:
            raise ValueError(f"detail must be one of {list(DETAILS)}, got {detail!r}")
        size = low_detail_size(height, width) if detail == "low" else (height, width)
        return size, plan_resize(*size, **{key: settings[key] for key in _VISION_KEYS})

    def _validate_preprocess_kwargs(self, color_rule=None, **kwargs):
        # A start, one content token, a newline and an end: fewer tokens hold no image.
        least = {"patch_size": 1, "downsample_ratio": 1, "max_image_tokens": 4, "min_pixels": 0}
        for name, smallest in least.items():
            value = kwargs.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise ValueError(f"{name} must be an integer of at least {smallest}, got {value!r}")
        if color_rule not in COLOR_RULES:
            raise ValueError(f"color_rule must be one of {list(COLOR_RULES)}, got {color_rule!r}")
        if kwargs.get("do_normalize") and (kwargs.get("image_mean") is None or kwargs.get("image_std") is None):
            raise ValueError("do_normalize=True needs image_mean and image_std")

    def _preprocess_image_like_inputs(self, images, *args, return_tensors=None, **settings) -> BatchFeature:
        images = flatten_images(images, settings["max_images"])
        details = settings["detail"]
        details = [details or "high"] * len(images) if isinstance(details, str) or details is None else list(details)
        if len(details) != len(images):
            raise ValueError(f"detail must be one level or one for each image: got {len(details)} for {len(images)}")
        table = _value_table(settings)
        patches, grids, plans = [], [], []
        for image, detail in zip(images, details, strict=True):
            pixels = self._resized_pixels(self._opened(image, settings), detail, settings)
            values, grid = _cut_patches(pixels, settings["patch_size"], table)
            patches.append(values)
            grids.append(grid)
            plans.append(unshuffle_index(*grid, settings["downsample_ratio"]))
        data = {
            "pixel_values": np.concatenate(patches),
            "image_grid_hw": np.array(grids, dtype=np.int64),
            "image_unshuffle_index": np.concatenate(plans),
        }
        return BatchFeature(data, tensor_type=return_tensors)

    @staticmethod
    def _opened(image, settings: Mapping):
        channels = settings.get("input_data_format")
        channels_first = None if channels is None else getattr(channels, "value", channels) == "channels_first"
        upright = bool(settings["apply_exif_orientation"])
        return open_image(image, settings["max_side"], settings["max_bytes"], upright, channels_first)

    def _resized_pixels(self, image, detail: str, settings: Mapping) -> np.ndarray:
        """Return the RGB pixels of the resized image, `[H, W, 3]` uint8."""
        (height, width), plan = self._plan(image.height, image.width, detail, settings)
        image = to_rgb(image, settings["color_rule"])
        if not settings["do_resize"]:
            if image.height % settings["patch_size"] or image.width % settings["patch_size"]:
                raise ValueError(
                    f"do_resize=False needs sides that are multiples of {settings['patch_size']}, "
                    f"got {image.width} x {image.height}"
                )
            return np.asarray(image)
        if (image.height, image.width) != (height, width):
            image = image.resize((width, height), settings["resample"])
        top, left, content_height, content_width = fit_box(height, width, plan)
        if (image.height, image.width) != (content_height, content_width):
            image = image.resize((content_width, content_height), settings["resample"])
        if (content_height, content_width) == (plan.height, plan.width):
            return np.asarray(image)
        frame = np.empty((plan.height, plan.width, 3), dtype=np.uint8)
        frame[:] = np.array(settings["padding_color"], dtype=np.uint8)
        frame[top : top + content_height, left : left + content_width] = np.asarray(image)
        return frame


def to_rgb(image, color_rule: str = "api"):
    """Convert a PIL image of any mode to RGB.

    Args:
        image (`PIL.Image.Image`): any mode.
        color_rule (`str`): "api" puts transparency over white and takes the upper byte of 16-bit grey; "reference"
            drops transparency and clips 16-bit grey at 255.

    Returns:
        `PIL.Image.Image` of mode RGB.
    """
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64)
        grey = np.clip(grey, 0, 65535) >> 8 if color_rule == "api" else np.clip(grey, 0, 255)
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBa", "La"):
        # Premultiplied alpha: PIL converts these modes only to their plain forms.
        image = image.convert(image.mode.upper())
    if color_rule == "api" and (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def flatten_images(images, max_images: int | None = None) -> list:
    """Bring images, lists of images, batched arrays and lists of lists into one flat list.

    Args:
        images (`ImageInput`): one image, a list of images (one request), or a list with a list for each request.
        max_images (`int`, *optional*): limit of the images of one request; None: no limit.

    Raises:
        ValueError: if there is no image at all, or a request has too many.
    """
    if hasattr(images, "shape") and len(images.shape) == 4:
        images = list(images)
    if not isinstance(images, (list, tuple)):
        return [images]
    if not images:
        raise ValueError("images is empty; pass at least one image")
    requests = images if any(isinstance(item, (list, tuple)) for item in images) else [images]
    flat = []
    for request in requests:
        request = list(request) if isinstance(request, (list, tuple)) else [request]
        if max_images is not None and len(request) > max_images:
            raise ValueError(f"one request has {len(request)} images; at most {max_images} are accepted")
        flat.extend(request)
    if not flat:
        raise ValueError("images holds only empty lists; pass at least one image")
    return flat


def _value_table(settings: Mapping) -> np.ndarray:
    """The value of every byte in each channel, `[3, 256]` float32: three lookups are cheaper than three operations."""
    values = np.tile(np.arange(256, dtype=np.float32), (3, 1))
    if settings["do_rescale"]:
        factor = settings["rescale_factor"]
        # Division by 255, not multiplication by its rounded inverse: the goldens are bit-exact.
        values = values / np.float32(255) if factor == 1 / 255 else values * np.float32(factor)
    if settings["do_normalize"]:
        mean = np.broadcast_to(np.asarray(settings["image_mean"], dtype=np.float32), (3,))[:, None]
        std = np.broadcast_to(np.asarray(settings["image_std"], dtype=np.float32), (3,))[:, None]
        values = (values - mean) / std
    return values


def _cut_patches(pixels: np.ndarray, patch_size: int, table: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Cut pixels `[H, W, 3]` uint8 into patches `[rows * columns, 3, p, p]` float32, in reading order."""
    rows, columns = pixels.shape[0] // patch_size, pixels.shape[1] // patch_size
    blocks = pixels.reshape(rows, patch_size, columns, patch_size, 3).transpose(0, 2, 4, 1, 3)
    blocks = blocks.reshape(rows * columns, 3, patch_size, patch_size)
    out = np.empty(blocks.shape, dtype=np.float32)
    for channel in range(3):
        out[:, channel] = table[channel][blocks[:, channel]]
    return out, (rows, columns)
