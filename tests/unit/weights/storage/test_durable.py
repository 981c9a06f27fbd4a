"""Copies, and what the file system refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from weights.errors import StoreError
from weights.storage.durable import copy_tree, disk_errors, make_folder, remove_path


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


def test_removing_never_follows_links(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    (tmp_path / "link").symlink_to("folder")
    remove_path(tmp_path / "link")
    remove_path(tmp_path / "gone")
    assert (tmp_path / "folder" / "kept").exists()
    remove_path(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []
