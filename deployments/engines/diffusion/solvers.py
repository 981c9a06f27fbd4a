"""Solvers: one for every request, with the schedule that it asks for.

They are of classes of diffusers, of `flow_solvers.py` and `stochastic_solvers.py`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import diffusers
import torch

from configs.options import Sampler
from deployments.engines.diffusion.flow_solvers import flow_solver, is_flow
from deployments.engines.diffusion.known_solvers import OF_BETAS, OF_FLOWS, check_solver
from deployments.engines.diffusion.noise_forms import noise_form
from deployments.engines.diffusion.samplers import SAMPLERS, SigmaSolver, StepNoise
from deployments.engines.diffusion.stochastic_solvers import SOLVERS as STOCHASTIC
from deployments.engines.libraries.config_files import read_config
from deployments.engines.records.protocol import DiffusionRequest, EngineError

Schedule = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # a solver's config -> arguments of its set_timesteps
Changes = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # a solver's config -> replacements of its values

_SPACING: Final = "timestep_spacing"
AUTOMATIC: Final = "automatic"  # a spacing: that of the WebUI for a solver; a flow keeps its model's
_ALL: Final[Mapping[str, bool | str]] = {_SPACING: "linspace"}
_KARRAS: Final[Mapping[str, bool | str]] = {"use_karras_sigmas": True, **_ALL}
_EXPONENTIAL: Final[Mapping[str, bool | str]] = {"use_exponential_sigmas": True, **_ALL}
# Source: AUTOMATIC1111/stable-diffusion-webui, `samplers_k_diffusion` in modules/sd_samplers_kdiffusion.py, and
# modules/sd_samplers_timesteps.py.
_AUTOMATIC: Final[Mapping[str, Mapping[str, bool | str]]] = {
    "DDIMScheduler": {_SPACING: "leading"},
    "DPMSolver2SAncestralScheduler": _KARRAS,
    "DPMSolver3MSDEScheduler": _EXPONENTIAL,
    "DPMSolverMultistepScheduler": _KARRAS,
    "DPMSolverSDEScheduler": _KARRAS,
    "EulerAncestralDiscreteScheduler": _ALL,
    "EulerDiscreteScheduler": _ALL,
    "HeunDiscreteScheduler": _ALL,
    "KDPM2AncestralDiscreteScheduler": _KARRAS,
    "KDPM2DiscreteScheduler": _KARRAS,
    "LMSDiscreteScheduler": _ALL,
    "PNDMScheduler": {_SPACING: "leading"},
}
# The options of a solver's config that a request may change, with their type, range of numbers, or choices.
_OPTIONS: Final[Mapping[str, type[bool] | tuple[float, float] | frozenset[str]]] = {
    "use_karras_sigmas": bool,
    "use_exponential_sigmas": bool,
    "use_beta_sigmas": bool,
    "use_lu_lambdas": bool,
    "euler_at_final": bool,
    "lower_order_final": bool,
    "rescale_betas_zero_snr": bool,
    "timestep_spacing": frozenset({"linspace", "leading", "trailing"}),
    "final_sigmas_type": frozenset({"zero", "sigma_min"}),
    "algorithm_type": frozenset({"dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++", "deis"}),
    "solver_type": frozenset({"midpoint", "heun", "logrho", "bh1", "bh2"}),
    "solver_order": (1, 3),
    "original_inference_steps": (1, 1000),
    "prediction_type": frozenset({"epsilon", "v_prediction", "sample", "flow_prediction"}),
    "use_flow_sigmas": bool,
    "flow_shift": (0.01, 100.0),
    "shift": (0.01, 100.0),
}


class SolverFactory:
    """A maker of solvers, one for every request, since they count steps and may keep history.

    They are of the class in model_index.json, configured by scheduler/scheduler_config.json.
    """

    def __init__(self, folder: Path, model_index: Mapping[str, Any]) -> None:
        class_name = check_solver(folder, model_index)
        cls = _solver_class(class_name)
        if cls is None:
            raise EngineError(f"{folder}: the packages that {class_name} needs are not installed")
        self._template: Any = cls.from_config(read_config(folder / "scheduler" / "scheduler_config.json"))
        self.config: Mapping[str, Any] = self._template.config

    def create_solver(
        self,
        device: torch.device,
        request: DiffusionRequest,
        schedule: Schedule,
        changes: Changes = lambda config: {},
    ) -> Any:
        """Return the solver of a request with its timesteps set by `schedule` of its config.

        `changes` are made to that config first, for any class of solver.

        A request's `scheduler` is another class than the pipeline's, which gets its config, as stock's `from_config`
        does, with the `scheduler_options` replacing its values. Raises EngineError if there is no such class, or it
        cannot make such a schedule (more steps than it was trained with, say).
        """
        solver = self.configured(request.scheduler, request.scheduler_options)
        solver.register_to_config(**changes(solver.config))
        try:
            solver.set_timesteps(device=device, **schedule(solver.config))
        except (ValueError, TypeError, ImportError, AssertionError) as error:
            raise EngineError(f"{type(solver).__name__} cannot make this schedule: {error}") from error
        if hasattr(solver, "set_begin_index"):
            solver.set_begin_index(0)
        return solver

    def create_sampler(
        self, device: torch.device, sampler: Sampler, noise: StepNoise, dtype: torch.dtype
    ) -> SigmaSolver:
        """Return the sampler of a request, for the noise that the pipeline's own solver removes. `noise` is that of
        its steps, and `dtype` the denoiser's. Raises EngineError.
        """
        return SAMPLERS[sampler.name](noise_form(self._template), sampler, noise, device, dtype)

    def configured(self, scheduler: str | None, options: Mapping[str, bool | float | str]) -> Any:
        """Return a solver without a schedule, of the template's class or another. Raises EngineError."""
        own: str = type(self._template).__name__
        if options.get(_SPACING) == AUTOMATIC:
            options = _automatically_spaced(None if is_flow(self._template) else scheduler, options)
        if scheduler not in (None, own):
            known = self._known_classes()
            if scheduler not in known:
                raise EngineError(
                    f"scheduler {scheduler!r}: expected one that fits the model's (known: {', '.join(known)})"
                )
        elif not options:
            return copy.deepcopy(self._template)
        cls, changes, spacing = _solver_class(scheduler or own), dict(options), None
        if is_flow(self._template) and (scheduler or own) in OF_FLOWS:
            cls, changes, spacing = flow_solver(self.config, scheduler or own, options)
        _check_options(cls, {name: changes[name] for name in options if name in changes})
        try:
            solver = cls.from_config(self.config, **changes)
        except (ValueError, TypeError, NotImplementedError, ImportError) as error:
            raise EngineError(f"{cls.__name__} cannot be configured so: {error}") from error
        if spacing is not None:
            solver.spacing = spacing
        return solver

    def _known_classes(self) -> list[str]:
        """Return the names of the classes that take the template's config, and can be run."""
        own = {cls.__name__ for cls in self._template.compatibles}
        others = OF_FLOWS if is_flow(self._template) else OF_BETAS if OF_BETAS & own else frozenset[str]()
        names = {type(self._template).__name__} | others
        return sorted(name for name in names if _solver_class(name) is not None)


def _automatically_spaced(
    scheduler: str | None, options: Mapping[str, bool | float | str]
) -> dict[str, bool | float | str]:
    """Return options with the WebUI's spacing for a solver in the place of `AUTOMATIC`; the model's own without one."""
    others = {name: value for name, value in options.items() if name != _SPACING}
    found = _AUTOMATIC.get(scheduler or "", {})
    if found is _KARRAS and str(options.get("algorithm_type")).startswith("sde-"):
        found = _EXPONENTIAL
    return {**found, **others}


def _check_options(cls: Any, options: Mapping[str, bool | float | str]) -> None:
    accepted = set(inspect.signature(cls.__init__).parameters) & _OPTIONS.keys()
    for name, value in options.items():
        if name not in accepted:
            known = ", ".join(sorted(accepted)) or "none"
            raise EngineError(f"scheduler_options: {cls.__name__} has no {name!r} to choose (known: {known})")
        rule = _OPTIONS[name]
        if isinstance(rule, frozenset):
            fits, expected = value in rule, f"one of {', '.join(sorted(rule))}"
        elif isinstance(rule, tuple):
            is_number = isinstance(value, int if isinstance(rule[0], int) else int | float)
            fits = is_number and not isinstance(value, bool) and rule[0] <= value <= rule[1]  # type: ignore[operator]
            expected = f"{'a whole number' if isinstance(rule[0], int) else 'a number'} from {rule[0]} to {rule[1]}"
        else:
            fits, expected = isinstance(value, bool), "true or false"
        if not fits:
            raise EngineError(f"scheduler_options: {name} is {value!r}, expected {expected}")


def step_options(solver: Any, generator: torch.Generator) -> dict[str, Any]:
    """Return the keyword arguments for `solver.step` that the class takes (eta is 0, as in stock)."""
    accepted = _step_parameters(type(solver).step)
    options = {"eta": 0.0, "generator": generator}
    return {name: value for name, value in options.items() if name in accepted}


@functools.cache  # slow, and needed at each step
def _step_parameters(step: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(step).parameters)


def _solver_class(class_name: str | None) -> Any:
    """Return a solver's class, None for a name that is none's, or one's whose packages are not installed."""
    cls = STOCHASTIC.get(str(class_name)) or getattr(diffusers, str(class_name), None)
    is_solver = isinstance(cls, type) and issubclass(cls, diffusers.SchedulerMixin)
    return cls if is_solver else None


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
