"""Splits of a graph over backends, and the copies between them: ggml's scheduler in five passes. Pure.

1. assign: what its weights or its user have placed already; 2. expand: accelerators spread down and up, the host only
into what is left; 3. upgrade: to a better backend that reads the same memory, and what is still open to where most of
its inputs are; 4. inherit: a view is where its source is, an open source where it is read; 5. split where the backend
changes, with one copy of a value for each backend that cannot read it where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from deployments.engines.graph.recording import Recording

MAX_INPUTS: Final = 30  # values that are copied for one split


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that nothing computes. Weights decide where operations go; a user's `is_input` is overwritten at will.

    `backend` is where its memory is, None for what has none yet.
    """

    name: str
    backend: str | None = None
    is_weight: bool = False
    is_input: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """An operation with the names of the values that it reads, in topological order. A view computes nothing.

    A `backend` that its user wants is never changed.
    """

    name: str
    op: str
    sources: tuple[str, ...]
    view_of: str | None = None
    backend: str | None = None


@dataclass(frozen=True, slots=True)
class Backend:
    """A device: the operations that it has kernels for, and the other backends whose memory it reads."""

    name: str
    supports: Callable[[Node], bool] = lambda node: True
    reads: frozenset[str] = frozenset()

    def can_read(self, other: str | None) -> bool:
        """Return whether its kernels read that backend's memory."""
        return other is not None and (other == self.name or other in self.reads)


@dataclass(frozen=True, slots=True)
class Copy:
    """A value that goes to a backend. `is_input`: a user's, copied at once, before it is overwritten; `num_slots` are
    those of the ring that its copies take turns in.
    """

    value: str
    source: str
    target: str
    is_input: bool = False
    num_slots: int = 1


@dataclass(slots=True)
class Split:
    """The nodes `start` to `stop` on one backend, and what is copied there first."""

    backend: str
    start: int
    stop: int
    inputs: list[Copy] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """The backend of each value by name, and the splits in their order."""

    places: Mapping[str, str]
    splits: Sequence[Split]

    @property
    def copies(self) -> list[Copy]:
        """Return all copies in their order."""
        return [copy for split in self.splits for copy in split.inputs]


def split_graph(
    leaves: Iterable[Leaf], nodes: Sequence[Node], backends: Sequence[Backend], num_slots: int = 1
) -> SplitGraph:
    """Return the splits of a graph over `backends`, the best first and the host last, which supports everything.

    Raises ValueError for a value that is not there, an unknown backend, or a node that no backend computes.
    """
    graph = _Graph({leaf.name: leaf for leaf in leaves}, nodes, backends)
    graph.assign()
    graph.expand()
    graph.upgrade()
    graph.inherit()
    return SplitGraph(graph.places, graph.split(num_slots))


def split_recording(recording: Recording, lacking: Collection[str]) -> tuple[SplitGraph, int]:
    """Return the splits of a forward on a device that lacks operations, and the bytes that go to and fro.

    `lacking` are names such as `native_layer_norm`, which the host computes. Weights are on the device.
    """
    makers: dict[int, str] = {}  # of buffers
    leaves = [
        Leaf(f"given {number}", "device" if number in recording.weights else None, number in recording.weights)
        for number in range(len(recording.given))
    ]
    nodes, sizes = [], {f"given {number}": storage.nbytes() for number, storage in enumerate(recording.given)}
    for at, node in enumerate(recording.nodes):
        if not node.makes and not _is_in_place(node.op):
            continue  # a view: who reads it reads its buffer
        name = f"{at} {node.op}"
        sources = (*(makers[one] for one in node.reads), *(f"given {one}" for one in node.given))
        nodes.append(Node(name, node.op.split(".")[1], tuple(dict.fromkeys(sources))))
        makers.update(dict.fromkeys(node.makes, name))
        sizes[name] = sum(recording.buffers[one].nbytes for one in node.makes)
    device = Backend("device", lambda node: node.op not in lacking)
    found = split_graph(leaves, nodes, (device, Backend("host")))
    return found, sum(sizes[copy.value] for copy in found.copies)


def _is_in_place(op: str) -> bool:
    """Return whether an operation (`aten.add_.Tensor`) writes into what it reads, by torch's rule for names."""
    return op.split(".")[1].endswith("_")


class _Graph:
    def __init__(self, leaves: Mapping[str, Leaf], nodes: Sequence[Node], backends: Sequence[Backend]) -> None:
        self.leaves, self.nodes, self.backends = leaves, nodes, backends
        self.by_name = {backend.name: backend for backend in backends}
        self.rank = {backend.name: rank for rank, backend in enumerate(backends)}
        self.host = backends[-1].name
        self.computed = [node for node in nodes if node.view_of is None]
        self.views = {node.name: node.view_of for node in nodes if node.view_of is not None}
        self.places: dict[str, str] = {}
        self.fixed = {node.name for node in nodes if node.backend is not None}
        known = set(leaves)
        for node in nodes:
            if missing := {*node.sources, *filter(None, [node.view_of])} - known:
                raise ValueError(f"{node.name} reads {min(missing)!r}, which nothing before it computes")
            known.add(node.name)
        placed: list[Leaf | Node] = [*leaves.values(), *nodes]
        for one in placed:
            if one.backend is not None and one.backend not in self.by_name:
                raise ValueError(f"{one.name} is on {one.backend!r}, expected one of {', '.join(self.by_name)}")

    def assign(self) -> None:
        for leaf in self.leaves.values():
            if place := leaf.backend or (self.host if leaf.is_input else None):
                self.places[leaf.name] = place
        for node in self.nodes:
            if node.backend is not None:
                self.places[node.name] = node.backend
            elif node.view_of is None and (place := self._place_of_weights(node)):
                self.places[node.name] = place

    def _place_of_weights(self, node: Node) -> str | None:
        for source in node.sources:
            leaf = self.leaves.get(source)
            if leaf is not None and leaf.is_weight and leaf.backend is not None:
                able = [one for one in self.backends if one.can_read(leaf.backend) and one.supports(node)]
                if able:
                    return able[0].name
        return None

    def expand(self) -> None:
        for has_host in (False, True):
            for order in (self.computed, self.computed[::-1]):
                current: str | None = None
                for node in order:
                    if (place := self.places.get(node.name)) is not None:
                        current = place if has_host or place != self.host else None
                    elif current is not None and self.by_name[current].supports(node):
                        self.places[node.name] = current

    def upgrade(self) -> None:
        for node in self.computed:
            place = self.places.get(node.name)
            able = [backend for backend in self.backends if backend.supports(node)]
            if place is None:
                if not able:
                    raise ValueError(f"no backend computes {node.name} ({node.op})")
                self.places[node.name] = max(able, key=lambda one: self._num_readable(node, one)).name
            elif node.name not in self.fixed:
                for better in able:
                    same_memory = better.can_read(place) and self.by_name[place].can_read(better.name)
                    if self.rank[better.name] >= self.rank[place]:
                        break
                    if same_memory and self._num_readable(node, better) == len(node.sources):
                        self.places[node.name] = better.name
                        break

    def _num_readable(self, node: Node, backend: Backend) -> int:
        return sum(backend.can_read(self.places.get(self._root(source))) for source in node.sources)

    def inherit(self) -> None:
        for node in self.nodes:
            if node.view_of is None:
                for source in node.sources:
                    self.places.setdefault(self._root(source), self.places[node.name])
        for name in self.leaves:
            self.places.setdefault(name, self.host)
        for name in self.views:
            self.places.setdefault(name, self.places[self._root(name)])

    def _root(self, name: str) -> str:
        while name in self.views:
            name = self.views[name]
        return name

    def split(self, num_slots: int) -> list[Split]:
        splits: list[Split] = []
        here: set[tuple[str, str]] = set()  # values that were copied, each once for all who read it
        for number, node in enumerate(self.nodes):
            if node.view_of is not None and splits:
                splits[-1].stop = number + 1
                continue
            place = self.places[node.name]
            copies = [copy for copy in self._copies(node, place, num_slots) if (copy.value, place) not in here]
            if not splits or splits[-1].backend != place or self._is_full(splits[-1], copies):
                splits.append(Split(place, number, number))
            splits[-1].stop = number + 1
            splits[-1].inputs += copies
            here.update((copy.value, place) for copy in copies)
        return splits

    def _copies(self, node: Node, place: str, num_slots: int) -> list[Copy]:
        found: dict[str, Copy] = {}
        for source in map(self._root, node.sources):
            leaf, origin = self.leaves.get(source), self.places[source]
            is_input = leaf is not None and leaf.is_input
            if not self.by_name[place].can_read(origin) or (is_input and num_slots > 1):
                found[source] = Copy(source, origin, place, is_input, num_slots)
        return list(found.values())

    def _is_full(self, split: Split, copies: Sequence[Copy]) -> bool:
        """Return whether copies begin a split of their own: too many, or weights, whose room another part may want."""
        weights = [copy for copy in copies if (leaf := self.leaves.get(copy.value)) is not None and leaf.is_weight]
        return bool(split.inputs or split.stop > split.start) and (
            len(split.inputs) + len(copies) > MAX_INPUTS or bool(weights and split.inputs)
        )
