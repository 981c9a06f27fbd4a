"""Files of workflows: names, what may not be a name, keys apart, and room."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from configs.cluster import WorkflowFilesConfig
from deployments.ingress.comfy.files import WorkflowFiles, collect_files
from deployments.records.errors import InvalidRequest, Overloaded
from deployments.workflows.backend import SavedFile


def files_in(folder: Path, **settings: Any) -> WorkflowFiles:
    return WorkflowFiles(WorkflowFilesConfig.model_validate(settings), folder, "c")


def name_of(file: SavedFile) -> str:
    return f"{file.subfolder}/{file.filename}".lstrip("/")


def test_saved_files_are_numbered_by_their_prefix(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    first = files.save("k", "ComfyUI", "output", [b"1", b"2"])
    assert [one.filename for one in first] == ["ComfyUI_00001_.png", "ComfyUI_00002_.png"]
    (third,) = files.save("k", "ComfyUI", "output", [b"3"])
    assert (third.filename, third.subfolder, third.type) == ("ComfyUI_00003_.png", "", "output")
    (other,) = files.save("k", "day/of/Comfy", "output", [b"4"])
    assert (other.filename, other.subfolder) == ("Comfy_00001_.png", "day/of")
    (temp,) = files.save("k", "ComfyUI", "temp", [b"5"])
    assert (temp.filename, temp.type) == ("ComfyUI_00001_.png", "temp")
    kept = [*first, third, other, temp]
    assert [files.read("k", one) for one in kept] == [b"1", b"2", b"3", b"4", b"5"]
    assert files.names("k", "output") == sorted(map(name_of, kept[:4]))


def test_a_key_finds_no_file_of_another(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    (saved,) = files.save("mine", "p", "output", [b"1"])
    assert files.read("yours", saved) is None
    assert files.read("", saved) is None
    assert files.names("yours", "output") == []


@pytest.mark.parametrize("own", [None, "kept"])
def test_all_folders_are_this_users_alone(tmp_path: Path, own: str | None) -> None:
    config = WorkflowFilesConfig(folder=tmp_path / own if own else None)
    WorkflowFiles(config, tmp_path, "c").save("k", "of/a/day/p", "output", [b"1"])
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {path.name for path in made} >= {"output", "of", "a", "day"}
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def test_a_taken_name_gets_a_number_unless_the_content_is_the_same(tmp_path: Path) -> None:
    files, wanted = files_in(tmp_path), SavedFile("a.png", "", "input")
    assert files.upload("k", wanted, b"1", overwrite=False) == wanted
    assert files.upload("k", wanted, b"1", overwrite=False) == wanted
    assert files.upload("k", wanted, b"2", overwrite=False).filename == "a (1).png"
    assert files.upload("k", wanted, b"3", overwrite=False).filename == "a (2).png"
    assert files.upload("k", wanted, b"2", overwrite=False).filename == "a (1).png"
    assert files.upload("k", wanted, b"4", overwrite=True) == wanted
    assert files.read("k", wanted) == b"4"
    assert files.upload("k", SavedFile("b", "sub", "temp"), b"5", overwrite=False) == SavedFile("b", "sub", "temp")
    assert files.names("k", "input") == ["a (1).png", "a (2).png", "a.png"]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "a\\b", "a\0", "a\nb", "../a", "/etc/passwd", "x" * 200, "a:b", "trailing."],
)
def test_what_could_be_another_path_is_no_name(tmp_path: Path, name: str) -> None:
    files = files_in(tmp_path)
    with pytest.raises(InvalidRequest):
        files.upload("k", SavedFile(name, "", "input"), b"1", overwrite=True)
    with pytest.raises(InvalidRequest):
        files.read("k", SavedFile(name, "", "input"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("subfolder", ["..", "a/../../b", "a/./b", "/../x", "a\\..\\b", "a/b/c/d/e", "a\0b", ".git"])
def test_subfolders_stay_within_their_type(tmp_path: Path, subfolder: str) -> None:
    files = files_in(tmp_path)
    with pytest.raises(InvalidRequest):
        files.upload("k", SavedFile("a.png", subfolder, "input"), b"1", overwrite=False)
    with pytest.raises(InvalidRequest):
        files.save("k", f"{subfolder}/p", "output", [b"1"])


def test_an_unknown_type_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="output, temp, input"):
        files_in(tmp_path).read("k", SavedFile("a", "", "other"))  # type: ignore[arg-type]


def test_the_key_with_the_most_bytes_loses_its_oldest_files(tmp_path: Path) -> None:
    files = files_in(tmp_path, max_bytes=2**20)
    part = bytes(2**18)
    (small,) = files.save("small", "p", "output", [b"1"])
    saved = []
    for number in range(6):
        saved += files.save("large", "p", "output", [part])
        path = next(tmp_path.rglob(saved[-1].filename)).parent.parent
        for found in path.rglob("*.png"):  # apart in time, as their order is
            os.utime(found, (time.time() + 1000 + int(found.name[2:7]),) * 2)
        assert number == int(saved[-1].filename[2:7]) - 1
    left = [one for one in saved if files.read("large", one) is not None]
    assert left == saved[-3:]
    assert files.read("small", small) == b"1"


def test_no_more_files_are_kept_than_may_be(tmp_path: Path) -> None:
    files = files_in(tmp_path, max_files=5)
    for number in range(9):
        files.save(f"key {number % 2}", "p", "output", [b"1"])
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 5


def test_files_end_after_their_time(tmp_path: Path) -> None:
    files = files_in(tmp_path, keep_s=100)
    (saved,) = files.save("k", "day/p", "output", [b"1"])
    assert collect_files(tmp_path, time.time()) == ([], 0)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert 50 < path.stat().st_mtime - time.time() < 101
    assert collect_files(tmp_path, time.time() + 101, dry_run=True) == ([path], 1)
    os.utime(path, (0, 0))
    assert files.read("k", saved) is None
    assert files.names("k", "output") == []
    assert collect_files(tmp_path, time.time()) == ([path], 1)
    assert not path.exists()


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "workflows").write_text("a file")
    with pytest.raises(Overloaded, match="cannot be kept now"):
        files_in(tmp_path).save("k", "p", "output", [b"1"])


def test_a_file_larger_than_all_that_may_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="at most 1048576"):
        files_in(tmp_path, max_bytes=2**20).save("k", "p", "output", [bytes(2**20 + 1)])
