"""A device of its own, on any machine: bytes counted where a card would get them, and the same images."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.hosting import DEMO, Host, demo_store
from safetensors.torch import save_file

from configs.cluster import ClusterConfig, TextEncoderConfig, WorkerConfig
from deployments.engines.diffusion.pipeline import create_pipeline, settings_hash
from deployments.engines.records.protocol import SamplingParams, TextRequest
from deployments.local import LocalModels
from deployments.modules.encoders import TextEncoderBuilder, is_text_encoder
from deployments.modules.loading import is_denoise_component
from deployments.records import ImageRequest, LoraUse
from weights.formats.folder import LORA_FILE
from weights.formats.lora import METADATA_KEY
from weights.memory.arena_room import StillInUse
from weights.memory.device_arena import DeviceArena
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

NAMES = ("digits-flux", "digits-flux-inverted", "digits-sdxl", "adder")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    store = demo_store(tmp_path_factory.mktemp("device") / "store", *NAMES)
    externalize(store, "twin", DEMO / "digits-flux", dtype="float32")
    return store


async def test_a_sibling_moves_exactly_the_bytes_that_differ(store: WeightStore) -> None:
    host = Host(store, "cpu-private")
    first = (await host.use("digits-flux")).report
    assert (first.device_bytes, first.reused_bytes) == (host.bytes_of("digits-flux"), 0)
    sibling = (await host.use("digits-flux-inverted")).report
    shared = host.tensors_of("digits-flux").keys() & host.tensors_of("digits-flux-inverted").keys()
    shared_bytes = sum(host.tensors_of("digits-flux")[hash_] for hash_ in shared)
    different_bytes = host.bytes_of("digits-flux-inverted") - shared_bytes
    assert 0 < different_bytes < host.bytes_of("digits-flux-inverted")
    assert (sibling.device_bytes, sibling.reused_bytes) == (different_bytes, shared_bytes)
    assert host.arena["moved_bytes"] == host.bytes_of("digits-flux", "digits-flux-inverted")


async def test_the_same_weights_under_another_name_move_nothing(store: WeightStore) -> None:
    for device in ("cpu", "cpu-private"):
        host = Host(store, device)
        await host.use("digits-flux")
        fetched_bytes = host.provider.fetched_bytes
        report = (await host.use("twin")).report
        assert (report.built, report.device_bytes, report.host_bytes, report.storage_bytes) == ((), 0, 0, 0)
        assert report.reused_bytes == host.bytes_of("twin")
        assert host.provider.fetched_bytes == fetched_bytes


async def test_the_way_back_moves_only_what_was_evicted(store: WeightStore) -> None:
    flux, sdxl = "digits-flux", "digits-sdxl"
    both_bytes = Host(store, "cpu").bytes_of(flux, sdxl)
    host = Host(store, "cpu-private", both_bytes - 1000)
    await host.use(flux)
    await host.use(sdxl)
    evicted_bytes = host.bytes_of(flux, sdxl) - host.arena["resident_bytes"]
    assert 1000 <= evicted_bytes < host.bytes_of(flux)
    assert (await host.use(flux)).report.device_bytes == evicted_bytes
    assert host.arena["lingering_bytes"] == 0
    assert host.builder.skeletons.skeleton_stats().num_rebound >= 1


async def test_host_memory_is_leased_only_during_the_upload(store: WeightStore) -> None:
    private, shared = Host(store, "cpu-private"), Host(store, "cpu")
    for host in (private, shared):
        await host.use("digits-flux")
        assert host.provider.fetched_bytes > 0
    assert not +private.provider.leases
    assert sum(shared.provider.leases.values()) > 0
    assert shared.describe()["arena"] is None


async def test_a_leased_model_keeps_its_tensors_under_pressure(store: WeightStore) -> None:
    host = Host(store, "cpu-private", Host(store, "cpu").bytes_of("digits-sdxl") + 1000)
    async with host.lease("digits-sdxl", is_denoise_component) as lease:
        before = {name: p.clone() for name, p in lease.modules["unet"].named_parameters()}
        waiting = asyncio.ensure_future(host.use("digits-flux"))
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        assert host.arena["leased_bytes"] == host.bytes_of("digits-sdxl")
        for name, parameter in lease.modules["unet"].named_parameters():
            assert torch.equal(parameter, before[name])
    assert (await waiting).report.device_bytes > 0
    assert host.arena["leased_bytes"] <= host.arena["budget_bytes"]


async def test_many_switches_leave_nothing_behind(store: WeightStore) -> None:
    host = Host(store, "cpu-private", Host(store, "cpu").bytes_of("digits-sdxl") + 1000, kv_cache_bytes=2**16)
    for _ in range(30):
        await host.use(random.choice(NAMES))
        arena = host.arena
        assert arena["resident_bytes"] + arena["lingering_bytes"] <= arena["budget_bytes"]
    assert host.arena["lingering_bytes"] == 0
    stats = host.builder.skeletons.skeleton_stats()
    assert stats.num_built + stats.num_copied <= 6
    assert not +host.provider.leases


async def test_memory_that_is_let_go_right_after_a_refusal_is_found(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(store, "cpu-private", max(Host(store, "cpu").bytes_of(name) for name in NAMES) + 1000)
    async with host.lease("digits-flux", is_denoise_component) as lease:
        used = [parameter.data for module in lease.modules.values() for parameter in module.parameters()]
    del lease
    acquire, refusals = DeviceArena.acquire, []

    def acquire_or_let_go(self: DeviceArena, *args: Any, **options: Any) -> Any:
        try:
            return acquire(self, *args, **options)
        except StillInUse as refusal:
            refusals.append(str(refusal))
            used.clear()
            raise

    monkeypatch.setattr(DeviceArena, "acquire", acquire_or_let_go)
    assert (await host.use("digits-sdxl")).report.device_bytes > 0
    assert len(refusals) == 1


async def test_encoders_are_rebound_only_when_nobody_computes(store: WeightStore) -> None:
    host = Host(store, "cpu-private", builder=TextEncoderBuilder())
    lease = await host.use("digits-flux", is_text_encoder)
    encoder = lease.modules["text_encoder"]
    encoder.num_computing += 1
    expected = encoder.encoder.encode([encoder.encoder.tokenize(["a handwritten one"])[0]])[0]["pooled"]
    host._modules.table.evict([host._modules.table.entries[encoder.module_key]])
    again = (await host.use("digits-flux", is_text_encoder)).modules["text_encoder"]
    assert again.encoder.module is not encoder.encoder.module
    found = encoder.encoder.encode([encoder.encoder.tokenize(["a handwritten one"])[0]])[0]["pooled"]
    assert torch.equal(found, expected)


async def test_prefetch_and_pin_reach_the_device(store: WeightStore) -> None:
    host = Host(store, "cpu-private", Host(store, "cpu").bytes_of("digits-flux") + 1000)
    await host.pin("digits-flux", is_denoise_component)
    await host.prefetch("digits-flux", is_denoise_component)
    assert (await host.use("digits-flux")).report.device_bytes == 0
    assert host.arena["pinned_bytes"] == host.bytes_of("digits-flux")
    before = host.arena["moved_bytes"]
    await host.prefetch("digits-sdxl", is_denoise_component)  # only as much as has room
    assert host.arena["moved_bytes"] - before <= 1000 + host.bytes_of("digits-sdxl") / 2
    assert (await host.use("digits-flux")).report.device_bytes == 0


async def test_two_loras_of_equal_tensors_are_served_with_their_own_scales(store: WeightStore, tmp_path: Path) -> None:
    tensors = {"transformer.q.lora_A.weight": torch.rand(4, 8), "transformer.q.lora_B.weight": torch.rand(8, 4)}
    for alpha in (4, 64):
        source = tmp_path / f"alpha-{alpha}"
        source.mkdir()
        config = json.dumps({"transformer.lora_alpha": alpha})
        save_file(tensors, source / LORA_FILE, metadata={METADATA_KEY: config})
        externalize(store, f"alpha-{alpha}", source)
    host = Host(store, "cpu")
    wanted = ("vae", "lora")
    async with host.lease("digits-flux", lambda one: one.name in wanted, ["alpha-4", "alpha-64"]) as lease:
        scales = {name: adapter.components["transformer"]["q"].scale for name, adapter in lease.adapters.items()}
    assert scales == {"alpha-4": 1.0, "alpha-64": 16.0}


async def test_models_of_equal_modules_and_other_solver_settings_have_pipelines_of_their_own(
    store: WeightStore, tmp_path: Path
) -> None:
    source = tmp_path / "shifted"
    shutil.copytree(DEMO / "digits-flux", source)
    file = source / "scheduler" / "scheduler_config.json"
    shift = json.loads(file.read_text())["shift"] + 2
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift": shift}))
    externalize(store, "shifted", source, dtype="float32")
    host, pipelines = Host(store, "cpu"), {}
    for model in ("digits-flux", "twin", "shifted"):
        async with host.lease(model, is_denoise_component) as lease:
            make = partial(create_pipeline, lease.manifest.class_name or "", lease.skeleton, lease.modules)
            pipelines[model] = lease.bound(make, settings_hash(lease.skeleton))
    assert pipelines["digits-flux"] is pipelines["twin"]
    assert pipelines["shifted"].denoiser is pipelines["twin"].denoiser
    assert pipelines["shifted"]._solvers.config["shift"] == shift


def _config(store: WeightStore, device: str) -> ClusterConfig:
    models = [{"id": name, "path": str(DEMO / name), "dtype": "float32"} for name in NAMES]
    return ClusterConfig.model_validate(
        {
            "store": {"path": str(store.path)},
            "worker": {"device": device},
            "text_encoder": {"device": device},
            "models": models,
            "adapters": [
                {"id": "bold", "path": str(DEMO / "bold"), "base": ["digits-flux"], "dtype": "float32"},
            ],
        }
    )


@pytest.mark.drawn
@pytest.mark.parametrize("model", ["digits-flux", "digits-sdxl"])
def test_images_are_the_same_bit_for_bit(store: WeightStore, model: str) -> None:
    request = ImageRequest(
        model=model,
        prompt=f"a handwritten {random.choice(['two', 'five', 'nine'])}",
        seed=random.getrandbits(40),
        width=32,
        height=32,
        num_inference_steps=2,
        guidance_scale=3.0,
        max_sequence_length=16 if model == "digits-flux" else None,
        lora=(LoraUse(name="bold"),) if model == "digits-flux" else (),
    )
    shared, private = (LocalModels(_config(store, device)).generate(request) for device in ("cpu", "cpu-private"))
    assert np.array_equal(shared.images, private.images)
    assert shared.switch.device_bytes == 0
    assert private.switch.device_bytes == private.switch.attached_bytes > 0


async def test_text_is_the_same_token_by_token(store: WeightStore) -> None:
    left, right = random.sample(range(100), 2)
    tokens: list[list[int]] = []
    for device in ("cpu", "cpu-private"):
        engine = (await Host(store, device).use("adder")).modules["model"]
        prompt = engine.chats.encode([{"role": "user", "content": f"What is {left} + {right}?"}])
        engine.add_request(TextRequest("r", prompt, SamplingParams(max_tokens=12, temperature=1.0, seed=left)))
        tokens.append([])
        while engine.has_work:
            tokens[-1] += [token for delta in engine.step() for token in delta.token_ids]
    assert len(tokens[0]) > 0
    assert tokens[0] == tokens[1]


def test_the_device_budget_is_the_resident_bytes_unless_it_is_said() -> None:
    assert WorkerConfig(device="cpu-private", resident_bytes=7).weights_budget_bytes == 7
    assert WorkerConfig(device="cuda:1", resident_bytes=7, device_budget_bytes="2 KiB").weights_budget_bytes == 2048
    assert WorkerConfig(device="cpu", resident_bytes=7, device_budget_bytes=9).weights_budget_bytes == 7
    assert TextEncoderConfig(device="cpu-private").torch_device == "cpu"
    for device in ("gpu", "cuda:", "cuda:x", "CPU"):
        with pytest.raises(ValueError, match="not a device"):
            WorkerConfig(device=device)
