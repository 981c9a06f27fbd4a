"""Segments inside a replica: what comes out, and where intermediate tensors lie meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kit.seeding import seeded_random, seeded_rng

from deployments.pipelines.edge_types import FLOAT, TEXT, TOKENS, VECTOR, EdgeType
from deployments.pipelines.plans import (
    PIPELINE_INPUT,
    Edge,
    SegmentCall,
    SegmentPlan,
    SegmentResult,
    StagePlan,
    form_units,
)
from deployments.pipelines.segments import SegmentRunner, _ArenaPool
from deployments.records.errors import GenerationFailed, InvalidRequest

WIDTH, HIDDEN, CLASSES = 6, 5, 3
LONGEST = 40  # characters
GIVEN = Edge(PIPELINE_INPUT, "text")
LABELS = ("a", "b", "c")


class Ops:
    """Deterministic stand-ins for tokenizer, encoder and two heads, which note the memory that they meet."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(seeded_random().getrandbits(31))
        self.table = torch.randn(256, WIDTH, generator=draw)
        self.heads = {
            "h1": torch.randn(WIDTH, HIDDEN, generator=draw),
            "h2": torch.randn(HIDDEN, CLASSES, generator=draw),
        }
        self.pointers: list[int] = []
        self.batch_sizes: list[int] = []
        self.hold: asyncio.Event | None = None
        self.warnings: list[str] = []

    async def tokenize(self, model: str, texts: Sequence[str], first: int) -> list[tuple[int, ...]]:
        self.warnings += [f"input {number} was cut" for number, text in enumerate(texts, first) if len(text) > LONGEST]
        return [tuple(text[:LONGEST].encode()) for text in texts]

    def take_warnings(self) -> list[str]:
        taken, self.warnings = self.warnings, []
        return taken

    async def encode(self, model: str, texts: Sequence[Any], first: int) -> list[torch.Tensor]:
        self.batch_sizes.append(len(texts))
        if self.hold is not None:
            await self.hold.wait()
        return [self.embedding(ids) for ids in texts]

    def embedding(self, ids: Sequence[int]) -> torch.Tensor:
        return self.table[list(ids)].mean(dim=0)

    async def head(self, model: str, features: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        self.pointers.append(features.data_ptr())
        return torch.matmul(features, self.heads[model], out=out)

    async def score(self, model: str, texts: Sequence[Any], first: int) -> list[torch.Tensor]:
        self.batch_sizes.append(len(texts))
        return [self.embedding("".join(one).encode())[: 1 if isinstance(one, tuple) else CLASSES] for one in texts]

    def expected(self, text: str) -> np.ndarray[Any, Any]:
        logits: torch.Tensor = self.embedding(text.encode()) @ self.heads["h1"] @ self.heads["h2"]
        return logits.softmax(-1).numpy()


def stages(width: int = HIDDEN) -> list[StagePlan]:
    def fp32(size: int) -> EdgeType:
        return EdgeType("FP32", (-1, size))

    tokens, vector, hidden = Edge("ids", "tokens"), Edge("vector", "embedding"), Edge("hidden", "output")
    classes: dict[str, EdgeType] = {"label": TEXT, "scores": VECTOR}
    return [
        StagePlan("ids", "tokenize", "m", {"text": GIVEN}, {}, {"tokens": TOKENS}),
        StagePlan("vector", "embed", "m", {"tokens": tokens}, {}, {"embedding": fp32(WIDTH)}),
        StagePlan("hidden", "head", "h1", {"features": vector}, {}, {"output": fp32(width)}),
        StagePlan("logits", "head", "h2", {"features": hidden}, {}, {"output": fp32(CLASSES)}),
        StagePlan("classes", "function", "classify", {"logits": Edge("logits", "output")}, {"labels": LABELS}, classes),
    ]


def segment(outputs: Sequence[Edge], max_batch_size: int = 4, width: int = HIDDEN) -> SegmentPlan:
    (unit,) = form_units("p", stages(width), outputs, max_batch_size)
    assert isinstance(unit, SegmentPlan)
    return unit


LABEL, SCORES = Edge("classes", "label"), Edge("classes", "scores")
PLAN = segment([LABEL, SCORES])


def call(texts: list[str], plan: SegmentPlan = PLAN) -> SegmentCall:
    return SegmentCall(plan, {GIVEN: texts}, len(texts))


@pytest.mark.parametrize("num_items", [1, 4, 11])
async def test_results_are_those_of_the_stages(num_items: int) -> None:
    ops, runner = Ops(), SegmentRunner()
    texts = [f"text {index * 7}" for index in range(num_items)]
    result = await runner.run_segment(call(texts), (), ops)
    scores = result.outputs[SCORES]
    assert isinstance(scores, np.ndarray)
    np.testing.assert_allclose(scores, [ops.expected(text) for text in texts], rtol=1e-4)
    assert result.outputs[LABEL] == [LABELS[int(row.argmax())] for row in scores]
    assert result.outputs.keys() == {LABEL, SCORES}
    assert result.timings_ms.keys() == {"ids", "vector", "hidden", "logits", "classes"}
    assert max(ops.batch_sizes) <= 4
    assert sum(ops.batch_sizes) == num_items


async def test_warnings_name_stage_and_item_and_come_once() -> None:
    ops, runner = Ops(), SegmentRunner()
    texts = ["x" * (LONGEST + (number in (2, 9))) for number in range(11)]
    first = await runner.run_segment(call(texts), (), ops)
    assert first.warnings == ("stage 'ids': input 2 was cut", "stage 'ids': input 9 was cut")
    earlier = SegmentResult({}, {}, ("stage 'before': input 0 was cut",))
    second = await runner.run_segment(call(["short"]), (earlier, earlier), ops)
    assert second.warnings == earlier.warnings
    assert (await runner.run_segment(call(["short"]), (), ops)).warnings == ()


async def test_intermediate_tensors_lie_in_the_arena() -> None:
    ops, runner = Ops(), SegmentRunner(num_arenas=1)
    runner.prepare_segment(PLAN)
    stats = runner.segment_stats()
    assert stats.arena_bytes == PLAN.memory.nbytes < 4 * (256 * 3)
    for _ in range(3):
        await runner.run_segment(call(["x", "y"]), (), ops)
    assert len(set(ops.pointers)) == 2  # the inputs of two heads, at the same place every time
    first, second = sorted(set(ops.pointers))
    offsets = sorted(PLAN.memory.offsets[edge] for edge in (Edge("vector", "embedding"), Edge("hidden", "output")))
    assert second - first == offsets[1] - offsets[0]
    assert runner.segment_stats().num_temporary == 0


async def test_intermediate_results_are_copies() -> None:
    """A vector that leaves the segment is not written over by the next request."""
    ops, runner = Ops(), SegmentRunner(num_arenas=1)
    vector = Edge("vector", "embedding")
    plan = segment([vector, SCORES])
    first = await runner.run_segment(call(["one"], plan), (), ops)
    kept = np.array(first.outputs[vector])
    await runner.run_segment(call(["another"], plan), (), ops)
    np.testing.assert_array_equal(first.outputs[vector], kept)
    np.testing.assert_allclose(kept[0], ops.embedding(b"one"), rtol=1e-6)


async def test_runs_side_by_side_do_not_share_memory() -> None:
    ops, runner = Ops(), SegmentRunner(num_arenas=1)
    ops.hold = asyncio.Event()
    texts = [[f"{index}a", f"{index}b"] for index in range(5)]
    runs = [asyncio.create_task(runner.run_segment(call(some), (), ops)) for some in texts]
    while len(ops.batch_sizes) < 5:
        await asyncio.sleep(0)
    ops.hold.set()
    for some, result in zip(texts, await asyncio.gather(*runs), strict=True):
        np.testing.assert_allclose(result.outputs[SCORES], [ops.expected(text) for text in some], rtol=1e-4)
    assert runner.segment_stats().num_temporary == 4


def test_memory_of_a_failed_run_is_not_used_again() -> None:
    """A thread or kernel of a run that was cancelled may write there still."""
    pool = _ArenaPool(1, torch.device("cpu"))
    pool.prepare_arenas(1000)
    with pytest.raises(KeyError), pool.arena(1000) as failed:
        raise KeyError
    with pool.arena(1000) as fresh:
        assert fresh.data_ptr() != failed.data_ptr()
    with pool.arena(500) as again:
        assert again.data_ptr() == fresh.data_ptr()
    assert pool.num_temporary == 0


async def test_tensors_of_unknown_size_are_counted() -> None:
    ops, runner = Ops(), SegmentRunner()
    plan = segment([SCORES], width=-1)
    assert Edge("hidden", "output") not in plan.buffers
    result = await runner.run_segment(call(["x"], plan), (), ops)
    np.testing.assert_allclose(result.outputs[SCORES], [ops.expected("x")], rtol=1e-4)
    assert runner.segment_stats().num_temporary == 1


async def test_inputs_come_from_earlier_segments_too() -> None:
    ops, runner = Ops(), SegmentRunner()
    vectors = seeded_rng().normal(size=(2, WIDTH)).astype(np.float32)
    unit = replace(PLAN, stages=(stages()[2],), results=(Edge("hidden", "output"),))
    earlier = SegmentResult({Edge("vector", "embedding"): vectors}, {"vector": 3.0})
    result = await runner.run_segment(SegmentCall(unit, {}, 2), (earlier,), ops)
    expected = vectors @ ops.heads["h1"].numpy()
    np.testing.assert_allclose(result.outputs[Edge("hidden", "output")], expected, rtol=1e-4, atol=1e-5)
    assert result.timings_ms["vector"] == 3.0


async def test_failures_name_pipeline_and_stage() -> None:
    ops, runner = Ops(), SegmentRunner()
    ops.table = torch.randn(256, WIDTH + 1)
    with pytest.raises(
        GenerationFailed, match=r"pipeline 'p', stage 'vector': the model gives \(7,\) per item"
    ) as caught:
        await runner.run_segment(call(["x"]), (), ops)
    assert caught.value.param == "stages.vector"

    async def refused(model: str, texts: Sequence[str], first: int) -> list[tuple[int, ...]]:
        raise InvalidRequest("too long", "text")

    ops.tokenize = refused  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest, match="stage 'ids': too long") as refusal:
        await runner.run_segment(call(["x"]), (), ops)
    assert refusal.value.param == "stages.ids.text"


@pytest.mark.parametrize("query", [None, "which one"])
async def test_scores_of_texts_and_of_pairs_are_planned_tensors(query: str | None) -> None:
    score, classes = Edge("rank", "score"), Edge("kind", "scores")
    edges = {"text": GIVEN} if query else {"text": GIVEN, "query": GIVEN}
    literals = {"query": query} if query else {}
    plans = [
        StagePlan("rank", "score", "ranker", edges, literals, {"score": FLOAT}),
        StagePlan("kind", "score", "sorter", {"text": GIVEN}, {}, {"scores": EdgeType("FP32", (-1, CLASSES))}),
    ]
    ops, runner, texts = Ops(), SegmentRunner(), [f"text {index * 7}" for index in range(6)]
    found: dict[Edge, Any] = {}
    for unit in form_units("p", plans, [score, classes], 4):
        assert isinstance(unit, SegmentPlan)
        found |= (await runner.run_segment(call(texts, unit), (), ops)).outputs
    assert runner.segment_stats().num_temporary == 0
    assert found[score].shape == (6,)
    ranks = [ops.embedding(f"{query or text}{text}".encode())[0] for text in texts]
    np.testing.assert_allclose(found[score], ranks, rtol=1e-5)
    rows = [ops.embedding(text.encode())[:CLASSES].numpy() for text in texts]
    np.testing.assert_allclose(found[classes], rows, rtol=1e-5)
