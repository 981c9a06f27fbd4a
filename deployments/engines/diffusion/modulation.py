"""A denoiser's results of a row's time and text alone, computed ahead for several steps of a request.

A block scales and shifts by a linear function of the row's time and pooled text, of one row for each image: its
weights, more than a quarter of those of a Flux, are read for the sake of one row, and on the CPU few rows are padded
besides (`nn/batch_invariant.py`). All times of a schedule are known when it begins, so here the rows of the next steps
take the place of the padding. Layers that see nothing but the text (the keys and values of cross-attention, say) give
the same at every step, and run once where that is small. The bits are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from deployments.engines.diffusion.families.base import Family, Rows
from deployments.engines.diffusion.rows import Condition
from deployments.engines.diffusion.state import DenoiseState
from deployments.engines.nn.forwards import replaced_forwards
from weights.memory.devices import computes_on_host

NUM_ROWS: Final = 16  # of one computation, over all parts and steps
MAX_PARTS: Final = NUM_ROWS // 2  # with more parts, the rows of one step fill a product well enough
MAX_TEXT_BYTES: Final = 4 * 2**20  # kept of one text: SDXL's would be 50 MB, to save 1 % of its steps


class _Ahead(NamedTuple):
    """The outputs of the embeddings and each layer, (steps, …) each, from the step `first` on; the text's outputs."""

    first: int
    outputs: Sequence[torch.Tensor]
    of_text: Sequence[torch.Tensor]


class Modulation:
    """The embeddings of time and text of a denoiser, and the layers whose only inputs are these or the text.

    Empty for other families.
    """

    def __init__(self, family: Family, denoiser: Any) -> None:
        self._family = family
        self._denoiser = denoiser
        parts = list(denoiser.named_modules()) if family.network.is_modulated(denoiser) else []

        def named(*patterns: str) -> list[Any]:
            return [part for name, part in parts if any(fnmatchcase(name, pattern) for pattern in patterns)]

        self._embeddings = named(*family.network.embedding_parts)
        self._layers = named(family.network.modulated_layers)
        self._text_layers = named(family.network.text_layers)
        self._modules: list[nn.Module] = [*self._embeddings, *self._layers, *self._text_layers]
        self._embedded = frozenset(part for embedding in self._embeddings for part in embedding.modules())

    @property
    def is_there(self) -> bool:
        """Return whether the family has modules to compute ahead."""
        return bool(self._modules)

    def rows_of(self, group: Sequence[Condition]) -> tuple[torch.Tensor, ...]:
        """Return the modules' outputs for a group's rows in its next step; empty where they have to be computed."""
        device = group[0].state.latents.device
        if not self._modules or len(group) > MAX_PARTS or not computes_on_host(device):
            return ()
        if any(self._is_adapted(part.state) for part in group):
            return ()
        if any(parameter.is_meta for module in self._modules for parameter in module.parameters()):
            return ()  # the weights are streamed block by block
        lacking = [part for part in group if not _has_step(part)]
        if lacking:
            self._compute(lacking, NUM_ROWS // len(group))
        by_part = [_rows_of_step(part) for part in group]
        return by_part[0] if len(by_part) == 1 else tuple(map(torch.cat, zip(*by_part, strict=True)))

    def _is_adapted(self, state: DenoiseState) -> bool:
        """Return whether a LoRA or a ControlNet changes the embedding. A LoRA of a layer adds to the layer's output in
        either case.
        """
        if any(self._family.network.changes_times(control.net) for control in state.acting_controls):
            return True
        return any(layer in pairs for pairs, _ in state.adapters for layer in self._embedded)

    def given(self, outputs: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """Make the modules return these `rows_of`, if any, in the block. HAZARD: one thread at a time may run them."""
        found = zip(self._modules, map(_constant, outputs), strict=False)  # a long text's layers compute for themselves
        return replaced_forwards(dict(found))

    def _compute(self, parts: Sequence[Condition], num_steps: int) -> None:
        """Compute the next `num_steps` of each part, or its remaining ones, all at once."""
        times, guidance, pooled, counts = [], [], [], []
        for state, branch in parts:
            first = state.first_step + state.step_index
            ahead = state.solver.timesteps[first : first + num_steps]
            times.append(ahead)
            guidance.append(torch.full([len(ahead)], state.request.guidance_scale, device=ahead.device))
            if branch.pooled is not None:
                pooled.append(branch.pooled.expand(len(ahead), -1))
            counts.append(len(ahead))
        state = parts[0].state
        nothing = parts[0].branch.prompt.new_empty(sum(counts), 0)  # latents may be float32 where the model is not
        rows = Rows(nothing, torch.cat(times), nothing, torch.cat(guidance), torch.cat(pooled) if pooled else None)
        embedded = self._family.network.embed_times(self._denoiser, rows, state.size)
        active = nn.functional.silu(sum(embedded[1:], embedded[0]))
        outputs = [*embedded, *(layer(active) for layer in self._layers)]
        split = zip(*(torch.split(output, counts) for output in outputs), strict=True)
        for part, own in zip(parts, split, strict=True):
            earlier: _Ahead | None = part.state.ahead.get(id(part.branch))
            of_text = earlier.of_text if earlier else self._of_text(part.branch.prompt)
            part.state.ahead[id(part.branch)] = _Ahead(
                part.state.step_index, [output.clone() for output in own], of_text
            )

    def _of_text(self, prompt: torch.Tensor) -> list[torch.Tensor]:
        """Return the layers' outputs for a text (1, L, D), each (1, L, …); empty where they are large."""
        num_bytes = sum(layer.out_features for layer in self._text_layers) * prompt.shape[1] * prompt.itemsize
        return [layer(prompt) for layer in self._text_layers] if num_bytes <= MAX_TEXT_BYTES else []


def _rows_of_step(part: Condition) -> tuple[torch.Tensor, ...]:
    """Return the outputs computed ahead for the next step of a part, for each of its images."""
    ahead: _Ahead = part.state.ahead[id(part.branch)]
    step, count = part.state.step_index - ahead.first, len(part.state.latents)
    found = [*(output[step : step + 1] for output in ahead.outputs), *ahead.of_text]
    return tuple(found if count == 1 else [one.expand(count, *one.shape[1:]) for one in found])


def _constant(output: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda *args, **options: output


def _has_step(part: Condition) -> bool:
    ahead: _Ahead | None = part.state.ahead.get(id(part.branch))
    return ahead is not None and 0 <= part.state.step_index - ahead.first < len(ahead.outputs[0])
