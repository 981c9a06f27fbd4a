"""Kinds of nodes that make levels of noise, and that shift those of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from deployments.workflows.backend import Catalog
from deployments.workflows.kinds import Kind, Output, choice, integer, link, number, text
from deployments.workflows.records import Refused
from deployments.workflows.sampling import levels_of_model
from deployments.workflows.schedules import (
    MAX_STEPS,
    SCHEDULES,
    beta_quantiles,
    exponential,
    flux_2,
    karras,
    last_part,
    manual,
    turbo,
)
from deployments.workflows.values import ModelValue, Shift, Sigmas

_MAX_STEP: Final = 10_000


def _basic_scheduler(catalog: Catalog, model: ModelValue, scheduler: str, steps: int, denoise: float) -> tuple[Sigmas]:
    return (last_part(scheduler, levels_of_model(catalog, model), steps, min(denoise, 1.0)),)


def _beta_scheduler(catalog: Catalog, model: ModelValue, steps: int, alpha: float, beta: float) -> tuple[Sigmas]:
    return (beta_quantiles(levels_of_model(catalog, model), steps, alpha, beta),)


def _turbo_scheduler(catalog: Catalog, model: ModelValue, steps: int, denoise: float) -> tuple[Sigmas]:
    return (turbo(levels_of_model(catalog, model), steps, denoise),)


def _karras_scheduler(steps: int, sigma_max: float, sigma_min: float, rho: float) -> tuple[Sigmas]:
    return (karras(steps, _above_zero(sigma_min), _above_zero(sigma_max), rho),)


def _exponential_scheduler(steps: int, sigma_max: float, sigma_min: float) -> tuple[Sigmas]:
    return (exponential(steps, _above_zero(sigma_min), _above_zero(sigma_max)),)


def _above_zero(sigma: float) -> float:
    if sigma <= 0:
        raise Refused(f"a level of {sigma:g}: expected more than 0", "sigma_min")
    return sigma


def _flux_2_scheduler(steps: int, width: int, height: int) -> tuple[Sigmas]:
    return (flux_2(steps, width, height),)


def _manual_sigmas(sigmas: str) -> tuple[Sigmas]:
    return (manual(sigmas),)


def _split(sigmas: Sigmas, step: int) -> tuple[Sigmas, Sigmas]:
    return sigmas[: step + 1], sigmas[step:]


def _split_denoise(sigmas: Sigmas, denoise: float) -> tuple[Sigmas, Sigmas]:
    last = round(max(len(sigmas) - 1, 0) * denoise)
    return sigmas[:-last], sigmas[-(last + 1) :]


def _flip(sigmas: Sigmas) -> tuple[Sigmas]:
    flipped = sigmas[::-1]
    return ((1e-4, *flipped[1:]) if flipped[:1] == (0.0,) else flipped,)


def _set_first(sigmas: Sigmas, sigma: float) -> tuple[Sigmas]:
    return ((sigma, *sigmas[1:]),)


def _shift(kind: str) -> Any:
    def shifted(model: ModelValue, shift: float) -> tuple[ModelValue]:
        return (replace(model, shift=Shift(kind, shift)),)

    return shifted


def _shift_flux(model: ModelValue, max_shift: float, base_shift: float, width: int, height: int) -> tuple[ModelValue]:
    shift = Shift("ModelSamplingFlux", base_shift=base_shift, max_shift=max_shift, width=width, height=height)
    return (replace(model, shift=shift),)


_MODEL: Final = link("model", "MODEL")
_SIGMAS: Final = link("sigmas", "SIGMAS")
_STEPS: Final = integer("steps", 20, 1, _MAX_STEP)
_SCHEDULER: Final = choice("scheduler", tuple(SCHEDULES))
_DENOISE: Final = number("denoise", 1.0, 0.0, 1.0)
_OUT_SIGMAS: Final = (Output("SIGMAS"),)
_OUT_MODEL: Final = (Output("MODEL"),)


def _sigmas(name: str, inputs: tuple[Any, ...], function: Any, *, reads_catalog: bool = False) -> Kind:
    return Kind(name, inputs, _OUT_SIGMAS, function, reads_catalog=reads_catalog, category="sampling/custom_sampling")


SIGMA_KINDS: Final = (
    _sigmas("BasicScheduler", (_MODEL, _SCHEDULER, _STEPS, _DENOISE), _basic_scheduler, reads_catalog=True),
    _sigmas(
        "BetaSamplingScheduler",
        (_MODEL, _STEPS, number("alpha", 0.6, 0.0, 50.0), number("beta", 0.6, 0.0, 50.0)),
        _beta_scheduler,
        reads_catalog=True,
    ),
    _sigmas(
        "SDTurboScheduler",
        (_MODEL, integer("steps", 1, 1, 10), _DENOISE),
        _turbo_scheduler,
        reads_catalog=True,
    ),
    _sigmas(
        "KarrasScheduler",
        (
            *(integer("steps", 20, 1, MAX_STEPS), number("sigma_max", 14.614642, 0.0, 5000.0)),
            *(number("sigma_min", 0.0291675, 0.0, 5000.0), number("rho", 7.0, 0.01, 100.0)),
        ),
        _karras_scheduler,
    ),
    _sigmas(
        "ExponentialScheduler",
        (
            *(integer("steps", 20, 1, MAX_STEPS), number("sigma_max", 14.614642, 0.0, 5000.0)),
            number("sigma_min", 0.0291675, 0.0, 5000.0),
        ),
        _exponential_scheduler,
    ),
    _sigmas(
        "Flux2Scheduler",
        (integer("steps", 20, 1, MAX_STEPS), integer("width", 1024, 16), integer("height", 1024, 16)),
        _flux_2_scheduler,
    ),
    _sigmas("ManualSigmas", (text("sigmas", "1, 0.5"),), _manual_sigmas),
    Kind(
        "SplitSigmas",
        (_SIGMAS, integer("step", 0, 0, _MAX_STEP)),
        (Output("SIGMAS", "high_sigmas"), Output("SIGMAS", "low_sigmas")),
        _split,
    ),
    Kind(
        "SplitSigmasDenoise",
        (_SIGMAS, _DENOISE),
        (Output("SIGMAS", "high_sigmas"), Output("SIGMAS", "low_sigmas")),
        _split_denoise,
    ),
    _sigmas("FlipSigmas", (_SIGMAS,), _flip),
    _sigmas("SetFirstSigma", (_SIGMAS, number("sigma", 136.0, 0.0, 20_000.0)), _set_first),
    Kind("ModelSamplingSD3", (_MODEL, number("shift", 3.0, 0.0, 100.0)), _OUT_MODEL, _shift("ModelSamplingSD3")),
    Kind(
        "ModelSamplingAuraFlow",
        (_MODEL, number("shift", 1.73, 0.0, 100.0)),
        _OUT_MODEL,
        _shift("ModelSamplingAuraFlow"),
    ),
    Kind(
        "ModelSamplingFlux",
        (
            *(_MODEL, number("max_shift", 1.15, 0.0, 100.0), number("base_shift", 0.5, 0.0, 100.0)),
            *(integer("width", 1024, 16), integer("height", 1024, 16)),
        ),
        _OUT_MODEL,
        _shift_flux,
    ),
)
