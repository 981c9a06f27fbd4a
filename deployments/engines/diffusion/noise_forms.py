"""The forms in which latents hold noise of a level, sigma, and a model's output tells of the image in them.

Source: ComfyUI, `comfy/model_sampling.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Final

import torch

from deployments.engines.diffusion.flow_solvers import is_flow
from deployments.engines.records.protocol import EngineError

_TIMES: Final = 1000.0  # of a flow: the timestep of noise alone
_AT_MOST: Final = 1e-5  # a share of the highest level: so near, a level counts as the highest
_KINDS: Final = ("epsilon", "v_prediction", "sample")


class NoiseForm(ABC):
    """The form of a model's noise. All tensors are float32."""

    kind: str  # of its prediction, as a solver's config of diffusers says it

    @abstractmethod
    def timestep(self, level: float) -> float:
        """Return the timestep that the model reads at this level."""

    @abstractmethod
    def read(self, x: torch.Tensor, level: float) -> torch.Tensor:
        """Return latents as the model reads them."""

    @abstractmethod
    def clean(self, x: torch.Tensor, level: float, output: torch.Tensor) -> torch.Tensor:
        """Return the latents without noise that the model's output stands for; `x` are those before `read`."""

    def output(self, x: torch.Tensor, level: float, clean: torch.Tensor) -> torch.Tensor:
        """Return the model's output that stands for these latents without noise: undo `clean`."""
        return (x - clean) / level

    @abstractmethod
    def noised(self, latents: torch.Tensor, noise: torch.Tensor, level: float) -> torch.Tensor:
        """Return latents with noise."""

    def first(self, latents: torch.Tensor, noise: torch.Tensor, level: float) -> torch.Tensor:
        """Return latents with the noise of the first step."""
        return self.noised(latents, noise, level)

    def last(self, x: torch.Tensor, level: float) -> torch.Tensor:
        """Return latents as they are handed out; `level` is that of the noise left over."""
        return x

    @abstractmethod
    def below(self, level: float, following: float, eta: float) -> float:
        """Return the level to which an ancestral step goes, from where noise brings it up to the following one."""

    @abstractmethod
    def risen(self, x: torch.Tensor, noise: torch.Tensor, below: float, following: float) -> torch.Tensor:
        """Return latents at `below` with noise that brings them up to `following`."""

    @abstractmethod
    def middle(self, level: float, following: float) -> float:
        """Return the level in the middle of two by the logarithm of signal to noise."""


class AddedNoise(NoiseForm):
    """Noise is added to the image, times its level: Stable Diffusion's. `levels` are those of its timesteps, rising."""

    def __init__(self, levels: torch.Tensor, kind: str) -> None:
        if kind not in _KINDS:
            raise EngineError(f"sampler: a model that predicts {kind!r}, expected one of {', '.join(_KINDS)}")
        self.kind = kind
        self._log_levels = levels.double().log()
        self._highest = float(levels[-1])

    def timestep(self, level: float) -> float:
        return float((self._log_levels - math.log(level)).abs().argmin())

    def read(self, x: torch.Tensor, level: float) -> torch.Tensor:
        return x / math.sqrt(level**2 + 1)

    def clean(self, x: torch.Tensor, level: float, output: torch.Tensor) -> torch.Tensor:
        if self.kind == "sample":
            return output
        if self.kind == "epsilon":
            return x - output * level
        return x / (level**2 + 1) - output * (level / math.sqrt(level**2 + 1))

    def output(self, x: torch.Tensor, level: float, clean: torch.Tensor) -> torch.Tensor:
        if self.kind == "sample":
            return clean
        if self.kind == "epsilon":
            return super().output(x, level, clean)
        return (x / (level**2 + 1) - clean) * (math.sqrt(level**2 + 1) / level)

    def noised(self, latents: torch.Tensor, noise: torch.Tensor, level: float) -> torch.Tensor:
        return latents + noise * level

    def first(self, latents: torch.Tensor, noise: torch.Tensor, level: float) -> torch.Tensor:
        is_highest = level > self._highest or math.isclose(level, self._highest, rel_tol=_AT_MOST)
        return latents + noise * (math.sqrt(1 + level**2) if is_highest else level)

    def below(self, level: float, following: float, eta: float) -> float:
        up = min(following, eta * math.sqrt(following**2 * (level**2 - following**2) / level**2))
        return math.sqrt(following**2 - up**2)

    def risen(self, x: torch.Tensor, noise: torch.Tensor, below: float, following: float) -> torch.Tensor:
        return x + noise * math.sqrt(following**2 - below**2)

    def middle(self, level: float, following: float) -> float:
        return math.sqrt(level * following)


class MixedNoise(NoiseForm):
    """Noise is mixed with the image, which has the rest of 1: that of flow matching."""

    kind = "flow_prediction"

    def timestep(self, level: float) -> float:
        return level * _TIMES

    def read(self, x: torch.Tensor, level: float) -> torch.Tensor:
        return x

    def clean(self, x: torch.Tensor, level: float, output: torch.Tensor) -> torch.Tensor:
        return x - output * level

    def noised(self, latents: torch.Tensor, noise: torch.Tensor, level: float) -> torch.Tensor:
        return noise * level + latents * (1 - level)

    def last(self, x: torch.Tensor, level: float) -> torch.Tensor:
        return x / (1 - level) if level else x

    def below(self, level: float, following: float, eta: float) -> float:
        return following * (1 + (following / level - 1) * eta)

    def risen(self, x: torch.Tensor, noise: torch.Tensor, below: float, following: float) -> torch.Tensor:
        share = (1 - following) / (1 - below)
        return x * share + noise * math.sqrt(following**2 - (below * share) ** 2)

    def middle(self, level: float, following: float) -> float:
        if level >= 1:
            return 0.9999  # there is no signal at 1, and its logarithm is none
        log_snr = (math.log((1 - level) / level) + math.log((1 - following) / following)) / 2
        return 1 / (math.exp(log_snr) + 1)


def noise_form(solver: Any) -> NoiseForm:
    """Return the form of the noise that a model's own solver removes. Raises EngineError for another one."""
    if is_flow(solver):
        return MixedNoise()
    shares = getattr(solver, "alphas_cumprod", None)
    if shares is None or solver.config.get("rescale_betas_zero_snr"):
        raise EngineError("sampler: the model's noise is neither that of Stable Diffusion nor a flow's; leave it out")
    return AddedNoise(((1 - shares) / shares) ** 0.5, str(solver.config.get("prediction_type", "epsilon")))
