"""Model hosts on a device: the book is the device's own count, what differs is moved, and all of it comes back."""

from __future__ import annotations

import contextlib
import gc
import random
from typing import Any

import pytest
import torch
from kit.waiting import until

pytest.importorskip("diffusers")

from kit.hosting import Host, demo_store

from configs.cluster import WorkerConfig
from deployments.modules.encoders import TextEncoderBuilder, is_text_encoder
from deployments.modules.loading import ComponentBuilder, is_denoise_component
from deployments.records.errors import ServiceError
from weights.records.errors import BudgetExceeded, WeightsError
from weights.records.manifest import Component
from weights.storage.store import WeightStore

NAMES = ("digits-flux", "digits-flux-inverted", "digits-sdxl", "adder")
NUM_SWITCHES = 60
SMALL_CACHE = 256 * 1024
ROTARY_BYTES = 64  # the frequencies that the adder's engine computes itself


class CountingBuilder(ComponentBuilder):
    """Counts the engines of language models that it makes."""

    num_engines = 0

    def __call__(self, component: Component, *args: Any) -> Any:
        self.num_engines += component.name == "model"
        return super().__call__(component, *args)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    return demo_store(tmp_path_factory.mktemp("hosts") / "store", *NAMES, "texts-bert", "texts-head")


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def tensors_of(store: WeightStore, model: str) -> dict[str, int]:
    """Bytes of what the worker builds of a model, by hash."""
    return {
        ref.sha256: ref.nbytes
        for component in store.manifest(model).components.values()
        if is_denoise_component(component)
        for ref in component.tensors.values()
    }


async def settles(condition: Any) -> bool:
    """Threads and frames that are just ending may hold something for a moment."""

    def holds() -> Any:
        if not (found := condition()):
            gc.collect(0)
        return found

    with contextlib.suppress(TimeoutError):
        return bool(await until(holds, timeout_s=2.0))
    gc.collect()
    return bool(condition())


async def test_the_book_is_the_devices_count_through_switches_and_failures(
    store: WeightStore, device: torch.device, module: Any
) -> None:
    before = module.memory_allocated(device)
    sizes = {name: sum(map(rounded, tensors_of(store, name).values())) for name in NAMES}
    builder = CountingBuilder(WorkerConfig(device=str(device), kv_cache_bytes=SMALL_CACHE))
    host = Host(store, str(device), max(sizes.values()) + sizes["adder"] + SMALL_CACHE, builder)

    def agrees() -> bool:
        arena = host.arena
        booked: int = arena["resident_bytes"] + arena["lingering_bytes"]
        return bool(module.memory_allocated(device) - before == booked)

    link = module.memory_of(device) if device.type == "sim" else None
    uploaded = link.uploaded_bytes if link else 0
    num_failed = 0
    for _ in range(NUM_SWITCHES):
        kind, model = random.random(), random.choice(NAMES)
        if kind < 0.2:
            host.provider.failure = WeightsError("the disk is gone")
        try:
            if kind < 0.75:
                async with host.lease(model, is_denoise_component):
                    assert agrees() or await settles(agrees)
            elif kind < 0.9:
                await host.prefetch(model, is_denoise_component)
            else:
                host.evict(model)
        except (WeightsError, ServiceError):
            num_failed += 1
        host.provider.failure = None
        assert agrees() or await settles(agrees), (module.memory_allocated(device) - before, host.arena)
        assert host.arena["resident_bytes"] <= host.arena["budget_bytes"]
        if link:
            assert link.uploaded_bytes - uploaded == host.arena["moved_bytes"] + ROTARY_BYTES * builder.num_engines
    assert num_failed
    assert not +host.provider.leases
    for name in NAMES:
        host.evict(name)
    host.set_budget(0)
    assert await settles(lambda: module.memory_allocated(device) == before)


async def test_a_sibling_moves_exactly_the_bytes_that_differ(
    store: WeightStore, device: torch.device, module: Any
) -> None:
    host = Host(store, str(device))
    first, second = (tensors_of(store, name) for name in ("digits-flux", "digits-flux-inverted"))
    assert (await host.use("digits-flux")).report.device_bytes == sum(first.values())
    different_bytes = sum(nbytes for hash_, nbytes in second.items() if hash_ not in first)
    report = (await host.use("digits-flux-inverted")).report
    assert 0 < report.device_bytes == different_bytes < sum(second.values())
    assert (await host.use("digits-flux")).report.device_bytes == 0


async def test_components_of_one_request_do_not_evict_each_others_tensors(
    store: WeightStore, device: torch.device, module: Any
) -> None:
    """With just enough room, the part of the other model that stays is the part that this one needs."""
    first, second = (tensors_of(store, name) for name in ("digits-flux", "digits-flux-inverted"))
    host = Host(store, str(device), max(sum(map(rounded, one.values())) for one in (first, second)))
    await host.use("digits-flux")
    for new, old, name in ((second, first, "digits-flux-inverted"), (first, second, "digits-flux")) * 2:
        host._modules.table.evict([entry for entry in host._modules.table.entries.values() if entry.is_here])
        different_bytes = sum(nbytes for hash_, nbytes in new.items() if hash_ not in old)
        assert (await host.use(name)).report.device_bytes == different_bytes


async def test_prefetch_and_pin_reach_the_device(store: WeightStore, device: torch.device, module: Any) -> None:
    flux_bytes = sum(map(rounded, tensors_of(store, "digits-flux").values()))
    host = Host(store, str(device), flux_bytes + 1000)
    await host.pin("digits-flux", is_denoise_component)
    await host.prefetch("digits-flux", is_denoise_component)
    assert (await host.use("digits-flux")).report.device_bytes == 0
    assert host.arena["pinned_bytes"] == flux_bytes
    with pytest.raises(BudgetExceeded):
        await host.use("digits-sdxl")
    assert (await host.use("digits-flux")).report.device_bytes == 0


async def test_a_language_models_cache_counts_and_comes_back(
    store: WeightStore, device: torch.device, module: Any
) -> None:
    before = module.memory_allocated(device)
    weights = sum(map(rounded, tensors_of(store, "adder").values()))
    host = Host(store, str(device), 2**26, kv_cache_bytes=2**20)
    async with host.lease("adder", is_denoise_component) as lease:
        counted = host.arena["resident_bytes"]
        assert weights + 2**20 <= counted == module.memory_allocated(device) - before
        assert host.describe()["charged_bytes"] == counted
        del lease
    tight = Host(store, str(device), weights // 50, kv_cache_bytes=2**20)
    with pytest.raises(BudgetExceeded, match="adder"):
        await tight.use("adder")
    host.evict("adder")
    host.set_budget(0)
    assert await settles(lambda: module.memory_allocated(device) == before)


async def test_two_devices_in_one_process_keep_books_of_their_own(
    store: WeightStore, device: torch.device, second_device: torch.device, module: Any
) -> None:
    before = module.memory_allocated(second_device)
    worker, encoders = Host(store, str(device)), Host(store, str(second_device), builder=TextEncoderBuilder())
    await worker.use("digits-sdxl")
    lease = await encoders.use("digits-sdxl", is_text_encoder)
    assert module.memory_allocated(second_device) - before >= encoders.arena["resident_bytes"] > 0
    on = {p.device for keyed in lease.modules.values() for p in keyed.encoder.module.parameters()}
    assert on == {second_device}
    for host, wanted in ((worker, is_denoise_component), (encoders, is_text_encoder)):
        assert (await host.use("digits-sdxl", wanted)).report.device_bytes == 0
        host.evict("digits-sdxl")
        host.set_budget(0)
    del lease
    # Also what the encoders' modules had computed themselves: position ids are in no book, and go with the weights.
    assert await settles(lambda: module.memory_allocated(second_device) == before)
