"""Previews: their steps, and the final latents that a step expects.

Each solver knows its own form of noise; the formulas are those of the `pred_original_sample` of diffusers' solvers
(0.42), which most of them return only in part.
"""

from __future__ import annotations

from typing import Any

import torch


def preview_steps(num_steps: int, num_previews: int) -> tuple[int, ...]:
    """Return the steps, counted from 1, after which previews are made: evenly spread, and none after the last step."""
    count = min(num_previews, num_steps - 1)
    return tuple(round(num_steps * number / (count + 1)) for number in range(1, count + 1))


def expected_latents(solver: Any, step_index: int, latents: torch.Tensor, prediction: torch.Tensor) -> torch.Tensor:
    """Return the latents at the end of the schedule if all further steps predicted the same as this one.

    `latents` are those before step `step_index` of the solver's timesteps, and `prediction` is the denoiser's for them.
    """
    config = solver.config
    kind = config.get("prediction_type", "flow_prediction")
    if kind == "sample":
        return prediction
    x, model = latents.float(), prediction.float()
    if kind == "flow_prediction":
        return (x - float(solver.sigmas[step_index]) * model).to(latents.dtype)
    if hasattr(solver, "is_scale_input_called"):  # noise is added to the image, not mixed with it
        sigma = float(solver.sigmas[step_index])
        alpha, noise = 1.0, sigma
        if kind == "v_prediction":
            alpha, noise = 1 / (sigma**2 + 1), sigma / (sigma**2 + 1) ** 0.5
    else:
        share = float(solver.alphas_cumprod[int(solver.timesteps[step_index])])
        alpha, noise = (share**-0.5, (1 / share - 1) ** 0.5)
        if kind == "v_prediction":
            alpha, noise = share**0.5, (1 - share) ** 0.5
    return (alpha * x - noise * model).to(latents.dtype)
