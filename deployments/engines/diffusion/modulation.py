"""The modulation of a transformer's blocks, computed ahead for several steps of a request.

A block scales and shifts by a linear function of the row's time and pooled text, of one row for each image: its
weights, more than a quarter of those of a Flux, are read for the sake of one row, and on the CPU few rows are padded
besides (`nn/batch_invariant.py`). All times of a schedule are known when it begins, so here the rows of the next steps
take the place of the padding. The bits are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.rows import Part
from deployments.engines.diffusion.state import DenoiseState
from deployments.engines.nn.forwards import replaced_forwards
from weights.memory.devices import computes_on_host

NUM_ROWS: Final = 16  # of one computation, over all parts and steps
MAX_PARTS: Final = NUM_ROWS // 2  # of more, the rows of one step fill a product well enough


class _Ahead(NamedTuple):
    """The outputs of the embedding and of each layer, each (steps, …), from the step `first` on."""

    first: int
    outputs: Sequence[torch.Tensor]


class Modulation:
    """The embedding of time and text of a denoiser, and the layers that see it alone. Empty for other families."""

    def __init__(self, family: Family, denoiser: Any) -> None:
        self._family = family
        self._denoiser = denoiser
        self._modules: list[nn.Module] = []
        if family.time_embedding is not None:
            self._modules = [
                denoiser.get_submodule(family.time_embedding),
                *(part for name, part in denoiser.named_modules() if "norm" in name and name.endswith(".linear")),
            ]
        self._embedding = frozenset(self._modules[0].modules() if self._modules else ())

    def rows_of(self, group: Sequence[Part]) -> tuple[torch.Tensor, ...]:
        """Return what the modules give for the rows of a group in its next step; nothing where they compute it."""
        device = group[0].state.latents.device
        if not self._modules or len(group) > MAX_PARTS or not computes_on_host(device):
            return ()
        if any(self._is_adapted(part.state) for part in group):
            return ()
        if any(parameter.is_meta for module in self._modules for parameter in module.parameters()):
            return ()  # the weights come block by block
        lacking = [part for part in group if not _has_step(part)]
        if lacking:
            self._compute(lacking, NUM_ROWS // len(group))
        found = []
        for place in range(len(self._modules)):
            rows = []
            for part in group:
                ahead: _Ahead = part.state.ahead[id(part.branch)]
                step = part.state.step_index - ahead.first
                rows.append(ahead.outputs[place][step : step + 1].expand(len(part.state.latents), -1))
            found.append(rows[0] if len(rows) == 1 else torch.cat(rows))
        return tuple(found)

    def _is_adapted(self, state: DenoiseState) -> bool:
        """Return whether a LoRA changes the embedding. One of the layers adds to what they give, known or not."""
        return any(layer in self._embedding for pairs, _ in state.adapters for layer, _ in pairs)

    def given(self, outputs: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """Let the modules give these `rows_of`, if any, within the block. HAZARD: one thread at a time may run them."""
        modules = self._modules if outputs else []
        return replaced_forwards(dict(zip(modules, map(_constant, outputs), strict=True)))

    def _compute(self, parts: Sequence[Part], num_steps: int) -> None:
        """Compute the next `num_steps` of each part, or what is left of them, all at once."""
        times, guidance, pooled, counts = [], [], [], []
        for state, branch in parts:
            first = state.first_step + state.step_index
            ahead = state.solver.timesteps[first : first + num_steps]
            times.append(ahead)
            guidance.append(torch.full([len(ahead)], state.request.guidance_scale, device=ahead.device))
            assert branch.pooled is not None  # families with such an embedding have pooled text
            pooled.append(branch.pooled.expand(len(ahead), -1))
            counts.append(len(ahead))
        embedded = self._family.embed_times(self._denoiser, torch.cat(times), torch.cat(guidance), torch.cat(pooled))
        active = nn.functional.silu(embedded)
        outputs = [embedded, *(layer(active) for layer in self._modules[1:])]
        split = zip(*(torch.split(output, counts) for output in outputs), strict=True)
        for (state, branch), own in zip(parts, split, strict=True):
            state.ahead[id(branch)] = _Ahead(state.step_index, [output.clone() for output in own])


def _constant(output: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda *args, **options: output


def _has_step(part: Part) -> bool:
    ahead: _Ahead | None = part.state.ahead.get(id(part.branch))
    return ahead is not None and 0 <= part.state.step_index - ahead.first < len(ahead.outputs[0])
