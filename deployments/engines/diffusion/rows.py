"""States -> rows of one forward -> guided predictions per state.

Each image of each request is one row, two under classifier-free guidance. Rows of one shape (an image's size; of Flux,
its number of patches) and padded text length go through the denoiser together, at any step, schedule, guidance,
seed and LoRAs. Rows of a merged LoRA have forwards of their own.

On the CPU a row's prediction is that of the row alone, bit for bit, in any batch and any split
(`nn/batch_invariant.py`; tests/unit/deployments/engines/diffusion/test_batch_invariance.py). On a GPU it differs by
rounding: its libraries choose kernels by the number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import torch

from deployments.engines.diffusion.families.base import Branch, ControlRows, Family, Rows
from deployments.engines.diffusion.families.prompted import PromptedSpan
from deployments.engines.nn.lora import AdaptedSpan
from deployments.engines.records.protocol import DiffusionRequest

if TYPE_CHECKING:
    from deployments.engines.diffusion.state import DenoiseState  # which loads diffusers, and each replica reads bounds

T = TypeVar("T")


class Condition(NamedTuple):
    """One text condition of a request: its negative prompt may be longer or shorter than its prompt."""

    state: DenoiseState
    branch: Branch


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """The bounds of one forward of the denoiser and of one of the VAE, which bound their activations.

    Pixels are those of all rows. One row of any size always runs; beyond `max_vae_bytes` of tensors, in tiles.
    """

    max_rows: int = 64
    max_pixels: int = 16 * 2**20
    max_decode_pixels: int = 4 * 2**20
    max_vae_bytes: int = 8 * 2**30

    def denoise_rows(self, image_pixels: int) -> int:
        """Return the most images of `image_pixels` for one forward of a denoiser, at least 1."""
        return max(1, min(self.max_rows, self.max_pixels // image_pixels))

    def decode_rows(self, image_pixels: int) -> int:
        """Return the most images of `image_pixels` for one decode, at least 1."""
        return max(1, self.max_decode_pixels // image_pixels)


DEFAULT_BOUNDS: Final = BatchBounds()


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one step or decode of a request: `rows` of `kind`, in calls of at most `max_rows`.

    It takes one call for each of `keys`, which it may share with requests of the same key.
    """

    keys: frozenset[Hashable]
    kind: str
    rows: int
    max_rows: float


def image_size(state: DenoiseState) -> tuple[int, int]:
    """Return (height, width) in pixels."""
    return state.request.height, state.request.width


def decode_key(state: DenoiseState) -> Hashable:
    """Return the key of a state: states with equal keys share a forward of the VAE."""
    return image_size(state), _solitude(state)


def parts_of(states: Sequence[DenoiseState]) -> list[Condition]:
    """Return the parts of the states, in the order state, branch."""
    return [Condition(state, branch) for state in states for branch in state.branches]


def batch_key(part: Condition) -> Hashable:
    """Return the key of a part: parts with equal keys share a forward.

    ControlNets read images, which have one size.
    """
    shape = image_size(part.state) if part.state.acting_controls else part.state.shape
    is_padded = part.branch.mask is not None
    length = part.branch.prompt.shape[1]
    shape = (shape, part.state.extra_channels is None)
    return shape, length, is_padded, _control_key(part), _solitude(part.state), id(part.state.merged)


def memory_kind(part: Condition) -> Hashable:
    """Return the kind of a part: parts of one kind take about as much memory per row of a forward."""
    lengths = part.branch.prompt.shape[1], len(part.state.acting_controls), part.state.extra_channels is None
    return "denoise", part.state.shape, *lengths, *(["alone"] if part.state.runs_alone else [])


def workspace_kind(part: Condition) -> Hashable:
    """Return the kind of a part to the workspace: beside its `memory_kind` the adapters of its request, by name.

    Different adapters have different kinds. ControlNets count also in steps in which they do not act.
    """
    state = part.state
    loras = tuple(sorted(use.name for use in state.request.adapters)) if state.adapters else ()
    names = loras, tuple(one.name for one in state.controls), tuple(one.name for one in state.image_prompts)
    if not any(names):
        return memory_kind(part)
    read = [part.branch, *(state.branches[-1] for control in state.controls if control.reads_prompt)]
    length = max(text.prompt.shape[1] for text in read)
    return "denoise", state.shape, length, state.extra_channels is None, state.runs_alone, names


def adapter_names(request: DiffusionRequest) -> tuple[str, ...]:
    """Return the names of a request's additions to its forwards, for its `workspace_kind`."""
    loras = () if request.merges_adapter else sorted(use.name for use in request.adapters)
    return (*loras, *(use.name for use in request.control), *(use.name for use in request.image_prompts))


def decode_kind(height: int, width: int) -> Hashable:
    """Return the kind of a decode of images of that size: each takes as much memory."""
    return "decode", height, width


def _solitude(state: DenoiseState) -> Hashable:
    return state.request.request_id if state.runs_alone else None


def _control_key(part: Condition) -> Hashable:
    """Return the ControlNets of the next step, and the length of their text, if it replaces the part's."""
    acting = part.state.acting_controls
    text_length = part.state.branches[-1].prompt.shape[1] if acting else 0
    return tuple(id(control.net) for control in acting), text_length


def grouped(things: Sequence[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Group by key, in order of appearance."""
    groups: dict[Hashable, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return list(groups.values())


def by_adapters(group: Sequence[Condition]) -> list[Condition]:
    """Return the parts sorted so that equal adapters are neighbours, in order of appearance."""
    return [part for equals in grouped(group, _adapters_key) for part in equals]


def _adapters_key(part: Condition) -> Hashable:
    return tuple((id(pairs), strength) for pairs, strength in part.state.adapters)


def build_rows(group: Sequence[Condition], modulation: tuple[torch.Tensor, ...]) -> Rows:
    """Return the rows of a forward, in the order part, image. `modulation` is that of `Rows`."""
    latents, timesteps, prompts, guidance, pooled, masks, lengths = [], [], [], [], [], [], list[int]()
    for state, branch in group:
        scaled = _model_input(state)
        count = len(scaled)
        latents.append(scaled)
        timesteps.append(state.timestep.expand(count))
        prompts.append(branch.prompt.expand(count, -1, -1))
        guidance.append(torch.full([count], state.request.guidance_scale, device=scaled.device))
        if branch.pooled is not None:
            pooled.append(branch.pooled.expand(count, -1))
        if branch.mask is not None:
            masks.append(branch.mask.expand(count, -1))
        lengths += [branch.num_tokens or branch.prompt.shape[1]] * count
    controls = tuple(_control_rows(group, place) for place in range(len(group[0].state.acting_controls)))
    return Rows(
        torch.cat(latents),
        torch.cat(timesteps),
        torch.cat(prompts),
        torch.cat(guidance),
        torch.cat(pooled) if pooled else None,
        controls,
        torch.cat(masks) if masks else None,
        tuple(_adapted_spans(group)),
        modulation,
        tuple(state.size for state, _ in group for _ in range(len(state.latents))),
        tuple(_prompted_spans(group)),
        tuple(lengths),
    )


def _prompted_spans(group: Sequence[Condition]) -> Iterator[PromptedSpan]:
    """Yield the spans of rows in a group that have images as prompts, part by part."""
    start = 0
    for state, branch in group:
        stop = start + len(state.latents)
        if state.image_prompts:
            place = next(number for number, one in enumerate(state.branches) if one is branch)
            layers = [(one.layers_at(place, state.timestep), one.scale) for one in state.image_prompts]
            yield PromptedSpan(layers, start, stop)
        start = stop


def _adapted_spans(group: Sequence[Condition]) -> Iterator[AdaptedSpan]:
    """Yield the adapters of the rows of a group, neighbours with equal ones together."""
    start = 0
    for _, equals in itertools.groupby(group, _adapters_key):
        parts = list(equals)
        stop = start + sum(len(part.state.latents) for part in parts)
        if parts[0].state.adapters:
            yield AdaptedSpan(parts[0].state.adapters, start, stop)
        start = stop


def _control_rows(group: Sequence[Condition], place: int) -> ControlRows:
    """Return the rows of one of the group's common ControlNets."""
    inputs, scales, prompts, pooled, modes = [], [], [], [], list[torch.Tensor]()
    for state, branch in group:
        control = state.acting_controls[place]
        text = state.branches[-1] if control.reads_prompt else branch
        count = len(state.latents)
        device = control.inputs[0].device
        inputs.append(control.inputs)
        scales.append(torch.full([count], control.scale, device=device))
        if control.mode is not None:
            modes.append(torch.full([count], control.mode, device=device))
        prompts.append(text.prompt.expand(count, -1, -1))
        if text.pooled is not None:
            pooled.append(text.pooled.expand(count, -1))
    net = group[0].state.acting_controls[place].net
    all_pooled = torch.cat(pooled) if pooled else None
    all_inputs = tuple(torch.cat(parts) for parts in zip(*inputs, strict=True))
    all_modes = torch.cat(modes) if modes else None
    return ControlRows(net, all_inputs, torch.cat(scales), torch.cat(prompts), all_pooled, all_modes)


def split_rows(noise: torch.Tensor, group: Sequence[Condition]) -> Sequence[torch.Tensor]:
    """Split predictions in the order of `build_rows` into one (num_images, …) per part."""
    return torch.split(noise, [len(part.state.latents) for part in group])


def guided(family: Family, state: DenoiseState, noises: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the guided prediction made of the state's branches."""
    made = prompt = noises[-1]
    if len(noises) > 1:
        made = family.guidance_of(state.request).combine(noises[0], prompt, state.cfg_scale)
    is_normed = state.request.sampler is not None and state.request.sampler.cfg_norm is not None
    normed: torch.Tensor = state.solver.normed(made, prompt, state.latents) if is_normed else made
    return normed


def _model_input(state: DenoiseState) -> torch.Tensor:
    scaled = state.latents
    if hasattr(state.solver, "scale_model_input"):
        scaled = state.solver.scale_model_input(scaled, state.timestep)
    return scaled if state.extra_channels is None else torch.cat([scaled, state.extra_channels.to(scaled)], dim=1)
