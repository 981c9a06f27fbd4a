"""Requests whose LoRA the config merges: their images, their memory and their end, beside requests of other forms."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.deployments.engine_loops import stream_images

from configs.cluster import WorkerConfig
from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.nn.lora import MergedLayers
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import ComponentBuilder, is_denoise_component
from deployments.modules.parts import Merging, merged_parts
from deployments.records import ImageRequest, ImageResult
from deployments.records.errors import InvalidRequest
from deployments.replicas.step_loop import DeviceThread
from deployments.services.image_service import ImageService
from deployments.text.fallback import FallbackEncoder

pytestmark = pytest.mark.slow  # imports diffusers

DEMO = Path(__file__).parents[4] / "infra" / "demo" / "models"
BUDGET = 2**30
OpenHost = Callable[..., ModuleCache]


def request_of(seed: int = 0, lora: str | None = "bold", *, merges: bool = True, **fields: Any) -> ImageRequest:
    options = {"width": 16, "height": 16, "num_inference_steps": 3, "guidance_scale": 1.0}
    options |= {"lora": ({"name": lora},), "merges_lora": merges} if lora else {}
    return ImageRequest(model="flux", prompt=f"a handwritten {seed}", seed=seed, **(options | fields))


class Studio:
    def __init__(self, cache: ModuleCache) -> None:
        thread = DeviceThread()
        self.cache = cache
        self.encode = FallbackEncoder(cache, thread).condition
        self.images = ImageService(cache, WorkerConfig(), thread)

    async def draw(self, request: ImageRequest) -> Any:
        async with asyncio.timeout(60):
            result = await self.images.generate(request, self.encode)
            assert isinstance(result, ImageResult)
            (image,) = result.images
        return image

    @property
    def num_leased(self) -> int:
        return sum(slot.leases for slot in self.cache._modules.slots.values())

    @property
    def charged_bytes(self) -> int:
        return int(self.cache.describe()["charged_bytes"])


@pytest.fixture
def open_studio(open_host: OpenHost, tmp_path: Path) -> Callable[..., Studio]:
    """`thin` is another LoRA, and `broken` one of a layer that the model does not have."""
    bold = load_file(DEMO / "bold" / "pytorch_lora_weights.safetensors")
    down, up = (next(name for name in bold if f"lora_{half}." in name) for half in "AB")
    foreign = {f"transformer.nothing.lora_{half}.weight": bold[name] for half, name in (("A", down), ("B", up))}
    generator = torch.Generator().manual_seed(0)
    thin = {name: torch.randn(tensor.shape, generator=generator) * 0.2 for name, tensor in bold.items()}
    folders = {"flux": DEMO / "digits-flux", "bold": DEMO / "bold"}
    for name, tensors in (("thin", thin), ("broken", foreign)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        save_file(tensors, folders[name] / "pytorch_lora_weights.safetensors")
    return lambda budget_bytes=BUDGET: Studio(open_host(ComponentBuilder(WorkerConfig()), folders, budget_bytes))


async def test_mixed_traffic_gives_each_what_it_gets_alone(open_studio: Callable[..., Studio]) -> None:
    studio, alone = open_studio(), open_studio()
    requests = [
        request_of(seed, lora, merges=merges)
        for seed, (lora, merges) in enumerate([("bold", True), (None, False), ("bold", False), ("thin", True)])
    ]
    together = await asyncio.gather(*(studio.draw(one) for one in requests))
    for request, image in zip(requests, together, strict=True):
        assert np.array_equal(image, await alone.draw(request))
    plain = await studio.draw(request_of(0, None))
    side = await studio.draw(request_of(0, merges=False))
    assert np.abs(together[0].astype(int) - side).max() <= 1
    assert np.abs(together[0].astype(int) - plain).max() > 4
    assert studio.num_leased == 0


async def test_the_private_weights_are_counted_and_go_with_the_adapter(open_studio: Callable[..., Studio]) -> None:
    studio, held = open_studio(), list[Any]()
    await studio.draw(request_of(merges=False))
    before_bytes = studio.charged_bytes
    start = DenoisePipeline.start_request

    def noting(self: DenoisePipeline, *arguments: Any, **options: Any) -> Any:
        state = start(self, *arguments, **options)
        assert isinstance(state.merged, MergedLayers)
        held.extend(cell.cell_contents for one in state.merged.forwards.values() for cell in one.__closure__ or ())
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DenoisePipeline, "start_request", noting)
        await studio.draw(request_of())
    weights = [one for one in held if isinstance(one, torch.Tensor)]
    nbytes, finalized = sum(weight.nbytes for weight in weights), [weakref.ref(weight) for weight in weights]
    assert studio.charged_bytes == before_bytes + nbytes > before_bytes
    weights.clear(), held.clear()
    gc.collect()
    assert all(weight() is not None for weight in finalized)  # the next request finds them
    assert studio.cache.evict("bold") == []
    gc.collect()
    assert not any(weight() is not None for weight in finalized)
    assert studio.charged_bytes < before_bytes


async def test_where_there_is_no_room_for_them_the_side_path_is_taken(open_studio: Callable[..., Studio]) -> None:
    large, merged_bytes = open_studio(), []
    expected = await large.draw(request_of(merges=False))
    side_bytes = large.charged_bytes
    await large.draw(request_of())
    merged_bytes = large.charged_bytes - side_bytes
    small = open_studio(side_bytes + merged_bytes // 2)
    assert np.array_equal(await small.draw(request_of()), expected)
    assert small.charged_bytes <= side_bytes


async def test_merging_holds_up_neither_steps_nor_a_move_and_ends_before_the_lease(
    open_studio: Callable[..., Studio], monkeypatch: pytest.MonkeyPatch
) -> None:
    studio, begun, may_go = open_studio(), threading.Event(), threading.Event()
    merge, threads = DenoisePipeline.merge_adapter, []

    def held(self: DenoisePipeline, *arguments: Any) -> None:
        threads.append(threading.current_thread().name)
        begun.set()
        assert may_go.wait(60)
        merge(self, *arguments)

    monkeypatch.setattr(DenoisePipeline, "merge_adapter", held)
    pieces = asyncio.ensure_future(collect(studio, request_of()))
    assert await asyncio.to_thread(begun.wait, 60)
    await studio.draw(request_of(1, None))  # meanwhile
    studio.images.migrate_out(["flux"])
    cancelled = asyncio.ensure_future(studio.draw(request_of(2)))
    while len(threads) < 2:
        await asyncio.sleep(0.01)
    cancelled.cancel()
    await asyncio.sleep(0)
    assert studio.num_leased > 0
    assert not cancelled.done()
    may_go.set()
    (moved,) = await pieces
    assert moved.is_moved
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert studio.num_leased == 0
    assert not any(name.startswith("device") for name in threads)
    assert isinstance((await collect(studio, request_of()))[-1], ImageResult)


async def collect(studio: Studio, request: ImageRequest) -> list[Any]:
    async with asyncio.timeout(60), stream_images(studio.images, request, studio.encode) as pieces:
        return [piece async for piece in pieces]


async def test_one_that_does_not_fit_is_refused_and_leaves_nothing(open_studio: Callable[..., Studio]) -> None:
    studio = open_studio()
    with pytest.raises(InvalidRequest, match=r"'nothing' \(1 of 1\) are not in"):
        await studio.draw(request_of(lora="broken"))
    assert studio.num_leased == studio.images.num_running == 0
    await studio.draw(request_of())


async def test_the_room_is_that_of_the_layers_and_float8_has_none(open_studio: Callable[..., Studio]) -> None:
    cache = open_studio().cache
    manifest = await cache.manifests.newest("flux")
    parts = cache.planner.plan(manifest, is_denoise_component, {"bold": await cache.manifests.newest("bold")})
    merging = Merging("bold", "transformer")
    merged = merged_parts(parts, merging, lambda nbytes: nbytes)
    assert merged is not None
    (changed,) = [part for name, part in merged.items() if name.is_adapter]
    lora = load_file(DEMO / "bold" / "pytorch_lora_weights.safetensors")
    paths = {name.split(".lora_")[0] for name in lora}
    names = {f"{path.removeprefix('transformer.')}.weight" for path in paths}
    tensors = manifest.components["transformer"].tensors
    assert changed.working_bytes == sum(tensors[name].nbytes for name in names) > 0
    assert {name: part for name, part in merged.items() if part is not changed}.items() <= parts.items()
    small = manifest.components["transformer"].model_copy(
        update={"tensors": {name: ref.model_copy(update={"dtype": "F8_E4M3"}) for name, ref in tensors.items()}}
    )
    (name,) = [name for name in parts if name.name == "transformer"]
    float8 = {**parts, name: replace(parts[name], component=small)}
    assert merged_parts(float8, merging, lambda nbytes: nbytes) is None
    assert merged_parts({}, merging, lambda nbytes: nbytes) is None
