"""Room for the modules of a replica: which of them go for others, and in which order requests wait for it.

Modules are counted in tensors: what two of them share is there once. Waiters are served FIFO, for a bounded time.

HAZARD: refusals are kept as text. An exception knows the frames that it came through; one that such a frame keeps, in
a local name or a future, makes a circle, and models that the frames hold stay until Python looks for circles.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from weights.errors import BudgetExceeded
from weights.residency import Resident, keep_values

TensorBytes = Mapping[str, int]  # bytes by hash


@dataclass(frozen=True, slots=True)
class Holding:
    """A module that is there, and the tensors that it uses."""

    resident: Resident
    tensors: TensorBytes

    @property
    def stays(self) -> bool:
        return self.resident.leases > 0 or self.resident.pinned


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """`evict` in order; with `missing_bytes` > 0 there is no room even then, and nothing goes."""

    evict: tuple[str, ...]
    missing_bytes: int = 0


def plan_room(holdings: Sequence[Holding], wanted: TensorBytes, budget_bytes: int) -> RoomPlan:
    """Free room for `wanted` under `budget_bytes`, the least valuable module first, ties by least recent use.

    As `weights.residency.plan_eviction`, but evicting a module only frees what no other one uses, `wanted` included.
    Nothing goes that could stay.
    """
    needed_bytes = distinct_bytes(wanted, *(holding.tensors for holding in holdings if holding.stays))
    if needed_bytes > budget_bytes:
        return RoomPlan((), needed_bytes - budget_bytes)
    everything = (wanted, *(holding.tensors for holding in holdings))
    total_bytes = distinct_bytes(*everything)
    if total_bytes <= budget_bytes:
        return RoomPlan(())
    uses = _uses_of_shared(everything)
    values = keep_values([holding.resident for holding in holdings])
    victims: list[Holding] = []
    for holding in sorted(
        (holding for holding in holdings if not holding.stays),
        key=lambda holding: (values[holding.resident.key], holding.resident.last_used),
    ):
        if total_bytes <= budget_bytes:
            break
        uses.subtract(holding.tensors.keys() & uses.keys())
        total_bytes -= _unused_bytes(holding.tensors, uses)
        victims.append(holding)
    evict: list[str] = []
    for victim in reversed(victims):
        returning_bytes = _unused_bytes(victim.tensors, uses)
        if total_bytes + returning_bytes <= budget_bytes:
            total_bytes += returning_bytes
            uses.update(victim.tensors.keys() & uses.keys())
        else:
            evict.append(victim.resident.key)
    return RoomPlan(tuple(reversed(evict)))


def distinct_bytes(*tensors: TensorBytes) -> int:
    return sum(merged(tensors).values())


def merged(tensors: Iterable[TensorBytes]) -> dict[str, int]:
    found: dict[str, int] = {}
    for some in tensors:
        found |= some
    return found


def _uses_of_shared(everything: Sequence[TensorBytes]) -> Counter[str]:
    """Count how many have it, of the hashes that more than one has: few, of thousands."""
    seen: set[str] = set()
    shared: set[str] = set()
    for tensors in everything:
        shared |= tensors.keys() & seen
        seen |= tensors.keys()
    return Counter(hash_ for tensors in everything for hash_ in tensors.keys() & shared)


def _unused_bytes(tensors: TensorBytes, uses: Counter[str]) -> int:
    """Return the bytes that go with them. `uses` counts the others' uses, of what is shared."""
    return sum(tensors.values()) - sum(tensors[hash_] for hash_ in tensors.keys() & uses.keys() if uses[hash_])


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
