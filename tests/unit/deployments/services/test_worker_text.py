"""Text of a worker: prompts are tokenized beside the device thread, so that no step waits for a template."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.engines.records.protocol import SharedDevice, TextDelta, TextRequest
from deployments.records import ChatRequest, CompletionRequest, EmbeddingRequest, SwitchReport
from deployments.replicas.step_loop import DeviceThread
from deployments.services.text_service import INLINE_CHARACTERS, TextService, _is_short
from deployments.services.worker import Worker


class Engine:
    """Ends each request at its first step. Tokenizing a prompt that begins with "long" takes until `gate` is set."""

    max_model_len = 100

    def __init__(self) -> None:
        self.generation_defaults: dict[str, float] = {}
        self.gate = threading.Event()
        self.is_tokenizing = threading.Event()
        self.threads: dict[str, str] = {}
        self.failures: dict[str, Exception] = {}
        self._waiting: list[TextRequest] = []

    def encode_text(self, text: str) -> tuple[int, ...]:
        self.threads["encode"] = threading.current_thread().name
        if text.startswith("long"):
            self.is_tokenizing.set()
            assert self.gate.wait(30)
        return (1, 2, 3)

    def add_request(self, request: TextRequest) -> None:
        self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def yield_device(self, device: SharedDevice) -> None:
        pass

    def step(self) -> list[TextDelta]:
        self.threads["step"] = threading.current_thread().name
        done, self._waiting = self._waiting, []
        return [TextDelta(request.request_id, "done", (4,), 3, 1, "stop") for request in done]


def worker_with(engine: Engine) -> Worker:
    """Return the parts of a worker that `stream_text` uses, without Ray."""
    loops: list[Any] = []

    def bound(make: Callable[[], Any]) -> Any:
        loops[:] = loops or [make()]
        return loops[0]

    lease = SimpleNamespace(modules={"model": engine}, bound=bound, report=SwitchReport("m", 1.0, 0.5, 0.5, 10, (), ()))

    @asynccontextmanager
    async def leased(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield lease

    worker = Worker.__new__(Worker)
    worker._module_cache = SimpleNamespace(lease=leased)  # type: ignore[assignment]
    nothing = {f"count_{what}": lambda *_: None for what in ("attached", "request", "steps")}
    worker._metrics = SimpleNamespace(**nothing)  # type: ignore[assignment]
    worker._device = DeviceThread()
    worker._texts = TextService(worker._module_cache, worker._device)
    return worker


async def test_a_prompt_that_takes_long_to_tokenize_holds_no_step_up() -> None:
    engine = Engine()
    worker = worker_with(engine)
    loop = asyncio.get_running_loop()
    short = await worker.write_text(CompletionRequest(model="m", prompt="short"))
    assert short.text == "done"
    assert engine.threads["encode"] == threading.current_thread().name, "not worth the way to a thread and back"
    assert engine.threads["step"].rpartition("_")[0] == "device"
    long = asyncio.create_task(worker.write_text(CompletionRequest(model="m", prompt="long" * INLINE_CHARACTERS)))
    assert await loop.run_in_executor(None, engine.is_tokenizing.wait, 30)
    assert engine.threads["encode"].rpartition("_")[0] == "tokenize"
    async with asyncio.timeout(5):
        assert await worker._device.run_work(lambda: "a step") == "a step"
    engine.threads.clear()
    behind = asyncio.create_task(worker.write_text(CompletionRequest(model="m", prompt="short")))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not engine.threads, "a tokenizer has one thread at a time"
    engine.gate.set()
    assert (await long).text == "done"
    assert (await behind).text == "done"
    assert engine.threads["encode"].rpartition("_")[0] == "tokenize"


SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(*contents: str, **options: Any) -> ChatRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatRequest.model_validate({"model": "m", "messages": messages} | options)


@pytest.mark.parametrize(
    ("request_", "is_short"),
    [
        (chat("What is 12 + 7?"), True),
        (chat("x" * INLINE_CHARACTERS), False),
        (chat(*["x"] * INLINE_CHARACTERS), False),  # each turn takes its time
        (chat("x", response_format=SCHEMA), False),  # a grammar is compiled
        (chat("x", tools=[TOOL]), False),
        (chat("x", messages=[{"role": "assistant", "content": "", "tool_calls": [CALL]}]), False),
        (CompletionRequest(model="m", prompt="x"), True),
        (CompletionRequest(model="m", prompt=["x"] * INLINE_CHARACTERS), False),
        (CompletionRequest(model="m", prompt=[[1, 2, 3]]), True),
        (EmbeddingRequest(model="m", input=((1, 2), (3,))), True),
        (EmbeddingRequest(model="m", input=("",) * INLINE_CHARACTERS), False),
    ],
)
def test_the_event_loop_reads_what_takes_no_time(request_: Any, is_short: bool) -> None:
    assert _is_short(request_) is is_short
