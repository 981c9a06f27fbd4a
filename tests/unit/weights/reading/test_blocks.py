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

from weights.errors import ExtentCorrupt, StoreError
from weights.manifest import ExtentRef
from weights.memory.pages import allocate_pages
from weights.reading.blocks import FileSpan, PackReader, resolve_pack

DATA = random.randbytes(5 * 4096 + 100)
PACK = "m_weight_combined"


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


@given(st.integers(0, len(DATA)), st.integers(0, len(DATA)), st.integers(1, 3), st.integers(1, 9000))
@settings(max_examples=150, deadline=None)
def test_a_buffer_shorter_than_the_extent_is_filled_again_and_again(
    tmp_path_factory: pytest.TempPathFactory, one: int, other: int, pages: int, most: int
) -> None:
    """Whatever is read at a time: `most` bytes, which need not end at a block's border."""
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
    real, direct_reads = os.preadv, []

    def refuse(fd: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            direct_reads.append(offset)
            if offset >= refused_from:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    assert b"".join(read(pack, extent(), direct=True)) == DATA
    assert direct_reads[-1] == refused_from


@pytest.mark.parametrize("most", [1, 100, 4096, 5000])
def test_short_buffered_reads_go_on(pack: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:most]], offset))
    blocks = read(pack, extent(), direct=False)
    assert b"".join(blocks) == DATA
    assert len(blocks) == -(-len(DATA) // most)


def test_a_short_direct_read_to_a_blocks_end_stays_direct(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, modes = os.preadv, []

    def short(fd: int, buffers: Any, offset: int) -> int:
        modes.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return real(fd, [buffers[0][:4096]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert b"".join(read(pack, extent(), direct=True)) == DATA
    assert modes == [True] * 6


@pytest.mark.parametrize("most", [1, 100, 5000])
def test_a_short_direct_read_to_anywhere_goes_on_buffered(
    pack: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real, modes = os.preadv, []

    def short(fd: int, buffers: Any, offset: int) -> int:
        modes.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return min(real(fd, buffers, offset), most)

    monkeypatch.setattr(os, "preadv", short)
    assert b"".join(read(pack, extent(), direct=True)) == DATA
    assert modes == [True] + [False] * (len(modes) - 1)


def test_a_buffered_read_never_goes_past_the_extent(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, ends = os.preadv, []

    def watched(fd: int, buffers: Any, offset: int) -> int:
        ends.append(offset + len(buffers[0]))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    read(pack, extent(8, 9000), direct=False, block_bytes=4096)
    assert max(ends) == 9008


@pytest.mark.parametrize(("num_pages", "is_direct"), [(0, True), (2, True), (3, False), (4, False)])
def test_an_extent_that_is_wholly_in_the_page_cache_is_copied_from_there(
    pack: Path, monkeypatch: pytest.MonkeyPatch, num_pages: int, is_direct: bool
) -> None:
    real, modes, asked = os.preadv, [], []

    def watched(fd: int, buffers: Any, offset: int) -> int:
        modes.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return real(fd, buffers, offset)

    def cached(fd: int, offset: int, nbytes: int) -> int:
        asked.append((offset, nbytes))
        return num_pages

    monkeypatch.setattr(os, "preadv", watched)
    assert b"".join(read(pack, extent(4096, 8200), direct=True, cached=cached)) == DATA[4096:12296]
    assert asked == [(4096, 3 * 4096)]
    assert set(modes) == {is_direct}


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
    real = os.preadv

    def cut_off(fd: int, buffers: Any, offset: int) -> int:
        if offset:
            os.truncate(pack, 8292)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_off)
    with pytest.raises(ExtentCorrupt, match=f"ends at byte 8292, extent e1 needs bytes up to {len(DATA)}"):
        read(pack, extent(), direct=direct)


def test_a_length_that_no_file_has_is_refused_before_memory_is_sought(pack: Path) -> None:
    absurd = extent(8, 2**62)
    with pytest.raises(ExtentCorrupt, match=f"ends at byte {len(DATA)}"):
        PackReader(pack, absurd, direct=True)


@pytest.mark.parametrize("direct", [True, False])
def test_a_read_error_in_the_middle_names_pack_and_extent(
    pack: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    real = os.preadv

    def broken(fd: int, buffers: Any, offset: int) -> int:
        if offset >= 8192:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: reading extent e1 failed: .*Input/output error"):
        read(pack, extent(), direct=direct)


def test_a_refusal_that_is_not_about_direct_reading_is_an_error(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def invalid(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "preadv", invalid)
    with pytest.raises(ExtentCorrupt, match=r"extent e1 failed: .*Invalid argument"):
        read(pack, extent(), direct=True)


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
