"""Segments of pipelines inside one replica: their intermediate tensors stay on the device. Free of Ray.

The places of tensors were decided when the pipeline was planned (`plans.py`); a run allocates none of those whose
sizes are known. Requests larger than the plan run in chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

from deployments.engines.programs.rows import array_of, tensor_of
from deployments.pipelines.edge_types import TOKENS, Batch, EdgeType
from deployments.pipelines.plans import WITH_TENSORS, Edge, SegmentCall, SegmentPlan, SegmentResult, StagePlan
from deployments.pipelines.stage_functions import find_function
from deployments.records.errors import GenerationFailed, named_failures, stage_warnings


class _ArenaPool:
    """Device memory for intermediate tensors, allocated before requests come.

    `num_arenas` runs at once have an arena each. All segments share them, so each is as large as the largest needs.

    Further runs, and those of a segment nobody has prepared, get temporary memory, which is counted.
    """

    def __init__(self, num_arenas: int, device: torch.device) -> None:
        self.num_temporary = 0
        self.nbytes = 0
        self._num_arenas = num_arenas
        self._device = device
        self._free: list[torch.Tensor] = []

    def prepare_arenas(self, nbytes: int) -> None:
        """Allocate arenas of `nbytes`. Smaller ones that are in use are not taken back."""
        if nbytes > self.nbytes:
            self.nbytes = nbytes
            self._free = [self._allocated(nbytes) for _ in range(self._num_arenas)]

    @contextlib.contextmanager
    def arena(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Lend an arena: at least `nbytes` of uint8."""
        if self._free and 0 < nbytes <= self.nbytes:
            taken = self._free.pop()
        else:
            self.num_temporary += nbytes > 0
            taken = self._allocated(nbytes)
        try:
            yield taken
        except BaseException:
            # A thread or kernel of the run that failed may still write here: this memory is nobody's any more.
            if len(taken) == self.nbytes > 0 and len(self._free) < self._num_arenas:
                self._free.append(self._allocated(self.nbytes))
            raise
        if len(taken) == self.nbytes > 0 and len(self._free) < self._num_arenas:
            self._free.append(taken)

    def _allocated(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


_Value = Batch | torch.Tensor | list[torch.Tensor]


class SegmentOps(Protocol):
    """The operations of a replica for one call: its leases, cache and batcher, the call's priority and time."""

    async def tokenize(self, model: str, texts: Sequence[str], first: int) -> list[tuple[int, ...]]:
        """Return token ids. `first` is the number of the first text among the items of the request; so for `encode`."""

    async def encode(
        self, model: str, texts: Sequence[str] | Sequence[tuple[int, ...]], first: int
    ) -> Sequence[torch.Tensor]:
        """Return one embedding (D,) per text or token ids, on any device."""

    async def score(
        self, model: str, texts: Sequence[str] | Sequence[tuple[str, str]], first: int
    ) -> Sequence[torch.Tensor]:
        """Return the scores (C,) of each text or pair of texts by a classifier or reranker, on any device."""

    async def head(self, model: str, features: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Apply a linear layer: (n, in) -> (n, out), both on the device; written to `out` if it is given."""

    async def program(
        self, model: str, rows: Mapping[str, Sequence[torch.Tensor]], first: int
    ) -> Sequence[Mapping[str, torch.Tensor]]:
        """Run a stored program: by input a row for each item, whose sizes may differ; the outputs of each item."""

    def take_warnings(self) -> Sequence[str]:
        """Return the warnings of the calls since the last time."""


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """Figures since the replica began. `num_temporary`: arenas beyond the prepared ones, tensors of unknown size."""

    num_calls: int
    num_chunks: int
    num_temporary: int
    arena_bytes: int


class SegmentRunner:
    """The runner of one replica. `num_arenas` calls at once run without allocating. Lives on one event loop."""

    def __init__(self, device: torch.device | str = "cpu", num_arenas: int = 8) -> None:
        self._pool = _ArenaPool(num_arenas, torch.device(device))
        self._num_calls = self._num_chunks = self._num_unplanned = 0

    def prepare_segment(self, plan: SegmentPlan) -> None:
        """Allocate the memory of a segment before its first request."""
        self._pool.prepare_arenas(plan.memory.nbytes)

    def segment_stats(self) -> SegmentStats:
        """Return the figures so far."""
        num_temporary = self._pool.num_temporary + self._num_unplanned
        return SegmentStats(self._num_calls, self._num_chunks, num_temporary, self._pool.nbytes)

    async def run_segment(self, call: SegmentCall, upstream: Sequence[SegmentResult], ops: SegmentOps) -> SegmentResult:
        """Run a segment. Raises ServiceErrors that begin with the stage's name."""
        self.prepare_segment(call.plan)
        self._num_calls += 1
        given = dict(call.inputs)
        timings_ms: dict[str, float] = {}
        warnings: list[str] = []
        for result in upstream:
            given.update(result.outputs)
            timings_ms.update(result.timings_ms)
            warnings += result.warnings
        spent_ms: dict[str, float] = defaultdict(float)
        collected: dict[Edge, list[Batch]] = defaultdict(list)
        for start in range(0, call.num_items, call.plan.max_batch_size):
            self._num_chunks += 1
            rows = slice(start, min(start + call.plan.max_batch_size, call.num_items))
            chunk = {edge: batch[rows] for edge, batch in given.items()}
            with self._pool.arena(call.plan.memory.nbytes) as arena:
                work = _Chunk(call.plan, chunk, rows, arena, ops, spent_ms, warnings)
                for edge, batch in (await work.run_stages()).items():
                    collected[edge].append(batch)
                self._num_unplanned += sum(edge not in call.plan.buffers for edge in _model_edges(call.plan))
        outputs = {edge: _joined(batches) for edge, batches in collected.items()}
        # Results of one earlier segment may come along several ways.
        return SegmentResult(outputs, timings_ms | spent_ms, tuple(dict.fromkeys(warnings)))


class _Chunk:
    """One pass through the stages, for as many items as the arena is planned for."""

    def __init__(
        self,
        plan: SegmentPlan,
        given: Mapping[Edge, Batch],
        rows: slice,
        arena: torch.Tensor,
        ops: SegmentOps,
        spent_ms: dict[str, float],
        warnings: list[str],
    ) -> None:
        self._plan = plan
        self._values: dict[Edge, _Value] = dict(given)
        self._arena = arena
        self._ops = ops
        self._spent_ms = spent_ms
        self._warnings = warnings
        self._first = rows.start
        self._num_items = rows.stop - rows.start

    async def run_stages(self) -> dict[Edge, Batch]:
        results: dict[Edge, Batch] = {}
        for stage in self._plan.stages:
            start = time.perf_counter()
            with named_failures(self._plan.pipeline, stage.name):
                for name, value in (await self._outputs(stage)).items():
                    edge = Edge(stage.name, name)
                    self._values[edge] = value
                    if edge in self._plan.results:  # a copy: its place in the arena is somebody else's soon
                        results[edge] = _on_host(value, copy=True)
            self._warnings += stage_warnings(stage.name, self._ops.take_warnings())
            self._spent_ms[stage.name] += (time.perf_counter() - start) * 1e3
        return results

    async def _outputs(self, stage: StagePlan) -> dict[str, _Value]:
        sources = {name: self._values[edge] for name, edge in stage.edges.items() if edge in self._values}
        if stage.action == "function":
            batches = {name: _on_host(value) for name, value in sources.items()}
            return dict(await asyncio.to_thread(find_function(stage.target), batches, stage.literals, self._num_items))
        if stage.action == "program":
            return await self._program_outputs(stage, sources)
        ((name, type_),) = stage.outputs.items()
        return {name: await self._model_output(stage, Edge(stage.name, name), type_, sources)}

    async def _model_output(self, stage: StagePlan, edge: Edge, type_: EdgeType, sources: Mapping[str, Any]) -> _Value:
        place = self._place(edge)
        if stage.action == "head":
            features = sources["features"]
            if not isinstance(features, torch.Tensor):
                features = torch.from_numpy(np.array(features)).to(self._arena.device)
            return _checked(type_, await self._ops.head(stage.target, features, place))
        texts = sources.get("tokens") or self._texts(stage, "text", sources)
        if stage.action == "score":
            pairs = list(zip(self._texts(stage, "query", sources), texts, strict=True)) if _ranks(stage) else texts
            scores = await self._ops.score(stage.target, pairs, self._first)
            return self._stacked(type_, [row[0] for row in scores] if _ranks(stage) else scores, place)
        if stage.action == "tokenize":
            return await self._ops.tokenize(stage.target, texts, self._first)
        return self._stacked(type_, await self._ops.encode(stage.target, texts, self._first), place)

    async def _program_outputs(self, stage: StagePlan, sources: Mapping[str, Any]) -> dict[str, _Value]:
        """Return the outputs of a program; of items of unlike sizes, one tensor for each."""
        rows = {name: _rows(value) for name, value in sources.items()}
        rows |= {name: [torch.tensor(value)] * self._num_items for name, value in stage.literals.items()}
        found = await self._ops.program(stage.target, rows, self._first)
        outputs: dict[str, _Value] = {}
        for name, type_ in stage.outputs.items():
            items = [one[name] for one in found]
            if type_ == TOKENS:
                outputs[name] = [tuple(item.tolist()) for item in items]
            elif (place := self._place(Edge(stage.name, name))) is not None:
                outputs[name] = self._stacked(type_, items, place)
            else:
                is_even = len({item.shape for item in items}) == 1
                outputs[name] = _checked(type_, torch.stack(items)) if is_even else items
        return outputs

    def _texts(self, stage: StagePlan, name: str, sources: Mapping[str, Any]) -> list[str]:
        """Return the texts of a parameter; a literal of the config is the text of every item."""
        return sources[name] if name in sources else [str(stage.literals[name])] * self._num_items

    def _place(self, edge: Edge) -> torch.Tensor | None:
        """Return the tensor's planned place; None if its size is unknown in advance."""
        shape = self._plan.buffers.get(edge)
        if shape is None:
            return None
        offset, sizes = self._plan.memory.offsets[edge], (self._num_items, *shape[1:])
        nbytes = math.prod(sizes) * torch.float32.itemsize
        return self._arena[offset : offset + nbytes].view(torch.float32).view(sizes)

    def _stacked(self, type_: EdgeType, rows: Sequence[torch.Tensor], place: torch.Tensor | None) -> torch.Tensor:
        if place is None:
            return _checked(type_, torch.stack([row.to(self._arena.device, torch.float32) for row in rows]))
        for target, row in zip(place, rows, strict=True):
            if row.shape != target.shape:
                raise GenerationFailed(f"the model gives {tuple(row.shape)} per item, expected {type_}")
            target.copy_(row)  # from any device and dtype
        return place


def _ranks(stage: StagePlan) -> bool:
    """Return whether a stage scores texts beside a query, each by one number."""
    return "query" in stage.edges or "query" in stage.literals


def _checked(type_: EdgeType, tensor: torch.Tensor) -> torch.Tensor:
    fits = tensor.ndim == len(type_.shape) and all(
        wanted in (-1, size) for size, wanted in zip(tensor.shape, type_.shape, strict=True)
    )
    if not fits:
        raise GenerationFailed(f"the model gives {tuple(tensor.shape)}, expected {type_}")
    return tensor


def _rows(value: _Value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return list(value)
    return [item if isinstance(item, torch.Tensor) else tensor_of(np.asarray(item)) for item in value]


def _model_edges(plan: SegmentPlan) -> list[Edge]:
    """Tensors that models of the segment give."""
    return [Edge(stage.name, name) for stage in plan.stages if stage.action in WITH_TENSORS for name in stage.outputs]


def _on_host(value: _Value, *, copy: bool = False) -> Batch:
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [array_of(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return cast("Batch", value)
    array = array_of(value)
    return array.copy() if copy else array


def _joined(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    arrays = [batch for batch in batches if isinstance(batch, np.ndarray)]
    if len(arrays) == len(batches) and len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    return [item for batch in batches for item in batch]  # type: ignore[return-value]
