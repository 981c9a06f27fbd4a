"""Attention over the paged KV cache: planned once per step, run once per layer.

On the CPU a token's result must not depend on which other sequences are in the step, nor on how its prompt was cut into
chunks, bit for bit. So the tokens of a prompt attend in tiles that begin at multiples of `TILE` tokens, whatever part
of a tile is there. The tokens of a completion attend one by one: short sequences padded to a length that follows from
their own length alone, then batched with those of the same padded length (there a batch dimension does not change the
arithmetic of its members, padding does), long ones alone, from where they lie. CUDA kernels are chosen by the batch as
well, and promise no such thing.

Suffixes: T tokens of the step, N tokens of a part, G sequences of a group, L padded length, H query heads,
K key/value heads, R query heads per key/value head, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional as F

from deployments.engines.llm.block_manager import BLOCK_SIZE
from deployments.engines.llm.kv_cache import KVCache
from deployments.engines.llm.scheduler import Chunk, Sequence
from weights.memory.devices import computes_on_host

TILE = 64  # tokens of a prompt that attend together
MAX_PADDED = 512  # tokens of a sequence that is padded and batched when it decodes
MAX_GATHER_TOKENS = 16384  # of one group: bounds the copy of keys and values that a decode step makes


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """Rows `first` to `last` of the step: tokens of a prompt, the first of them at `position`.

    `context` has the slots of all tokens up to the last one; `run` is the first of them where they follow each other.
    `tiles` are (row, row, key, key, mask): rows of the part, keys of the context, and which of them each row sees.
    Tiles of one size have rows of their own before and behind those of the part, which are dropped.
    """

    first: int
    last: int
    context: torch.Tensor
    run: int | None
    tiles: tuple[tuple[int, int, int, int, torch.Tensor], ...]
    tile_size: int | None
    position: int


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Tokens of completions, one of each sequence, and all of the same padded length."""

    rows: torch.Tensor  # (G,) of the step
    slots: torch.Tensor  # (G, L), the null slot behind the end
    mask: torch.Tensor  # (G, 1, 1, L), True where there is a token


@dataclass(frozen=True, slots=True)
class _LongDecode:
    """A token of a long completion: its row, and its slots, or the first of them where they follow each other."""

    row: int
    num_tokens: int
    slots: torch.Tensor
    run: int | None


@dataclass(frozen=True, slots=True)
class _StepAttention:
    """`Attend` for the chunks of one step; `slots` is where its (N,) tokens are stored.

    Rows behind the last chunk are padding and give zeros.
    """

    cache: KVCache
    slots: torch.Tensor
    parts: tuple[_PromptPart, ...]
    groups: tuple[_DecodeGroup, ...]
    long: tuple[_LongDecode, ...]

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        num_tokens = len(self.slots)
        self.cache.write_slots(layer, self.slots, k_TKD[:num_tokens], v_TKD[:num_tokens])
        out_THD = torch.zeros_like(q_THD)
        for part in self.parts:
            rows = slice(part.first, part.last)
            keys, values = self._read(layer, part.context, part.run)
            _attend_part(q_THD[rows], keys, values, part, out_THD[rows])
        for group in self.groups:
            keys, values = self.cache.read_slots(layer, group.slots)
            out_THD[group.rows] = _attend_group(q_THD[group.rows], keys, values, group.mask)
        for one in self.long:
            keys, values = self._read(layer, one.slots, one.run)
            row = slice(one.row, one.row + 1)
            out_THD[row] = _attend_group(q_THD[row], keys[None], values[None], None)
        return out_THD

    def _read(self, layer: int, slots: torch.Tensor, run: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.read_slots(layer, slots) if run is None else self.cache.read_run(layer, run, len(slots))


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """`Attend` of a step in which layers may see unequally far. `check` may end the step before any of them."""

    layers: tuple[_StepAttention, ...]
    check: Callable[[], None]

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        self.check()
        return self.layers[layer](layer, q_THD, k_TKD, v_TKD)


def plan_attention(chunks: Iterable[Chunk], cache: KVCache, device: torch.device, window: int) -> _StepAttention:
    """Plan where the step's tokens are stored, and what each of them attends to: of a `window`, its last tokens."""
    is_exact = computes_on_host(device)
    parts: list[_PromptPart] = []
    long: list[_LongDecode] = []
    decoding: dict[int, list[tuple[int, torch.Tensor]]] = {}
    written: list[torch.Tensor] = []
    first = 0
    for chunk in chunks:
        sequence = chunk.sequence
        slots = _slots(sequence, chunk.end)
        written.append(slots[chunk.start :])
        run = int(slots[0]) if _is_run(sequence.block_table[: -(-chunk.end // BLOCK_SIZE)]) else None
        # On other devices than the host, a completion that is computed again is as good in one piece.
        is_whole = chunk.num_tokens > 1 and not is_exact
        prompt_end = chunk.end if is_whole else min(max(sequence.num_prompt_tokens, chunk.start), chunk.end)
        if prompt_end > chunk.start:
            tile = TILE if is_exact else None
            parts.append(_prompt_part(chunk.start, prompt_end, first, slots, run, tile, window, device))
        for position in range(prompt_end, chunk.end):
            row, length = first + position - chunk.start, position + 1
            unseen = max(0, length - window) if window else 0
            seen = slots[unseen:length]
            if is_exact and len(seen) > MAX_PADDED:
                long.append(_LongDecode(row, len(seen), seen.to(device), None if run is None else run + unseen))
            else:
                decoding.setdefault(_padded_length(len(seen)), []).append((row, seen))
        first += chunk.num_tokens
    groups = []
    for length, members in decoding.items():
        size = max(1, MAX_GATHER_TOKENS // length)
        for i in range(0, len(members), size):
            groups.append(_decode_group(members[i : i + size], length, cache.null_slot, device))
    return _StepAttention(cache, torch.cat(written).to(device), tuple(parts), tuple(groups), tuple(long))


def _is_run(blocks: list[int]) -> bool:
    return blocks[-1] - blocks[0] == len(blocks) - 1 and all(b - a == 1 for a, b in pairwise(blocks))


def _padded_length(length: int) -> int:
    """Return the next power of two from 32 to 512, then the next multiple of 512."""
    return max(32, 1 << (length - 1).bit_length()) if length <= 512 else -(-length // 512) * 512


def _slots(sequence: Sequence, end: int) -> torch.Tensor:
    """The slots of the tokens 0 to `end`, (end,)."""
    first_slots = torch.tensor(sequence.block_table) * BLOCK_SIZE
    return (first_slots[:, None] + torch.arange(BLOCK_SIZE)).flatten()[:end]


def _prompt_part(
    start: int,
    end: int,
    first: int,
    slots: torch.Tensor,
    run: int | None,
    tile: int | None,
    window: int,
    device: torch.device,
) -> _PromptPart:
    """Plan the tokens `start` to `end` of a prompt, which are the step's rows from `first` on."""
    tiles = []
    for begin in range(start // tile * tile, end, tile) if tile else [start]:
        num_rows, num_keys = (tile, begin + tile) if tile else (end - start, end)
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool, device=device).tril(begin)
        # Keys that no row of the tile sees are left out, as many for every part of it.
        unseen = max(0, begin - window + 1) if window else 0
        if window:
            mask = mask.triu(begin - window + 1)[:, unseen:].contiguous()
        tiles.append((max(begin, start) - start, min(begin + num_rows, end) - start, unseen, num_keys, mask))
    return _PromptPart(first, first + end - start, slots[:end].to(device), run, tuple(tiles), tile, start)


def _decode_group(
    members: list[tuple[int, torch.Tensor]], length: int, null_slot: int, device: torch.device
) -> _DecodeGroup:
    slots = torch.full((len(members), length), null_slot)
    for padded, (_, own) in zip(slots, members, strict=True):
        padded[: len(own)] = own
    rows = torch.tensor([row for row, _ in members], device=device)
    mask = (slots != null_slot)[:, None, None, :]
    return _DecodeGroup(rows, slots.to(device), mask.to(device))


def _attend_part(
    q_NHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: _PromptPart, out_NHD: torch.Tensor
) -> None:
    for begin, end, first_key, last_key, mask in part.tiles:
        queries, own_keys, own_values = q_NHD[begin:end], keys[first_key:last_key], values[first_key:last_key]
        before = (part.position + begin) % part.tile_size if part.tile_size else 0
        behind = len(mask) - (end - begin) - before
        if before or behind:
            queries = F.pad(queries, (0, 0, 0, 0, before, behind))
        if missing := last_key - first_key - len(own_keys):
            own_keys, own_values = (F.pad(one, (0, 0, 0, 0, 0, missing)) for one in (own_keys, own_values))
        out_1HND = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            own_keys.transpose(0, 1)[None],
            own_values.transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=True,
        )
        out_NHD[begin:end] = out_1HND[0].transpose(0, 1)[before : before + end - begin]


def _attend_group(
    q_GHD: torch.Tensor, k_GLKD: torch.Tensor, v_GLKD: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    # The query heads of one key/value head stand in for query positions: no repeated keys and values.
    q_GKRD = q_GHD.view(len(q_GHD), k_GLKD.shape[2], -1, q_GHD.shape[2])
    out_GKRD = F.scaled_dot_product_attention(q_GKRD, k_GLKD.transpose(1, 2), v_GLKD.transpose(1, 2), attn_mask=mask)
    return out_GKRD.flatten(1, 2)
