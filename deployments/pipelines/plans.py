"""Plans: the stages of a checked pipeline, their inputs, and where they run. Pure.

A segment is stages that run together in one call of the text-encoder service; it travels there. Its memory is planned
greedily by size, as in ggml's allocator and TFLite's memory planner: the largest tensor first, each at the lowest place
that is free for as long as it lives. All share one arena.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from configs.model import LongText
from configs.pipeline import Argument
from deployments.pipelines.edge_types import TEXT, TOKENS, Batch, EdgeType
from deployments.pipelines.records import NUMPY_DTYPES, Signature

Action: TypeAlias = Literal["generate", "write", "tokenize", "embed", "head", "function"]
IN_ENCODER: Final = frozenset({"tokenize", "embed", "head"})  # actions of the text-encoder service
PIPELINE_INPUT: Final = ""
ALIGNMENT_BYTES: Final = 256  # what CUDA's allocator gives too, so kernels may load vectors


class Edge(NamedTuple):
    """A named value: an output of a stage, or an input of the pipeline (stage PIPELINE_INPUT)."""

    stage: str
    name: str


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage. `target` is the model, or the function's name. `edges` and `literals` are by parameter."""

    name: str
    action: Action
    target: str
    edges: Mapping[str, Edge]
    literals: Mapping[str, Argument]
    outputs: Mapping[str, EdgeType]

    @property
    def needs(self) -> frozenset[str]:
        """Return the stages that it takes something from."""
        return frozenset(edge.stage for edge in self.edges.values()) - {PIPELINE_INPUT}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Places of intermediate tensors: offsets into an arena of `nbytes`.

    `live_bytes` is the most that is alive at once, a lower bound of every plan.
    """

    offsets: Mapping[Edge, int]
    nbytes: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Stages that one replica of the text-encoder service runs in one call, in this order.

    `results` leave the segment. `buffers` has the largest shape, items first, of every intermediate tensor whose
    size is known, `memory` their places; requests of more than `max_batch_size` items run in chunks.
    """

    pipeline: str
    stages: tuple[StagePlan, ...]
    results: tuple[Edge, ...]
    max_batch_size: int
    buffers: Mapping[Edge, tuple[int, ...]]
    memory: MemoryPlan

    @property
    def name(self) -> str:
        """Name of its first stage."""
        return self.stages[0].name

    @property
    def needs(self) -> frozenset[str]:
        """Return the stages outside that it takes something from."""
        inside = {stage.name for stage in self.stages}
        return frozenset(name for stage in self.stages for name in stage.needs) - inside

    @property
    def models(self) -> frozenset[str]:
        return frozenset(stage.target for stage in self.stages if stage.action != "function")


Unit: TypeAlias = StagePlan | SegmentPlan


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A checked pipeline. `units` are in an order in which they could run one after the other."""

    id: str
    signature: Signature
    inputs: Mapping[str, EdgeType]
    units: tuple[Unit, ...]
    outputs: Mapping[str, Edge]
    output_types: Mapping[str, EdgeType]

    def stages(self) -> Iterator[StagePlan]:
        """Yield all stages in an order in which they can run, those of segments as well."""
        for unit in self.units:
            yield from unit.stages if isinstance(unit, SegmentPlan) else (unit,)

    def segments(self) -> list[SegmentPlan]:
        """Return the segments."""
        return [unit for unit in self.units if isinstance(unit, SegmentPlan)]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentCall:
    """One run of a segment. `inputs` are the values that the caller has; the others come with the results of
    earlier segments. By model, and set by the ingress: `versions` are fingerprints, `long_texts` what happens to texts
    that are too long for it.
    """

    plan: SegmentPlan
    inputs: Mapping[Edge, Batch]
    num_items: int
    priority: int = 0
    timeout_s: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    long_texts: Mapping[str, LongText] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentResult:
    """The results of a segment. `timings_ms` (by stage) and `warnings` include those of earlier segments that came."""

    outputs: Mapping[Edge, Batch]
    timings_ms: Mapping[str, float]
    warnings: tuple[str, ...] = ()


def form_units(pipeline: str, stages: Sequence[StagePlan], outputs: Sequence[Edge], max_batch_size: int) -> list[Unit]:
    """Return the units of a pipeline. `stages` are in an order in which they can run, and so are the units.

    A stage joins the segment that it takes something from when that makes the segment wait for nothing more: what
    can run side by side still does, and no cycle of segments can come to be.
    """
    groups: list[list[StagePlan]] = []
    group_of: dict[str, list[StagePlan]] = {}
    waits_for = _ancestors(stages)
    encoded: set[str] = set()
    for stage in stages:
        # A function that takes what an encoder made runs there too: labels are smaller than vectors.
        if stage.action in IN_ENCODER or (stage.action == "function" and stage.needs & encoded):
            encoded.add(stage.name)
        group = _joined(stage, group_of, waits_for, encoded)
        if group is None:
            group = []
            groups.append(group)
        group.append(stage)
        group_of[stage.name] = group
    return [_unit(pipeline, group, stages, outputs, max_batch_size, encoded) for group in groups]


def _joined(
    stage: StagePlan,
    group_of: Mapping[str, list[StagePlan]],
    waits_for: Mapping[str, frozenset[str]],
    encoded: set[str],
) -> list[StagePlan] | None:
    if stage.name not in encoded:
        return None
    for source in sorted(stage.needs & encoded):
        group = group_of[source]
        inside = {member.name for member in group}
        awaited = frozenset[str]().union(*(waits_for[name] for name in inside)) - inside
        if stage.needs - inside <= awaited:
            return group
    return None


def _ancestors(stages: Sequence[StagePlan]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for stage in stages:
        found[stage.name] = stage.needs.union(*(found[name] for name in stage.needs))
    return found


def _unit(
    pipeline: str,
    group: Sequence[StagePlan],
    stages: Sequence[StagePlan],
    outputs: Sequence[Edge],
    max_batch_size: int,
    encoded: set[str],
) -> Unit:
    if group[0].name not in encoded:
        return group[0]
    inside = {stage.name for stage in group}
    wanted = {edge for stage in stages if stage.name not in inside for edge in stage.edges.values()} | set(outputs)
    results = tuple(sorted(edge for edge in wanted if edge.stage in inside))
    buffers = _buffers(group, max_batch_size)
    memory = _plan_memory(_needs(group, buffers))
    return SegmentPlan(pipeline, tuple(group), results, max_batch_size, buffers, memory)


def _buffers(group: Sequence[StagePlan], max_batch_size: int) -> dict[Edge, tuple[int, ...]]:
    """Return the shapes of what models give. Texts and token ids are Python's, what functions give is numpy's."""
    shapes = {}
    for stage in group:
        if stage.action not in ("embed", "head"):
            continue
        for name, type_ in stage.outputs.items():
            if type_ not in (TEXT, TOKENS) and -1 not in type_.shape[1:]:
                shapes[Edge(stage.name, name)] = (max_batch_size, *type_.shape[1:])
    return shapes


def _needs(group: Sequence[StagePlan], buffers: Mapping[Edge, tuple[int, ...]]) -> list[_BufferNeed]:
    types = {Edge(stage.name, name): type_ for stage in group for name, type_ in stage.outputs.items()}
    needs = []
    for edge, shape in buffers.items():
        first = next(at for at, stage in enumerate(group) if stage.name == edge.stage)
        last = max((at for at, stage in enumerate(group) if edge in stage.edges.values()), default=first)
        nbytes = math.prod(shape) * NUMPY_DTYPES[types[edge].datatype].itemsize
        needs.append(_BufferNeed(edge, nbytes, first, last))
    return needs


@dataclass(frozen=True, slots=True)
class _BufferNeed:
    """A tensor of at most `nbytes`, written by stage `first` and read last by stage `last` (positions, inclusive)."""

    key: Edge
    nbytes: int
    first: int
    last: int

    def meets(self, other: _BufferNeed) -> bool:
        """Return whether both are alive during some stage. The inputs of a stage live while it writes."""
        return self.first <= other.last and other.first <= self.last


def _plan_memory(needs: Sequence[_BufferNeed]) -> MemoryPlan:
    """Return places for all tensors; those that meet do not overlap."""
    offsets: dict[Edge, int] = {}
    placed: list[_BufferNeed] = []
    for need in sorted(needs, key=lambda need: (-need.nbytes, need.first)):
        neighbours = sorted((offsets[other.key], other.nbytes) for other in placed if other.meets(need))
        offset = 0
        for start, nbytes in neighbours:
            if offset + need.nbytes <= start:
                break
            offset = max(offset, _aligned(start + nbytes))
        offsets[need.key] = offset
        placed.append(need)
    end = max((offsets[need.key] + need.nbytes for need in needs), default=0)
    return MemoryPlan(offsets, end, _most_alive(needs))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _most_alive(needs: Sequence[_BufferNeed]) -> int:
    return max((sum(n.nbytes for n in needs if n.first <= at <= n.last) for at in {n.first for n in needs}), default=0)
