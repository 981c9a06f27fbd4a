"""Budgets of language models: what their KV caches take, beside each other and beside their adapters."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.cluster import WorkerConfig
from deployments.modules import loading
from deployments.modules.budget import ModuleBudget
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import ComponentBuilder, is_denoise_component, within_memory
from deployments.modules.parts import OBJECT_BYTES, object_footprint
from weights.loading.provider import LocalExtents
from weights.operations.externalize import externalize
from weights.operations.intake import import_model
from weights.records.manifest import ExtentRef, Manifest
from weights.storage.store import WeightStore

DEMO = Path(__file__).parents[4] / "infra/demo/models"
MIB = 2**20


class NodeMemory(LocalExtents):
    """The node's shared memory, which calls nothing back."""

    def release(self, extents: Sequence[ExtentRef]) -> None: ...
    def prefetch(self, extents: Sequence[ExtentRef]) -> None: ...
    def note_uses(self, extents: Sequence[ExtentRef]) -> None: ...
    def has_room_for(self, extents: Sequence[ExtentRef]) -> bool:
        return True

    def is_called_back(self, extents: Sequence[ExtentRef]) -> bool:
        return False


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    root = tmp_path_factory.mktemp("models")
    store = WeightStore(root / "store")
    for name in ("adder", "digits-sdxl"):
        externalize(store, name, DEMO / name, dtype="float32")
    stock: Any = AutoModelForCausalLM.from_pretrained(DEMO / "adder", dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    shutil.copytree(DEMO / "adder", root / "other")
    stock.model.norm.weight.data *= 1.1
    stock.save_pretrained(root / "other")
    peft.get_peft_model(stock, config).save_pretrained(root / "lora")
    for name in ("other", "lora"):
        import_model(store, name, root / name)
    return store


def replica(store: WeightStore, settings: WorkerConfig) -> ModuleCache:
    async def fetch(model: str, version: str | None) -> Manifest:
        return store.manifest(model)

    builder, extents = ComponentBuilder(settings), NodeMemory(store.packs)
    return ModuleCache(
        fetch,
        extents,
        store.models,
        ModuleBudget(settings.weights_budget_bytes, settings.device),
        builder,
        kept=extents if settings.device == "cpu" else None,
    )


@pytest.mark.parametrize("device", ["cpu", "cpu-private"])
async def test_models_that_take_all_there_is_take_turns_and_have_their_adapters(
    store: WeightStore, device: str
) -> None:
    """With `kv_cache_bytes: auto`, of long texts: each cache could fill the budget alone."""
    settings = WorkerConfig(
        device=device, resident_bytes=96 * MIB, kv_cache_bytes="auto", max_num_seqs=10**4, max_ongoing_requests=8
    )
    cache = replica(store, settings)
    async with cache.lease("adder", is_denoise_component, ("lora",)) as lease:
        taken = cache.describe()["charged_bytes"]
        assert settings.resident_bytes / 2 < taken <= settings.resident_bytes
        other = asyncio.ensure_future(anext(aiter_of(cache, "other")))
        await asyncio.sleep(0)
        assert lease.modules["model"].stats().num_blocks > 0
        assert not other.done()
    assert await other > 0
    assert cache.describe()["charged_bytes"] <= settings.resident_bytes


async def aiter_of(cache: ModuleCache, model: str) -> Any:
    async with cache.lease(model, is_denoise_component) as lease:
        yield lease.modules["model"].stats().num_blocks


@pytest.mark.parametrize("device", ["cpu", "cpu-private"])
async def test_models_whose_caches_are_small_are_there_together(store: WeightStore, device: str) -> None:
    """A cache is no larger than its sequences can use, and counts as what it is."""
    settings = WorkerConfig(device=device, resident_bytes="1 GiB", kv_cache_bytes="auto", max_num_seqs=4)
    cache = replica(store, settings)
    async with (
        cache.lease("adder", is_denoise_component) as one,
        cache.lease("other", is_denoise_component, ("lora",)) as other,
    ):
        assert one.modules["model"].stats().num_blocks == other.modules["model"].stats().num_blocks == 4 * 512 // 16
        assert cache.describe()["charged_bytes"] < 32 * MIB


def test_what_free_memory_cannot_hold_is_in_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda device: 1000 * MIB)
    for device in ("cpu", "cpu-private"):
        auto = WorkerConfig(device=device, resident_bytes="4 GiB", kv_cache_bytes="auto")
        assert within_memory(auto, None).weights_budget_bytes == 900 * MIB
        small = auto.model_copy(update={"resident_bytes": 7 * MIB})
        assert within_memory(small, None).weights_budget_bytes == 7 * MIB
        fixed = auto.model_copy(update={"kv_cache_bytes": 1})
        assert within_memory(fixed, None) is fixed


def test_a_cache_takes_what_its_weights_leave_of_the_budget(store: WeightStore) -> None:
    manifest = store.manifest("adder")
    llm = manifest.components["model"]
    for device, own_bytes in (("cpu", 0), ("cpu-private", llm.nbytes)):
        settings = WorkerConfig(device=device, resident_bytes="1 GiB", kv_cache_bytes="auto", max_num_seqs=10**5)
        taken = ComponentBuilder(settings).working_memory(llm, store.models / manifest.skeleton)
        assert abs(960 * MIB - own_bytes - taken) <= MIB, "whole blocks of 15/16 of the budget"


def test_on_shared_memory_a_language_model_costs_its_cache_and_always_fits(store: WeightStore) -> None:
    manifest = store.manifest("adder")
    llm, unet = manifest.components["model"], store.manifest("digits-sdxl").components["unet"]
    settings = WorkerConfig(resident_bytes="1 MiB", kv_cache_bytes="256 KiB")
    builder, skeleton = ComponentBuilder(settings), store.models / manifest.skeleton
    assert sum(object_footprint(unet, 0, 1).values()) == OBJECT_BYTES * len(unet.tensors)
    working = builder.working_memory(llm, skeleton)
    assert 200 * 1024 < working < 264 * 1024
    assert sum(object_footprint(llm, working, MIB).values()) == working + OBJECT_BYTES * len(llm.tensors)
    assert sum(object_footprint(llm, 2**30, MIB).values()) == MIB - MIB // 16
