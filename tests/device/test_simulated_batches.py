"""Batches as large as the device has room: none runs out of memory to find that out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from kit.hosting import Host, demo_store

from configs.cluster import WorkerConfig
from deployments.engines.building.skeletons import blank_module
from deployments.engines.costs.memory_limits import MemoryLimits
from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.diffusion.footprints import make_twin
from deployments.modules.footprints import FootprintBook
from deployments.modules.loading import batch_bounds, is_denoise_component
from deployments.records import CompletionRequest, ControlNetUse, ImageRequest, ImageResult, TextChunk
from deployments.replicas.step_loop import DeviceThread
from deployments.services.image_service import ImageService
from deployments.services.text_service import TextService, whole_text
from deployments.text.fallback import FallbackEncoder
from weights.formats.pipeline_parts import pipeline_variant
from weights.memory.device_arena import DeviceArena
from weights.memory.forward_memory import ForwardMemory
from weights.records.errors import BudgetExceeded
from weights.records.manifest import Manifest
from weights.storage.store import WeightStore

SIDE = 64
BESIDE = 2**22  # latents, texts and what is computed ahead, of all requests


@pytest.fixture(scope="module", params=[pytest.param("digits-flux", marks=pytest.mark.long), "digits-sdxl"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    return demo_store(tmp_path_factory.mktemp("planned") / "store", "digits-flux", "digits-sdxl", "outline")


@pytest.fixture
def halvings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of forwards that found no memory."""
    sizes: list[int] = []
    plain = MemoryLimits.ran_out

    def ran_out(limits: MemoryLimits, kind: Any, size: int) -> None:
        sizes.append(size)
        plain(limits, kind, size)

    monkeypatch.setattr(MemoryLimits, "ran_out", ran_out)
    return sizes


@pytest.fixture
def ballast() -> Iterator[list[torch.Tensor]]:
    held: list[torch.Tensor] = []
    yield held
    held.clear()


def leave(device: torch.device, nbytes: int, ballast: list[torch.Tensor]) -> None:
    gc.collect()
    free, _ = torch.get_device_module(device).mem_get_info(device)
    ballast.append(torch.empty(free - nbytes, dtype=torch.uint8, device=device))


def requests_of(model: str, count: int) -> list[ImageRequest]:
    return [
        ImageRequest(
            model=model,
            prompt=f"{n} sevens",
            width=SIDE,
            height=SIDE,
            num_inference_steps=3,
            guidance_scale=1.0,
            seed=n,
        )
        for n in range(count)
    ]


async def draw_all(
    host: Host, texts: Host, requests: list[ImageRequest], thread: DeviceThread | None = None
) -> list[np.ndarray]:
    """Return the images; texts are encoded on another host."""
    thread = thread or DeviceThread()
    encoder, images = FallbackEncoder(texts, DeviceThread()), ImageService(host, host.settings, thread)
    results = await asyncio.gather(*(images.generate(one, encoder.condition) for one in requests))
    return [result.images[0] for result in results if isinstance(result, ImageResult)]


def device_bytes(manifest: Manifest) -> int:
    """Return the bytes of a device that the weights of the denoising take."""
    parts = [part for part in manifest.components.values() if is_denoise_component(part)]
    distinct = {ref.sha256: ref for part in parts for ref in part.tensors.values()}
    return sum(-(-ref.nbytes // 512) * 512 for ref in distinct.values())


def test_admission_counts_a_forward(store: WeightStore, device: torch.device, ballast: list[torch.Tensor]) -> None:
    """Weights that leave no room for one image are not held all at once: denoiser and VAE then take turns."""
    manifest = store.manifest("digits-sdxl")
    room = device_bytes(manifest) + 2**16  # beside the weights, less than an image of the model's own size takes
    leave(device, room, ballast)
    host = Host(store, str(device), room)
    assert host.can_hold(manifest, is_denoise_component, {})
    host.forwards.learn_defaults(manifest, is_denoise_component)
    book = host.forwards.footprints
    assert book is not None
    assert book.least_bytes(manifest, manifest.components["vae"]) > 2**16
    assert not host.can_hold(manifest, is_denoise_component, {})


@pytest.mark.usefixtures("learned_once_here")
async def test_two_rows_of_room_are_two_rows_at_once(
    store: WeightStore, device: torch.device, model: str, halvings: list[int], ballast: list[torch.Tensor]
) -> None:
    manifest, requests = store.manifest(model), requests_of(model, 5)
    texts = Host(store, "cpu")
    expected = await draw_all(Host(store, str(device)), texts, requests)
    book = FootprintBook(str(device), batch_bounds(WorkerConfig(device=str(device))))
    weights = device_bytes(manifest)
    book.learn(manifest, store.models / manifest.skeleton, SIDE, SIDE, 77)
    room = max(found.bytes_of(2 if kind[0] == "denoise" else 1) for kind, found in book.of(manifest).items())
    budget = weights + room + BESIDE
    leave(device, budget, ballast)
    found = await draw_all(Host(store, str(device), budget), texts, requests)
    assert halvings == []
    assert len(found) == 5
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_admission_counts_a_control_net(store: WeightStore, device: torch.device, ballast: list[torch.Tensor]) -> None:
    manifest, nets = store.manifest("digits-flux"), {"outline": store.manifest("outline")}
    parts = [part for one in (manifest, *nets.values()) for part in one.components.values()]
    weights = sum(part.nbytes for part in parts if is_denoise_component(part))
    leave(device, 2 * weights, ballast)
    host = Host(store, str(device), 2 * weights)
    book = host.forwards.footprints
    assert book is not None
    book._entry(manifest).least[frozenset()] = 0  # as of a model that was prepared, and whose own images take nothing
    assert host.can_hold(manifest, is_denoise_component, nets)
    host.forwards.learn_adapted(manifest, nets)
    assert not host.can_hold(manifest, is_denoise_component, nets)
    assert host.can_hold(manifest, is_denoise_component, {})
    net = nets["outline"].components["controlnet"]
    twin = make_twin(manifest, host.skeleton(manifest), device)
    shapes = [("outline", blank_module(net, host.skeleton(nets["outline"]) / net.folder))]
    width, height = FAMILIES["FluxPipeline"].defaults.sides(pipeline_variant(host.skeleton(manifest)))
    assert book.least_bytes(manifest, net, nets) == twin.record_denoise(width, height, 512, 1, shapes).eager_peak()


@pytest.mark.long
async def test_batches_with_a_control_net_are_as_large_as_there_is_room(
    store: WeightStore, device: torch.device, halvings: list[int], ballast: list[torch.Tensor]
) -> None:
    manifest, texts = store.manifest("digits-flux"), Host(store, "cpu")
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    control = (ControlNetUse(name="outline", image=image),)
    requests = [
        one.model_copy(update={"control": control, "num_inference_steps": 1}) for one in requests_of("digits-flux", 12)
    ]
    roomy = Host(store, str(device))
    expected = await draw_all(roomy, texts, requests)
    assert roomy.forwards.footprints is not None
    learned = roomy.forwards.footprints.of(manifest)
    assert any("outline" in str(kind) for kind in learned)
    room = max(found.bytes_of(2 if kind[0] == "denoise" else 1) for kind, found in learned.items())
    parts = [part for name in ("digits-flux", "outline") for part in store.manifest(name).components.values()]
    kept = {ref.sha256: ref.nbytes for part in parts if is_denoise_component(part) for ref in part.tensors.values()}
    budget = sum(-(-nbytes // 512) * 512 for nbytes in kept.values()) + room + BESIDE
    roomy.evict("digits-flux")
    roomy.set_budget(0)
    leave(device, budget, ballast)
    host = Host(store, str(device), budget)
    found = await draw_all(host, texts, requests)
    assert halvings == []
    assert len(found) == 12
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


async def test_a_cache_that_takes_all_there_is_leaves_room_for_a_step(
    tmp_path: Path, device: torch.device, ballast: list[torch.Tensor]
) -> None:
    store, budget = demo_store(tmp_path / "store", "adder"), 96 * 2**20
    manifest = store.manifest("adder")
    leave(device, budget, ballast)
    host = Host(store, str(device), budget, kv_cache_bytes="auto", max_num_seqs=10**4, max_step_tokens=64)
    host.builder.prepare(manifest.components["model"], host.skeleton(manifest))
    book = host.forwards.footprints
    assert book is not None
    step_bytes = book.least_bytes(manifest, manifest.components["model"])
    engine = (await host.use("adder")).modules["model"]
    free, _ = torch.get_device_module(device).mem_get_info(device)
    assert 0 < step_bytes <= free <= step_bytes * 9 / 8 + budget / 16 + 2**20  # adapters have room beside it
    assert engine.stats().num_blocks > 0


@pytest.mark.usefixtures("learned_once_here")
async def test_steps_of_a_language_model_and_a_denoiser_have_one_workspace(
    tmp_path: Path,
    device: torch.device,
    halvings: list[int],
    ballast: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are resident with room for the larger one's forwards, and not for both; answers are those of a roomy one."""
    store = demo_store(tmp_path / "store", "adder", "digits-sdxl")
    limits = {"kv_cache_bytes": 2**22, "max_step_tokens": 256, "max_num_seqs": 16}
    texts, images, roomy = Host(store, "cpu"), requests_of("digits-sdxl", 5), Host(store, str(device), **limits)
    prompt = CompletionRequest(model="adder", prompt="12 + 7 = ", max_tokens=8, temperature=0.0)
    expected = await draw_all(roomy, texts, images), await write(roomy, DeviceThread(), prompt)
    adder, pipeline = store.manifest("adder"), store.manifest("digits-sdxl")
    model = adder.components["model"]
    book = roomy.forwards.footprints
    assert book is not None
    roomy.builder.prepare(model, roomy.skeleton(adder))
    step = book.least_bytes(adder, model)
    drawing = max(found.bytes_of(5 if kind[0] == "denoise" else 2) for kind, found in book.of(pipeline).items())
    sizes = roomy.tensors_of("adder", "digits-sdxl").values()
    static = sum(-(-nbytes // 512) * 512 for nbytes in sizes)
    static += roomy.builder.working_memory(model, roomy.skeleton(adder))
    for name in ("adder", "digits-sdxl"):
        roomy.evict(name)
    budget = static + max(step, drawing) + BESIDE // 2
    assert budget < static + step + drawing
    leave(device, budget, ballast)
    host, thread = Host(store, str(device), budget, **limits), DeviceThread()
    host.builder.prepare(model, host.skeleton(adder))
    assert host.forwards.footprints is not None
    host.forwards.footprints._entry(pipeline).least[frozenset()] = drawing
    lent = noted_loans(host.forwards.memory, monkeypatch)
    async with host.lease("digits-sdxl", is_denoise_component), host.lease("adder", is_denoise_component):
        held = host.arena["resident_bytes"]
        assert static + max(step, drawing) <= held <= budget
        drawn, written = await asyncio.gather(draw_all(host, texts, images, thread), write(host, thread, prompt))
        assert host.arena["resident_bytes"] == held
    assert halvings == []
    assert step in lent
    assert max(lent) <= budget - static
    assert written == expected[1]
    assert all(np.array_equal(one, other) for one, other in zip(drawn, expected[0], strict=True))


def noted_loans(memory: ForwardMemory | None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the bytes of all forwards that run are appended as each begins."""
    assert memory is not None
    lent, plain = [], memory.lend

    @contextlib.contextmanager
    def lend(nbytes: int) -> Iterator[None]:
        with plain(nbytes):
            lent.append(memory._lent.total())
            yield

    monkeypatch.setattr(memory, "lend", lend)
    return lent


async def write(host: Host, thread: DeviceThread, request: CompletionRequest) -> str:
    chunks: list[TextChunk] = []
    await TextService(host, thread).write(request, chunks.append)
    return whole_text(request.model, chunks).text


def test_the_workspace_is_the_largest_and_not_the_sum(device: torch.device, ballast: list[torch.Tensor]) -> None:
    leave(device, 32 * 2**10, ballast)
    arena = DeviceArena(str(device), 32 * 2**10)
    room = arena.forwards.room_bytes()
    with arena.forwards.lend(8 * 2**10), arena.forwards.lend(0):
        assert arena.stats().resident_bytes == 8 * 2**10
    assert arena.stats().resident_bytes == 0
    assert arena.forwards.room_bytes() == room == 32 * 2**10
    with arena.forwards.lend(2**30):  # runs, and finds none
        assert arena.stats().resident_bytes == 0
        arena.acquire({}, {}, "h", workspace_bytes=2**10)
        assert arena.stats().resident_bytes == 2**10
        arena.release([], "h")
    assert arena.stats().resident_bytes == 0


def test_models_in_turn_share_the_workspace_of_the_largest(device: torch.device, ballast: list[torch.Tensor]) -> None:
    """The example of 8 and 6 GB in KiB: both run in 12 and in 8 beside their weights; a larger one is told why not."""
    from device.test_memory_book import _key

    tensors = [{"w": torch.rand(9 * 2**8)} for _ in range(2)]  # 9 KiB each
    keys = [{"w": _key(one["w"])} for one in tensors]
    for workspace in (12 * 2**10, 8 * 2**10):
        ballast.clear()
        budget = 18 * 2**10 + workspace
        leave(device, budget, ballast)
        arena = DeviceArena(str(device), budget)
        arena.acquire(keys[0], tensors[0], "a", workspace_bytes=8 * 2**10)
        arena.acquire(keys[1], tensors[1], "b", workspace_bytes=6 * 2**10)
        assert arena.stats().resident_bytes == 26 * 2**10
        assert arena.forwards.room_bytes() == workspace
        with pytest.raises(BudgetExceeded, match=r"the workspace of c need .* are missing"):
            arena.acquire(keys[1], tensors[1], "c", workspace_bytes=workspace + 512)
        assert arena.stats().resident_bytes == 26 * 2**10
        arena.release([keys[0]["w"].sha256], "a")
        assert arena.stats().resident_bytes == 24 * 2**10


def test_nothing_is_uploaded_where_a_forward_runs(device: torch.device, ballast: list[torch.Tensor]) -> None:
    from device.test_memory_book import _key

    leave(device, 32 * 2**10, ballast)
    arena = DeviceArena(str(device), 32 * 2**10)
    tensors = {"w": torch.rand(3 * 2**10)}
    keys = {"w": _key(tensors["w"])}
    with (
        arena.forwards.lend(24 * 2**10),
        pytest.raises(BudgetExceeded, match=r"4 KiB are missing \(leased by: the workspace"),
    ):
        arena.acquire(keys, tensors, "h")
    arena.acquire(keys, tensors, "h")
    assert arena.forwards.room_bytes() == 20 * 2**10
    arena.release([keys["w"].sha256], "h")
    assert arena.forwards.room_bytes() == 32 * 2**10  # it may go
    with arena.forwards.lend(24 * 2**10):
        assert arena.stats().num_evicted == 1
