"""Images that go on in another replica: after their last checkpoint, when theirs died or moved them out."""

from __future__ import annotations

from typing import Any

from deployments.ingress.retries import Resumption
from deployments.records import ImageProgress


class ResumedImages(Resumption):
    """The progress of the images of one request.

    Steps may be done again: another replica goes on after the last checkpoint that came, which it gets as one more
    argument, and what it tells of steps that were told already is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sent_step = 0
        self._checkpoint: bytes | None = None

    def begin_try(self) -> tuple[Any, ...]:
        self.is_moved = False
        return () if self._checkpoint is None else (self._checkpoint,)

    def take(self, piece: Any) -> bool:
        if not isinstance(piece, ImageProgress):
            self.is_complete = True  # the result is the last piece
            return super().take(piece)
        self._checkpoint = piece.checkpoint or self._checkpoint
        self.is_moved = piece.is_moved
        if piece.is_moved or piece.step <= self._sent_step:
            return False
        self._sent_step = piece.step
        return True
