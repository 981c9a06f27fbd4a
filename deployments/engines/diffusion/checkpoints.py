"""A request between two steps as bytes, with which another process goes on, bit for bit.

The bytes have all that steps have changed: latents, the random generator, and attributes that the solver set after
its schedule was made (its counters and its history). The text's encoding is in them as well: encoded again, in another
batch, it could differ by rounding. The rest follows from the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from deployments.engines.diffusion.state import DenoiseState, numeric_failure
from deployments.engines.records.protocol import EngineError

_PLAIN = (type(None), bool, int, float, str)
_PARTS = frozenset({"step_index", "latents", "generator", "solver", "conditioning"})
_TREE, _LIST, _TENSOR = "tree", "list:", "tensor:"  # no attribute of a solver has a colon


def save_checkpoint(state: DenoiseState, conditioning: Mapping[str, torch.Tensor]) -> bytes | None:
    """Return the checkpoint of a state. Waits for the device.

    None if there can be none: the latents are not finite, or the solver keeps something else than numbers and tensors.
    """
    if numeric_failure(state) is not None:
        return None
    solver = {
        name: value
        for name, value in vars(state.solver).items()
        if isinstance(value, list) or value is not state.solver_at_start.get(name)
    }
    if not all(_is_storable(value) for value in solver.values()):
        return None
    tensors: dict[str, torch.Tensor] = {}
    tree = {
        "step_index": state.step_index,
        "latents": state.latents,
        "generator": state.generator.get_state(),
        "solver": solver,
        "conditioning": dict(conditioning),
    }
    if state.extrapolation is not None:
        tree["extrapolation"] = state.extrapolation.save()
    text = json.dumps(_taken_apart(tree, tensors)).encode()
    return save(tensors | {_TREE: torch.frombuffer(bytearray(text), dtype=torch.uint8)})


def conditioning_of(checkpoint: bytes) -> dict[str, torch.Tensor]:
    """Return the request's original conditioning. Raises EngineError as `restore_checkpoint` does."""
    conditioning: dict[str, torch.Tensor] = _load(checkpoint)["conditioning"]
    return conditioning


def restore_checkpoint(state: DenoiseState, checkpoint: bytes) -> None:
    """Move a newly started state of the same request to the checkpoint.

    Raises EngineError for bytes that are no checkpoint, or one of another request.
    """
    content = _load(checkpoint)
    latents = content["latents"]
    if latents.shape != state.latents.shape or latents.dtype != state.latents.dtype:
        raise EngineError(
            f"the checkpoint has latents {tuple(latents.shape)} of {latents.dtype}, "
            f"expected {tuple(state.latents.shape)} of {state.latents.dtype}"
        )
    if not 0 <= content["step_index"] <= state.num_steps:
        raise EngineError(f"the checkpoint is of step {content['step_index']}, expected 0 to {state.num_steps}")
    device = state.latents.device
    state.latents = latents.to(device)
    state.step_index = content["step_index"]
    state.generator.set_state(content["generator"])
    if state.extrapolation is not None and "extrapolation" in content:
        state.extrapolation.restore(content["extrapolation"], device)
    for name, value in content["solver"].items():
        setattr(state.solver, name, _to_device(value, device))


def _load(checkpoint: bytes) -> dict[str, Any]:
    try:
        tensors = load(checkpoint)
        tree = _put_together(json.loads(tensors[_TREE].numpy().tobytes()), tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{len(checkpoint)} bytes are no checkpoint: {error}") from None
    if not isinstance(tree, dict) or not tree.keys() >= _PARTS:
        raise EngineError(f"{len(checkpoint)} bytes are no checkpoint of a diffusion request")
    return tree


def _is_storable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_storable(one) for one in value)
    return isinstance(value, (*_PLAIN, torch.Tensor))


def _taken_apart(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the value in JSON. Its tensors go into `tensors`, each under the name that takes its place."""
    if isinstance(value, dict):
        return {name: _taken_apart(one, tensors) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return {_LIST: [_taken_apart(one, tensors) for one in value]}
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: name}
    return value


def _put_together(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if _LIST in value:
        return [_put_together(one, tensors) for one in value[_LIST]]
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    return {name: _put_together(one, tensors) for name, one in value.items()}


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_to_device(one, device) for one in value]
    # A scalar stays on the host, where a solver keeps its sigmas.
    return value.to(device) if isinstance(value, torch.Tensor) and value.ndim else value
