"""However a stream of text ends, the weights stay leased until no step of it runs any more. Real engine and host."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.cluster import WorkerConfig
from deployments.modules.loading import ComponentBuilder, is_denoise_component
from deployments.records import ChatRequest
from deployments.replicas.step_loop import DeviceThread
from deployments.services.text_service import TextService
from deployments.services.worker import Worker

pytestmark = pytest.mark.slow  # imports transformers

MODELS = Path(__file__).parents[4] / "infra" / "demo" / "models"
WAIT_S = 10
REQUEST = ChatRequest(model="adder", messages=({"role": "user", "content": "What is 12 + 7?"},), temperature=0)


class ListedMetrics:
    """A stand-in for RequestMetrics, which need Ray. `kinds` are those of the counted requests."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def count_request(self, kind: str, *arguments: Any) -> None:
        self.kinds.append(kind)

    def count_attached(self, *arguments: Any) -> None: ...
    def count_steps(self, *arguments: Any) -> None: ...


class Gate:
    """Holds the steps of the engine once it is closed. `leases`: how many its weights had after each held step."""

    def __init__(self, engine: Any, num_leases: Callable[[], int]) -> None:
        self._step = engine.step
        self._num_leases = num_leases
        self._open = threading.Event()
        self._open.set()
        self._free_steps = 0
        self.held = threading.Event()
        self.leases: list[int] = []
        engine.step = self.step

    def close(self, after_steps: int = 0) -> None:
        self._free_steps = after_steps
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def step(self) -> Any:
        if self._free_steps:
            self._free_steps -= 1
        elif not self._open.is_set():
            self.held.set()
            assert self._open.wait(WAIT_S)
            self.leases.append(self._num_leases())
        return self._step()


@pytest.fixture
def worker(open_host: Callable[..., Any]) -> Worker:
    worker = object.__new__(Worker)  # what its constructor does needs a cluster
    worker._module_cache = open_host(ComponentBuilder(WorkerConfig()), {"adder": MODELS / "adder"})
    worker._device = DeviceThread()
    worker._texts = TextService(worker._module_cache, worker._device)
    worker._metrics = ListedMetrics()  # type: ignore[assignment]
    return worker


async def gated(worker: Worker) -> Gate:
    async with worker._module_cache.lease("adder", is_denoise_component) as lease:
        engine = lease.modules["model"]
    return Gate(engine, lambda: num_leases(worker))


def counted(worker: Worker) -> list[str]:
    return worker._metrics.kinds  # type: ignore[attr-defined]


def num_leases(worker: Worker) -> int:
    return sum(slot.leases for slot in worker._module_cache._modules.slots.values())


async def first_piece(worker: Worker, gate: Gate) -> Any:
    """A stream that gave all there was, and whose next step is held."""
    gate.close(after_steps=1)
    stream = worker.stream_text(REQUEST)
    await anext(stream)
    assert await asyncio.to_thread(gate.held.wait, WAIT_S)
    return stream


async def ended(worker: Worker, gate: Gate, ending: asyncio.Task[Any]) -> None:
    """`ending` waits for the held step; after it nothing is leased and nothing runs."""
    await asyncio.wait([ending], timeout=0.05)
    assert not ending.done()
    assert num_leases(worker) == 1
    gate.open()
    await asyncio.wait([ending], timeout=WAIT_S)
    assert ending.done()
    assert gate.leases == [1]
    assert num_leases(worker) == 0
    async with worker._module_cache.lease("adder", is_denoise_component) as lease:
        assert not lease.modules["model"].has_work


async def test_a_stream_that_is_closed_early(worker: Worker) -> None:
    gate = await gated(worker)
    stream = await first_piece(worker, gate)
    await ended(worker, gate, asyncio.create_task(stream.aclose()))
    assert counted(worker) == []  # it was not answered
    whole = await worker.write_text(REQUEST)
    assert whole.text == "19."
    assert counted(worker) == ["text"]
    assert "".join([chunk.text async for chunk in worker.stream_text(REQUEST)]) == "19."
    assert counted(worker) == ["text", "text"]


async def test_a_stream_that_is_cancelled_while_it_waits(worker: Worker) -> None:
    gate = await gated(worker)
    stream = await first_piece(worker, gate)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0)
    await ended(worker, gate, waiting)
    assert waiting.cancelled()


async def test_a_whole_text_that_is_cancelled(worker: Worker) -> None:
    gate = await gated(worker)
    gate.close()
    writing = asyncio.create_task(worker.write_text(REQUEST))
    assert await asyncio.to_thread(gate.held.wait, WAIT_S)
    writing.cancel()
    await ended(worker, gate, writing)
    assert writing.cancelled()


async def test_a_stream_that_nobody_holds_any_more(worker: Worker) -> None:
    """The event loop closes a generator that is collected."""
    gate = await gated(worker)
    stream = await first_piece(worker, gate)
    before = asyncio.all_tasks()
    del stream
    gc.collect()
    await asyncio.sleep(0)
    (closing,) = asyncio.all_tasks() - before
    await ended(worker, gate, closing)


async def test_a_caller_who_is_cancelled_while_its_prompt_is_read(worker: Worker) -> None:
    gate = await gated(worker)
    go, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go.wait(WAIT_S)

    holding = asyncio.wrap_future(worker._texts._tokenizing.submit(hold))
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    writing = asyncio.create_task(worker.write_text(REQUEST))
    while not num_leases(worker):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    writing.cancel()
    await asyncio.wait([writing], timeout=0.05)
    assert num_leases(worker) == (0 if writing.done() else 1)
    go.set()
    await asyncio.wait([writing, holding], timeout=WAIT_S)
    assert num_leases(worker) == 0
    assert gate.leases == []
