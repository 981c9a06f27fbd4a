"""One request as the scheduler sees it: token ids, progress and blocks. No tensor, no text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto


class SequenceStatus(Enum):
    """Where a sequence stands. A preempted sequence is WAITING again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one request.

    `token_ids` is the prompt followed by the completion. The keys and values of its first
    `num_computed_tokens` are in the KV cache, in the blocks of `block_table` in order.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens
