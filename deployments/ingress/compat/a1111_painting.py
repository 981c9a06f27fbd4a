"""The inputs of an img2img request of the Stable Diffusion WebUI, and the images of its results: pure.

The mask is blurred, the image resized, cropped and filled, and the unmasked part is laid over the result, as the
WebUI does. Source: AUTOMATIC1111/stable-diffusion-webui, `modules/processing.py`, `masking.py` and `images.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter, ImageOps

from deployments.ingress.openai.uploads import DecodedImage

Pixels = npt.NDArray[np.uint8]
CROPPED, FILLED, LATENT = 1, 2, 3  # of `resize_mode`; 0 is plain
FROM_AROUND, ORIGINAL = 0, 1  # of `inpainting_fill`
MAX_BLUR: Final = 64
_OPAQUE_FROM: Final = 129
_CELL: Final = 8  # pixels of a latent
_COLUMNS: Final = 128  # that are blurred at a time
_WHITE: Final = (255, 255, 255)
# Radii at which the surroundings of a mask flow into it, and how often each is laid over: the wide ones below.
_FLOWS: Final = ((256, 1), (64, 1), (16, 2), (4, 4), (2, 2), (0, 1))


class Region(NamedTuple):
    """A part of an image: from the left and the top to the right and the bottom, in pixels."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def height(self) -> int:
        return self.bottom - self.top


@dataclass(frozen=True, slots=True)
class PaintOptions:
    """The options of an img2img request for its painted part; `padding` belongs to `only_masked`."""

    resize_mode: int = 0
    blur_x: int = 4
    blur_y: int = 4
    is_inverted: bool = False
    fill: int = FROM_AROUND
    only_masked: bool = True
    padding: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Painting:
    """The image that a request begins with, uint8 (height, width, 3), and its mask (height, width), if any.

    `overlay` (RGBA) is laid over the result, which belongs in its `region`.
    """

    image: Pixels
    mask: Pixels | None = None
    overlay: Image.Image | None = None
    region: Region | None = None

    def finished(self, made: Pixels) -> Pixels:
        """Return the final image of a result: in its region, with the kept part laid over."""
        if self.overlay is None:
            return made
        image = Image.fromarray(made)
        if self.region is not None:
            base = Image.new("RGBA", self.overlay.size)
            part = resized(CROPPED, image, self.region.width, self.region.height)
            base.paste(part, self.region[:2])
            image = base
        elif image.size != self.overlay.size:  # the model does not take these sides
            image = resized(0, image, *self.overlay.size)
        image = image.convert("RGBA")
        image.alpha_composite(self.overlay)
        return np.asarray(image.convert("RGB"))


def paint(image: DecodedImage, mask: DecodedImage | None, width: int, height: int, options: PaintOptions) -> Painting:
    """Return the image and mask that a request begins with. Transparent parts of an image are white.

    A mask with transparency paints its opaque part, as the WebUI's page draws it, any other its white part. If only
    the masked part is asked for, a mask that paints nothing is ignored.
    """
    flat = _flattened(image)
    if mask is None:
        return Painting(np.asarray(resized(options.resize_mode, flat, width, height)))
    painted = _blurred(_mask_of(mask, is_inverted=options.is_inverted), options.blur_x, options.blur_y)
    region = None
    if options.only_masked:
        if painted.size != flat.size:  # the WebUI draws it on the image
            painted = painted.resize(flat.size, Image.Resampling.LANCZOS)
        found = region_of(painted, options.padding)
        if found is None:
            return Painting(np.asarray(resized(options.resize_mode, flat, width, height)))
        region = with_ratio(found, width, height, *flat.size)
        kept, mask_image = painted, resized(FILLED, painted.crop(region), width, height)
    else:
        flat = resized(options.resize_mode, flat, width, height)
        mask_image = resized(options.resize_mode, painted, width, height)
        kept = mask_image.point(lambda value: min(255, 2 * value))
    overlay = _masked_out(flat, kept)
    if region is not None:
        flat = resized(FILLED, flat.crop(region), width, height)
    if options.fill != ORIGINAL:
        flat = filled(flat, mask_image)
    return Painting(np.asarray(flat), _by_cells(mask_image), overlay.convert("RGBA"), region)


def resized(mode: int, image: Image.Image, width: int, height: int) -> Image.Image:
    """Return an image in another size: plain, its middle (CROPPED), or the whole with its edges drawn out (FILLED)."""
    if mode not in (CROPPED, FILLED) or image.size == (width, height):
        return image.resize((width, height), Image.Resampling.LANCZOS)
    is_wider = width / height > image.width / image.height
    inner_width, inner_height = width, height
    if is_wider == (mode == CROPPED):
        inner_height = max(1, image.height * width // image.width)
    else:
        inner_width = max(1, image.width * height // image.height)
    inner = image.resize((inner_width, inner_height), Image.Resampling.LANCZOS)
    left, top = width // 2 - inner_width // 2, height // 2 - inner_height // 2
    found = Image.new(image.mode, (width, height))
    found.paste(inner, (left, top))
    # The edges are stretched from boxes without an extent, where PIL's filter sees the pixels beside them.
    if mode == FILLED and top > 0:
        found.paste(inner.resize((width, top), box=(0, 0, inner_width, 0)), (0, 0))
        if (below := height - top - inner_height) > 0:
            last = inner.resize((width, below), box=(0, inner_height, inner_width, inner_height))
            found.paste(last, (0, top + inner_height))
    elif mode == FILLED and left > 0:
        found.paste(inner.resize((left, height), box=(0, 0, 0, inner_height)), (0, 0))
        if (beside := width - left - inner_width) > 0:
            last = inner.resize((beside, height), box=(inner_width, 0, inner_width, inner_height))
            found.paste(last, (left + inner_width, 0))
    return found


def region_of(mask: Image.Image, padding: int) -> Region | None:
    """Return the box around a mask's painted pixels, with a padding in pixels; None for a mask that paints nothing."""
    box = mask.getbbox()
    if box is None:
        return None
    left, top, right, bottom = box
    return Region(
        max(0, left - padding), max(0, top - padding),
        min(mask.width, right + padding), min(mask.height, bottom + padding),
    )  # fmt: skip


def with_ratio(region: Region, width: int, height: int, image_width: int, image_height: int) -> Region:
    """Return the region grown to the aspect ratio of a size, as far as the image is large enough."""
    left, top, right, bottom = region
    ratio = width / height
    if region.width / region.height > ratio:
        top, bottom = _grown(top, bottom, int(region.width / ratio - region.height), image_height)
    else:
        left, right = _grown(left, right, int(region.height * ratio - region.width), image_width)
    return Region(left, top, right, bottom)


def _grown(start: int, stop: int, by: int, most: int) -> tuple[int, int]:
    start, stop = start - by // 2, stop + by - by // 2
    if stop >= most:
        start, stop = start - (stop - most), most
    if start < 0:
        start, stop = 0, stop - start
    return start, min(stop, most)


def filled(image: Image.Image, mask: Image.Image) -> Image.Image:
    """Return an image with its masked part filled with the colours around it."""
    outside, found = _masked_out(image, mask), Image.new("RGBA", image.size)
    for radius, repeats in _FLOWS:
        flown = outside.filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(repeats):
            found.alpha_composite(flown)
    return found.convert("RGB")


def _flattened(image: DecodedImage) -> Image.Image:
    """Return an image whose transparent parts are white."""
    pixels = Image.fromarray(image.pixels)
    if image.alpha is None:
        return pixels
    return Image.composite(pixels, Image.new("RGB", pixels.size, _WHITE), Image.fromarray(image.alpha))


def _mask_of(mask: DecodedImage, *, is_inverted: bool) -> Image.Image:
    if mask.alpha is not None and not (mask.alpha == 255).all():
        found = Image.fromarray(np.where(mask.alpha >= _OPAQUE_FROM, np.uint8(255), np.uint8(0)))
    else:
        found = Image.fromarray(mask.pixels).convert("L")
    return ImageOps.invert(found) if is_inverted else found


def _blurred(mask: Image.Image, blur_x: int, blur_y: int) -> Image.Image:
    """Return a mask under a Gaussian of these widths, along rows and columns; beyond its edges it is mirrored."""
    values = np.asarray(mask)
    for axis, sigma in ((1, blur_x), (0, blur_y)):
        if sigma > 0:
            reach = int(2.5 * sigma + 0.5)
            weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2.0 * sigma**2)).astype(np.float32)
            weights /= weights.sum()
            along = values if axis == 1 else values.T
            wide = np.pad(along, ((0, 0), (reach, reach)), mode="reflect" if along.shape[1] > 1 else "edge")
            blurred = _weighed(wide.astype(np.float32), weights)
            values = np.round(blurred if axis == 1 else blurred.T).clip(0, 255).astype(np.uint8)
    return Image.fromarray(values)


def _weighed(wide: npt.NDArray[np.float32], weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the sums of each len(weights) neighbours in a row, times the weights.

    Some columns at a time are one matrix product, which takes a tenth of the time of a pass for each weight.
    """
    count = wide.shape[1] - len(weights) + 1
    band = np.zeros((_COLUMNS + len(weights) - 1, _COLUMNS), np.float32)
    for column in range(_COLUMNS):
        band[column : column + len(weights), column] = weights
    found = np.empty((len(wide), count), np.float32)
    for start in range(0, count, _COLUMNS):
        size = min(_COLUMNS, count - start)
        taken = size + len(weights) - 1
        found[:, start : start + size] = wide[:, start : start + taken] @ band[:taken, :size]
    return found


def _masked_out(image: Image.Image, mask: Image.Image) -> Image.Image:
    """Return an image with its masked part transparent, its colours premultiplied (RGBa)."""
    found = Image.new("RGBa", image.size)
    found.paste(image.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(mask))
    return found


def _by_cells(mask: Image.Image) -> Pixels:
    """Return a black and white mask of whole latents: all pixels of a latent are alike."""
    cells = mask.convert("RGB").resize((max(1, mask.width // _CELL), max(1, mask.height // _CELL)))
    values = np.where(np.around(np.asarray(cells)[:, :, 0] / 255) > 0, np.uint8(255), np.uint8(0))
    found = Image.fromarray(values).resize(mask.size, Image.Resampling.NEAREST)
    return np.asarray(found)
