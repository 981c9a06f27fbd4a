"""What a request leaves open: first the model's defaults in the cluster config, then everybody's."""

from __future__ import annotations

import random
from typing import Any, TypeVar

from cluster.models.directory import ModelRecord
from configs.model import AdapterConfig, GenerationDefaults, ModelConfig
from deployments.records import MAX_SEED, ImageRequest, RequestModel, TextOptions

DEFAULT_TEMPERATURE = 1.0  # OpenAI's

RequestT = TypeVar("RequestT", bound=RequestModel)
TextT = TypeVar("TextT", bound=TextOptions)


def with_image_defaults(request: ImageRequest, defaults: GenerationDefaults) -> ImageRequest:
    """A seed is drawn here if there is none, so that whoever asked can be told which one it was.

    What the model leaves open too stays None: the pipeline's own default.
    """
    seed = random.randint(0, MAX_SEED) if request.seed is None else request.seed
    names = ("width", "height", "num_inference_steps", "guidance_scale", "max_sequence_length")
    return _filled(request, defaults, names).model_copy(update={"seed": seed})


def with_text_defaults(request: TextT, defaults: GenerationDefaults) -> TextT:
    """`max_tokens` that the model leaves open too stays None: as many as its context has room for."""
    request = _filled(request, defaults, ("max_tokens", "temperature"))
    if request.temperature is None:
        return request.model_copy(update={"temperature": DEFAULT_TEMPERATURE})
    return request


def text_rules(model: ModelRecord | ModelConfig | AdapterConfig) -> dict[str, Any]:
    """What the config says of the model's texts, as fields of an ImageRequest."""
    entry = model.entry if isinstance(model, ModelRecord) else model
    if not isinstance(entry, ModelConfig):
        return {"text_padding": "stock", "long_text": "truncate"}
    return {"text_padding": entry.text_padding, "long_text": entry.long_text}


def _filled(request: RequestT, defaults: GenerationDefaults, names: tuple[str, ...]) -> RequestT:
    update: dict[str, Any] = {name: getattr(defaults, name) for name in names if getattr(request, name) is None}
    return request.model_copy(update=update)
