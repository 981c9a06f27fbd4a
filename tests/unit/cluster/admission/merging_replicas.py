"""A replica that merges, on a virtual clock, in front of it the real queue, and clients as `infra.bench door` has.

A forward of k rows takes a fixed time and a time per row, so that k requests take less than k times as long as one.
Requests of different models take turns, step by step. Before its first step a request takes a while that costs the
replica nothing: its text is encoded elsewhere, its answer is on the way.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Refused
from configs.admission import AdmissionConfig
from infra.bench.door_load import MAX_PROBE_SHARE, PROBE_SHARE, REFUSED, Outcome

POOL = "worker"
SWING_S = 0.5


@dataclass(frozen=True)
class Kind:
    """Requests for one model: the seconds of a forward, those before the first step, and the steps of a request.

    `noise` is the standard deviation of the logarithm of a forward's time. A request asks for `steps` steps and ends
    after a part of them that is drawn from `ends_at`.
    """

    model: str
    fixed_s: float
    row_s: float
    before_s: float
    share: float
    steps: tuple[int, ...]
    ends_at: tuple[float, float] = (1.0, 1.0)
    noise: float = 0.1


@dataclass(eq=False)
class Call:
    """A request of a client."""

    kind: Kind
    steps: int
    timeout_s: float = math.inf
    on_end: Callable[[Outcome], None] = lambda _: None
    sent_s: float = 0.0
    left: int = 0


@dataclass
class _Replica:
    running: dict[str, list[tuple[int, Call]]] = field(default_factory=dict)
    turns: list[str] = field(default_factory=list)
    is_busy: bool = False


class MergingCluster:
    """Replicas that merge, and their queue."""

    def __init__(self, seed: int, num_replicas: int = 1, swing: float = 0.0, **config: int) -> None:
        """Make the cluster. `swing` is the standard deviation of the logarithm of its speed, which others' work on the
        same machine changes every `SWING_S`.
        """
        self.rng = random.Random(seed)
        self._swing = swing
        self._slowness, self._swings_at_s = 1.0, 0.0
        self.queue = AdmissionQueue(AdmissionConfig(**config))
        self.now_s = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._calls: dict[int, Call] = {}
        self._replicas = {f"r{n}": _Replica() for n in range(num_replicas)}
        self._looking_s = math.inf
        self.queue.set_replicas(POOL, list(self._replicas), 0.0)

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when_s, self.now_s), next(self._numbers), do))

    def run(self, end_s: float = math.inf) -> None:
        """Run until nothing is left to do, or `end_s`."""
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, do = heapq.heappop(self._events)
            do()
        self.now_s = max(self.now_s, end_s) if end_s < math.inf else self.now_s

    def draw(self, kind: Kind) -> Call:
        return Call(kind, self.rng.choice(kind.steps))

    def send(self, call: Call) -> None:
        """Let a call come now."""
        ticket = next(self._numbers)
        call.sent_s, call.left = self.now_s, max(1, round(call.steps * self.rng.uniform(*call.kind.ends_at)))
        deadline_s = self.now_s + call.timeout_s
        ask = Demand(POOL, call.kind.model, float(call.steps), call.kind.share, 2, "default", deadline_s)
        self._calls[ticket] = call
        self.queue.submit(ticket, ask, self.now_s)
        self._pump()
        if deadline_s < math.inf:
            self.at(deadline_s, lambda: self._give_up(ticket))

    def _give_up(self, ticket: int) -> None:
        """End a call whose time is over, wherever it is."""
        call = self._calls.pop(ticket, None)
        if call is None:
            return
        for replica in self._replicas.values():
            line = replica.running.get(call.kind.model, [])
            line[:] = [one for one in line if one[0] != ticket]
            if not line and call.kind.model in replica.turns:
                replica.turns.remove(call.kind.model)
        call.left = 0
        self.queue.leave(ticket, self.now_s)
        self._end(call, 504, None)
        self._pump()

    def _pump(self) -> None:
        for event in self.queue.pump(self.now_s):
            call = self._calls[event.ticket]
            if isinstance(event, Refused):
                del self._calls[event.ticket]
                self._end(call, REFUSED if event.refusal.reason != "expired" else 504, event.refusal.retry_after_s)
            else:
                before_s = call.kind.before_s * self._slow()
                self.at(self.now_s + before_s, lambda e=event, c=call: self._join(e.replica, e.ticket, c))
        look_s = self.queue.look_again_s()
        if look_s < math.inf and look_s != self._looking_s:
            self._looking_s = look_s
            self.at(look_s, self._pump)

    def _join(self, name: str, ticket: int, call: Call) -> None:
        if ticket not in self._calls:
            return  # given up on the way
        replica = self._replicas[name]
        replica.running.setdefault(call.kind.model, []).append((ticket, call))
        if call.kind.model not in replica.turns:
            replica.turns.append(call.kind.model)
        if not replica.is_busy:
            self._step(replica)

    def _step(self, replica: _Replica) -> None:
        if not replica.turns:
            replica.is_busy = False
            return
        replica.is_busy = True
        model = replica.turns.pop(0)
        rows = list(replica.running[model])
        kind = rows[0][1].kind
        step_s = (kind.fixed_s + kind.row_s * len(rows)) * self.rng.lognormvariate(0.0, kind.noise) * self._slow()

        def done() -> None:
            for ticket, call in rows:
                if ticket not in self._calls:
                    continue  # given up during the step
                call.left -= 1
                if not call.left:
                    replica.running[model].remove((ticket, call))
                    del self._calls[ticket]
                    self.queue.leave(ticket, self.now_s, is_answered=True)
                    self._end(call, 200, None)
            if model in replica.turns:
                replica.turns.remove(model)
            if replica.running[model]:
                replica.turns.append(model)
            self._pump()
            self._step(replica)

        self.at(self.now_s + step_s, done)

    def _slow(self) -> float:
        if self.now_s >= self._swings_at_s:
            self._swings_at_s = self.now_s + SWING_S
            self._slowness = self.rng.lognormvariate(0.0, self._swing)
        return self._slowness

    def _end(self, call: Call, status: int, told_s: float | None) -> None:
        timeout_s = None if call.timeout_s == math.inf else call.timeout_s
        call.on_end(
            Outcome(
                f"{call.kind.model} {call.steps}",
                status,
                call.sent_s,
                self.now_s,
                self.now_s,
                timeout_s,
                (),
                None if told_s is None else float(max(1, math.ceil(told_s))),
            )
        )


def run_closed(cluster: MergingCluster, calls: Sequence[Call], num_callers: int) -> list[Outcome]:
    """Send each call once, by the first caller that is free."""
    rest, outcomes = iter(calls), list[Outcome]()

    def following(outcome: Outcome | None = None) -> None:
        if outcome:
            outcomes.append(outcome)
        if (call := next(rest, None)) is not None:
            call.on_end = following
            cluster.at(cluster.now_s, lambda: cluster.send(call))

    for _ in range(num_callers):
        following()
    cluster.run()
    return outcomes


def run_open(
    cluster: MergingCluster, calls: Sequence[tuple[float, Call]], probe_every: int, all_return: bool = False
) -> list[Outcome]:
    """Send each call at its time. Every `probe_every`th that is refused asks again, ten times within the time that it
    was told, as the bench's probers do. With `all_return` all others come back once, when they were told to.
    """
    outcomes, refused = list[Outcome](), itertools.count()

    def first_end(call: Call, outcome: Outcome) -> None:
        if outcome.status != REFUSED or outcome.retry_after_s is None:
            outcomes.append(outcome)
            return
        if probe_every and next(refused) % probe_every == 0:
            probe(call, outcome, 1)
        elif all_return:
            outcomes.append(outcome)
            call.on_end = lambda o: first_end(call, o)
            cluster.at(cluster.now_s + (outcome.retry_after_s or 0.0), lambda: cluster.send(call))
        else:
            outcomes.append(outcome)

    def probe(call: Call, first: Outcome, number: int) -> None:
        told_s = first.retry_after_s or 0.0
        admitted_s = number * PROBE_SHARE * told_s
        if number > round(MAX_PROBE_SHARE / PROBE_SHARE):
            outcomes.append(replace(first, admitted_after_s=MAX_PROBE_SHARE * told_s))
            return

        def ask_again() -> None:
            def answered(o: Outcome) -> None:
                if o.status == REFUSED:
                    probe(call, first, number + 1)
                else:
                    outcomes.append(replace(first, admitted_after_s=o.sent_s - first.done_s))

            call.on_end = answered
            cluster.send(call)

        cluster.at(first.done_s + admitted_s, ask_again)

    for at_s, call in calls:
        call.on_end = lambda o, c=call: first_end(c, o)
        cluster.at(cluster.now_s + at_s, lambda c=call: cluster.send(c))
    cluster.run()
    return outcomes
