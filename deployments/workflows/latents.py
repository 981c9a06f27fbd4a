"""Latents: empty ones, images to and from them, and changes of a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.workflows.backend import Backend, Report
from deployments.workflows.kinds import MAX_SIDE, Input, Kind, Output, choice, integer, link, number
from deployments.workflows.records import Refused
from deployments.workflows.resizing import bounded, resized_latents, resized_masks
from deployments.workflows.values import PENDING, PENDING_LATENT, Image, Latent, Later, Mask, UpscalerValue, VaeValue

Array: TypeAlias = npt.NDArray[np.float32]

_MULTIPLE: Final = 8  # of the pixels that a VAE reads
_MAX_BATCH: Final = 4_096
_LATENT_METHODS: Final = ("nearest-exact", "bilinear", "area", "bicubic", "bislerp")


def _empty(width: int, height: int, batch_size: int) -> tuple[Latent]:
    bounded(batch_size, height, width)
    return (Latent(batch=batch_size, width=width, height=height),)


def cut_to_multiple(pixels: Array) -> Array:
    """Return the middle of images, whose sides are multiples of what a VAE reads, without transparency."""
    _, height, width, _ = pixels.shape
    wide, high = (side // _MULTIPLE * _MULTIPLE for side in (width, height))
    if not wide or not high:
        raise Refused(f"an image of {width}x{height} pixels: a VAE reads {_MULTIPLE} or more", "pixels")
    x, y = (width - wide) // 2, (height - high) // 2
    return pixels[:, y : y + high, x : x + wide, :3]


async def encoded(backend: Backend, vae: VaeValue, pixels: Any) -> Latent:
    """Return the latents of images, which keep where they came from."""
    cut = cut_to_multiple(pixels)
    samples = await backend.encode(vae.models[0], cut)
    return Latent(samples, len(cut), cut.shape[2], cut.shape[1], pixels=cut)


def grayed(pixels: Any, mask: Any) -> Array:
    """Return images that are gray where the mask is, from a half on."""
    _, height, width, _ = pixels.shape
    kept = 1 - np.rint(resized_masks(mask, width, height, "bilinear"))[..., None]
    result: Array = (pixels[..., :3] - 0.5) * kept + 0.5
    return result


def _encode(pixels: Image, vae: VaeValue, **tiles: int) -> Later:
    async def act(backend: Backend, report: Report) -> tuple[Latent]:
        return (await encoded(backend, vae, pixels),)

    return Later(act, (PENDING_LATENT.changed(pixels=PENDING),))


def _encode_for_inpaint(pixels: Image, vae: VaeValue, mask: Mask, grow_mask_by: int) -> Later:
    async def act(backend: Backend, report: Report) -> tuple[Latent]:
        assert isinstance(pixels, np.ndarray)
        assert isinstance(mask, np.ndarray)
        latent = await encoded(backend, vae, grayed(pixels, mask))
        wide = np.rint(resized_masks(mask, pixels.shape[2], pixels.shape[1], "bilinear"))
        return (latent.changed(noise_mask=_grown(wide, grow_mask_by), pixels=None),)

    return Later(act, (PENDING_LATENT.changed(noise_mask=PENDING),))


def _grown(mask: Array, side: int) -> Array:
    """Return the mask, grown by a box of this side."""
    if side == 0:
        return mask
    before = side // 2  # as a convolution is padded whose result is cut at its end
    for axis in (1, 2):
        pads = [(0, 0)] * 3
        pads[axis] = (before, side - 1 - before)
        padded = np.pad(mask, pads)
        mask = np.lib.stride_tricks.sliding_window_view(padded, side, axis).max(-1)
    return mask


def _decode(samples: Latent, vae: VaeValue, **tiles: int) -> tuple[Image] | Later:
    if samples.samples is None:
        raise Refused("an empty latent has no image: sample it first", "samples")
    if samples.begun is not None:
        raise Refused("noise is left in these latents: another sampler goes on with them", "samples")
    if samples.before:
        raise Refused("the first latents are no part of the video: trim them, by TrimVideoLatent", "samples")
    if samples.decoded is not None:
        if samples.decoded_by not in vae.models:
            raise Refused(f"latents of {samples.decoded_by!r} are decoded by its own VAE", "vae")
        return (samples.decoded,)

    async def act(backend: Backend, report: Report) -> tuple[Array]:
        assert isinstance(samples.samples, np.ndarray)
        return (await backend.decode(vae.models[0], samples.samples),)

    return Later(act, (PENDING,))


def _upscale_image(upscale_model: UpscalerValue, image: Image) -> Later:
    async def act(backend: Backend, report: Report) -> tuple[Array]:
        assert isinstance(image, np.ndarray)
        return (await backend.upscale(upscale_model.model, image[..., :3]),)

    return Later(act, (PENDING,))


def _masked(samples: Latent, mask: Mask) -> tuple[Latent]:
    return (samples.changed(noise_mask=mask),)


def _repeat(samples: Latent, amount: int) -> tuple[Latent]:
    if samples.samples is PENDING:
        return (samples,)
    bounded(samples.batch * amount, max(samples.height, 1), max(samples.width, 1))
    found = None if samples.samples is None else np.tile(samples.samples, (amount, 1, 1, 1))
    mask = samples.noise_mask
    if isinstance(mask, np.ndarray) and len(mask) > 1:
        mask = np.tile(mask, (amount, 1, 1))
    index = samples.batch_index
    if index is not None:
        step = max(index) - min(index) + 1
        index = tuple(place + step * turn for turn in range(amount) for place in index)
    return (
        samples.changed(samples=found, batch=samples.batch * amount, noise_mask=mask, batch_index=index, pixels=None),
    )


def _from_batch(samples: Latent, batch_index: int, length: int) -> tuple[Latent]:
    if samples.samples is PENDING:
        return (samples,)
    first = min(samples.batch - 1, batch_index)
    number = min(samples.batch - first, length)
    places = samples.batch_index or tuple(range(samples.batch))
    found, mask = samples.samples, samples.noise_mask
    if isinstance(found, np.ndarray):
        found = found[first : first + number]
    if isinstance(mask, np.ndarray) and len(mask) > 1:
        mask = mask[first : first + number]
    kept = places[first : first + number]
    return (samples.changed(samples=found, batch=number, noise_mask=mask, batch_index=kept, pixels=None),)


def _sized(samples: Latent, width: int, height: int, method: str, crop: str) -> Latent:
    if method == "bislerp":
        raise Refused("bislerp is not computed here: bilinear, bicubic, area and nearest-exact are", "upscale_method")
    if samples.samples is PENDING:
        return samples.changed(pixels=None)
    if samples.samples is None:
        return samples.changed(width=width, height=height)
    factor = samples.width // samples.samples.shape[-1] or _MULTIPLE
    found = resized_latents(samples.samples, width // factor, height // factor, method, crop)
    return samples.changed(samples=found, width=width, height=height, pixels=None)


def _upscale(samples: Latent, upscale_method: str, width: int, height: int, crop: str) -> tuple[Latent]:
    if width == 0 and height == 0:
        return (samples,)
    if samples.samples is not PENDING:
        width = width or max(64, round(samples.width * height / samples.height))
        height = height or max(64, round(samples.height * width / samples.width))
    return (_sized(samples, max(64, width), max(64, height), upscale_method, crop),)


def _upscale_by(samples: Latent, upscale_method: str, scale_by: float) -> tuple[Latent]:
    factor = _MULTIPLE
    if isinstance(samples.samples, np.ndarray):
        factor = samples.width // samples.samples.shape[-1] or _MULTIPLE
    width, height = (round(side // factor * scale_by) * factor for side in (samples.width, samples.height))
    return (_sized(samples, width, height, upscale_method, "disabled"),)


_SAMPLES: Final = link("samples", "LATENT")
_DECODED: Final = replace(_SAMPLES, takes_decoded=True, takes_videos=True)
_VAE: Final = link("vae", "VAE")
_PIXELS: Final = link("pixels", "IMAGE")
_OUT: Final = (Output("LATENT"),)
_CROP: Final = choice("crop", ("disabled", "center"))


def _empty_kind(name: str, default: int = 1024) -> Kind:
    sides = (integer("width", default, 16), integer("height", default, 16))
    return Kind(name, (*sides, integer("batch_size", 1, 1, _MAX_BATCH)), _OUT, _empty, category="latent")


def _tiles(*, optional: bool = False) -> tuple[Input, ...]:
    return (
        integer("tile_size", 512, 64, 4096),
        integer("overlap", 64, 0, 4096, required=not optional),
        integer("temporal_size", 64, 8, 4096, required=False),
        integer("temporal_overlap", 8, 4, 4096, required=False),
    )


LATENTS: Final = (
    _empty_kind("EmptyLatentImage", 512),
    _empty_kind("EmptySD3LatentImage"),
    _empty_kind("EmptyFlux2LatentImage"),
    Kind("VAEEncode", (_PIXELS, _VAE), _OUT, _encode, is_opaque=True, category="latent"),
    Kind("VAEEncodeTiled", (_PIXELS, _VAE, *_tiles(optional=True)), _OUT, _encode, is_opaque=True),
    Kind(
        "VAEEncodeForInpaint",
        (_PIXELS, _VAE, link("mask", "MASK"), integer("grow_mask_by", 6, 0, 64)),
        _OUT,
        _encode_for_inpaint,
        is_opaque=True,
    ),
    Kind("VAEDecode", (_DECODED, _VAE), (Output("IMAGE"),), _decode, is_opaque=True, category="latent"),
    # A cluster decodes an image whole, which its tiles come near to.
    Kind("VAEDecodeTiled", (_DECODED, _VAE, *_tiles(optional=True)), (Output("IMAGE"),), _decode, is_opaque=True),
    Kind("SetLatentNoiseMask", (_SAMPLES, link("mask", "MASK")), _OUT, _masked, is_opaque=True),
    Kind("RepeatLatentBatch", (_SAMPLES, integer("amount", 1, 1, 64)), _OUT, _repeat, is_opaque=True),
    Kind(
        "LatentFromBatch",
        (_SAMPLES, integer("batch_index", 0, 0, 63), integer("length", 1, 1, 64)),
        _OUT,
        _from_batch,
        is_opaque=True,
    ),
    Kind(
        "LatentUpscale",
        (
            *(_SAMPLES, choice("upscale_method", _LATENT_METHODS)),
            *(integer("width", 512, 0, MAX_SIDE), integer("height", 512, 0, MAX_SIDE), _CROP),
        ),
        _OUT,
        _upscale,
        is_opaque=True,
    ),
    Kind(
        "LatentUpscaleBy",
        (_SAMPLES, choice("upscale_method", _LATENT_METHODS), number("scale_by", 1.5, 0.01, 8.0)),
        _OUT,
        _upscale_by,
        is_opaque=True,
    ),
    Kind(
        "ImageUpscaleWithModel",
        (link("upscale_model", "UPSCALE_MODEL"), link("image", "IMAGE")),
        (Output("IMAGE"),),
        _upscale_image,
        is_opaque=True,
    ),
)
