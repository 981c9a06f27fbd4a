"""Masks: arrays (number, height, width) from 0 to 1."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.workflows.kinds import MAX_SIDE, Input, Kind, Output, boolean, choice, integer, link, number
from deployments.workflows.records import Refused
from deployments.workflows.resizing import bounded, resized_masks

Array: TypeAlias = npt.NDArray[np.float32]

_CHANNELS: Final = ("red", "green", "blue", "alpha")
_OPERATIONS: Final = ("multiply", "add", "subtract", "and", "or", "xor")


def _solid(value: float, width: int, height: int) -> tuple[Array]:
    return (np.full(bounded(1, height, width), value, np.float32),)


def _to_image(mask: Array) -> tuple[Array]:
    return (np.repeat(mask[..., None], 3, -1),)


def _of_channel(image: Array, channel: str) -> tuple[Array]:
    place = _CHANNELS.index(channel)
    if place >= image.shape[-1]:
        raise Refused(f"the image has no channel {channel}", "channel")
    return (image[..., place],)


def _of_color(image: Array, color: int) -> tuple[Array]:
    whole = np.rint(np.clip(image, 0, 1) * 255).astype(np.int64)
    return ((whole[..., 0] << 16 | whole[..., 1] << 8 | whole[..., 2] == color).astype(np.float32),)


def _crop(mask: Array, x: int, y: int, width: int, height: int) -> tuple[Array]:
    return (mask[:, y : y + height, x : x + width],)


def _composite(destination: Array, source: Array, x: int, y: int, operation: str) -> tuple[Array]:
    result = destination.copy()
    part = result[:, y : y + source.shape[1], x : x + source.shape[2]]
    over = source[:, : part.shape[1], : part.shape[2]]
    match operation:
        case "multiply":
            found = part * over
        case "add":
            found = part + over
        case "subtract":
            found = part - over
        case _:
            joins = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
            found = joins[operation](np.rint(part).astype(bool), np.rint(over).astype(bool)).astype(np.float32)
    part[...] = found
    return (np.clip(result, 0, 1),)


def _feather(mask: Array, left: int, top: int, right: int, bottom: int) -> tuple[Array]:
    result = mask.copy()
    _, height, width = result.shape
    for axis, size, begin, end in ((2, width, left, right), (1, height, top, bottom)):
        fade = np.ones(size, np.float32)
        begin, end = min(begin, size), min(end, size)
        fade[:begin] *= np.arange(1, begin + 1, dtype=np.float32) / max(begin, 1)
        fade[size - end :] *= np.arange(end, 0, -1, dtype=np.float32) / max(end, 1)
        result *= fade[None, None, :] if axis == 2 else fade[None, :, None]
    return (result,)


def _grow(mask: Array, expand: int, tapered_corners: bool) -> tuple[Array]:
    """Dilate by a cross or a square, or erode where `expand` is negative, once for each pixel."""
    result = mask
    farthest = np.minimum if expand < 0 else np.maximum
    height, width = mask.shape[1:]
    for _ in range(min(abs(expand), height + width)):  # more of them change nothing
        padded = np.pad(result, ((0, 0), (1, 1), (1, 1)), mode="edge")
        grown = result
        for dy in range(3):
            for dx in range(3):
                if not tapered_corners or 1 in (dx, dy):
                    grown = farthest(grown, padded[:, dy : dy + height, dx : dx + width])
        if np.array_equal(grown, result):
            break
        result = grown
    return (result,)


def _threshold(mask: Array, value: float) -> tuple[Array]:
    return ((mask > value).astype(np.float32),)


def _join_alpha(image: Array, alpha: Array) -> tuple[Array]:
    _, height, width, _ = image.shape
    soft = 1 - resized_masks(alpha, width, height, "bilinear")
    number = max(len(image), len(soft))
    colors = np.take(image, np.minimum(np.arange(number), len(image) - 1), 0)
    soft = np.take(soft, np.minimum(np.arange(number), len(soft) - 1), 0)
    return (np.concatenate([colors[..., :3], soft[..., None]], -1),)


def _split_alpha(image: Array) -> tuple[Array, Array]:
    soft = image[..., 3] if image.shape[-1] > 3 else np.ones(image.shape[:3], np.float32)
    return image[..., :3], 1 - soft


def _side(name: str, default: int = 0) -> Input:
    return integer(name, default)


_MASK: Final = link("mask", "MASK")
_IMAGE: Final = link("image", "IMAGE")
_OUT: Final = (Output("MASK"),)

MASKS: Final = (
    Kind("SolidMask", (number("value", 1.0), _side("width", 512), _side("height", 512)), _OUT, _solid),
    Kind("InvertMask", (_MASK,), _OUT, lambda mask: (1 - mask,)),
    Kind("MaskToImage", (_MASK,), (Output("IMAGE"),), _to_image),
    Kind("ImageToMask", (_IMAGE, choice("channel", _CHANNELS)), _OUT, _of_channel),
    Kind("ImageColorToMask", (_IMAGE, integer("color", 0, 0, 0xFFFFFF)), _OUT, _of_color),
    Kind("CropMask", (_MASK, _side("x"), _side("y"), _side("width", 512), _side("height", 512)), _OUT, _crop),
    Kind(
        "MaskComposite",
        (
            *(link("destination", "MASK"), link("source", "MASK"), _side("x"), _side("y")),
            choice("operation", _OPERATIONS),
        ),
        _OUT,
        _composite,
    ),
    Kind("FeatherMask", (_MASK, *(_side(name) for name in ("left", "top", "right", "bottom"))), _OUT, _feather),
    Kind(
        "GrowMask",
        (_MASK, integer("expand", 0, -MAX_SIDE, MAX_SIDE), boolean("tapered_corners", True)),
        _OUT,
        _grow,
    ),
    Kind("ThresholdMask", (_MASK, number("value", 0.5)), _OUT, _threshold),
    Kind("JoinImageWithAlpha", (_IMAGE, link("alpha", "MASK")), (Output("IMAGE"),), _join_alpha),
    Kind("SplitImageWithAlpha", (_IMAGE,), (Output("IMAGE"), Output("MASK")), _split_alpha),
)
