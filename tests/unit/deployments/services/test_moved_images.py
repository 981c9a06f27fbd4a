"""Images that a replica hands over: another one goes on with them after their last step, to the same images."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.deployments.engine_loops import stream_images

from configs.cluster import WorkerConfig
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import ComponentBuilder
from deployments.records import ImageProgress, ImageRequest, ImageResult
from deployments.replicas.step_loop import DeviceThread
from deployments.services.image_service import ImageService
from deployments.text.fallback import FallbackEncoder

pytestmark = pytest.mark.slow  # imports diffusers

FLUX = Path(__file__).parents[4] / "infra" / "demo" / "models" / "digits-flux"
NUM_STEPS = 6


def request_of(seed: int, **fields: Any) -> ImageRequest:
    return ImageRequest(
        model="flux",
        prompt=f"a handwritten {seed % 10}",
        seed=seed,
        width=16,
        height=16,
        guidance_scale=1.0,
        num_inference_steps=NUM_STEPS,
        **fields,
    )


may_go = threading.Event()
_hold_at = NUM_STEPS + 1


def hold_engines(at_step: int) -> None:
    global _hold_at
    _hold_at = at_step
    may_go.clear()


@pytest.fixture(autouse=True)
def _held_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine wait when a request has had so many steps: it would go on while the test looks."""
    step = DiffusionEngine.step

    def held(self: DiffusionEngine) -> Any:
        if any(running.state.step_index >= _hold_at for running in self._requests.values()):
            assert may_go.wait(60)
        return step(self)

    monkeypatch.setattr(DiffusionEngine, "step", held)
    hold_engines(NUM_STEPS + 1)


class Replica:
    def __init__(self, cache: ModuleCache) -> None:
        thread = DeviceThread()
        self.cache = cache
        self.encode = FallbackEncoder(cache, thread).condition
        self.images = ImageService(cache, WorkerConfig(), thread)

    async def pieces(self, request: ImageRequest, move_at: int | None = None, **more: Any) -> list[Any]:
        """Return all pieces; everything is handed over once step `move_at` was told."""
        found = []
        if move_at is not None:
            hold_engines(at_step=move_at)
        async with asyncio.timeout(60), stream_images(self.images, request, self.encode, **more) as pieces:
            async for piece in pieces:
                found.append(piece)
                if isinstance(piece, ImageProgress) and piece.step == move_at:
                    self.images.migrate_out(["flux"])
                    may_go.set()
        return found

    @property
    def num_leased(self) -> int:
        return sum(slot.leases for slot in self.cache._modules.slots.values())


@pytest.fixture
def replicas(open_host: Callable[..., ModuleCache]) -> list[Replica]:
    return [Replica(open_host(ComponentBuilder(WorkerConfig()), {"flux": FLUX})) for _ in range(2)]


async def test_images_that_are_handed_over_are_those_of_an_undisturbed_replica(replicas: list[Replica]) -> None:
    first, second = replicas
    requests = [request_of(seed, reports_steps=True) for seed in range(2)]
    expected = [(await second.pieces(one))[-1].images[0] for one in requests]
    moved = await asyncio.gather(*(first.pieces(one, move_at=3) for one in requests))
    assert first.images.num_running == first.num_leased == 0
    for request, pieces, image in zip(requests, moved, expected, strict=True):
        last = pieces[-1]
        assert last.is_moved
        assert last.step < NUM_STEPS
        assert [piece.step for piece in pieces[:-1]] == list(range(1, last.step + 1))
        *steps, result = await second.pieces(request, checkpoint=last.checkpoint)
        assert [piece.step for piece in steps] == list(range(last.step + 1, NUM_STEPS + 1))
        assert isinstance(result, ImageResult)
        assert np.array_equal(result.images[0], image)
    hold_engines(NUM_STEPS + 1)
    assert isinstance((await first.pieces(request_of(9)))[-1], ImageResult)  # what comes later stays


async def test_one_that_has_not_begun_is_handed_over_without_a_checkpoint_or_with_its_own(
    replicas: list[Replica],
) -> None:
    first = replicas[0]
    *_, middle = await first.pieces(request_of(1, reports_steps=True), move_at=2)
    assert middle.checkpoint
    for checkpoint in (None, middle.checkpoint):
        stream = stream_images(first.images, request_of(1), first.encode, checkpoint=checkpoint)
        task = asyncio.ensure_future(anext(stream))
        while not first.images._moving:
            await asyncio.sleep(0)  # it looks its model up
        first.images.migrate_out(["another"])
        first.images.migrate_out(["flux"])
        piece = await task
        assert isinstance(piece, ImageProgress)
        assert (piece.is_moved, piece.checkpoint) == (True, checkpoint)
        assert [piece async for piece in stream] == []
    assert first.num_leased == 0


async def test_one_that_has_had_its_last_step_stays(replicas: list[Replica]) -> None:
    pieces = await replicas[0].pieces(request_of(2, reports_steps=True), move_at=NUM_STEPS)
    assert isinstance(pieces[-1], ImageResult)
