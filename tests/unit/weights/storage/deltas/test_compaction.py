"""Models that are stored as deltas: what everything else of the store does with them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from unit.weights.comparing import flip

from weights.loading.loader import load_from_store
from weights.operations.compaction import compact, expand
from weights.operations.externalize import externalize
from weights.operations.layouts import convert, write_inline
from weights.operations.maintenance import gc, rebuild_index, remove_model, summarize, totals
from weights.operations.repair import repair, verify
from weights.records.errors import DiskFull, StoreVersionError, WeightsError
from weights.records.manifest import Layout, Manifest, read_manifest
from weights.storage.store import WeightStore

Tensors = dict[str, torch.Tensor]
SHAPE = (64, 96)


def tuned(base: Mapping[str, torch.Tensor], strength: float = 1e-3) -> Tensors:
    return {n: (w.float() * (1 + strength * torch.randn(w.shape))).to(w.dtype) for n, w in base.items()}


@pytest.fixture
def base() -> Tensors:
    return {f"w{i}": torch.randn(SHAPE).to(torch.bfloat16) for i in range(6)} | {"norm": torch.rand(96)}


@pytest.fixture
def models(base: Tensors) -> dict[str, Tensors]:
    """A base, three fine-tunes of it, one of which changes only some tensors, and one of other weights."""
    merged = base | {name: tensor for name, tensor in tuned(base).items() if name in ("w1", "w4")}
    other = {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in base.items()}
    return {"base": base, "light": tuned(base, 2e-3), "merged": merged, "other": other, "strong": tuned(base, 3e-3)}


@pytest.fixture
def filled(store: WeightStore, models: dict[str, Tensors], write_model) -> WeightStore:
    for name, tensors in models.items():
        externalize(store, name, write_model(name, tensors))
    return store


def assert_same(store: WeightStore, models: Mapping[str, Tensors]) -> None:
    store.index.check()
    assert verify(store, deep=True).damages == ()
    assert store.model_names() == sorted(models)
    for name, tensors in models.items():
        loaded = load_from_store(store.path, name)["model"]
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[tensor], expected) for tensor, expected in tensors.items())


def deltas(store: WeightStore) -> dict[str, int]:
    """Number of extents with a delta, by model."""
    return {name: sum(bool(e.delta) for e in found.extents.values()) for name, found in store.manifests().items()}


def stored_bytes(store: WeightStore) -> int:
    return sum(file.stat().st_size for file in store.packs.rglob("*") if file.is_file())


def test_siblings_become_deltas_and_others_stay(filled: WeightStore, models: dict[str, Tensors]) -> None:
    before = {name: filled.manifest(name) for name in models}
    planned = compact(filled, dry_run=True)
    assert {name: filled.manifest(name) for name in models} == before
    assert not list(filled.path.glob("packs/*_deltas*"))
    report = compact(filled)
    assert report == planned
    assert report.problems == ()
    found = {figures.model: figures for figures in report.models}
    assert found.keys() == {"light", "merged", "strong"}
    assert deltas(filled) == {"base": 0, "light": 1, "merged": 1, "other": 0, "strong": 1}
    assert all(figures.bases == ("base",) for figures in found.values())
    assert found["light"].delta_bytes < found["strong"].delta_bytes < 0.8 * found["strong"].plain_bytes
    matrices = [kind for kind in found["light"].kinds if kind.kind == "BF16 matrix"]
    assert [kind.plain_bytes for kind in matrices] == [6 * 2 * 64 * 96]
    assert report.after_bytes == report.before_bytes - sum(f.plain_bytes - f.delta_bytes for f in report.models)
    assert_same(filled, models)
    assert gc(filled).freed_bytes > 0
    assert totals(filled).stored_bytes == report.after_bytes
    assert not list(filled.packs.glob("light_weight*"))
    assert_same(filled, models)
    assert compact(filled).models == ()  # a second run finds nothing to do
    assert [weight.is_delta for weight in summarize(filled, "light")] == [True] * 7


@pytest.mark.drawn
@pytest.mark.parametrize("layout", ["combined", "separate"])
def test_there_and_back(store: WeightStore, models: dict[str, Tensors], write_model, layout: Layout) -> None:
    for name, tensors in models.items():
        externalize(store, name, write_model(name, tensors), layout=layout)
    ids = {name: set(manifest.extents) for name, manifest in store.manifests().items()}
    assert {figures.model for figures in compact(store).models} == {"light", "merged", "strong"}
    gc(store)
    assert_same(store, models)
    assert {name: set(manifest.extents) for name, manifest in store.manifests().items()} == ids
    assert expand(store, store.model_names()) == ["light", "merged", "strong"]
    gc(store)
    assert_same(store, models)
    assert deltas(store) == dict.fromkeys(models, 0)
    assert {manifest.version for manifest in store.manifests().values()} == {1}
    assert not list(store.packs.glob("*_deltas*"))
    assert expand(store, store.model_names()) == []


def test_plain_bytes_that_are_kept_serve_others_until_they_are_given_up(
    filled: WeightStore, models: dict[str, Tensors], write_model
) -> None:
    kept = compact(filled, keep_plain=True)
    assert kept.after_bytes > kept.before_bytes
    gc(filled)
    assert all(filled.manifest(name).plain_extents for name in models)
    before = stored_bytes(filled)
    models["copy"] = models["light"]
    externalize(filled, "copy", write_model("copy", models["copy"]))
    assert stored_bytes(filled) == before
    assert compact(filled, keep_plain=True).models[0].model == "copy"  # it takes the delta that there is
    packs = set(filled.packs.glob("*_deltas*"))
    assert {figures.model for figures in compact(filled).models} == {"copy", "light", "merged", "strong"}
    assert set(filled.packs.glob("*_deltas*")) == packs
    gc(filled)
    assert_same(filled, models)
    assert set(filled.manifest("copy").extents.values()) == set(filled.manifest("light").extents.values())


def test_what_models_share_stays_shared(store: WeightStore, base: Tensors, write_model) -> None:
    same = tuned(base)
    models = {"a": base, "d": tuned(base), "b": same, "c": dict(same)}
    for name, tensors in models.items():
        externalize(store, name, write_model(name, tensors))
        if name == "d":
            compact(store)
    compact(store)
    gc(store)
    assert store.manifest("b").extents == store.manifest("c").extents
    found = deltas(store)
    assert (found["b"], found["c"], found["a"] + found["d"]) == (1, 1, 1)
    before = totals(store).stored_bytes
    expand(store, ["b"])
    expand(store, ["c"])
    assert store.manifest("b").extents == store.manifest("c").extents
    gc(store)
    assert totals(store).stored_bytes > before
    assert_same(store, models)


def test_a_base_goes_only_when_nobody_needs_it(filled: WeightStore, models: dict[str, Tensors], write_model) -> None:
    compact(filled)
    remove_model(filled, "base")
    gc(filled)
    del models["base"]
    assert_same(filled, models)
    rebuild_index(filled)
    gc(filled)
    assert_same(filled, models)
    models["later"] = tuned(models["other"])
    externalize(filled, "later", write_model("later", models["later"]))
    assert [figures.bases for figures in compact(filled).models] in ([("other",)], [("later",)])
    assert_same(filled, models)
    expand(filled, filled.model_names())
    remove_model(filled, "merged")  # shares the tensors that it has not changed
    del models["merged"]
    gc(filled)
    assert not list(filled.packs.glob("base_*"))
    assert_same(filled, models)


def test_a_base_stays_one_when_more_siblings_come(filled: WeightStore, models: dict[str, Tensors], write_model) -> None:
    compact(filled)
    for number in range(3):  # nearer to each other than to the base
        name = f"new{number}"
        models[name] = tuned(models["strong"])
        externalize(filled, name, write_model(name, models[name]))
    assert {figures.bases for figures in compact(filled).models} == {("base",)}
    assert deltas(filled)["base"] == 0
    assert_same(filled, models)


def test_new_models_do_not_share_what_is_no_longer_there(
    filled: WeightStore, models: dict[str, Tensors], write_model
) -> None:
    compact(filled)
    models["copy"] = models["strong"]
    externalize(filled, "copy", write_model("copy", models["copy"]))
    gc(filled)
    assert_same(filled, models)
    assert compact(filled).models[0].model == "copy"
    gc(filled)
    assert set(filled.manifest("copy").extents.values()) == set(filled.manifest("strong").extents.values())
    assert_same(filled, models)


@pytest.mark.parametrize("layout", ["inline", "separate"])
def test_converted_and_written_back(
    filled: WeightStore, models: dict[str, Tensors], tmp_path: Path, layout: Layout
) -> None:
    compact(filled)
    gc(filled)
    write_inline(filled, "strong", tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert all(torch.equal(written[name], expected) for name, expected in models["strong"].items())
    assert convert(filled, "strong", layout).layout == layout
    gc(filled)
    assert deltas(filled)["strong"] == 0
    assert_same(filled, models)


def test_models_in_their_own_files_are_left_alone(store: WeightStore, models: dict[str, Tensors], write_model) -> None:
    for name, tensors in models.items():
        externalize(store, name, write_model(name, tensors), layout="inline")
    assert compact(store).models == ()
    assert_same(store, models)


def test_older_versions_refuse_deltas_and_read_the_others(filled: WeightStore) -> None:
    compact(filled)
    texts = {name: (filled.models / name / "manifest.json").read_text() for name in ("base", "light")}
    assert '"version": 1' in texts["base"]
    assert "delta" not in texts["base"]
    assert '"version": 2' in texts["light"]
    file = filled.models / "light" / "manifest.json"
    file.write_text(texts["light"].replace('"version": 2', '"version": 3'))
    with pytest.raises(StoreVersionError, match="manifest version 3, this library reads version 2 and before"):
        read_manifest(file)
    file.write_text(texts["light"].replace('"version": 2', '"version": 1'))
    with pytest.raises(WeightsError, match=r"damaged manifest at top level: .* which version 1 does not know"):
        read_manifest(file)


def one_extent(manifest: Manifest) -> tuple[str, str]:
    """Pack of its only delta, and of the base."""
    (extent,) = (found for found in manifest.extents.values() if found.delta)
    assert extent.delta
    return extent.delta.pack, extent.delta.bases[0].pack


def test_a_damaged_delta_is_found_and_repaired_from_the_source(filled: WeightStore, models: dict[str, Tensors]) -> None:
    compact(filled)
    gc(filled)
    pack, _ = one_extent(filled.manifest("strong"))
    middle = (filled.packs / pack).stat().st_size // 2
    for place in range(middle, middle + 64):  # one bit alone may change nothing that is decoded
        flip(filled.packs / pack, place)
    (damage,) = verify(filled).damages
    assert (damage.model, damage.file) == ("strong", f"packs/{pack}")
    assert len(damage.tensors) == 7
    report = repair(filled)
    assert (report.rewritten, report.damages) == (("strong",), ())
    assert_same(filled, models)


def test_a_damaged_base_is_repaired_and_its_deltas_follow(filled: WeightStore, models: dict[str, Tensors]) -> None:
    compact(filled)
    gc(filled)
    for name in ("light", "merged", "strong"):
        shutil.rmtree(filled.manifest(name).source)
    _, pack = one_extent(filled.manifest("strong"))
    flip(filled.packs / pack, 5000)
    damages = verify(filled).damages
    assert {damage.model for damage in damages} == {"base", "light", "merged", "strong"}
    assert all(pack in damage.problem for damage in damages)
    report = repair(filled, ["strong"])  # finds that it is the base that is damaged
    assert report.damages == ()
    assert set(report.rewritten) == {"base", "strong", "light", "merged"}
    gc(filled)
    assert_same(filled, models)
    assert deltas(filled)["strong"] == 1


def test_a_damaged_base_that_nobody_has_leaves_the_rest_alone(filled: WeightStore, models: dict[str, Tensors]) -> None:
    compact(filled)
    _, pack = one_extent(filled.manifest("strong"))
    flip(filled.packs / pack, 5000)
    for name in ("base", "merged", "strong"):
        shutil.rmtree(filled.manifest(name).source)
    gc(filled)
    report = repair(filled)
    assert {damage.model for damage in report.damages} == {"base", "merged", "strong"}
    assert "light" in report.rewritten  # from its source
    assert all(
        torch.equal(load_from_store(filled.path, "light")["model"][name], expected)
        for name, expected in models["light"].items()
    )


def test_plain_bytes_that_are_damaged_are_repaired_from_their_delta(
    filled: WeightStore, models: dict[str, Tensors]
) -> None:
    compact(filled, keep_plain=True)
    shutil.rmtree(filled.manifest("strong").source)
    (extent,) = filled.manifest("strong").extents.values()
    flip(filled.packs / extent.pack, extent.offset + 100)
    (damage,) = verify(filled, "strong").damages
    assert damage.file == f"packs/{extent.pack}"
    assert repair(filled).damages == ()
    assert_same(filled, models)


def test_a_damaged_model_stops_nobody_else(filled: WeightStore, models: dict[str, Tensors]) -> None:
    (extent,) = filled.manifest("strong").extents.values()
    flip(filled.packs / extent.pack, 100)
    report = compact(filled)
    assert len(report.problems) == 1
    assert report.problems[0].startswith("strong: ")
    assert extent.pack in report.problems[0]
    assert deltas(filled) == {"base": 0, "light": 1, "merged": 1, "other": 0, "strong": 0}
    repair(filled)
    assert_same(filled, models)


def test_a_base_that_was_freed_meanwhile_is_noticed(
    filled: WeightStore, models: dict[str, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = WeightStore.staged

    def removing(store: WeightStore, kind: str, folder: Path | None = None):
        if kind == "deltas" and store.has_model("base"):
            remove_model(store, "base")
            remove_model(store, "merged")
        return real(store, kind, folder)

    monkeypatch.setattr(WeightStore, "staged", removing)
    report = compact(filled)
    assert any("is of no model any more" in problem for problem in report.problems)
    gc(filled)
    assert_same(filled, {name: models[name] for name in ("light", "other", "strong")})


@pytest.mark.parametrize("num_kills", [6, pytest.param(16, marks=pytest.mark.long)])
def test_killed_between_any_two_steps_the_store_is_whole(
    filled: WeightStore, models: dict[str, Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_kills: int
) -> None:
    """Every state on disk that a kill can leave behind, as in test_crash.py."""
    copies: list[WeightStore] = []

    def copy(_: object) -> None:
        copies.append(WeightStore(tmp_path / f"copy{len(copies)}"))
        shutil.copytree(filled.path, copies[-1].path)

    class Watched(sqlite3.Connection):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            self.set_trace_callback(lambda text: copy(text) if "EXTENTS" in text.upper() else None)

    connect = sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", copy)
        patch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, **options, factory=Watched))
        compact(filled)
    assert len(copies) > 12
    step = max(1, len(copies) // num_kills)
    for copied in copies[random.randrange(step) :: step]:
        assert_same(copied, models)
        gc(copied)
        assert_same(copied, models)
        assert not list(copied.path.glob(".staged*"))
        compact(copied)
        gc(copied)
        assert deltas(copied) == deltas(filled)
        assert_same(copied, models)
        assert gc(copied).removed == ()


def test_a_failure_at_any_step_changes_nothing(
    filled: WeightStore, models: dict[str, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = filled.manifests(), os.fsync
    for fails_at in range(40):
        calls = 0

        def fsync(descriptor: int) -> None:
            nonlocal calls
            calls += 1
            if calls == fails_at + 1:  # noqa: B023
                raise OSError(28, "No space left on device")
            real(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with contextlib.suppress(DiskFull):
                compact(filled)
                break
        assert_same(filled, models)
        assert not list(filled.path.glob(".staged*"))
        expand(filled, filled.model_names())
        gc(filled)
        assert not list(filled.packs.glob("*_deltas*"))
    else:
        pytest.fail("it never came to an end")
    assert deltas(filled) != dict.fromkeys(before, 0)
    assert_same(filled, models)
