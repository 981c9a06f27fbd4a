"""Defaults for the fields that a request leaves open: the model's in the cluster config, then those of its family."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any, Final, TypeVar

from cluster.registry.directory import ModelRecord
from configs.model import AdapterConfig, GenerationDefaults, ModelConfig
from configs.options import Denoising, PictureOptions
from deployments.engines.diffusion.families import FAMILIES, has_vae_family, vae_family_of
from deployments.engines.diffusion.families.base import Family, task_of
from deployments.engines.records.protocol import EngineError
from deployments.engines.stock.known import read_class, takes_image_prompts
from deployments.records import NO_PROMPT, REFERENCES, ClipRequest, ImageRequest, LoraUse, RequestModel, TextOptions
from deployments.records.errors import InvalidRequest

SEED_BITS: Final = 32  # of drawn seeds
_NOT_IGNORED: Final = ("width", "height", "prompt_syntax", "deterministic")
# Options that an upscaler ignores, and says so. Of those above, sizes are refused, and the others say nothing alone.
_BESIDE_IMAGE: Final = ("mask_image", *(name for name in PictureOptions.model_fields if name not in _NOT_IGNORED))
# Options of denoising that diffusers' own code takes, or that it keeps to anyway.
_OF_STOCK: Final = frozenset(
    {"true_cfg_scale", "strength", "scheduler", "sigmas", "timesteps", "deterministic", "sampler"}
)
_NOT_OF_STOCK: Final = tuple(field.name for field in fields(Denoising) if field.name not in _OF_STOCK)

_LATENTS: Final = ("latents", "noise_mask", "beside_latents", "beside_mask", "pixels")
_RequestT = TypeVar("_RequestT", bound=RequestModel)
_DiffusionT = TypeVar("_DiffusionT", ImageRequest, ClipRequest)
TextT = TypeVar("TextT", bound=TextOptions)


def draw_seed() -> int:
    """Draw a seed of 32 bits: JavaScript, and JSON tools that read numbers as doubles, lose bits beyond 53."""
    return random.getrandbits(SEED_BITS)


def with_image_defaults(
    request: ImageRequest,
    defaults: GenerationDefaults,
    class_name: str,
    variant: Mapping[str, bool | int] = MappingProxyType({}),
) -> ImageRequest:
    """Fill in all that the pipeline needs, so that its work can be bounded, and told to the caller.

    `variant` is the model's, as `pipeline_variant` tells it. A seed is drawn here if there is none. Where nobody says a
    `max_sequence_length`, it stays None: the encoder uses its own. A class without a family keeps most of its own
    defaults to itself. Raises InvalidRequest.
    """
    if request.is_of_vae and has_vae_family(class_name):
        return _of_vae(request, vae_family_of(class_name), variant)
    family = FAMILIES.get(class_name)
    if family is None:
        return _with_stock_defaults(request, defaults, class_name)
    if request.beside_latents is not None or request.beside_mask is not None:
        raise InvalidRequest(f"beside_latents: a {class_name} reads none here", "beside_latents")
    if request.latents is not None:
        height, width = (side * family.latents.pixels_per_cell(variant) for side in request.latents.shape[2:])
        request = request.model_copy(
            update={"n": len(request.latents), "width": request.width or width, "height": request.height or height}
        )
    if family.references.most:
        request = _with_references(request, family, class_name, variant)
    for name in ("extra", *([] if family.references.most else ["images"])):
        if getattr(request, name):
            raise InvalidRequest(f"{name}: {class_name} has none here; its options are fields of the request", name)
    if request.ip_adapter and not family.adapters.takes_image_prompts:
        raise InvalidRequest(f"ip_adapter: no IP-Adapters are served with {class_name}", "ip_adapter")
    request = request.model_copy(update=_size_of_images(request))
    request = _with_schedule(_filled(request, defaults, without=_out_of_place(request)))
    own = family.defaults.of(variant)
    stock = asdict(own)
    stock["width"], stock["height"] = family.defaults.sides(variant)
    task = task_of(has_image=request.init_image is not None, has_mask=request.mask_image is not None)
    if task in family.defaults.edits:
        edit = asdict(family.defaults.edits[task])
        stock |= edit if own is family.defaults.usual else {"strength": edit["strength"]}
    elif task != "text-to-image":
        raise InvalidRequest(f"init_image: model {request.model!r} ({class_name}) does no {task}", "init_image")
    update = {name: value for name, value in stock.items() if getattr(request, name) is None}
    if request.seed is None:
        update["seed"] = draw_seed()
    return request.model_copy(update=update)


def _of_vae(request: ImageRequest, family: Family, variant: Mapping[str, bool | int]) -> ImageRequest:
    """Return a request for the VAE's work alone, with the size of its images.

    Raises InvalidRequest without its input.
    """
    name = "pixels" if request.output == "encoded" else "latents"
    if (given := getattr(request, name)) is None:
        raise InvalidRequest(f"{name}: the request has none, and its output is {request.output!r}", name)
    height, width = given.shape[1:3]
    if name == "latents":
        height, width = (side * family.latents.pixels_per_cell(variant) for side in given.shape[2:])
    filled = {"seed": 0, "num_inference_steps": 1, "guidance_scale": 1.0}  # by nobody read
    return request.model_copy(update={"width": width, "height": height, "n": len(given), **filled})


def _refuse_latents(request: ImageRequest, taker: str, names: Sequence[str] = _LATENTS) -> None:
    """Raise InvalidRequest for a request with latents, by these names, or an output of its own."""
    given = [name for name in names if getattr(request, name) is not None]
    given += ["reference_latents"] if request.reference_latents else []
    if request.output != "image" or given:
        name = (*given, "output")[0]
        raise InvalidRequest(f"{name}: {taker} takes no latents and gives none", name)


def _with_references(
    request: ImageRequest, family: Family, class_name: str, variant: Mapping[str, bool | int]
) -> ImageRequest:
    """Return a request for a family that changes images: all of them under one name, and its sides. Raises
    InvalidRequest.
    """
    model = f"model {request.model!r} ({class_name})"
    for name in ("mask_image", "strength"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name}: {model} takes none; it changes images by the prompt alone", name)
    if unknown := request.images.keys() - {REFERENCES}:
        raise InvalidRequest(f"images.{min(unknown)}: {model} takes images.{REFERENCES} alone", "images")
    first = () if request.init_image is None else (request.init_image,)
    references, most = (*first, *request.references), family.references.most
    if not references:
        raise InvalidRequest(f"init_image: {model} changes images, and the request has none", "init_image")
    if len(references) > most:
        raise InvalidRequest(f"images: {len(references)} of them, and {model} takes {most}", "images")
    try:
        width, height = family.references.sides(references, family.latents.multiple_of(variant))
    except EngineError as error:
        raise InvalidRequest(f"images: {error}", "images") from None
    sides = {"width": request.width or width, "height": request.height or height}
    return request.model_copy(update={"init_image": None, "images": {REFERENCES: references}, **sides})


def as_upscale(request: ImageRequest) -> tuple[ImageRequest, tuple[str, ...]]:
    """Return a request as an upscaler takes it, which reads an image and nothing else, and warnings that say so.

    Its work is that of the image's size. Raises InvalidRequest for what asks for another image than there will be.
    """
    _refuse_latents(request, "an upscaler")
    for name in ("width", "height", "lora", "control", "ip_adapter", "images", "extra"):
        if getattr(request, name):
            raise InvalidRequest(f"{name}: an upscaler takes an image alone, and its scale is its own", name)
    if request.n > 1:
        raise InvalidRequest(f"n: {request.n} images, and an upscaler makes one of one", "n")
    ignored = [name for name in _BESIDE_IMAGE if getattr(request, name) is not None]
    ignored = (["prompt"] if request.prompt.strip() else []) + ignored
    update: dict[str, Any] = {"prompt": NO_PROMPT, "partial_images": 0, **dict.fromkeys(_BESIDE_IMAGE)}
    if request.init_image is not None:
        update["height"], update["width"] = map(int, request.init_image.shape[:2])
    warnings: tuple[str, ...] = (f"without effect on an upscaler: {', '.join(ignored)}",) if ignored else ()
    if request.scaled_from is not None and request.init_image is not None:
        sizes = (*request.scaled_from, update["width"], update["height"])
        warnings += ("the image of {}x{} pixels was scaled to {}x{}: the largest allowed".format(*sizes),)
    return request.model_copy(update=update), warnings


def with_clip_defaults(request: ClipRequest, defaults: GenerationDefaults, class_name: str) -> ClipRequest:
    """Fill in the config's defaults, the steps that diffusers' class makes by default, and a seed.

    All else is left to the class, which has defaults of its own. Raises InvalidRequest.
    """
    return _with_class_defaults(request, defaults, class_name, without=_out_of_place(request))


def _with_stock_defaults(request: ImageRequest, defaults: GenerationDefaults, class_name: str) -> ImageRequest:
    names = _LATENTS if request.beside_latents is None else ("pixels",)
    _refuse_latents(request, f"a {class_name}, which diffusers' own code runs,", names)
    others = ["control", "prompt_2", *([] if takes_image_prompts(class_name) else ["ip_adapter"]), *_NOT_OF_STOCK]
    for name in others:
        if getattr(request, name):
            raise InvalidRequest(f"{name}: diffusers' own code runs a {class_name}, and takes none here", name)
    without = _out_of_place(request) | {*_NOT_OF_STOCK}
    if request.init_image is not None or request.images:  # their size is the usual one
        without |= {"width", "height"}
    request = _with_class_defaults(request, defaults, class_name, without)
    if not request.clip_skip:
        return request
    return request.model_copy(update={"clip_skip": None, "extra": {"clip_skip": request.clip_skip} | request.extra})


def _with_class_defaults(
    request: _DiffusionT, defaults: GenerationDefaults, class_name: str, without: Collection[str]
) -> _DiffusionT:
    try:
        steps = read_class(class_name).defaults.get("num_inference_steps")
    except KeyError:
        text = f"model {request.model!r} is a {class_name or 'pipeline without a class'}, which diffusers does not have"
        raise InvalidRequest(text, "model") from None
    request = _with_schedule(_filled(request, defaults, without))
    update: dict[str, Any] = {}
    if request.num_inference_steps is None and isinstance(steps, int):
        update["num_inference_steps"] = steps
    if request.seed is None:
        update["seed"] = draw_seed()
    return request.model_copy(update=update)


def _with_schedule(request: _DiffusionT) -> _DiffusionT:
    """Return the request with as many steps as its schedule has. Raises InvalidRequest where it says another."""
    steps = len(request.sigmas or request.timesteps or ())
    if request.sampler is not None:
        steps = request.sampler.num_steps
    if not steps:
        return request
    if steps != (request.num_inference_steps or steps):
        raise InvalidRequest(
            f"num_inference_steps: {request.num_inference_steps}, but {steps} sigmas or timesteps",
            "num_inference_steps",
        )
    return request.model_copy(update={"num_inference_steps": steps})


def _size_of_images(request: ImageRequest) -> dict[str, int]:
    """Return the width and height that the images of a request give it, where it does not say them itself."""
    images = [request.init_image] if request.init_image is not None else [use.image for use in request.control]
    if not images:
        return {}
    height, width = images[0].shape[:2]
    asked = {"width": request.width or width, "height": request.height or height}
    return {name: int(side) for name, side in asked.items()}


def _out_of_place(request: ImageRequest | ClipRequest) -> set[str]:
    """Return the defaults that do not apply beside what the request says itself."""
    steps = {"num_inference_steps", "sigmas", "timesteps"}
    if isinstance(request, ImageRequest):
        steps |= {"sampler"}
    if request.sampler is not None:
        steps |= {"scheduler", "scheduler_options"} | ({"variation"} if isinstance(request, ImageRequest) else set())
    without = steps if any(getattr(request, name) is not None for name in steps) else set()
    has_image = isinstance(request, ImageRequest) and request.init_image is not None
    return without if has_image else without | {"strength"}


def with_text_defaults(request: TextT, defaults: GenerationDefaults) -> TextT:
    """Fill in the config's defaults of the model, and a seed; the worker knows the other defaults.

    A seed is drawn here if there is none: a replica that answers in place of one that died draws the same tokens.
    """
    request = _filled(request, defaults)
    return request.model_copy(update={"seed": draw_seed() if request.seed is None else request.seed})


def text_rules(model: ModelRecord | ModelConfig | AdapterConfig) -> dict[str, Any]:
    """Return the config's rules for the model's texts, as fields of an ImageRequest."""
    entry = model.entry if isinstance(model, ModelRecord) else model
    if not isinstance(entry, ModelConfig):
        return {"text_padding": "stock", "long_text": "truncate"}
    return {"text_padding": entry.text_padding, "long_text": entry.long_text}


def _filled(request: _RequestT, defaults: GenerationDefaults, without: Collection[str] = ()) -> _RequestT:
    """Return the request with each default in a field that it leaves open: None, or without an entry."""
    shared = type(request).model_fields.keys() & type(defaults).model_fields.keys() - set(without)
    given = {name: value for name in shared if (value := getattr(defaults, name)) is not None}
    return request.model_copy(update={name: given[name] for name in given if getattr(request, name) in (None, (), {})})


def prompts_of(request: ImageRequest) -> str:
    """Return all that the text encoders are given of a request."""
    return f"{request.prompt}\n{request.negative_prompt or ''}"


def with_learned_words(request: ImageRequest, words: Collection[str]) -> ImageRequest:
    """Return the request with the textual inversions that its prompts name among its adapters."""
    named = {use.name for use in request.lora}
    uses = [LoraUse(name=name) for name in words if name not in named]
    return request.model_copy(update={"lora": (*request.lora, *uses)}) if uses else request


def merges_lora(request: ImageRequest, adapters: Mapping[str, ModelRecord | ModelConfig | AdapterConfig]) -> bool:
    """Return whether the config wants the LoRA of a request merged, by its adapters: it is alone, at that scale."""
    if len(request.lora) != 1:
        return False
    adapter = adapters.get(request.lora[0].name)
    entry = adapter.entry if isinstance(adapter, ModelRecord) else adapter
    return isinstance(entry, AdapterConfig) and entry.merged_scale == request.lora[0].scale
