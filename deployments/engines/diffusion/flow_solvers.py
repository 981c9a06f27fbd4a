"""The solvers of flow matching models, also under the names of noise solvers that compute the same.

UIs and their clients name Euler for any model; a step of Euler is the same for both, and so is one of DDIM,
which adds no noise. Of other solvers diffusers has a form for flows. Source of the ancestral steps: ComfyUI,
`comfy/k_diffusion/sampling.py:sample_euler_ancestral_RF`; of the spacings: `comfy/samplers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import diffusers
import numpy as np
import torch

from deployments.engines.diffusion.known_solvers import ANCESTRAL, BOTH, EULER, SAME, solves_flows
from deployments.engines.diffusion.noisy_steps import Noise, NoisySteps
from deployments.engines.records.protocol import EngineError

_SPACING: Final = "timestep_spacing"
_SIGMAS: Final = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas")


class SpacedFlow(diffusers.FlowMatchEulerDiscreteScheduler):
    """Euler over a flow, its steps spaced by `spacing`: "trailing" ends a step above 0, "linspace" at the last
    timestep of training. None keeps the pipeline's spacing.
    """

    spacing: str | None = None

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: Any = None,
        mu: float | None = None,
        timesteps: Any = None,
    ) -> None:
        if self.spacing is not None and timesteps is None:
            steps = num_inference_steps or len(sigmas)
            sigmas, num_inference_steps = np.linspace(1.0, self._last(steps), steps), None
        super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)

    def _last(self, steps: int) -> float:
        """Return the last sigma before the shift."""
        if self.spacing == "trailing":
            return 1 / steps
        # Karras' and its kin lie between the first and the last one, others in even steps of the shifted schedule.
        is_bent = any(self.config.get(name) for name in _SIGMAS)
        return 1 / self.config["num_train_timesteps"] if is_bent else self.sigma_min


class AncestralFlow(NoisySteps, SpacedFlow):
    """Euler over a flow that goes below the next level of noise, and adds noise to come up to it."""

    def _moved(self, at: int, x: torch.Tensor, output: torch.Tensor, own: Any, noise: Noise) -> torch.Tensor:
        sigma, following = float(self.sigmas[at]), float(self.sigmas[at + 1])
        below = following * following / sigma
        found = x + (below - sigma) * output.float()
        if following == 0:
            return found
        kept = (1 - following) / (1 - below)
        return kept * found + (following**2 - (below * kept) ** 2) ** 0.5 * noise()


def is_flow(solver: Any) -> bool:
    """Return whether a model's own solver solves a flow."""
    return solves_flows(type(solver).__name__, solver.config)


def flow_solver(config: Mapping[str, Any], name: str, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    """Return the class for one of `OF_FLOWS`, its config in place of a model's `config`, and its spacing, if given.

    Raises EngineError for a spacing that flows do not have.
    """
    others, spacing = {key: value for key, value in options.items() if key != _SPACING}, options.get(_SPACING)
    shift = config.get("shift", config.get("flow_shift", 1.0))
    class_name = SAME.get(name, name)
    if name in BOTH:
        own = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift}
        bent = [key for key in _SIGMAS if others.get(key)]
        if spacing not in (None, "trailing") or (bent and name != "UniPCMultistepScheduler"):
            what = bent[0] if bent else f"timestep_spacing {spacing!r}"
            raise EngineError(f"scheduler_options: of a flow, {name} has its steps in even spaces, and not by {what}")
        return getattr(diffusers, name), own | others, None
    if class_name not in (EULER, ANCESTRAL):
        return getattr(diffusers, class_name), dict(options), None
    if spacing == "leading":
        raise EngineError(
            "scheduler_options: timestep_spacing 'leading' begins below the noise that a flow begins with (known: "
            "linspace, trailing)"
        )
    if spacing not in (None, "linspace", "trailing"):
        raise EngineError(f"scheduler_options: timestep_spacing is {spacing!r}, expected one of linspace, trailing")
    cls = AncestralFlow if name == ANCESTRAL else SpacedFlow
    return cls, {"shift": shift} | others, spacing
