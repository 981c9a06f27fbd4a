"""Bytes of a pack in blocks: in order, whole, by O_DIRECT and without it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weights.memory.host_pool import allocate_pages
from weights.reading.blocks import FileSpan, PackReader, resolve_pack
from weights.records.errors import ExtentCorrupt, StoreError
from weights.records.manifest import ExtentRef

DATA = random.randbytes(5 * 4096 + 100)
PACK = "m_weight_combined"
Read = Callable[[Any], int]


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / PACK
    path.write_bytes(DATA)
    return path


def extent(offset: int = 0, nbytes: int = len(DATA)) -> ExtentRef:
    return ExtentRef(id="e1", pack=PACK, offset=offset, nbytes=nbytes, checksum="0" * 32)


def nothing_cached(*_: int) -> int:
    """Say that nothing is cached, of files that the test has just written."""
    return 0


def read(
    path: Path,
    part: ExtentRef,
    *,
    direct: bool,
    block_bytes: int = 8192,
    cached: Callable[[int, int, int], int] = nothing_cached,
) -> list[bytes]:
    """The blocks; what they leave in the buffer must be the same bytes in one piece."""
    with PackReader(path, part, direct=direct, cached_pages=cached) as reader:
        span = reader.span
        buffer = allocate_pages(span.nbytes)
        blocks = [bytes(block) for block in reader.blocks(buffer, block_bytes)]
    assert b"".join(blocks) == buffer[span.lead : span.lead + part.nbytes].tobytes()
    return blocks


def read_through(path: Path, part: ExtentRef, buffer_bytes: int) -> list[bytes]:
    """The blocks of a direct reader whose buffer does not hold the extent."""
    with PackReader(path, part, direct=True, cached_pages=nothing_cached) as reader:
        return [bytes(block) for block in reader.blocks(allocate_pages(buffer_bytes), 2**20)]


def change_reads(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Read, bool, Any, int], int] | None = None
) -> list[tuple[bool, int, int]]:
    """Let `change(real, is_direct, buffers, offset)` read; list whether each read was direct, its begin and its end."""
    real, seen = os.preadv, list[tuple[bool, int, int]]()

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        seen.append((is_direct, offset, offset + len(buffers[0])))
        if change is None:
            return real(fd, buffers, offset)
        return change(lambda found: real(fd, found, offset), is_direct, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return seen


def watch_flags(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """List for each open whether it asked for O_DIRECT."""
    real, seen = os.open, []

    def watched(path: Any, flags: int, *rest: int) -> int:
        seen.append(bool(flags & os.O_DIRECT))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", watched)
    return seen


@given(st.integers(0, len(DATA)), st.integers(0, len(DATA)), st.booleans(), st.sampled_from([4096, 8192, 2**20]))
@settings(max_examples=150, deadline=None)
def test_any_range_is_read_whole_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, one: int, other: int, direct: bool, block_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-range"
    if not path.exists():
        path.write_bytes(DATA)
    begin, end = sorted((one, other))
    blocks = read(path, extent(begin, end - begin), direct=direct, block_bytes=block_bytes)
    assert b"".join(blocks) == DATA[begin:end]


def test_no_more_is_asked_of_the_disk_than_the_blocks_that_hold_the_extent(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole buffer for the last block would read the neighbours too."""
    asked = change_reads(monkeypatch)
    for buffer_bytes in (2 * 4096, 6 * 4096):
        asked.clear()
        blocks = read_through(pack, extent(0, 3 * 4096 - 8), buffer_bytes)
        assert b"".join(blocks) == DATA[: 3 * 4096 - 8]
        assert all(is_direct for is_direct, _, _ in asked)
        assert sum(end - begin for _, begin, end in asked) == 3 * 4096


@given(st.integers(0, len(DATA)), st.integers(0, len(DATA)), st.integers(1, 3), st.integers(1, 9000))
@settings(max_examples=150, deadline=None)
def test_a_buffer_shorter_than_the_extent_is_filled_again_and_again(
    tmp_path_factory: pytest.TempPathFactory, one: int, other: int, pages: int, most: int
) -> None:
    """Read any number of bytes at a time: `most`, which need not end at a block's border."""
    path = tmp_path_factory.getbasetemp() / "again-and-again"
    if not path.exists():
        path.write_bytes(DATA)
    begin, end = sorted((one, other))
    real = os.preadv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, buffers, offset: min(real(fd, buffers, offset), most))
        blocks = read_through(path, extent(begin, end - begin), pages * 4096)
    assert b"".join(blocks) == DATA[begin:end]
    assert all(len(block) <= pages * 4096 for block in blocks)


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_span_is_aligned_and_covers_its_range(offset: int, nbytes: int) -> None:
    span = FileSpan.around(extent(offset, nbytes))
    assert span.start + span.lead == offset
    assert span.lead + nbytes <= span.nbytes < span.lead + nbytes + 4096
    assert span.nbytes % 4096 == 0
    # Memory begins like the file does, so that 8-byte elements stay aligned; an odd offset begins at a page.
    assert (span.start % 4096, span.lead) == ((offset % 4096, 0) if offset % 8 else (0, offset % 4096))


@pytest.mark.parametrize("offset", [0, 4096, 8])
def test_aligned_words_are_read_directly_even_with_a_ragged_end(
    pack: Path, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    flags = watch_flags(monkeypatch)
    assert b"".join(read(pack, extent(offset, len(DATA) - offset), direct=True)) == DATA[offset:]
    assert flags == [True]


def test_an_odd_offset_is_read_through_the_page_cache(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = watch_flags(monkeypatch)
    assert b"".join(read(pack, extent(17, 9000), direct=True)) == DATA[17:9017]
    assert flags == [False]


def test_direct_reading_refused_at_open_goes_on_buffered(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert b"".join(read(pack, extent(), direct=True)) == DATA


@pytest.mark.parametrize("refused_from", [0, 8192])
def test_direct_reading_refused_at_a_read_goes_on_buffered(
    pack: Path, monkeypatch: pytest.MonkeyPatch, refused_from: int
) -> None:
    def refuse(real: Read, is_direct: bool, buffers: Any, offset: int) -> int:
        if is_direct and offset >= refused_from:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(buffers)

    reads = change_reads(monkeypatch, refuse)
    assert b"".join(read(pack, extent(), direct=True)) == DATA
    assert [begin for is_direct, begin, _ in reads if is_direct][-1] == refused_from


@pytest.mark.parametrize("most", [1, 100, 4096, 5000])
def test_short_buffered_reads_go_on(pack: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    change_reads(monkeypatch, lambda real, _direct, buffers, _offset: real([buffers[0][:most]]))
    blocks = read(pack, extent(), direct=False)
    assert b"".join(blocks) == DATA
    assert len(blocks) == -(-len(DATA) // most)


@pytest.mark.parametrize(("most", "stays_direct"), [(4096, True), (1, False), (100, False), (5000, False)])
def test_a_short_direct_read_goes_on_buffered_unless_it_ends_with_a_block(
    pack: Path, monkeypatch: pytest.MonkeyPatch, most: int, stays_direct: bool
) -> None:
    reads = change_reads(monkeypatch, lambda real, _direct, buffers, _offset: min(real(buffers), most))
    assert b"".join(read(pack, extent(), direct=True)) == DATA
    assert [is_direct for is_direct, _, _ in reads] == [True] + [stays_direct] * (len(reads) - 1)


def test_a_buffered_read_never_goes_past_the_extent(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = change_reads(monkeypatch)
    read(pack, extent(8, 9000), direct=False, block_bytes=4096)
    assert max(end for _, _, end in reads) == 9008


@pytest.mark.parametrize(("num_pages", "is_direct"), [(0, True), (2, True), (3, False), (4, False)])
def test_an_extent_that_is_wholly_in_the_page_cache_is_copied_from_there(
    pack: Path, monkeypatch: pytest.MonkeyPatch, num_pages: int, is_direct: bool
) -> None:
    asked = []

    def cached(fd: int, offset: int, nbytes: int) -> int:
        asked.append((offset, nbytes))
        return num_pages

    reads = change_reads(monkeypatch)
    assert b"".join(read(pack, extent(4096, 8200), direct=True, cached=cached)) == DATA[4096:12296]
    assert asked == [(4096, 3 * 4096)]
    assert {mode for mode, _, _ in reads} == {is_direct}


def test_blocks_from_the_page_cache_are_small_enough_for_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.reading.blocks.CACHED_BLOCK_BYTES", 4096)
    (tmp_path / PACK).write_bytes(DATA)
    blocks = read(tmp_path / PACK, extent(0, 8192), direct=True, block_bytes=2**20, cached=lambda *_: 100)
    assert [len(block) for block in blocks] == [4096, 4096]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("length", [0, 1, 4096, 8192, 8200, 5 * 4096, len(DATA) - 1])
def test_a_pack_that_ends_too_early_says_where(pack: Path, length: int, direct: bool) -> None:
    os.truncate(pack, length)
    needs = f"ends at byte {length}, extent e1 needs bytes up to {len(DATA)}"
    with pytest.raises(ExtentCorrupt, match=f"{PACK}: {needs}"):
        read(pack, extent(), direct=direct)


@pytest.mark.parametrize("direct", [True, False])
def test_a_pack_that_is_cut_off_while_it_is_read_says_where(
    pack: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    def cut_off(real: Read, _direct: bool, buffers: Any, offset: int) -> int:
        if offset:
            os.truncate(pack, 8292)
        return real(buffers)

    change_reads(monkeypatch, cut_off)
    with pytest.raises(ExtentCorrupt, match=f"ends at byte 8292, extent e1 needs bytes up to {len(DATA)}"):
        read(pack, extent(), direct=direct)


def test_a_length_that_no_file_has_is_refused_before_memory_is_sought(pack: Path) -> None:
    absurd = extent(8, 2**62)
    with pytest.raises(ExtentCorrupt, match=f"ends at byte {len(DATA)}"):
        PackReader(pack, absurd, direct=True)


@pytest.mark.parametrize(
    ("code", "direct", "begin"),
    [
        (errno.EIO, True, 8192),
        (errno.EIO, False, 8192),
        (errno.EINVAL, True, 0),  # not only where it is read directly
    ],
)
def test_a_read_error_names_pack_and_extent(
    pack: Path, monkeypatch: pytest.MonkeyPatch, code: int, direct: bool, begin: int
) -> None:
    def broken(real: Read, _direct: bool, buffers: Any, offset: int) -> int:
        if offset >= begin:
            raise OSError(code, os.strerror(code))
        return real(buffers)

    change_reads(monkeypatch, broken)
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: reading extent e1 failed: .*{os.strerror(code)}"):
        read(pack, extent(), direct=direct)


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_no_file_is_an_error_at_once(tmp_path: Path, direct: bool) -> None:
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: missing; extent e1 was in it"):
        read(tmp_path / PACK, extent(), direct=direct)
    (tmp_path / PACK).mkdir()
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: reading extent e1 failed: not a regular file"):
        read(tmp_path / PACK, extent(), direct=direct)
    (tmp_path / PACK).rmdir()
    os.mkfifo(tmp_path / PACK)  # nobody writes: opening it as usual would wait for ever
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: reading extent e1 failed"):
        read(tmp_path / PACK, extent(), direct=direct)


def test_files_are_closed_also_after_errors(pack: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for length in (len(DATA), 10):
        os.truncate(pack, length)
        for direct in (True, False):
            try:
                read(pack, extent(), direct=direct)
            except ExtentCorrupt:
                assert length == 10
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_symlink_may_stay_inside_the_store_and_may_not_leave_it(tmp_path: Path) -> None:
    packs = tmp_path / "packs"
    packs.mkdir()
    (packs / "real").write_bytes(DATA)
    (packs / "alias").symlink_to("real")
    (tmp_path / "packs-other").mkdir()
    (tmp_path / "packs-other" / "secret").write_bytes(DATA)
    (packs / "escape").symlink_to(tmp_path / "packs-other" / "secret")
    (packs / "folder").symlink_to(tmp_path / "packs-other")
    assert resolve_pack(packs, "alias") == (packs / "real").resolve()
    for name in ("escape", "folder/secret"):
        with pytest.raises(StoreError, match=f"{name}: leads out of the store, to .*secret"):
            resolve_pack(packs, name)
    (tmp_path / "linked-store").symlink_to(packs)
    assert resolve_pack(tmp_path / "linked-store", "real") == (packs / "real").resolve()


def test_a_circle_of_symlinks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ExtentCorrupt, match="reading extent e1 failed"):
        read(resolve_pack(tmp_path, "a"), extent(), direct=True)
