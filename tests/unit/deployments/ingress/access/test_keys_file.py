"""The keys file: what is read from it while it changes and breaks, and how it is written."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.ingress.access.keys import (
    KeyEntry,
    KeysFile,
    KeysFileError,
    add_key,
    hash_of,
    read_key_store,
    revoke_key,
)


def entry(name: str, key: str) -> KeyEntry:
    return KeyEntry(name=name, sha256=hash_of(key))


def names(file: KeysFile) -> list[str]:
    return [found.name for found in file.keys().entries.values()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "keys"


def test_what_is_added_holds_and_what_is_revoked_does_not(path: Path) -> None:
    file = KeysFile(path)
    assert names(file) == []
    add_key(path, entry("a", "x"))
    assert names(file) == ["a"]
    add_key(path, entry("b", "y"))
    assert names(file) == ["a", "b"]
    before = file.revision
    assert names(file) == ["a", "b"]
    assert file.revision == before  # an unchanged file is not read again
    revoke_key(path, "a")
    assert names(file) == ["b"]
    assert file.keys().find("x") is None
    revoke_key(path, "b")
    assert names(file) == []


def test_the_file_has_no_key_and_is_for_its_owner(path: Path) -> None:
    add_key(path, entry("a", "the key"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert "the key" not in path.read_text()
    assert hash_of("the key") in path.read_text()
    assert sorted(child.name for child in path.parent.iterdir()) == [".keys.lock", "keys"]


def test_comments_broken_lines_links_and_a_mode_survive_a_change(path: Path) -> None:
    target = path.parent / "real"
    target.write_text(f'# mine\nbroken\n{{"name": "torn"\n{entry("a", "x").model_dump_json()}\n')
    target.chmod(0o640)
    path.symlink_to(target)
    add_key(path, entry("b", "y"))
    assert path.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    lines = target.read_text().splitlines()
    assert lines[:3] == ["# mine", "broken", '{"name": "torn"']
    assert [json.loads(line)["name"] for line in lines[3:]] == ["a", "b"]
    assert [problem.line for problem in read_key_store(path).problems] == [2, 3]


def test_a_name_that_is_taken_and_one_that_is_unknown(path: Path) -> None:
    with pytest.raises(KeysFileError, match="No such file"):
        revoke_key(path, "a")
    add_key(path, entry("a", "x"))
    before = path.read_bytes()
    with pytest.raises(KeysFileError, match="a key 'a' already"):
        add_key(path, entry("a", "y"))
    with pytest.raises(KeysFileError, match=r"no key 'z' \(known: a\)"):
        revoke_key(path, "z")
    assert path.read_bytes() == before


def test_a_broken_line_can_be_revoked_by_its_name(path: Path) -> None:
    path.write_text('{"name": "bad", "sha256": "short"}\n' + entry("a", "x").model_dump_json() + "\n")
    path.chmod(0o600)
    revoke_key(path, "bad")
    assert read_key_store(path).problems == ()


def test_the_last_good_keys_hold_while_the_file_is_unusable(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_key(path, entry("a", "x"))
    good, file = path.read_bytes(), KeysFile(path)
    assert names(file) == ["a"]

    def breaks(what: str) -> None:
        caplog.clear()
        assert names(file) == ["a"]
        assert names(file) == ["a"]
        (record,) = caplog.records  # said once for each change
        assert record.levelno == logging.ERROR
        assert what in record.getMessage()
        assert "the keys that were read before hold on (1)" in record.getMessage()

    path.write_bytes(b"\x00\xff garbage\nmore of it\n")
    breaks("no line is right; the first: ")
    path.unlink()
    breaks("No such file or directory")
    path.mkdir()
    breaks("Is a directory")
    path.rmdir()
    path.write_bytes(good)
    path.chmod(0o622)
    breaks("its mode is 0622")
    path.chmod(0o600)
    caplog.clear()
    assert names(file) == ["a"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    path.write_bytes(good + b"torn\n" + entry("b", "y").model_dump_json().encode())
    assert names(file) == ["a", "b"]
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert f"{path}:3: " in record.getMessage()
    path.write_bytes(b"# nobody\n")  # an empty book is a book: all are revoked
    assert names(file) == []


def test_a_file_that_is_too_large_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key(path, entry("a", "x"))
    monkeypatch.setattr("deployments.ingress.access.keys._MAX_BYTES", path.stat().st_size)
    assert read_key_store(path).entries
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(KeysFileError, match="larger than"):
        read_key_store(path)


def test_a_folder_that_others_may_write_is_refused(path: Path) -> None:
    add_key(path, entry("a", "x"))
    path.parent.chmod(0o777)
    with pytest.raises(KeysFileError, match="other users may write its folder"):
        read_key_store(path)
    path.parent.chmod(0o1777)  # sticky, as /tmp: nobody else can replace the file
    assert read_key_store(path).entries


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(path: Path) -> None:
    add_key(path, entry("a", "x"))
    os.chown(path, 12345, 12345)
    with pytest.raises(KeysFileError, match="it belongs to user 12345"):
        read_key_store(path)


def test_a_change_that_cannot_be_written_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key(path, entry("a", "x"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(KeysFileError, match="No space left on device"):
        add_key(path, entry("b", "y"))
    assert [found.name for found in read_key_store(path).entries.values()] == ["a"]
    assert sorted(child.name for child in path.parent.iterdir()) == [".keys.lock", "keys"]


@pytest.mark.slow
def test_processes_that_add_at_once_lose_nothing_and_no_reader_sees_a_part(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from deployments.ingress.access.keys import KeyEntry, hash_of\n"
        "from deployments.ingress.access.keys import add_key\n"
        "for n in range(20):\n"
        "    name = f'k{sys.argv[2]}.{n}'; add_key(Path(sys.argv[1]), KeyEntry(name=name, sha256=hash_of(name)))\n"
    )
    add_key(path, entry("first", "x"))
    adders = [subprocess.Popen([sys.executable, "-c", program, str(path), str(n)]) for n in range(2)]
    sizes = [1]
    while any(adder.poll() is None for adder in adders):
        book = read_key_store(path)
        assert not book.problems
        sizes.append(len(book.entries))
    assert [adder.returncode for adder in adders] == [0] * 2
    assert sizes == sorted(sizes)
    assert len(read_key_store(path).entries) == 41
