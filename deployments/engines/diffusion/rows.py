"""States -> rows of one merged forward -> guided predictions per state.

Each image of each request is one row, two under classifier-free guidance. Rows of one image size, text
length and adapter set go through the denoiser together, whatever their step, schedule, guidance or seed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from deployments.engines.diffusion.state import DenoiseState


@dataclass(frozen=True, slots=True)
class Rows:
    """Input of one merged forward.

    Latents (B, …), timesteps (B,), prompts (B, L, D), pooled (B, P), and each row's `guidance_scale` (B,).
    """

    latents: torch.Tensor
    timesteps: torch.Tensor
    prompts: torch.Tensor
    pooled: torch.Tensor
    guidance: torch.Tensor


def image_size(state: DenoiseState) -> tuple[int, int]:
    """(height, width) in pixels."""
    return state.request.height, state.request.width


def merge_key(state: DenoiseState) -> Hashable:
    """States with equal keys share a forward.

    The size and not the latents' shape, which is the same for packed latents of 64x32 and 32x64 pixels.
    """
    adapters = tuple((id(pairs), strength) for pairs, strength in state.adapters)
    return image_size(state), state.branches[0].prompt.shape[1], adapters


def grouped(states: Sequence[DenoiseState], key: Callable[[DenoiseState], Hashable]) -> list[list[DenoiseState]]:
    """States by key, in order of appearance."""
    groups: dict[Hashable, list[DenoiseState]] = {}
    for state in states:
        groups.setdefault(key(state), []).append(state)
    return list(groups.values())


def build_rows(group: Sequence[DenoiseState]) -> Rows:
    """Rows in the order state, branch, image."""
    latents, timesteps, prompts, pooled, guidance = [], [], [], [], []
    for state in group:
        scaled = _model_input(state)
        count = len(scaled)
        for branch in state.branches:
            latents.append(scaled)
            timesteps.append(state.timestep.expand(count))
            prompts.append(branch.prompt.expand(count, -1, -1))
            pooled.append(branch.pooled.expand(count, -1))
            guidance.append(torch.full([count], state.request.guidance_scale, device=scaled.device))
    return Rows(*(torch.cat(parts) for parts in (latents, timesteps, prompts, pooled, guidance)))


def split_guided(noise: torch.Tensor, group: Sequence[DenoiseState]) -> list[torch.Tensor]:
    """Predictions in the order of `build_rows` -> one (num_images, …) per state, guided."""
    parts = torch.split(noise, [len(state.latents) * len(state.branches) for state in group])
    return [_guided(part, state) for part, state in zip(parts, group, strict=True)]


def _model_input(state: DenoiseState) -> torch.Tensor:
    if hasattr(state.solver, "scale_model_input"):
        return state.solver.scale_model_input(state.latents, state.timestep)
    return state.latents


def _guided(noise: torch.Tensor, state: DenoiseState) -> torch.Tensor:
    if len(state.branches) == 1:
        return noise
    negative, prompt = noise.chunk(2)
    return negative + state.cfg_scale * (prompt - negative)
