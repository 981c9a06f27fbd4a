"""Steps of a solver that add the request's own noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers.utils.torch_utils import randn_tensor

Noise = Callable[[], torch.Tensor]  # draws noise in the shape of the latents


class NoisySteps(diffusers.SchedulerMixin):
    """A step for a solver of diffusers whose own one adds no noise, beside which it is inherited.

    That step counts, and finds what is there without the noise.
    """

    def step(
        self,
        model_output: torch.Tensor,
        timestep: torch.Tensor,
        sample: torch.Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> Any:
        def noise() -> torch.Tensor:
            drawn = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=model_output.dtype)
            return drawn.float()

        own: Any = super().step(model_output, timestep, sample, return_dict=True)
        at = (self.step_index or 1) - 1
        own.prev_sample = self._moved(at, sample.float(), model_output, own, noise).to(model_output.dtype)
        return own if return_dict else (own.prev_sample,)

    def _moved(self, at: int, x: torch.Tensor, output: torch.Tensor, own: Any, noise: Noise) -> torch.Tensor:
        """Return `x`, of the noise of `sigmas[at]`, at the next sigma. `own` is what the solver's own step found."""
        raise NotImplementedError
