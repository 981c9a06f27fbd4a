"""Slices of a tensor, from the bytes that they consist of."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from weights.dtypes import BLOCK_SIZES
from weights.errors import ExtentCorrupt, StoreError, WeightsError
from weights.externalize import externalize
from weights.loading.slicing import MAX_GAP_BYTES, TensorSlice, read_slice, slice_view
from weights.manifest import Component, ExtentRef, Manifest, TensorRef
from weights.store import WeightStore
from weights.torch_dtypes import TORCH_DTYPES


class CountedReads:
    """os.preadv that counts, and gives `at_most` bytes per call."""

    def __init__(self, at_most: int = 2**40) -> None:
        self.at_most = at_most
        self.nbytes = self.num_calls = 0

    def __call__(self, file: int, buffers: list[memoryview], position: int) -> int:
        kept, room = [], self.at_most
        for buffer in buffers:
            kept.append(buffer[:room])
            room -= len(kept[-1])
        read = os.preadv(file, [buffer for buffer in kept if len(buffer)], position)
        self.nbytes += read
        self.num_calls += 1
        return read


def same(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare by bytes: torch.equal does not know every dtype."""
    raw = [part.contiguous().view(-1).view(torch.uint8) for part in (tensor, expected)]
    return tensor.shape == expected.shape and torch.equal(*raw)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    whole = {f"t{number}": torch.rand(shape) for number, shape in enumerate([(8,), (4, 8), (12, 4, 8), (4, 4, 12, 2)])}
    whole |= {name: torch.randint(0, 2, (4, 8)).to(dtype) for name, dtype in TORCH_DTYPES.items()}
    return whole | {"odd": torch.rand(7, 3), "scalar": torch.tensor(1.0), "none": torch.rand(0, 4)}


@pytest.fixture
def stored(tmp_path: Path, write_model, tensors) -> tuple[Path, Manifest]:
    store = WeightStore(tmp_path / "store")
    return store.packs, externalize(store, "m", write_model("m", tensors))


def block_model(packs: Path, dtype: str, shape: tuple[int, ...]) -> tuple[Manifest, np.ndarray]:
    """A stored tensor of random blocks, as (rows, blocks, bytes)."""
    elements, nbytes = BLOCK_SIZES[dtype]
    blocks = np.random.default_rng().integers(0, 256, (*shape[:-1], shape[-1] // elements, nbytes), np.uint8)
    packs.mkdir()
    (packs / "q").write_bytes(blocks.tobytes())
    ref = TensorRef(extent="e", offset=0, nbytes=blocks.nbytes, dtype=dtype, shape=shape, sha256="0" * 64)
    part = Component(name="model", library="gguf", class_name=None, folder=".", tensors={"q": ref})
    checksum = xxhash.xxh3_128_hexdigest(blocks.tobytes())
    extent = ExtentRef(id="e", pack="q", offset=0, nbytes=blocks.nbytes, checksum=checksum)
    manifest = Manifest(
        model="m",
        kind="llm",
        class_name=None,
        skeleton="m",
        source="s",
        fingerprint="f",
        components={"model": part},
        extents={"e": extent},
    )
    return manifest, blocks


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_slices_are_those_of_torch(stored, tensors, world: int, verified: bool) -> None:
    packs, manifest = stored
    for name, tensor in tensors.items():
        for dim in range(-tensor.dim(), tensor.dim()):
            if tensor.shape[dim] % world:
                continue
            for rank in range(world):
                part = TensorSlice(dim, rank, world)
                length = tensor.shape[dim] // world
                expected = tensor.narrow(dim, rank * length, length)
                got = read_slice(packs, manifest, "model", name, part, verified=verified)
                assert got.dtype == expected.dtype
                assert got.is_contiguous()
                assert same(got, expected)
                assert same(slice_view(tensor, part), expected)


def test_random_slices_together_are_the_tensor(stored, tensors) -> None:
    packs, manifest = stored
    for _ in range(20):
        name = random.choice(["t1", "t2", "t3", "BF16", "C64"])
        dim, world = random.randrange(tensors[name].dim()), 2
        reads = CountedReads(random.randint(1, 200))
        parts = [
            read_slice(packs, manifest, "model", name, TensorSlice(dim, rank, world), preadv=reads)
            for rank in range(world)
        ]
        assert all(torch.equal(*pair) for pair in zip(parts, tensors[name].chunk(world, dim), strict=True))


def test_the_first_dimension_is_one_range(stored, tensors) -> None:
    packs, manifest = stored
    reads = CountedReads()
    read_slice(packs, manifest, "model", "t2", TensorSlice(0, 1, 4), preadv=reads)
    assert (reads.num_calls, reads.nbytes) == (1, tensors["t2"].nbytes // 4)


@pytest.mark.parametrize(("row_bytes", "is_joined"), [(2 * MAX_GAP_BYTES, True), (2 * MAX_GAP_BYTES + 8, False)])
def test_runs_are_joined_over_small_gaps_only(tmp_path: Path, write_model, row_bytes: int, is_joined: bool) -> None:
    tensor = torch.rand(6, row_bytes // 4)
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "m", write_model("m", {"w": tensor}))
    reads = CountedReads()
    got = read_slice(store.packs, manifest, "model", "w", TensorSlice(1, 0, 2), preadv=reads)
    assert torch.equal(got, tensor[:, : row_bytes // 8])
    gaps = 5 * row_bytes // 2 if is_joined else 0
    assert (reads.num_calls, reads.nbytes) == (1 if is_joined else 6, tensor.nbytes // 2 + gaps)


def test_many_small_rows_take_few_reads(tmp_path: Path, write_model) -> None:
    tensor = torch.randint(0, 255, (5000, 6), dtype=torch.uint8)
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "m", write_model("m", {"w": tensor}))
    reads = CountedReads()
    got = read_slice(store.packs, manifest, "model", "w", TensorSlice(1, 2, 3), preadv=reads)
    assert torch.equal(got, tensor[:, 4:])
    assert reads.num_calls == -(-5000 // 512)


def test_a_resident_tensor_is_sliced_without_a_copy() -> None:
    tensor = torch.rand(4, 6)
    view = slice_view(tensor, TensorSlice(1, 1, 3))
    assert view.data_ptr() == tensor.data_ptr() + 2 * 4
    assert view._base is tensor


@pytest.mark.parametrize("dtype", list(BLOCK_SIZES))
def test_blocks_are_sliced_whole(tmp_path: Path, dtype: str) -> None:
    elements, nbytes = BLOCK_SIZES[dtype]
    manifest, blocks = block_model(tmp_path / "packs", dtype, (4, 6 * elements))
    for verified in (False, True):
        rows = read_slice(tmp_path / "packs", manifest, "model", "q", TensorSlice(0, 1, 2), verified=verified)
        assert np.array_equal(rows.numpy(), blocks[2:].reshape(2, -1))
        columns = read_slice(tmp_path / "packs", manifest, "model", "q", TensorSlice(1, 2, 3), verified=verified)
        assert np.array_equal(columns.numpy(), blocks[:, 4:].reshape(4, 2 * nbytes))
    with pytest.raises(WeightsError, match=rf"dimension 1 in blocks of {elements} does not divide into 4 equal parts"):
        read_slice(tmp_path / "packs", manifest, "model", "q", TensorSlice(1, 0, 4))


def test_uneven_parts_and_missing_dimensions_are_refused(stored, tensors) -> None:
    packs, manifest = stored
    with pytest.raises(WeightsError, match=r"'model.odd' of shape \[7, 3\]: dimension 0 does not divide into 2"):
        read_slice(packs, manifest, "model", "odd", TensorSlice(0, 0, 2))
    with pytest.raises(WeightsError, match=r"dimension 0 does not divide into 2"):
        slice_view(tensors["odd"], TensorSlice(-2, 0, 2))
    with pytest.raises(WeightsError, match=r"of shape \[\] has no dimension 0"):
        read_slice(packs, manifest, "model", "scalar", TensorSlice(0, 0, 1))


@pytest.mark.parametrize(("rank", "world"), [(0, 0), (2, 2), (-1, 2), (0, -1)])
def test_a_rank_outside_of_its_world_is_refused(rank: int, world: int) -> None:
    with pytest.raises(WeightsError, match=rf"rank {rank} in a world of {world}"):
        TensorSlice(0, rank, world)


def test_unknown_names_are_refused_with_near_ones(stored) -> None:
    packs, manifest = stored
    with pytest.raises(WeightsError, match=r"no component 'vae' \(known: model\)"):
        read_slice(packs, manifest, "vae", "t1", TensorSlice(0, 0, 2))
    with pytest.raises(WeightsError, match=r"no tensor 'scalr' \(near names: scalar\)"):
        read_slice(packs, manifest, "model", "scalr", TensorSlice(0, 0, 2))


def test_a_file_that_is_short_or_gone_is_corrupt(stored) -> None:
    packs, manifest = stored
    (pack,) = {extent.pack for extent in manifest.extents.values()}
    os.truncate(packs / pack, 1)
    with pytest.raises(ExtentCorrupt, match=rf"{pack}: ends at byte \d+"):
        read_slice(packs, manifest, "model", "t2", TensorSlice(0, 1, 2))
    (packs / pack).unlink()
    with pytest.raises(ExtentCorrupt, match=rf"{pack}: .*No such file"):
        read_slice(packs, manifest, "model", "t2", TensorSlice(0, 1, 2))


def test_a_pack_that_leads_out_of_the_store_is_refused(stored, tmp_path: Path) -> None:
    packs, manifest = stored
    (pack,) = {extent.pack for extent in manifest.extents.values()}
    (packs / pack).rename(tmp_path / "outside")
    (packs / pack).symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError):
        read_slice(packs, manifest, "model", "t2", TensorSlice(0, 0, 2))


def test_a_flipped_bit_is_found_when_asked(stored) -> None:
    packs, manifest = stored
    ref = manifest.components["model"].tensors["t2"]
    extent = manifest.extents[ref.extent]
    with (packs / extent.pack).open("r+b") as file:
        file.seek(extent.offset + ref.offset)
        first = file.read(1)[0]
        file.seek(extent.offset + ref.offset)
        file.write(bytes([first ^ 1]))
    read_slice(packs, manifest, "model", "t2", TensorSlice(0, 0, 2))
    with pytest.raises(ExtentCorrupt, match=r"checksum"):
        read_slice(packs, manifest, "model", "t2", TensorSlice(0, 1, 2), verified=True)
