"""Ten thousand requests for images that come, are cancelled, disconnect, fail and move at random leave nothing behind.

The service, its engine, its loop and the leases of its weights are real; the pipeline computes nothing.
"""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.waiting import until
from unit.deployments.engine_loops import stream_images

from configs.cluster import WorkerConfig
from deployments.engines.diffusion.rows import Work
from deployments.engines.records.protocol import ComputationFailed, EngineError
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import ComponentBuilder
from deployments.records import CacheUse, ImageProgress, ImageRequest, ImageResult, LoraUse
from deployments.replicas.step_loop import DeviceThread
from deployments.services.image_service import ImageService
from deployments.text.requests import Conditioning, pack

pytestmark = pytest.mark.slow  # imports diffusers

FLUX = Path(__file__).parents[4] / "infra" / "demo" / "models" / "digits-flux"
SICK = ("start", "text", "step", "solver", "decode")
WAYS = ("answered", "moved", "left", "told to end", *SICK)  # to end


@dataclass(eq=False)
class State:
    """`sickness` is where it fails, "" nowhere. It holds memory, as the real one does."""

    request: Any
    sickness: str
    latents: torch.Tensor = field(default_factory=lambda: torch.zeros(64))
    step_index: int = 0
    failure: Exception | None = None
    preview_at: tuple[int, ...] = ()
    expected: None = None
    is_extrapolated: bool = False

    @property
    def num_steps(self) -> int:
        return int(self.request.num_inference_steps)

    @property
    def num_forwards_left(self) -> int:
        return self.num_steps - self.step_index

    @property
    def done(self) -> bool:
        return self.step_index >= self.num_steps


class Pipeline:
    """As the real one: when a step raises, no state has moved; one whose own solver fails moves no more."""

    device = torch.device("cpu")

    def start_request(self, request: Any, conditioning: Any, adapters: Any) -> State:
        sickness = ("", *SICK)[int(conditioning["sickness"])]
        if sickness == "start":
            raise EngineError("start")
        return State(request, sickness)

    def step_work(self, state: State) -> Work:
        return Work(frozenset(["step"]), "step", 1, 64)

    def decode_work(self, state: State) -> Work:
        return Work(frozenset(["decode"]), "decode", 1, 64)

    def step(self, states: list[State], check: Callable[[], None] = lambda: None) -> None:
        check()
        if any(state.sickness == "step" and state.step_index == 1 for state in states):
            raise ComputationFailed("step")
        for state in states:
            if state.sickness == "solver":
                state.failure = ComputationFailed("solver")
            else:
                state.step_index += 1

    def decode(self, states: list[State]) -> list[Any]:
        if any(state.sickness == "decode" for state in states):
            raise ComputationFailed("decode")
        return [np.zeros((1, 2, 2, 3), np.uint8) for _ in states]


class Client:
    """One request, and how it ends by itself: `leave_after` so many pieces its client is gone."""

    def __init__(self, studio: Studio, chance: random.Random, number: int) -> None:
        self.sickness = chance.choice(SICK) if chance.random() < 0.08 else ""
        self._leave_after = chance.randrange(3) if chance.random() < 0.2 else 100
        # Some texts come only later, others never.
        self._text_pauses = chance.choices((0, 1, 10**9), (0.7, 0.28, 0.02))[0]
        self.is_encoding = False
        self._request = ImageRequest(
            model="flux",
            prompt="x",
            seed=number,
            width=16,
            height=16,
            num_inference_steps=chance.randrange(2, 7),
            guidance_scale=1.0,
            reports_steps=True,
        )
        self.task = asyncio.ensure_future(self._follow(studio.images))

    @property
    def ends_by_itself(self) -> bool:
        return self._text_pauses <= 1

    async def _encode(self, _: Any) -> Conditioning:
        self.is_encoding = True
        try:
            if self._text_pauses > 1:
                await asyncio.Event().wait()
            for _ in range(self._text_pauses):
                await asyncio.sleep(0)
        finally:
            self.is_encoding = False
        if self.sickness == "text":
            raise ComputationFailed("text")
        place = ("", *SICK).index(self.sickness)
        return Conditioning(pack({"sickness": torch.tensor(place)}), 0.0, CacheUse(0, 0), ())

    async def _follow(self, images: ImageService) -> str:
        """Return how it ended."""
        count = 0
        async with stream_images(images, self._request, self._encode) as pieces:
            async for piece in pieces:
                if isinstance(piece, ImageResult):
                    return "answered"
                if isinstance(piece, ImageProgress) and piece.is_moved:
                    return "moved"
                count += 1
                if count > self._leave_after:
                    return "left"
        raise AssertionError("a stream ends with its result")


class Studio:
    def __init__(self, cache: ModuleCache) -> None:
        self.cache = cache
        self.images = ImageService(cache, WorkerConfig(), DeviceThread())

    @property
    def slots(self) -> list[Any]:
        return list(self.cache._modules.slots.values())

    @property
    def engine(self) -> Any:
        (bound,) = [one for one in self.cache._modules.pipelines._bound.values() if hasattr(one, "engine")]
        return bound


@pytest.fixture
def studio(open_host: Callable[..., ModuleCache], monkeypatch: pytest.MonkeyPatch) -> Studio:
    monkeypatch.setattr("deployments.services.image_service.create_pipeline", lambda *_, **__: Pipeline())
    monkeypatch.setattr("deployments.engines.diffusion.engine.save_checkpoint", lambda *_: b"checkpoint")
    return Studio(open_host(ComponentBuilder(WorkerConfig()), {"flux": FLUX}))


def outcome_of(client: Client) -> str:
    if client.task.cancelled():
        return "cancelled"
    error = client.task.exception()
    if error is None:
        assert not client.sickness or client.task.result() in ("left", "moved")
        return client.task.result()
    assert client.sickness
    assert client.sickness in str(error)
    return client.sickness


@pytest.mark.parametrize("num_events", [1_200, pytest.param(10_000, marks=pytest.mark.long)])
async def test_random_events_leave_no_slot_memory_or_lease(studio: Studio, num_events: int) -> None:
    chance, ends, running, leaving = random.Random(17), Counter[str](), list[Client](), list[Client]()
    await asyncio.wait_for(Client(studio, random.Random(1), 0).task, 60)  # builds the model
    for number in range(10 * num_events):
        if number >= num_events and min(ends[how] for how in WAYS) > num_events // 2_000:
            break  # what a request meets hangs on the pace of the machine: a rare end may want some events more
        dice = chance.random()
        if dice < 0.55 or not running:
            running.append(Client(studio, chance, number))
        elif dice < 0.99:
            chosen = chance.choice(running)
            if not chosen.sickness or chance.random() < 0.3:  # the others are to fail
                running.remove(chosen)
                leaving.append(chosen)
                chosen.task.cancel()
                ends["told to end"] += 1
        else:
            studio.images.migrate_out(["flux"])
        if chance.random() < 0.3:
            await asyncio.sleep(0)
        ending = [client.task for client in running if client.ends_by_itself]
        if ending and chance.random() < 0.02:  # else all come before the first step, on some machines
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        ends.update(outcome_of(client) for client in running if client.task.done())
        running = [client for client in running if not client.task.done()]
        leaving = [client for client in leaving if not client.task.done() or client.is_encoding]
        # Whoever has ended has no slot: not even until its own steps would be done.
        assert len(studio.engine.engine._requests) <= len(running) + len(leaving)
    for client in running:
        client.task.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.task for client in (*running, *leaving)), return_exceptions=True)
        while any(client.is_encoding for client in (*running, *leaving)):
            await asyncio.sleep(0.001)
    assert min(ends[how] for how in WAYS) > num_events // 2_000, ends

    loop, engine = studio.engine.loop, studio.engine.engine
    assert (len(engine._requests), len(loop._callers), len(loop._joining)) == (0, 0, 0)
    assert not studio.images._migrations
    assert [slot.leases for slot in studio.slots] == [0] * len(studio.slots)
    assert [slot.num_running for slot in studio.slots] == [0] * len(studio.slots)
    states = [weakref.ref(one) for one in gc.get_objects() if type(one) is State]
    running = leaving = client = chosen = ending = None  # type: ignore[assignment]  # what they name would live on

    def num_left() -> int:
        gc.collect()
        return sum(ref() is not None for ref in states)

    # The engine tells the failures of its last step, whose errors know where they came from. Its thread may still be
    # on the way out of that.
    await until(lambda: num_left() <= max(1, len(engine.failures)))
    assert studio.cache.evict("flux") == []
    assert not +studio.cache._provider.leases  # type: ignore[attr-defined]


async def test_a_text_that_is_encoded_for_nothing_is_cancelled(studio: Studio) -> None:
    client = Client(studio, random.Random(1), 0)
    client._text_pauses = 10**9
    client._request = client._request.model_copy(update={"lora": (LoraUse(name="nothing"),)})  # no such adapter
    with pytest.raises(KeyError, match="nothing"):
        await asyncio.wait_for(client.task, 60)
    await until(lambda: not client.is_encoding)
