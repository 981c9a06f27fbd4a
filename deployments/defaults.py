"""Defaults for the fields that a request leaves open: the model's in the cluster config, then those of its family."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final, TypeVar

from cluster.registry.directory import ModelRecord
from configs.model import AdapterConfig, GenerationDefaults, ModelConfig
from deployments.engines.diffusion.families import FAMILIES, KNOWN_FAMILIES
from deployments.engines.diffusion.families.base import task_of
from deployments.errors import InvalidRequest
from deployments.records import ImageRequest, RequestModel, TextOptions

SEED_BITS: Final = 32  # of drawn seeds

_RequestT = TypeVar("_RequestT", bound=RequestModel)
TextT = TypeVar("TextT", bound=TextOptions)


def _draw_seed() -> int:
    """Draw a seed of 32 bits: JavaScript, and JSON tools that read numbers as doubles, lose bits beyond 53."""
    return random.getrandbits(SEED_BITS)


def with_image_defaults(
    request: ImageRequest,
    defaults: GenerationDefaults,
    class_name: str,
    variant: Mapping[str, bool] = MappingProxyType({}),
) -> ImageRequest:
    """Fill in all that the pipeline needs, so that its work can be bounded, and told to the caller.

    `variant` is the model's, as `pipeline_variant` tells it. A seed is drawn here if there is none. Where nobody says a
    `max_sequence_length`, it stays None: the encoder uses its own. Raises InvalidRequest for a pipeline class that no
    family knows.
    """
    family = FAMILIES.get(class_name)
    if family is None:
        raise InvalidRequest(
            f"model {request.model!r} is a {class_name or 'pipeline without a class'}; "
            f"known pipelines: {KNOWN_FAMILIES}",
            "model",
        )
    request = request.model_copy(update=_size_of_images(request))
    if schedule := request.sigmas or request.timesteps:
        steps = {len(schedule), request.num_inference_steps or len(schedule)}
        if len(steps) > 1:
            raise InvalidRequest(
                f"num_inference_steps: {request.num_inference_steps}, but {len(schedule)} sigmas or timesteps",
                "num_inference_steps",
            )
        request = request.model_copy(update={"num_inference_steps": len(schedule)})
    names = ("width", "height", "num_inference_steps", "guidance_scale", "max_sequence_length")
    request = _filled(request, defaults, names)
    own = family.defaults_of(variant)
    stock = asdict(own)
    stock["width"] = stock["height"] = stock.pop("side")
    task = task_of(has_image=request.init_image is not None, has_mask=request.mask_image is not None)
    if task in family.edits:
        edit = asdict(family.edits[task])
        stock |= edit if own is family.defaults else {"strength": edit["strength"]}
    elif task != "text-to-image":
        raise InvalidRequest(f"init_image: model {request.model!r} ({class_name}) does no {task}", "init_image")
    update = {name: value for name, value in stock.items() if getattr(request, name) is None}
    if request.seed is None:
        update["seed"] = _draw_seed()
    return request.model_copy(update=update)


def _size_of_images(request: ImageRequest) -> dict[str, int]:
    """Return the width and height that the images of a request give it, where it does not say them itself."""
    images = [request.init_image] if request.init_image is not None else [use.image for use in request.control]
    if not images:
        return {}
    height, width = images[0].shape[:2]
    asked = {"width": request.width or width, "height": request.height or height}
    return {name: int(side) for name, side in asked.items()}


def with_text_defaults(request: TextT, defaults: GenerationDefaults) -> TextT:
    """Fill in the config's temperature and `max_tokens` of the model, and a seed; the worker knows the other defaults.

    A seed is drawn here if there is none: a replica that answers in place of one that died draws the same tokens.
    """
    request = _filled(request, defaults, ("max_tokens", "temperature"))
    return request.model_copy(update={"seed": _draw_seed() if request.seed is None else request.seed})


def text_rules(model: ModelRecord | ModelConfig | AdapterConfig) -> dict[str, Any]:
    """Return the config's rules for the model's texts, as fields of an ImageRequest."""
    entry = model.entry if isinstance(model, ModelRecord) else model
    if not isinstance(entry, ModelConfig):
        return {"text_padding": "stock", "long_text": "truncate"}
    return {"text_padding": entry.text_padding, "long_text": entry.long_text}


def _filled(request: _RequestT, defaults: GenerationDefaults, names: tuple[str, ...]) -> _RequestT:
    update: dict[str, Any] = {name: getattr(defaults, name) for name in names if getattr(request, name) is None}
    return request.model_copy(update=update)


def merges_lora(request: ImageRequest, adapters: Mapping[str, ModelRecord | ModelConfig | AdapterConfig]) -> bool:
    """Return whether the config wants the LoRA of a request merged, by its adapters: it is alone, at that scale."""
    if len(request.lora) != 1:
        return False
    adapter = adapters.get(request.lora[0].name)
    entry = adapter.entry if isinstance(adapter, ModelRecord) else adapter
    return isinstance(entry, AdapterConfig) and entry.merged_scale == request.lora[0].scale
