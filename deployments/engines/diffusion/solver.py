"""A pipeline's solver, fresh for every request: it counts steps and may keep history."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

from deployments.engines.build import read_config
from deployments.engines.protocol import EngineError

# Their next step depends on nothing but the latents and the step index, so a request can go on elsewhere.
STATELESS_SOLVERS = frozenset({"FlowMatchEulerDiscreteScheduler", "EulerDiscreteScheduler", "DDIMScheduler"})


class SolverFactory:
    """Makes solvers of the class in model_index.json, configured by scheduler/scheduler_config.json."""

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
        self.stateless = class_name in STATELESS_SOLVERS
        accepted = inspect.signature(cls.step).parameters
        self._step_options = {name for name in ("eta", "generator") if name in accepted}

    def create_solver(self, device: torch.device, begin_index: int = 0, **schedule: Any) -> Any:
        """Return a solver with its timesteps set by `schedule` (arguments of `set_timesteps`), about to do
        `begin_index`.

        Raises EngineError when the solver cannot make such a schedule (more steps than it was trained
        with, say).
        """
        solver = copy.deepcopy(self._template)
        try:
            solver.set_timesteps(device=device, **schedule)
        except (ValueError, TypeError) as error:
            raise EngineError(f"{type(solver).__name__} cannot make this schedule: {error}") from error
        if not 0 <= begin_index < len(solver.timesteps):
            raise EngineError(f"step index {begin_index}: expected 0 to {len(solver.timesteps) - 1}")
        if hasattr(solver, "set_begin_index"):
            solver.set_begin_index(begin_index)
        return solver

    def step_options(self, generator: torch.Generator) -> dict[str, Any]:
        """Return keyword arguments for `solver.step`, as far as the class takes them (eta is 0, as in stock)."""
        options = {"eta": 0.0, "generator": generator}
        return {name: value for name, value in options.items() if name in self._step_options}
