"""Attention of one step over the paged KV cache: planned once per step, run once per layer.

On the CPU a token's result must not depend on which other sequences are in the step, bit for bit. So prompts attend
one by one, and decoding sequences are padded to a length that follows from their own length alone, then batched
with those of the same padded length (there a batch dimension does not change the arithmetic of its members, padding
does). CUDA kernels are chosen by the batch as well, and promise no such thing.

Suffixes: T tokens of the step, N tokens of a part, G sequences of a group, L padded length, H query heads,
K key/value heads, R query heads per key/value head, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from deployments.engines.llm.block_manager import BLOCK_SIZE
from deployments.engines.llm.kv_cache import KVCache
from deployments.engines.llm.scheduler import Chunk, Sequence

MAX_GATHER_TOKENS = 16384  # of one group: bounds the copy of keys and values that a decode step makes


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A chunk of several tokens: rows `first` to `last` of the step.

    `context` is None for the beginning of a prompt, else the slots of all tokens up to the end of the chunk,
    with the mask (N, len(context)) that keeps attention causal.
    """

    first: int
    last: int
    context: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences that decode one token each and have the same padded length."""

    rows: torch.Tensor  # (G,) of the step
    slots: torch.Tensor  # (G, L), the null slot behind the end
    mask: torch.Tensor  # (G, 1, 1, L), True where there is a token


@dataclass(frozen=True, slots=True)
class StepAttention:
    """`Attend` for the chunks of one step; `slots` is where its (N,) tokens are stored.

    Rows behind the last chunk are padding and give zeros.
    """

    cache: KVCache
    slots: torch.Tensor
    parts: tuple[PromptPart, ...]
    groups: tuple[DecodeGroup, ...]

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        num_tokens = len(self.slots)
        self.cache.write(layer, self.slots, k_TKD[:num_tokens], v_TKD[:num_tokens])
        out_THD = torch.zeros_like(q_THD)
        for part in self.parts:
            rows = slice(part.first, part.last)
            if part.context is None:
                keys, values = k_TKD[rows], v_TKD[rows]
            else:
                keys, values = self.cache.read(layer, part.context)
            out_THD[rows] = _attend_part(q_THD[rows], keys, values, part.mask)
        for group in self.groups:
            keys, values = self.cache.read(layer, group.slots)
            out_THD[group.rows] = _attend_group(q_THD[group.rows], keys, values, group.mask)
        return out_THD


def plan_attention(chunks: Iterable[Chunk], cache: KVCache, device: torch.device) -> StepAttention:
    """Plan where the step's tokens are stored and what each of them attends to."""
    parts: list[PromptPart] = []
    decoding: dict[int, list[tuple[int, torch.Tensor]]] = {}
    written: list[torch.Tensor] = []
    first = 0
    for chunk in chunks:
        slots = _slots(chunk.sequence, chunk.end)
        written.append(slots[chunk.start :])
        if chunk.num_tokens == 1:
            decoding.setdefault(padded_length(chunk.end), []).append((first, slots))
        else:
            parts.append(_prompt_part(chunk, first, slots, device))
        first += chunk.num_tokens
    groups = []
    for length, members in decoding.items():
        size = max(1, MAX_GATHER_TOKENS // length)
        for i in range(0, len(members), size):
            groups.append(_decode_group(members[i : i + size], length, cache.null_slot, device))
    return StepAttention(cache, torch.cat(written).to(device), tuple(parts), tuple(groups))


def padded_length(length: int) -> int:
    """Return the next power of two from 32 to 512, then the next multiple of 512."""
    return max(32, 1 << (length - 1).bit_length()) if length <= 512 else -(-length // 512) * 512


def _slots(sequence: Sequence, end: int) -> torch.Tensor:
    """The slots of the tokens 0 to `end`, (end,)."""
    first_slots = torch.tensor(sequence.block_table) * BLOCK_SIZE
    return (first_slots[:, None] + torch.arange(BLOCK_SIZE)).flatten()[:end]


def _prompt_part(chunk: Chunk, first: int, slots: torch.Tensor, device: torch.device) -> PromptPart:
    last = first + chunk.num_tokens
    if chunk.start == 0:
        return PromptPart(first, last, None, None)
    mask = torch.ones(chunk.num_tokens, chunk.end, dtype=torch.bool, device=device).tril(chunk.start)
    return PromptPart(first, last, slots.to(device), mask)


def _decode_group(
    members: list[tuple[int, torch.Tensor]], length: int, null_slot: int, device: torch.device
) -> DecodeGroup:
    slots = torch.full((len(members), length), null_slot)
    for padded, (_, own) in zip(slots, members, strict=True):
        padded[: len(own)] = own
    rows = torch.tensor([row for row, _ in members], device=device)
    mask = (slots != null_slot)[:, None, None, :]
    return DecodeGroup(rows, slots.to(device), mask.to(device))


def _attend_part(
    q_NHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    out_1HND = F.scaled_dot_product_attention(
        q_NHD.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return out_1HND[0].transpose(0, 1)


def _attend_group(q_GHD: torch.Tensor, k_GLKD: torch.Tensor, v_GLKD: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # The query heads of one key/value head stand in for query positions: no repeated keys and values.
    q_GKRD = q_GHD.view(len(q_GHD), k_GLKD.shape[2], -1, q_GHD.shape[2])
    out_GKRD = F.scaled_dot_product_attention(q_GKRD, k_GLKD.transpose(1, 2), v_GLKD.transpose(1, 2), attn_mask=mask)
    return out_GKRD.flatten(1, 2)
