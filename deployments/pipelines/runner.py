"""One run of a pipeline: a stage starts when its inputs are there, and the first failure ends the run.

`ModelCalls` is the interface through which a run asks models; the ingress `Service` implements it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from deployments.pipelines.edge_types import IMAGE, Batch, items_of, stacked
from deployments.pipelines.plans import (
    PIPELINE_INPUT,
    Edge,
    PipelinePlan,
    SegmentCall,
    SegmentPlan,
    SegmentResult,
    StagePlan,
)
from deployments.pipelines.stage_functions import find_function
from deployments.records import (
    NO_PROMPT,
    ChatRequest,
    CompletionRequest,
    ImageRequest,
    ImageResult,
    TextResult,
    as_record,
    warnings_by_item,
)
from deployments.records.errors import DeadlineExceeded, InvalidRequest, named_failures, stage_warnings


class SegmentReply(Protocol):
    """The result of a segment, here or in a replica. Awaiting fetches it; passing it to another segment does not.

    A response of Ray Serve that is passed to a handle call as an argument of its own (not inside a list) goes from
    replica to replica: the router waits for presence only (Ray 2.60, `resolve_deployment_response`), and the error of
    the first call comes out of the second.
    """

    @property
    def response(self) -> Any:
        """Return the argument that stands for the result in the next call."""

    def __await__(self) -> Generator[Any, None, SegmentResult]: ...

    def cancel(self) -> object:
        """Cancel the call; nothing happens if the result is there already."""


class ModelCalls(Protocol):
    """The methods of the ingress `Service`, and one more. All raise ServiceErrors."""

    async def generate(self, request: ImageRequest, /) -> ImageResult: ...

    async def chat(self, request: ChatRequest, /) -> TextResult: ...

    async def complete(self, request: CompletionRequest, /) -> TextResult: ...

    async def run_workflow(self, workflow: str, inputs: Mapping[str, Any], /) -> WorkflowResult: ...

    def run_segment(self, call: SegmentCall, upstream: tuple[SegmentReply, ...], /) -> SegmentReply:
        """Begin a segment and return at once.

        `upstream` are results that hold inputs of the segment, and may not be there yet.
        """


ResultT = TypeVar("ResultT")


class WorkflowResult(NamedTuple):
    """The outputs of a registered workflow for one item, by name: images and texts."""

    outputs: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


class StageProgress(NamedTuple):
    """A stage that begins, or with `took_ms` has ended."""

    stage: str
    took_ms: float | None = None


OnStage = Callable[[StageProgress], None]


class PipelineRun:
    """One run. `values` holds the inputs that were given, and after `run_stages` the outputs too.

    Results of segments that only other segments need never come here: their replies are handed on. If such a segment
    fails, that shows when the next one is asked. `on_stage` is called as a stage begins and ends; the end of one in
    such a segment shows with the next one that comes here.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        inputs: Mapping[str, Batch],
        num_items: int,
        ask: ModelCalls,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        on_stage: OnStage = lambda _: None,
    ) -> None:
        self.values: dict[Edge, Batch] = {Edge(PIPELINE_INPUT, name): batch for name, batch in inputs.items()}
        self.timings_ms: dict[str, float] = {}
        self._warnings: list[str] = []
        self._plan = plan
        self._num_items = num_items
        self._ask = ask
        self._priority = priority
        self._timeout_s = timeout_s
        self._on_stage = on_stage
        self._start = time.perf_counter()
        self._segment_of = {stage.name: segment for segment in plan.segments() for stage in segment.stages}
        self._ready = {unit.name: asyncio.Event() for unit in plan.units}  # values of its stages are here
        self._asked = {segment.name: asyncio.Event() for segment in plan.segments()}
        self._replies: dict[str, SegmentReply] = {}
        self._open: dict[str, SegmentReply] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the warnings. Each begins with its stage's name."""
        return tuple(dict.fromkeys(self._warnings))  # results of one segment may come along several ways

    async def run_stages(self) -> None:
        """Run all stages. Raises the error of the stage that failed first, its name in front, or DeadlineExceeded."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                await run_together([self._run_unit(unit) for unit in self._plan.units])
            self._open.clear()  # all of them went into what is here now
        except TimeoutError:
            if not deadline.expired():
                raise
            waiting = ", ".join(stage.name for stage in self._plan.stages() if stage.name not in self.timings_ms)
            raise DeadlineExceeded(
                f"pipeline {self._plan.id!r}: not done within {self._timeout_s:g} s; unfinished stages: {waiting}"
            ) from None
        finally:
            for reply in self._open.values():
                reply.cancel()
        self.timings_ms["total"] = (time.perf_counter() - self._start) * 1e3

    async def _run_unit(self, unit: StagePlan | SegmentPlan) -> None:
        with named_failures(self._plan.id, unit.name):
            if isinstance(unit, SegmentPlan):
                await self._run_segment(unit)
            else:
                await self._run_stage(unit)

    async def _run_segment(self, segment: SegmentPlan) -> None:
        upstream = {self._segment_of[name].name for name in segment.needs if name in self._segment_of}
        for name in sorted(upstream):
            await self._asked[name].wait()
        for name in segment.needs - self._segment_of.keys():
            await self._ready[name].wait()
        edges = {edge for stage in segment.stages for edge in stage.edges.values()}
        call = SegmentCall(
            plan=segment,
            inputs={
                edge: self.values[edge] for edge in edges if edge in self.values and edge.stage not in self._segment_of
            },
            num_items=self._num_items,
            priority=self._priority,
            timeout_s=self._remaining_s(),
        )
        for stage in segment.stages:
            self._on_stage(StageProgress(stage.name))
        reply = self._ask.run_segment(call, tuple(self._replies[name] for name in sorted(upstream)))
        self._replies[segment.name] = self._open[segment.name] = reply
        self._asked[segment.name].set()
        if self._is_wanted_here(segment):
            result = await reply
            self.values.update(result.outputs)
            for name in result.timings_ms.keys() - self.timings_ms.keys():
                self._on_stage(StageProgress(name, result.timings_ms[name]))
            self.timings_ms.update(result.timings_ms)
            self._warnings += result.warnings
            self._open.pop(segment.name)
            self._ready[segment.name].set()

    def _is_wanted_here(self, segment: SegmentPlan) -> bool:
        inside = {stage.name for stage in segment.stages}
        is_output = any(edge.stage in inside for edge in self._plan.outputs.values())
        return is_output or any(unit.needs & inside for unit in self._plan.units if isinstance(unit, StagePlan))

    async def _run_stage(self, stage: StagePlan) -> None:
        for name in stage.needs:
            unit = self._segment_of.get(name)
            await self._ready[unit.name if unit else name].wait()
        start = time.perf_counter()
        self._on_stage(StageProgress(stage.name))
        batches = {name: self.values[edge] for name, edge in stage.edges.items() if edge in self.values}
        if stage.action == "function":
            outputs = await asyncio.to_thread(find_function(stage.target), batches, stage.literals, self._num_items)
        else:
            outputs = await self._ask_model(stage, batches)
        self.values.update({Edge(stage.name, name): batch for name, batch in outputs.items()})
        self.timings_ms[stage.name] = (time.perf_counter() - start) * 1e3
        self._on_stage(StageProgress(stage.name, self.timings_ms[stage.name]))
        self._ready[stage.name].set()

    async def _ask_model(self, stage: StagePlan, batches: Mapping[str, Batch]) -> dict[str, Batch]:
        """Send one request per item, all at once: the engines batch them."""
        columns = {name: items_of(batch) for name, batch in batches.items()}
        if stage.action == "workflow":
            return await self._run_workflow(stage, columns)
        items = [
            {**stage.literals, **{name: column[index] for name, column in columns.items()}, "model": stage.target}
            for index in range(self._num_items)
        ]
        if stage.action == "upscale":
            items = [{"model": stage.target, "prompt": NO_PROMPT, "init_image": item["image"]} for item in items]
        if stage.action in ("generate", "upscale"):
            made = await run_together([self._ask.generate(as_record(ImageRequest, item)) for item in items])
            results = [result.opaque("an image of a pipeline") for result in made]
            self._note(stage, results)
            try:
                return {"image": stacked([result.images[0] for result in results], IMAGE)}
            except ValueError as error:
                raise InvalidRequest(f"images of one request have one size; {error}", "width") from None
        texts = await run_together([self._text(item) for item in items])
        self._note(stage, texts)
        return {"text": [text.text for text in texts]}

    async def _run_workflow(self, stage: StagePlan, columns: Mapping[str, list[Any]]) -> dict[str, Batch]:
        """Run a workflow for each item, one after the other: each may hold many images."""
        results = []
        for index in range(self._num_items):
            given = {name: column[index] for name, column in columns.items()}
            results.append(await self._ask.run_workflow(stage.target, {**stage.literals, **given}))
        self._note(stage, results)
        try:
            return {
                name: stacked([result.outputs[name] for result in results], type_)
                for name, type_ in stage.outputs.items()
            }
        except ValueError as error:
            raise InvalidRequest(f"images of one request have one size; {error}") from None

    async def _text(self, fields: dict[str, Any]) -> TextResult:
        if "prompt" in fields:
            return await self._ask.complete(as_record(CompletionRequest, fields))
        turns = [("system", fields.pop("system", None)), ("user", fields.pop("message"))]
        messages = tuple({"role": role, "content": text} for role, text in turns if text is not None)
        return await self._ask.chat(as_record(ChatRequest, fields | {"messages": messages}))

    def _note(self, stage: StagePlan, results: Sequence[ImageResult | TextResult | WorkflowResult]) -> None:
        self._warnings += stage_warnings(stage.name, warnings_by_item([result.warnings for result in results]))

    def _remaining_s(self) -> float | None:
        """Return the time left, at least a little: zero would be refused, while the deadline here says it better."""
        if self._timeout_s is None:
            return None
        return max(1e-3, self._timeout_s - (time.perf_counter() - self._start))


async def run_together(work: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Run coroutines side by side and return their results. The first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
