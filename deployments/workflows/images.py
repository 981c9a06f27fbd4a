"""Images: made, scaled, cut, joined. Arrays (number, height, width, channels) from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.workflows.kinds import (
    MAX_SIDE,
    Choice,
    Input,
    Kind,
    Output,
    boolean,
    choice,
    dynamic,
    growing,
    integer,
    link,
    number,
)
from deployments.workflows.resizing import (
    METHODS,
    bounded,
    longer_side_scaled,
    pixels_scaled,
    resized,
    resized_masks,
    shorter_side_scaled,
)

Array: TypeAlias = npt.NDArray[np.float32]

_CROPS: Final = ("disabled", "center")
_MAX_BATCH: Final = 4_096
# The sizes of about a megapixel that Flux Kontext was trained with.
KONTEXT_SIZES: Final = (
    *((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104)),
    (1024, 1024),
    *((1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688), (1568, 672)),
)
_COLORS: Final = {
    "white": (1.0, 1.0, 1.0),
    "black": (0.0, 0.0, 0.0),
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
}


def _empty(width: int, height: int, batch_size: int, color: int) -> tuple[Array]:
    bounded(batch_size, height, width)
    shade = np.array([(color >> shift) & 0xFF for shift in (16, 8, 0)], np.float32) / np.float32(255)
    return (np.broadcast_to(shade, (batch_size, height, width, 3)).copy(),)


def _scale(image: Array, upscale_method: str, width: int, height: int, crop: str) -> tuple[Array]:
    if width == 0 and height == 0:
        return (image,)
    _, old_height, old_width, _ = image.shape
    width = width or max(1, round(old_width * height / old_height))
    height = height or max(1, round(old_height * width / old_width))
    return (resized(image, width, height, upscale_method, crop),)


def _scale_by(image: Array, upscale_method: str, scale_by: float) -> tuple[Array]:
    _, height, width, _ = image.shape
    return (resized(image, round(width * scale_by), round(height * scale_by), upscale_method),)


def _scale_to_pixels(image: Array, upscale_method: str, megapixels: float, resolution_steps: int = 1) -> tuple[Array]:
    _, height, width, _ = image.shape
    scale = math.sqrt(megapixels * 1024 * 1024 / (width * height))
    new = [round(side * scale / resolution_steps) * resolution_steps for side in (width, height)]
    return (resized(image, new[0], new[1], upscale_method),)


def _scale_to_side(image: Array, upscale_method: str, largest_size: int) -> tuple[Array]:
    _, height, width, _ = image.shape
    return (resized(image, *longer_side_scaled(width, height, largest_size), upscale_method),)


def _scale_for_kontext(image: Array) -> tuple[Array]:
    _, height, width, _ = image.shape
    _, new_width, new_height = min((abs(width / height - w / h), w, h) for w, h in KONTEXT_SIZES)
    return (resized(image, new_width, new_height, "lanczos", "center"),)


def _resize(input: Array, resize_type: Choice, scale_method: str) -> tuple[Array]:
    images = input if input.ndim == 4 else input[..., None]
    given = resize_type.values
    _, height, width, _ = images.shape
    crop = str(given.get("crop", "disabled"))
    size: tuple[int, int]
    match resize_type.name:
        case "scale by multiplier":
            size = round(width * given["multiplier"]), round(height * given["multiplier"])
        case "scale longer dimension":
            size = longer_side_scaled(width, height, given["longer_size"])
        case "scale shorter dimension":
            size = shorter_side_scaled(width, height, given["shorter_size"])
        case "scale total pixels":
            size = pixels_scaled(width, height, given["megapixels"], given.get("multiple", 1))
        case "match size":
            size = given["match"].shape[2], given["match"].shape[1]
        case "scale to multiple":
            found = _to_multiple(images, given["multiple"], scale_method)
            return (found if input.ndim == 4 else found[..., 0],)
        case _:  # one side or both; the other follows
            size = given.get("width", 0), given.get("height", 0)
    if size == (0, 0):
        return (input,)
    wide, high = size[0] or max(1, round(width * size[1] / height)), size[1] or max(1, round(height * size[0] / width))
    found = resized(images, wide, high, scale_method, crop)
    return (found if input.ndim == 4 else found[..., 0],)


def _to_multiple(images: Array, multiple: int, method: str) -> Array:
    _, height, width, _ = images.shape
    wide, high = width // multiple * multiple, height // multiple * multiple
    if multiple <= 1 or not wide or not high or (wide, high) == (width, height):
        return images
    if wide / width >= high / height:
        size = wide, max(math.ceil(height * (wide / width)), high)
    else:
        size = max(math.ceil(width * (high / height)), wide), high
    x, y = (size[0] - wide) // 2, (size[1] - high) // 2
    return resized(images, *size, method)[:, y : y + high, x : x + wide]


def _resize_and_pad(
    image: Array, target_width: int, target_height: int, padding_color: str, interpolation: str
) -> tuple[Array]:
    count, height, width, channels = image.shape
    scale = min(target_width / width, target_height / height)
    wide, high = int(width * scale), int(height * scale)
    bounded(count, target_height, target_width)
    shade = 0.0 if padding_color == "black" else 1.0
    result = np.full((count, target_height, target_width, channels), shade, np.float32)
    y, x = (target_height - high) // 2, (target_width - wide) // 2
    result[:, y : y + high, x : x + wide] = resized(image, wide, high, interpolation)
    return (result,)


def _crop(image: Array, width: int, height: int, x: int, y: int) -> tuple[Array]:
    x, y = min(x, image.shape[2] - 1), min(y, image.shape[1] - 1)
    return (image[:, y : y + height, x : x + width],)


def _flip(image: Array, flip_method: str) -> tuple[Array]:
    return (np.flip(image, 1 if flip_method.startswith("x") else 2),)


def _rotate(image: Array, rotation: str) -> tuple[Array]:
    return (np.rot90(image, {"90": 1, "18": 2, "27": 3}.get(rotation[:2], 0), (2, 1)),)


def _with_channels(images: Array, channels: int) -> Array:
    lacking = channels - images.shape[-1]
    return images if lacking <= 0 else np.pad(images, ((0, 0), (0, 0), (0, 0), (0, lacking)), constant_values=1.0)


def joined(images: Sequence[Array]) -> Array:
    """Return one batch of images; those of another size than the first one are cropped and scaled to it."""
    channels = max(one.shape[-1] for one in images)
    _, height, width, _ = images[0].shape
    bounded(sum(map(len, images)), height, width)
    fitted = [_with_channels(one, channels) for one in images]
    return np.concatenate([resized(one, width, height, "bilinear", "center") for one in fitted])


def _batch(images: Mapping[str, npt.NDArray[Any]]) -> tuple[npt.NDArray[Any]]:
    given = list(images.values())
    if all(one.dtype == np.uint8 and one.shape[1:] == given[0].shape[1:] for one in given):  # frames of videos
        bounded(sum(map(len, given)), *given[0].shape[1:3])
        return (np.concatenate(given),)
    return (joined([one.astype(np.float32) / np.float32(255) if one.dtype == np.uint8 else one for one in given]),)


def _from_batch(image: Array, batch_index: int, length: int) -> tuple[Array]:
    first = max(0, min(len(image) - 1, batch_index + len(image) if batch_index < 0 else batch_index))
    return (image[first : first + length],)


def _repeat(image: Array, amount: int) -> tuple[Array]:
    bounded(len(image) * amount, *image.shape[1:3])
    if len(image) == 1:  # a view takes the bytes of one
        return (np.broadcast_to(image, (amount, *image.shape[1:])),)
    return (np.tile(image, (amount, 1, 1, 1)),)


def _stitch(
    image1: Array,
    direction: str,
    match_image_size: bool,
    spacing_width: int,
    spacing_color: str,
    image2: Array | None = None,
) -> tuple[Array]:
    if image2 is None:
        return (image1,)
    is_wide = direction in ("left", "right")
    count = max(len(image1), len(image2))
    pair = [np.concatenate([one, np.repeat(one[-1:], count - len(one), 0)]) for one in (image1, image2)]
    shade = _COLORS[spacing_color]
    if match_image_size:
        (_, h1, w1, _), (_, h2, w2, _) = (one.shape for one in pair)
        wide, high = (int(h1 * (w2 / h2)), h1) if is_wide else (w1, int(w1 / (w2 / h2)))
        pair[1] = resized(pair[1], wide, high, "lanczos")
    else:
        side = max(one.shape[1 if is_wide else 2] for one in pair)
        fill = shade[0] if spacing_color in ("white", "black") else 0.0
        pair = [_centred(one, 1 if is_wide else 2, side, fill) for one in pair]
    channels = max(one.shape[-1] for one in pair)
    pair = [_with_channels(one, channels) for one in pair]
    if direction in ("left", "up"):
        pair.reverse()
    if spacing_width > 0:
        shape = list(pair[0].shape)
        shape[2 if is_wide else 1] = spacing_width + spacing_width % 2
        pair.insert(1, np.broadcast_to(np.array([*shade, 1.0][:channels], np.float32), shape).copy())
    axis = 2 if is_wide else 1
    sides = list(pair[0].shape[:3])
    sides[axis] = sum(one.shape[axis] for one in pair)
    bounded(*sides)
    return (np.concatenate(pair, axis),)


def _centred(images: Array, axis: int, side: int, fill: float) -> Array:
    lacking = side - images.shape[axis]
    pads = [(0, 0)] * 4
    pads[axis] = (lacking // 2, lacking - lacking // 2)
    return np.pad(images, pads, constant_values=fill)


def _pad_for_outpaint(
    image: Array, left: int, top: int, right: int, bottom: int, feathering: int
) -> tuple[Array, Array]:
    count, height, width, channels = image.shape
    bounded(count, height + top + bottom, width + left + right)
    result = np.full((count, height + top + bottom, width + left + right, channels), 0.5, np.float32)
    result[:, top : top + height, left : left + width] = image
    mask = np.ones(result.shape[1:3], np.float32)
    inner = np.zeros((height, width), np.float32)
    if feathering > 0 and feathering * 2 < height and feathering * 2 < width:
        # Only towards the sides that grow does the mask fade in; elsewhere the distance is as good as infinite.
        rows, columns = np.arange(height)[:, None], np.arange(width)[None, :]
        far = max(height, width)
        distance = np.minimum(
            np.minimum(rows if top else far, height - rows if bottom else far),
            np.minimum(columns if left else far, width - columns if right else far),
        )
        fade = (feathering - np.broadcast_to(distance, inner.shape)) / feathering
        inner = np.where(fade > 0, fade * fade, 0).astype(np.float32)
    mask[top : top + height, left : left + width] = inner
    return result, mask[None]


def _composite(
    destination: Array, source: Array, x: int, y: int, resize_source: bool, mask: Array | None = None
) -> tuple[Array]:
    count, height, width, channels = destination.shape
    over = _with_channels(source, channels)[..., :channels]
    if resize_source:
        over = resized(over, width, height, "bilinear")
    over = _as_many(over, count)
    if mask is None:
        soft = np.ones((1, *over.shape[1:3]), np.float32)
    else:
        soft = resized_masks(mask, over.shape[2], over.shape[1], "bilinear")
    soft = _as_many(soft, count)[..., None]
    x, y = min(x, width), min(y, height)
    wide, high = min(width - x, over.shape[2]), min(height - y, over.shape[1])
    over, soft = over[:, :high, :wide], soft[:, :high, :wide]
    result = destination.copy()
    place = (slice(None), slice(y, y + high), slice(x, x + wide))
    result[place] = soft * over + (1 - soft) * result[place]
    return (result,)


def _as_many(images: Array, number: int) -> Array:
    """Return so many images: repeated from the first one on, or fewer."""
    return np.take(images, np.arange(number) % len(images), 0)


def _blend(image1: Array, image2: Array, blend_factor: float, blend_mode: str) -> tuple[Array]:
    one, other = image1, resized(image2, image1.shape[2], image1.shape[1], "bicubic", "center")
    match blend_mode:
        case "normal":
            mixed = other
        case "multiply":
            mixed = one * other
        case "screen":
            mixed = 1 - (1 - one) * (1 - other)
        case "overlay":
            mixed = np.where(one <= 0.5, 2 * one * other, 1 - 2 * (1 - one) * (1 - other))
        case "difference":
            mixed = one - other
        case _:  # soft light
            bright = np.where(one <= 0.25, ((16 * one - 12) * one + 4) * one, np.sqrt(np.maximum(one, 0)))
            dark = one - (1 - 2 * other) * one * (1 - one)
            mixed = np.where(other <= 0.5, dark, one + (2 * other - 1) * (bright - one))
    return (np.clip(one * (1 - blend_factor) + mixed * blend_factor, 0, 1).astype(np.float32),)


def _size(image: Array) -> tuple[int, int, int]:
    return image.shape[2], image.shape[1], len(image)


def _invert(image: Array) -> tuple[Array]:
    return (1 - image,)


_IMAGE: Final = link("image", "IMAGE")
_BYTES: Final = replace(_IMAGE, takes_bytes=True)
_OUT: Final = (Output("IMAGE"),)
_METHOD: Final = choice("upscale_method", METHODS)
_CROP_CHOICE: Final = choice("crop", _CROPS)
_CENTRED: Final = choice("crop", _CROPS, "center")
_GROWN: Final = tuple(f"image{place}" for place in range(50))


def _side(name: str, default: int = 512, minimum: int = 0, maximum: int = MAX_SIDE) -> Input:
    return integer(name, default, minimum, maximum)


_RESIZE_TYPES: Final[Mapping[str, tuple[Input, ...]]] = {
    "scale dimensions": (_side("width"), _side("height"), _CENTRED),
    "scale by multiplier": (number("multiplier", 1.0, 0.01, 8.0),),
    "scale longer dimension": (_side("longer_size"),),
    "scale shorter dimension": (_side("shorter_size"),),
    "scale width": (_side("width"),),
    "scale height": (_side("height"),),
    "scale total pixels": (number("megapixels", 1.0, 0.01, 16.0), integer("multiple", 1, 1, required=False)),
    "match size": (link("match", "IMAGE,MASK"), _CENTRED),
    "scale to multiple": (_side("multiple", 8, 1),),
}

IMAGES: Final[tuple[Kind, ...]] = (
    Kind(
        "EmptyImage",
        (
            _side("width", 512, 1),
            _side("height", 512, 1),
            integer("batch_size", 1, 1, _MAX_BATCH),
            _side("color", 0, 0, 0xFFFFFF),
        ),
        _OUT,
        _empty,
    ),
    Kind("ImageScale", (_IMAGE, _METHOD, _side("width"), _side("height"), _CROP_CHOICE), _OUT, _scale),
    Kind("ImageScaleBy", (_IMAGE, _METHOD, number("scale_by", 1.0, 0.01, 8.0)), _OUT, _scale_by),
    Kind(
        "ImageScaleToTotalPixels",
        (
            *(_IMAGE, _METHOD, number("megapixels", 1.0, 0.01, 16.0)),
            integer("resolution_steps", 1, 1, 256, required=False),
        ),
        _OUT,
        _scale_to_pixels,
    ),
    Kind(
        "ImageScaleToMaxDimension",
        (_IMAGE, choice("upscale_method", METHODS, "area"), _side("largest_size")),
        _OUT,
        _scale_to_side,
    ),
    Kind("FluxKontextImageScale", (_IMAGE,), _OUT, _scale_for_kontext),
    Kind(
        "ResizeImageMaskNode",
        (link("input", "IMAGE,MASK"), dynamic("resize_type", _RESIZE_TYPES), choice("scale_method", METHODS, "area")),
        (Output("IMAGE,MASK", "resized"),),
        _resize,
    ),
    Kind(
        "ResizeAndPadImage",
        (
            *(_IMAGE, _side("target_width", 512, 1), _side("target_height", 512, 1)),
            choice("padding_color", ("white", "black")),
            choice("interpolation", METHODS, "area"),
        ),
        _OUT,
        _resize_and_pad,
    ),
    Kind(
        "ImageCrop",
        (_BYTES, _side("width", 512, 1), _side("height", 512, 1), _side("x", 0), _side("y", 0)),
        _OUT,
        _crop,
    ),
    Kind("ImageFlip", (_BYTES, choice("flip_method", ("x-axis: vertically", "y-axis: horizontally"))), _OUT, _flip),
    Kind(
        "ImageRotate", (_BYTES, choice("rotation", ("none", "90 degrees", "180 degrees", "270 degrees"))), _OUT, _rotate
    ),
    Kind("ImageInvert", (_IMAGE,), _OUT, _invert),
    Kind(
        "ImageBatch",
        tuple(replace(link(name, "IMAGE"), takes_bytes=True) for name in ("image1", "image2")),
        _OUT,
        lambda **images: _batch(images),
    ),
    Kind("BatchImagesNode", (growing("images", "IMAGE", _GROWN, takes_bytes=True),), _OUT, _batch),
    Kind(
        "ImageFromBatch",
        (_BYTES, integer("batch_index", 0, -MAX_SIDE, MAX_SIDE), integer("length", 1, 1, _MAX_BATCH)),
        _OUT,
        _from_batch,
    ),
    Kind("RepeatImageBatch", (_BYTES, integer("amount", 1, 1, _MAX_BATCH)), _OUT, _repeat),
    Kind(
        "ImageStitch",
        (
            *(link("image1", "IMAGE"), choice("direction", ("right", "down", "left", "up"))),
            *(boolean("match_image_size", True), integer("spacing_width", 0, 0, 1024)),
            *(choice("spacing_color", tuple(_COLORS)), link("image2", "IMAGE", required=False)),
        ),
        _OUT,
        _stitch,
    ),
    Kind(
        "ImagePadForOutpaint",
        (_IMAGE, *(_side(name, 0) for name in ("left", "top", "right", "bottom")), _side("feathering", 40)),
        (Output("IMAGE"), Output("MASK")),
        _pad_for_outpaint,
    ),
    Kind(
        "ImageCompositeMasked",
        (
            *(link("destination", "IMAGE"), link("source", "IMAGE"), _side("x", 0), _side("y", 0)),
            *(boolean("resize_source"), link("mask", "MASK", required=False)),
        ),
        _OUT,
        _composite,
    ),
    Kind(
        "ImageBlend",
        (
            *(link("image1", "IMAGE"), link("image2", "IMAGE"), number("blend_factor", 0.5)),
            choice("blend_mode", ("normal", "multiply", "screen", "overlay", "soft_light", "difference")),
        ),
        _OUT,
        _blend,
    ),
    Kind(
        "GetImageSize", (_BYTES,), (Output("INT", "width"), Output("INT", "height"), Output("INT", "batch_size")), _size
    ),
)
