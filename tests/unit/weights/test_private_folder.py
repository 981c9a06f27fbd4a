"""A folder that somebody else may have made is refused, with one line that says why."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from weights.platform.private_folder import private_folder


def test_it_is_made_for_this_user_alone_whatever_the_umask_and_taken_again(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = private_folder(tmp_path / "parents" / "mine")
    finally:
        os.umask(before)
    assert made.stat().st_mode & 0o777 == 0o700
    (made / "file").touch()
    assert private_folder(made) == made
    assert (made / "file").exists()


def link(path: Path) -> None:
    path.with_name("theirs").mkdir(mode=0o700)
    path.symlink_to(path.with_name("theirs"))


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def open_to(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        path.chmod(mode)

    return make


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (link, "it is a link or a file"),
        (dangling, "it is a link or a file"),
        (Path.touch, "it is a link or a file"),
        *((open_to(mode), f"its mode is {mode:04o}") for mode in (0o1777, 0o755, 0o770, 0o701, 0o704)),
    ],
)
def test_what_others_may_have_made_or_may_enter_is_refused(
    tmp_path: Path, make: Callable[[Path], None], text: str
) -> None:
    make(tmp_path / "folder")
    with pytest.raises(PermissionError) as caught:
        private_folder(tmp_path / "folder")
    assert str(caught.value).startswith(f"{tmp_path / 'folder'}: not used: {text}")
    assert "\n" not in str(caught.value)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_folder(tmp_path / "folder")
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(PermissionError, match=rf"it belongs to user {mine}, and this is user {mine + 1}"):
        private_folder(tmp_path / "folder")
