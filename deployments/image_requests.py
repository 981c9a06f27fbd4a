"""An image request in the engine's terms, and what guidance means to each pipeline."""

from __future__ import annotations

import uuid
from typing import TypeVar

from deployments.engines.protocol import AdapterUse, DiffusionRequest
from deployments.engines.text.conditioning import uses_negative
from deployments.errors import InvalidRequest
from deployments.records import ImageRequest
from deployments.text.records import ConditioningRequest

NumberT = TypeVar("NumberT", int, float)


def denoise_request(request: ImageRequest) -> DiffusionRequest:
    """`request` is filled in by `with_image_defaults`. Raises InvalidRequest for an adapter that is used twice."""
    names = [use.name for use in request.lora]
    if len(set(names)) != len(names):
        raise InvalidRequest("lora: an adapter may be used once per request", "lora")
    return DiffusionRequest(
        request_id=uuid.uuid4().hex,
        width=_filled(request.width),
        height=_filled(request.height),
        num_inference_steps=_filled(request.num_inference_steps),
        guidance_scale=_filled(request.guidance_scale),
        seed=_filled(request.seed),
        num_images=request.n,
        true_cfg_scale=request.true_cfg_scale,
        adapters=tuple(AdapterUse(use.name, use.scale) for use in request.lora),
    )


def _filled(value: NumberT | None) -> NumberT:
    if value is None:
        raise ValueError("the request's defaults must be filled in before: see with_image_defaults")
    return value


def conditioning_request(request: ImageRequest, denoise: DiffusionRequest, class_name: str) -> ConditioningRequest:
    """The text half, which the embedding service answers."""
    return ConditioningRequest(
        model=request.model,
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        use_negative=uses_negative(class_name, denoise, request.negative_prompt),
        max_sequence_length=request.max_sequence_length,
        model_version=request.model_version,
        text_padding=request.text_padding,
        long_text=request.long_text,
        priority=request.priority,
        timeout_s=request.timeout_s,
    )


def ignored_inputs(request: ImageRequest, use_negative: bool) -> tuple[str, ...]:
    """What the asker should know did nothing."""
    if request.negative_prompt and not use_negative:
        return ("negative_prompt had no effect: guidance is off (Flux needs true_cfg_scale > 1)",)
    return ()
