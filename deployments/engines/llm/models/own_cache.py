"""Language models of transformers that keep their states themselves: recurrent ones, and those with masks of their own.

The class runs for one sequence after the other, as its own `generate` would run it, and its state of a sequence
stays with the sequence. No two sequences share a state, so no part of a prompt is found again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from deployments.engines.building.build import build_language_model
from deployments.engines.libraries.library_seam import generate_step
from deployments.engines.llm.models.context import max_positions
from deployments.engines.llm.models.stock_classes import IN_MODULES, WHOLE_PROMPTS
from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE
from deployments.engines.llm.sequences.sequence import SequenceState
from deployments.engines.records.protocol import EngineError

_MEASURED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class OwnCacheSpec:
    """The model's sizes for the engine: `fixed_bytes` of any sequence, `block_bytes` of 16 tokens."""

    vocab_size: int
    max_positions: int
    fixed_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class OwnCacheModel:
    """A class of transformers with its weights, ready to run. `reads_whole`: a prompt is computed in one piece."""

    module: Any
    spec: OwnCacheSpec
    dtype: torch.dtype
    device: torch.device
    reads_whole: bool
    pads_rows: bool = False  # one sequence at a time, in any step

    def advance(self, state: SequenceState, token_ids: Sequence[int], *, all_rows: bool = False) -> torch.Tensor:
        """Compute the tokens that `state` lacks; return logits of the last one, or (`all_rows`) of all of them.

        HAZARD: a state whose forward failed is half written, and of no use.
        """
        return _advance(self.module, self.device, state, token_ids, all_rows=all_rows)


def create_own_cache_model(
    config: PretrainedConfig, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> OwnCacheModel:
    """Build the class that a config names first around `tensors`.

    Raises:
        EngineError: the tensors do not fit the config, or the class does not compute with it.
    """
    module: Any = build_language_model(config, {name: tensor.to(device) for name, tensor in tensors.items()})
    try:
        one, more = (_measured_bytes(module, device, count) for count in (1, 1 + _MEASURED_TOKENS))
    except Exception as error:  # configs are believed here and there, each with errors of its own
        raise EngineError(f"{type(module).__name__} does not compute with this config: {error}") from error
    token_bytes = -(-max(0, more - one) // _MEASURED_TOKENS)
    vocab_size = config.get_text_config().vocab_size
    spec = OwnCacheSpec(vocab_size, max_positions(config), max(0, one - token_bytes), token_bytes * BLOCK_SIZE)
    dtype = module.get_input_embeddings().weight.dtype
    return OwnCacheModel(module, spec, dtype, device, type(module).__name__ in WHOLE_PROMPTS)


@torch.inference_mode()
def _advance(
    module: Any, device: torch.device, state: SequenceState, token_ids: Sequence[int], *, all_rows: bool = False
) -> torch.Tensor:
    ids = torch.tensor([token_ids], device=device)
    with _in_modules(module, state):
        logits, state.arguments = generate_step(module, ids, state.arguments, state.num_tokens, all_rows)
    state.num_tokens = len(token_ids)
    return logits[0] if all_rows else logits[0, -1:]


@contextlib.contextmanager
def _in_modules(module: Any, state: SequenceState) -> Iterator[None]:
    """Put one sequence's states into the modules of a class that keeps them there, and take them out again."""
    names = IN_MODULES.get(type(module).__name__, ())
    places = [(part, name) for part in module.modules() for name in names if name in vars(part)] if names else []
    for (part, name), value in zip(places, state.in_modules or [None] * len(places), strict=True):
        setattr(part, name, value)
    try:
        yield
        state.in_modules = [getattr(part, name) for part, name in places]
    finally:
        for part, name in places:
            setattr(part, name, None)


def _measured_bytes(module: Any, device: torch.device, num_tokens: int) -> int:
    state = SequenceState()
    _advance(module, device, state, [0] * num_tokens)
    held = _tensors([state.arguments, state.in_modules], set())
    return sum({one.data_ptr(): one.untyped_storage().nbytes() for one in held}.values())


def _tensors(thing: Any, seen: set[int]) -> list[torch.Tensor]:
    """Return the tensors of a state, in any container."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if id(thing) in seen or isinstance(thing, type | torch.nn.Module | PretrainedConfig):
        return []
    seen.add(id(thing))
    parts = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, list | tuple) else ()
    if hasattr(thing, "__dict__"):
        parts = [*parts, *vars(thing).values()]
    return [tensor for part in parts for tensor in _tensors(part, seen)]
