"""Attention over the paged KV cache: planned once per step, run once per layer.

On the CPU a token's result must not depend on the other sequences of the step, nor on the cuts of its prompt into
chunks, bit for bit. So the tokens of a prompt attend in tiles that begin at multiples of `TILE` tokens, for any part
of a tile. The tokens of a completion attend one by one: short sequences padded to a length that depends on
their own length alone, then batched with those of the same padded length (there a batch dimension does not change the
arithmetic of its members, padding does), long ones alone, in place. CUDA kernels are chosen by the batch as
well, and promise no such thing.

Suffixes: T tokens of the step, N tokens of a part, G sequences of a group, L padded length, H query heads,
K key/value heads, R query heads per key/value head, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from deployments.engines.llm.sequences.kv_cache import KVCache
from deployments.engines.llm.sequences.sequence import Chunk, Sequence
from deployments.engines.llm.sequences.slot_table import SlotTable
from weights.memory.devices import computes_on_host

TILE = 64  # tokens of a prompt that attend together
MAX_PADDED = 512  # tokens of a sequence that is padded and batched when it decodes
MAX_GATHER_TOKENS = 16384  # of one group: bounds a decode step's copy of keys and values


# Query positions and key positions, which broadcast -> True for the visible keys.
Visible = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Scores(NamedTuple):
    """The step from scores to weights: a factor (None: 1 over the root of a key's size), a bound kept by
    a tanh, and one more score (H,) of every query, without a value.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


_PLAIN = Scores()


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """Rows `first` to `last` of the step: tokens of a prompt, the first of them at `position`.

    `context` has the slots of all tokens up to the last one; if they are consecutive, it is empty, and `run` is the
    first of them.
    `tiles` are (row, row, key, key, mask): rows of the part, keys of the context, and the visible keys of each row.
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
    """A token of a long completion: its row, and its slots, or the first of them if they are consecutive.

    Then `slots` is empty.
    """

    row: int
    num_tokens: int
    slots: torch.Tensor
    run: int | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class StepAttention:
    """`Attend` for the chunks of one step; `slots` is where its (N,) tokens are stored.

    Rows after the last chunk are padding and give zeros.
    """

    cache: KVCache
    slots: torch.Tensor
    parts: tuple[_PromptPart, ...]
    groups: tuple[_DecodeGroup, ...]
    long: tuple[_LongDecode, ...]

    def __call__(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, scores: Scores = _PLAIN
    ) -> torch.Tensor:
        num_tokens = len(self.slots)
        self.cache.write_slots(layer, self.slots, k_TKD[:num_tokens], v_TKD[:num_tokens])
        return self.read(layer, q_THD, scores)

    def read(self, layer: int, q_THD: torch.Tensor, scores: Scores = _PLAIN) -> torch.Tensor:
        """Attend to the layer's stored keys and values."""
        out_THD = q_THD.new_zeros(*q_THD.shape[:2], self.cache.layer_slots(layer).values.shape[-1])
        for part in self.parts:
            rows = slice(part.first, part.last)
            keys, values = self._read(layer, part.context, part.run, part.position + part.last - part.first)
            _attend_part(q_THD[rows], keys, values, part, out_THD[rows], scores)
        for group in self.groups:
            keys, values = self.cache.read_slots(layer, group.slots)
            out_THD[group.rows] = _attend_group(q_THD[group.rows], keys, values, group.mask, scores)
        for one in self.long:
            keys, values = self._read(layer, one.slots, one.run, one.num_tokens)
            row = slice(one.row, one.row + 1)
            out_THD[row] = _attend_group(q_THD[row], keys[None], values[None], one.mask, scores)
        return out_THD

    def _read(
        self, layer: int, slots: torch.Tensor, run: int | None, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.read_slots(layer, slots) if run is None else self.cache.read_run(layer, run, num_tokens)


# A window and its visibility -> the places of the step's tokens, and the keys that each attends to.
Planner = Callable[[int, Visible | None], StepAttention]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """`Attend` of a step whose layers may have different windows. `check` may end the step before any of them."""

    layers: tuple[StepAttention, ...]
    check: Callable[[], None]

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        self.check()
        return self.layers[layer](layer, q_THD, k_TKD, v_TKD)


def plan_attention(
    chunks: Iterable[Chunk],
    cache: KVCache,
    device: torch.device,
    window: int,
    visible: Visible | None = None,
    *,
    sees_spans: bool = False,
) -> StepAttention:
    """Plan the places of the step's tokens, and the keys that each of them attends to.

    These are all tokens up to itself; in a `window`, the last ones; and of these the `visible` ones. With `sees_spans`
    they include later tokens of its image.
    """
    is_exact = computes_on_host(device)
    parts: list[_PromptPart] = []
    long: list[_LongDecode] = []
    decoding: dict[int, list[_Decoding]] = {}
    written: list[torch.Tensor] = []
    first = 0
    for chunk in chunks:
        sequence = chunk.sequence
        slots = _slots_of(sequence)
        written.append(slots.part(chunk.start, chunk.end))
        run = slots.run(chunk.end)
        # On other devices than the host, a recomputed completion may be one piece.
        is_whole = chunk.num_tokens > 1 and not is_exact
        prompt_end = chunk.end if is_whole else min(max(sequence.num_prompt_tokens, chunk.start), chunk.end)
        if prompt_end > chunk.start:
            tile = TILE if is_exact else None
            spans = sequence.images.spans if sees_spans and sequence.images is not None else ()
            seen = _Visibility(window, visible, spans)
            context = slots.part(0, prompt_end if run is None else 0)
            parts.append(_prompt_part(chunk.start, prompt_end, first, context, run, tile, device, seen))
        for position in range(prompt_end, chunk.end):
            row, length = first + position - chunk.start, position + 1
            unseen = max(0, length - window) if window else 0
            mask = None if visible is None else visible(torch.tensor([position]), torch.arange(unseen, length))
            num_seen = length - unseen
            if is_exact and num_seen > MAX_PADDED:
                first_slot = None if run is None else run + unseen
                own = slots.part(unseen, length if run is None else unseen).to(device)
                long.append(
                    _LongDecode(row, num_seen, own, first_slot, None if mask is None else mask[None].to(device))
                )
            else:
                one = _Decoding(row, slots.part(unseen, length), mask)
                decoding.setdefault(_padded_length(num_seen), []).append(one)
        first += chunk.num_tokens
    groups = tuple(_decode_groups(decoding, cache.null_slot, device))
    return StepAttention(cache, torch.cat(written).to(device), tuple(parts), groups, tuple(long))


class _Decoding(NamedTuple):
    """A token of a completion: its row, the slots of earlier tokens, and the visible ones of these, None for all."""

    row: int
    slots: torch.Tensor
    mask: torch.Tensor | None


def _padded_length(length: int) -> int:
    """Return the next power of two from 32 to 512, then the next multiple of 512."""
    return max(32, 1 << (length - 1).bit_length()) if length <= 512 else -(-length // 512) * 512


def _slots_of(sequence: Sequence) -> SlotTable:
    if sequence.slots is None:
        sequence.slots = SlotTable()
    sequence.slots.follow(sequence.block_table)
    return sequence.slots


class _Visibility(NamedTuple):
    """The keys seen by a prompt's tokens: the `visible` ones of a window (0: all earlier ones), and their span's."""

    window: int
    visible: Visible | None
    spans: tuple[tuple[int, int], ...]

    def last_key(self, begin: int, end: int) -> int:
        """Return the end of the keys that the tokens `begin` to `end` see."""
        return max([end, *(last for first, last in self.spans if first < end and begin < last)])

    def mask(self, begin: int, num_rows: int, unseen: int, num_keys: int, device: torch.device) -> torch.Tensor:
        """Return the mask of the keys `unseen` to `num_keys` for the tokens from `begin` on."""
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool, device=device).tril(begin)
        if self.window:
            mask = mask.triu(begin - self.window + 1)[:, unseen:].contiguous()
        rows = torch.arange(begin, begin + num_rows, device=device)[:, None]
        keys = torch.arange(unseen, num_keys, device=device)[None]
        if self.visible is not None:
            mask &= self.visible(rows, keys)
        for first, last in self.spans:
            if first < begin + num_rows and begin < last:
                mask |= (first <= rows) & (rows < keys) & (keys < last)
        return mask


def _prompt_part(
    start: int,
    end: int,
    first: int,
    slots: torch.Tensor,
    run: int | None,
    tile: int | None,
    device: torch.device,
    seen: _Visibility,
) -> _PromptPart:
    """Plan the tokens `start` to `end` of a prompt, which are the step's rows from `first` on."""
    tiles = []
    for begin in range(start // tile * tile, end, tile) if tile else [start]:
        num_rows = tile or end - start
        num_keys = seen.last_key(begin, begin + num_rows)
        # Keys that no row of the tile sees are left out, the same ones for every part of it.
        unseen = max(0, begin - seen.window + 1) if seen.window else 0
        mask = seen.mask(begin, num_rows, unseen, num_keys, device)
        tiles.append((max(begin, start) - start, min(begin + num_rows, end) - start, unseen, num_keys, mask))
    return _PromptPart(first, first + end - start, slots.to(device), run, tuple(tiles), tile, start)


def _decode_groups(
    decoding: Mapping[int, list[_Decoding]], null_slot: int, device: torch.device
) -> Iterator[_DecodeGroup]:
    """Yield the groups of tokens by their padded lengths."""
    for length, members in decoding.items():
        size = max(1, MAX_GATHER_TOKENS // length)
        for first in range(0, len(members), size):
            yield _decode_group(members[first : first + size], length, null_slot, device)


def _decode_group(members: list[_Decoding], length: int, null_slot: int, device: torch.device) -> _DecodeGroup:
    slots = torch.full((len(members), length), null_slot)
    mask = torch.zeros(len(members), length, dtype=torch.bool)
    for place, one in enumerate(members):
        slots[place, : len(one.slots)] = one.slots
        mask[place, : len(one.slots)] = True if one.mask is None else one.mask
    rows = torch.tensor([one.row for one in members], device=device)
    return _DecodeGroup(rows, slots.to(device), mask[:, None, None, :].to(device))


def _attend_part(
    q_NHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    part: _PromptPart,
    out_NHD: torch.Tensor,
    scores: Scores,
) -> None:
    for begin, end, first_key, last_key, mask in part.tiles:
        queries, own_keys, own_values = q_NHD[begin:end], keys[first_key:last_key], values[first_key:last_key]
        before = (part.position + begin) % part.tile_size if part.tile_size else 0
        behind = len(mask) - (end - begin) - before
        if before or behind:
            queries = F.pad(queries, (0, 0, 0, 0, before, behind))
        if missing := last_key - first_key - len(own_keys):
            own_keys, own_values = (F.pad(one, (0, 0, 0, 0, 0, missing)) for one in (own_keys, own_values))
        own_keys, own_values = own_keys.transpose(0, 1)[None], own_values.transpose(0, 1)[None]
        out_1HND = _attend(queries.transpose(0, 1)[None], own_keys, own_values, mask, scores)
        out_NHD[begin:end] = out_1HND[0].transpose(0, 1)[before : before + end - begin]


def _attend_group(
    q_GHD: torch.Tensor, k_GLKD: torch.Tensor, v_GLKD: torch.Tensor, mask: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    # The query heads of one key/value head stand in for query positions: no repeated keys and values.
    q_GKRD = q_GHD.view(len(q_GHD), k_GLKD.shape[2], -1, q_GHD.shape[2])
    if scores.sinks is not None:
        scores = scores._replace(sinks=scores.sinks.view(*q_GKRD.shape[1:3]))
    return _attend(q_GKRD, k_GLKD.transpose(1, 2), v_GLKD.transpose(1, 2), mask, scores).flatten(1, 2)


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    """Attend with (batch, heads, N, D); several heads of queries may share one of keys.

    The sinks are those of each head, or of each row if the rows of a head are heads themselves.
    """
    if keys.shape[-1] != values.shape[-1]:  # two products, which on the host add up otherwise where batches lie apart
        keys, values = keys.contiguous(), values.contiguous()
    if scores.softcap is None and scores.sinks is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scores.scale, enable_gqa=queries.shape[1] != keys.shape[1]
        )
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scale = queries.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    weights = (queries @ keys.transpose(2, 3) * scale).float()
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    if mask is not None:
        weights = weights.masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(1, queries.shape[1], -1, 1).expand(len(weights), -1, weights.shape[2], 1)
        weights = torch.cat([weights, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = weights.softmax(-1)
    return weights.to(values.dtype) @ values
