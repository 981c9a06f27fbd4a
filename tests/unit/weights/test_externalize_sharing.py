"""Sharing between models: equal tensors are stored once, and damage is never shared."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.weights.comparing import same

from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.operations.repair import verify
from weights.reading.extents import read_extent
from weights.records.manifest import ExtentRef, Layout, Manifest
from weights.storage.index import StoreMeta
from weights.storage.packs import SharedExtents
from weights.storage.store import WeightStore


def flip_bit(store: WeightStore, manifest: Manifest, component: str, name: str) -> None:
    """One bit of a tensor of `manifest`, in the pack where it is."""
    ref = manifest.components[component].tensors[name]
    extent = manifest.extents[ref.extent]
    path = store.packs / extent.pack
    data = bytearray(path.read_bytes())
    data[extent.offset + ref.offset + random.randrange(ref.nbytes)] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def test_equal_tensors_are_stored_once_across_models(store: WeightStore, write_model, write_pipeline) -> None:
    shared = torch.rand(5000)
    first = externalize(
        store, "a", write_model("a", {"x": shared, "y": shared.clone(), "z": shared.clone().view(50, 100)})
    )
    assert sum(extent.nbytes for extent in first.extents.values()) == shared.nbytes
    own = torch.rand(10)
    second = externalize(store, "b", write_model("b", {"other": shared, "own": own}))
    assert (store.packs / "b_weight_combined").stat().st_size == own.nbytes
    assert set(first.extents) < set(second.extents)
    third = externalize(store, "c", write_pipeline("c", {"vae": {"w": shared}, "unet": {"w": own}}))
    assert not (store.packs / "c_weight_combined").exists()
    assert torch.equal(load_from_store(store.path, "c")["vae"]["w"], shared)
    assert third.components["vae"].tensors["w"].sha256 == first.components["model"].tensors["x"].sha256


def test_a_lost_pack_is_written_again(tmp_path: Path) -> None:
    """The source is unchanged, but what was stored of it is gone: storing it once more heals the store."""
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.randn(5, 7), "b": torch.randn(7)}, source / "model.safetensors")
    (source / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    store = WeightStore(tmp_path / "store")
    first = externalize(store, "m", source)
    for pack in store.packs.iterdir():
        pack.unlink()
    again = externalize(store, "m", source)
    assert {ref.sha256 for ref in again.components["model"].tensors.values()} == {
        ref.sha256 for ref in first.components["model"].tensors.values()
    }
    for name, tensor in load_file(source / "model.safetensors").items():
        assert torch.equal(load_from_store(store.path, "m")["model"][name], tensor)


@pytest.mark.parametrize("lost", ["manifest", "skeleton"])
def test_what_is_damaged_of_a_model_is_written_again(store: WeightStore, write_model, lost: str) -> None:
    source = write_model("m", {"w": torch.rand(10)})
    first = externalize(store, "m", source)
    if lost == "manifest":
        (store.models / "m" / "manifest.json").write_text("{")
    else:
        shutil.rmtree(store.skeleton(first))
    assert externalize(store, "m", source) == first
    assert store.manifest("m") == first
    assert (store.skeleton(first) / "config.json").is_file()
    assert [pack.name for pack in store.packs.iterdir()] == ["m_weight_combined"]


@pytest.mark.drawn(5)
@pytest.mark.parametrize("layout", ["combined", "separate"])
@pytest.mark.parametrize("first", ["combined", "separate"])
@pytest.mark.parametrize("damage", ["shared", "neighbour", "cut", "hole", "gone"])
def test_a_new_model_shares_no_damage(
    store: WeightStore, write_model, layout: Layout, first: Layout, damage: str
) -> None:
    """Also where the damage is in what only the other model wants: a reader takes extents whole."""
    tensors = {"a": torch.rand(500), "b": torch.rand(500), "c": torch.rand(500)}
    old = externalize(store, "old", write_model("old", tensors), layout=first)
    extent = old.extents[old.components["model"].tensors["b"].extent]
    pack = store.packs / extent.pack
    match damage:
        case "shared":
            flip_bit(store, old, "model", "b")
        case "neighbour":
            flip_bit(store, old, "model", "c")
        case "cut":
            os.truncate(pack, pack.stat().st_size - 1)
        case "hole":
            pack.write_bytes(bytes(pack.stat().st_size))
        case "gone":
            pack.unlink()
    wanted = {name: tensors[name] for name in "ab"} | {"own": torch.rand(3)}
    externalize(store, "new", write_model("new", wanted), layout=layout)
    assert verify(store, "new", deep=True).damages == ()
    assert same(load_from_store(store.path, "new")["model"], wanted)
    num_packs = len(list(store.packs.iterdir()))
    again = externalize(store, "next", write_model("next", wanted), layout=layout)
    assert verify(store, "next", deep=True).damages == ()
    assert (again.extents, len(list(store.packs.iterdir()))) == (store.manifest("new").extents, num_packs)


def test_what_is_shared_is_read_once_and_without_the_lock(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", 2000)
    tensors = {f"t{i}": torch.rand(400) for i in range(9)}
    externalize(store, "old", write_model("old", tensors))
    read: list[str] = []

    def watch(packs: Path, extent: ExtentRef) -> object:
        with (store.path / ".lock").open("r+") as lock:
            # A shared lock: the extents are read by several threads, and two of these must not meet.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        read.append(extent.id)
        return read_extent(packs, extent)

    monkeypatch.setattr("weights.storage.packs.read_extent", watch)
    wanted = {name: tensors[name] for name in ("t1", "t2", "t5")}
    new = externalize(store, "new", write_model("new", wanted | {"own": torch.rand(400)}))
    assert len(read) == 3
    assert set(read) == {new.components["model"].tensors[name].extent for name in wanted}


def test_what_another_writer_damages_meanwhile_is_found(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that appears between the reading and the lock is read under it."""
    tensors = {"a": torch.rand(500)}
    choose = SharedExtents.choose
    calls = 0

    def choose_later(self: SharedExtents, known: StoreMeta) -> set[str]:
        nonlocal calls
        calls += 1
        damaged = choose(self, known)
        if calls == 1:
            with monkeypatch.context() as patch:
                patch.setattr(SharedExtents, "choose", choose)
                flip_bit(store, externalize(store, "fast", write_model("fast", tensors)), "model", "a")
        return damaged

    monkeypatch.setattr(SharedExtents, "choose", choose_later)
    externalize(store, "slow", write_model("slow", tensors))
    assert calls == 2
    assert verify(store, "slow", deep=True).damages == ()
    assert len(verify(store, "fast").damages) == 1


@pytest.mark.parametrize("layout", ["combined", "separate"])
def test_a_tiny_equal_tensor_ties_no_model_to_a_large_extent(
    store: WeightStore, write_pipeline, write_model, layout: Layout
) -> None:
    norm, large = torch.ones(64), torch.rand(100_000)
    large_one = externalize(store, "large", write_model("large", {"norm": norm, "w": large}), layout=layout)
    tiny = {"norm": norm, "v": torch.rand(100)}
    leased = [externalize(store, "tiny", write_model("tiny", tiny), layout=layout)]
    leased.append(externalize(store, "twin", write_model("twin", tiny), layout=layout))
    for manifest in leased:
        assert sum(extent.nbytes for extent in manifest.extents.values()) < 1024
        assert same(load_from_store(store.path, manifest.model)["model"], tiny)
    assert leased[0].extents == leased[1].extents
    # Within a model as well: each component is leased by itself.
    parts = {"a": {"w": torch.rand(100_000), "norm": torch.zeros(9)}, "b": {"norm": torch.zeros(9), "x": torch.rand(9)}}
    pipeline = externalize(store, "p", write_pipeline("p", parts), layout=layout)
    assert sum(extent.nbytes for extent in pipeline.extents_of(["b"])) < 1024
    # And who wants most of the large one shares it, norm and all, though there is a small copy.
    tuned = externalize(store, "tuned", write_model("tuned", {"norm": norm, "w": large, "v": torch.rand(3)}))
    assert large_one.extents.keys() <= tuned.extents.keys()
    assert len(tuned.extents) == len(large_one.extents) + 1


def test_what_is_written_again_for_the_rule_is_less_than_a_hundredth_of_the_store(
    tmp_path: Path, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family of fine-tunes, and strangers that have nothing in common with it but zeros and ones."""
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", 200_000)

    def tensors(base: dict[str, torch.Tensor], kept: str) -> dict[str, torch.Tensor]:
        return {name: tensor if kept in name else torch.rand_like(tensor) for name, tensor in base.items()}

    base = {
        f"{block}.{name}": torch.rand(5000) for block in range(12) for name in ("attn.q", "attn.k", "ff.up", "ff.o")
    }
    small = {f"{block}.norm": torch.ones(64) for block in range(12)}
    small |= {f"{block}.bias": torch.zeros(64) for block in range(12)}
    family = {"base": base, "attn": tensors(base, "ff"), "ff": tensors(base, "attn"), "none": tensors(base, "nowhere")}
    stored_bytes = []
    for part in (0.0, 0.25):
        monkeypatch.setattr("weights.storage.packs.MIN_WANTED_PART", part)
        store = WeightStore(tmp_path / f"store-{part}")
        for name, own in family.items():
            externalize(store, name, write_model(name, own | small))
        assert verify(store, deep=True).damages == ()
        stored_bytes.append(sum(pack.stat().st_size for pack in store.packs.iterdir()))
    assert stored_bytes[0] <= stored_bytes[1] < 1.01 * stored_bytes[0]
