"""Staging buffers: reused, bounded, first come first served."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.waiting import wait_until

from weights.memory.host_pool import HostBufferPool, _size_class, allocate_pages
from weights.records.errors import BudgetExceeded, StoreError

WAIT_S = 10
PAGE = 4096


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


class Pins:
    """Page-locked memory, as a device sees it."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        assert address % PAGE == 0
        assert address not in self.locked
        self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.locked[address]


def use(pool: HostBufferPool, nbytes: int) -> int:
    with pool.acquire(nbytes) as buffer:
        return buffer.nbytes


@given(st.integers(0, 2**40))
def test_a_class_holds_what_was_asked_for_and_wastes_an_eighth_at_most(nbytes: int) -> None:
    size = _size_class(nbytes)
    assert nbytes <= size
    assert size % PAGE == 0
    assert size - nbytes <= PAGE + nbytes / 8
    assert _size_class(size) == size
    assert _size_class(size + 1) > size


def test_there_are_eight_classes_to_the_octave() -> None:
    classes = {_size_class(nbytes) for nbytes in range(2**20 + 1, 2**21 + 1, 512)}
    assert classes == {2**20 + step * 2**17 for step in range(1, 9)}


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 * 2**20 + 5])
def test_a_buffer_is_writable_aligned_and_of_the_size_asked_for(nbytes: int) -> None:
    with HostBufferPool(2**23).acquire(nbytes) as buffer:
        assert (buffer.nbytes, buffer.flags.writeable) == (nbytes, True)
        assert buffer.ctypes.data % PAGE == 0
        buffer[:] = 7
        assert int(buffer.sum()) == 7 * nbytes


def test_what_was_given_back_is_used_again() -> None:
    pool = HostBufferPool(2**20)
    with pool.acquire(10_000) as first:
        address = first.ctypes.data
    with pool.acquire(10_001) as again:  # of the same class
        assert again.ctypes.data == address
        with pool.acquire(10_000) as beside:
            assert beside.ctypes.data != address
    stats = pool.stats()
    assert (stats.hits, stats.misses, stats.waits, stats.hit_rate) == (1, 2, 0, pytest.approx(1 / 3))
    assert (stats.used_bytes, stats.held_bytes) == (0, 2 * 12288)


def test_a_new_pool_has_no_hit_rate_to_speak_of() -> None:
    assert HostBufferPool(PAGE).stats().hit_rate == 0.0


def test_unused_buffers_of_other_classes_make_room() -> None:
    pool = HostBufferPool(4 * PAGE)
    use(pool, PAGE)
    use(pool, 2 * PAGE)
    assert pool.stats().held_bytes == 3 * PAGE
    assert use(pool, 4 * PAGE) == 4 * PAGE
    assert pool.stats().held_bytes == 4 * PAGE


def test_more_than_the_bound_is_refused_and_all_of_it_is_not() -> None:
    pool = HostBufferPool(5 * PAGE + 17)  # whole pages only: the rest could not be used
    assert use(pool, 5 * PAGE) == 5 * PAGE
    with pytest.raises(BudgetExceeded, match=f"{5 * PAGE + 1} bytes is more than the pool's bound of {5 * PAGE} bytes"):
        use(pool, 5 * PAGE + 1)
    assert use(HostBufferPool(17 * PAGE), 17 * PAGE) == 17 * PAGE  # the class above would be larger than the bound


def test_who_finds_no_room_waits_for_it(threads: ThreadPoolExecutor) -> None:
    pool = HostBufferPool(4 * PAGE)
    with pool.acquire(3 * PAGE):
        waiting = threads.submit(use, pool, 2 * PAGE)
        wait_until(lambda: pool.stats().waits == 1)
        assert not waiting.done()
    assert waiting.result(WAIT_S) == 2 * PAGE


def test_a_large_request_is_served_before_small_ones_that_came_later(threads: ThreadPoolExecutor) -> None:
    pool = HostBufferPool(4 * PAGE)
    served: list[int] = []

    def take(nbytes: int) -> None:
        with pool.acquire(nbytes):
            served.append(nbytes)

    with pool.acquire(PAGE):  # room for small ones all the while
        futures: list[Future[None]] = [threads.submit(take, 4 * PAGE)]
        wait_until(lambda: pool.stats().waits == 1)
        for number in range(5):
            futures.append(threads.submit(take, PAGE))
            wait_until(lambda waits=2 + number: pool.stats().waits == waits)
        assert served == []
    for future in futures:
        future.result(WAIT_S)
    assert served[0] == 4 * PAGE
    assert sorted(served[1:]) == [PAGE] * 5


def test_eight_threads_never_hold_more_than_the_bound(threads: ThreadPoolExecutor) -> None:
    pins = Pins()
    pool = HostBufferPool(40 * PAGE, pins)
    peak = 0

    def work(seed: int) -> None:
        nonlocal peak
        rng = random.Random(seed)
        for _ in range(200):
            with pool.acquire(
                rng.randrange(40 * PAGE + 1) if rng.random() < 0.1 else rng.randrange(12 * PAGE)
            ) as buffer:
                buffer[:] = seed
                stats = pool.stats()
                peak = max(peak, stats.held_bytes)
                assert stats.used_bytes <= stats.held_bytes <= 40 * PAGE
                assert sum(list(pins.locked.values())) <= 40 * PAGE
                assert (buffer == seed).all()  # nobody else has it

    for future in [threads.submit(work, seed) for seed in range(8)]:
        future.result(60)
    stats = pool.stats()
    assert stats.used_bytes == 0
    assert 0 < peak <= 40 * PAGE
    assert stats.hits + stats.misses == 1600
    assert sum(pins.locked.values()) == stats.held_bytes


def test_a_buffer_comes_back_after_an_error_too() -> None:
    pool = HostBufferPool(PAGE)
    with pytest.raises(RuntimeError, match="sink"), pool.acquire(1):
        raise RuntimeError("sink")
    assert pool.stats().used_bytes == 0


def test_pages_are_locked_once_and_let_go_when_freed() -> None:
    pins = Pins()
    pool = HostBufferPool(4 * PAGE, pins)
    for _ in range(3):
        use(pool, PAGE)
    assert list(pins.locked.values()) == [PAGE]
    use(pool, 4 * PAGE)
    assert list(pins.locked.values()) == [4 * PAGE]
    pool.close()
    assert pins.locked == {}


def test_a_device_that_refuses_leaves_the_pool_as_it_was() -> None:
    class Refusing(Pins):
        def register(self, address: int, nbytes: int) -> None:
            raise RuntimeError("out of lockable memory")

    pool = HostBufferPool(PAGE, Refusing())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lockable"):
            use(pool, 1)
    assert (pool.stats().held_bytes, pool.stats().used_bytes) == (0, 0)


def test_closing_frees_what_is_unused_now_and_the_rest_later(threads: ThreadPoolExecutor) -> None:
    pool = HostBufferPool(4 * PAGE)
    use(pool, PAGE)
    with pool.acquire(3 * PAGE) as buffer:
        waiting = threads.submit(use, pool, 4 * PAGE)
        wait_until(lambda: pool.stats().waits == 1)
        pool.close()
        assert isinstance(waiting.exception(WAIT_S), StoreError)
        assert pool.stats().held_bytes == 3 * PAGE
        buffer[:] = 1
    assert pool.stats().held_bytes == 0
    with pytest.raises(StoreError, match="closed"):
        use(pool, 1)


def test_pages_stay_as_long_as_a_view_of_them() -> None:
    view = allocate_pages(3 * PAGE)[PAGE : PAGE + 10]
    view[:] = range(10)
    assert view.tolist() == list(range(10))


def test_memory_that_the_system_does_not_have_is_a_typed_error() -> None:
    with pytest.raises(BudgetExceeded, match="no memory for"):
        allocate_pages(2**62)
