"""repair: every model that can be whole again is, and what cannot be is said."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.operations.layouts import convert
from weights.operations.maintenance import Moment, gc, remove_model
from weights.operations.repair import repair, verify
from weights.records.errors import ModelNotStored
from weights.records.manifest import Layout, Manifest
from weights.storage.index import StoreMeta
from weights.storage.pack_folder import PackFolder
from weights.storage.staging import publish_file
from weights.storage.store import WeightStore

LAYOUTS: tuple[Layout, ...] = ("combined", "separate", "inline")


def pack_of(store: WeightStore, manifest: Manifest, component: str, name: str) -> tuple[Path, int, int]:
    ref = manifest.components[component].tensors[name]
    extent = manifest.extents[ref.extent]
    return store.packs / extent.pack, extent.offset + ref.offset, ref.nbytes


def flip(store: WeightStore, manifest: Manifest, component: str, name: str) -> None:
    path, offset, nbytes = pack_of(store, manifest, component, name)
    data = bytearray(path.read_bytes())
    data[offset + random.randrange(nbytes)] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def assert_whole(store: WeightStore, sources: dict[str, Path]) -> None:
    assert verify(store, deep=True).damages == ()
    for model, source in sources.items():
        for file in source.rglob("*.safetensors"):
            part = "model" if file.parent == source else file.parent.name
            loaded, expected = load_from_store(store.path, model)[part], load_file(file)
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.drawn(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "link"])
def test_a_damaged_model_is_written_anew_from_its_source(
    store: WeightStore, write_pipeline, monkeypatch: pytest.MonkeyPatch, layout: Layout, damage: str
) -> None:
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", 5000)
    parts = {"vae": {f"v{i}": torch.rand(600) for i in range(5)}, "unet": {"u": torch.rand(900), "w": torch.rand(7)}}
    source = write_pipeline("p", parts)
    old = externalize(store, "p", source, layout=layout)
    path, offset, _ = pack_of(store, old, "vae", "v3")
    match damage:
        case "flip":
            flip(store, old, "vae", "v3")
            flip(store, old, "unet", "w")
        case "cut":
            os.truncate(path, offset + 1)
        case "gone":
            path.unlink()
        case "link":
            path.unlink()
            path.symlink_to("/etc/hostname")
    found = verify(store, deep=True).damages
    report = repair(store)
    assert (report.num_models, report.rewritten, report.damages) == (1, ("p",), ())
    assert {damage.extent for damage in report.repaired} == {damage.extent for damage in found}
    assert StoreMeta.model_validate_json(store.meta_file.read_bytes()) == store.index.read_meta()
    assert_whole(store, {"p": source})
    new = store.manifest("p")
    assert new.extents.keys() == old.extents.keys()  # in memory they go on as they are
    assert new.components["vae"].module_key == old.components["vae"].module_key
    assert (new.layout, new.fingerprint, new.skeleton) == (old.layout, old.fingerprint, old.skeleton)
    sound = [id_ for id_ in old.extents if id_ not in {damage.extent for damage in found}]
    if layout != "inline":
        assert all(new.extents[id_] == old.extents[id_] for id_ in sound)
    gc(store)
    assert_whole(store, {"p": source})
    assert repair(store) == repair(store, ["p"]) != report
    assert externalize(store, "p", source, layout=layout) == new


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", ["combined", "separate"])
@pytest.mark.parametrize("chosen", [(), ("a",), ("c",)])
def test_all_models_that_share_the_damage_are_whole(
    store: WeightStore, write_model, layout: Layout, chosen: tuple[str, ...]
) -> None:
    """One source is enough for all, in whatever order they come; the inline copy of a fourth would be as well."""
    x, y = torch.rand(400), torch.rand(400)
    tensors = {"a": {"x": x}, "b": {"x": x, "y": y, "own": torch.rand(9)}, "c": {"x": x, "y": y}}
    externalize(store, "all", write_model("all", {"x": x, "y": y}), layout=layout)
    sources = {name: write_model(name, content) for name, content in tensors.items()}
    manifests = {name: externalize(store, name, source, layout=layout) for name, source in sources.items()}
    remove_model(store, "all")
    flip(store, manifests["a"], "model", "x")
    kept = random.choice("abc")
    hidden = {
        name: source.rename(source.with_name(f"hidden-{name}")) for name, source in sources.items() if name != kept
    }
    report = repair(store, chosen)
    assert set(report.rewritten) == {"a", "b", "c"}
    assert report.damages == ()
    assert_whole(store, sources | hidden)
    extents = {name: store.manifest(name).components["model"].tensors["x"].extent for name in "abc"}
    places = {store.manifest(name).extents[id_].pack for name, id_ in extents.items()}
    assert len(places) == 1 or layout == "combined"
    gc(store)
    assert_whole(store, sources | hidden)


def test_another_models_copy_is_taken_where_the_source_is_gone(store: WeightStore, write_model) -> None:
    tensors = {"x": torch.rand(100), "y": torch.rand(100)}
    source = write_model("m", tensors)
    manifest = externalize(store, "m", source)
    externalize(store, "copy", write_model("copy", tensors), layout="inline")
    kept = shutil.copytree(source, source.with_name("kept"))
    for name in ("m", "copy"):
        shutil.rmtree(source.with_name(name))
    flip(store, manifest, "model", "y")
    assert repair(store, ["m"]).damages == ()
    assert_whole(store, {"m": kept, "copy": kept})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_cannot_be_repaired_is_said_and_left(store: WeightStore, write_model, layout: Layout) -> None:
    """Its sound tensors are still in place, and the other model is repaired."""
    source = write_model("lost", {"x": torch.rand(100), "y": torch.rand(100)})
    lost = externalize(store, "lost", source, layout=layout)
    fine = externalize(store, "fine", write_model("fine", {"z": torch.rand(50)}), layout=layout)
    flip(store, lost, "model", "y")
    flip(store, fine, "model", "z")
    save_file({"x": torch.rand(100), "y": torch.rand(100)}, source / "model.safetensors")  # trained on
    report = repair(store)
    assert report.rewritten == ("fine",)
    assert [(damage.model, damage.tensors) for damage in report.repaired] == [("fine", ("model.z",))]
    ((damage,),) = (report.damages,)
    assert (damage.model, damage.tensors) == ("lost", ("model.y",))
    assert "tensor model.y: no sound copy" in damage.problem
    assert str(pack_of(store, lost, "model", "y")[0]) in damage.problem
    assert "the source has other bytes than were stored" in damage.problem
    assert store.manifest("lost") == lost
    shutil.rmtree(source)
    assert str(source) in repair(store, ["lost"]).damages[0].problem
    assert [damage.model for damage in verify(store, deep=True).damages] == ["lost"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_takes_no_meta_at_the_end_loses_no_report(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    externalize(store, "m", write_model("m", {"w": torch.rand(500)}))
    gc(store)  # makes meta.json
    pack = next(store.packs.iterdir())
    pack.write_bytes(bytes(pack.stat().st_size))

    def publish(path: Path, target: Path, content: bytes) -> None:
        if target == store.meta_file:
            raise OSError(code, os.strerror(code))
        publish_file(path, target, content)

    with monkeypatch.context() as full:
        full.setattr("weights.storage.index_files.publish_file", publish)
        report = repair(store)
    assert (report.rewritten, report.damages) == (("m",), ())
    assert not store.meta_file.exists()
    gc(store)
    assert store.meta_file.exists()
    assert verify(store, deep=True).damages == ()


def test_a_cast_model_is_cast_again(store: WeightStore, write_model) -> None:
    source = write_model("m", {"w": torch.randn(500), "i": torch.arange(9)})
    manifest = externalize(store, "m", source, dtype="bfloat16")
    flip(store, manifest, "model", "w")
    assert repair(store).damages == ()
    expected = load_file(source / "model.safetensors")["w"].bfloat16()
    assert torch.equal(load_from_store(store.path, "m")["model"]["w"], expected)


def test_pickles_are_opened_for_who_asks(store: WeightStore, tmp_path: Path) -> None:
    torch.save({"w": torch.rand(40)}, tmp_path / "weights.pt")
    manifest = externalize(store, "m", tmp_path / "weights.pt", allow_torch=True)
    flip(store, manifest, "model", "w")
    assert "weights.pt" in repair(store).damages[0].problem
    assert repair(store, allow_torch=True).damages == ()
    assert verify(store, deep=True).damages == ()


def test_bytes_that_no_model_names_any_more_do_not_stand_in_the_way(store: WeightStore, write_model) -> None:
    """A reader takes the extent whole, so half of it being damaged is enough to stop it."""
    x = torch.rand(400)
    old = externalize(store, "old", write_model("old", {"dead": torch.rand(400), "x": x}))
    source = write_model("m", {"x": x})
    externalize(store, "m", source)
    remove_model(store, "old")
    gc(store)
    flip(store, old, "model", "dead")
    shutil.move(source, source.with_name("kept"))
    assert len(verify(store).damages) == 1
    assert repair(store).damages == ()
    assert_whole(store, {"m": source.with_name("kept")})


def test_the_index_a_manifest_and_a_skeleton(store: WeightStore, write_model) -> None:
    for name in "abc":
        externalize(store, name, write_model(name, {"w": torch.rand(5)}))
    store.index_file.write_bytes(b"none")
    (store.models / "a" / "manifest.json").write_text("{")
    shutil.rmtree(store.skeleton(store.manifest("b")))
    report = repair(store)
    assert [damage.file for damage in report.repaired] == ["index.sqlite"]
    assert [damage.model for damage in report.damages] == ["a", "b"]
    assert all(f"`remove {damage.model}` and bring it in again" in damage.problem for damage in report.damages)
    store.index.check()
    with pytest.raises(ModelNotStored, match="stored: a, b, c"):
        repair(store, ["x"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_repair_that_is_killed_leaves_what_was_whole(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    x = torch.rand(400)
    sources = {name: write_model(name, {"x": x, "own": torch.rand(400)}) for name in "ab"}
    manifests = {name: externalize(store, name, source, layout=layout) for name, source in sources.items()}
    flip(store, manifests["a"], "model", "x")
    for owner, step in ((PackFolder, "add"), (WeightStore, "publish_model")):

        def kill(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, step, kill)
            with pytest.raises(KeyboardInterrupt):
                repair(store)
        assert {damage.tensors for damage in verify(store, "a").damages} <= {("model.x",)}
        gc(store)
    assert repair(store).damages == ()
    assert_whole(store, sources)
    gc(store)
    assert_whole(store, sources)


def test_a_converted_model_is_repaired_too(store: WeightStore, write_model) -> None:
    source = write_model("m", {"x": torch.rand(400), "y": torch.rand(40)})
    externalize(store, "m", source)
    for layout in ("separate", "inline", "combined"):
        flip(store, convert(store, "m", layout), "model", random.choice("xy"))
        assert [damage.model for damage in repair(store).repaired] == ["m"]
        assert_whole(store, {"m": source})


def test_whatever_happens_to_a_store_it_is_whole_after_a_repair(
    store: WeightStore, write_pipeline, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that share this and that come, move and go, bits flip and indices are lost; sources stay."""
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", random.choice([3000, 10_000]))
    pool = {f"t{i}": torch.rand(random.choice([1, 40, 300, 900])) for i in range(12)}
    sources = {}
    for name in "abcd":
        sources[name] = write_model(name, {key: pool[key] for key in random.sample([*pool], 6)})
    for name in "pq":
        parts = {part: {key: pool[key] for key in random.sample([*pool], 4)} for part in ("vae", "unet")}
        sources[name] = write_pipeline(name, parts)
    clock_s = 0.0
    for _ in range(12):
        name, layout = random.choice([*sources]), random.choice(LAYOUTS)
        stored = store.model_names()
        match random.choice(["in", "in", "in", "convert", "remove", "gc", "grace", "flip", "lose"]):
            case "in":
                externalize(store, name, sources[name], layout=layout)
                assert verify(store, name, deep=True).damages == ()
            case "convert" if name in stored:
                convert(store, name, layout)
            case "remove" if name in stored:
                remove_model(store, name)
            case "gc" if stored:
                gc(store)
            case "grace" if stored:
                clock_s += 10
                now_s = clock_s
                gc(store, grace_s=15, now=lambda now_s=now_s: Moment(now_s))
            case "lose":
                store.index_file.unlink(missing_ok=True)
            case "flip" if name in stored:
                manifest = store.manifest(name)
                part = random.choice([*manifest.components.values()])
                flip(store, manifest, part.name, random.choice([*part.tensors]))
                assert verify(store, name, deep=True).damages
                if random.random() < 0.5:  # another comes first, and shares nothing that is damaged
                    other = random.choice([*sources.keys() - stored] or [name])
                    if other != name:
                        externalize(store, other, sources[other], layout=layout)
                        assert verify(store, other, deep=True).damages == ()
                # A newcomer with the damaged tensor in a file of its own writes that file anew, for all models.
                damaged = verify(store, name, deep=True).damages
                report = repair(store, random.choice([(), (name,)]))
                assert report.damages == ()
                assert (name in report.rewritten) == bool(damaged)
        assert_whole(store, {model: sources[model] for model in store.model_names()})
