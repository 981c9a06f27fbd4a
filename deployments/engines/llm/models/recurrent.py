"""Recurrent layers of transformers' language models: states of fixed size for each sequence, in a shared batch.

All else of a step is one flat batch of its tokens. A layer with states, a *mixer*, runs for each piece of a prompt
alone, and once for the tokens of all completions, each with the state of its sequence.

A state is that after a number of a sequence's tokens. It lies in a slot, and is never changed: a step reads one slot
and writes another. So a step can run again, forked sequences share one, and the state after the beginning of a
prompt can be found again. The scheduler chooses the slots (`state_slots.py`).

Suffixes: T tokens of a step, t of a piece of a prompt, G completions, C hidden size.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from deployments.engines.llm.models.step_rows import StepRows, step_inputs_of
from deployments.engines.llm.sequences.kv_cache import zero_pages
from deployments.engines.llm.sequences.sequence import Chunk
from deployments.engines.records.protocol import EngineError

_CACHE_NAMES: Final = ("cache_params", "past_key_values")  # a mixer's possible names of its cache
_CHUNK: Final = 64  # tokens that transformers' delta rules compute together
StateName = tuple[str, int]  # "conv" or "recurrent", and its number


class StateForm(NamedTuple):
    """The form of a state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """The states of all mixers. Pieces of a prompt end at multiples of `piece_tokens`; 0: a prompt is one piece."""

    mixers: tuple[Mapping[StateName, StateForm], ...]
    piece_tokens: int

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a slot: a state of each mixer."""
        forms = [form for mixer in self.mixers for form in mixer.values()]
        return sum(math.prod(form.shape) * form.dtype.itemsize for form in forms)


class StateStore:
    """The states of all mixers in a number of slots."""

    def __init__(self, spec: RecurrentSpec, num_slots: int, device: torch.device) -> None:
        self._mixers = [
            {name: zero_pages((num_slots, *form.shape), form.dtype, device) for name, form in mixer.items()}
            for mixer in spec.mixers
        ]

    def read(self, mixer: int, slots: torch.Tensor) -> dict[StateName, torch.Tensor]:
        """Return copies of the states in the slots (N,), each (N, ...)."""
        return {name: states.index_select(0, slots) for name, states in self._mixers[mixer].items()}

    def write(self, mixer: int, slots: torch.Tensor, states: Mapping[StateName, torch.Tensor]) -> None:
        """Store the first of such states in the slots (N,)."""
        for name, stored in self._mixers[mixer].items():
            stored.index_copy_(0, slots, states[name][: len(slots)])


class _MixerCache:
    """The cache of one call of a mixer, with transformers' methods of `Cache`: a row for each sequence.

    Mixers change the given tensors in place, or return new ones.
    """

    def __init__(self, states: dict[StateName, torch.Tensor]) -> None:
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the last inputs of a convolution, None at the beginning."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state, None at the beginning."""
        return self.states.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether there were tokens before."""
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether earlier states are kept beside the last one."""
        return False

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Keep the last of the inputs (N, channels, tokens); return them after the earlier ones, or after zeros."""
        before = self.get_conv_state(layer_idx, state_idx)
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            whole = nn.functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size, whole = before.shape[-1], torch.cat([before, conv_states], -1)
        self.states["conv", state_idx] = whole[..., -size:]
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Keep a state."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states


@dataclass(frozen=True, slots=True, eq=False)
class _MixerBatch:
    """Rows of a step that go through a mixer in one call, as a batch of `products.shape`, and the slots of its states.

    `reads` is None at the beginning of a prompt. The first `num_rows` count, those behind pad.
    """

    rows: torch.Tensor
    num_rows: int
    products: StepRows
    reads: torch.Tensor | None
    writes: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepStates:
    """The states of one step. `check` may end it before any mixer."""

    store: StateStore
    batches: tuple[_MixerBatch, ...]
    check: Callable[[], None]

    def run(self, mixer: StepMixer, forward: Callable[..., Any], hidden_1TC: torch.Tensor, given: Any) -> torch.Tensor:
        self.check()
        inputs = step_inputs_of(mixer)
        before, mixed = inputs.rows, None
        try:
            for batch in self.batches:
                cache = _MixerCache({} if batch.reads is None else self.store.read(mixer.number, batch.reads))
                mixer.routed_rows, inputs.rows = batch.rows, batch.products
                part = hidden_1TC[0, batch.rows].view(*batch.products.shape, -1)
                result: torch.Tensor = forward(part, **{**given, mixer.cache_name: cache, "attention_mask": None})
                if mixed is None:
                    mixed = result.new_zeros(*hidden_1TC.shape[:2], result.shape[-1])
                mixed[0, batch.rows[: batch.num_rows]] = result.flatten(0, 1)[: batch.num_rows]
                self.store.write(mixer.number, batch.writes, cache.states)
        finally:
            mixer.routed_rows, inputs.rows = None, before
        assert mixed is not None
        return mixed


@dataclass(slots=True, eq=False)
class StateProbe:
    """Finds the forms of the states, and keeps none."""

    mixers: list[dict[StateName, StateForm]] = field(default_factory=list)

    def run(self, mixer: StepMixer, forward: Callable[..., Any], hidden_1TC: torch.Tensor, given: Any) -> torch.Tensor:
        cache = _MixerCache({})
        result: torch.Tensor = forward(hidden_1TC, **{**given, mixer.cache_name: cache, "attention_mask": None})
        mixer.number = len(self.mixers)
        self.mixers.append({name: StateForm(tuple(one.shape[1:]), one.dtype) for name, one in cache.states.items()})
        return result


class StepMixer(nn.Module):
    """A mixer of transformers in the flat batch of a step. `routed_rows` are those of a call (`nn/lora.py`)."""

    number: int
    cache_name: str
    routed_rows: torch.Tensor | None

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        return step_inputs_of(self).states.run(self, super().forward, hidden_states, given)


def mix_by_steps(module: nn.Module) -> list[Any]:
    """Make the mixers of a model run in the batches of steps, and return them. Raises EngineError without mixers."""
    parts: list[Any] = list(module.modules())
    mixers = [part for part in parts if _cache_name(type(part))]
    if not mixers:  # or unknown ones, which would begin anew with each token
        raise EngineError(f"a {type(module).__name__} without recurrent layers is not supported")
    for mixer in mixers:
        kind: Any = type(mixer)
        mixer.cache_name, mixer.routed_rows = _cache_name(kind), None
        mixer.__class__ = _step_class(kind)
    return mixers


def piece_tokens(mixers: Collection[Any]) -> int:
    """Return the multiple of tokens at which a prompt can be cut without a change of any bit."""
    return math.lcm(_CHUNK, *(int(mixer.chunk_size) for mixer in mixers if hasattr(mixer, "chunk_size")))


@functools.cache
def _step_class(kind: type[Any]) -> type[nn.Module]:
    return type(f"Step{kind.__name__}", (StepMixer, kind), {})


def _cache_name(kind: type[nn.Module]) -> str:
    """Return the parameter in which a class takes a cache with a state; empty for any other class."""
    forward = inspect.unwrap(kind.forward)
    if "get_conv_state" not in forward.__code__.co_names:
        return ""
    return next(name for name in _CACHE_NAMES if name in inspect.signature(forward).parameters)


def plan_batches(
    chunks: Collection[Chunk],
    device: torch.device,
    row_multiple: int,
    *,
    has_kernels: bool,
    pads_completions: bool,
) -> tuple[_MixerBatch, ...]:
    """Return the calls of each mixer in a step: one for each piece of a prompt, and one for all completions.

    With `pads_completions`, those are padded to a multiple of `row_multiple` as well.
    """

    def on_device(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, device=device)

    batches, decoding = list[_MixerBatch](), list[tuple[int, int, int]]()
    first = 0
    for chunk in chunks:
        if chunk.start >= chunk.sequence.num_prompt_tokens:
            assert chunk.state is not None
            decoding.append((first, chunk.state, chunk.kept_states[0][1]))
        else:
            start, read = chunk.start, chunk.state
            for end, slot in chunk.kept_states:
                rows = torch.arange(first + start - chunk.start, first + end - chunk.start, device=device)
                products = StepRows((1, end - start), None, row_multiple)
                reads = None if read is None else on_device([read])
                batches.append(_MixerBatch(rows, end - start, products, reads, on_device([slot])))
                start, read = end, slot
        first += chunk.num_tokens
    if decoding:
        by_kernels = len(decoding) if has_kernels else None
        padding = decoding[:1] * (-len(decoding) % row_multiple) if pads_completions else []
        rows, reads, _ = (on_device(list(numbers)) for numbers in zip(*decoding, *padding, strict=True))
        writes = on_device([slot for _, _, slot in decoding])
        products = StepRows((len(rows), 1), by_kernels, row_multiple)
        batches.append(_MixerBatch(rows, len(decoding), products, reads, writes))
    return tuple(batches)
