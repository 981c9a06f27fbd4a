"""Images from uploaded files, and to saved ones."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.workflows.backend import Backend, Report
from deployments.workflows.kinds import Choice, Input, Kind, Output, boolean, choice, dynamic, link, text
from deployments.workflows.records import Refused
from deployments.workflows.resizing import bounded
from deployments.workflows.values import PENDING, Image, Later, Mask, Shown

Array: TypeAlias = npt.NDArray[np.float32]

_CHANNELS: Final = ("alpha", "red", "green", "blue")
_NO_MASK: Final = 64  # the side of the mask of an image without transparency
_MAX_PREFIX: Final = 200


def read_image(file: bytes) -> tuple[Array, Array]:
    """Return the images of a file, RGB turned as its EXIF says, and their masks: 1 where they are transparent."""
    import PIL.Image
    from PIL import ImageOps, ImageSequence

    images: list[Array] = []
    masks: list[Array] = []
    try:
        with PIL.Image.open(io.BytesIO(file)) as opened:
            number = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)
            bounded(number, opened.height, opened.width)
            for frame in ImageSequence.Iterator(opened):
                turned = ImageOps.exif_transpose(frame)
                if turned.mode.startswith("I"):
                    turned = turned.point(lambda value: value * (1 / 255))
                if images and turned.size != (images[0].shape[1], images[0].shape[0]):
                    continue
                images.append(_floats(turned.convert("RGB")))
                if "A" in turned.getbands():
                    masks.append(1 - _floats(turned.getchannel("A")))
                elif turned.mode == "P" and "transparency" in turned.info:
                    masks.append(1 - _floats(turned.convert("RGBA").getchannel("A")))
                else:
                    masks.append(np.zeros((_NO_MASK, _NO_MASK), np.float32))
                if len(images) == number:
                    break
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise Refused(f"the file is no image that can be read: {error}", "image") from None
    return np.stack(images), np.stack(masks)


def _floats(image: Any) -> Array:
    return np.asarray(image, np.uint8).astype(np.float32) / np.float32(255)


def as_pixels(images: Any) -> list[npt.NDArray[np.uint8]]:
    """Return images as ComfyUI's SaveImage has them: 255 times the value, truncated."""
    if images.dtype == np.uint8:  # frames of a video
        return list(images)
    return list(np.clip(255.0 * images, 0, 255).astype(np.uint8))


def _load(image: str) -> Later:
    async def act(backend: Backend, report: Report) -> tuple[Array, Array]:
        return await asyncio.to_thread(read_image, await backend.read_input(image))

    return Later(act, (PENDING, PENDING))


def _load_mask(image: str, channel: str) -> Later:
    async def act(backend: Backend, report: Report) -> tuple[Array]:
        colors, mask = await asyncio.to_thread(read_image, await backend.read_input(image))
        if channel == "alpha":
            return (mask,)
        return (colors[..., ("red", "green", "blue").index(channel)],)

    return Later(act, (PENDING,))


async def saved(
    backend: Backend, images: Any, prefix: str, type: Literal["output", "temp"] = "output"
) -> Sequence[dict[str, str]]:
    """Save images and return what pages and histories list of them."""
    files = await backend.save(await asyncio.to_thread(as_pixels, images), prefix, type)
    return [{"filename": one.filename, "subfolder": one.subfolder, "type": one.type} for one in files]


def _save(images: Image, filename_prefix: str = "ComfyUI") -> Later:
    if len(filename_prefix) > _MAX_PREFIX:
        raise Refused(f"a prefix of {len(filename_prefix)} characters: at most {_MAX_PREFIX}", "filename_prefix")

    async def act(backend: Backend, report: Report) -> Shown:
        return Shown((images,), {"images": await saved(backend, images, filename_prefix)})

    return Later(act, (images,))


def _save_as(images: Image, filename_prefix: str, format: Choice, embed_workflow: bool = True) -> Later:
    depth = format.values.get("bit_depth", "8-bit")
    if format.name != "png" or depth != "8-bit":
        raise Refused(f"{format.name} of {depth}: images are saved as PNG of 8 bits", "format")
    return _save(images, filename_prefix)


def _preview(images: Image) -> Later:
    async def act(backend: Backend, report: Report) -> Shown:
        return Shown((images,), {"images": await saved(backend, images, "ComfyUI_temp", "temp")})

    return Later(act, (images,))


def _preview_mask(mask: Mask) -> Later:
    async def act(backend: Backend, report: Report) -> Shown:
        assert isinstance(mask, np.ndarray)
        shown = np.repeat(mask[..., None], 3, -1)
        return Shown((), {"images": await saved(backend, shown, "ComfyUI_temp", "temp")})

    return Later(act, ())


def _compare(image_a: Image | None = None, image_b: Image | None = None, **view: Any) -> Later:
    async def act(backend: Backend, report: Report) -> Shown:
        sides = {"a_images": image_a, "b_images": image_b}
        shown = {
            name: await saved(backend, side, "ComfyUI_temp", "temp") for name, side in sides.items() if side is not None
        }
        return Shown((), shown)

    return Later(act, ())


_PREFIX: Final = text("filename_prefix", "ComfyUI")
_SPACE: Final = choice("colorspace", ("sRGB", "Raw/Data", "Linear", "HDR"), required=False)
_FORMATS: Final = {
    "png": (choice("bit_depth", ("8-bit", "16-bit"), required=False), _SPACE),
    "avif": (choice("bit_depth", ("8-bit", "10-bit", "12-bit"), required=False), _SPACE),
    "exr": (choice("bit_depth", ("16-bit (half-float)", "16-bit", "32-bit"), required=False), _SPACE),
}
_FILE: Final = Input("image", "COMBO")
_IMAGES: Final = replace(link("images", "IMAGE"), takes_bytes=True)


_HANDED_ON: Final = (Output("IMAGE", "images"),)


def _output(name: str, inputs: tuple[Input, ...], function: Any, outputs: tuple[Output, ...] = ()) -> Kind:
    return Kind(name, inputs, outputs, function, is_output=True, is_opaque=True, category="image")


FILES: Final = (
    Kind("LoadImage", (_FILE,), (Output("IMAGE"), Output("MASK")), _load, category="image"),
    Kind("LoadImageOutput", (_FILE,), (Output("IMAGE"), Output("MASK")), _load, category="image"),
    Kind("LoadImageMask", (_FILE, choice("channel", _CHANNELS)), (Output("MASK"),), _load_mask, category="mask"),
    _output("SaveImage", (_IMAGES, _PREFIX), _save, _HANDED_ON),
    _output(
        "SaveImageAdvanced",
        (_IMAGES, _PREFIX, dynamic("format", _FORMATS), boolean("embed_workflow", True, required=False)),
        _save_as,
        _HANDED_ON,
    ),
    _output("PreviewImage", (_IMAGES,), _preview, _HANDED_ON),
    _output("MaskPreview", (link("mask", "MASK"),), _preview_mask),
    _output(
        "ImageCompare",
        (link("image_a", "IMAGE", required=False), link("image_b", "IMAGE", required=False)),
        _compare,
    ),
)
