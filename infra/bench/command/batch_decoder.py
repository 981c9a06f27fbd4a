"""Decode batches of tokens that the caller has scheduled, as llama_decode does: no queue, no sampler, no text.

A batch has tokens of any sequences, in any order; those of one sequence follow what it has, position by position. It
runs in micro-batches, and the logits come in the caller's order, whatever the order in which they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from deployments.engines.llm.model_runner import ModelRunner
from deployments.engines.llm.models.registry import LoadedModel
from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE, BlockPool, blocks_for
from deployments.engines.llm.sequences.kv_cache import KvDtype
from deployments.engines.llm.sequences.sequence import Chunk, Sequence


class BatchToken(NamedTuple):
    """A token to decode: its position in its sequence, and whether the logits behind it are wanted."""

    token_id: int
    position: int
    sequence_id: int
    wants_logits: bool = False


@dataclass(slots=True, eq=False)
class _Stored:
    """The tokens of a sequence, and the blocks with their keys and values."""

    token_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class BatchDecoder:
    """Sequences in one KV cache, grown by `decode`. Single-threaded, and of no more use after an error."""

    def __init__(
        self, model: LoadedModel, *, num_blocks: int, max_micro_batch: int = 512, kv_dtype: KvDtype = "auto"
    ) -> None:
        """Make room for `num_blocks` blocks of tokens; a batch runs in parts of `max_micro_batch` tokens."""
        self._runner = ModelRunner(model, num_blocks, kv_dtype)
        self._pool = BlockPool(num_blocks)
        self._max_micro_batch = max_micro_batch
        self._sequences: dict[int, _Stored] = {}

    def num_tokens(self, sequence_id: int) -> int:
        """Return how many tokens of a sequence are in memory."""
        return len(self._sequences.get(sequence_id, _Stored()).token_ids)

    def decode(self, batch: Items[BatchToken]) -> torch.Tensor:
        """Compute a batch, and return the logits (N, vocabulary) that are wanted, in float32.

        Several tokens of a sequence are computed as parts of a prompt are, a single one as a completion's.

        Raises:
            ValueError: The blocks do not last.
        """
        sizes = {id_: self.num_tokens(id_) for id_ in dict.fromkeys(token.sequence_id for token in batch)}
        for id_ in sizes:
            self._append(id_, [token.token_id for token in batch if token.sequence_id == id_])
        prompts = {id_ for id_, size in sizes.items() if self.num_tokens(id_) > size + 1 or not size}
        found: dict[int, torch.Tensor] = {}
        for begin in range(0, len(batch), self._max_micro_batch):
            rows = self._run_part(batch[begin : begin + self._max_micro_batch], prompts)
            found |= {begin + place: row for place, row in rows.items()}
        return torch.stack([row for _, row in sorted(found.items())]) if found else torch.empty(0, 0)

    def copy_sequence(self, source: int, target: int) -> None:
        """Let `target`, which has no tokens, go on from `source`; they share each block until it is written."""
        if (stored := self._sequences.get(source)) is not None:
            self._pool.share_blocks(stored.blocks)
            self._sequences[target] = _Stored(list(stored.token_ids), list(stored.blocks))

    def remove_sequence(self, sequence_id: int) -> None:
        """Drop the tokens of a sequence, and free the blocks that nobody shares."""
        if (stored := self._sequences.pop(sequence_id, None)) is not None:
            self._pool.release_blocks(reversed(stored.blocks))

    def _append(self, sequence_id: int, token_ids: list[int]) -> None:
        """Give a sequence more tokens and blocks of its own for them. Raises ValueError where these do not last."""
        stored = self._sequences.setdefault(sequence_id, _Stored())
        if len(stored.token_ids) % BLOCK_SIZE and self._pool.is_shared(shared := stored.blocks[-1]):
            (own,) = self._pool.allocate(1)
            self._runner.copy_blocks([(shared, own)])
            self._pool.release_blocks([shared])
            stored.blocks[-1] = own
        stored.token_ids += token_ids
        count = blocks_for(len(stored.token_ids)) - len(stored.blocks)
        stored.blocks += self._pool.allocate(count, stored.blocks[-1] if stored.blocks else None)

    def _run_part(self, part: Items[BatchToken], prompts: set[int]) -> dict[int, torch.Tensor]:
        """Compute a micro-batch and return the rows that are wanted, by the place of their token in it."""
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
        rows = self._runner.run(chunks)
        return dict(zip(wanted, rows, strict=True))
