"""Solvers: one for every request, of a class of diffusers, with the schedule that the request asks for."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

from deployments.engines.build import read_config
from deployments.engines.protocol import EngineError


class SolverFactory:
    """A maker of solvers, one for every request, since they count steps and may keep history.

    They are of the class in model_index.json, configured by scheduler/scheduler_config.json.
    """

    def __init__(self, folder: Path, model_index: Mapping[str, Any]) -> None:
        library, class_name = (model_index.get("scheduler") or (None, None))[:2]
        if library != "diffusers" or _solver_class(class_name) is None:
            raise EngineError(
                f"{folder}: model_index.json names solver {library}.{class_name}, expected one of diffusers"
            )
        self._template: Any = _solver_class(class_name).from_config(
            read_config(folder / "scheduler" / "scheduler_config.json")
        )
        self.config: Mapping[str, Any] = self._template.config

    def create_solver(self, device: torch.device, scheduler: str | None = None, **schedule: Any) -> Any:
        """Return a solver with its timesteps set by `schedule`, arguments of `set_timesteps`.

        `scheduler` names another class than the pipeline's, which gets its config, as stock's `from_config` does.
        Raises EngineError when there is none, or it cannot make such a schedule (more steps than it was trained with,
        say).
        """
        solver = self._template_of(scheduler)
        try:
            solver.set_timesteps(device=device, **schedule)
        except (ValueError, TypeError) as error:
            raise EngineError(f"{type(solver).__name__} cannot make this schedule: {error}") from error
        if hasattr(solver, "set_begin_index"):
            solver.set_begin_index(0)
        return solver

    def _template_of(self, scheduler: str | None) -> Any:
        if scheduler is None or scheduler == type(self._template).__name__:
            return copy.deepcopy(self._template)
        compatible = {cls.__name__ for cls in self._template.compatibles}
        if scheduler not in compatible:
            known = ", ".join(sorted({type(self._template).__name__, *compatible}))
            raise EngineError(f"scheduler {scheduler!r}: expected one that fits the model's (known: {known})")
        return _solver_class(scheduler).from_config(self.config)


def step_options(solver: Any, generator: torch.Generator) -> dict[str, Any]:
    """Return keyword arguments for `solver.step`, as far as the class takes them (eta is 0, as in stock)."""
    accepted = _step_parameters(type(solver).step)
    options = {"eta": 0.0, "generator": generator}
    return {name: value for name, value in options.items() if name in accepted}


@functools.cache  # it takes a while, and each step asks
def _step_parameters(step: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(step).parameters)


def _solver_class(class_name: str | None) -> Any:
    """Return a solver's class, None for a name that is none's."""
    cls = getattr(diffusers, str(class_name), None)
    return cls if isinstance(cls, type) and issubclass(cls, diffusers.SchedulerMixin) else None


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
