"""A replica of two ranks: they build the same models, compute them together, and end together.

Ranks, their exchange, replica, keeper and clients are the real ones; only Ray between them is not.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from kit.tiny.pipelines import make
from kit.waiting import wait_until
from safetensors.torch import load_file, save_file
from unit.cluster.keeper.local_keeper import ActorHandle, FakeStore, ray_get

from cluster.keeper.actor import KeeperSettings, NodeKeeper
from cluster.registry.directory import ModelRecord
from cluster.registry.manifests import variant_of
from configs.cluster import ClusterConfig, WorkerConfig
from configs.model import GenerationDefaults
from configs.ranks import RanksConfig
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.ranks.group import RankLost
from deployments.engines.ranks.links import listening
from deployments.engines.records.protocol import EngineError, SamplingParams, TextRequest
from deployments.modules.loading import ComponentBuilder, is_denoise_component
from deployments.modules.ranked_building import FollowingBuilder, LeadingBuilder
from deployments.records import ImageRequest, ImageResult
from deployments.records.errors import CannotLoad
from deployments.replicas.replica_end import ReplicaEnd
from deployments.replicas.step_loop import DeviceThread
from deployments.requests.defaults import with_image_defaults
from deployments.services.image_service import ImageService
from deployments.services.rank_follower import RankFollower, join_group
from deployments.services.worker import Worker
from deployments.services.worker_ranks import WorkerRanks
from deployments.text.fallback import FallbackEncoder
from infra.offline.checkpoints import Form, quantize_checkpoint
from weights.memory.device_space import ArenaStats
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

pytestmark = pytest.mark.slow  # imports diffusers

DEMO = Path(__file__).parents[4] / "infra/demo/models"
MODEL, GUIDED, FLUX = "adder", "digits-sdxl", "digits-flux"
STOCK = "CogView4Pipeline"  # which diffusers' own code runs
TUNED = "tuned-adder"  # of which two matrices and a norm are others
PACKED: dict[str, Form] = {"adder-gguf": "gguf-q8_0", "adder-int8": "int8-group"}
QUESTION = "What is 12 + 7?"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    folder = tmp_path_factory.mktemp("ranks")
    store = WeightStore(folder / "store")
    for model in (MODEL, GUIDED, FLUX):
        externalize(store, model, DEMO / model, dtype="float32")
    make(STOCK, folder / STOCK)
    externalize(store, STOCK, folder / STOCK, dtype="float32")
    for model, form in PACKED.items():
        source = folder / f"{model}{'.gguf' if 'gguf' in form else ''}"
        quantize_checkpoint(DEMO / MODEL, source, form)
        externalize(store, model, source)
    shutil.copytree(DEMO / MODEL, folder / TUNED)
    tensors = load_file(folder / TUNED / "model.safetensors")
    for name in ("layers.1.self_attn.o_proj", "layers.2.mlp.gate_proj", "layers.3.input_layernorm"):
        tensors[f"model.{name}.weight"] += 0.01
    save_file(tensors, folder / TUNED / "model.safetensors", {"format": "pt"})
    externalize(store, TUNED, folder / TUNED, dtype="float32")
    return store


class Reference:
    """An answer of a follower, to be awaited or asked for by `ray_get`."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def __call__(self) -> Any:
        return self._future.result(60)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()


class FollowerProcess:
    """A follower on an event loop of its own, which stands for its process."""

    def __init__(self) -> None:
        self.follower = RankFollower()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.follower, name)
        return SimpleNamespace(
            remote=lambda *given: Reference(asyncio.run_coroutine_threadsafe(method(*given), self._loop))
        )

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


class Node:
    """One node's registry and keeper, and the leases of each holder."""

    def __init__(self, store: WeightStore, **worker: Any) -> None:
        models = [{"id": model, "path": str(DEMO / model)} for model in (MODEL, GUIDED, FLUX, STOCK, TUNED, *PACKED)]
        config = {"store": {"path": str(store.path)}, "models": models, "worker": {"kv_cache_bytes": 2**20, **worker}}
        if (simulated := getattr(torch, "sim", None)) is not None:
            config["simulated"] = simulated.config
        self.config = ClusterConfig.model_validate(config)
        settings = KeeperSettings(audit_bytes_per_s=0)
        self.keeper = NodeKeeper(str(store.packs), 2**29, "node", settings, store=FakeStore())
        found = {name: ModelRecord(name, "ready", entry=entry) for name, entry in self.config.entries.items()}

        def answering(answer: Any) -> Any:
            async def remote(*_: Any) -> Any:
                return answer(*_)

            return SimpleNamespace(remote=remote)

        self.registry = SimpleNamespace(
            keeper=answering(lambda node_id, replica: ActorHandle(self.keeper)),
            manifest=answering(lambda model, version: store.manifest(model)),
            report_attach=SimpleNamespace(remote=lambda *reported: None),
            find_model=answering(found.__getitem__),
            list_models=answering(lambda: [found[MODEL]]),
        )


@pytest.fixture
def node(store: WeightStore, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Node]:
    made = Node(store, **getattr(request, "param", {"ranks": {"tensor": 2, "timeout_s": 20}}))
    monkeypatch.setattr(ray, "get", ray_get)
    context = SimpleNamespace(get_node_id=lambda: "node", get_actor_name=lambda: "worker#1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    for name, found in (("connect_registry", lambda config: made.registry), ("replica_calls_on_loopback", bool)):
        monkeypatch.setattr(f"deployments.services.model_replica.{name}", found)
    monkeypatch.setattr("cluster.keeper.ray_extents.HEARTBEAT_S", 3600.0)
    yield made
    made.keeper.close()


class NotedEnd(ReplicaEnd):
    """The reasons why a replica would have ended."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def now(self, reason: str) -> None:
        self.reasons.append(reason)


class Replica:
    """A worker of two ranks, and what ended it."""

    def __init__(self, worker: Any, ranks: WorkerRanks, follower: RankFollower, end: NotedEnd) -> None:
        self.worker, self.ranks, self.follower, self.ended = worker, ranks, follower, end.reasons
        self.device = DeviceThread(end=end)

    def stats(self) -> list[ArenaStats]:
        """Return those of each rank's device."""
        return [tier.stats()[0] for tier in (self.worker._module_cache._tier, self.follower._tier)]

    async def answer(self, model: str = MODEL) -> str:
        """Return the text that the model writes, by its engine's own steps."""
        async with self.worker._module_cache.lease(model, is_denoise_component) as lease:
            return await self.device.run_work(written, lease.modules["model"])


def written(engine: LLMEngine) -> str:
    prompt = engine.encode_text(f"<user>{QUESTION}")
    engine.add_request(TextRequest("one", prompt, SamplingParams(max_tokens=12, ignore_eos=True)))
    text = ""
    while engine.has_work:
        text += "".join(delta.text for delta in engine.step())
        assert engine.failures == {}
    return text


async def alone(node: Node) -> Worker:
    """Return a worker of one process."""
    worker = object.__new__(Worker)  # the rest of its constructor needs Serve
    settings = node.config.worker.model_copy(update={"ranks": RanksConfig()})
    await worker._open(node.config, "alone", settings, ComponentBuilder(settings))
    return worker


async def picture(model: str, worker: Worker, settings: WorkerConfig, device: DeviceThread) -> Any:
    """Return an image."""
    asked: dict[str, Any] = {
        "prompt": "a handwritten five",
        "seed": 3,
        "width": 32,
        "height": 32,
        "num_inference_steps": 3,
    }
    if model == STOCK:
        asked["negative_prompt"] = "dull"
    request = ImageRequest(model=model, max_sequence_length=16 if model in (FLUX, STOCK) else None, **asked)
    cache = worker._module_cache
    manifest = await cache.manifests.find_version(model, None)
    variant = variant_of(manifest, cache.skeleton(manifest))
    request = with_image_defaults(request, GenerationDefaults(guidance_scale=4.0), manifest.class_name or "", variant)
    images = ImageService(cache, settings, device, worker._builder)
    encoder = FallbackEncoder(cache, device, warnings=())
    result = await images.generate(request, encoder.condition, encode_first=True)
    assert isinstance(result, ImageResult)
    return result.images


@asynccontextmanager
async def replica(node: Node) -> AsyncIterator[Replica]:
    settings, end = node.config.worker, NotedEnd()
    process = FollowerProcess()
    await process.open.remote(node.config, settings, "rank 1")
    meeting, listener = listening()
    coming = process.join.remote(1, meeting)
    group = await asyncio.to_thread(join_group, settings, 0, meeting, listener)
    await coming
    ranks = WorkerRanks(group, [process], end)
    ranks.watch()
    worker = object.__new__(Worker)  # the rest of its constructor needs Serve
    await worker._open(node.config, "rank 0", settings, LeadingBuilder(settings, ranks))
    try:
        yield Replica(worker, ranks, process.follower, end)
    finally:
        await asyncio.to_thread(group.close)
        process.close()


async def test_a_text_of_two_ranks_is_that_of_one(node: Node, store: WeightStore) -> None:
    async with (await alone(node))._module_cache.lease(MODEL, is_denoise_component) as lease:
        expected = await asyncio.to_thread(written, lease.modules["model"])
    async with replica(node) as two:
        assert [await two.answer(), await two.answer()] == [expected] * 2
        described = await two.ranks.describe(two.worker._builder.shared_bytes)
        assert (described["tensor"], [one["rank"] for one in described["processes"]]) == (2, [0, 1])
        assert all(one["sent_bytes"] > 0 and one["node"] == "node" for one in described["processes"])
        component = store.manifest(MODEL).components["model"]
        norms = sum(ref.nbytes for name, ref in component.tensors.items() if "norm" in name or "embed" in name)
        assert [one["weights_bytes"] for one in described["processes"]] == [(component.nbytes + norms) // 2] * 2
        await two.ranks.check()
        assert two.ended == []


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("node", "model", "axis", "tolerance"),
    [
        ({"ranks": {"cfg": 2, "timeout_s": 20}}, GUIDED, "cfg", 0),
        ({"ranks": {"sequence": 2, "timeout_s": 20}}, FLUX, "sequence", 1),  # its sums round otherwise
        ({"ranks": {"cfg": 2, "timeout_s": 20}}, STOCK, "cfg", 0),
    ],
    indirect=["node"],
)
async def test_an_image_of_two_ranks_is_that_of_one(node: Node, model: str, axis: Any, tolerance: int) -> None:
    settings = node.config.worker
    expected = await picture(model, await alone(node), settings, DeviceThread())
    async with replica(node) as two:
        found = [await picture(model, two.worker, settings, two.device) for _ in range(2)]
        for one in found:
            assert np.abs(np.int16(one) - np.int16(expected)).max() <= tolerance
        assert two.ranks.group.sent_bytes[axis] > 0
        assert await two.answer()  # of the language model, which rank 0 has alone
        assert len(two.follower._ready) == (1 if model == STOCK else 2)  # the denoiser, and a family's VAE


async def test_a_follower_lets_go_of_what_the_replica_evicts(node: Node) -> None:
    async with replica(node) as two:
        await two.answer()
        assert len(two.follower._ready) == 1
        assert two.worker._module_cache.evict(MODEL) == []
        leases = node.keeper.memory.held.holders
        wait_until(lambda: not leases.has_leases("rank 1"), "a follower that let go", 60)
        assert (two.follower._ready, two.follower._built) == ({}, {})
        assert await two.answer()
        assert set(two.follower._ready) == {"2"}


async def test_what_a_follower_cannot_build_fails_as_a_request_and_nothing_of_it_stays(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise EngineError("no kernel for this")

    async with replica(node) as two:
        with monkeypatch.context() as broken:
            broken.setattr(FollowingBuilder, "build_part", refuse)
            with pytest.raises(CannotLoad, match="model of 'adder' cannot be built: no kernel for this"):
                await two.answer()
        assert two.follower._ready == {}
        assert not node.keeper.memory.held.holders.has_leases("rank 1")
        assert await two.answer()
        assert two.ended == []


async def test_a_lost_rank_ends_the_replica_before_anybody_hears_of_the_step(node: Node) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("out of memory")

    async with replica(node) as two:
        await two.answer()
        two.follower._ready["1"] = fail
        with pytest.raises(RankLost, match="rank 1 does not answer"):
            await two.answer()
        assert any("rank 1 does not answer" in reason for reason in two.ended)


async def test_a_follower_that_ends_while_nothing_runs_ends_the_replica(node: Node) -> None:
    async with replica(node) as two:
        await asyncio.to_thread(two.ranks.group.close)
        async with asyncio.timeout(20):
            while not two.ended:
                await asyncio.sleep(0)
        assert two.ended == ["rank 1 is lost: it has ended"]


TWO_MEMORIES = pytest.mark.parametrize(  # tests/device has simulated ones: they patch torch for the life of a process
    "node", [{"device": "cpu-private", "ranks": {"tensor": 2, "timeout_s": 20}}], indirect=True
)


@pytest.mark.drawn
@TWO_MEMORIES
@pytest.mark.parametrize("model", [MODEL, *PACKED])
async def test_each_rank_moves_its_slices_alone(node: Node, store: WeightStore, model: str) -> None:
    """Both together move the model, and twice the tensors that each needs whole: norms, the embedding, and the scales
    of columns.
    """
    component = store.manifest(model).components["model"]
    of_columns = ("o_proj.scales", "down_proj.scales")
    whole = sum(
        ref.nbytes
        for name, ref in component.tensors.items()
        if "norm" in name or "embd" in name or "embed" in name or name.endswith(of_columns)
    )
    async with replica(node) as two:
        assert await two.answer(model)
        moved = [stats.moved_bytes for stats in two.stats()]
        assert moved[0] == moved[1]
        assert sum(moved) == component.nbytes + whole


@TWO_MEMORIES
async def test_a_switch_moves_the_difference_of_each_ranks_slices(node: Node, store: WeightStore) -> None:
    """The models share all but two matrices and a norm: each rank moves half of the two, and the norm."""
    before, after = (store.manifest(model).components["model"].tensors for model in (MODEL, TUNED))
    changed = {name: ref for name, ref in after.items() if ref.sha256 != before[name].sha256}
    assert len(changed) == 3
    async with replica(node) as two:
        expected = await two.answer()
        moved = [stats.moved_bytes for stats in two.stats()]
        assert await two.answer(TUNED)
        differences = [stats.moved_bytes - old for stats, old in zip(two.stats(), moved, strict=True)]
        half = sum(ref.nbytes // (1 if "norm" in name else 2) for name, ref in changed.items())
        assert differences == [half, half]
        assert await two.answer() == expected
