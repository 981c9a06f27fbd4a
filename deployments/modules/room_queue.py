"""Who waits for room in a replica: served in the order of coming, for a bounded time, and never starved.

HAZARD: refusals are kept as text. An exception knows the frames that it came through; one that such a frame keeps, in
a local name or a future, makes a circle, and models that the frames hold stay until Python looks for circles.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from weights.errors import BudgetExceeded

WantedT = TypeVar("WantedT")
TakenT = TypeVar("TakenT")


@dataclass(eq=False)
class Waiter(Generic[WantedT, TakenT]):
    """`granted` is None when there can be no room any more; `refusal` says why there was none the last time.

    `passed` are the tensors of those who went past it since its patience ended, bytes by hash.
    """

    wanted: WantedT
    since_s: float
    granted: asyncio.Future[TakenT | None]
    refusal: str
    passed: dict[str, int] = field(default_factory=dict)


class RoomQueue(Generic[WantedT, TakenT]):
    """Lives on one event loop. `take` takes or raises BudgetExceeded; `give_back` undoes it.

    `is_hopeless` says whether waiting cannot help; `may_pass`, whether somebody new may take before the first who
    waits; `on_wait` hears what is being waited for.
    """

    def __init__(
        self,
        take: Callable[[WantedT], TakenT],
        give_back: Callable[[TakenT], None],
        is_hopeless: Callable[[WantedT], bool],
        may_pass: Callable[[WantedT, Waiter[WantedT, TakenT]], bool],
        on_wait: Callable[[WantedT], None],
        clock: Callable[[], float],
    ) -> None:
        self._take = take
        self._give_back = give_back
        self._is_hopeless = is_hopeless
        self._may_pass = may_pass
        self._on_wait = on_wait
        self._clock = clock
        self._waiting: deque[Waiter[WantedT, TakenT]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def take(self, wanted: WantedT, max_wait_s: float) -> TakenT:
        """Raises BudgetExceeded when there can be no room, or is none in time."""
        if self._waiting and not self._may_pass(wanted, self._waiting[0]):
            refusal = f"{wanted} waited for room behind {len(self._waiting)} other requests"
        else:
            try:
                return self._take(wanted)
            except BudgetExceeded as error:
                refusal = str(error)
        if self._is_hopeless(wanted):
            raise BudgetExceeded(refusal)
        waiter = Waiter[WantedT, TakenT](wanted, self._clock(), asyncio.get_running_loop().create_future(), refusal)
        self._waiting.append(waiter)
        self._on_wait(wanted)
        return await self._wait(waiter, max_wait_s)

    def serve(self) -> None:
        """Give to those in front what they wait for, as long as there is room. Call it when some became free."""
        while self._waiting:
            first = self._waiting[0]
            if not first.granted.done():
                try:
                    first.granted.set_result(self._take(first.wanted))
                except BudgetExceeded as error:
                    first.refusal = str(error)
                    if not self._is_hopeless(first.wanted):
                        return
                    first.granted.set_result(None)
            self._waiting.popleft()

    async def _wait(self, waiter: Waiter[WantedT, TakenT], max_wait_s: float) -> TakenT:
        try:
            await asyncio.wait([waiter.granted], timeout=max_wait_s)
        except asyncio.CancelledError:
            if (taken := _result(waiter.granted)) is not None:
                self._give_back(taken)
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self.serve()
        if (taken := _result(waiter.granted)) is None:
            raise BudgetExceeded(waiter.refusal)
        return taken


def _result(future: asyncio.Future[TakenT | None]) -> TakenT | None:
    return future.result() if future.done() and not future.cancelled() else None
