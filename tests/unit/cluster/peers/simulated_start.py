"""A cluster of nodes that load a model at once, under a virtual clock.

Only links, storage and time are simulated. What is decided is decided by the product's own code: each node has a
FetchQueue, its server's TransferSlots; all share one ResidencyMap.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.keeper.extent_loading import MAX_CLAIMS
from cluster.peers.client import GRACE_S, MIN_GBPS
from cluster.peers.fetch_queue import AskRegistry, Fetch, FetchQueue, Read
from cluster.peers.protocol import MAX_TRANSFERS, RENEW_S, PeerAddress, ResidencyReport
from cluster.peers.server import LINGER_S, TransferSlots
from cluster.peers.sources import FetchOutcome, PeerShare
from cluster.registry.extent_locations import ResidencyMap

MIB = 2**20
QUESTION_S = 0.002  # there and back to the registry
REFUSAL_S = 0.0005  # there and back to a peer
FORGET_DEAD_S = 10.0  # until the registry knows that a node is gone


@dataclass(eq=False)
class Flow:
    """An extent on its way; `source` None: from storage. `others` are the addresses to try next."""

    id: str
    source: Node | None
    target: Node
    start_s: float
    left_bytes: float
    fetch: Fetch | None = None
    others: tuple[PeerAddress, ...] = ()
    tried: FetchOutcome = field(default_factory=FetchOutcome)
    bytes_per_s: float = 0.0
    at_s: float = 0.0
    due_s: float = 0.0
    number: int = 0


@dataclass(eq=False)
class Node:
    """Bandwidths in bytes per second; `read_bytes_per_s` of its own way to storage."""

    id: str
    address: PeerAddress
    queue: FetchQueue
    slots: TransferSlots
    up: float
    down: float
    read_bytes_per_s: float
    num_idle: int
    wanted: int = 0
    has: set[str] = field(default_factory=set)
    out: dict[Flow, None] = field(default_factory=dict)
    into: dict[Flow, None] = field(default_factory=dict)
    is_alive: bool = True
    wake_s: float = float("inf")
    done_s: float | None = None


class SimulatedStart:
    """`run` returns when every node that lives has all extents."""

    def __init__(
        self,
        num_nodes: int,
        num_extents: int,
        *,
        seed: int,
        link_gbps: float = 1.25,
        storage_gbps: float = 2.0,
        extent_bytes: int = 64 * MIB,
        num_threads: int = 8,
        max_transfers: int = MAX_TRANSFERS,
    ) -> None:
        self.now_s = 0.0
        self.chance = random.Random(seed)
        self.ids = [f"e{index}" for index in range(num_extents)]
        self.extent_bytes = extent_bytes
        self.storage = storage_gbps * 1e9
        self.reading: dict[Flow, None] = {}
        self.storage_bytes = self.num_questions = self.num_located = self.num_refused = 0
        clock = lambda: self.now_s  # noqa: E731
        self.directory = ResidencyMap(clock, self.chance)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.nodes: dict[PeerAddress, Node] = {}
        for index in range(num_nodes):
            address = PeerAddress("10.0.0.1", index)
            queue = FetchQueue(random.Random(self.chance.random()), MAX_CLAIMS)
            slots = TransferSlots(max_transfers, LINGER_S, clock)
            link = link_gbps * 1e9
            self.nodes[address] = Node(f"n{index}", address, queue, slots, link, link, float("inf"), num_threads)
            self.directory.report_residency(f"n{index}", ResidencyReport(address, [], [], is_full=True))

    @property
    def model_bytes(self) -> int:
        return len(self.ids) * self.extent_bytes

    @property
    def storage_ratio(self) -> float:
        return self.storage_bytes / self.model_bytes

    @property
    def finish_s(self) -> float:
        return max(node.done_s for node in self.nodes.values() if node.done_s is not None)

    def node(self, index: int) -> Node:
        return list(self.nodes.values())[index]

    def want(self, nodes: Sequence[Node]) -> None:
        """All extents, now."""
        for node in nodes:
            node.wanted = len(self.ids)
            node.queue.add_extents(dict.fromkeys(self.ids, self.extent_bytes), self.now_s)
            self._pump(node)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), action))

    def run(self, max_s: float = 10_000.0) -> None:
        while self._is_anybody_waiting():
            assert self._events, "nobody does anything any more"
            self.now_s, _, action = heapq.heappop(self._events)
            assert self.now_s < max_s
            action()

    def kill(self, node: Node) -> None:
        """Its process ends: connections break, and the registry hears of it later."""
        node.is_alive = False
        for flow in list(node.into):
            self._end(flow)
        for flow in list(node.out):
            self._end(flow)
            self._failed(flow)
        self.at(self.now_s + FORGET_DEAD_S, lambda: self.directory.forget(node.id))

    def _is_anybody_waiting(self) -> bool:
        return any(node.is_alive and node.wanted and node.done_s is None for node in self.nodes.values())

    def _pump(self, node: Node) -> None:
        while node.is_alive and node.num_idle and len(node.has) < node.wanted:
            step = node.queue.next_step(self.now_s)
            match step:
                case Fetch():
                    node.num_idle -= 1
                    self._fetch(Flow(step.id, None, node, self.now_s, 0.0, step, step.plan.addresses))
                case Read():
                    node.num_idle -= 1
                    self.storage_bytes += self.extent_bytes
                    flow = Flow(step.id, None, node, self.now_s, self.extent_bytes)
                    self._begin(flow)
                    self.at(self.now_s + RENEW_S, lambda flow=flow: self._renew(flow))
                case AskRegistry():
                    node.num_idle -= 1
                    self.num_questions += 1
                    self.num_located += len(step.question.ids)
                    answer = self.directory.locate(node.id, step.question, node.slots.num_active)
                    self.at(self.now_s + QUESTION_S, lambda step=step, answer=answer: self._told(node, step, answer))
                case _:
                    if step.until_s < node.wake_s:
                        node.wake_s = step.until_s
                        self.at(step.until_s, lambda: self._wake(node))
                    return

    def _wake(self, node: Node) -> None:
        node.wake_s = float("inf")
        self._pump(node)

    def _told(self, node: Node, step: AskRegistry, answer: object) -> None:
        node.num_idle += 1
        node.queue.apply_answer(step.question, answer, self.now_s)  # type: ignore[arg-type]
        self._pump(node)

    def _renew(self, flow: Flow) -> None:
        if flow in self.reading:
            node = flow.target
            report = ResidencyReport(node.address, load=node.slots.num_active, reading=[flow.id])
            self.directory.report_residency(node.id, report)
            self.at(self.now_s + RENEW_S, lambda: self._renew(flow))

    def _fetch(self, flow: Flow) -> None:
        """Fetch from the first of the others that lives and has a slot, as PeerClient does."""
        assert flow.fetch is not None
        for place, address in enumerate(flow.others):
            source = self.nodes[address]
            number = next(self._order)
            if not source.is_alive or flow.id not in source.has:
                flow.tried.failed.append(address)
            elif not source.slots.begin_range(number, self.extent_bytes):
                flow.tried.busy.append(address)
                self.num_refused += 1
            else:
                flow.source, flow.number, flow.others = source, number, flow.others[place + 1 :]
                flow.start_s, flow.left_bytes = self.now_s, self.extent_bytes
                self._begin(flow)
                self.at(self.now_s + GRACE_S, lambda number=number: self._check(flow, number))
                return
        self.at(self.now_s + REFUSAL_S, lambda: self._refused(flow))

    def _refused(self, flow: Flow) -> None:
        flow.target.num_idle += 1
        flow.target.queue.end_refused_fetch(flow.id, flow.tried, self.now_s)
        self._pump(flow.target)

    def _check(self, flow: Flow, number: int) -> None:
        """A peer below the floor is given up."""
        if flow.number != number or flow not in flow.target.into:
            return
        assert flow.fetch is not None
        self._advance(flow)
        min_bytes_per_s = max(flow.fetch.plan.min_gbps, MIN_GBPS) * 1e9
        if self.extent_bytes - flow.left_bytes < min_bytes_per_s * (self.now_s - flow.start_s):
            self._end(flow)
            self._failed(flow)
        else:
            self.at(self.now_s + GRACE_S, lambda: self._check(flow, number))

    def _failed(self, flow: Flow) -> None:
        assert flow.source is not None
        flow.tried.failed.append(flow.source.address)
        self._fetch(flow)

    def _begin(self, flow: Flow) -> None:
        flow.at_s = self.now_s
        flow.target.into[flow] = None
        (flow.source.out if flow.source else self.reading)[flow] = None
        self._change_rates(flow)

    def _end(self, flow: Flow) -> None:
        del flow.target.into[flow]
        del (flow.source.out if flow.source else self.reading)[flow]
        if flow.source:
            flow.source.slots.end_range(flow.number, 0 if flow.left_bytes > 1 else self.extent_bytes)
        self._change_rates(flow)

    def _change_rates(self, flow: Flow) -> None:
        """Change the rates of all that share a link with it."""
        for other in {**(flow.source.out if flow.source else self.reading), **flow.target.into}:
            self._advance(other)
            if other.source:
                shares = other.source.up / len(other.source.out)
            else:
                shares = min(self.storage / len(self.reading), other.target.read_bytes_per_s)
            other.bytes_per_s = min(shares, other.target.down / len(other.target.into))
            other.due_s = self.now_s + other.left_bytes / other.bytes_per_s
            due_s = other.due_s
            self.at(due_s, lambda other=other, due_s=due_s: self._arrive(other, due_s))

    def _advance(self, flow: Flow) -> None:
        flow.left_bytes = max(flow.left_bytes - flow.bytes_per_s * (self.now_s - flow.at_s), 0.0)
        flow.at_s = self.now_s

    def _arrive(self, flow: Flow, due_s: float) -> None:
        node = flow.target
        if flow.due_s != due_s or flow not in node.into:
            return  # its rate has changed since
        flow.left_bytes = 0.0
        load = max(len(flow.source.out), 1) if flow.source else 1
        self._end(flow)
        node.has.add(flow.id)
        node.num_idle += 1
        seconds = self.now_s - flow.start_s
        if flow.source and flow.fetch:
            flow.tried.shares.append(PeerShare(flow.source.address, self.extent_bytes, seconds, load))
            node.queue.end_fetch(flow.id, flow.tried, self.now_s)
        else:
            node.queue.end_read(flow.id, seconds, self.now_s)
        self.at(self.now_s + QUESTION_S / 2, lambda: self._report(node, flow.id))
        if len(node.has) == node.wanted:
            node.done_s = self.now_s
        self._pump(node)

    def _report(self, node: Node, id_: str) -> None:
        if node.is_alive:
            self.directory.report_residency(node.id, ResidencyReport(node.address, [id_], load=node.slots.num_active))
