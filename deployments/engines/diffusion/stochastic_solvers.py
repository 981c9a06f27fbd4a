"""Solvers that add noise as they go, which diffusers has not, or not with the request's own noise.

DPM++ SDE and DPM++ 2S a predict twice a step: for its begin, and for its middle. Sigmas and timesteps have an entry for
each prediction. DPM++ 3M SDE looks back at two steps. What is predicted and how steps are spaced is Euler's. Source:
crowsonkb/k-diffusion, `k_diffusion/sampling.py`; of the step that is left out AUTOMATIC1111/stable-diffusion-webui,
`modules/sd_samplers_kdiffusion.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import diffusers
import numpy as np
import torch

from deployments.engines.diffusion.noisy_steps import Noise, NoisySteps


class _Stochastic(NoisySteps, diffusers.EulerDiscreteScheduler):
    """Euler's schedule, and steps of another solver."""

    sigmas: torch.Tensor
    timesteps: torch.Tensor
    num_left_out: ClassVar[int] = 0  # sigmas before the last one that no step goes to

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        timesteps: Any = None,
        sigmas: Any = None,
    ) -> None:
        left_out = 0
        if num_inference_steps is not None:
            left_out = self.num_left_out
            num_inference_steps += left_out
        super().set_timesteps(num_inference_steps, device, timesteps, sigmas)
        if left_out:
            self.num_inference_steps -= left_out
            self.sigmas = torch.cat([self.sigmas[: -1 - left_out], self.sigmas[-1:]])
            self.timesteps = self.timesteps[:-left_out]
        self._begin(device)

    def _begin(self, device: str | torch.device | None) -> None:
        """Take up the schedule that was just set, and forget the steps before."""

    def _moved(self, at: int, x: torch.Tensor, output: torch.Tensor, own: Any, noise: Noise) -> torch.Tensor:
        return self._from_clean(at, x, own.pred_original_sample.float(), noise())

    def _from_clean(self, at: int, x: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return `x`, of the noise of `sigmas[at]`, at the next sigma; `clean` is what is there without the noise."""
        raise NotImplementedError

    def _level(self, at: int) -> float:
        return float(self.sigmas[at])


class _TwiceAStep(_Stochastic):
    """Predictions at a step's begin and at its middle, which is nearer to its end where that has noise of its own."""

    order = 2

    def _begin(self, device: str | torch.device | None) -> None:
        levels: list[float] = self.sigmas.tolist()
        times: list[float] = self.timesteps.tolist()
        log_sigmas = np.log(np.array(((1 - self.alphas_cumprod) / self.alphas_cumprod) ** 0.5))
        found, found_times = list[float](), list[float]()
        for (level, following), time in zip(itertools.pairwise(levels), times, strict=True):
            found.append(level)
            found_times.append(time)
            if following > 0:
                found.append(middle := self._middle(level, following))
                found_times.append(float(self._sigma_to_t(np.array(middle), log_sigmas)))
        self.sigmas = torch.tensor([*found, levels[-1]], dtype=self.sigmas.dtype)
        self.timesteps = torch.tensor(found_times, dtype=self.timesteps.dtype, device=device)
        self.begun: torch.Tensor | None = None  # the latents before a step that is at its middle
        self.first_noise: torch.Tensor | None = None

    def _from_clean(self, at: int, x: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        if self._level(at + 1) == 0:
            return clean
        if self.begun is None:
            self.begun, self.first_noise = x, noise
            return self._to_middle(at, x, clean, noise)
        begun, first, level, following = self.begun, self.first_noise, self._level(at - 1), self._level(at + 1)
        assert first is not None
        self.begun = self.first_noise = None
        down, up = _ancestral(level, following)
        return _nearer(begun, clean, down / level) + up * self._whole_noise(at, first, noise)

    def _middle(self, level: float, following: float) -> float:
        raise NotImplementedError

    def _to_middle(self, at: int, x: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _whole_noise(self, at: int, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return the noise of a step, of that which was drawn for each of its halves."""
        raise NotImplementedError


class DPMSolverSDEScheduler(_TwiceAStep):
    """DPM++ SDE. The noise of a step goes on from that of its first half, as a Brownian motion over sigma does."""

    def _middle(self, level: float, following: float) -> float:
        return math.sqrt(level * following)

    def _to_middle(self, at: int, x: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        down, up = _ancestral(self._level(at), self._level(at + 1))
        return _nearer(x, clean, down / self._level(at)) + up * noise

    def _whole_noise(self, at: int, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        level, middle, following = (self._level(place) for place in (at - 1, at, at + 1))
        moved = math.sqrt(level - middle) * first + math.sqrt(middle - following) * second
        return moved / math.sqrt(level - following)


class DPMSolver2SAncestralScheduler(_TwiceAStep):
    """DPM++ 2S a: below the next level of noise, and up to it."""

    def _middle(self, level: float, following: float) -> float:
        return math.sqrt(level * _ancestral(level, following)[0])

    def _to_middle(self, at: int, x: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return _nearer(x, clean, self._level(at + 1) / self._level(at))

    def _whole_noise(self, at: int, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return second


class DPMSolver3MSDEScheduler(_Stochastic):
    """DPM++ 3M SDE. Its last step leaves out the last sigma but the end's, as in the WebUI."""

    num_left_out = 1

    def _begin(self, device: str | torch.device | None) -> None:
        self.earlier: list[torch.Tensor] = []  # what was clean at the steps before, the last one first
        self.lengths: list[float] = []  # of these steps, in the logarithm of sigma

    def _from_clean(self, at: int, x: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        level, following = self._level(at), self._level(at + 1)
        if following == 0:
            return clean
        length = math.log(level / following)
        far = 2 * length  # with the noise that is added
        found = _nearer(x, clean, math.exp(-far))
        if self.earlier:
            second = math.expm1(-far) / far + 1
            slopes = [
                (newer - older) / (own / length)
                for newer, older, own in zip([clean, *self.earlier], self.earlier, self.lengths, strict=False)
            ]
            slope = slopes[0]
            if len(slopes) > 1:
                near, whole = self.lengths[0] / length, (self.lengths[0] + self.lengths[1]) / length
                bend = (slopes[0] - slopes[1]) / whole
                slope = slopes[0] + bend * near
                found = found - (second / far - 0.5) * bend
            found = found + second * slope
        self.earlier, self.lengths = [clean, *self.earlier[:1]], [length, *self.lengths[:1]]
        return found + following * math.sqrt(-math.expm1(-far)) * noise


SOLVERS: Final[Mapping[str, type[_Stochastic]]] = {
    cls.__name__: cls for cls in (DPMSolverSDEScheduler, DPMSolver2SAncestralScheduler, DPMSolver3MSDEScheduler)
}


def _ancestral(level: float, following: float) -> tuple[float, float]:
    """Return to which level a step goes without noise, and how much is added, to be at the following one."""
    return following**2 / level, following * math.sqrt(max(0.0, 1 - (following / level) ** 2))


def _nearer(x: torch.Tensor, clean: torch.Tensor, share: float) -> torch.Tensor:
    """Return `x` with so much left of its noise."""
    return share * x + (1 - share) * clean
