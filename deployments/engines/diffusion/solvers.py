"""Solvers: one for every request, of a class of diffusers, with the schedule that the request asks for."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import diffusers
import torch

from deployments.engines.build import read_config
from deployments.engines.protocol import EngineError

# Their next step depends on nothing but the latents and the step index, so a request can go on elsewhere.
_STATELESS: Final = frozenset({"FlowMatchEulerDiscreteScheduler", "EulerDiscreteScheduler", "DDIMScheduler"})


class SolverFactory:
    """A maker of solvers, one for every request, since they count steps and may keep history.

    They are of the class in model_index.json, configured by scheduler/scheduler_config.json.
    """

    def __init__(self, folder: Path, model_index: Mapping[str, Any]) -> None:
        library, class_name = (model_index.get("scheduler") or (None, None))[:2]
        cls: Any = getattr(diffusers, str(class_name), None)
        is_solver: bool = isinstance(cls, type) and issubclass(cls, diffusers.SchedulerMixin)
        if library != "diffusers" or not is_solver:
            raise EngineError(
                f"{folder}: model_index.json names solver {library}.{class_name}, expected one of diffusers"
            )
        self._template: Any = cls.from_config(read_config(folder / "scheduler" / "scheduler_config.json"))
        self.config: Mapping[str, Any] = self._template.config
        self.stateless = class_name in _STATELESS
        accepted = inspect.signature(cls.step).parameters
        self._step_options = {name for name in ("eta", "generator") if name in accepted}

    def create_solver(self, device: torch.device, **schedule: Any) -> Any:
        """Return a solver with its timesteps set by `schedule`, arguments of `set_timesteps`.

        Raises EngineError when the solver cannot make such a schedule (more steps than it was trained with, say).
        """
        solver = copy.deepcopy(self._template)
        try:
            solver.set_timesteps(device=device, **schedule)
        except (ValueError, TypeError) as error:
            raise EngineError(f"{type(solver).__name__} cannot make this schedule: {error}") from error
        return solver

    def step_options(self, generator: torch.Generator) -> dict[str, Any]:
        """Return keyword arguments for `solver.step`, as far as the class takes them (eta is 0, as in stock)."""
        options = {"eta": 0.0, "generator": generator}
        return {name: value for name, value in options.items() if name in self._step_options}


def begin_solver(solver: Any, first_step: int, step_index: int) -> None:
    """Let the solver do the step of that index, counted from `first_step`, next. Raises EngineError without one."""
    num_steps = len(solver.timesteps) - first_step
    if not 0 <= step_index < num_steps:
        raise EngineError(f"step index {step_index}: expected 0 to {num_steps - 1}")
    if hasattr(solver, "set_begin_index"):
        solver.set_begin_index(first_step + step_index)


def add_noise(solver: Any, images: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
    """Return the latents of images with the noise that the solver expects at `timesteps` (B,) of its schedule.

    Raises EngineError for a solver that cannot begin in the middle of its schedule.
    """
    noised: torch.Tensor
    if hasattr(solver, "scale_noise"):
        noised = solver.scale_noise(images, timesteps, noise)
    elif hasattr(solver, "add_noise"):
        noised = solver.add_noise(images, noise, timesteps)
    else:
        raise EngineError(f"{type(solver).__name__} cannot begin at an image: it has no add_noise")
    return noised
