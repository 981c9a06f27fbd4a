"""Limits of memory: what fits is learned once, and tried again now and then. Counted in calls."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deployments.engines.costs.memory_limits import MAX_KINDS, PROBE_AFTER, MemoryLimits, is_out_of_memory, run_in_parts


class Device:
    """Doubles numbers, at most `room` at a time."""

    def __init__(self, room: int, items: list[int]) -> None:
        self.room = room
        self.items = items
        self.calls: list[int] = []
        self.failed = 0

    def __call__(self, start: int, stop: int) -> list[int]:
        self.calls.append(stop - start)
        if stop - start > self.room:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [2 * item for item in self.items[start:stop]]


def doubled(device: Device, limits: MemoryLimits, max_items: int = 10**6) -> list[int]:
    parts = run_in_parts(device, len(device.items), max_items, limits, "kind")
    return [item for part in parts for item in part]


def test_results_are_the_same_whatever_fits() -> None:
    chance = random.Random(1)
    for _ in range(50):
        device = Device(chance.randint(1, 40), [chance.randrange(1000) for _ in range(chance.randrange(50))])
        assert doubled(device, MemoryLimits(), chance.randint(1, 60)) == [2 * item for item in device.items]


def test_bounds_hold_from_the_start() -> None:
    device = Device(10**6, list(range(1000)))
    doubled(device, MemoryLimits(), 64)
    assert (max(device.calls), len(device.calls)) == (64, 16)


def test_a_limit_is_paid_for_once() -> None:
    device, limits = Device(8, list(range(16))), MemoryLimits()
    for _ in range(20):
        doubled(device, limits)
    assert device.failed == 1
    assert len(device.calls) == 1 + 20 * 2


def test_failed_probes_become_rare() -> None:
    device, limits = Device(8, list(range(16))), MemoryLimits()
    failures = []
    for _ in range(3):
        before = device.failed
        for _ in range(1000):
            doubled(device, limits)
        failures.append(device.failed - before)
    assert 2 <= failures[0] <= 8
    assert failures[2] <= 1
    assert set(doubled(device, limits)) == {2 * item for item in range(16)}


def test_memory_that_became_free_is_found_again() -> None:
    device, limits = Device(8, list(range(16))), MemoryLimits()
    doubled(device, limits)
    device.room = 10**6
    for _ in range(10 * PROBE_AFTER):
        doubled(device, limits)
    device.calls.clear()
    doubled(device, limits)
    assert device.calls == [16]


def test_kinds_have_limits_of_their_own_and_are_forgotten() -> None:
    limits = MemoryLimits()
    limits.ran_out("a", 16)
    assert (limits.allowed("a"), limits.allowed("b")) == (8, float("inf"))
    for number in range(MAX_KINDS):
        limits.ran_out(number, 16)
    assert limits.allowed("a") == float("inf")


def test_one_item_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        doubled(Device(0, [1, 2, 3]), MemoryLimits())


def test_other_errors_come_through_at_once() -> None:
    calls = []

    def broken(start: int, stop: int) -> None:
        calls.append((start, stop))
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_in_parts(broken, 16, 64, MemoryLimits(), "kind")
    assert calls == [(0, 16)]


def test_a_failed_call_keeps_no_memory_while_the_next_one_runs() -> None:
    """Its tensors would be in the way of the parts."""
    held: list[int] = []

    class Big:
        """Counts itself."""

        def __init__(self) -> None:
            held.append(1)

        def __del__(self) -> None:
            held.pop()

    seen: list[int] = []

    def run(start: int, stop: int) -> None:
        seen.append(len(held))
        big = Big()
        if stop - start > 1:
            raise MemoryError
        del big

    run_in_parts(run, 4, 4, MemoryLimits(), "kind")
    assert seen == [0] * len(seen)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_out_of_memory_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("mat1 and mat2 shapes"), KeyError("x")])
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_what_the_allocators_really_raise_is_recognised() -> None:
    with pytest.raises(RuntimeError) as by_torch:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as by_numpy:
        np.empty(2**60, np.uint8)
    assert is_out_of_memory(by_torch.value)
    assert is_out_of_memory(by_numpy.value)
