"""The arena's book beside the device's own count, at every step of a long random run."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from kit.seeding import seeded_random

from weights.memory import device_space
from weights.memory.device_arena import DeviceArena
from weights.memory.device_space import _DeviceCopy
from weights.records.errors import BudgetExceeded, WeightsError

NUM_EVENTS = 10_000
Tensors = dict[str, torch.Tensor]


class Key(NamedTuple):
    sha256: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class BadDisk(Exception):
    """A view that cannot be read."""


def random_models(draw: random.Random) -> list[tuple[Tensors, dict[str, Key]]]:
    """Models of which some share tensors, of sizes that are no multiples of anything."""
    pool = [torch.rand(draw.choice([0, 1, 3, 100, 127, 128, 129, 1000])) for _ in range(24)]
    models = []
    for _ in range(8):
        tensors = {f"w{n}": tensor for n, tensor in enumerate(draw.sample(pool, draw.randint(2, 6)))}
        keys = {name: _key(tensor) for name, tensor in tensors.items()}
        models.append((tensors, keys))
    return models


def _key(tensor: torch.Tensor) -> Key:
    data = tensor.view(torch.uint8).numpy().tobytes()
    return Key(hashlib.sha256(data).hexdigest(), len(data), "F32", tuple(tensor.shape))


def test_allocated_memory_is_what_the_book_says(device: torch.device, module: Any) -> None:
    draw = seeded_random()
    models = random_models(draw)
    transfer = _DeviceCopy(device, chunk_bytes=1024, num_threads=1, num_buffers=2)
    if device.type == "cuda":  # the first kernels of a process load their libraries, which take memory
        torch.zeros(1, device=device).add_(1)
    before = module.memory_allocated(device)
    arena = DeviceArena(str(device), 12_000, transfer)
    held: dict[str, tuple[list[str], Tensors]] = {}
    kept: list[torch.Tensor] = []  # used without a lease
    moved_bytes = num_refused = 0
    link = module.memory_of(device) if device.type == "sim" else None
    uploaded_before = link.uploaded_bytes if link else 0

    for event in range(NUM_EVENTS):
        tensors, keys = draw.choice(models)
        kind = draw.random()
        try:
            if kind < 0.45:
                found, report = arena.acquire(keys, tensors, f"h{event}")
                held[f"h{event}"] = [key.sha256 for key in keys.values()], found
                moved_bytes += report.moved_bytes
                del found
            elif kind < 0.52:
                moved_bytes += arena.prefetch(keys, tensors).moved_bytes
            elif kind < 0.57:
                with contextlib.suppress(BadDisk):
                    arena.acquire(keys, _bad_views, f"bad{event}")  # when all of it is there, nothing is read
                arena.release([key.sha256 for key in keys.values()], f"bad{event}")
            elif kind < 0.60:
                damaged = draw.choice(list(keys.values())).sha256
                arena.invalidate(lambda key, damaged=damaged: key.sha256 == damaged)
            elif kind < 0.63:
                arena.pin([key.sha256 for key in keys.values()])
                arena.unpin([key.sha256 for _, others in models for key in others.values()])
            elif kind < 0.65:
                arena.resize(draw.choice([6_000, 12_000, 20_000]))
            elif kind < 0.75 and held:
                kept.append(draw.choice(list(draw.choice(list(held.values()))[1].values())))
            elif kept and kind < 0.85:
                kept.pop(draw.randrange(len(kept)))
            elif held:
                _let_go(arena, held, draw.choice(list(held)))
            if len(held) > 3:
                _let_go(arena, held, next(iter(held)))
        except BudgetExceeded:
            num_refused += 1
        stats = arena.stats()
        allocated = module.memory_allocated(device) - before
        if allocated != stats.resident_bytes + stats.lingering_bytes:
            gc.collect()  # an error that was raised may still know its frames
            stats = arena.stats()
            allocated = module.memory_allocated(device) - before
        assert allocated == stats.resident_bytes + stats.lingering_bytes
        assert stats.moved_bytes == moved_bytes
        if link:
            assert link.uploaded_bytes - uploaded_before == moved_bytes
    assert num_refused
    for name in list(held):
        _let_go(arena, held, name)
    kept.clear()
    arena.resize(0)
    assert module.memory_allocated(device) == before


def _let_go(arena: DeviceArena, held: dict[str, tuple[list[str], Tensors]], name: str) -> None:
    hashes, tensors = held.pop(name)
    tensors.clear()
    arena.release(hashes, name)


def _bad_views(names: Sequence[str]) -> Mapping[str, torch.Tensor]:
    raise BadDisk(names[0])


def test_a_full_device_is_refused_like_a_full_budget(device: torch.device, module: Any) -> None:
    """Memory of others on the device is not in the book: the arena says so, and goes on when there is room."""
    tensors = {"w": torch.rand(2**20)}
    keys = {"w": _key(tensors["w"])}
    arena = DeviceArena(str(device), 2**40)
    free, _ = module.mem_get_info(device)
    others = torch.empty(free - 2**20, dtype=torch.uint8, device=device)
    with pytest.raises(BudgetExceeded, match="though the arena's budget allows them"):
        arena.acquire(keys, tensors, "h")
    assert arena.stats().resident_bytes == 0
    del others
    found, _ = arena.acquire(keys, tensors, "h")
    assert torch.equal(found["w"].cpu(), tensors["w"])
    del found


def test_only_host_views_are_uploaded(device: torch.device, module: Any) -> None:
    arena = DeviceArena(str(device), 2**20)
    host = torch.rand(10)
    with pytest.raises(WeightsError, match=f"in host memory .* on {device}"):
        arena.acquire({"w": _key(host)}, {"w": host.to(device)}, "h")


def test_what_kernels_keep_is_no_room_for_forwards(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in keeps a known workspace at the first kernels of the process; an arena has that much less beside."""
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(device_space, "_kept_by_kernels", {})
    plain = DeviceArena(str(device), 2**20)
    assert plain.stats().kernel_bytes == device_space.kernel_workspace_bytes(device) >= 0
    monkeypatch.setattr(device_space, "_kept_by_kernels", {})
    monkeypatch.setattr(
        device_space,
        "_run_kernels",
        lambda device: kept.append(torch.empty(3 * 2**20, dtype=torch.uint8, device=device)),
    )
    room = plain.forwards.room_bytes()
    arenas = [DeviceArena(str(device), 2**20) for _ in range(2)]
    assert len(kept) == 1  # once
    for arena in arenas:
        assert arena.stats().kernel_bytes == 3 * 2**20
        assert arena.forwards.beside_bytes == plain.forwards.beside_bytes - 3 * 2**20
        assert arena.forwards.room_bytes() == room - 3 * 2**20
