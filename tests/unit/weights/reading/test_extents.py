"""Every byte of an extent is verified; what is wrong names the pack."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from weights.errors import ExtentCorrupt, StoreError
from weights.manifest import ExtentRef
from weights.memory.host_pool import HostBufferPool
from weights.provider import LocalExtents
from weights.reading.extents import ByteArray, ExtentReader, read_extent
from weights.reading.planning import ReadPlanner
from weights.reading.report import StageClock
from weights.reading.strategy import ReadStrategy

DATA = os.urandom(10_000)
PACK = "m_weight_combined"


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    (tmp_path / PACK).write_bytes(bytes(4096) + DATA + b"after")
    return tmp_path


def extent(offset: int = 0, nbytes: int = len(DATA), id_: str = "e1") -> ExtentRef:
    part = DATA[offset : offset + nbytes]
    return ExtentRef(id=id_, pack=PACK, offset=4096 + offset, nbytes=nbytes, checksum=xxhash.xxh3_128_hexdigest(part))


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 10_000), (17, 600), (8, 9992), (4096, 4096), (9999, 1)])
def test_the_bytes_of_the_extent(packs: Path, offset: int, nbytes: int) -> None:
    assert read_extent(packs, extent(offset, nbytes)).tobytes() == DATA[offset : offset + nbytes]


def test_an_empty_extent(packs: Path) -> None:
    assert read_extent(packs, extent(0, 0)).nbytes == 0


@pytest.mark.parametrize("place", [0, 1, 4999, 9999])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_found(packs: Path, place: int, bit: int) -> None:
    file = packs / PACK
    damaged = bytearray(file.read_bytes())
    damaged[4096 + place] ^= 1 << bit
    file.write_bytes(damaged)
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: bytes 4096\.\.14096 \(extent e1\) have checksum"):
        read_extent(packs, extent())


def test_bytes_outside_the_extent_do_not_matter(packs: Path) -> None:
    (packs / PACK).write_bytes(os.urandom(4096) + DATA)
    assert read_extent(packs, extent()).tobytes() == DATA


@pytest.mark.parametrize("length", [0, 4096, 4097, 14_095])
def test_a_truncated_pack_is_named(packs: Path, length: int) -> None:
    os.truncate(packs / PACK, length)
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: ends at byte .*extent e1 needs bytes up to 14096"):
        read_extent(packs, extent())


def test_a_missing_or_unreadable_pack_is_named(packs: Path) -> None:
    (packs / PACK).unlink()
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: missing; extent e1 was in it"):
        read_extent(packs, extent())
    (packs / PACK).mkdir()
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: reading extent e1 failed"):
        read_extent(packs, extent())


def test_a_pack_outside_the_store_is_not_opened(packs: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret"
    (packs / PACK).rename(outside)
    (packs / PACK).symlink_to(outside)
    for read in (lambda: read_extent(packs, extent()), lambda: LocalExtents(packs).fetch([extent()])):
        with pytest.raises(StoreError, match=f"{PACK}: leads out of the store"):
            read()


# Streaming: many extents, several threads.


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weights.reading.extents.MIN_DIRECT_BYTES", 1)


STRATEGIES = [ReadStrategy(True, 4, 8192), ReadStrategy(False, 3, 4096), ReadStrategy(True, 1, 2**20)]


def parts_of(count: int, nbytes: int) -> list[ExtentRef]:
    return [extent(i * nbytes, nbytes, f"e{i}") for i in range(count)]


def reader(packs: Path, pool: HostBufferPool | None = None, strategy: ReadStrategy = STRATEGIES[0], **options: Any):
    return ExtentReader(packs, pool, ReadPlanner(override=strategy), **options)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("pool_bytes", [None, 2 * 4096, 2**20])
def test_every_extent_reaches_the_sink_once(packs: Path, strategy: ReadStrategy, pool_bytes: int | None) -> None:
    parts = [*parts_of(90, 104), extent(9360, 640, "odd"), extent(3, 9000, "overlapping"), extent(0, 0, "empty")]
    pool = HostBufferPool(pool_bytes) if pool_bytes else None
    found: list[tuple[str, bytes]] = []
    told: list[tuple[int, int]] = []
    report = reader(packs, pool, strategy).stream(
        parts, lambda part, array: found.append((part.id, array.tobytes())), lambda *done: told.append(done), what="m"
    )
    assert dict(found) == {part.id: DATA[part.offset - 4096 : part.offset - 4096 + part.nbytes] for part in parts}
    assert len(found) == len(parts)
    total = sum(part.nbytes for part in parts)
    assert told == sorted(told)
    assert (len(told), told[-1]) == (len(parts), (total, total))
    assert (report.what, report.nbytes, report.verified, report.strategy) == ("m", total, True, strategy)
    assert {report.stages[stage].nbytes for stage in ("read", "verify", "put")} == {total}
    if pool:
        assert report.pool is not None
        assert report.pool.used_bytes == 0
        assert report.pool.held_bytes <= pool.max_bytes


def test_small_extents_are_left_to_the_kernels_readahead(packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weights.reading.extents.MIN_DIRECT_BYTES", 4000)
    real, modes = os.open, []

    def watched(path: Any, flags: int, *rest: int) -> int:
        modes.append(bool(flags & os.O_DIRECT))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", watched)
    for nbytes in (3999, 4000):
        reader(packs).load(extent(0, nbytes), lambda *_: None, StageClock())
    assert modes == [False, True]


def test_a_pack_that_becomes_a_symlink_later_is_not_followed(packs: Path, tmp_path_factory: Any) -> None:
    same = reader(packs)
    same.load(extent(), lambda *_: None, StageClock())
    outside = tmp_path_factory.mktemp("outside") / "secret"
    (packs / PACK).rename(outside)
    (packs / PACK).symlink_to(outside)
    with pytest.raises(ExtentCorrupt, match=f"{PACK}: reading extent e1 failed"):
        same.load(extent(), lambda *_: None, StageClock())


def test_a_pack_that_comes_back_is_read_again(packs: Path) -> None:
    same = reader(packs)
    (packs / PACK).rename(packs / "away")
    with pytest.raises(ExtentCorrupt, match="missing"):
        same.load(extent(), lambda *_: None, StageClock())
    (packs / "away").rename(packs / PACK)
    assert same.load(extent(), lambda _, array: array.tobytes(), StageClock()) == DATA


def test_nothing_to_load_is_no_error(packs: Path) -> None:
    report = reader(packs).stream([], lambda *_: None)
    assert (report.nbytes, report.stages, report.limiting_stage) == (0, {}, None)


def test_others_are_read_while_one_is_put(packs: Path) -> None:
    """The first extent's sink does not return before the last one's: only other threads can bring that."""
    last_came = threading.Event()

    def sink(part: ExtentRef, _: ByteArray) -> None:
        if part.id == "e0":
            assert last_came.wait(10)
        if part.id == "e9":
            last_came.set()

    reader(packs, HostBufferPool(3 * 4096)).stream(parts_of(10, 1000), sink)


def test_the_checksum_sees_every_block_in_order(packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    class Digest:
        def __init__(self) -> None:
            self.real = xxhash.xxh3_128()

        def update(self, block: memoryview) -> None:
            seen.append(bytes(block))
            self.real.update(block)

        def hexdigest(self) -> str:
            return self.real.hexdigest()

    monkeypatch.setattr("weights.reading.extents.xxh3_128", Digest)
    reader(packs, strategy=ReadStrategy(True, 4, 4096)).stream([extent()], lambda *_: None)
    assert [len(block) for block in seen] == [4096, 4096, 10_000 - 8192]
    assert b"".join(seen) == DATA


def test_verification_can_be_left_out_and_the_report_says_so(packs: Path) -> None:
    damaged = extent().model_copy(update={"checksum": "0" * 32})
    report = reader(packs, verify=False).stream([damaged], lambda *_: None)
    assert not report.verified
    assert "verify" not in report.stages


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_first_error_ends_the_load(packs: Path, strategy: ReadStrategy) -> None:
    pool = HostBufferPool(2**20)
    parts = parts_of(80, 120)
    parts[2] = parts[2].model_copy(update={"checksum": "0" * 32})
    put: list[str] = []
    with pytest.raises(ExtentCorrupt, match=f"{PACK}: bytes 4336..4456 .extent e2. have checksum .* expected 0000"):
        reader(packs, pool, strategy).stream(parts, lambda part, _: put.append(part.id))
    assert "e2" not in put
    assert pool.stats().used_bytes == 0


def test_an_error_of_the_sink_is_the_callers_and_gives_the_buffer_back(packs: Path) -> None:
    pool = HostBufferPool(2**20)

    def full(*_: object) -> None:
        raise MemoryError("object store is full")

    with pytest.raises(MemoryError, match="object store is full"):
        reader(packs, pool).stream(parts_of(20, 100), full)
    assert pool.stats().used_bytes == 0


def test_an_extent_larger_than_the_pool_gets_memory_of_its_own(packs: Path) -> None:
    pool = HostBufferPool(2 * 4096)
    data = reader(packs, pool).load(extent(), lambda _, array: array, StageClock())
    assert data.tobytes() == DATA
    assert pool.stats().held_bytes == 0


def test_a_read_error_in_the_middle_of_a_load_names_the_extent(packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def broken(fd: int, buffers: Any, offset: int) -> int:
        if offset >= 8192:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: reading extent e\d+ failed: .*Input/output error"):
        reader(packs).stream(parts_of(10, 1000), lambda *_: None)


def test_memory_backed_files_are_read_as_well() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / PACK).write_bytes(bytes(4096) + DATA)
        found: list[bytes] = []
        reader(Path(folder)).stream([extent()], lambda _, array: found.append(array.tobytes()))
        report = ExtentReader(Path(folder), None, ReadPlanner()).stream([extent()], lambda *_: None)
    assert found == [DATA]
    assert (report.medium.kind, report.strategy.direct) == ("tmpfs", False)


# The provider: memory that is the caller's.


def test_a_local_provider_gives_read_only_buffers(packs: Path) -> None:
    parts = parts_of(20, 100)
    told: list[int] = []
    provider = LocalExtents(packs, progress=lambda done, _: told.append(done))
    assert provider.last_report is None
    buffers = provider.fetch(parts)
    assert list(buffers) == [part.id for part in parts]
    assert {id_: array.tobytes() for id_, array in buffers.items()} == {
        part.id: DATA[i * 100 : i * 100 + 100] for i, part in enumerate(parts)
    }
    assert told[-1] == 2000
    report = provider.last_report
    assert report is not None
    assert (report.nbytes, report.verified, report.pool) == (2000, True, None)
    with pytest.raises(ValueError, match="read-only"):
        buffers["e0"][0] = 1
    damaged = parts[3].model_copy(update={"checksum": "0" * 32})
    with pytest.raises(ExtentCorrupt, match="extent e3"):
        provider.fetch([*parts[:3], damaged])
    assert provider.last_report is report


@pytest.mark.parametrize("offset", [0, 8, 24, 4104, 17, 4097])
def test_buffers_are_aligned_for_the_widest_elements(packs: Path, offset: int) -> None:
    array = LocalExtents(packs).fetch([extent(offset, 800)])["e1"]
    assert array.ctypes.data % 8 == 0
    assert np.array_equal(array.view(np.float64).view(np.uint8), np.frombuffer(DATA[offset : offset + 800], np.uint8))
