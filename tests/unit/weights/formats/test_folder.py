"""The files of a folder that belong to a checkpoint, and those that may not be looked at."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deployments.engines.libraries.config_files import read_config
from deployments.engines.records.protocol import EngineError
from weights.formats import folder as folders
from weights.formats.encoder_files import read_stages
from weights.formats.folder import MAX_DEPTH, MAX_JSON_BYTES, check_inside, files_below, read_json
from weights.operations.intake import import_model
from weights.records.errors import FormatError, SourceRefused
from weights.storage.store import WeightStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    save_file({"w": torch.rand(4)}, folder / "model.safetensors")
    return folder


def test_a_model_hub_s_cache_is_read_through_its_symlinks(root: Path, store: WeightStore) -> None:
    blobs, snapshot = root / "models--a--b" / "blobs", root / "models--a--b" / "snapshots" / "0123"
    model(blobs)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    manifest = import_model(store, "m", snapshot, roots=[root])
    assert manifest.components["model"].tensors.keys() == {"w"}
    with pytest.raises(SourceRefused, match=r"outside of the folders that models may come from \(model_roots: "):
        import_model(store, "m", snapshot, roots=[snapshot])


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "inner", "config.json"])
@pytest.mark.parametrize("is_relative", [True, False])
def test_a_symlink_that_leads_out_is_refused(
    root: Path, store: WeightStore, tmp_path: Path, name: str, is_relative: bool
) -> None:
    outside = model(tmp_path / "outside")
    (outside / "tokenizer.json").write_text("{}")
    source = model(root / "m")
    target = outside if name == "inner" else outside / name
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(os.path.relpath(target, source) if is_relative else target)
    with pytest.raises(SourceRefused, match=f"model_roots: {root}"):
        import_model(store, "m", source, roots=[root])
    assert not store.path.exists() or store.model_names() == []
    assert import_model(store, "m", source).model == "m"  # without roots the source is trusted


def test_a_path_outside_is_refused_whether_it_is_there_or_not(root: Path, tmp_path: Path) -> None:
    model(tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    messages = set()
    for path in ("/", "/etc", tmp_path / "outside", tmp_path / "nowhere", root / ".." / "outside", root / "link"):
        with pytest.raises(SourceRefused) as caught:
            check_inside(Path(path), [root])
        messages.add(str(caught.value).removeprefix(str(path)))
    assert messages == {f": outside of the folders that models may come from (model_roots: {root})"}
    with pytest.raises(FormatError, match="No such file"):
        check_inside(root / "nowhere", [root])
    with pytest.raises(SourceRefused, match="model_roots: none"):
        check_inside(root, [])


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800"])
def test_what_no_path_can_be_is_refused_as_one(root: Path, store: WeightStore, name: str) -> None:
    with pytest.raises((FormatError, SourceRefused)):
        check_inside(root / name, [root])
    with pytest.raises(FormatError):
        import_model(store, "m", root / name)


def test_a_circle_of_symlinks_is_an_error(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises(FormatError, match="symbolic links"):
        check_inside(root / "a", [root])
    source = model(root / "m")
    (source / "again").symlink_to(source)
    with pytest.raises(FormatError, match="folders deep"):
        files_below(source)


def test_a_folder_is_recognised_before_it_is_walked(
    root: Path, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, scandir = [], os.scandir

    def counted(path: str | Path) -> Any:
        listed.append(str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    with pytest.raises(FormatError, match="unknown layout"):
        import_model(store, "m", "/", roots=[Path("/")])
    assert set(listed) == {"/"}


def test_a_walk_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_ENTRIES", 50)
    source = model(root / "m")
    for number in range(100):
        (source / f"{number}.json").touch()
    looked_at = 0
    scandir = os.scandir

    class Counting:
        def __init__(self, path: Path) -> None:
            self._entries = scandir(path)

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            self._entries.close()

        def __iter__(self):
            nonlocal looked_at
            for entry in self._entries:
                looked_at += 1
                yield entry

    monkeypatch.setattr(os, "scandir", Counting)
    with pytest.raises(FormatError, match="more than 50 files, expected those of one checkpoint"):
        files_below(source)
    assert looked_at == 51


def test_a_folder_that_is_too_deep_is_refused(root: Path) -> None:
    source = model(root / "m")
    deep = source.joinpath(*["d"] * MAX_DEPTH)
    deep.mkdir(parents=True)
    (deep / "x.json").touch()
    assert deep.relative_to(source) / "x.json" in files_below(source)
    (deep / "e").mkdir()
    with pytest.raises(FormatError, match=f"more than {MAX_DEPTH} folders deep"):
        files_below(source)


def test_a_component_behind_a_symlinked_folder_is_whole(root: Path, store: WeightStore, write_pipeline) -> None:
    source = write_pipeline("p", {"vae": {"w": torch.rand(4)}})
    (source / "vae").rename(root / "shared-vae")
    (source / "vae").symlink_to(root / "shared-vae")
    manifest = import_model(store, "p", source)
    assert (store.skeleton(manifest) / "vae" / "config.json").is_file()


def test_a_single_file_behind_a_symlink_is_confined_as_well(root: Path, store: WeightStore, tmp_path: Path) -> None:
    save_file({"w": torch.rand(4)}, tmp_path / "secret.safetensors")
    (root / "x.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(SourceRefused):
        import_model(store, "m", root / "x.safetensors", roots=[root])
    for name in ("x.onnx", "x.pt2"):
        (root / name).symlink_to(tmp_path / "secret.safetensors")
        with pytest.raises(SourceRefused):
            import_model(store, "m", root / name, roots=[root])


@pytest.mark.parametrize(
    ("read", "error"),
    [(read_json, FormatError), (read_config, EngineError), (lambda path: read_stages(path.parent), FormatError)],
)
def test_a_json_file_without_end_is_refused_before_it_fills_memory(
    tmp_path: Path, read: Callable[[Path], object], error: type[Exception]
) -> None:
    path = tmp_path / "modules.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # holes, which take no room
    with pytest.raises(error, match=rf"modules\.json: more than {MAX_JSON_BYTES} bytes"):
        read(path)
