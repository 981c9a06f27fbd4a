"""The device loop and the engines' steps: requests join and leave a running batch, and fail by themselves."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from kit.panics import Panic
from kit.waiting import until, wait_until
from unit.deployments.engine_loops import last_output, stream_outputs

from deployments.engines.costs.step_costs import StepCosts
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.rows import Work
from deployments.engines.records.protocol import (
    ComputationFailed,
    ConditionedRequest,
    DenoiseTimes,
    DiffusionOutput,
    DiffusionRequest,
    EngineError,
    SamplingParams,
    SharedDevice,
    TextDelta,
    TextRequest,
)
from deployments.replicas.step_loop import DeviceThread, EngineLoop
from weights.platform.panics import Panicked

WAIT_S = 10


def costs_of_merging() -> StepCosts:
    """Return costs by which all who can share a turn do, whatever turns take here."""
    costs = StepCosts()
    for kind, rows in itertools.product(("step", "decode"), range(1, 65)):
        costs.note_call(kind, rows, 1.0)
    costs.note_call = lambda *arguments: None  # type: ignore[method-assign]
    return costs


class Turns:
    """Lets the device thread make as many turns as were granted."""

    def __init__(self, granted: int = 10**6) -> None:
        self._semaphore = threading.Semaphore(granted)
        self.waiting = False

    def grant(self, count: int = 1) -> None:
        self.waiting = False
        self._semaphore.release(count)

    def take(self) -> None:
        self.waiting = True
        assert self._semaphore.acquire(timeout=WAIT_S)
        self.waiting = False


@dataclass(eq=False)
class State:
    name: str
    num_steps: int
    step_index: int = 0
    fails_at: int | None = None
    fails_in_decode: bool = False
    solver_fails_at: int | None = None
    outcome: Exception | None = None
    failure: Exception | None = None
    preview_at: tuple[int, ...] = ()
    expected: None = None
    is_extrapolated: bool = False

    @property
    def done(self) -> bool:
        return self.step_index >= self.num_steps

    @property
    def num_forwards_left(self) -> int:
        return self.num_steps - self.step_index


@dataclass(eq=False)
class Pipeline:
    """As the real one: when a step raises, no state has moved; one whose own solver fails moves no more."""

    turns: Turns = field(default_factory=Turns)
    max_rows: int = 64
    steps: list[list[str]] = field(default_factory=list)
    decoded: list[list[str]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def start_request(self, request: DiffusionRequest, conditioning: Any, adapters: Any) -> State:
        self.threads.add(threading.get_ident())
        state: State = conditioning
        return state

    device = torch.device("cpu")

    def step_work(self, state: State) -> Work:
        return Work(frozenset(["step"]), "step", 1, self.max_rows)

    def decode_work(self, state: State) -> Work:
        return Work(frozenset(["decode"]), "decode", 1, 64)

    def step(self, states: list[State], check: Any = None) -> None:
        self.threads.add(threading.get_ident())
        self.turns.take()
        for state in states:
            if state.fails_at == state.step_index:
                raise ValueError(f"{state.name} broke")
        self.steps.append([state.name for state in states])
        for state in states:
            if state.solver_fails_at == state.step_index:
                state.failure = ComputationFailed(f"the solver of {state.name} failed")
            else:
                state.step_index += 1

    def decode(self, states: list[State]) -> list[Any]:
        self.threads.add(threading.get_ident())
        for state in states:
            if state.fails_in_decode:
                raise ValueError(f"{state.name} cannot be decoded")
        self.decoded.append([state.name for state in states])
        return [state.outcome or np.full((1, 2, 2, 3), len(state.name), np.uint8) for state in states]


class Denoising:
    """A loop for each pipeline, on one device thread."""

    def __init__(self) -> None:
        self._thread = DeviceThread()
        self._loops: dict[Pipeline, EngineLoop[ConditionedRequest, DiffusionOutput]] = {}

    @property
    def num_running(self) -> int:
        return sum(loop.num_running for loop in self._loops.values())

    async def output(self, pipeline: Pipeline, state: State, seen: list[DiffusionOutput] | None = None) -> Any:
        if pipeline not in self._loops:
            engine = DiffusionEngine(pipeline, costs_of_merging())  # type: ignore[arg-type]
            self._loops[pipeline] = EngineLoop(self._thread, engine)
        loop = self._loops[pipeline]
        request = DiffusionRequest(state.name, 2, 2, state.num_steps, 1.0, 0)
        conditioned = ConditionedRequest(request, state, reports_steps=seen is not None)  # type: ignore[arg-type]
        return await last_output(loop, conditioned, None if seen is None else seen.append)

    async def run(self, pipeline: Pipeline, state: State) -> tuple[np.ndarray, DenoiseTimes]:
        output = await self.output(pipeline, state)
        return output.images, output.times


def loop() -> Denoising:
    return Denoising()


async def test_one_request_is_stepped_to_its_end_and_decoded() -> None:
    pipeline = Pipeline()
    images, times = await loop().run(pipeline, State("one", 3))
    assert images.shape == (1, 2, 2, 3)
    assert (pipeline.steps, pipeline.decoded) == ([["one"]] * 3, [["one"]])
    assert min(times.queue_s, times.denoise_s, times.decode_s) >= 0


async def test_every_step_is_reported_to_those_who_ask() -> None:
    device, pipeline, seen = loop(), Pipeline(), list[DiffusionOutput]()
    last, _ = await asyncio.gather(
        device.output(pipeline, State("one", 3), seen), device.run(pipeline, State("two", 3))
    )
    assert [(output.step_index, output.num_steps, output.is_last) for output in seen] == [
        (1, 3, False),
        (2, 3, False),
        (3, 3, False),
        (3, 3, True),
    ]
    assert seen[-1] is last


async def test_a_request_of_an_id_that_is_under_way_is_refused() -> None:
    engine = DiffusionEngine(Pipeline())  # type: ignore[arg-type]
    conditioned = ConditionedRequest(DiffusionRequest("a", 2, 2, 1, 1.0, 0), State("a", 1))  # type: ignore[arg-type]
    engine.add_request(conditioned)
    with pytest.raises(EngineError, match="'a' is in use"):
        engine.add_request(conditioned)
    engine.abort("a")
    engine.abort("never heard of")
    assert not engine.has_work


async def test_requests_join_a_running_batch_and_leave_it() -> None:
    device, pipeline = loop(), Pipeline(Turns(0))
    first = asyncio.ensure_future(device.run(pipeline, State("a", 3)))
    await until(lambda: pipeline.turns.waiting)
    second = asyncio.ensure_future(device.run(pipeline, State("b", 3)))
    await asyncio.sleep(0)
    pipeline.turns.grant(100)
    await asyncio.gather(first, second)
    assert pipeline.steps == [["a"], ["a", "b"], ["a", "b"], ["b"]]
    assert pipeline.decoded == [["a"], ["b"]]


async def test_those_who_end_together_are_decoded_together() -> None:
    device, pipeline = loop(), Pipeline()
    found = await asyncio.gather(*(device.run(pipeline, State("x" * n, 2)) for n in (1, 2, 3)))
    assert pipeline.decoded == [["x", "xx", "xxx"]]
    assert [images[0, 0, 0, 0] for images, _ in found] == [1, 2, 3]


async def test_pipelines_alternate_on_one_thread() -> None:
    device, one, two = loop(), Pipeline(), Pipeline()
    await asyncio.gather(device.run(one, State("a", 2)), device.run(two, State("b", 2)))
    assert (one.steps, two.steps) == ([["a"]] * 2, [["b"]] * 2)
    assert one.threads == two.threads
    assert threading.get_ident() not in one.threads


async def test_a_cancelled_request_is_stepped_no_more() -> None:
    device, pipeline = loop(), Pipeline(Turns(0))
    kept = asyncio.ensure_future(device.run(pipeline, State("kept", 3)))
    left = asyncio.ensure_future(device.run(pipeline, State("left", 100)))
    await until(lambda: pipeline.turns.waiting)
    left.cancel()
    await asyncio.sleep(0)
    pipeline.turns.grant(100)
    await kept
    assert pipeline.steps == [["kept", "left"], ["kept"], ["kept"]]
    assert pipeline.decoded == [["kept"]]
    with pytest.raises(asyncio.CancelledError):
        await left


async def test_who_is_cancelled_returns_when_its_step_is_over() -> None:
    """Its weights may go then, and not before."""
    device, pipeline = loop(), Pipeline(Turns(0))
    left = asyncio.ensure_future(device.run(pipeline, State("left", 100)))
    await until(lambda: pipeline.turns.waiting)
    for _ in range(3):
        left.cancel()
        await asyncio.wait([left], timeout=0.01)
        assert not left.done()
    pipeline.turns.grant()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert pipeline.steps == [["left"]]
    assert device.num_running == 0


async def test_the_loop_ends_when_all_have_left_and_begins_again() -> None:
    device, pipeline = loop(), Pipeline(Turns(0))
    left = asyncio.ensure_future(device.run(pipeline, State("left", 100)))
    await until(lambda: pipeline.turns.waiting)
    left.cancel()
    await asyncio.sleep(0)
    pipeline.turns.grant(100)
    await asyncio.wait([left])
    await device.run(pipeline, State("next", 1))
    assert pipeline.steps == [["left"], ["next"]]


@pytest.mark.parametrize("fails_at", [0, 1])
async def test_who_fails_fails_alone(fails_at: int) -> None:
    device, pipeline = loop(), Pipeline()
    good = [State(name, 3) for name in "ab"]
    bad = State("bad", 3, fails_at=fails_at)
    runs = [device.run(pipeline, state) for state in (good[0], bad, good[1])]
    first, error, second = await asyncio.gather(*runs, return_exceptions=True)
    assert str(error) == "bad broke"
    assert not isinstance(first, BaseException)
    assert not isinstance(second, BaseException)
    assert [state.step_index for state in good] == [3, 3]
    assert pipeline.decoded == [["a", "b"]]


async def test_who_cannot_be_decoded_fails_alone() -> None:
    device, pipeline = loop(), Pipeline()
    runs = [
        device.run(pipeline, state) for state in (State("a", 1), State("bad", 1, fails_in_decode=True), State("cc", 1))
    ]
    first, error, last = await asyncio.gather(*runs, return_exceptions=True)
    assert str(error) == "bad cannot be decoded"
    assert isinstance(first, tuple)
    assert isinstance(last, tuple)
    assert (first[0].max(), last[0].max()) == (1, 2)


@pytest.mark.parametrize("changes", [{"solver_fails_at": 1}, {"outcome": ComputationFailed("not finite")}])
async def test_what_the_engine_says_of_one_request_is_its_own(changes: dict[str, Any]) -> None:
    device, pipeline = loop(), Pipeline()
    runs = [device.run(pipeline, state) for state in (State("a", 2), State("bad", 2, **changes), State("cc", 2))]
    first, error, last = await asyncio.gather(*runs, return_exceptions=True)
    assert isinstance(error, ComputationFailed)
    assert isinstance(first, tuple)
    assert isinstance(last, tuple)
    assert pipeline.steps == [["a", "bad", "cc"]] * 2, "nobody ran again"
    assert device.num_running == 0


async def test_requests_beyond_the_bounds_alternate() -> None:
    device, pipeline = loop(), Pipeline(max_rows=2)
    ended: list[str] = []

    async def run(name: str) -> None:
        await device.run(pipeline, State(name, 3))
        ended.append(name)

    await asyncio.gather(*map(run, "abcdef"))
    assert max(map(len, pipeline.steps)) == 2
    assert sorted(ended) == list("abcdef")
    assert len(pipeline.steps) == 9, "every turn is full"


async def test_who_is_cancelled_while_others_have_their_turn_leaves() -> None:
    device, pipeline = loop(), Pipeline(Turns(0), max_rows=1)
    first = asyncio.ensure_future(device.run(pipeline, State("a", 2)))
    waiting = asyncio.ensure_future(device.run(pipeline, State("b", 2)))
    await until(lambda: pipeline.turns.waiting)
    waiting.cancel()
    await asyncio.sleep(0)
    pipeline.turns.grant(100)
    await first
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pipeline.steps == [["a"], ["a"]]


async def test_a_broken_pipeline_leaves_nobody_waiting() -> None:
    class Lossy(Pipeline):
        """Loses an image."""

        def decode(self, states: list[State]) -> list[Any]:
            return super().decode(states)[1:]

    device, pipeline = loop(), Lossy()
    runs = (device.run(pipeline, State(name, 1)) for name in "ab")
    errors = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(error) for error in errors] == [ComputationFailed, ComputationFailed]
    assert "the engine failed" in str(errors[0])
    assert device.num_running == 0
    await device.run(Pipeline(), State("next", 1))


def text_request(name: str, num_tokens: int) -> TextRequest:
    return TextRequest(name, (1, 2), SamplingParams(max_tokens=num_tokens))


class Engine:
    """One token per step and request; `breaks` names a request that the engine gives up in its second step."""

    def __init__(self, turns: Turns | None = None) -> None:
        self.turns = turns or Turns()
        self.running: dict[str, list[int]] = {}
        self.steps: list[list[str]] = []
        self.aborted: list[str] = []
        self.cancelled: list[str] = []
        self.breaks: str | None = None
        self.failures: dict[str, Exception] = {}
        self.error: BaseException | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add_request(self, request: TextRequest) -> None:
        if not request.prompt_token_ids:
            raise ValueError("no tokens")
        self.running[request.request_id] = [0, request.sampling.max_tokens]

    def request_cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def yield_device(self, device: SharedDevice) -> None:
        pass

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running.pop(request_id, None)

    def step(self) -> list[TextDelta]:
        self.turns.take()
        if self.error:
            raise self.error
        self.steps.append(list(self.running))
        self.failures = {}
        deltas = []
        for name, progress in list(self.running.items()):
            progress[0] += 1
            count, most = progress
            if name == self.breaks and count > 1:
                self.failures[name] = ComputationFailed("not finite")
                del self.running[name]
                continue
            reason = "length" if count == most else None
            deltas.append(TextDelta(name, f"{name}{count} ", (count,), 2, count, reason))
            if reason:
                del self.running[name]
        return deltas


async def texts(loop: EngineLoop[TextRequest, TextDelta], request: TextRequest) -> str:
    told: list[str] = []
    await loop.run_request(request, lambda delta: told.append(delta.text))
    return "".join(told)


async def test_each_request_gets_its_own_text() -> None:
    engine = Engine()
    text = EngineLoop(DeviceThread(), engine)
    found = await asyncio.gather(*(texts(text, text_request(name, n)) for name, n in (("a", 3), ("b", 1), ("c", 2))))
    assert found == ["a1 a2 a3 ", "b1 ", "c1 c2 "]
    assert not engine.has_work


async def test_text_requests_join_a_running_batch() -> None:
    engine = Engine(Turns(0))
    text = EngineLoop(DeviceThread(), engine)
    first = asyncio.ensure_future(texts(text, text_request("a", 3)))
    await until(lambda: engine.turns.waiting)
    second = asyncio.ensure_future(texts(text, text_request("b", 1)))
    await asyncio.sleep(0)
    engine.turns.grant(100)
    assert await asyncio.gather(first, second) == ["a1 a2 a3 ", "b1 "]
    assert engine.steps == [["a"], ["a", "b"], ["a"]]


async def test_steps_do_not_wait_for_the_event_loop() -> None:
    engine = Engine(Turns(0))
    text = EngineLoop(DeviceThread(), engine)
    found = asyncio.ensure_future(texts(text, text_request("a", 5)))
    await until(lambda: engine.turns.waiting)
    engine.turns.grant(5)
    wait_until(lambda: not engine.has_work)  # this holds the event loop
    assert engine.steps == [["a"]] * 5
    assert await found == "a1 a2 a3 a4 a5 "


async def test_who_joins_does_not_wait_for_the_event_loop() -> None:
    engine = Engine(Turns(0))
    text = EngineLoop(DeviceThread(), engine)
    first = asyncio.ensure_future(texts(text, text_request("a", 3)))
    await until(lambda: engine.turns.waiting)
    second = asyncio.ensure_future(texts(text, text_request("b", 2)))
    await asyncio.sleep(0)
    engine.turns.grant(3)
    wait_until(lambda: not engine.has_work)  # this holds the event loop
    assert engine.steps == [["a"], ["a", "b"], ["a", "b"]]
    assert await asyncio.gather(first, second) == ["a1 a2 a3 ", "b1 b2 "]


async def test_who_leaves_before_the_next_step_never_joins() -> None:
    engine = Engine(Turns(0))
    text = EngineLoop(DeviceThread(), engine)
    kept = asyncio.ensure_future(texts(text, text_request("kept", 3)))
    await until(lambda: engine.turns.waiting)
    left = asyncio.ensure_future(texts(text, text_request("left", 2)))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.sleep(0)
    engine.turns.grant(3)
    assert await kept == "kept1 kept2 kept3 "
    assert engine.steps == [["kept"]] * 3
    with pytest.raises(asyncio.CancelledError):
        await left


async def test_a_patient_caller_hears_of_the_first_output_and_of_the_others_with_the_last() -> None:
    engine = Engine(Turns(0))
    text = EngineLoop(DeviceThread(), engine)
    told: list[str] = []

    async def listen() -> None:
        async for delta in stream_outputs(text, text_request("a", 4), coalesces=True):
            told.append(delta.text)

    listening = asyncio.ensure_future(listen())
    await until(lambda: engine.turns.waiting)
    engine.turns.grant()
    await until(lambda: told == ["a1 "])
    for _ in range(2):
        engine.turns.grant()
        await until(lambda: engine.turns.waiting)
        await asyncio.sleep(0)
        assert told == ["a1 "], "the event loop had nothing to do for that step"
    engine.turns.grant()
    await listening
    assert told == ["a1 ", "a2 ", "a3 ", "a4 "]


async def test_patience_holds_up_nobody_else_and_no_error() -> None:
    engine = Engine(Turns(0))
    engine.breaks = "b"
    text = EngineLoop(DeviceThread(), engine)
    heard: list[str] = []

    async def listen(name: str, most: int, *, coalesces: bool) -> None:
        async for delta in stream_outputs(text, text_request(name, most), coalesces=coalesces):
            heard.append(delta.text)

    listening = [asyncio.ensure_future(listen(name, 3, coalesces=name != "c")) for name in "abc"]
    await until(lambda: engine.turns.waiting and len(engine.running) > 0)
    engine.turns.grant(100)
    outcomes = await asyncio.gather(*listening, return_exceptions=True)
    assert [heard.count(f"{name}{count} ") for name in "ac" for count in (1, 2, 3)] == [1] * 6
    assert [type(one) for one in outcomes] == [type(None), ComputationFailed, type(None)]


async def test_a_patient_caller_that_leaves_leaves_nothing_for_the_next() -> None:
    engine = Engine(Turns(0))
    text = EngineLoop(DeviceThread(), engine)
    stream = stream_outputs(text, text_request("left", 10**6), coalesces=True)
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: engine.turns.waiting)
    engine.turns.grant(5)  # four of them nobody has been told of
    assert (await first).text == "left1 "
    await until(lambda: len(engine.steps) == 5)
    closing = asyncio.ensure_future(stream.aclose())
    await until(lambda: engine.cancelled == ["left"])
    engine.turns.grant(3)  # the step that is under way, and two of the next request
    await closing
    assert engine.aborted == ["left"]
    assert await texts(text, text_request("b", 2)) == "b1 b2 "


async def test_leaving_early_aborts_the_request() -> None:
    engine = Engine()
    text = EngineLoop(DeviceThread(), engine)
    stream = stream_outputs(text, text_request("a", 10**6))
    assert (await anext(stream)).text == "a1 "
    await stream.aclose()
    assert engine.aborted == ["a"]
    assert not engine.has_work
    assert await texts(text, text_request("b", 2)) == "b1 b2 "


async def test_an_engine_hears_of_who_leaves_while_its_step_still_runs() -> None:
    engine = Engine(Turns(0))
    text = EngineLoop(DeviceThread(), engine)
    left = asyncio.ensure_future(texts(text, text_request("left", 10**6)))
    await until(lambda: engine.turns.waiting)
    left.cancel()
    await until(lambda: engine.cancelled == ["left"])
    assert engine.aborted == [], "the step still runs"
    engine.turns.grant(2)
    with pytest.raises(asyncio.CancelledError):
        await left
    assert engine.aborted == ["left"]


async def test_a_cancelled_listener_aborts_only_itself() -> None:
    engine = Engine(Turns(0))
    text = EngineLoop(DeviceThread(), engine)
    left = asyncio.ensure_future(texts(text, text_request("left", 10**6)))
    kept = asyncio.ensure_future(texts(text, text_request("kept", 3)))
    await until(lambda: engine.turns.waiting)
    engine.turns.grant()
    await until(lambda: engine.turns.waiting)
    left.cancel()
    engine.turns.grant(1000)
    assert await kept == "kept1 kept2 kept3 "
    with pytest.raises(asyncio.CancelledError):
        await left
    await until(lambda: not engine.has_work)


async def test_a_cancelled_listener_stays_until_its_step_is_over() -> None:
    """Its weights may go then, and not before: whether it waits for a token or for its abort."""
    engine = Engine(Turns(0))
    text = EngineLoop(DeviceThread(), engine)
    left = asyncio.ensure_future(texts(text, text_request("left", 10**6)))
    await until(lambda: engine.turns.waiting)
    for _ in range(3):
        left.cancel()
        await asyncio.wait([left], timeout=0.01)
        assert not left.done()
    engine.turns.grant(100)
    with pytest.raises(asyncio.CancelledError):
        await left
    assert (engine.aborted, engine.has_work) == (["left"], False)


async def test_a_caller_of_the_device_who_is_cancelled_stays_until_it_is_done() -> None:
    device, turns, done = DeviceThread(), Turns(0), []

    def work() -> None:
        turns.take()
        done.append(True)

    caller = asyncio.ensure_future(device.run_work(work))
    await until(lambda: turns.waiting)
    for _ in range(3):
        caller.cancel()
        await asyncio.wait([caller], timeout=0.01)
        assert not caller.done()
    turns.grant()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == [True]


async def test_what_the_engine_gives_up_is_an_error_for_its_own_request() -> None:
    engine = Engine()
    engine.breaks = "bad"
    text = EngineLoop(DeviceThread(), engine)
    good, bad = await asyncio.gather(
        texts(text, text_request("good", 3)), texts(text, text_request("bad", 3)), return_exceptions=True
    )
    assert good == "good1 good2 good3 "
    assert isinstance(bad, ComputationFailed)
    assert str(bad) == "not finite"


async def test_an_engine_failure_reaches_everyone_and_the_next_request_works() -> None:
    engine = Engine()
    engine.error = MemoryError("no blocks")
    text = EngineLoop(DeviceThread(), engine)
    runs = [texts(text, text_request(name, 3)) for name in "abc"]
    errors = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(error) for error in errors] == [ComputationFailed] * 3
    assert "the engine failed: no blocks" in str(errors[0])
    assert not engine.has_work
    engine.error = None
    assert await texts(text, text_request("d", 1)) == "d1 "


@pytest.mark.parametrize("error", [StopIteration(), Panic("a key")])
async def test_an_error_that_no_future_takes_is_told_to_its_request(error: BaseException) -> None:
    class Gives(Engine):
        """Says of each request that it failed so."""

        def step(self) -> list[TextDelta]:
            self.failures = dict.fromkeys(self.running, error)  # type: ignore[arg-type]
            self.running = {}
            return []

    async with asyncio.timeout(WAIT_S):
        with pytest.raises(Panicked, match=type(error).__name__):
            await texts(EngineLoop(DeviceThread(), Gives()), text_request("a", 1))


async def test_a_panic_of_the_engine_reaches_everyone_and_the_next_request_works() -> None:
    engine = Engine()
    engine.error = Panic("no entry found for key")
    text = EngineLoop(DeviceThread(), engine)
    async with asyncio.timeout(WAIT_S):
        errors = await asyncio.gather(*(texts(text, text_request(name, 3)) for name in "abc"), return_exceptions=True)
        assert [type(error) for error in errors] == [ComputationFailed] * 3
        assert str(errors[0]) == "the engine failed: Panic: no entry found for key"
        engine.error = None
        assert await texts(text, text_request("d", 1)) == "d1 "


async def test_a_panic_over_one_request_is_its_own() -> None:
    class Choosy(Engine):
        """Panics over one request when it joins."""

        def add_request(self, request: TextRequest) -> None:
            if request.request_id == "bad":
                raise Panic("out of range")
            super().add_request(request)

    def on_output(delta: TextDelta) -> None:
        raise Panic("no listener")

    text = EngineLoop(DeviceThread(), Choosy())
    async with asyncio.timeout(WAIT_S):
        good, bad, unheard = await asyncio.gather(
            texts(text, text_request("good", 2)),
            texts(text, text_request("bad", 2)),
            text.run_request(text_request("unheard", 2), on_output),
            return_exceptions=True,
        )
    assert good == "good1 good2 "
    assert [(type(error), str(error)) for error in (bad, unheard)] == [
        (Panicked, "Panic: out of range"),
        (Panicked, "Panic: no listener"),
    ]


async def test_an_answer_that_makes_no_sense_reaches_everyone() -> None:
    class Confused(Engine):
        """Gives something else than deltas."""

        def step(self) -> list[TextDelta]:
            super().step()
            return [None]  # type: ignore[list-item]

    with pytest.raises(ComputationFailed):
        await texts(EngineLoop(DeviceThread(), Confused()), text_request("a", 1))


async def test_a_request_that_is_refused_leaves_nothing_behind() -> None:
    engine = Engine()
    text = EngineLoop(DeviceThread(), engine)
    with pytest.raises(ValueError, match="no tokens"):
        await texts(text, TextRequest("x", ()))
    assert await texts(text, text_request("x", 1)) == "x1 "


def test_who_leaves_an_engine_has_no_share_of_it_any_more() -> None:
    engine = DiffusionEngine(Pipeline(), costs_of_merging())  # type: ignore[arg-type]
    for name, num_steps in (("left", 50), ("moved", 40), ("kept", 30)):
        request = DiffusionRequest(name, 2, 2, num_steps, 1.0, 0)
        engine.add_request(ConditionedRequest(request, State(name, num_steps)))  # type: ignore[arg-type]
    assert len(engine._order._ends) == 3
    engine.abort("left")
    assert engine.migrate_out("moved") is not None
    assert engine._order._ends == [engine._requests["kept"].fair_end]


class Timed(Engine):
    """An engine whose steps take as long as `step_s` says, on the clock that is `now_s`."""

    def __init__(self, clock: list[float], step_s: float, turns: Turns | None = None) -> None:
        super().__init__(turns)
        self.clock, self.step_s = clock, step_s
        self.told: list[float | None] = []

    def yield_device(self, device: SharedDevice) -> None:
        step_s = device.others_step_s
        self.told.append(step_s and round(step_s, 6))

    def step(self) -> list[TextDelta]:
        self.clock[0] += self.step_s
        return super().step()


async def test_an_engine_is_told_what_the_steps_of_another_one_with_work_take() -> None:
    clock = [0.0]
    device = DeviceThread(lambda: clock[0])
    long, short = Timed(clock, 1.4), Timed(clock, 0.01, Turns(1))
    loop, other = EngineLoop(device, long), EngineLoop(device, short)
    await texts(loop, text_request("alone", 3))
    assert long.told == [None] * 3
    images = asyncio.ensure_future(texts(other, text_request("image", 50)))
    await until(lambda: len(short.steps) == 1 and short.turns.waiting)  # in its second step
    long.told.clear()
    text = asyncio.ensure_future(texts(loop, text_request("beside", 2)))
    await until(lambda: device.is_wanted)
    short.turns.grant(49)
    await asyncio.gather(images, text)
    assert long.told[0] == 0.01
    await until(lambda: device.others_step_s(loop._steps) is None)  # its loop has ended too
    long.told.clear()
    await texts(loop, text_request("alone again", 3))
    assert long.told == [None] * 3
    short.error = RuntimeError("the device is gone")
    short.turns.grant()
    with pytest.raises(ComputationFailed):
        await texts(other, text_request("image", 1))
    await until(lambda: device.others_step_s(loop._steps) is None)
    await texts(loop, text_request("after a failure", 2))
    assert long.told[3:] == [None, None]
