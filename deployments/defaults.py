"""What a request leaves open, from the model's defaults in the cluster config."""

from __future__ import annotations

import random
from typing import TypeVar

from configs.model import GenerationDefaults
from deployments.records import MAX_SEED, ImageRequest, RequestModel

IMAGE_DEFAULTS = ("width", "height", "num_inference_steps", "guidance_scale", "max_sequence_length")
TEXT_DEFAULTS = ("max_tokens", "temperature")

RequestT = TypeVar("RequestT", bound=RequestModel)


def with_defaults(request: RequestT, defaults: GenerationDefaults, names: tuple[str, ...]) -> RequestT:
    """Fill in the fields `names` that are None. What the model leaves open too stays None: the engine's own default.

    An image request without a seed gets one drawn here, so that whoever asked can be told which one it was.
    """
    update = {name: getattr(defaults, name) for name in names if getattr(request, name) is None}
    if isinstance(request, ImageRequest) and request.seed is None:
        update["seed"] = random.randint(0, MAX_SEED)
    return request.model_copy(update=update)
