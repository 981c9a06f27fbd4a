"""The device arena: only what differs is moved, leased things stay, room is made by value, and errors undo all."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from kit.clock import Clock
from kit.waiting import wait_until

from weights.memory.arena_room import PER_TENSOR_S, USUAL_S_PER_BYTE, ArenaRoom, StillInUse
from weights.memory.device_arena import DeviceArena
from weights.memory.device_space import DeviceKey, DeviceSpace
from weights.memory.transfer import HostCopy, Pair, TransferReport
from weights.records.errors import BudgetExceeded, ExtentCorrupt, WeightsError
from weights.records.manifest import TensorRef
from weights.residency import contents

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int64: "I64", torch.float16: "F16"}
Tensors = dict[str, torch.Tensor]
BIG = 10**9


def key_of(tensor: torch.Tensor) -> TensorRef:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return TensorRef(
        extent="e",
        offset=0,
        nbytes=len(data),
        dtype=NAMES[tensor.dtype],
        shape=tuple(tensor.shape),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def keys_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, DeviceKey]:
    return {name: key_of(tensor) for name, tensor in tensors.items()}


def hashes_of(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [key_of(tensor).sha256 for tensor in tensors.values()]


class Key(NamedTuple):
    """An identity that is no TensorRef."""

    sha256: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def release_all(arena: DeviceArena, holder: str) -> None:
    arena.end_holder(holder)


def component(num_tensors: int, nbytes: int) -> Tensors:
    return {f"w{i}": torch.rand(nbytes // 4) for i in range(num_tensors)}


def model(**components: Tensors) -> Tensors:
    return {f"{part}.{name}": tensor for part, tensors in components.items() for name, tensor in tensors.items()}


def nbytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class CountingCopy(HostCopy):
    """A record of what was really copied; `gate` holds copies back; the first `num_failures` fail."""

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.nbytes = 0
        self.started, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.num_failures = 0

    def copy(self, pairs: Sequence[Pair]) -> TransferReport:
        self.started.set()
        assert self.gate.wait(30)
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("link down")
        report = super().copy(pairs)
        self.nbytes += report.nbytes
        return report


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def transfer() -> CountingCopy:
    return CountingCopy()


@pytest.fixture
def make_arena(clock: Clock, transfer: CountingCopy) -> Callable[..., DeviceArena]:
    def make(budget_bytes: int = BIG, device: str = "cpu-private") -> DeviceArena:
        return DeviceArena(device, budget_bytes, transfer, clock)

    return make


def acquire(arena: DeviceArena, tensors: Tensors, holder: str = "h"):
    acquired = arena.acquire(keys_of(tensors), tensors, holder)
    assert acquired.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert acquired.tensors[name].dtype == tensor.dtype
        assert torch.equal(acquired.tensors[name], tensor)
    return acquired


def test_a_sibling_moves_exactly_the_bytes_that_differ(make_arena, transfer: CountingCopy) -> None:
    encoder, vae = component(5, 4000), component(3, 800)
    a = model(encoder=encoder, vae=vae, transformer=component(7, 12_000))
    b = model(encoder=encoder, vae=vae, transformer=component(7, 12_000))
    arena = make_arena()
    first = acquire(arena, a, "a").report
    assert (first.wanted_bytes, first.moved_bytes, first.reused_bytes) == (nbytes_of(a), nbytes_of(a), 0)
    asked: list[str] = []

    def views(names: Sequence[str]) -> Tensors:
        asked.extend(names)
        return {name: b[name] for name in names}

    second = arena.acquire(keys_of(b), views, "b").report
    different = {name: tensor for name, tensor in b.items() if name.startswith("transformer")}
    assert sorted(asked) == sorted(different)
    assert second.moved_bytes == nbytes_of(different) == transfer.nbytes - nbytes_of(a)
    assert second.reused_bytes == nbytes_of(encoder) + nbytes_of(vae)
    assert arena.stats().moved_bytes == transfer.nbytes


def test_the_same_weights_under_another_name_move_nothing(make_arena, transfer: CountingCopy) -> None:
    weights = component(4, 400)
    arena = make_arena()
    mine = acquire(arena, {f"a.{name}": tensor for name, tensor in weights.items()}).tensors
    moved_bytes = transfer.nbytes

    def nothing(names: Sequence[str]) -> Tensors:
        raise AssertionError(names)

    renamed = {f"b.{name}": tensor.clone() for name, tensor in weights.items()}
    tensors, report = arena.acquire(keys_of(renamed), nothing, "b")
    assert (report.moved_bytes, report.reused_bytes, transfer.nbytes) == (0, nbytes_of(weights), moved_bytes)
    assert tensors["b.w0"].data_ptr() == mine["a.w0"].data_ptr()


def test_equal_tensors_of_one_model_are_one_copy_of_different_types_too(make_arena) -> None:
    ones = torch.randint(0, 255, (24,), dtype=torch.uint8)
    tensors = {
        "a": ones,
        "tied": ones.clone(),
        "f32": ones.view(torch.float32),
        "i64": ones.view(torch.int64).view(3, 1),
    }
    acquired = make_arena().acquire(keys_of(tensors), tensors, "h")
    assert acquired.report.wanted_bytes == acquired.report.moved_bytes == 24
    assert len({tensor.data_ptr() for tensor in acquired.tensors.values()}) == 1
    for name, tensor in tensors.items():
        assert acquired.tensors[name].shape == tensor.shape
        assert torch.equal(acquired.tensors[name].reshape(-1).view(torch.uint8), ones)


def test_scalars_empty_tensors_and_block_quantized_ones_have_their_forms(make_arena) -> None:
    plain = {"scalar": torch.rand(()), "empty": torch.rand(0, 3), "half": torch.rand(3, 5).to(torch.bfloat16)}
    arena = make_arena()
    acquire(arena, plain)
    blocks = torch.randint(0, 255, (2, 34), dtype=torch.uint8)
    key = Key("q", 68, "Q8_0", (2, 32))
    tensors, _ = arena.acquire({"q": key}, {"q": blocks}, "h")
    assert torch.equal(tensors["q"], blocks)
    assert arena.stats().resident_bytes == 4 + 30 + 68


def test_device_copies_are_private_on_cpu_private_and_views_on_cpu(make_arena, transfer: CountingCopy) -> None:
    weights = component(2, 40)
    private = acquire(make_arena(), weights).tensors
    assert private["w0"].data_ptr() != weights["w0"].data_ptr()
    copied_bytes = transfer.nbytes
    views, report = acquire(make_arena(device="cpu"), weights)
    assert views["w0"].data_ptr() == weights["w0"].data_ptr()
    assert (report.added_bytes, report.moved_bytes, transfer.nbytes) == (80, 0, copied_bytes)


def test_a_misaligned_view_of_the_host_is_copied_for_a_wider_type(make_arena) -> None:
    base = torch.randint(0, 255, (41,), dtype=torch.uint8)
    arena = make_arena(device="cpu")
    acquire(arena, {"bytes": base[1:]})
    wide = base[1:].clone().view(torch.float32)
    tensors, _ = arena.acquire(keys_of({"wide": wide}), {}, "h")
    assert torch.equal(tensors["wide"].view(torch.uint8), base[1:])


def test_the_least_valuable_goes_and_leased_things_stay(make_arena, clock: Clock) -> None:
    arena = make_arena(300)
    hot, cold, leased, new = (component(1, 100) for _ in range(4))
    for _ in range(5):
        acquire(arena, hot)
        arena.release(hashes_of(hot), "h")
        arena.release(hashes_of(hot), "h")
    clock.now_s = 1.0
    acquire(arena, leased, "busy")
    clock.now_s = 2.0
    acquire(arena, cold)
    arena.release(hashes_of(cold), "h")
    report = acquire(arena, new).report
    assert report.evicted == tuple(hashes_of(cold))
    assert set(arena._room.table.entries) == {*hashes_of(hot), *hashes_of(leased), *hashes_of(new)}
    assert arena.stats().num_evicted == 1


def test_what_is_dear_to_reload_stays(make_arena) -> None:
    """Each tensor costs something whatever its size, so of equally many bytes the small ones stay."""
    small, large = component(100, 40), component(1, 4000)
    arena = make_arena(8000)
    for weights in (small, large):
        acquire(arena, weights)
        release_all(arena, "h")
    assert acquire(arena, component(1, 40)).report.evicted == tuple(hashes_of(large))


def test_the_slower_the_uploads_the_less_it_matters_how_small_a_tensor_is(make_arena, clock: Clock, transfer) -> None:
    """Load times are measured: at 1 s per byte, a large tensor that was used once more outlives small ones."""
    slow_copy = transfer.copy

    def copy(pairs: Sequence[Pair]) -> TransferReport:
        clock.now_s += sum(len(target) for _, target in pairs) * 1.0
        return slow_copy(pairs)

    transfer.copy = copy
    small, large = component(10, 4), component(1, 40)
    arena = make_arena(80)
    for weights in (large, small, large):
        acquire(arena, weights)
        release_all(arena, "h")
    assert set(acquire(arena, component(1, 40)).report.evicted) == set(hashes_of(small))


def test_what_comes_back_keeps_its_past(make_arena) -> None:
    arena = make_arena(200)
    often, once = component(1, 100), component(1, 100)
    for _ in range(5):
        acquire(arena, often)
    release_all(arena, "h")
    acquire(arena, component(1, 200), "large")
    release_all(arena, "large")
    for weights in (often, once):
        acquire(arena, weights)
        release_all(arena, "h")
    assert acquire(arena, component(1, 100)).report.evicted == tuple(hashes_of(once))


def test_what_does_not_fit_changes_nothing_and_says_who_holds_the_room(make_arena, transfer: CountingCopy) -> None:
    arena = make_arena(350)
    held, free, pinned = component(1, 100), component(1, 100), component(1, 100)
    acquire(arena, held, "flux")
    for weights in (free, pinned):
        acquire(arena, weights)
    arena.pin(hashes_of(pinned))
    release_all(arena, "h")
    moved_bytes = transfer.nbytes
    large = {f"l{i}": torch.rand(10) for i in range(5)} | held
    with pytest.raises(BudgetExceeded) as failure:
        arena.acquire(keys_of(large), large, "sdxl")
    assert str(failure.value) == (
        "the budget of cpu-private is 350 bytes; 5 tensors for sdxl (l0, l1, l2, ...) need 200 bytes, "
        "50 bytes are missing (leased by: flux (100 bytes), sdxl (100 bytes); pinned: 100 bytes)"
    )
    assert (transfer.nbytes, arena.stats().num_tensors) == (moved_bytes, 3)
    assert arena.bytes_by_holder() == {"flux": 100}
    arena.unpin(hashes_of(pinned))
    acquire(arena, large, "sdxl")


def test_a_lease_per_acquire(make_arena) -> None:
    arena = make_arena(100)
    weights = component(1, 100)
    acquire(arena, weights, "a")
    acquire(arena, weights, "a")
    acquire(arena, weights, "b")
    for holder in ("a", "b", "nobody"):
        arena.release([*hashes_of(weights), "unknown"], holder)
    assert arena.bytes_by_holder() == {"a": 100}
    with pytest.raises(BudgetExceeded, match=r"leased by: a \(100 bytes\)"):
        arena.acquire(keys_of(other := component(1, 40)), other, "c")
    arena.release(hashes_of(weights), "a")
    arena.release(hashes_of(weights), "a")
    acquire(arena, other, "c")


def test_evicted_memory_comes_back_even_when_the_arena_knows_of_it_still(make_arena) -> None:
    arena = make_arena(100)
    weights = component(1, 100)
    tensors = acquire(arena, weights).tensors
    storage = torch.multiprocessing.reductions.StorageWeakRef(tensors["w0"].untyped_storage())
    release_all(arena, "h")
    del tensors
    acquire(arena, component(1, 100))
    assert storage.expired()
    assert arena.stats().lingering_bytes == 0


def test_memory_that_somebody_uses_without_a_lease_counts_until_they_let_go(make_arena) -> None:
    arena = make_arena(200)
    used, idle = component(1, 100), component(1, 100)
    tensors = acquire(arena, used).tensors
    acquire(arena, idle)
    release_all(arena, "h")
    first = component(1, 100)
    # `used` would have to go first, but its room does not become free; so the other one goes as well.
    assert acquire(arena, first, "f").report.evicted == (*hashes_of(used), *hashes_of(idle))
    assert torch.equal(tensors["w0"], used["w0"])
    assert arena.stats().lingering_bytes == 100
    second = component(1, 100)
    with pytest.raises(
        StillInUse, match=r"100 bytes are missing \(100 bytes more are evicted but still in use; leased by: f"
    ):
        arena.acquire(keys_of(second), second, "s")
    del tensors
    acquire(arena, second, "s")
    assert arena.stats().lingering_bytes == 0


def test_a_prefetch_saves_the_upload_and_leases_nothing(make_arena, transfer: CountingCopy) -> None:
    arena = make_arena()
    weights = component(4, 100)
    report = arena.prefetch(keys_of(weights), weights)
    assert (report.added_bytes, report.moved_bytes, report.wanted_bytes) == (400, 400, 400)
    assert arena.bytes_by_holder() == {}
    assert acquire(arena, weights).report.moved_bytes == 0
    assert arena.prefetch(keys_of(weights), weights).reused_bytes == transfer.nbytes == 400


def test_a_prefetch_costs_nothing_leased_more_valuable_or_prefetched(make_arena, clock: Clock) -> None:
    arena = make_arena(500)
    leased, hot, cold, next_, soon = (component(1, 100) for _ in range(5))
    acquire(arena, leased, "busy")
    for _ in range(3):
        acquire(arena, hot)
    acquire(arena, cold)
    release_all(arena, "h")
    clock.now_s = 60.0
    assert arena.prefetch(keys_of(next_), next_).evicted == ()
    large = {"x": torch.rand(25), "y": torch.rand(25), "z": torch.rand(25)}
    report = arena.prefetch(keys_of(large), large)
    assert (report.wanted_bytes, report.added_bytes, report.evicted) == (300, 200, tuple(hashes_of(cold)))
    assert arena.prefetch(keys_of(soon), soon).added_bytes == 0
    assert set(arena._room.table.entries) == {
        *hashes_of(leased),
        *hashes_of(hot),
        *hashes_of(next_),
        *hashes_of(large)[:2],
    }


def test_a_prefetch_does_not_evict_its_own(make_arena, clock: Clock) -> None:
    arena = make_arena(200)
    shared, own = component(1, 100), {"own": torch.rand(25)}
    acquire(arena, shared)
    acquire(arena, component(1, 100))
    release_all(arena, "h")
    clock.now_s = 10.0
    arena.prefetch(keys_of(shared | own), shared | own)
    assert {*hashes_of(shared), *hashes_of(own)} == set(arena._room.table.entries)


def test_a_prefetch_and_its_use_count_as_one_use(make_arena) -> None:
    arena = make_arena()
    weights = component(1, 100)
    arena.prefetch(keys_of(weights), weights)
    arena.prefetch(keys_of(weights), weights)
    acquire(arena, weights)
    assert [entry.popularity.count for entry in arena._room.table.entries.values()] == [1.0]
    acquire(arena, weights)
    assert [entry.popularity.count for entry in arena._room.table.entries.values()] == [2.0]


def test_what_a_prefetch_is_bringing_is_not_evicted(make_arena, transfer: CountingCopy) -> None:
    arena = make_arena(100)
    coming, wanted = component(1, 60), component(1, 60)
    transfer.gate.clear()
    with ThreadPoolExecutor(1) as threads:
        prefetch = threads.submit(arena.prefetch, keys_of(coming), coming)
        try:
            assert transfer.started.wait(30)
            with pytest.raises(BudgetExceeded, match=r"20 bytes are missing .*; prefetches under way: 60 bytes"):
                arena.acquire(keys_of(wanted), wanted, "h")
            assert arena.stats().arriving_bytes == 60
        finally:
            transfer.gate.set()
        assert prefetch.result(30).moved_bytes == 60
    acquire(arena, wanted)


def test_a_prefetch_leaves_out_what_has_no_room_after_all(make_arena, clock: Clock) -> None:
    arena = make_arena(200)
    used, new = component(1, 200), component(2, 100)
    tensors = acquire(arena, used).tensors
    release_all(arena, "h")
    clock.now_s = 60.0
    assert arena.prefetch(keys_of(new), new).added_bytes == 0
    assert (arena.stats().resident_bytes, arena.stats().lingering_bytes) == (0, 200)
    del tensors
    assert arena.prefetch(keys_of(new), new).added_bytes == 200


def test_views_of_the_host_are_its_memory_and_do_not_linger(make_arena) -> None:
    arena = make_arena(100, device="cpu")
    weights = component(1, 100)
    tensors = acquire(arena, weights).tensors
    release_all(arena, "h")
    acquire(arena, component(1, 100))
    assert tensors["w0"].data_ptr() == weights["w0"].data_ptr()
    assert arena.stats().lingering_bytes == 0


def test_what_is_remembered_of_the_past_is_bounded(make_arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MAX_REMEMBERED", 30)
    arena = make_arena(200)

    def acquire_others(count: int) -> None:
        for _ in range(count):
            release_all(arena, "h")
            acquire(arena, component(1, 200))
        release_all(arena, "h")

    often = component(1, 100)
    for _ in range(3):
        acquire(arena, often)
    acquire_others(29)
    acquire(arena, often)
    assert [entry.popularity.count for entry in arena._room.table.entries.values()] == [4.0]
    acquire_others(60)
    acquire(arena, often)
    assert [entry.popularity.count for entry in arena._room.table.entries.values()] == [1.0]


def test_a_smaller_budget_evicts_what_may_go(make_arena) -> None:
    arena = make_arena()
    leased, idle = component(1, 100), component(1, 100)
    acquire(arena, idle)
    release_all(arena, "h")
    acquire(arena, leased, "busy")
    with pytest.raises(
        BudgetExceeded, match=r"the budget of cpu-private cannot be 99 bytes: 1 bytes more .*busy \(100 bytes\)"
    ):
        arena.resize(99)
    assert arena.stats().budget_bytes == BIG
    assert arena.resize(100) == tuple(hashes_of(idle))
    assert (arena.stats().budget_bytes, arena.stats().resident_bytes) == (100, 100)


def test_concurrent_calls_upload_a_tensor_once(make_arena, transfer: CountingCopy) -> None:
    arena = make_arena()
    parts = [component(1, 4000) for _ in range(6)]

    def work(seed: int) -> None:
        chosen = random.Random(seed).sample(range(6), 4)
        acquire(arena, {f"p{i}": parts[i]["w0"] for i in chosen}, f"holder{seed}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(40)))
    assert transfer.nbytes == 6 * 4000
    assert len(arena.bytes_by_holder()) == 40
    assert arena.stats().arriving_bytes == 0


def test_threads_that_switch_under_pressure_end_within_the_budget(make_arena) -> None:
    arena = make_arena(1500)
    parts = [component(1, 100 * (1 + i % 3)) for i in range(20)]

    def work(seed: int) -> int:
        rng = random.Random(seed)
        num_refused = 0
        for _ in range(40):
            tensors = {f"p{i}": parts[i]["w0"] for i in rng.sample(range(20), 3)}
            try:
                acquire(arena, tensors, f"holder{seed}")
            except BudgetExceeded:
                num_refused += 1
            assert arena.stats().resident_bytes <= 1500
            arena.release(hashes_of(tensors), f"holder{seed}")
        return num_refused

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(work, range(4))) < 160
    assert arena.bytes_by_holder() == {}
    assert arena.stats().resident_bytes + arena.stats().lingering_bytes <= 1500


def test_a_failed_upload_leaves_nothing_behind(make_arena, transfer: CountingCopy) -> None:
    arena = make_arena(300)
    there, new = component(1, 100), component(2, 100)
    acquire(arena, there, "other")
    transfer.num_failures = 2
    with pytest.raises(RuntimeError, match="link down"):
        acquire(arena, there | {"n": new["w1"]})
    with pytest.raises(RuntimeError, match="link down"):
        arena.prefetch(keys_of(new), new)
    assert arena.bytes_by_holder() == {"other": 100}
    assert arena.stats().resident_bytes == 100
    acquire(arena, new)


def test_who_waits_for_an_upload_that_fails_does_it_itself(make_arena, transfer: CountingCopy) -> None:
    arena = make_arena()
    weights, own = component(1, 100), {"own": torch.rand(25)}
    fetching, lost = threading.Event(), threading.Event()
    asked: list[Sequence[str]] = []

    def broken(names: Sequence[str]) -> Tensors:
        fetching.set()
        assert lost.wait(30)
        raise ExtentCorrupt("gone")

    def views(names: Sequence[str]) -> Tensors:
        asked.append(names)
        return weights | own

    with ThreadPoolExecutor(2) as threads:
        failing = threads.submit(arena.prefetch, keys_of(weights), broken)
        assert fetching.wait(30)
        waiting = threads.submit(arena.acquire, keys_of(weights | own), views, "waiting")
        wait_until(lambda: arena.bytes_by_holder() == {"waiting": 200})
        lost.set()
        with pytest.raises(ExtentCorrupt, match="gone"):
            failing.result(30)
        report = waiting.result(30).report
    assert asked == [["own"], ["w0"]]
    assert (report.moved_bytes, report.reused_bytes, transfer.nbytes) == (200, 0, 200)
    assert arena.bytes_by_holder() == {"waiting": 200}


def test_a_host_view_that_cannot_be_had_leaves_nothing_behind(make_arena) -> None:
    arena = make_arena()
    keys = keys_of(component(2, 100))

    def lost(names: Sequence[str]) -> Tensors:
        raise ExtentCorrupt("gone")

    with pytest.raises(ExtentCorrupt, match="gone"):
        arena.acquire(keys, lost, "h")
    with pytest.raises(WeightsError, match=r"tensor 'w0': there is no host view of it \(given: 0 others\)"):
        arena.acquire(keys, lambda names: {}, "h")
    assert (arena.stats().num_tensors, arena.bytes_by_holder()) == (0, {})


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (torch.rand(5), r"tensor 'w': expected 40 bytes in host memory \(F32 \[10\]\), got 20 on cpu \(torch.float32"),
        (torch.rand(10, device="meta"), "got 40 on meta"),
    ],
)
def test_a_view_that_is_not_what_was_wanted_is_named(make_arena, view: torch.Tensor, message: str) -> None:
    arena = make_arena()
    with pytest.raises(WeightsError, match=message):
        arena.acquire(keys_of({"w": torch.rand(10)}), {"w": view}, "h")
    assert arena.stats().resident_bytes == 0


def test_two_sizes_for_one_hash_are_refused(make_arena) -> None:
    arena = make_arena()
    keys = {"a": Key("x", 4, "F32", (1,)), "b": Key("x", 2, "F16", (1,))}
    with pytest.raises(WeightsError, match=r"F16 \[1\] has 2 bytes, tensor x has 4"):
        arena.acquire(keys, {"a": torch.rand(1), "b": torch.rand(1).half()}, "h")
    assert arena.bytes_by_holder() == {}


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99", "cpu-public", ""])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(WeightsError, match=f"no device '{device}'"):
        DeviceArena(device, 1)


def test_a_device_with_less_memory_than_its_budget_says_so(make_arena, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make_arena()
    weights = component(1, 100)
    keys = keys_of(weights)

    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        with pytest.raises(
            BudgetExceeded, match=r"cpu-private has no memory for 100 bytes, .* allows them: out of mem"
        ):
            arena.acquire(keys, weights, "h")
    assert arena.stats().resident_bytes == 0


def test_a_byte_takes_as_long_as_uploads_did_the_latest_counting_a_fifth() -> None:
    room = ArenaRoom(DeviceSpace("cpu-private", HostCopy(num_threads=1)), BIG, Clock())
    assert room.reload_rate(10) == pytest.approx(PER_TENSOR_S / 10 + USUAL_S_PER_BYTE)
    room.note_upload(100, 1.0)
    assert room.reload_rate(10) == pytest.approx(PER_TENSOR_S / 10 + 0.01)
    room.note_upload(100, 2.0)
    assert room.reload_rate(1000) == pytest.approx(PER_TENSOR_S / 1000 + 0.012)
    assert room.moved_bytes == 200
