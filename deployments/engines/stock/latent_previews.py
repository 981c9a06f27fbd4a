"""Previews of a stock pipeline: its latents after a step, decoded as the class decodes them.

For that the class's own `__call__` runs once more, from those latents and with every step passed over, which is what
diffusers' `interrupt` does. They have the noise that later steps take away.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch

_CALLBACK: Final = "callback_on_step_end"


def shows_previews(cls: type[Any]) -> bool:
    """Return whether a call of a class tells its latents on the way, takes latents, and can pass over its steps."""
    parameters = inspect.signature(cls.__call__).parameters
    inputs = parameters.get(f"{_CALLBACK}_tensor_inputs")
    has_latents = inputs is not None and isinstance(inputs.default, list | tuple) and "latents" in inputs.default
    return has_latents and {_CALLBACK, "latents", "output_type"} <= parameters.keys() and hasattr(cls, "interrupt")


def only_decodes(pipeline: Any) -> None:
    """Let a pipeline pass over its steps, and take latents as they are: its scheduler does not scale them as noise."""
    _set_property(pipeline, "interrupt", True)
    if hasattr(pipeline.scheduler, "init_noise_sigma"):
        _set_property(pipeline.scheduler, "init_noise_sigma", 1.0)
    pipeline.set_progress_bar_config(disable=True)


def decoding_arguments(arguments: Mapping[str, Any], latents: torch.Tensor, generator: Any) -> dict[str, Any]:
    """Return the arguments of a call that decodes these latents, from those of the call that they are of."""
    kept = {name: value for name, value in arguments.items() if name != _CALLBACK}
    return {**kept, "latents": latents.clone(), "generator": generator}


def _set_property(thing: Any, name: str, value: Any) -> None:
    cls = type(thing)
    constant = property(lambda self: value, lambda self, given: None)  # the constructor's value does not count
    thing.__class__ = type(cls.__name__, (cls,), {name: constant, "__module__": cls.__module__})
