"""Turns of stock pipelines: at blocks while others wait, and what a call changes in shared modules is its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.clips import VIDEOS
from kit.tiny.pipelines import PIPELINES, make, saved
from kit.waiting import until, wait_until
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from unit.deployments.engine_loops import last_output
from unit.deployments.engines.stock.test_stock_pipelines import PROMPT, load, one_thread, split, stock_images

from deployments.engines.records.protocol import SharedDevice, StockRequest, TextDelta
from deployments.engines.stock.borrowed_modules import BorrowedModules, blocks_of
from deployments.engines.stock.engine import StockEngine
from deployments.engines.stock.loading import StockModel
from deployments.replicas.step_loop import DeviceThread, EngineLoop

__all__ = ["one_thread"]
PAG = "StableDiffusionPAGPipeline"
CHAT_CALLS = 60  # a chat's step, in calls of modules


def interleaved(engines: dict[str, StockEngine], requests: dict[str, StockRequest]) -> tuple[dict[str, Any], int]:
    """Run a request in each engine, a turn at a time; returns the last outputs, and how often turns alternated."""
    for name, engine in engines.items():
        engine.add_request(requests[name])
    found: dict[str, Any] = {}
    num_rounds = 0
    while any(engine.has_work for engine in engines.values()):
        num_rounds += 1
        for name, engine in engines.items():
            if engine.has_work:
                for output in engine.step():
                    found[name] = output
                assert not engine.failures, engine.failures
    return found, num_rounds


def test_a_pipeline_that_changes_its_modules_takes_turns_with_one_that_does_not(tmp_path: Path) -> None:
    stock, seed = make(PAG, tmp_path), int(seeded_rng().integers(2**32))
    model = load(tmp_path)
    plain = StockModel("StableDiffusionPipeline", tmp_path, model.modules)
    given = split(PAG, {"height": 16, "width": 16})
    requests = {"pag": StockRequest("a", seed, PROMPT, **split(PAG, PIPELINES[PAG][1]))}
    requests["plain"] = StockRequest("b", seed, PROMPT, **given)
    found, num_rounds = interleaved({"pag": StockEngine(model), "plain": StockEngine(plain)}, requests)
    assert num_rounds > 30  # within the modules, and not only at their calls
    parts = {name: part for name, part in stock.components.items() if name != "image_encoder"}
    other = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    np.testing.assert_array_equal(found["pag"].images, stock_images(stock, PIPELINES[PAG][1], seed))
    np.testing.assert_array_equal(found["plain"].images, stock_images(other, {"height": 16, "width": 16}, seed))
    assert (found["pag"].images != found["plain"].images).any()


def test_two_videos_may_be_decoded_by_a_vae_that_keeps_the_frames_before_in_itself(tmp_path: Path) -> None:
    build, options = VIDEOS["WanPipeline"]
    stock = saved(build, tmp_path)
    model = load(tmp_path)
    requests = {
        name: StockRequest(name, seed, PROMPT, **split("WanPipeline", {**options, "num_frames": frames}))
        for name, seed, frames in (("one", 3, 9), ("two", 4, 5))
    }
    found, _ = interleaved({name: StockEngine(model) for name in requests}, requests)
    for name, request in requests.items():
        generator = torch.Generator("cpu").manual_seed(request.seed)
        given = {**options, **request.extra, "num_inference_steps": 2}
        frames = stock(PROMPT, generator=generator, output_type="np", **given).frames[0]
        np.testing.assert_array_equal(found[name].images, (frames * 255).round().astype(np.uint8))


class Memory:
    """Books of a device with room for so many bytes of forwards."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.lent: list[int] = []
        self.most = self.num_refused = 0

    @property
    def is_lending(self) -> bool:
        return bool(self.lent)

    def room_bytes(self) -> float:
        self.num_refused += sum(self.lent) > self.nbytes // 2
        return self.nbytes - sum(self.lent)

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[None]:
        self.lent.append(nbytes)
        self.most = max(self.most, sum(self.lent))
        try:
            yield
        finally:
            self.lent.remove(nbytes)


@pytest.mark.drawn
@pytest.mark.parametrize("room", [10, 20])
def test_a_call_waits_for_memory_that_another_has_at_its_pause(tmp_path: Path, room: int) -> None:
    stock, seed = make(PAG, tmp_path), int(seeded_rng().integers(2**32))
    model, memory = load(tmp_path), Memory(room)
    given = split(PAG, PIPELINES[PAG][1])
    planned = {"unet.forward": 7, "vae.decode": 9}
    requests = {name: StockRequest(name, seed, PROMPT, **given, forward_bytes=planned) for name in ("a", "b")}
    found, _ = interleaved({name: StockEngine(model, memory=memory) for name in requests}, requests)
    expected = stock_images(stock, PIPELINES[PAG][1], seed)
    for output in found.values():
        np.testing.assert_array_equal(output.images, expected)
    assert not memory.lent
    assert memory.most <= room
    assert memory.most > 9 if room == 20 else memory.num_refused > 9  # within modules, if both have room
    assert not any(vars(module).keys() & {"forward", "decode"} for module in model.modules.values())


def test_what_a_call_has_lent_is_given_back_when_it_is_left(tmp_path: Path) -> None:
    make(PAG, tmp_path)
    memory = Memory(10)
    engine = StockEngine(load(tmp_path), memory=memory)
    request = StockRequest("a", 1, PROMPT, **split(PAG, PIPELINES[PAG][1]), forward_bytes={"unet.forward": 7})
    engine.add_request(request)
    while not memory.lent:
        engine.step()
    engine.abort("a")
    assert not memory.lent


class Counted:
    """A clock that counts calls of modules, in whatever thread."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        return float(self.calls)

    def count(self, *_: Any) -> None:
        self.calls += 1


@pytest.fixture
def counted() -> Iterator[Counted]:
    clock = Counted()
    handle = register_module_forward_pre_hook(clock.count)
    yield clock
    handle.remove()


@dataclass(frozen=True)
class ChatRequest:
    request_id: str


class Chat:
    """An engine whose every step is a token and takes as long as `CHAT_CALLS` calls, until it is told to end."""

    def __init__(self, clock: Counted) -> None:
        self.failures: dict[str, Exception] = {}
        self.has_work = False
        self.is_over = False
        self.began: list[int] = []
        self.ended: list[int] = []
        self._clock = clock

    def add_request(self, request: ChatRequest) -> None:
        self.has_work = True

    def request_cancel(self, request_id: str) -> None:
        self.is_over = True

    def abort(self, request_id: str) -> None:
        self.has_work = False

    def yield_device(self, device: SharedDevice) -> None:
        pass

    def step(self) -> list[TextDelta]:
        self.began.append(self._clock.calls)
        self._clock.calls += CHAT_CALLS
        self.ended.append(self._clock.calls)
        self.has_work = not self.is_over
        return [TextDelta("chat", "a", (1,), 1, len(self.began), "stop" if self.is_over else None)]


@dataclass
class Wanted:
    """A device that the chat wants: who has had a step asks for the next, however busy this machine is."""

    device: SharedDevice
    chat: Chat

    @property
    def is_wanted(self) -> bool:
        wait_until(lambda: self.device.is_wanted or self.chat.is_over)
        return self.device.is_wanted

    @property
    def others_step_s(self) -> float | None:
        return self.device.others_step_s


class Beside(StockEngine):
    """An engine beside a chat."""

    def __init__(self, chat: Chat, *given: Any) -> None:
        super().__init__(*given)
        self.chat = chat

    def yield_device(self, device: SharedDevice) -> None:
        super().yield_device(Wanted(device, self.chat))


async def waits_of(class_name: str, folder: Path, counted: Counted) -> list[int]:
    """Return how long, in calls, a chat waited for each of its steps while an image or a video was made."""
    build, options = (PIPELINES | VIDEOS)[class_name]
    saved(build, folder)
    device, chat = DeviceThread(counted), Chat(counted)

    engine = Beside(chat, load(folder), counted)
    loop: EngineLoop[Any, Any] = EngineLoop(device, engine)
    request = StockRequest("r", 1, PROMPT, **split(class_name, options))
    chatting = asyncio.ensure_future(last_output(EngineLoop(device, chat), ChatRequest("chat")))
    await until(lambda: chat.began)
    try:
        output = await last_output(loop, request)
    finally:
        chat.is_over = True
    await chatting
    assert output.images.std() > 1
    return [began - ended for began, ended in zip(chat.began[1:], chat.ended, strict=False)]


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", [PAG, "WanPipeline", "QwenImagePipeline"])
async def test_a_chat_waits_no_longer_than_two_of_its_steps(class_name: str, tmp_path: Path, counted: Counted) -> None:
    waits = await waits_of(class_name, tmp_path, counted)
    assert max(waits) <= 2 * CHAT_CALLS
    assert sum(wait > 0 for wait in waits) > 5


async def test_one_that_streams_has_turns_at_its_calls_only(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.engines.stock.borrowed_modules.is_streamed", lambda module: True)
    waits = await waits_of(PAG, tmp_path, counted)
    assert max(waits) > 2 * CHAT_CALLS


class Keeping(nn.Module):
    """A part that keeps what it last saw."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: Any = None
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return self.inner(x) * self.scale


def test_what_a_call_changes_is_put_in_and_taken_out_with_its_turns() -> None:
    part = Keeping().requires_grad_(False)
    module, x = nn.ModuleDict({"part": part}), torch.from_numpy(seeded_rng().standard_normal((2, 4), np.float32))
    weight, scale, hooked = part.inner.weight.data_ptr(), part.scale, []
    borrowed, other = BorrowedModules([module]), BorrowedModules([module])
    borrowed.take()
    part(x)
    handle = part.inner.register_forward_hook(lambda *_: hooked.append(1))
    part.extra = "of the call"
    part.to(torch.float64)
    borrowed.give_back()
    assert (part.seen, hasattr(part, "extra"), part.scale) == (None, False, scale)
    assert (part.inner.weight.data_ptr(), part.inner.weight.dtype) == (weight, torch.float32)
    other.take()
    assert part(x).dtype == torch.float32
    other.end()
    assert hooked == []
    borrowed.take()
    assert (part.seen is x, part.extra, part.inner.weight.dtype) == (True, "of the call", torch.float64)
    assert part(x.double()).dtype == torch.float64
    assert hooked == [1]
    handle.remove()
    part.to(torch.float32)  # as before, but for being a copy
    borrowed.end()
    assert (part.seen, part.inner.weight.data_ptr(), part.scale is scale) == (None, weight, True)


def test_blocks_are_the_parts_that_run_one_after_the_other() -> None:
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]
    wrapped = [nn.ModuleDict({"norm": nn.LayerNorm(2), "inner": Keeping()}) for _ in range(2)]
    module = nn.ModuleDict({"blocks": nn.ModuleList(wrapped), "more": nn.ModuleList(blocks), "leaf": nn.Linear(2, 2)})
    assert set(blocks_of(module)) == {one["inner"] for one in wrapped}
