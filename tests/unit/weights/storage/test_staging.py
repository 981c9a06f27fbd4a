"""Private folders: alive as long as their process, swept after it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from weights.records.errors import StoreError
from weights.storage.staging import CLAIM, _remove_if_dead, claimed_folder, is_dead, sweep

pytestmark = pytest.mark.slow

HOLDER = """
import sys
from pathlib import Path
from weights.storage.staging import claimed_folder
with claimed_folder(Path(sys.argv[1])) as folder:
    (folder / "inner").mkdir()
    (folder / "inner" / "data").write_bytes(bytes(100))
    print("ready", flush=True)
    sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout
    assert holder.stdout.readline() == "ready\n"
    return holder


def test_a_folder_is_gone_with_its_session(tmp_path: Path) -> None:
    with claimed_folder(tmp_path / "deep" / "a") as folder:
        (folder / "inner").mkdir()
        (folder / "link").symlink_to(tmp_path)
        assert not is_dead(folder)
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_killed_owner_leaves_a_dead_folder(tmp_path: Path) -> None:
    path = tmp_path / "a"
    holder = hold(path)
    assert not is_dead(path)
    assert sweep(tmp_path, "*") == []
    with pytest.raises(StoreError, match="a: another process is using it"), claimed_folder(path):
        pass
    assert (path / "inner" / "data").exists()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert is_dead(path)
    assert sweep(tmp_path, "*") == [path]
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_claimed_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").touch()
    (tmp_path / "file").touch()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / CLAIM).touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert not any(_remove_if_dead(tmp_path / name) for name in ("other", "file", "link", "gone"))
    assert (tmp_path / "other" / "precious").exists()
    assert (tmp_path / "link").is_symlink()


def test_a_folder_without_a_sign_of_life_is_dead_only_when_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert sweep(tmp_path, "*") == [tmp_path / "empty"]


@pytest.mark.parametrize("num_claims", [75, pytest.param(600, marks=pytest.mark.long)])
def test_claiming_and_sweeping_at_once_never_meet(tmp_path: Path, num_claims: int) -> None:
    """An owner that got its folder has it until it lets go, however the sweeps fall."""
    stop = threading.Event()

    def keep_sweeping() -> None:
        while not stop.is_set():
            sweep(tmp_path, "s-*")

    sweeper = threading.Thread(target=keep_sweeping)
    sweeper.start()
    try:
        for number in range(num_claims):
            with claimed_folder(tmp_path / f"s-{number}") as folder:
                (folder / "data").write_text("mine")
                assert (folder / "data").read_text() == "mine"
    finally:
        stop.set()
        sweeper.join()
    assert list(tmp_path.iterdir()) == []
