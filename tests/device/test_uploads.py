"""Uploads to a device: every byte arrives, siblings move only what differs, memory comes back."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng

from weights.memory.device_arena import DeviceArena
from weights.memory.device_space import DeviceKey, _DeviceCopy
from weights.memory.transfer import Pair
from weights.records.manifest import TensorRef

MIB = 2**20
SIZES = [1, 0, 3, 511, 512, 4097, MIB - 1, 3 * MIB + 5, 40 * MIB, *[300] * 500]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def transfer(device: torch.device) -> _DeviceCopy:
    return _DeviceCopy(device, chunk_bytes=4 * MIB, num_threads=4, num_buffers=5)


def random_pairs(device: torch.device) -> list[Pair]:
    generator = seeded_rng()
    pairs: list[Pair] = []
    for size in SIZES:
        source = generator.integers(0, 256, size, np.uint8)
        source.flags.writeable = False
        pairs.append((source, torch.zeros(size, dtype=torch.uint8, device=device)))
    return pairs


def assert_arrived(pairs: list[Pair]) -> None:
    for source, target in pairs:
        assert np.array_equal(np.asarray(source), target.cpu().numpy())


def test_every_byte_arrives(device: torch.device, module: Any, transfer: _DeviceCopy) -> None:
    for _ in range(3):
        pairs = random_pairs(device)
        report = transfer.copy(pairs)
        assert_arrived(pairs)
        assert report.nbytes == sum(SIZES)


def test_concurrent_uploads_share_the_ring(device: torch.device, module: Any, transfer: _DeviceCopy) -> None:
    work = [random_pairs(device) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(transfer.copy, work))
    for pairs in work:
        assert_arrived(pairs)


def test_an_upload_waits_for_kernels_that_still_use_the_memory(
    device: torch.device, module: Any, transfer: _DeviceCopy
) -> None:
    target = torch.zeros(8 * MIB, dtype=torch.uint8, device=device)
    source = torch.full((8 * MIB,), 7, dtype=torch.uint8)
    side = 256 if device.type == "sim" else 4096
    matrix = torch.rand(side, side, device=device)
    for _ in range(30):
        matrix = matrix @ matrix
    target.fill_(1)  # queued behind the products
    transfer.copy([(source, target)])
    assert torch.equal(target.cpu(), source)


def model(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.rand(MIB // 4, generator=generator).to(torch.bfloat16) for i in range(8)}


def keys_of(tensors: Tensors) -> dict[str, DeviceKey]:
    def key(tensor: torch.Tensor) -> TensorRef:
        sha256 = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        shape = tuple(tensor.shape)
        return TensorRef(extent="e", offset=0, nbytes=tensor.nbytes, dtype="BF16", shape=shape, sha256=sha256)

    return {name: key(tensor) for name, tensor in tensors.items()}


def test_a_switch_moves_the_difference_and_gives_the_memory_back(
    device: torch.device, module: Any, transfer: _DeviceCopy
) -> None:
    before = module.memory_allocated(device)
    a = model(1)
    b = a | {"w7": model(2)["w7"]}
    arena = DeviceArena(str(device), sum(tensor.nbytes for tensor in a.values()), transfer)
    tensors, report = arena.acquire(keys_of(a), a, "a")
    assert report.moved_bytes == sum(tensor.nbytes for tensor in a.values())
    del tensors
    arena.release([key.sha256 for key in keys_of(a).values()], "a")
    tensors, report = arena.acquire(keys_of(b), b, "b")
    assert report.moved_bytes == b["w7"].nbytes
    assert len(report.evicted) == 1
    for name, tensor in b.items():
        assert tensors[name].device == device
        assert torch.equal(tensors[name].cpu(), tensor)
    del tensors, tensor
    arena.release([key.sha256 for key in keys_of(b).values()], "b")
    arena.resize(0)
    assert module.memory_allocated(device) == before
    assert arena.stats().lingering_bytes == 0
