"""Samplers over given levels of noise, by the formulas of k-diffusion, in the form of a solver of diffusers.

A solver's timesteps are the forwards: some samplers have two a step. Source: crowsonkb/k-diffusion and ComfyUI,
`comfy/k_diffusion/sampling.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch

from configs.options import Sampler
from deployments.engines.diffusion.families.base import ImageSize, Latents
from deployments.engines.diffusion.noise_forms import NoiseForm
from deployments.engines.records.protocol import EngineError

_LMS_ORDER: Final = 4
_NEARLY_CLEAN: Final = 0.001  # in the place of a last level of 0, which has no logarithm
_SEEDS: Final = 2**64
_TINY: Final = 1e-8  # of a length, so that none is divided by 0


class Forward(NamedTuple):
    """One forward of a sampler: the level of noise at which it is, and its step; a step's second one follows it."""

    level: float
    step: int
    is_second: bool = False


@dataclass(frozen=True, slots=True)
class MaskedLatents:
    """Latents of which a part is kept, the noise over it, and a mask, which is 1 where all is painted anew."""

    latents: torch.Tensor
    noise: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepNoise:
    """Noise of steps for latents (B, C, h, w), in the form in which they are denoised."""

    shape: Sequence[int]
    latents: Latents
    size: ImageSize
    device: torch.device

    def channels_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return latents or what is like them as images, (B, C, h, w)."""
        return self.latents.unpack(x, self.size)

    def draw(self, generator: torch.Generator | None) -> torch.Tensor:
        """Draw on the host, as the first noise is."""
        return self.latents.pack(torch.randn(tuple(self.shape), generator=generator).to(self.device))


class SigmaSolver:
    """A sampler in its schedule: counts its forwards, and may remember earlier ones. `noise` is that of its steps.

    The latents are float32; a model reads them as `dtype`.
    """

    order: ClassVar[int] = 1
    is_scale_input_called: ClassVar[bool] = True

    def __init__(
        self,
        form: NoiseForm,
        sampler: Sampler,
        noise: StepNoise,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.form, self.sampler, self.config = form, sampler, {"prediction_type": form.kind}
        self._drawn, self._dtype = noise, dtype
        self._forwards = tuple(self._planned())
        self.sigmas = torch.tensor([*(one.level for one in self._forwards), sampler.sigmas[-1]])
        self.timesteps = torch.tensor([form.timestep(one.level) for one in self._forwards], device=device)
        self.kept: MaskedLatents | None = None
        self.at = 0  # forwards done
        self.expected: torch.Tensor | None = None  # the clean latents at the begin of the last step

    def scale_model_input(self, sample: torch.Tensor, timestep: Any = None) -> torch.Tensor:
        """Return latents as the model reads them in the next forward."""
        level = self._forwards[self.at].level
        return self.form.read(self._seen(sample, level), level).to(self._dtype)

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Any,
        sample: torch.Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """Return the latents for the next forward, or the last ones."""
        here = self._forwards[self.at]
        clean = self.form.clean(self._seen(sample, here.level), here.level, model_output.float())
        if self.kept is not None:
            mask = self._mask_at(here.level)
            clean = clean * mask + self.kept.latents * (1 - mask)
        if here.step == self.sampler.num_steps - 1 and not here.is_second:
            self.expected = clean
        self.at += 1
        moved = self._moved(here, sample, clean, generator)
        if self.at == len(self._forwards):
            moved = self.form.last(moved, self.sampler.sigmas[-1])
        return (moved,)

    def normed(self, guided: torch.Tensor, prompt: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Return a guided output of the model whose clean latents are nowhere longer than those of the prompt alone.

        Lengths are those over the channels. Source: ComfyUI, `comfy_extras/nodes_cfg.py`.
        """
        assert self.sampler.cfg_norm is not None
        level = self._forwards[self.at].level
        x = self._seen(sample, level)
        clean, bound = (self.form.clean(x, level, one.float()) for one in (guided, prompt))
        images = self._drawn.channels_of(clean)
        lengths = self._drawn.channels_of(bound).norm(dim=1, keepdim=True) / (images.norm(dim=1, keepdim=True) + _TINY)
        found = self._drawn.latents.pack(images * lengths.clamp(0, 1) * self.sampler.cfg_norm)
        return self.form.output(x, level, found)

    def step_generator(self, seed: int) -> torch.Generator:
        """Return the stream of the noise of steps, for a request of that seed."""
        own = self.sampler.noise_seed
        return torch.Generator("cpu").manual_seed(((seed if own is None else own) + 1) % _SEEDS)

    def first_latents(self, latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return latents with the noise of the first step."""
        return self.form.first(latents, noise, self.sampler.sigmas[0])

    def _seen(self, x: torch.Tensor, level: float) -> torch.Tensor:
        """Return latents whose kept part is as noisy as this level is."""
        if (kept := self.kept) is None:
            return x
        mask = self._mask_at(level)
        return x * mask + self.form.noised(kept.latents, kept.noise, level) * (1 - mask)

    def _mask_at(self, level: float) -> torch.Tensor:
        """Return where a forward at a level of noise paints.

        Source of its change with the level: ComfyUI, `comfy_extras/nodes_differential_diffusion.py`.
        """
        assert self.kept is not None
        mask, until = self.kept.mask, self.sampler.masks_until
        if until is None:
            return mask
        first, last, here = (self.form.timestep(one) for one in (self.sampler.sigmas[0], until, level))
        return (mask >= (here - last) / (first - last)).to(mask)

    def _planned(self) -> Sequence[Forward]:
        return [Forward(level, step) for step, level in enumerate(self.sampler.sigmas[:-1])]

    def _moved(
        self, here: Forward, x: torch.Tensor, clean: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        """Return `x` after a forward, which found `clean` in it."""
        raise NotImplementedError

    def _levels(self, step: int) -> tuple[float, float]:
        """Return the level of a step, and the following one."""
        return self.sampler.sigmas[step], self.sampler.sigmas[step + 1]

    def _noise(self, generator: torch.Generator | None) -> torch.Tensor:
        return self._drawn.draw(generator) * self.sampler.s_noise


class Euler(SigmaSolver):
    def _moved(
        self, here: Forward, x: torch.Tensor, clean: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        level, following = self._levels(here.step)
        return nearer(x, clean, following / level)


class LatentConsistency(SigmaSolver):
    """LCM: what is clean gets new noise of the next level."""

    def _moved(
        self, here: Forward, x: torch.Tensor, clean: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        _, following = self._levels(here.step)
        return self.form.noised(clean, self._drawn.draw(generator), following) if following else clean


class LinearMultistep(SigmaSolver):
    """LMS: the slopes of the last steps, each times the integral of its Lagrange polynomial over the step."""

    slopes: Sequence[torch.Tensor] = ()  # the last one first

    def _moved(
        self, here: Forward, x: torch.Tensor, clean: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        level, following = self._levels(here.step)
        self.slopes = [(x - clean) / level, *self.slopes[: _LMS_ORDER - 1]]
        if following == 0:
            return clean
        levels = self.sampler.sigmas[: here.step + 1][::-1][: len(self.slopes)]
        shares = lagrange_integrals(levels, level, following)
        return x + sum(slope * share for slope, share in zip(self.slopes, shares, strict=True))


class DpmPlusPlus2M(SigmaSolver):
    """DPM++ 2M: what is clean is extrapolated from the step before, over the logarithm of the level."""

    earlier: torch.Tensor | None = None  # what was clean at the step before

    def _moved(
        self, here: Forward, x: torch.Tensor, clean: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        level, following = self._levels(here.step)
        found = clean
        if self.earlier is not None and following > 0:
            ratio = math.log(self.sampler.sigmas[here.step - 1] / level) / math.log(level / following)
            found = clean * (1 + 1 / (2 * ratio)) - self.earlier * (1 / (2 * ratio))
        self.earlier = clean
        return nearer(x, found, following / level)


class ResMultistep(SigmaSolver):
    """RES: an exponential integrator of second order (2308.02157)."""

    earlier: torch.Tensor | None = None

    def _moved(
        self, here: Forward, x: torch.Tensor, clean: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        level, following = self._levels(here.step)
        earlier, self.earlier = self.earlier, clean
        if earlier is None or following == 0:
            return nearer(x, clean, following / level)
        length = math.log(level / following)
        place = -math.log(self.sampler.sigmas[here.step - 1] / level) / length  # of the step before, from this one
        first = -math.expm1(-length) / length
        second = (1 - first) / length
        return x * (following / level) + (clean * (first - second / place) + earlier * (second / place)) * length


class _Ancestral(SigmaSolver):
    """Goes below the next level, and up to it with noise."""

    def _below(self, step: int) -> float:
        level, following = self._levels(step)
        return self.form.below(level, following, self.sampler.eta) if following else 0.0

    def _risen(self, step: int, x: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        _, following = self._levels(step)
        if not (following and self.sampler.eta):
            return x
        return self.form.risen(x, self._noise(generator), self._below(step), following)


class EulerAncestral(_Ancestral):
    def _moved(
        self, here: Forward, x: torch.Tensor, clean: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        found = nearer(x, clean, self._below(here.step) / here.level)
        return self._risen(here.step, found, generator) if self._below(here.step) else found


class _TwiceAStep(_Ancestral):
    """A forward at the begin of a step, and one at a level on the way, where a step of Euler leads."""

    begun: torch.Tensor | None = None  # the latents before a step that is on its way
    found: torch.Tensor | None = None  # what was clean in them

    def _planned(self) -> Sequence[Forward]:
        planned = list[Forward]()
        for step, level in enumerate(self.sampler.sigmas[:-1]):
            planned.append(Forward(level, step))
            if self._below(step):
                planned.append(Forward(self._on_the_way(step), step, is_second=True))
        return planned

    def _moved(
        self, here: Forward, x: torch.Tensor, clean: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        if not here.is_second:
            if not (below := self._below(here.step)):
                return nearer(x, clean, below / here.level)
            self.begun, self.found = x, clean
            return nearer(x, clean, self._on_the_way(here.step) / here.level)
        begun, found, self.begun, self.found = self.begun, self.found, None, None
        assert begun is not None
        assert found is not None
        slope = (x - clean) / here.level
        return self._risen(here.step, self._ended(here.step, begun, found, clean, slope), generator)

    def _on_the_way(self, step: int) -> float:
        """Return the level of the step's second forward."""
        raise NotImplementedError

    def _ended(
        self, step: int, begun: torch.Tensor, found: torch.Tensor, clean: torch.Tensor, slope: torch.Tensor
    ) -> torch.Tensor:
        """Return the latents that began the step at its end. `clean` and `slope` are those of the second forward."""
        raise NotImplementedError


class DpmPlusPlus2SAncestral(_TwiceAStep):
    def _on_the_way(self, step: int) -> float:
        return self.form.middle(self.sampler.sigmas[step], self._below(step))

    def _ended(
        self, step: int, begun: torch.Tensor, found: torch.Tensor, clean: torch.Tensor, slope: torch.Tensor
    ) -> torch.Tensor:
        return nearer(begun, clean, self._below(step) / self.sampler.sigmas[step])


class Dpm2Ancestral(_TwiceAStep):
    def _on_the_way(self, step: int) -> float:
        return math.sqrt(self.sampler.sigmas[step] * self._below(step))

    def _ended(
        self, step: int, begun: torch.Tensor, found: torch.Tensor, clean: torch.Tensor, slope: torch.Tensor
    ) -> torch.Tensor:
        return begun + slope * (self._below(step) - self.sampler.sigmas[step])


class Dpm2(Dpm2Ancestral):
    """The same without noise."""

    def _below(self, step: int) -> float:
        return self._levels(step)[1]

    def _risen(self, step: int, x: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        return x


class Heun(Dpm2):
    """The mean of the slopes at both ends of a step."""

    def _on_the_way(self, step: int) -> float:
        return self._below(step)

    def _ended(
        self, step: int, begun: torch.Tensor, found: torch.Tensor, clean: torch.Tensor, slope: torch.Tensor
    ) -> torch.Tensor:
        level, following = self._levels(step)
        return begun + ((begun - found) / level + slope) * ((following - level) / 2)


class UniPC(SigmaSolver):
    """A multistep method over the logarithm of the level: each step is predicted, and corrected by the next forward.

    Its order is 3 at most, and its last level not quite 0. Source: ComfyUI, `comfy/extra_samplers/uni_pc.py`.
    """

    grows: ClassVar[bool] = False  # the second form of B(h): e^h - 1 in place of h
    begun: torch.Tensor | None = None  # the corrected latents of the step before
    found: Sequence[torch.Tensor] = ()  # what was clean, the last one first

    def __init__(
        self,
        form: NoiseForm,
        sampler: Sampler,
        noise: StepNoise,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(form, sampler, noise, device, dtype)
        if sampler.num_steps < 2:
            raise EngineError(f"sampler: {sampler.name} takes two steps at least")
        *levels, last = sampler.sigmas
        self._ends = (*levels, last or _NEARLY_CLEAN)

    def _moved(
        self, here: Forward, x: torch.Tensor, clean: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        if self.begun is not None:
            x = self._step(here.step, self.begun, clean)
        self.begun, self.found = x, [clean, *self.found[:2]]
        return self._step(here.step + 1, x, None)

    def _step(self, to: int, x: torch.Tensor, clean: torch.Tensor | None) -> torch.Tensor:
        """Return the latents of step `to - 1` at step `to`: predicted, or with what is clean there corrected."""
        steps, most = self.sampler.num_steps, min(3, self.sampler.num_steps - 1)
        order = to if to < most else min(most, steps + 1 - to)
        start, end = self._ends[to - 1], self._ends[to]
        length = math.log(start / end)
        places = [math.log(start / self._ends[to - 1 - back]) / length for back in range(1, order)]
        last, *earlier = self.found
        slopes = [(one - last) / place for one, place in zip(earlier, places, strict=False)]
        scale = math.expm1(-length) if self.grows else -length
        powers = np.array([*places, 1.0]) ** np.arange(order)[:, None]
        aims, phi, factor = list[float](), math.expm1(-length) / -length - 1, 1
        for number in range(1, order + 1):
            aims.append(phi * factor / scale)
            factor *= number + 1
            phi = phi / -length - 1 / factor
        moved = x * (end / start) - last * math.expm1(-length)
        if clean is None:
            shares = np.linalg.solve(powers[:-1, :-1], aims[:-1]) if order > 2 else [0.5][: order - 1]
        else:
            shares = np.linalg.solve(powers, aims) if order > 1 else [0.5]
            slopes = [*slopes, clean - last]
        for slope, share in zip(slopes, shares, strict=True):
            moved = moved - slope * (scale * float(share))
        return moved


class UniPCGrowing(UniPC):
    grows: ClassVar[bool] = True


SAMPLERS: Final[Mapping[str, type[SigmaSolver]]] = {
    "euler": Euler,
    "euler_ancestral": EulerAncestral,
    "ddim": Euler,  # without a mask, whose noise another seed draws
    "heun": Heun,
    "dpm_2": Dpm2,
    "dpm_2_ancestral": Dpm2Ancestral,
    "lms": LinearMultistep,
    "dpmpp_2s_ancestral": DpmPlusPlus2SAncestral,
    "dpmpp_2m": DpmPlusPlus2M,
    "res_multistep": ResMultistep,
    "lcm": LatentConsistency,
    "uni_pc": UniPC,
    "uni_pc_bh2": UniPCGrowing,
}


def nearer(x: torch.Tensor, clean: torch.Tensor, share: float) -> torch.Tensor:
    """Return `x` with so much left of its noise."""
    return x * share + clean * (1 - share)


def lagrange_integrals(levels: Sequence[float], start: float, stop: float) -> list[float]:
    """Return the integral from `start` to `stop` of each level's polynomial: 1 there, and 0 at the other levels."""
    integrals = []
    for place, level in enumerate(levels):
        others = [other for number, other in enumerate(levels) if number != place]
        whole = np.polyint(np.atleast_1d(np.poly(others))) / np.prod([level - other for other in others])
        integrals.append(float(np.polyval(whole, stop) - np.polyval(whole, start)))
    return integrals


def first_noise(sampler: Sampler, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return the noise (B, C, h, w) that images begin with: one draw for all, or the places in a longer batch."""
    generator = torch.Generator("cpu").manual_seed(seed)
    if sampler.picks is None:
        return torch.randn(tuple(shape), generator=generator)
    drawn = [torch.randn((1, *shape[1:]), generator=generator) for _ in range(max(sampler.picks) + 1)]
    return torch.cat([drawn[place] for place in sampler.picks])


def why_no_sigmas(sigmas: Sequence[float]) -> str | None:
    """Return why levels are no schedule, or None."""
    if all(math.isfinite(one) and one >= 0 for one in sigmas) and all(a > b for a, b in itertools.pairwise(sigmas)):
        return None
    return "expected numbers of 0 or more, each lower than the one before"
