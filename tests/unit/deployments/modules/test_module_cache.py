"""The models of a replica: shared by what they are, bounded in bytes, held while in use."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.panics import Panic
from kit.waiting import until

from deployments.modules.budget import ModuleBudget
from deployments.modules.builder import Builder
from deployments.modules.cache import Lease, ModuleCache
from deployments.records.errors import CannotLoad, ModelUnavailable
from weights.platform.panics import Panicked
from weights.records.errors import BudgetExceeded, ExtentCorrupt
from weights.records.manifest import Component, ExtentRef, Manifest, TensorRef

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
ALL_EXTENTS = {weights for parts in MODELS.values() for weights, _ in parts.values()}


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
        class_name="FluxPipeline",
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
        self.asked: Counter[str] = Counter()
        self.fetches: Counter[str] = Counter()
        self.prefetched: Counter[str] = Counter()
        self.corrupt: set[str] = set()
        self.gates: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def fetch(self, extents: Sequence[ExtentRef]) -> dict[str, Any]:
        self.asked.update(extent.id for extent in extents)
        for extent in extents:
            if extent.id in self.gates:
                assert self.gates[extent.id].wait(WAIT_S)
        for extent in extents:
            if extent.id in self.corrupt:
                raise ExtentCorrupt(f"packs/p: extent {extent.id} is damaged", extent.id)
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

    def prefetch(self, extents: Sequence[ExtentRef]) -> None:
        self.prefetched.update(extent.id for extent in extents)

    @property
    def leased(self) -> set[str]:
        return {id_ for id_, count in self.leases.items() if count}


class Objects(Builder):
    """Builds objects; what is in `failing` raises."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failing: set[str] = set()
        self.retired: list[Any] = []
        self.on_build: Callable[[str], None] = lambda name: None
        self.make: Callable[[], Any] | None = None

    def __call__(self, component: Component, skeleton: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
        (ref,) = component.tensors.values()
        self.counts[ref.extent] += 1
        assert tensors["w"].nbytes == component.nbytes
        self.on_build(ref.extent)
        if ref.extent in self.failing:
            raise ValueError(f"{ref.extent} cannot be built")
        return self.make() if self.make else (ref.extent, self.counts[ref.extent])

    def retire(self, thing: Any) -> None:
        self.retired.append(thing)


class Host(ModuleCache):
    """A host over the fakes."""

    def __init__(self, budget_bytes: int = 100) -> None:
        self.provider, self.builder = Provider(), Objects()
        self.now_s = 0.0
        self.asked: list[tuple[str, str | None]] = []
        self.manifests_of: dict[tuple[str, str | None], Manifest] = {}
        super().__init__(
            self._manifest_of,
            self.provider,
            Path("/store/models"),
            ModuleBudget(budget_bytes),
            self.builder,
            clock=lambda: self.now_s,
        )

    async def _manifest_of(self, model: str, version: str | None) -> Manifest:
        self.asked.append((model, version))
        return self.manifests_of.get((model, version)) or manifest(model)

    async def use(self, model: str, adapters: Sequence[str] = ()) -> Lease:
        async with self.lease(model, lambda _: True, adapters) as lease:
            return lease

    def drop(self, component: Component) -> None:
        book = self._modules.table
        book.evict([book.entries[component.module_key]])

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


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


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


async def test_only_wanted_components_and_adapters_are_built() -> None:
    host = Host()
    async with host.lease("a", lambda component: component.name == "vae", ["lora"]) as lease:
        assert (set(lease.modules), set(lease.adapters)) == ({"vae"}, set())
    assert set(host.builder.counts) == {"shared"}
    async with host.lease("a", lambda component: component.name in ("vae", "lora"), ["lora"]) as lease:
        assert (set(lease.modules), set(lease.adapters)) == ({"vae"}, {"lora"})
        assert lease.adapter_keys == {"lora": manifest("lora").components["lora"].module_key}
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
    await until(lambda: host.provider.asked["a"] == 1)
    host.provider.gates["a"].set()
    leases = await asyncio.gather(*asking)
    assert len({id(lease.modules["unet"]) for lease in leases}) == 1
    assert host.builder.counts == {"a": 1, "shared": 1}
    assert sum("unet" in lease.report.built for lease in leases) == 1


async def test_a_module_that_is_built_is_had_while_the_next_one_takes_long() -> None:
    host = Host()
    going_on = threading.Event()
    host.builder.on_build = lambda name: assert_set(going_on) if name == "shared" else None
    whole = asyncio.ensure_future(host.use("a"))
    async with asyncio.timeout(WAIT_S), host.lease("a", lambda component: component.name == "unet") as lease:
        assert set(lease.modules) == {"unet"}
    assert not whole.done()
    going_on.set()
    assert set((await whole).modules) == {"unet", "vae"}


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


async def test_who_waited_for_room_keeps_nothing_alive_afterwards() -> None:
    """Without Python's collector: a refusal knows frames, and frames know what was built meanwhile."""

    class Module:
        """Counts those that are alive."""

        alive = 0

        def __init__(self) -> None:
            Module.alive += 1

        def __del__(self) -> None:
            Module.alive -= 1

    host = Host(100)
    host.builder.make = Module
    gc.collect()
    gc.disable()
    try:
        holder = host.hold("a")
        await holder.got.wait()
        waiting = asyncio.ensure_future(host.use("b"))
        await until(lambda: host._modules.num_waiting == 1)
        await holder.close()
        await asyncio.wait_for(waiting, WAIT_S)
        del waiting
        assert Module.alive == 3 == 1 + len(host.resident())  # the VAE is shared; what was evicted waits to be retired
        host.set_budget(0)
        host.builder.retired.clear()
        await until(lambda: Module.alive == 0)  # a thread that has just built one lets go of it in a moment
    finally:
        gc.enable()


@pytest.mark.parametrize("step", ["build", "fetch", "locate"])
async def test_a_panic_is_told_to_who_waits_and_the_next_request_builds_it(step: str) -> None:
    host = Host(100)
    places: dict[str, tuple[Any, str]] = {
        "build": (host.builder, "on_build"),
        "fetch": (host.provider, "fetch"),
        "locate": (host.manifests, "has_moved"),
    }
    place, name = places[step]
    sound = getattr(place, name)

    def panic(*arguments: Any) -> None:
        raise Panic("no entry found for key")

    setattr(place, name, panic)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises((CannotLoad, Panicked), match="Panic: no entry found for key"):
            await host.use("c")
        setattr(place, name, sound)
        assert (await host.use("c")).report.built == ("unet",)
    assert not host.occupancy().coming


@pytest.mark.drawn
@pytest.mark.parametrize("failing", [{"a"}, {"shared"}])
async def test_what_could_not_be_built_keeps_no_memory(failing: set[str]) -> None:
    """Without Python's collector: the error is kept with the module that it is about."""
    host, mapped = Host(100), list[weakref.ref[Any]]()
    fetch = host.provider.fetch

    def watched(extents: Sequence[ExtentRef]) -> dict[str, Any]:
        found = fetch(extents)
        mapped.extend(weakref.ref(array) for array in found.values())
        return found

    host.provider.fetch = watched  # type: ignore[method-assign]
    host.builder.failing = failing
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ModelUnavailable, match="cannot be built"):
            await host.use("a")
        assert mapped
        await until(lambda: not host.describe()["leased_bytes"])  # the others are built all the same
        host.set_budget(0)
        await until(lambda: all(array() is None for array in mapped))
    finally:
        gc.enable()


async def test_waiting_for_room_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.modules.cache.MAX_WAIT_FOR_ROOM_S", 0.02)
    host = Host(100)
    holder = host.hold("a")
    await holder.got.wait()
    with pytest.raises(BudgetExceeded, match=r"this replica's budget is 100 bytes; .*, 50 bytes are missing"):
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
    await until(lambda: host.provider.asked["a"] == 1)
    host.provider.gates["a"].set()
    errors = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(error) for error in errors] == [CannotLoad] * 5
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


async def test_models_that_share_all_modules_have_pipelines_of_their_own_settings() -> None:
    """The solver's config is in no module: with the modules alone as its key, the second one got the first one's."""
    host = Host(100)
    async with host.lease("a", lambda _: True) as lease:
        first, other = lease.bound(object, "shift 1"), lease.bound(object, "shift 3")
        assert first is not other
        assert lease.bound(object, "shift 1") is first
    host.drop(manifest("a").components["unet"])
    assert host._modules.pipelines._bound == {}


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
    assert await host.has_room_for(manifest("b"), lambda _: True)
    assert not await Host(89).has_room_for(manifest("a"), lambda _: True)
    assert await Host(30).has_room_for(manifest("a"), lambda component: component.name == "vae")


async def test_what_took_long_to_build_stays() -> None:
    host = Host(60)

    def take_long(name: str) -> None:
        host.now_s += {"c": 100.0, "d": 1.0, "e": 10.0}[name]

    host.builder.on_build = take_long
    for model in ("c", "d", "e"):
        await host.use(model)
    host.builder.on_build = lambda name: None
    await host.use("lora")
    assert host.provider.leased == {"c", "e", "lora"}
    assert host.builder.retired == [("d", 1)]


async def test_what_a_switch_takes_is_learned_from_when_it_has_room() -> None:
    host = Host(100)
    holder = host.hold("a")
    await holder.got.wait()
    waiting = asyncio.ensure_future(host.use("b"))
    await until(lambda: host._modules.num_waiting == 1)
    host.now_s += 50.0
    host.builder.on_build = lambda name: setattr(host, "now_s", host.now_s + 2.0)
    fill, before_s = host._filler.fill_slots, host.switches.speeds.fixed_s

    async def fill_late(*slots: Any) -> None:
        host.now_s += 3.0  # no thread is free
        await fill(*slots)

    host._filler.fill_slots = fill_late  # type: ignore[method-assign]
    await holder.close()
    lease = await asyncio.wait_for(waiting, WAIT_S)
    assert (lease.report.switch_ms, lease.report.build_ms) == (55e3, 2e3)
    assert host.switches.speeds.fixed_s == pytest.approx(before_s + 0.3 * (5.0 - before_s))


async def test_what_is_used_often_stays_and_is_forgotten_in_time() -> None:
    host = Host(60)
    host.builder.on_build = lambda name: setattr(host, "now_s", host.now_s + 1)
    for model in ("c", "c", "c", "c", "d", "e"):
        await host.use(model)
    await host.use("lora")
    assert host.provider.leased == {"c", "e", "lora"}
    host.now_s += 100_000
    for model in ("e", "e", "lora", "d"):
        await host.use(model)
    assert host.provider.leased == {"d", "e", "lora"}


async def test_those_who_wait_are_served_in_order() -> None:
    host = Host(101)
    holder = host.hold("a")
    await holder.got.wait()
    served: list[str] = []

    async def ask(model: str) -> None:
        await host.use(model)
        served.append(model)

    waiting = []
    for model in ("b", "huge", "a", "twin"):
        waiting.append(asyncio.ensure_future(ask(model)))
        await asyncio.sleep(0)
    await until(lambda: len(served) == 1)
    assert served == ["a"]  # resident: nobody waits for less because of it
    await holder.close()
    await asyncio.gather(*waiting)
    assert served == ["a", "b", "huge", "twin"]


async def test_a_stream_of_requests_for_what_is_resident_starves_nobody() -> None:
    """Somebody always leases a; b needs its room."""
    host = Host(100)
    holders = [host.hold("a")]
    await holders[0].got.wait()
    big = asyncio.ensure_future(host.use("b"))
    await asyncio.sleep(0)
    passed = 0
    for _ in range(20):
        host.now_s += 0.3
        holders.append(host.hold("a"))
        await asyncio.sleep(0.002)
        passed += holders[-1].got.is_set()
        await holders.pop(0).close() if holders[0].got.is_set() else None
        if big.done():
            break
    assert 1 <= passed <= 8  # threads that build are late on a busy machine
    assert (await asyncio.wait_for(big, WAIT_S)).report.built == ("unet",)
    for holder in holders:
        await asyncio.wait_for(holder.got.wait(), WAIT_S)
        await holder.close()


async def test_what_fits_beside_who_waits_goes_past() -> None:
    host = Host(110)
    await host.use("c")
    holder = host.hold("a")
    await holder.got.wait()
    waiting = asyncio.ensure_future(host.use("b"))
    await asyncio.sleep(0)
    host.now_s += 60.0
    assert (await asyncio.wait_for(host.use("c"), WAIT_S)).report.reused == ("unet",)
    assert not waiting.done()
    await holder.close()
    await asyncio.wait_for(waiting, WAIT_S)


async def test_two_models_that_exclude_each_other_both_get_on() -> None:
    host = Host(100)
    done: Counter[str] = Counter()

    async def client(model: str) -> None:
        for _ in range(15):
            async with host.lease(model, lambda _: True):
                await asyncio.sleep(0.001)
                host.now_s += 0.5
            done[model] += 1

    await asyncio.wait_for(asyncio.gather(*(client(model) for model in "abab")), WAIT_S)
    assert done == {"a": 30, "b": 30}
    assert host.builder.counts["a"] < 30


async def test_who_waits_has_its_extents_fetched_meanwhile() -> None:
    host = Host(100)
    holder = host.hold("a")
    await holder.got.wait()
    waiting = asyncio.ensure_future(host.use("b"))
    await until(lambda: bool(host.provider.prefetched))
    assert host.provider.prefetched == {"b": 1}
    await holder.close()
    await waiting


async def test_the_budget_changes_at_run_time() -> None:
    host = Host(100)
    for model in ("c", "d", "e"):
        await host.use(model)
    host.set_budget(45)
    assert host.provider.leased == {"d", "e"}
    holder = host.hold("d")
    await holder.got.wait()
    with pytest.raises(BudgetExceeded, match=r"^10 bytes are 10 bytes less than the leased and pinned bytes"):
        host.set_budget(10)
    assert host.provider.leased == {"d", "e"}
    await holder.close()
    holder = host.hold("e")
    await holder.got.wait()
    waiting = asyncio.ensure_future(host.use("twin"))
    await asyncio.sleep(0)
    host.set_budget(60)
    await asyncio.wait_for(waiting, WAIT_S)
    await holder.close()


async def test_what_is_pinned_stays_and_cannot_be_too_much() -> None:
    host = Host(60)
    await host.pin("c", lambda _: True)
    for model in ("c", "d", "e", "twin"):
        await host.use(model)
    assert "c" in host.provider.leased
    with pytest.raises(BudgetExceeded, match="50 bytes are missing"):
        await host.use("a")
    with pytest.raises(
        BudgetExceeded, match=r"'b' cannot be pinned: .* is 60 bytes, and 110 bytes would be pinned \(now: c\)"
    ):
        await host.pin("b", lambda _: True)
    assert [entry["pinned"] for entry in host.describe()["modules"] if entry["models"] == ["c"]] == [True]
    host.unpin("c")
    host.unpin("c")
    with pytest.raises(BudgetExceeded, match="30 bytes are missing"):
        await host.use("a")
    await host.use("d")
    await host.use("twin")
    assert "c" not in host.provider.leased


async def test_what_two_pinned_models_share_stays_until_neither_is() -> None:
    host = Host(200)
    for model in ("a", "b"):
        await host.pin(model, lambda _: True)
        await host.use(model)
    host.unpin("a")
    host.release_recalled(ALL_EXTENTS, False)
    assert host.provider.leased == {"b", "shared"}
    host.unpin("b")
    host.release_recalled(ALL_EXTENTS, False)
    assert host.provider.leased == set()


async def test_a_pin_follows_its_model_to_the_next_version() -> None:
    host = Host(200)
    host.manifests_of = {("a", None): version("a", "v1", "a")}
    host.manifests_of |= {("a", v): version("a", v, weights) for v, weights in (("v1", "a"), ("v2", "b"))}
    await host.pin("a", lambda _: True)
    async with host.lease("a", lambda _: True, version="v1"):
        pass
    host.manifests_of["a", None] = host.manifests_of["a", "v2"]
    async with host.lease("a", lambda _: True, version="v2"):
        await until(lambda: not host._tasks)
    host.release_recalled(ALL_EXTENTS, False)
    assert host.provider.leased == {"b", "shared"}
    # A request of before the update comes late: the pin stays where it is.
    async with host.lease("a", lambda _: True, version="v1"):
        await until(lambda: not host._tasks)
    host.release_recalled(ALL_EXTENTS, False)
    assert host.provider.leased == {"b", "shared"}
    host.unpin("a")
    host.release_recalled(ALL_EXTENTS, False)
    assert host.provider.leased == set()


async def test_a_next_version_that_does_not_fit_is_not_pinned() -> None:
    host = Host(100)
    host.manifests_of = {("c", None): manifest("c"), ("c", "v2"): version("c", "v2", "huge")}
    await host.pin("c", lambda _: True)
    host.manifests_of["c", None] = host.manifests_of["c", "v2"]
    with pytest.raises(BudgetExceeded):
        async with host.lease("c", lambda _: True, version="v2"):
            pass
    await until(lambda: not host._tasks)
    assert host.describe()["pinned_models"] == []


async def test_prefetch_builds_into_free_room_only() -> None:
    host = Host(100)
    await host.prefetch("c", lambda _: True)
    assert (await host.use("c")).report.built == ()
    await host.prefetch("a", lambda _: True)
    assert host.provider.leased == {"c"}
    assert host.provider.prefetched == {"a": 1, "shared": 1}
    await host.prefetch("c", lambda _: True)
    assert host.provider.prefetched.total() == 2


async def test_nothing_is_prefetched_into_room_that_somebody_waits_for() -> None:
    host = Host(100)
    holder = host.hold("c")
    await holder.got.wait()
    waiting = asyncio.ensure_future(host.use("a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    await host.prefetch("d", lambda _: True)
    assert host.provider.leased == {"c"}
    await holder.close()
    await asyncio.wait_for(waiting, WAIT_S)


async def test_the_node_gets_back_what_is_only_kept_for_later() -> None:
    host = Host(100)
    for model in ("c", "d", "lora"):
        await host.use(model)
    holder = host.hold("d")
    await holder.got.wait()
    host.release_recalled(["c", "d"], False)
    assert host.provider.leased == {"d", "lora"}
    host.release_recalled(ALL_EXTENTS, False)
    assert host.provider.leased == {"d"}
    await holder.close()


def version(name: str, fingerprint: str, weights: str) -> Manifest:
    """`name` with other weights in its unet."""
    old = manifest(name)
    unet = manifest(weights).components["unet"]
    return old.model_copy(
        update={
            "fingerprint": fingerprint,
            "components": {**old.components, "unet": unet},
            "extents": {**old.extents, **manifest(weights).extents},
        }
    )


async def test_a_version_that_is_replaced_serves_those_who_began_with_it() -> None:
    host = Host(200)
    host.manifests_of = {("a", "v1"): version("a", "v1", "a"), ("a", "v2"): version("a", "v2", "b")}
    async with host.lease("a", lambda _: True, version="v1") as old:
        async with host.lease("a", lambda _: True, version="v2") as new:
            assert (new.report.built, new.report.reused) == (("unet",), ("vae",))
            assert (old.modules["unet"], new.modules["unet"]) == (("a", 1), ("b", 1))
            assert old.modules["vae"] is new.modules["vae"]
        async with host.lease("a", lambda _: True, version="v1") as again:
            assert again.modules == old.modules
    assert host.asked == [("a", "v1"), ("a", "v2")]
    async with host.lease("a", lambda _: True) as newest:
        assert newest.manifest.fingerprint == "v2"
    assert len(host.asked) == 2


async def test_a_version_that_nobody_knows_any_more_is_served_by_the_present_one() -> None:
    host = Host(200)
    host.manifests_of = {("a", "v1"): version("a", "v2", "b")}
    async with host.lease("a", lambda _: True, version="v1") as lease:
        assert lease.manifest.fingerprint == "v2"


async def test_versions_of_an_adapter_are_told_apart() -> None:
    host = Host(200)
    other = manifest("lora").model_copy(
        update={
            "components": {"lora": manifest("c").components["unet"].model_copy(update={"name": "lora"})},
            "extents": manifest("c").extents,
        }
    )
    host.manifests_of = {("lora", "v1"): manifest("lora"), ("lora", "v2"): other}
    async with (
        host.lease("a", lambda _: True, ["lora"], adapter_versions={"lora": "v1"}) as old,
        host.lease("a", lambda _: True, ["lora"], adapter_versions={"lora": "v2"}) as new,
    ):
        assert old.adapters != new.adapters
        assert old.bound(object) is new.bound(object)


async def test_the_description_says_what_is_here_and_why() -> None:
    host = Host(150)
    holder = host.hold("a")
    await holder.got.wait()
    await host.use("b")
    shown = json.loads(json.dumps(host.describe()))
    assert (shown["resident_bytes"], shown["leased_bytes"], shown["budget_bytes"]) == (150, 90, 150)
    modules = {(entry["component"], *entry["models"]): entry for entry in shown["modules"]}
    assert modules.keys() == {("unet", "a"), ("vae", "a", "b"), ("unet", "b")}
    assert len({entry.pop("key") for entry in shown["modules"]}) == 3
    assert modules["vae", "a", "b"] == {
        "component": "vae",
        "models": ["a", "b"],
        "bytes": 30,
        "leases": 1,
        "pinned": False,
        "ready": True,
        "damaged": False,
    }
    switch = shown["last_switches"]["b"]
    assert (switch["host_bytes"], switch["device_bytes"], switch["reused_bytes"]) == (60, 0, 30)
    await holder.close()
    for model in ("c", "d", "e", "twin", "c", "lora"):
        await host.use(model)
    assert len(host.describe()["last_switches"]) == 5


async def test_an_evicted_adapter_takes_idle_pipelines_along() -> None:
    """One of them may know it, and would keep its memory."""
    host = Host(100)
    async with host.lease("a", lambda _: True, ["lora"]) as lease:
        pipeline = lease.bound(object)
    host.drop(manifest("lora").components["lora"])
    async with host.lease("a", lambda _: True) as lease:
        assert lease.bound(object) is not pipeline


async def test_evicting_a_model_takes_what_is_its_own_and_free() -> None:
    host = Host(200)
    for model in ("a", "b", "c"):
        await host.use(model)
    assert host.evict("a") == []
    assert host.provider.leased == {"b", "shared", "c"}
    holder = host.hold("b")
    await holder.got.wait()
    assert sorted(host.evict("b")) == ["unet", "vae"]
    await holder.close()
    await host.pin("c", lambda component: True)
    assert host.evict("c") == ["unet"]
    host.unpin("c")
    assert host.evict("c") == host.evict("c") == []
    assert host.provider.leased == {"b", "shared"}
