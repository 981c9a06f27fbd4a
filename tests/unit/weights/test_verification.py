"""verify finds every damage, and says whose it is."""

from __future__ import annotations

import pytest
import torch
from unit.weights.comparing import flip

from weights.operations.externalize import externalize
from weights.operations.repair import verify
from weights.records.errors import ModelNotStored
from weights.records.manifest import Layout
from weights.storage.store import WeightStore


@pytest.mark.parametrize("layout", ["combined", "separate", "inline"])
@pytest.mark.parametrize("deep", [True, False])
def test_every_damage_is_reported_with_its_tensors(
    store: WeightStore, write_pipeline, write_model, layout: Layout, deep: bool
) -> None:
    shared = torch.rand(60)
    parts = {"vae": {"a": shared, "b": torch.rand(60)}, "unet": {"c": torch.rand(60), "d": torch.rand(60)}}
    pipeline = externalize(store, "p", write_pipeline("p", parts), layout=layout)
    externalize(store, "m", write_model("m", {"s": shared, "t": torch.rand(9)}), layout=layout)
    assert verify(store, deep=deep).damages == ()
    for part, name in (("vae", "a"), ("unet", "d")):
        ref = pipeline.components[part].tensors[name]
        extent = pipeline.extents[ref.extent]
        flip(store.packs / extent.pack, extent.offset + ref.offset + 7)
    report = verify(store, deep=deep)
    expected = {("p", ("vae.a",)), ("p", ("unet.d",))} | ({("m", ("model.s",))} if layout != "inline" else set())
    assert {(damage.model, damage.tensors) for damage in report.damages} == expected
    assert all("checksum" in damage.problem for damage in report.damages)
    packs = {f"packs/{extent.pack}" for extent in pipeline.extents.values()}
    assert {damage.file for damage in report.damages} <= packs
    assert {damage.model for damage in verify(store, "m", deep=deep).damages} <= {"m"}


def test_damaged_padding_affects_no_tensor(store: WeightStore, write_model) -> None:
    externalize(store, "m", write_model("m", {"a": torch.rand(3), "b": torch.rand(3)}))
    flip(store.packs / "m_weight_combined", 100)
    (damage,) = verify(store).damages
    assert (damage.model, damage.file, damage.tensors) == ("m", "packs/m_weight_combined", ())


def test_only_a_deep_look_sees_a_manifest_that_names_other_tensors(store: WeightStore, write_model) -> None:
    manifest = externalize(store, "m", write_model("m", {"a": torch.rand(3), "b": torch.rand(3)}))
    a, b = (manifest.components["model"].tensors[name].sha256 for name in "ab")
    file = store.models / "m" / "manifest.json"
    file.write_text(file.read_text().replace(a, b))
    assert verify(store).damages == ()
    (damage,) = verify(store, deep=True).damages
    assert (damage.model, damage.tensors) == ("m", ("model.a",))


def test_missing_and_damaged_files_are_all_reported(store: WeightStore, write_model) -> None:
    for name in "abcdef":
        externalize(store, name, write_model(name, {"w": torch.rand(500)}))
    (store.packs / "a_weight_combined").unlink()
    (store.packs / "b_weight_combined").write_bytes(bytes(1999))
    (store.packs / "c_weight_combined").unlink()
    (store.packs / "c_weight_combined").symlink_to("/etc/passwd")
    (store.models / "d" / "manifest.json").write_text("{")
    skeleton = store.skeleton(store.manifest("e"))
    skeleton.rename(skeleton.with_name("gone"))
    store.index_file.write_text("[")
    damages = verify(store).damages
    assert [(damage.model, damage.tensors) for damage in damages] == [
        ("", ()),
        ("d", ()),
        ("a", ("model.w",)),
        ("b", ("model.w",)),
        ("c", ("model.w",)),
        ("e", ()),
    ]
    for damage, problem in zip(
        damages, ("damaged", "damaged", "missing", "too short", "out of the store", "skeleton is missing"), strict=True
    ):
        assert problem in damage.problem


def test_progress_reaches_the_end(store: WeightStore, write_model) -> None:
    shared = torch.rand(700)
    externalize(store, "a", write_model("a", {"s": shared}))
    externalize(store, "b", write_model("b", {"s": shared, "t": torch.rand(30)}))
    seen: list[tuple[int, int]] = []
    report = verify(store, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2920, 2920)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert (report.num_models, report.num_extents, report.nbytes) == (2, 2, 2920)
    with pytest.raises(ModelNotStored, match="stored: a, b"):
        verify(store, "x")
