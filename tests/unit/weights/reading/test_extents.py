"""Every byte of an extent is verified; what is wrong names the pack."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from weights.loading.provider import LocalExtents
from weights.memory.host_pool import HostBufferPool
from weights.reading.blocks import PackReader
from weights.reading.extents import ByteArray, ExtentReader, read_extent, reading_order
from weights.reading.planning import ReadPlanner
from weights.reading.report import StageClock
from weights.reading.strategy import ReadStrategy
from weights.records.errors import ExtentCorrupt, StoreError
from weights.records.manifest import ExtentRef

DATA = random.randbytes(10_000)
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
    (packs / PACK).write_bytes(random.randbytes(4096) + DATA)
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
    monkeypatch.setattr("weights.reading.plain_extents.MIN_DIRECT_BYTES", 1)


def on_disk_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files that the test has just written count as uncached: they are read directly."""
    monkeypatch.setitem(PackReader.__init__.__kwdefaults__, "cached_pages", lambda *_: 0)


STRATEGIES = [ReadStrategy(True, 4, 8192), ReadStrategy(False, 3, 4096), ReadStrategy(True, 1, 2**20)]


def parts_of(count: int, nbytes: int) -> list[ExtentRef]:
    return [extent(i * nbytes, nbytes, f"e{i}") for i in range(count)]


def reader(packs: Path, pool: HostBufferPool | None = None, strategy: ReadStrategy = STRATEGIES[0], **options: Any):
    return ExtentReader(packs, pool, ReadPlanner(override=strategy), **options)


def bytes_of(part: ExtentRef) -> bytes:
    return DATA[part.offset - 4096 : part.offset - 4096 + part.nbytes]


def through(reader: ExtentReader, part: ExtentRef, stages: StageClock | None = None, lead: int = 0) -> bytes:
    """Return the bytes that `read_into` leaves at an address `lead` bytes after a page's; bytes around it stay."""
    memory = np.full(part.nbytes + lead + 64, 7, np.uint8)
    reader.read_into(part, lambda: memory[lead : lead + part.nbytes], stages or StageClock())
    assert (memory[:lead] == 7).all()
    assert (memory[lead + part.nbytes :] == 7).all()
    return memory[lead : lead + part.nbytes].tobytes()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_extent_is_read_once(packs: Path, strategy: ReadStrategy) -> None:
    parts = [*parts_of(90, 104), extent(9360, 640, "odd"), extent(3, 9000, "overlapping"), extent(0, 0, "empty")]
    told: list[tuple[int, int]] = []
    arrays, report = reader(packs, strategy=strategy).read_all(parts, lambda *done: told.append(done), what="m")
    assert {id_: array.tobytes() for id_, array in arrays.items()} == {part.id: bytes_of(part) for part in parts}
    total = sum(part.nbytes for part in parts)
    assert told == sorted(told)
    assert (len(told), told[-1]) == (len(parts), (total, total))
    assert (report.what, report.nbytes, report.verified, report.strategy) == ("m", total, True, strategy)
    assert {report.stages[stage].nbytes for stage in ("read", "verify")} == {total}


SIZES = [0, 1, 511, 4095, 4096, 4097, 8191, 8192, 8193, 9999]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("pool_bytes", [None, 4096, 2 * 4096, 2**20])
@pytest.mark.parametrize("piece_bytes", [1000, 4096, 2**20])
def test_an_extent_gets_to_its_place_whatever_it_goes_through(
    packs: Path, monkeypatch: pytest.MonkeyPatch, strategy: ReadStrategy, pool_bytes: int | None, piece_bytes: int
) -> None:
    monkeypatch.setattr("weights.reading.plain_extents.PIECE_BYTES", piece_bytes)
    on_disk_only(monkeypatch)
    pool = HostBufferPool(pool_bytes) if pool_bytes else None
    same, stages = reader(packs, pool, strategy), StageClock()
    parts = [extent(offset, min(size, 10_000 - offset)) for size in SIZES for offset in (0, 1, 8, 512, 4095, 4096)]
    for number, part in enumerate(parts):
        assert through(same, part, stages, lead=64 * (number % 3)) == bytes_of(part)
    assert stages.figures()["read"].nbytes == sum(part.nbytes for part in parts)
    if pool:
        assert pool.stats().used_bytes == 0
        assert pool.stats().held_bytes <= pool.max_bytes


def test_a_place_is_asked_for_when_the_first_bytes_are_there(packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk_only(monkeypatch)
    pool, told = HostBufferPool(4096), []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *asked: (told.append("read"), real(*asked))[1])
    out = np.zeros(10_000, np.uint8)

    def place() -> ByteArray:
        told.append("place")
        return out

    reader(packs, pool).read_into(extent(), place, StageClock())
    assert told == ["read", "place", "read", "read"]
    assert out.tobytes() == DATA


def test_each_piece_is_hashed_and_copied_before_the_next(packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass: what the checksum has seen is in its place when the checksum goes on."""
    on_disk_only(monkeypatch)
    monkeypatch.setattr("weights.reading.plain_extents.PIECE_BYTES", 1024)
    out = np.zeros(10_000, np.uint8)
    lengths: list[int] = []

    class Digest:
        def __init__(self) -> None:
            self.real = xxhash.xxh3_128()

        def update(self, piece: Any) -> None:
            done = sum(lengths)
            assert out[:done].tobytes() == DATA[:done]
            lengths.append(len(piece))
            self.real.update(piece)

        def hexdigest(self) -> str:
            return self.real.hexdigest()

    monkeypatch.setattr("weights.reading.plain_extents.xxh3_128", Digest)
    reader(packs, HostBufferPool(2**20)).read_into(extent(), lambda: out, StageClock())
    assert max(lengths) == 1024
    assert sum(lengths) == len(DATA)


def test_small_extents_are_left_to_the_kernels_readahead(packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weights.reading.plain_extents.MIN_DIRECT_BYTES", 4000)
    real, modes = os.open, []

    def watched(path: Any, flags: int, *rest: int) -> int:
        modes.append(bool(flags & os.O_DIRECT))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", watched)
    for nbytes in (3999, 4000):
        reader(packs).read(extent(0, nbytes), StageClock())
    assert modes == [False, True]


def test_a_pack_that_becomes_a_symlink_later_is_not_followed(packs: Path, tmp_path_factory: Any) -> None:
    same = reader(packs)
    same.read(extent(), StageClock())
    outside = tmp_path_factory.mktemp("outside") / "secret"
    (packs / PACK).rename(outside)
    (packs / PACK).symlink_to(outside)
    with pytest.raises(ExtentCorrupt, match=f"{PACK}: reading extent e1 failed"):
        same.read(extent(), StageClock())


def test_a_pack_that_comes_back_is_read_again(packs: Path) -> None:
    same = reader(packs)
    (packs / PACK).rename(packs / "away")
    with pytest.raises(ExtentCorrupt, match="missing"):
        same.read(extent(), StageClock())
    (packs / "away").rename(packs / PACK)
    assert same.read(extent(), StageClock()).tobytes() == DATA


def test_nothing_to_load_is_no_error(packs: Path) -> None:
    arrays, report = reader(packs).read_all([])
    assert arrays == {}
    assert (report.nbytes, report.stages, report.limiting_stage) == (0, {}, None)


def test_others_are_read_while_one_gets_its_place(packs: Path) -> None:
    """The first extent's place is not there before the last one's: only other threads can bring that."""
    last_came = threading.Event()
    same = reader(packs, HostBufferPool(3 * 4096))

    def place(part: ExtentRef) -> ByteArray:
        if part.id == "e0":
            assert last_came.wait(10)
        if part.id == "e9":
            last_came.set()
        return np.zeros(part.nbytes, np.uint8)

    with ThreadPoolExecutor(2) as threads:
        for done in [
            threads.submit(same.read_into, part, partial(place, part), StageClock()) for part in parts_of(10, 1000)
        ]:
            done.result(10)


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

    monkeypatch.setattr("weights.reading.plain_extents.xxh3_128", Digest)
    reader(packs, strategy=ReadStrategy(True, 4, 4096)).read_all([extent()])
    assert [len(block) for block in seen] == [4096, 4096, 10_000 - 8192]
    assert b"".join(seen) == DATA


def test_verification_can_be_left_out_and_the_report_says_so(packs: Path) -> None:
    damaged = extent().model_copy(update={"checksum": "0" * 32})
    _, report = reader(packs, verify=False).read_all([damaged])
    assert not report.verified
    assert "verify" not in report.stages


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_first_error_ends_the_load(packs: Path, strategy: ReadStrategy) -> None:
    parts = parts_of(80, 120)
    parts[2] = parts[2].model_copy(update={"checksum": "0" * 32})
    with pytest.raises(ExtentCorrupt, match=f"{PACK}: bytes 4336..4456 .extent e2. have checksum .* expected 0000"):
        reader(packs, strategy=strategy).read_all(parts)


def test_an_error_gives_the_buffer_back(packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk_only(monkeypatch)
    pool = HostBufferPool(4096)
    same = reader(packs, pool)

    def full() -> ByteArray:
        raise MemoryError("object store is full")

    with pytest.raises(MemoryError, match="object store is full"):
        same.read_into(extent(), full, StageClock())
    with pytest.raises(ExtentCorrupt, match="checksum"):
        through(same, extent().model_copy(update={"checksum": "0" * 32}))
    os.truncate(packs / PACK, 4096 + 9000)
    with pytest.raises(ExtentCorrupt, match="ends at byte 13096"):
        through(same, extent())
    assert pool.stats().used_bytes == 0
    assert through(same, extent(0, 9000)) == DATA[:9000]


def break_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk have no more than the first pages."""
    real = os.preadv

    def broken(fd: int, buffers: Any, offset: int) -> int:
        if offset >= 8192:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)


def test_a_read_error_in_the_middle_of_an_extent_gives_the_buffer_back(
    packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk_only(monkeypatch)
    pool = HostBufferPool(4096)
    break_reads(monkeypatch)
    with pytest.raises(ExtentCorrupt, match=r"reading extent e1 failed: .*Input/output error"):
        through(reader(packs, pool), extent())
    assert pool.stats().used_bytes == 0


def test_giants_come_first_and_others_in_the_order_of_the_files() -> None:
    sizes = [4096, 5000, 20, 9000, 30]
    parts = [extent(0, size, f"e{number}") for number, size in enumerate(sizes)]
    parts = [part.model_copy(update={"offset": 4096 + 10 - number}) for number, part in enumerate(parts)]
    ordered = reading_order(parts, ReadStrategy(True, 4, 2048))
    assert [part.id for part in ordered] == ["e3", "e1", "e4", "e2", "e0"]


def test_a_read_error_in_the_middle_of_a_load_names_the_extent(packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_reads(monkeypatch)
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: reading extent e\d+ failed: .*Input/output error"):
        reader(packs).read_all(parts_of(10, 1000))


def test_memory_backed_files_are_read_as_well() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / PACK).write_bytes(bytes(4096) + DATA)
        arrays, _ = reader(Path(folder)).read_all([extent()])
        _, report = ExtentReader(Path(folder), None, ReadPlanner()).read_all([extent()])
    assert arrays["e1"].tobytes() == DATA
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
