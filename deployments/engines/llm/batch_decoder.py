"""Decode batches of tokens that the caller has scheduled, by llama_decode's rules: no queue, no sampler, no text.

A batch has tokens of any sequences, in any order; those of one sequence follow what it has, position by position. It
runs in micro-batches, and the logits come in the caller's order, whatever the order in which they were computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch

from deployments.engines.llm.block_manager import BLOCK_SIZE, BlockPool, blocks_for
from deployments.engines.llm.kv_cache import KvDtype
from deployments.engines.llm.model_runner import ModelRunner, StepAborted
from deployments.engines.llm.models.registry import LoadedModel
from deployments.engines.llm.scheduler import Chunk, Sequence
from deployments.engines.memory_limits import is_out_of_memory


class BatchToken(NamedTuple):
    """A token to decode: its position in its sequence, and whether the logits behind it are wanted."""

    token_id: int
    position: int
    sequence_id: int
    wants_logits: bool = False


class DecodeStatus(IntEnum):
    """The outcome of a batch, by llama_decode's numbers. Negative ones are failures that a smaller batch may not mend.

    What is in memory afterwards: OK, all of the batch; NO_SLOT and INVALID, nothing of it; the others, the
    micro-batches before the one that ended it.
    """

    OK = 0
    NO_SLOT = 1  # the blocks do not last: a smaller batch may fit, or some sequence has to go
    ABORTED = 2
    INVALID = -1
    NO_MEMORY = -2  # of the device, while it was computed
    FAILED = -3


@dataclass(frozen=True, slots=True)
class Decoded:
    """The outcome of a batch: its first `num_decoded` tokens are in memory.

    `logits` (N, vocabulary) in float32 are those that were wanted of them, in the caller's order. `reason` says what
    was wrong, "" for OK.
    """

    status: DecodeStatus
    logits: torch.Tensor
    num_decoded: int = 0
    reason: str = ""


@dataclass(slots=True, eq=False)
class _Stored:
    """The tokens of a sequence, and the blocks with their keys and values."""

    token_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class BatchDecoder:
    """Sequences in one KV cache, grown by `decode`. Single-threaded."""

    def __init__(
        self, model: LoadedModel, *, num_blocks: int, max_micro_batch: int = 512, kv_dtype: KvDtype = "auto"
    ) -> None:
        """Make room for `num_blocks` blocks of tokens; a batch runs in parts of `max_micro_batch` tokens."""
        self._spec, self._device = model.spec, model.device
        self._runner = ModelRunner(model, num_blocks, kv_dtype)
        self._pool = BlockPool(num_blocks)
        self._max_micro_batch = max_micro_batch
        self._sequences: dict[int, _Stored] = {}

    def num_tokens(self, sequence_id: int) -> int:
        """Return how many tokens of a sequence are in memory."""
        return len(self._sequences.get(sequence_id, _Stored()).token_ids)

    def decode(self, batch: Items[BatchToken], is_aborted: Callable[[], bool] = lambda: False) -> Decoded:
        """Compute a batch. `is_aborted` is asked before every layer, from this thread.

        Several tokens of a sequence are computed as parts of a prompt are, a single one as a completion's.
        """
        if reason := self._find_fault(batch):
            return self._ended(DecodeStatus.INVALID, reason)
        sizes = {id_: self.num_tokens(id_) for id_ in dict.fromkeys(token.sequence_id for token in batch)}
        if not self._reserve(batch, sizes):
            reason = (
                f"{len(batch)} tokens need more blocks than the {self._pool.num_free} of {self._pool.num_blocks} left"
            )
            return self._ended(DecodeStatus.NO_SLOT, reason)
        counts = {id_: self.num_tokens(id_) - size for id_, size in sizes.items()}
        prompts = {id_ for id_, size in sizes.items() if counts[id_] > 1 or not size}
        found: dict[int, torch.Tensor] = {}
        for begin in range(0, len(batch), self._max_micro_batch):
            part = batch[begin : begin + self._max_micro_batch]
            try:
                rows = self._run_part(part, prompts, is_aborted)
            except Exception as error:
                self._drop_rest(sizes, batch[:begin])
                return self._ended(_status_of(error), str(error), found, begin)
            found |= {begin + place: row for place, row in rows.items()}
        return self._ended(DecodeStatus.OK, "", found, len(batch))

    def copy_sequence(self, source: int, target: int) -> None:
        """Let `target` go on from all that `source` has; their blocks are shared until one of them is written.

        Raises:
            ValueError: `target` has tokens already.
        """
        if self.num_tokens(target):
            raise ValueError(f"sequence {target} has {self.num_tokens(target)} tokens; expected none")
        if (stored := self._sequences.get(source)) is not None:
            self._pool.share_blocks(stored.blocks)
            self._sequences[target] = _Stored(list(stored.token_ids), list(stored.blocks))

    def remove_tokens(self, sequence_id: int, start: int = 0) -> None:
        """Drop the tokens of a sequence from position `start` on, and free blocks that have none left."""
        stored = self._sequences.get(sequence_id)
        if stored is None or start >= len(stored.token_ids):
            return
        del stored.token_ids[start:]
        self._pool.release_blocks(reversed(stored.blocks[blocks_for(start) :]))
        del stored.blocks[blocks_for(start) :]
        if not start:
            del self._sequences[sequence_id]

    def _find_fault(self, batch: Items[BatchToken]) -> str:
        """Return what is wrong with a batch, "" if nothing is."""
        if not batch:
            return "the batch is empty"
        ends: dict[int, int] = {}
        for place, (token_id, position, id_, _) in enumerate(batch):
            expected = ends.get(id_, self.num_tokens(id_))
            if not 0 <= token_id < self._spec.vocab_size:
                return f"token {place} has id {token_id}; expected 0 to {self._spec.vocab_size - 1}"
            if position != expected:
                return f"token {place} is at position {position} of sequence {id_}; expected {expected}"
            if position >= self._spec.max_positions:
                return f"token {place} is at position {position}; the model has {self._spec.max_positions}"
            ends[id_] = position + 1
        return ""

    def _reserve(self, batch: Items[BatchToken], sizes: dict[int, int]) -> bool:
        """Give every sequence its tokens and blocks of its own for them, or change nothing."""
        added: dict[int, list[int]] = {id_: [] for id_ in sizes}
        for token in batch:
            added[token.sequence_id].append(token.token_id)
        shared: dict[int, int] = {}  # by sequence, the place of a block that others have too and that is written now
        missing = 0
        for id_, size in sizes.items():
            blocks = self._sequences.get(id_, _Stored()).blocks
            missing += blocks_for(size + len(added[id_])) - len(blocks)
            if size % BLOCK_SIZE and self._pool.is_shared(blocks[-1]):
                shared[id_] = blocks[-1]
        if missing + len(shared) > self._pool.num_free:
            return False
        copies = []
        for id_, tokens in added.items():
            stored = self._sequences.setdefault(id_, _Stored())
            # The last of those that share a block may keep it.
            if id_ in shared and self._pool.is_shared(shared[id_]):
                (own,) = self._pool.allocate(1)
                copies.append((shared[id_], own))
                self._pool.release_blocks([shared[id_]])
                stored.blocks[-1] = own
            stored.token_ids += tokens
            count = blocks_for(len(stored.token_ids)) - len(stored.blocks)
            stored.blocks += self._pool.allocate(count, stored.blocks[-1] if stored.blocks else None)
        if copies:
            self._runner.copy_blocks(copies)
        return True

    def _run_part(
        self, part: Items[BatchToken], prompts: set[int], is_aborted: Callable[[], bool]
    ) -> dict[int, torch.Tensor]:
        """Compute a micro-batch and return the rows that are wanted, by the place of their token in it."""

        def check() -> None:
            if is_aborted():
                raise StepAborted("the caller wants no more of it")

        places: dict[int, list[int]] = {}
        for place, token in enumerate(part):
            places.setdefault(token.sequence_id, []).append(place)
        chunks: list[Chunk] = []
        wanted: list[int] = []
        for id_, own in places.items():
            stored = self._sequences[id_]
            start = part[own[0]].position
            num_prompt = len(stored.token_ids) if id_ in prompts else start
            sequence = Sequence(str(id_), stored.token_ids, num_prompt, block_table=stored.blocks)
            for place in own:
                position, wants_logits = part[place].position, part[place].wants_logits
                if wants_logits or place == own[-1]:
                    chunks.append(Chunk(sequence, start, position + 1, is_last=wants_logits))
                    start = position + 1
                    wanted += [place] * wants_logits
        rows = self._runner.run(chunks, check)
        return dict(zip(wanted, rows, strict=True))

    def _drop_rest(self, sizes: dict[int, int], done: Iterable[BatchToken]) -> None:
        """Leave every sequence what it had, and those tokens of the batch that were done."""
        ends = sizes | {token.sequence_id: token.position + 1 for token in done}
        for id_, end in ends.items():
            self.remove_tokens(id_, end)

    def _ended(
        self, status: DecodeStatus, reason: str, found: dict[int, torch.Tensor] | None = None, num_decoded: int = 0
    ) -> Decoded:
        rows = [row for _, row in sorted((found or {}).items())]
        empty = torch.empty(0, self._spec.vocab_size, device=self._device)
        return Decoded(status, torch.stack(rows) if rows else empty, num_decoded, reason)


def _status_of(error: Exception) -> DecodeStatus:
    if isinstance(error, StepAborted):
        return DecodeStatus.ABORTED
    return DecodeStatus.NO_MEMORY if is_out_of_memory(error) else DecodeStatus.FAILED
