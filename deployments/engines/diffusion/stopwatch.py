"""The seconds that a device takes for turns, measured without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

MAX_AHEAD: Final = 2  # turns that the host may have begun and the device has not ended: later choices know more


class Stopwatch:
    """Times one turn after the other. A turn on the host ends with its call; on a GPU the device's own clock tells."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._is_ahead = device.type == "cuda"
        self._begun: Any = None
        self._pending: deque[tuple[Any, Any, Callable[[float], None]]] = deque()

    def begin(self) -> None:
        """Begin a turn; wait until few enough are under way."""
        while self._pending and (len(self._pending) >= MAX_AHEAD or self._pending[0][1].query()):
            begun, ended, note = self._pending.popleft()
            ended.synchronize()
            note(begun.elapsed_time(ended) / 1e3)
        self._begun = _event() if self._is_ahead else self._clock()

    def end(self, note: Callable[[float], None]) -> None:
        """End the turn that was begun; `note` hears its seconds, now or after a later turn."""
        if self._is_ahead:
            self._pending.append((self._begun, _event(), note))
        else:
            note(self._clock() - self._begun)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
