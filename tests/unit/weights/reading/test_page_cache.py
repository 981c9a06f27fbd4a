"""The kernel's word on its page cache, and its silence."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from weights.reading.blocks import cached_pages


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(10 * 4096))
    return path


def test_pages_just_written_are_in_the_cache_or_the_kernel_does_not_tell(file: Path) -> None:
    with file.open("rb") as opened:
        assert cached_pages(opened.fileno(), 0, 10 * 4096) in (0, 10)
        assert cached_pages(opened.fileno(), 4096, 2 * 4096) in (0, 2)
        assert cached_pages(opened.fileno(), 100 * 4096, 4096) == 0


def test_the_kernels_answer_is_the_first_figure_of_its_record(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    class Library:
        @staticmethod
        def syscall(number: int, fd: int, part: Any, pages: Any, flags: int) -> int:
            asked.append((number, fd, part._obj.offset, part._obj.nbytes, flags))
            ctypes.memmove(pages, (ctypes.c_uint64 * 5)(7, 1, 2, 3, 4), 40)
            return 0

    monkeypatch.setattr("weights.reading.blocks._libc", Library)
    assert cached_pages(5, 4096, 8192) == 7
    assert asked == [(451, 5, 4096, 8192, 0)]


def test_a_kernel_that_refuses_has_nothing_cached() -> None:
    assert cached_pages(-1, 0, 4096) == 0
