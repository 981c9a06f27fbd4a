"""Plans: the stages of a checked pipeline, their inputs, and where they run. Pure.

A segment is stages that run together in one call of the text-encoder service; it travels there. Its tensors share one
arena, whose places are planned (`weights/memory/lifetimes.py`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from configs.model import LongText
from configs.pipeline import Argument
from deployments.pipelines.edge_types import Batch, EdgeType
from deployments.pipelines.records import NUMPY_DTYPES, Signature
from weights.memory.lifetimes import Lifetime, MemoryPlan, place

Action: TypeAlias = Literal[
    "generate", "write", "tokenize", "embed", "score", "head", "program", "upscale", "workflow", "function"
]
WITH_TENSORS: Final = frozenset({"embed", "score", "head", "program"})  # actions that give tensors
IN_ENCODER: Final = WITH_TENSORS | {"tokenize"}  # actions of the text-encoder service
PIPELINE_INPUT: Final = ""


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
        """Return the stages that it depends on."""
        return frozenset(edge.stage for edge in self.edges.values()) - {PIPELINE_INPUT}


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
    memory: MemoryPlan[Edge]

    @property
    def name(self) -> str:
        """Name of its first stage."""
        return self.stages[0].name

    @property
    def needs(self) -> frozenset[str]:
        """Return the outside stages that it depends on."""
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

    def labels_of(self, output: str, model_labels: Mapping[str, Sequence[str]]) -> Sequence[str]:
        """Return the names of the classes that an output scores; none where it scores none that have names.

        They are the labels given to its stage, or those of a head or classifier, also behind a softmax.
        """
        stages = {stage.name: stage for stage in self.stages()}
        edge = self.outputs[output]
        while (stage := stages.get(edge.stage)) is not None:
            if stage.action in ("head", "score"):
                return model_labels.get(stage.target, ())
            if stage.action != "function":
                break
            if isinstance(labels := stage.literals.get("labels"), list | tuple):
                return [str(label) for label in labels]
            if stage.target != "softmax" or "scores" not in stage.edges:
                break
            edge = stage.edges["scores"]
        return ()

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


@dataclass(slots=True, eq=False)
class _StageGroup:
    """Stages of one unit. Sets of stages are bits by their position: `inside`, and `awaited` by any of them."""

    stages: list[StagePlan] = field(default_factory=list)
    inside: int = 0
    awaited: int = 0


def form_units(pipeline: str, stages: Sequence[StagePlan], outputs: Sequence[Edge], max_batch_size: int) -> list[Unit]:
    """Return the units of a pipeline. `stages` are in an order in which they can run, and so are the units.

    A stage joins the segment that it depends on, if the segment then waits for no other stage: so independent stages
    still run side by side, and segments form no cycle.
    """
    groups: list[_StageGroup] = []
    group_of: dict[str, _StageGroup] = {}
    bits = {stage.name: 1 << number for number, stage in enumerate(stages)}
    awaited: dict[str, int] = {}  # by stage, all before it
    encoded: set[str] = set()
    for stage in stages:
        # A function that takes what an encoder made runs there too: labels are smaller than vectors.
        if stage.action in IN_ENCODER or (stage.action == "function" and stage.needs & encoded):
            encoded.add(stage.name)
        needs = _union(bits[name] for name in stage.needs)
        awaited[stage.name] = needs | _union(awaited[name] for name in stage.needs)
        sources = sorted(stage.needs & encoded) if stage.name in encoded else ()
        joinable = (group_of[name] for name in sources)
        group = next((one for one in joinable if not needs & ~(one.inside | one.awaited)), None)
        if group is None:
            groups.append(group := _StageGroup())
        group.stages.append(stage)
        group.inside |= bits[stage.name]
        group.awaited |= awaited[stage.name]
        group_of[stage.name] = group
    results = _results(stages, outputs, group_of)
    return [
        _segment(pipeline, group.stages, results[group.stages[0].name], max_batch_size)
        if group.stages[0].name in encoded
        else group.stages[0]
        for group in groups
    ]


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def _results(
    stages: Sequence[StagePlan], outputs: Sequence[Edge], group_of: Mapping[str, _StageGroup]
) -> dict[str, tuple[Edge, ...]]:
    """Return the outputs that leave each group, by the name of its first stage."""
    leaving: dict[str, set[Edge]] = {group.stages[0].name: set() for group in group_of.values()}
    for edge in outputs:
        leaving[group_of[edge.stage].stages[0].name].add(edge)
    for stage in stages:
        for edge in stage.edges.values():
            if edge.stage != PIPELINE_INPUT and group_of[edge.stage] is not group_of[stage.name]:
                leaving[group_of[edge.stage].stages[0].name].add(edge)
    return {name: tuple(sorted(edges)) for name, edges in leaving.items()}


def _segment(pipeline: str, group: Sequence[StagePlan], results: tuple[Edge, ...], max_batch_size: int) -> SegmentPlan:
    buffers = _buffers(group, max_batch_size)
    return SegmentPlan(pipeline, tuple(group), results, max_batch_size, buffers, place(_lifetimes(group, buffers)))


def _buffers(group: Sequence[StagePlan], max_batch_size: int) -> dict[Edge, tuple[int, ...]]:
    """Return the shapes of models' outputs. Texts and ids are Python objects, outputs of functions numpy arrays."""
    shapes = {}
    for stage in group:
        if stage.action not in WITH_TENSORS:
            continue
        for name, type_ in stage.outputs.items():
            if type_.datatype == "FP32" and -1 not in type_.shape[1:]:
                shapes[Edge(stage.name, name)] = (max_batch_size, *type_.shape[1:])
    return shapes


def _lifetimes(group: Sequence[StagePlan], buffers: Mapping[Edge, tuple[int, ...]]) -> list[Lifetime[Edge]]:
    """Return when each tensor lives, by the positions of stages. The inputs of a stage live while it writes."""
    types = {Edge(stage.name, name): type_ for stage in group for name, type_ in stage.outputs.items()}
    positions = {stage.name: at for at, stage in enumerate(group)}
    last_reads = {edge: at for at, stage in enumerate(group) for edge in stage.edges.values()}
    lifetimes = []
    for edge, shape in buffers.items():
        first = positions[edge.stage]
        nbytes = math.prod(shape) * NUMPY_DTYPES[types[edge].datatype].itemsize
        lifetimes.append(Lifetime(edge, nbytes, first, last_reads.get(edge, first)))
    return lifetimes
