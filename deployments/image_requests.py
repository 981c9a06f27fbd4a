"""An image request in the engine's terms: the defaults of the stock pipelines, and what guidance means to each."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from deployments.encoding.records import ConditioningRequest
from deployments.engines.protocol import AdapterUse, DiffusionRequest
from deployments.engines.text.conditioning import uses_negative
from deployments.errors import InvalidRequest
from deployments.records import ImageRequest


@dataclass(frozen=True, slots=True)
class FamilyDefaults:
    """What the stock pipeline's `__call__` defaults to (diffusers 0.42)."""

    num_inference_steps: int
    guidance_scale: float
    side: int


FAMILIES = {
    "FluxPipeline": FamilyDefaults(28, 3.5, 1024),
    "StableDiffusionXLPipeline": FamilyDefaults(50, 5.0, 1024),
}


def denoise_request(request: ImageRequest, class_name: str | None) -> DiffusionRequest:
    """Fill in what is still None. `request.seed` must be set: whoever asked is told which one was used."""
    defaults = FAMILIES.get(class_name or "")
    if defaults is None:
        raise InvalidRequest(
            f"model {request.model!r} is a {class_name}; known pipelines: {', '.join(FAMILIES)}", "model"
        )
    if request.seed is None:
        raise ValueError("the seed must be drawn before")
    names = [use.name for use in request.lora]
    if len(set(names)) != len(names):
        raise InvalidRequest("lora: an adapter may be used once per request", "lora")
    steps, guidance = request.num_inference_steps, request.guidance_scale
    return DiffusionRequest(
        request_id=uuid.uuid4().hex,
        width=request.width or defaults.side,
        height=request.height or defaults.side,
        num_inference_steps=defaults.num_inference_steps if steps is None else steps,
        guidance_scale=defaults.guidance_scale if guidance is None else guidance,
        seed=request.seed,
        num_images=request.n,
        true_cfg_scale=request.true_cfg_scale,
        adapters=tuple(AdapterUse(use.name, use.scale) for use in request.lora),
    )


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
