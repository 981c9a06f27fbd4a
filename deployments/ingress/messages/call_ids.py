"""Ids of the calls in a history. Without one, a result has the call that it names, or the next one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class WaitingCall(NamedTuple):
    """A call of a history without a result yet."""

    id: str
    name: str


class WaitingCalls:
    """The calls of the last answer that have none yet, turn by turn."""

    def __init__(self) -> None:
        self._waiting: list[WaitingCall] = []

    def called(self, turn: int, calls: Iterable[tuple[str | None, str]]) -> list[str]:
        """Return the ids of the calls of an answer, of which each has an id or none, and a name."""
        self._waiting = [WaitingCall(id_ or f"call_{turn}_{place}", name) for place, (id_, name) in enumerate(calls)]
        return [call.id for call in self._waiting]

    def answered(self, id_: str | None, name: str | None) -> WaitingCall | None:
        """Return the call that a result is for, which may say its id or its name; None without one."""
        own = [call for call in self._waiting if call.id == id_] if id_ else self._waiting
        found = next((call for call in own if call.name == name), next(iter(own), None))
        if found is not None:
            self._waiting.remove(found)
        return found
