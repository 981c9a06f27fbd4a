"""Plans: the stages of a checked pipeline, their inputs, and where they run. Values only.

Segments of a plan travel to other processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from configs.model import LongText
from configs.pipeline import Argument
from deployments.pipelines.edge_types import Batch, EdgeType
from deployments.pipelines.records import Signature

Action: TypeAlias = Literal["generate", "write", "tokenize", "embed", "head", "function"]
IN_ENCODER: Final = frozenset({"tokenize", "embed", "head"})  # actions of the text-encoder service
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
        for unit in self.units:
            yield from unit.stages if isinstance(unit, SegmentPlan) else (unit,)

    def segments(self) -> list[SegmentPlan]:
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
