"""Chunks of decoding sequences, with proposed tokens after them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from deployments.engines.llm.sequences.block_manager import BlockPool, blocks_for
from deployments.engines.llm.sequences.sequence import Chunk


def with_proposals(chunks: Iterable[Chunk], room: int, blocks: BlockPool) -> list[Chunk]:
    """Return the chunks with up to `room` proposed tokens in all, which get free blocks."""
    found = []
    for chunk in chunks:
        sequence = chunk.sequence
        proposed = sequence.proposer.propose(sequence.token_ids, room) if sequence.proposer else ()
        missing = blocks_for(len(sequence) + len(proposed)) - len(sequence.block_table)
        if proposed and chunk.num_tokens == 1 and missing <= blocks.num_free:
            sequence.block_table += blocks.allocate(max(0, missing), sequence.block_table[-1])
            chunk = replace(chunk, end=chunk.end + len(proposed), proposed=proposed)
            room -= len(proposed)
        found.append(chunk)
    return found
