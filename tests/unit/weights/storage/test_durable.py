"""Copies, and what the file system refuses."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit.seeding import seeded_random

from weights.platform.durable import (
    allocated_bytes,
    copy_tree,
    dead_ranges,
    disk_errors,
    make_folder,
    punch,
    remove_path,
    replaced,
)
from weights.records.errors import StoreError


def refuse(code: int):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_full_disk_is_recognised_while_copying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_folder: bool
) -> None:
    source = tmp_path / "source"
    if is_folder:
        make_folder(source / "deep" / "er")
        (source / "deep" / "er" / "file").write_bytes(b"1")
    else:
        source.write_bytes(b"1")
    copy_tree(source, tmp_path / "whole")
    copied = tmp_path / "whole" / "deep" / "er" / "file" if is_folder else tmp_path / "whole"
    assert copied.read_bytes() == b"1"
    monkeypatch.setattr("shutil.copyfile", refuse(errno.ENOSPC))
    with pytest.raises(StoreError, match="disk full: 7 bytes were needed"), disk_errors(tmp_path, 7):
        copy_tree(source, tmp_path / "copy")


def test_other_refusals_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="gone: No such file"), disk_errors(tmp_path / "a" / "b", 7):
        (tmp_path / "gone").read_bytes()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with replaced(target) as staged:
        staged.write_bytes(b"one")
        assert not target.exists()
    with pytest.raises(ZeroDivisionError), replaced(target) as staged:
        staged.write_bytes(bytes([1 // 0]))
    with pytest.raises(OSError, match="No space"), replaced(target) as staged:  # noqa: PT012
        staged.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"one")]


def test_removing_never_follows_links(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    (tmp_path / "link").symlink_to("folder")
    remove_path(tmp_path / "link")
    remove_path(tmp_path / "gone")
    assert (tmp_path / "folder" / "kept").exists()
    remove_path(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_dead_ranges_are_the_whole_blocks_that_nothing_touches() -> None:
    chance = seeded_random()
    for _ in range(200):
        size = chance.randrange(1, 60_000)
        live = []
        for _ in range(chance.randrange(4)):
            begin = chance.randrange(size)
            live.append((begin, chance.randrange(begin, size + 1)))
        dead = set()
        for begin, end in dead_ranges(live, size):
            assert begin % 4096 == end % 4096 == 0
            dead |= set(range(begin // 4096, end // 4096))
        touched = {block for begin, end in live for block in range(begin // 4096, -(-end // 4096)) if end > begin}
        assert dead == set(range(-(-size // 4096))) - touched


def test_punching_frees_blocks_and_keeps_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "file"
    data = random.Random(0).randbytes(100_000)
    file.write_bytes(data)
    before = allocated_bytes(file)
    assert punch(file, [(4096, 8192), (40_960, 81_920)])
    assert before - allocated_bytes(file) == 4096 + 40_960
    assert file.read_bytes() == data[:4096] + bytes(4096) + data[8192:40_960] + bytes(40_960) + data[81_920:]


def test_a_symlink_is_not_punched(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1" * 8192)
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="link"):
        punch(tmp_path / "link", [(0, 4096)])
    assert (tmp_path / "file").read_bytes() == b"1" * 8192


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: int) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fallocate=refuse))

    (tmp_path / "file").write_bytes(bytes(8192))
    assert not punch(tmp_path / "file", [(0, 4096)])
