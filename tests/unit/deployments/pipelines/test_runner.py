"""Running pipelines: order, parallel branches, failures, deadlines, and values that never come to the runner."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.registry.directory import ModelRecord
from configs.cluster import LimitsConfig
from configs.pipeline import PipelineConfig
from deployments.pipelines.pipelines import Pipelines
from deployments.pipelines.plans import Edge, SegmentCall, SegmentResult
from deployments.pipelines.records import PipelineRequest, PipelineResult, TensorValue
from deployments.records import (
    CacheUse,
    ChatRequest,
    CompletionRequest,
    ImageRequest,
    ImageResult,
    SwitchReport,
    TextResult,
)
from deployments.records.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    ModelUnavailable,
    QueueFull,
    UnknownModel,
)
from weights.operations.feature_sizes import FeatureSizes

MODELS = {
    "flux": ModelRecord("flux", "ready", "diffusion"),
    "adder": ModelRecord("adder", "ready", "llm"),
    "bert": ModelRecord("bert", "ready", "embedding", features=FeatureSizes(out_features=2)),
}
SWITCH = SwitchReport("m", 0, 0, 0, 0, (), ())


class Reply:
    """A result that is somewhere else: `fetched` says whether it was brought here."""

    def __init__(self, result: SegmentResult | Exception) -> None:
        self.result = result
        self.fetched = self.cancelled = False

    def __await__(self) -> Generator[Any, None, SegmentResult]:
        yield from asyncio.sleep(0).__await__()
        self.fetched = True
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def cancel(self) -> None:
        self.cancelled = True


class Models:
    """Stand-ins. `together_with` holds each text request until as many have come; `failing` raises for a message."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.running = self.cancelled = 0
        self.barrier: asyncio.Barrier | None = None
        self.failing: dict[str, Exception] = {}
        self.never: set[str] = set()
        self.sizes: list[int] = []
        self.replies: list[Reply] = []
        self.segment_error: Exception | None = None
        self.long: set[str] = set()

    async def generate(self, request: ImageRequest) -> ImageResult:
        self.asked.append(request)
        size = self.sizes.pop() if self.sizes else 4
        image = np.full((size, size, 3), request.seed or 0, np.uint8)
        told = ("the prompt was cut",) if request.prompt in self.long else ()
        return ImageResult(request.model, [image], request.seed or 0, 1, {}, SWITCH, CacheUse(0, 0), told)

    async def chat(self, request: ChatRequest) -> TextResult:
        return await self._text(request, request.messages[-1].content)

    async def complete(self, request: CompletionRequest) -> TextResult:
        return await self._text(request, request.prompt)

    async def _text(self, request: Any, text: str) -> TextResult:
        self.asked.append(request)
        self.running += 1
        try:
            if self.barrier is not None:
                await self.barrier.wait()
            if text in self.never:
                await asyncio.Event().wait()
            if text in self.failing:
                raise self.failing[text]
            told = ("the message was long",) if text in self.long else ()
            return TextResult(request.model, f"<{text}>", "stop", 1, 1, {}, warnings=told)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def run_segment(self, call: SegmentCall, upstream: tuple[Any, ...]) -> Reply:
        self.asked.append((call, upstream))
        result: SegmentResult | Exception
        if self.segment_error:
            result = self.segment_error
        else:
            timings = {stage.name: 1.0 for stage in call.plan.stages}
            for reply in upstream:
                timings |= reply.result.timings_ms
            values = {edge: np.full((call.num_items, 2), len(self.replies), np.float32) for edge in call.plan.results}
            warnings = tuple(f"stage {stage.name!r}: cut" for stage in call.plan.stages if stage.name in self.long)
            warnings += tuple(told for reply in upstream for told in reply.result.warnings)
            result = SegmentResult(values, timings, warnings)
        self.replies.append(Reply(result))
        return self.replies[-1]


def stage(name: str, inputs: dict[str, Any], **target: str) -> dict[str, Any]:
    return {"name": name, "inputs": inputs, **target}


def served(ask: Models, *stages: dict[str, Any], inputs: dict[str, str] | None = None, **outputs: str) -> Pipelines:
    config = PipelineConfig.model_validate(
        {"id": "p", "inputs": inputs or {"text": "text"}, "stages": stages, "outputs": outputs}
    )
    return Pipelines(
        [config],
        ask,
        SimpleNamespace(records=MODELS),
        limits=LimitsConfig(max_pipeline_items=8, max_images=3, max_prompts=5),
    )


def texts(name: str, *values: str) -> dict[str, TensorValue]:
    return {name: TensorValue(name, "BYTES", np.array([value.encode() for value in values], dtype=object))}


async def run(pipelines: Pipelines, inputs: dict[str, TensorValue], **options: Any) -> PipelineResult:
    return await asyncio.wait_for(pipelines.run_pipeline(PipelineRequest("p", inputs, **options)), 10)


TWO_BRANCHES = [
    stage("left", {"message": "$text", "system": "be brief", "temperature": 0}, model="adder"),
    stage("right", {"prompt": "$text", "stop": ["x"]}, model="adder"),
    stage("both", {"first": "$left", "second": "$right"}, function="join_texts"),
]


async def test_every_item_goes_through_every_stage() -> None:
    ask = Models()
    result = await run(served(ask, *TWO_BRANCHES, out="$both"), texts("text", "a", "b", "ü"))
    assert [value.decode() for value in result.outputs["out"].data] == ["<a> <a>", "<b> <b>", "<ü> <ü>"]
    assert result.timings_ms.keys() == {"left", "right", "both", "total"}
    assert all(ms >= 0 for ms in result.timings_ms.values())
    chat = next(request for request in ask.asked if isinstance(request, ChatRequest))
    assert [message.role for message in chat.messages] == ["system", "user"]
    assert chat.temperature == 0
    assert next(request for request in ask.asked if isinstance(request, CompletionRequest)).stop == ("x",)


async def test_branches_and_items_run_side_by_side() -> None:
    ask = Models()
    ask.barrier = asyncio.Barrier(6)  # nobody goes on before 2 branches x 3 items are there
    await run(served(ask, *TWO_BRANCHES, out="$both"), texts("text", "a", "b", "c"))
    assert len(ask.asked) == 6


async def test_a_branch_does_not_wait_for_another_ones_level() -> None:
    """left -> left2 goes on while right never ends; a level-by-level runner would not start left2."""
    ask = Models()
    ask.never = {"slow"}
    stages = [
        stage("left", {"message": "$text"}, model="adder"),
        stage("left2", {"message": "$left"}, model="adder"),
        stage("right", {"message": "$other"}, model="adder"),
    ]
    pipelines = served(ask, *stages, inputs={"text": "text", "other": "text"}, a="$left2", b="$right")
    running = asyncio.create_task(run(pipelines, texts("text", "x") | texts("other", "slow")))
    while len(ask.asked) < 3:
        await asyncio.sleep(0)
    assert ask.asked[-1].messages[-1].content == "<x>"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (ask.running, ask.cancelled) == (0, 1)


@pytest.mark.parametrize("error", [QueueFull("full", "model"), InvalidRequest("no"), ModelUnavailable("gone")])
async def test_the_first_failure_ends_the_rest(error: Any) -> None:
    ask = Models()
    ask.failing, ask.never = {"bad": error}, {"slow"}
    stages = [
        stage("left", {"message": "$text"}, model="adder"),
        stage("right", {"message": "$other"}, model="adder"),
    ]
    pipelines = served(ask, *stages, inputs={"text": "text", "other": "text"}, a="$left", b="$right")
    with pytest.raises(type(error), match=f"pipeline 'p', stage 'left': {error.message}") as caught:
        await run(pipelines, texts("text", "bad") | texts("other", "slow"))
    assert type(caught.value) is type(error)
    assert caught.value.param == ("stages.left.model" if error.param else "stages.left")
    assert (ask.running, ask.cancelled) == (0, 1)


async def test_a_class_that_a_transport_made_is_seen_through() -> None:
    class Transported(RuntimeError, QueueFull):
        """The error that Ray makes of an error of a replica."""

        def __init__(self) -> None:
            QueueFull.__init__(self, "full")

    ask = Models()
    ask.failing = {"bad": Transported()}
    with pytest.raises(QueueFull) as caught:
        await run(served(ask, *TWO_BRANCHES, out="$both"), texts("text", "bad"))
    assert type(caught.value) is QueueFull


async def test_an_unexpected_error_is_a_failed_generation() -> None:
    ask = Models()
    ask.failing = {"bad": KeyError("oops")}
    with pytest.raises(GenerationFailed, match=r"stage '(left|right)' failed: KeyError"):
        await run(served(ask, *TWO_BRANCHES, out="$both"), texts("text", "bad"))


async def test_a_deadline_names_what_was_not_done() -> None:
    ask = Models()
    ask.never = {"slow"}
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s; unfinished stages: .*left"):
        await run(served(ask, *TWO_BRANCHES, out="$both"), texts("text", "slow"), timeout_s=0.05)
    assert (ask.running, ask.cancelled) == (0, 2)


async def test_images_take_seeds_by_item_and_only_where_given() -> None:
    ask = Models()
    pipelines = served(
        ask,
        stage("digit_image", {"prompt": "$text", "seed": "$seed", "num_inference_steps": 2}, model="flux"),
        inputs={"text": "text", "seed": "optional int"},
        image="$digit_image",
    )
    seeds = {"seed": TensorValue("seed", "INT64", np.array([3, 5]))}
    result = await run(pipelines, texts("text", "a", "b") | seeds)
    assert result.outputs["image"].data[:, 0, 0, 0].tolist() == [3, 5]
    assert result.outputs["image"].datatype == "UINT8"
    assert {request.num_inference_steps for request in ask.asked} == {2}
    ask.asked.clear()
    await run(pipelines, texts("text", "a", "b"))
    assert {request.seed for request in ask.asked} == {None}
    one = {"seed": TensorValue("seed", "INT64", np.array([9]))}
    result = await run(pipelines, texts("text", "a", "b") | one)
    assert result.outputs["image"].data[:, 0, 0, 0].tolist() == [9, 9]
    with pytest.raises(InvalidRequest, match="at most 3 items"):
        await run(pipelines, texts("text", *"abcd"))
    ask.sizes = [4, 8]
    with pytest.raises(InvalidRequest, match="one size"):
        await run(pipelines, texts("text", "a", "b"))
    with pytest.raises(InvalidRequest, match=r"stage 'digit_image': prompt"):
        await run(pipelines, texts("text", ""))


async def test_an_image_of_one_model_begins_another_s() -> None:
    ask = Models()
    pipelines = served(
        ask,
        stage("sketch", {"prompt": "$text", "seed": "$seed"}, model="flux"),
        stage("painting", {"prompt": "$text", "init_image": "$sketch", "strength": 0.6}, model="flux"),
        stage("repaired", {"prompt": "$text", "init_image": "$photo", "mask_image": "$mask"}, model="flux"),
        inputs={"text": "text", "seed": "int", "photo": "image", "mask": "UINT8[-1,-1,-1]"},
        image="$painting",
        other="$repaired",
    )
    photos, masks = np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3), np.full((2, 4, 4), 200, np.uint8)
    given = {
        "seed": TensorValue("seed", "INT64", np.array([3, 5])),
        "photo": TensorValue("photo", "UINT8", photos),
        "mask": TensorValue("mask", "UINT8", masks),
    }
    await run(pipelines, texts("text", "a", "b") | given)
    begun = [request for request in ask.asked if request.strength == 0.6]
    assert [request.init_image.tolist() for request in begun] == [np.full((4, 4, 3), seed).tolist() for seed in (3, 5)]
    repaired = [request for request in ask.asked if request.mask_image is not None]
    assert [(one.prompt, one.init_image.tolist()) for one in repaired] == [
        (text, photo.tolist()) for text, photo in zip("ab", photos, strict=True)
    ]
    assert all(np.array_equal(request.mask_image, masks[0]) for request in repaired)


MIXED = [
    stage("vector", {"text": "$text"}, model="bert"),
    stage("word", {"message": "$text"}, model="adder"),
    stage("note", {"template": "{w}", "w": "$word"}, function="fill_template"),
    stage("soft", {"scores": "$vector"}, function="softmax"),
    stage("again", {"scores": "$soft"}, function="softmax"),
]


async def test_segments_get_priority_and_the_time_that_is_left() -> None:
    ask = Models()
    result = await run(served(ask, *MIXED, a="$again", b="$note"), texts("text", "x", "y"), priority=2, timeout_s=5)
    ((call, upstream),) = [asked for asked in ask.asked if isinstance(asked, tuple)]
    assert [member.name for member in call.plan.stages] == ["vector", "soft", "again"]
    assert (call.priority, call.num_items, upstream) == (2, 2, ())
    assert 0 < call.timeout_s <= 5
    assert result.timings_ms.keys() == {"vector", "word", "note", "soft", "again", "total"}
    assert result.outputs["a"].shape == (2, 2)


def vectors_and_word() -> list[dict[str, Any]]:
    """`mix` needs a vector and the LLM's word, so it is a segment of its own, behind that of the vector."""
    name = "tests_pipeline_functions:mix"
    return [
        stage("vector", {"text": "$text"}, model="bert"),
        stage("word", {"message": "$text"}, model="adder"),
        stage("mixed", {"vector": "$vector", "word": "$word"}, function=name),
    ]


@pytest.fixture
def mixing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    from deployments.pipelines.functions import Vector

    def mix(vector: Vector, word: str) -> Vector:
        return vector

    mix.__annotations__ = {"vector": Vector, "word": str, "return": Vector}
    module = types.ModuleType("tests_pipeline_functions")
    module.mix = mix  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests_pipeline_functions", module)


@pytest.mark.usefixtures("mixing")
async def test_a_tensor_between_segments_does_not_come_here() -> None:
    ask = Models()
    result = await run(served(ask, *vectors_and_word(), out="$mixed"), texts("text", "x"))
    (first, _), (second, upstream) = [asked for asked in ask.asked if isinstance(asked, tuple)]
    assert first.plan.results == (Edge("vector", "embedding"),)
    assert upstream == (ask.replies[0],)
    assert second.inputs == {Edge("word", "text"): ["<x>"]}
    assert [reply.fetched for reply in ask.replies] == [False, True]
    assert not any(reply.cancelled for reply in ask.replies)
    assert result.timings_ms.keys() == {"vector", "word", "mixed", "total"}


@pytest.mark.usefixtures("mixing")
async def test_segments_of_a_failed_run_are_cancelled() -> None:
    ask = Models()
    ask.failing = {"bad": InvalidRequest("no")}
    with pytest.raises(InvalidRequest, match="stage 'word': no"):
        await run(served(ask, *vectors_and_word(), out="$mixed"), texts("text", "bad"))
    assert [(reply.fetched, reply.cancelled) for reply in ask.replies] == [(False, True)]


async def test_an_error_that_has_its_stages_name_keeps_it() -> None:
    ask = Models()
    ask.segment_error = QueueFull("pipeline 'p', stage 'soft': full", "stages.soft")
    with pytest.raises(QueueFull) as caught:
        await run(served(ask, *MIXED, a="$again", b="$note"), texts("text", "x"))
    assert caught.value.args == ask.segment_error.args


@pytest.mark.parametrize(
    ("inputs", "options", "part"),
    [
        ({}, {}, "needs input text"),
        (texts("text", "a") | texts("txt", "a"), {}, "no input 'txt'; did you mean 'text'"),
        (texts("text"), {}, "as many items"),
        (texts("text", *"abcdef"), {}, "at most 5 items"),
        ({"text": TensorValue("text", "FP32", np.zeros(1, np.float32))}, {}, r"expected BYTES\[-1\], got FP32\[1\]"),
        (texts("text", "a"), {"timeout_s": 0.0}, "positive"),
        (texts("text", "a"), {"timeout_s": float("nan")}, "positive"),
    ],
)
async def test_requests_that_cannot_run(inputs: dict[str, TensorValue], options: dict[str, Any], part: str) -> None:
    ask = Models()
    with pytest.raises(InvalidRequest, match=part):
        await run(served(ask, *TWO_BRANCHES, out="$both"), inputs, **options)
    assert ask.asked == []


async def test_inputs_of_different_lengths_are_refused() -> None:
    stages = [stage("both", {"first": "$a", "second": "$b"}, function="join_texts")]
    pipelines = served(Models(), *stages, inputs={"a": "text", "b": "text"}, out="$both")
    with pytest.raises(InvalidRequest, match="got a 2, b 3"):
        await run(pipelines, texts("a", *"xy") | texts("b", *"xyz"))


async def test_a_pipeline_comes_and_goes_with_its_models() -> None:
    config = PipelineConfig.model_validate(
        {"id": "p", "inputs": {"text": "text"}, "stages": TWO_BRANCHES, "outputs": {"out": "$both"}, "description": "d"}
    )
    known: dict[str, ModelRecord] = {}
    pipelines = Pipelines([config], Models(), SimpleNamespace(records=known))
    assert pipelines.names() == ["p"]
    assert "unknown model 'adder'" in (pipelines.problem("p") or "")
    with pytest.raises(ModelUnavailable, match=r"stages\.0\.model.*unknown model 'adder'"):
        await run(pipelines, texts("text", "a"))
    known["adder"] = ModelRecord("adder", "ready", "llm")
    assert pipelines.problem("p") is None
    assert pipelines.signature("p").description == "d"
    assert pipelines.plan("p") is pipelines.plan("p")
    known["adder"] = ModelRecord("adder", "ready", "diffusion")
    assert "no parameter 'message'" in (pipelines.problem("p") or "")
    with pytest.raises(UnknownModel, match="unknown pipeline 'q'"):
        pipelines.signature("q")


async def test_warnings_of_all_stages_arrive_once_with_their_names() -> None:
    ask = Models()
    ask.long = {"b", "<b>", "vector"}
    pipelines = served(
        ask,
        stage("answer", {"message": "$text"}, model="adder"),
        stage("digit_image", {"prompt": "$answer"}, model="flux"),
        stage("vector", {"text": "$text"}, model="bert"),
        image="$digit_image",
        vector="$vector",
    )
    result = await run(pipelines, texts("text", "a", "b"))
    assert set(result.warnings) == {
        "stage 'answer': item 1: the message was long",
        "stage 'digit_image': item 1: the prompt was cut",
        "stage 'vector': cut",
    }
    assert len(result.warnings) == 3
    one = await run(pipelines, texts("text", "b"))
    assert "stage 'digit_image': the prompt was cut" in one.warnings
    ask.long.clear()
    assert (await run(pipelines, texts("text", "b"))).warnings == ()
