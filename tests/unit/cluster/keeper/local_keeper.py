"""A keeper without Ray: its store, references into it, and a handle that calls it in this process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.keeper.object_store import NewObject
from cluster.keeper.ray_extents import ExtentUser
from cluster.keeper.records import StoreFull


@dataclass(frozen=True, eq=False)
class Ref:
    """Ray's object store, reduced to one object: a reference equals itself, and has a name."""

    array: Any

    def hex(self) -> str:
        return f"{id(self):x}"


class FakeStore:
    """Objects that are written in place, as in Ray's store. `written` is the latest one's memory while it lives."""

    capacity_bytes = 10**9

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.num_full = 0
        self.used_bytes: list[int] = []
        self.written: Callable[[], Any] = lambda: None
        self.populated = threading.Event()

    def populate(self) -> None:
        self.populated.set()

    def create_object(self, nbytes: int, used_bytes: int) -> NewObject:
        if self.num_full:
            self.num_full -= 1
            raise StoreFull("no room in memory")
        if self.error:
            raise self.error
        self.used_bytes.append(used_bytes)
        ref = Ref(np.zeros(nbytes, np.uint8))
        self.written = weakref.ref(ref.array)
        return NewObject(ref.array, nbytes, lambda _: (ref, ref.array))


class ActorHandle:
    """Calls `actor` at once, in the caller's thread; the answer, or the error, is there when it is asked for."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)

        class Call:
            @staticmethod
            def remote(*arguments: Any) -> Callable[[], Any]:
                try:
                    found = method(*arguments)
                except Exception as error:
                    return fail_with(error)
                return lambda: found

        return Call


class User(ExtentUser):
    """A replica's use of extents: what it is told goes to the functions given. With `on_recall` it keeps them."""

    def __init__(
        self,
        on_damage: Callable[[Sequence[str]], object] = lambda extents: None,
        on_recall: Callable[[Sequence[str], bool], object] | None = None,
        connect: Callable[[], Any] = lambda: None,
    ) -> None:
        self.keeps = on_recall is not None
        self.find_keeper = connect  # type: ignore[method-assign]
        self._on_damage = on_damage
        self._on_recall = on_recall

    def release_recalled(self, extents: Sequence[str], is_overdue: bool) -> None:
        assert self._on_recall is not None
        self._on_recall(extents, is_overdue)

    def note_damage(self, extents: Sequence[str]) -> None:
        self._on_damage(extents)


def fail_with(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def ray_get(found: Any, timeout: float | None = None) -> Any:
    """Stand in for `ray.get`: of references, of answers of an ActorHandle, and of lists of the former."""
    if isinstance(found, list):
        return [ray_get(one) for one in found]
    return found.array if isinstance(found, Ref) else found()
