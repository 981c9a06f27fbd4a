"""Schedules: falling levels of noise, by the formulas of ComfyUI.

A model's levels are a rising table; times lie between its first and its last one. Source: ComfyUI,
`comfy/samplers.py`, `comfy/model_sampling.py`, `comfy_extras/nodes_custom_sampler.py`, `comfy_extras/nodes_flux.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.workflows.records import Refused
from deployments.workflows.values import Shift, Sigmas

Floats: TypeAlias = npt.NDArray[np.float64]

MAX_STEPS: Final = 1000
_TABLE, _LONG_TABLE = 1_000, 10_000
_ZERO: Final = 1e-5
_RHO: Final = 7.0
_THRESHOLD: Final = 0.025  # of the linear part of linear_quadratic
_TURBO_STEPS: Final = 10
_LARGE: Final = 4_300  # tokens of an image, from which FLUX.2's shift does not depend on the steps
_TERMS: Final = 80  # of a series that halves with each
_HALVINGS: Final = 60
_TOKEN_SIDE: Final = 16  # pixels of a token of Flux
# The shift of flow models without a node that says one, and the length of their table.
_FLOWS: Final[Mapping[str, tuple[float, int]]] = {
    "StableDiffusion3Pipeline": (3.0, _TABLE),
    "ZImagePipeline": (3.0, _TABLE),
    "FluxPipeline": (math.exp(1.15), _LONG_TABLE),
    "FluxKontextPipeline": (math.exp(1.15), _LONG_TABLE),
    "FluxFillPipeline": (math.exp(1.15), _LONG_TABLE),
    "FluxControlPipeline": (math.exp(1.15), _LONG_TABLE),
    "LongCatImagePipeline": (math.exp(1.15), _LONG_TABLE),
    "Flux2Pipeline": (math.exp(2.02), _LONG_TABLE),
    "Flux2KleinPipeline": (math.exp(2.02), _LONG_TABLE),
    "QwenImagePipeline": (math.exp(1.15), _LONG_TABLE),
    "QwenImageEditPipeline": (math.exp(1.15), _LONG_TABLE),
    "QwenImageEditPlusPipeline": (math.exp(1.15), _LONG_TABLE),
    "QwenImage21Pipeline": (math.exp(0.69), _LONG_TABLE),
    "Krea2Pipeline": (math.exp(1.15), _LONG_TABLE),
    "ErnieImagePipeline": (3.0, _TABLE),
    "Lumina2Pipeline": (6.0, _TABLE),
    "WanPipeline": (8.0, _TABLE),
    "WanImageToVideoPipeline": (8.0, _TABLE),
    "WanVACEPipeline": (8.0, _TABLE),
    "HunyuanVideoPipeline": (7.0, _TABLE),
    "LTXPipeline": (math.exp(2.37), _LONG_TABLE),
}
_ADDED: Final = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
_SHIFTED_BY_NODES: Final = ("HiDreamImagePipeline", "OvisImagePipeline")  # flows whose workflows say their shift
_NUMBERS: Final = re.compile(r"[-+]?(?:\d*\.)?\d+")


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """A model's levels of noise: a rising table, and the shift of a flow, whose times lie between 0 and 1.

    Without a shift they are Stable Diffusion's, and times are places in the table.
    """

    table: Floats
    shift: float | None = None

    def at(self, times: Floats) -> Floats:
        """Return the levels of times."""
        if self.shift is not None:
            return self.shift * times / (1 + (self.shift - 1) * times)
        return np.exp(np.interp(times, np.arange(len(self.table)), np.log(self.table)))

    @property
    def times(self) -> tuple[float, float]:
        """The times of the lowest and of the highest level."""
        return (0.0, len(self.table) - 1.0) if self.shift is None else (self.lowest, self.highest)

    @property
    def lowest(self) -> float:
        return float(self.table[0])

    @property
    def highest(self) -> float:
        return float(self.table[-1])


def flow_levels(shift: float, size: int) -> Levels:
    """Return the levels of a flow whose times are shifted."""
    times = np.arange(1, size + 1) / size
    return Levels(shift * times / (1 + (shift - 1) * times), shift)


def added_levels(config: Mapping[str, Any]) -> Levels:
    """Return the levels of Stable Diffusion, or of the betas in a solver's config."""
    start, end = float(config.get("beta_start", 0.00085)), float(config.get("beta_end", 0.012))
    size = int(config.get("num_train_timesteps", _TABLE))
    kind = config.get("beta_schedule", "scaled_linear")
    if kind not in ("scaled_linear", "linear") or config.get("rescale_betas_zero_snr"):
        raise Refused(f"the model's noise is of the kind {kind!r}, whose levels are not computed here", "model")
    power = 2 if kind == "scaled_linear" else 1
    kept = np.cumprod(1 - np.linspace(start ** (1 / power), end ** (1 / power), size) ** power)
    return Levels(np.sqrt((1 - kept) / kept))


def levels_of(
    class_name: str, variant: Mapping[str, bool | int], scheduler: Mapping[str, Any], shift: Shift | None
) -> Levels:
    """Return the levels of a registered model. Raises Refused for a class whose levels are not known."""
    if class_name in _ADDED:
        if shift is not None:
            raise Refused(f"{shift.kind} is for flow models, and the model is a {class_name}", "model")
        return added_levels(scheduler)
    if class_name in _SHIFTED_BY_NODES and shift is None:
        raise Refused(f"the shift of a {class_name} is said by a node: link one of ModelSamplingSD3's kind", "model")
    if class_name not in _FLOWS and class_name not in _SHIFTED_BY_NODES:
        raise Refused(f"the levels of noise of a {class_name or 'model without a class'} are not known", "model")
    strength, size = _FLOWS.get(class_name, (1.0, _TABLE))
    if class_name == "FluxPipeline" and variant.get("guidance_embeds") is False:  # FLUX.1-schnell
        strength, size = 1.0, _TABLE
    if shift is not None and shift.kind == "ModelSamplingFlux":
        slope = (shift.max_shift - shift.base_shift) / (4096 - 256)
        tokens = shift.width * shift.height / _TOKEN_SIDE**2
        strength, size = math.exp(tokens * slope + shift.base_shift - slope * 256), _LONG_TABLE
    elif shift is not None:
        strength, size = shift.shift, _TABLE
    if not (math.isfinite(strength) and strength > 0):
        raise Refused(f"a shift of {strength:g}: expected more than 0", "model")
    return flow_levels(strength, size)


def _ended(levels: Sequence[float] | Floats) -> Sigmas:
    return (*(float(one) for one in levels), 0.0)


def _normal(levels: Levels, steps: int) -> Sigmas:
    first, last = levels.times
    if abs(float(levels.at(np.array(first)))) <= _ZERO:
        return tuple(float(one) for one in levels.at(np.linspace(last, first, steps + 1)))
    return _ended(levels.at(np.linspace(last, first, steps)))


def _sgm_uniform(levels: Levels, steps: int) -> Sigmas:
    return _ended(levels.at(np.linspace(*levels.times[::-1], steps + 1)[:-1]))


def _simple(levels: Levels, steps: int) -> Sigmas:
    share = len(levels.table) / steps
    return _ended([levels.table[-1 - int(place * share)] for place in range(steps)])


def _ddim_uniform(levels: Levels, steps: int) -> Sigmas:
    starts_at_zero = abs(levels.table[1]) <= _ZERO
    every = max(len(levels.table) // (steps + starts_at_zero), 1)
    found = levels.table[1::every][::-1]
    return tuple(float(one) for one in found) if starts_at_zero else _ended(found)


def _karras(levels: Levels, steps: int) -> Sigmas:
    return karras(steps, levels.lowest, levels.highest, _RHO)


def karras(steps: int, lowest: float, highest: float, rho: float) -> Sigmas:
    """Return levels in even steps of their `rho`-th root."""
    return _ended(np.linspace(highest ** (1 / rho), lowest ** (1 / rho), steps) ** rho)


def _exponential(levels: Levels, steps: int) -> Sigmas:
    return exponential(steps, levels.lowest, levels.highest)


def exponential(steps: int, lowest: float, highest: float) -> Sigmas:
    """Return levels in even steps of their logarithm."""
    return _ended(np.exp(np.linspace(math.log(highest), math.log(lowest), steps)))


def _kl_optimal(levels: Levels, steps: int) -> Sigmas:
    if steps < 2:
        raise Refused("kl_optimal has two steps at least", "steps")
    return _ended(np.tan(np.linspace(math.atan(levels.highest), math.atan(levels.lowest), steps)))


def _beta(levels: Levels, steps: int) -> Sigmas:
    return beta_quantiles(levels, steps, 0.6, 0.6)


def beta_quantiles(levels: Levels, steps: int, alpha: float, beta: float) -> Sigmas:
    """Return the levels at the quantiles of a beta distribution, none twice."""
    if alpha <= 0 or beta <= 0:
        raise Refused(f"alpha {alpha:g} and beta {beta:g}: expected more than 0", "alpha")
    quantiles = _beta_quantiles(1 - np.arange(steps) / steps, alpha, beta)
    places = np.rint(quantiles * (len(levels.table) - 1)).astype(int)
    is_new = np.diff(places, prepend=-1) != 0
    return _ended(levels.table[places[is_new]])


def _linear_quadratic(levels: Levels, steps: int) -> Sigmas:
    if steps == 1:
        return _ended([levels.highest])
    linear = steps // 2
    curved = steps - linear
    over = linear - _THRESHOLD * steps
    square = over / (linear * curved**2)
    slope = _THRESHOLD / linear - 2 * over / curved**2
    done = [place * _THRESHOLD / linear for place in range(linear)]
    done += [square * place**2 + slope * place + square * linear**2 for place in range(linear, steps)]
    return _ended([(1 - one) * levels.highest for one in done])


SCHEDULES: Final[Mapping[str, Callable[[Levels, int], Sigmas]]] = {
    "simple": _simple,
    "sgm_uniform": _sgm_uniform,
    "karras": _karras,
    "exponential": _exponential,
    "ddim_uniform": _ddim_uniform,
    "beta": _beta,
    "normal": _normal,
    "linear_quadratic": _linear_quadratic,
    "kl_optimal": _kl_optimal,
}


def schedule(name: str, levels: Levels, steps: int) -> Sigmas:
    """Return the levels of a schedule, and a 0. Raises Refused for more steps than a request may have."""
    if not 1 <= steps <= MAX_STEPS:
        raise Refused(f"{steps} steps are scheduled: expected 1 to {MAX_STEPS}", "steps")
    return SCHEDULES[name](levels, steps)


def last_part(name: str, levels: Levels, steps: int, denoise: float) -> Sigmas:
    """Return the last `steps` of a schedule, of which they are the part `denoise`; none at all at 0."""
    if denoise <= 0:
        return ()
    return schedule(name, levels, min(int(steps / denoise), MAX_STEPS + 1))[-(steps + 1) :]


def turbo(levels: Levels, steps: int, denoise: float) -> Sigmas:
    """Return the levels that SD-Turbo was distilled to."""
    every = len(levels.table) // _TURBO_STEPS
    times = np.arange(_TURBO_STEPS, 0, -1, dtype=np.float64) * every - 1
    start = _TURBO_STEPS - int(_TURBO_STEPS * denoise)
    return _ended(levels.at(times[start : start + steps]))


def flux_2(steps: int, width: int, height: int) -> Sigmas:
    """Return the levels of FLUX.2 for an image of that size."""
    tokens = round(width * height / _TOKEN_SIDE**2)
    of_200, of_10 = 1.6927e-4 * tokens + 0.45666666, 8.73809524e-5 * tokens + 1.89833333
    mu = of_200 if tokens > _LARGE else of_200 + (of_200 - of_10) / 190 * (steps - 200)
    shift = math.exp(mu)
    times = np.linspace(1, 0, steps + 1)[:-1]
    return _ended(shift * times / (1 + (shift - 1) * times))


def ltxv(steps: int, tokens: int, shifts: tuple[float, float], terminal: float | None) -> Sigmas:
    """Return LTXVScheduler's: `shifts` are those of 1,024 tokens and of 4,096; with a `terminal` it is the last level
    before 0."""
    base_shift, max_shift = shifts
    slope = (max_shift - base_shift) / (4096 - 1024)
    mu = tokens * slope + base_shift - slope * 1024
    times = np.linspace(1, 0, steps + 1)[:-1]
    levels = math.exp(mu) / (math.exp(mu) + 1 / times - 1)
    if terminal is not None:
        if levels[-1] == 1:
            raise Refused("a single step cannot be stretched: it is noise alone", "stretch")
        levels = 1 - (1 - levels) * (1 - terminal) / (1 - levels[-1])
    return _ended(levels)


def manual(text: str) -> Sigmas:
    """Return the numbers in a text, without exponents."""
    if len(text) > 100 * MAX_STEPS:
        raise Refused(f"{len(text)} characters: at most {100 * MAX_STEPS}", "sigmas")
    return tuple(float(one) for one in _NUMBERS.findall(text))


def _beta_quantiles(shares: Floats, alpha: float, beta: float) -> Floats:
    """Return where a beta distribution has these shares below."""
    low, high = np.zeros_like(shares), np.ones_like(shares)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_below = _beta_share(middle, alpha, beta) < shares
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return np.round((low + high) / 2, 12)  # so that a half is one


def _beta_share(x: Floats, alpha: float, beta: float) -> Floats:
    """Return the regularized incomplete beta function, by its series at the nearer end."""
    whole = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)

    def series(x: Floats, alpha: float, beta: float) -> Floats:
        term, total = np.ones_like(x), np.full_like(x, 1 / alpha)
        for number in range(1, _TERMS):
            term = term * x * (number - beta) / number
            total = total + term / (alpha + number)
        return total * x**alpha * math.exp(whole)

    near, far = series(np.minimum(x, 0.5), alpha, beta), 1 - series(np.minimum(1 - x, 0.5), beta, alpha)
    return np.where(x <= 0.5, near, far)
