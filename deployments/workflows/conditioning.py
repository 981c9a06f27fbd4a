"""Prompts, and what is put on them: guidance, ControlNets, references, images to repaint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from deployments.workflows.backend import Backend, Catalog, Report
from deployments.workflows.kinds import (
    MAX_SIDE,
    Input,
    Kind,
    Output,
    boolean,
    choice,
    growing,
    integer,
    link,
    number,
    text,
)
from deployments.workflows.latents import cut_to_multiple, encoded, grayed
from deployments.workflows.resizing import resized, resized_masks, scaled_to_area
from deployments.workflows.values import (
    PENDING,
    PENDING_LATENT,
    Beside,
    ClipValue,
    Conditioning,
    ControlNetValue,
    ControlUse,
    Image,
    Latent,
    Later,
    Prompt,
    VaeValue,
)

_METHODS: Final = ("offset", "index", "uxo/uno", "index_timestep_zero")
_QWEN_CELL, _LATENT_CELL = 32, 16  # pixels of an image's cell, and of a latent's
_QWEN_IMAGES: Final = tuple(f"image_{place}" for place in range(1, 17))
_SIZES: Final = ("width", "height", "crop_w", "crop_h", "target_width", "target_height")


def _prompt(text: str, clip: ClipValue) -> tuple[Conditioning]:
    return ((Prompt(clip, text),),)


def _flux_prompt(clip: ClipValue, clip_l: str, t5xxl: str, guidance: float) -> tuple[Conditioning]:
    return ((Prompt(clip, clip_l, (("t5xxl", t5xxl),), guidance),),)


def _sd3_prompt(clip: ClipValue, clip_l: str, clip_g: str, t5xxl: str, empty_padding: str) -> tuple[Conditioning]:
    texts = (("clip_g", clip_g), ("t5xxl", t5xxl))
    return ((Prompt(clip, clip_l, texts, extra=(("empty_padding", (empty_padding,)),)),),)


def _sdxl_prompt(clip: ClipValue, text_g: str, text_l: str, **sizes: int) -> tuple[Conditioning]:
    sized = tuple(sizes[name] for name in _SIZES)
    return ((Prompt(clip, text_l, (("clip_g", text_g),), extra=(("sdxl_sizes", sized),)),),)


def _each(conditioning: Conditioning, change: Callable[[Prompt], Prompt]) -> tuple[Conditioning]:
    return (tuple(map(change, conditioning)),)


def _guidance(conditioning: Conditioning, guidance: float) -> tuple[Conditioning]:
    return _each(conditioning, lambda one: replace(one, guidance=guidance))


def _zeroed(conditioning: Conditioning) -> tuple[Conditioning]:
    return _each(conditioning, lambda one: replace(one, zeroed=True))


def _combined(conditioning_1: Conditioning, conditioning_2: Conditioning) -> tuple[Conditioning]:
    return ((*conditioning_1, *conditioning_2),)


def _in_range(conditioning: Conditioning, start: float, end: float) -> tuple[Conditioning]:
    return _each(conditioning, lambda one: replace(one, start=start, end=end))


def _referring(conditioning: Conditioning, latent: Latent | None = None) -> tuple[Conditioning]:
    if latent is None:
        return (conditioning,)
    return _each(conditioning, lambda one: replace(one, references=(*one.references, latent)))


def _reference_method(conditioning: Conditioning, reference_latents_method: str) -> tuple[Conditioning]:
    extra = ("reference_latents_method", (reference_latents_method,))
    return _each(conditioning, lambda one: replace(one, extra=(*one.extra, extra)))


def _controlled(
    positive: Conditioning,
    negative: Conditioning,
    control_net: ControlNetValue,
    image: Image,
    strength: float,
    start_percent: float,
    end_percent: float,
    vae: VaeValue | None = None,
) -> tuple[Conditioning, Conditioning]:
    if strength == 0:
        return positive, negative
    use = ControlUse(control_net, image, strength, start_percent, end_percent)

    def controlled(one: Prompt) -> Prompt:
        return replace(one, controls=(*one.controls, use))

    return tuple(map(controlled, positive)), tuple(map(controlled, negative))


def _edit_prompt(clip: ClipValue, prompt: str, vae: VaeValue | None = None, **images: Image) -> tuple[Conditioning]:
    """Return a prompt with the images that an editing model's encoder reads; with a VAE they are references too."""
    given = tuple(image for _, image in sorted(images.items()) if image is not None)
    return ((Prompt(clip, prompt, images=given, extra=(("edits", (vae is not None,)),)),),)


def _qwen_21_prompt(
    clip: ClipValue,
    prompt: str,
    negative_prompt: str,
    images: Mapping[str, Image],
    vae: VaeValue | None = None,
    resolution: int = 1024,
) -> tuple[Conditioning, Conditioning, Latent]:
    """Return both prompts with the images scaled for the encoder and the VAE alike, and an empty latent."""
    given = tuple(_whole_cells(images[name], resolution) for name in _QWEN_IMAGES if name in images)
    width = height = resolution or 1024
    latent = Latent(width=width // _LATENT_CELL * _LATENT_CELL, height=height // _LATENT_CELL * _LATENT_CELL)
    if given:
        latent = PENDING_LATENT
        if isinstance(given[0], np.ndarray):
            latent = Latent(width=given[0].shape[2], height=given[0].shape[1])
    edits = (("edits", (vae is not None,)),) if given else ()
    both = [(Prompt(clip, text, images=given, extra=edits),) for text in (prompt, negative_prompt)]
    return both[0], both[1], latent


def _whole_cells(image: Image, resolution: int) -> Image:
    """Return the first of some images in the area of a square of this side, or in its own; in whole cells."""
    if not isinstance(image, np.ndarray):
        return image
    _, height, width, _ = image.shape
    size = max(1, round(width / _QWEN_CELL)) * _QWEN_CELL, max(1, round(height / _QWEN_CELL)) * _QWEN_CELL
    if resolution:
        size = scaled_to_area(width, height, resolution**2, _QWEN_CELL)
    return image[:1] if size == (width, height) else resized(image[:1], *size, "lanczos")


def _inpainting(
    catalog: Catalog,
    positive: Conditioning,
    negative: Conditioning,
    vae: VaeValue,
    pixels: Image,
    mask: Any,
    noise_mask: bool = True,
) -> Later:
    def painted(latent: Latent, beside: Beside) -> tuple[Any, ...]:
        return (
            *_both_beside(positive, negative, beside),
            latent.changed(noise_mask=beside.mask) if noise_mask else latent,
        )

    async def act(backend: Backend, report: Report) -> tuple[Any, ...]:
        whole = await encoded(backend, vae, pixels)
        cut = await encoded(backend, vae, grayed(pixels, mask))
        fitted = resized_masks(mask, pixels.shape[2], pixels.shape[1], "bilinear")  # type: ignore[union-attr]
        return painted(whole, Beside(cut, cut_to_multiple(fitted[..., None])[..., 0]))

    waiting: Callable[[Backend, Report], Awaitable[tuple[Any, ...]]] = act
    return Later(waiting, painted(PENDING_LATENT, Beside(PENDING_LATENT, PENDING)))


def _pix_to_pix(
    catalog: Catalog, positive: Conditioning, negative: Conditioning, vae: VaeValue, pixels: Image
) -> Later:
    """Return prompts beside an encoded image, and zeros of its size."""

    async def act(backend: Backend, report: Report) -> tuple[Any, ...]:
        latent = await encoded(backend, vae, pixels)
        zeros = latent.changed(samples=np.zeros_like(latent.samples), pixels=None)
        return (*_both_beside(positive, negative, Beside(latent)), zeros)

    waiting: Callable[[Backend, Report], Awaitable[tuple[Any, ...]]] = act
    return Later(waiting, (*_both_beside(positive, negative, Beside(PENDING_LATENT)), PENDING_LATENT))


def _both_beside(positive: Conditioning, negative: Conditioning, beside: Beside) -> tuple[Conditioning, Conditioning]:
    both = [tuple(replace(one, beside=beside) for one in side) for side in (positive, negative)]
    return both[0], both[1]


_CLIP: Final = link("clip", "CLIP")
_CONDITIONING: Final = link("conditioning", "CONDITIONING")
_OUT: Final = (Output("CONDITIONING"),)
_BOTH: Final = (Output("CONDITIONING", "positive"), Output("CONDITIONING", "negative"))
_IMAGES: Final = tuple(link(f"image{place}", "IMAGE", required=False) for place in (1, 2, 3))


def _words(name: str) -> Input:
    return text(name, multiline=True, picks=True)


CONDITIONING: Final = (
    Kind("CLIPTextEncode", (_words("text"), _CLIP), _OUT, _prompt, category="conditioning"),
    Kind(
        "CLIPTextEncodeFlux",
        (_CLIP, _words("clip_l"), _words("t5xxl"), number("guidance", 3.5, 0.0, 100.0)),
        _OUT,
        _flux_prompt,
    ),
    Kind(
        "CLIPTextEncodeSD3",
        (_CLIP, _words("clip_l"), _words("clip_g"), _words("t5xxl"), choice("empty_padding", ("none", "empty_prompt"))),
        _OUT,
        _sd3_prompt,
    ),
    Kind(
        "CLIPTextEncodeSDXL",
        (
            _CLIP,
            *(integer(name, 0 if "crop" in name else 1024, 0, MAX_SIDE) for name in _SIZES),
            *(_words("text_g"), _words("text_l")),
        ),
        _OUT,
        _sdxl_prompt,
    ),
    Kind("FluxGuidance", (_CONDITIONING, number("guidance", 3.5, 0.0, 100.0)), _OUT, _guidance),
    Kind("ConditioningZeroOut", (_CONDITIONING,), _OUT, _zeroed),
    Kind(
        "ConditioningCombine",
        (link("conditioning_1", "CONDITIONING"), link("conditioning_2", "CONDITIONING")),
        _OUT,
        _combined,
    ),
    Kind("ConditioningSetTimestepRange", (_CONDITIONING, number("start"), number("end", 1.0)), _OUT, _in_range),
    Kind(
        "ReferenceLatent",
        (_CONDITIONING, link("latent", "LATENT", required=False)),
        _OUT,
        _referring,
        is_opaque=True,
    ),
    Kind(
        "FluxKontextMultiReferenceLatentMethod",
        (_CONDITIONING, choice("reference_latents_method", _METHODS)),
        _OUT,
        _reference_method,
    ),
    Kind(
        "ControlNetApplyAdvanced",
        (
            *(link("positive", "CONDITIONING"), link("negative", "CONDITIONING"), link("control_net", "CONTROL_NET")),
            *(link("image", "IMAGE"), number("strength", 1.0, 0.0, 10.0)),
            *(number("start_percent"), number("end_percent", 1.0), link("vae", "VAE", required=False)),
        ),
        _BOTH,
        _controlled,
        is_opaque=True,
    ),
    Kind(
        "TextEncodeQwenImageEdit",
        (_CLIP, _words("prompt"), link("vae", "VAE", required=False), link("image", "IMAGE", required=False)),
        _OUT,
        _edit_prompt,
        is_opaque=True,
    ),
    Kind(
        "TextEncodeQwenImageEditPlus",
        (_CLIP, _words("prompt"), link("vae", "VAE", required=False), *_IMAGES),
        _OUT,
        _edit_prompt,
        is_opaque=True,
    ),
    Kind(
        "TextEncodeQwenImage21",
        (
            *(_CLIP, _words("prompt"), _words("negative_prompt"), link("vae", "VAE", required=False)),
            integer("resolution", 1024, 0, 4096, required=False),
            growing("images", "IMAGE", _QWEN_IMAGES, 0),
        ),
        (*_BOTH, Output("LATENT", "latent")),
        _qwen_21_prompt,
        is_opaque=True,
    ),
    Kind(
        "InpaintModelConditioning",
        (
            *(link("positive", "CONDITIONING"), link("negative", "CONDITIONING"), link("vae", "VAE")),
            *(link("pixels", "IMAGE"), link("mask", "MASK"), boolean("noise_mask", True, required=False)),
        ),
        (*_BOTH, Output("LATENT", "latent")),
        _inpainting,
        is_opaque=True,
        reads_catalog=True,
    ),
    Kind(
        "InstructPixToPixConditioning",
        (
            link("positive", "CONDITIONING"),
            link("negative", "CONDITIONING"),
            link("vae", "VAE"),
            link("pixels", "IMAGE"),
        ),
        (*_BOTH, Output("LATENT", "latent")),
        _pix_to_pix,
        is_opaque=True,
        reads_catalog=True,
    ),
)
