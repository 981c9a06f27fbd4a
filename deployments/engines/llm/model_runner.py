"""The model runner: runs the model for the chunks of one step. Owns the KV cache; knows no queue and no text.

Attention over the paged KV cache is planned once per step and run once per layer. On the CPU a token's result must not
depend on which other sequences are in the step, nor on how its prompt was cut into chunks, bit for bit. So the tokens
of a prompt attend in tiles that begin at multiples of `TILE` tokens, whatever part of a tile is there. The tokens of a
completion attend one by one: short sequences padded to a length that follows from their own length alone, then batched
with those of the same padded length (there a batch dimension does not change the arithmetic of its members, padding
does), long ones alone, from where they lie. CUDA kernels are chosen by the batch as well, and promise no such thing.

Suffixes: T tokens of the step, N tokens of a part, G sequences of a group, L padded length, H query heads,
K key/value heads, R query heads per key/value head, D head dimension.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch.nn import functional as F

from deployments.engines.llm.block_manager import BLOCK_SIZE
from deployments.engines.llm.kv_cache import KVCache, KvDtype
from deployments.engines.llm.loras import SequenceLora
from deployments.engines.llm.models.registry import CPU_ROW_MULTIPLE, LoadedModel
from deployments.engines.llm.packed_decoder import DecodeRow, PackedDecoder
from deployments.engines.llm.prompt_logprobs import ROWS_AT_ONCE
from deployments.engines.llm.scheduler import Chunk, Sequence
from deployments.engines.nn.lora import RowAdapter, adapted_rows
from weights.memory.devices import computes_on_host

TILE = 64  # tokens of a prompt that attend together
MAX_PADDED = 512  # tokens of a sequence that is padded and batched when it decodes
MAX_GATHER_TOKENS = 16384  # of one group: bounds the copy of keys and values that a decode step makes


class ModelRunner:
    """Prefill and decode alike: every chunk's tokens go through the layers in one flat batch."""

    def __init__(self, model: LoadedModel, num_blocks: int, kv_dtype: KvDtype = "auto") -> None:
        self._model = model
        self._cache = KVCache(model.spec, num_blocks, model.dtype, model.device, kv_dtype)
        self._decoder = PackedDecoder.create(model, self._cache)
        self._row_multiple = CPU_ROW_MULTIPLE if model.pads_rows and computes_on_host(model.device) else 1

    @torch.inference_mode()
    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks of the KV cache, each (from, to) in this order."""
        self._cache.copy_blocks(copies)

    @torch.inference_mode()
    def run(self, chunks: Collection[Chunk]) -> torch.Tensor:
        """Store the chunks' keys and values and return float32 logits.

        The result is (N, vocabulary) with one row per chunk that is its sequence's last, in order. Running
        the same chunks again is harmless: the same slots get the same values.
        """
        taken = self._taken_by_kernels(chunks)
        if taken and len(taken) == len(chunks):
            return self._run_kernels(taken)
        if not taken:
            return self._run_layers(chunks)
        left = [chunk for chunk in chunks if chunk not in taken]
        # Tokens of completions take the same way beside a prompt as without it, and come out the same.
        parts = {True: self._run_kernels(taken), False: self._run_layers(left)}
        of_kernels = torch.tensor([chunk in taken for chunk in chunks if chunk.is_last], device=self._model.device)
        logits = torch.empty(len(of_kernels), self._model.spec.vocab_size, device=self._model.device)
        for is_taken, part in parts.items():
            logits[of_kernels == is_taken] = part
        return logits

    def _run_layers(self, chunks: Collection[Chunk]) -> torch.Tensor:
        """Run the module, layer by layer."""
        model = self._model
        tokens = [token for chunk in chunks for token in chunk.sequence.token_ids[chunk.start : chunk.end]]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        angles = model.rotary.angles(self._padded(torch.tensor(positions)).to(model.device), model.dtype)
        windows = model.spec.windows or (0,) * model.spec.num_layers
        plans = {window: _plan_attention(chunks, self._cache, model.device, window) for window in set(windows)}
        attend = _LayerAttention(tuple(plans[window] for window in windows))
        with adapted_rows(model.module, _row_adapters(chunks, model.device)):
            hidden = model.module(self._padded(torch.tensor(tokens)).to(model.device), angles, attend)
        self._score_prompts(chunks, hidden)
        with adapted_rows(model.module, _row_adapters(chunks, model.device, of_head=True)):
            return self._logits(hidden, _last_rows(chunks))

    def _taken_by_kernels(self, chunks: Collection[Chunk]) -> list[Chunk]:
        """Return the chunks that the kernels compute in one call, a few tokens: of completions, all or none.

        Then parts of prompts, where their bits may depend on how they are cut. None of them has a LoRA.
        """
        if self._decoder is None:
            return []
        able = [chunk for chunk in chunks if not chunk.sequence.loras and chunk.num_tokens]
        taken = [chunk for chunk in able if chunk.start >= chunk.sequence.num_prompt_tokens]
        left = self._decoder.max_rows - sum(chunk.num_tokens for chunk in taken)
        if left < 0:
            return []
        for chunk in able if self._decoder.takes_prompts else ():
            is_prompt = chunk.start < chunk.sequence.num_prompt_tokens and chunk.sequence.prompt_logprobs is None
            if is_prompt and chunk.num_tokens <= left:
                taken.append(chunk)
                left -= chunk.num_tokens
        return [chunk for chunk in chunks if chunk in taken]

    def _run_kernels(self, chunks: Collection[Chunk]) -> torch.Tensor:
        assert self._decoder is not None
        hidden = self._decoder.run_layers(
            [
                DecodeRow(chunk.sequence.token_ids[position], position, chunk.sequence.block_table)
                for chunk in chunks
                for position in range(chunk.start, chunk.end)
            ]
        )
        return self._logits(hidden, _last_rows(chunks))

    def _score_prompts(self, chunks: Iterable[Chunk], hidden: torch.Tensor) -> None:
        """Note the log probabilities of prompts where they were asked for: a few rows at a time through the head."""
        first = 0
        for chunk in chunks:
            scores = chunk.sequence.prompt_logprobs
            last = min(chunk.end, scores.end) if scores else chunk.start
            for begin in range(chunk.start, last, ROWS_AT_ONCE):
                end = min(begin + ROWS_AT_ONCE, chunk.end)
                part = replace(chunk, start=begin, end=end)
                adapters = _row_adapters([part], self._model.device, of_head=True, all_rows=True)
                with adapted_rows(self._model.module, adapters):
                    logits = self._logits(hidden, list(range(first + begin - chunk.start, first + end - chunk.start)))
                assert scores is not None
                scores.note(begin, logits)
            first += chunk.num_tokens

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        if not rows:
            return torch.empty(0, self._model.spec.vocab_size, device=self._model.device)
        logits = self._model.module.logits(self._padded(hidden[rows]))
        return logits[: len(rows)].float()

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` with zeros behind it up to a multiple of `_row_multiple` rows."""
        missing = -len(rows) % self._row_multiple
        return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def _last_rows(chunks: Collection[Chunk]) -> list[int]:
    """The row of the last token of every chunk after which a token is sampled."""
    rows, end = [], 0
    for chunk in chunks:
        end += chunk.num_tokens
        if chunk.is_last:
            rows.append(end - 1)
    return rows


def _row_adapters(
    chunks: Iterable[Chunk], device: torch.device, *, of_head: bool = False, all_rows: bool = False
) -> list[RowAdapter]:
    """Return the LoRAs of a step with the rows that they change: those of its tokens, or those of its logits.

    With `all_rows`, every token has logits.
    """
    rows: dict[SequenceLora, list[int]] = {}
    end = 0
    for chunk in chunks:
        start, end = end, end + (int(chunk.is_last) if of_head and not all_rows else chunk.num_tokens)
        for lora in chunk.sequence.loras:
            rows.setdefault(lora, []).extend(range(start, end))
    row_multiple = CPU_ROW_MULTIPLE if computes_on_host(device) else 1
    found = []
    for lora in sorted(rows, key=lambda lora: lora.place):
        pairs = lora.fitted.head if of_head else lora.fitted.layers
        if pairs and rows[lora]:
            found.append(RowAdapter(pairs, lora.scale, torch.tensor(rows[lora], device=device), row_multiple))
    return found


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
class _LayerAttention:
    """`Attend` of a step in which layers may see unequally far."""

    layers: tuple[_StepAttention, ...]

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        return self.layers[layer](layer, q_THD, k_TKD, v_TKD)


def _plan_attention(chunks: Iterable[Chunk], cache: KVCache, device: torch.device, window: int) -> _StepAttention:
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
