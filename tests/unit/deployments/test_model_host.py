"""The models of a replica: shared by what they are, bounded in bytes, held while in use."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deployments.errors import ModelUnavailable
from deployments.model_host import Lease, ModelHost
from weights.errors import BudgetExceeded, ExtentCorrupt
from weights.manifest import Component, ExtentRef, Manifest, TensorRef

WAIT_S = 10
# Models by name: component -> (what the weights are, bytes). Equal weights are the same module.
MODELS = {
    "a": {"unet": ("a", 60), "vae": ("shared", 30)},
    "b": {"unet": ("b", 60), "vae": ("shared", 30)},
    "c": {"unet": ("c", 20)},
    "d": {"unet": ("d", 20)},
    "e": {"unet": ("e", 20)},
    "huge": {"unet": ("huge", 101)},
    "lora": {"lora": ("lora", 5)},
    "twin": {"one": ("twin", 40), "two": ("twin", 40)},
}


def manifest(name: str) -> Manifest:
    components, extents = {}, {}
    for part, (weights, nbytes) in MODELS[name].items():
        sha256 = hashlib.sha256(weights.encode()).hexdigest()
        extents[weights] = ExtentRef(id=weights, pack="p", offset=0, nbytes=nbytes, checksum="0" * 32)
        ref = TensorRef(extent=weights, offset=0, nbytes=nbytes, dtype="U8", shape=(nbytes,), sha256=sha256)
        components[part] = Component(
            name=part, library="fake", class_name="Fake", folder=part, tensors={"w": ref}, config_hash="h"
        )
    return Manifest(
        model=name,
        kind="diffusion",
        class_name="Fake",
        skeleton=f"{name}/skeleton",
        source="",
        fingerprint="",
        components=components,
        extents=extents,
    )


class Provider:
    """Counts the leases of each extent, and refuses to go below none."""

    def __init__(self) -> None:
        self.leases: Counter[str] = Counter()
        self.fetches: Counter[str] = Counter()
        self.corrupt: set[str] = set()
        self.gates: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def fetch(self, extents: Sequence[ExtentRef]) -> dict[str, Any]:
        for extent in extents:
            if extent.id in self.gates:
                assert self.gates[extent.id].wait(WAIT_S)
        for extent in extents:
            if extent.id in self.corrupt:
                raise ExtentCorrupt(f"packs/p: extent {extent.id} is damaged")
        with self._lock:
            ids = [extent.id for extent in extents]
            self.leases.update(ids)
            self.fetches.update(ids)
        return {extent.id: np.zeros(extent.nbytes, np.uint8) for extent in extents}

    def release(self, extents: Sequence[ExtentRef]) -> None:
        with self._lock:
            for extent in extents:
                assert self.leases[extent.id] > 0, f"{extent.id} was released more often than fetched"
                self.leases[extent.id] -= 1

    @property
    def leased(self) -> set[str]:
        return {id_ for id_, count in self.leases.items() if count}


class Builder:
    """Builds objects; what is in `failing` raises."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failing: set[str] = set()

    def __call__(self, component: Component, skeleton: Path, tensors: dict[str, torch.Tensor]) -> Any:
        (ref,) = component.tensors.values()
        self.counts[ref.extent] += 1
        assert tensors["w"].nbytes == component.nbytes
        if ref.extent in self.failing:
            raise ValueError(f"{ref.extent} cannot be built")
        return (ref.extent, self.counts[ref.extent])


class Host(ModelHost):
    """A host over the fakes."""

    def __init__(self, budget_bytes: int = 100) -> None:
        self.provider, self.builder = Provider(), Builder()
        super().__init__(self._manifest_of, self.provider, Path("/store/models"), budget_bytes, self.builder)

    async def _manifest_of(self, model: str) -> Manifest:
        return manifest(model)

    async def use(self, model: str, adapters: Sequence[str] = ()) -> Lease:
        async with self.lease(model, lambda _: True, adapters) as lease:
            return lease

    def hold(self, model: str) -> Holder:
        return Holder(self, model)


class Holder:
    """A task that leases a model until told to end."""

    def __init__(self, host: Host, model: str) -> None:
        self.got = asyncio.Event()
        self.end = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(host, model))

    async def _run(self, host: Host, model: str) -> None:
        async with host.lease(model, lambda _: True):
            self.got.set()
            await self.end.wait()

    async def close(self) -> None:
        self.end.set()
        await self.task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_models_share_what_is_the_same() -> None:
    host = Host(150)
    first = await host.use("a")
    assert (first.report.built, first.report.reused, first.report.attached_bytes) == (("unet", "vae"), (), 90)
    second = await host.use("b")
    assert (second.report.built, second.report.reused, second.report.attached_bytes) == (("unet",), ("vae",), 60)
    assert second.modules["vae"] is first.modules["vae"]
    assert second.skeleton == Path("/store/models/b/skeleton")
    again = await host.use("a")
    assert (again.report.built, again.report.attached_bytes, again.report.attach_ms) == ((), 0, 0)
    assert host.builder.counts == {"a": 1, "b": 1, "shared": 1}
    assert sorted(host.resident().values()) == [30, 60, 60]


async def test_only_wanted_components_and_the_adapters_are_built() -> None:
    host = Host()
    async with host.lease("a", lambda component: component.name == "vae", ["lora"]) as lease:
        assert (set(lease.modules), set(lease.adapters)) == ({"vae"}, {"lora"})
    assert set(host.builder.counts) == {"shared", "lora"}


async def test_equal_components_of_one_model_are_one_module() -> None:
    host = Host(40)
    lease = await host.use("twin")
    assert lease.modules["one"] is lease.modules["two"]
    assert host.builder.counts == {"twin": 1}
    await host.use("c")
    assert host.provider.leased == {"c"}


async def test_a_module_is_built_once_however_many_ask() -> None:
    host = Host()
    host.provider.gates["a"] = threading.Event()
    asking = [asyncio.ensure_future(host.use("a")) for _ in range(16)]
    await until(lambda: host.builder.counts["shared"] == 1)
    host.provider.gates["a"].set()
    leases = await asyncio.gather(*asking)
    assert len({id(lease.modules["unet"]) for lease in leases}) == 1
    assert host.builder.counts == {"a": 1, "shared": 1}
    assert sum("unet" in lease.report.built for lease in leases) == 1


async def test_the_least_recently_used_goes_first() -> None:
    host = Host(60)
    for model in ("c", "d", "e", "c"):
        await host.use(model)
    await host.use("lora")
    assert host.provider.leased == {"c", "e", "lora"}
    await host.use("d")
    assert host.provider.leased == {"c", "d", "lora"}
    assert host.provider.leases.total() == 3


async def test_what_is_leased_is_never_evicted_and_room_is_waited_for() -> None:
    host = Host(100)
    holder = host.hold("a")
    await holder.got.wait()
    waiting = asyncio.ensure_future(host.use("b"))
    await asyncio.wait([waiting], timeout=0.02)
    assert not waiting.done()
    assert host.provider.leased == {"a", "shared"}
    await holder.close()
    lease = await asyncio.wait_for(waiting, WAIT_S)
    assert (lease.report.built, lease.report.reused) == (("unet",), ("vae",))
    assert host.provider.leased == {"b", "shared"}


async def test_waiting_for_room_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.model_host.MAX_WAIT_FOR_ROOM_S", 0.02)
    host = Host(100)
    holder = host.hold("a")
    await holder.got.wait()
    with pytest.raises(BudgetExceeded, match="50 bytes are missing under this replica's budget of 100"):
        await host.use("b")
    assert host.provider.leased == {"a", "shared"}
    await holder.close()
    await host.use("b")


async def test_what_can_never_fit_fails_at_once() -> None:
    host = Host(100)
    await host.use("a")
    with pytest.raises(BudgetExceeded, match="need 101 bytes"):
        await asyncio.wait_for(host.use("huge"), 1)
    assert host.provider.leased == {"a", "shared"}


async def test_what_can_never_fit_fails_at_once_beside_running_work() -> None:
    host = Host(100)
    holder = host.hold("c")
    await holder.got.wait()
    with pytest.raises(BudgetExceeded, match="need 101 bytes"):
        await asyncio.wait_for(host.use("huge"), 1)
    await holder.close()


async def test_a_failure_to_build_reaches_all_and_the_next_attempt_works() -> None:
    host = Host()
    host.builder.failing = {"a"}
    host.provider.gates["a"] = threading.Event()
    asking = [asyncio.ensure_future(host.use("a")) for _ in range(5)]
    await until(lambda: host.builder.counts["shared"] == 1)
    host.provider.gates["a"].set()
    errors = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(error) for error in errors] == [ModelUnavailable] * 5
    assert {str(error) for error in errors} == {"unet of 'a' cannot be built: a cannot be built"}
    assert host.builder.counts["a"] == 1
    await until(lambda: host.provider.leased == {"shared"})
    host.builder.failing = set()
    lease = await host.use("a")
    assert (lease.report.built, lease.report.reused) == (("unet",), ("vae",))
    assert host.provider.leases == {"a": 1, "shared": 1}


async def test_a_damaged_extent_names_the_tensors_that_it_takes_down() -> None:
    host = Host()
    host.provider.corrupt = {"shared"}
    with pytest.raises(ExtentCorrupt, match=r"extent shared is damaged; it holds vae\.w"):
        await host.use("a")
    host.provider.corrupt = set()
    await host.use("a")
    assert host.provider.leases == {"a": 1, "shared": 1}


async def test_a_failed_fetch_releases_nothing_of_others() -> None:
    host = Host(200)
    await host.use("a")
    host.provider.corrupt = {"huge"}
    with pytest.raises(ExtentCorrupt):
        await host.use("huge")
    assert host.provider.leases == {"a": 1, "shared": 1}


async def test_who_is_cancelled_while_it_is_built_leaks_no_lease() -> None:
    host = Host(90)
    host.provider.gates["c"] = threading.Event()
    asking = asyncio.ensure_future(host.use("c"))
    await until(lambda: len(host.resident()) == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    # Nobody waits for c any more, but its bytes are on their way: they count, and they stay until they are here.
    for model in ("d", "e", "twin"):
        await host.use(model)
    assert (host.provider.leased, sorted(host.resident().values())) == ({"e", "twin"}, [20, 20, 40])
    host.provider.gates["c"].set()
    await until(lambda: host.provider.leased == {"c", "e", "twin"})
    assert (await asyncio.wait_for(host.use("c"), WAIT_S)).report.built == ()
    await host.use("a")
    assert host.provider.leased == {"a", "shared"}
    assert host.provider.leases.total() == len(host.resident())


async def test_who_is_cancelled_while_waiting_for_room_leaks_no_lease() -> None:
    host = Host(100)
    holder = host.hold("a")
    await holder.got.wait()
    waiting = asyncio.ensure_future(host.use("b"))
    await asyncio.wait([waiting], timeout=0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await holder.close()
    for model in ("c", "d", "e", "b"):
        await asyncio.wait_for(host.use(model), WAIT_S)
    assert sum(host.resident().values()) <= 100


async def test_who_is_cancelled_while_running_gives_its_lease_back() -> None:
    host = Host(100)
    holder = host.hold("a")
    await holder.got.wait()
    holder.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holder.task
    await asyncio.wait_for(host.use("b"), WAIT_S)


async def test_what_is_bound_is_made_once_and_again_when_a_module_was() -> None:
    host = Host(100)
    made: list[dict[str, Any]] = []

    def bind(lease: Lease) -> int:
        def make() -> int:
            made.append(lease.modules)
            return len(made)

        return lease.bound(make)

    assert [bind(await host.use("a")) for _ in range(3)] == [1, 1, 1]
    await host.use("b")
    assert bind(await host.use("a")) == 2
    assert made[1]["unet"] == ("a", 2)
    assert made[1]["vae"] is made[0]["vae"]


async def test_many_requests_on_little_room_all_end() -> None:
    host = Host(100)
    done = await asyncio.gather(*(host.use("abcdec"[i % 6]) for i in range(60)))
    assert len(done) == 60
    assert sum(host.resident().values()) <= 100
    assert len(host.provider.leased) == len(host.resident())
    assert host.provider.leases.total() == len(host.resident())


async def test_a_pipeline_is_bound_to_the_model_and_not_to_the_adapters_of_a_request() -> None:
    """Requests with and without an adapter meet in one pipeline, so that they can merge."""
    host = Host(100)
    async with host.lease("a", lambda _: True) as plain:
        pipeline = plain.bound(object)
        async with host.lease("a", lambda _: True, ["lora"]) as adapted:
            assert adapted.bound(object) is pipeline
            assert adapted.adapters.keys() == {"lora"}
            assert adapted.modules == plain.modules
            assert host.holds("lora")


async def test_room_is_told_with_what_is_shared() -> None:
    host = Host(150)
    await host.use("a")
    assert host.has_room_for(manifest("b"), lambda _: True)
    assert not Host(89).has_room_for(manifest("a"), lambda _: True)
    assert Host(30).has_room_for(manifest("a"), lambda component: component.name == "vae")
