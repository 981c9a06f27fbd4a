"""Layouts: combined, separate and inline packs, their alignment and their limits."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from unit.weights.comparing import files, random_tensors, raw, refs, same

from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.operations.repair import verify
from weights.reading.extents import read_extent
from weights.records.dtypes import ITEM_BYTES
from weights.records.manifest import EXTENT_ALIGNMENT, TENSOR_ALIGNMENT, Layout
from weights.storage.pack_folder import PackFolder
from weights.storage.store import WeightStore

LAYOUTS: tuple[Layout, ...] = ("combined", "separate", "inline")


def test_layout_is_aligned_and_packed_once(store: WeightStore, write_pipeline) -> None:
    source = write_pipeline("p", {"vae": random_tensors(), "unet": {"w": torch.rand(1000)}})
    manifest = externalize(store, "p", source)
    refs = [ref for part in manifest.components.values() for ref in part.tensors.values()]
    assert all(ref.offset % TENSOR_ALIGNMENT == 0 for ref in refs)
    assert all(extent.offset % EXTENT_ALIGNMENT == 0 for extent in manifest.extents.values())
    assert all(ref.offset + ref.nbytes <= manifest.extents[ref.extent].nbytes for ref in refs)
    one = manifest.extents_of(["vae"]), manifest.extents_of(["unet"])
    assert not set(one[0]) & set(one[1])
    assert [file.name for file in store.packs.iterdir()] == ["p_weight_combined"]


@pytest.mark.parametrize("limit", [8192, 5000, 1024])
def test_extents_stay_under_the_limit(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", limit)
    sizes = [100, 7900, 1, 513, 4000, 511, 512, 20_000, 1, 3000]
    source = write_model("m", {f"t{i:02}": torch.randint(0, 255, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)})
    manifest = externalize(store, "m", source)
    assert len(manifest.extents) > 3
    for extent in manifest.extents.values():
        inside = [ref for ref in manifest.components["model"].tensors.values() if ref.extent == extent.id]
        assert extent.nbytes <= limit or len(inside) == 1
    assert same(load_from_store(store.path, "m")["model"], load_file(source / "model.safetensors"))


def test_separate_has_a_file_per_tensor_and_takes_what_a_dead_writer_left(store: WeightStore, write_model) -> None:
    tensors = {f"t{i}": torch.rand(50 + i) for i in range(20)}
    names = {f"weight_{hashlib.sha256(raw(tensor)).hexdigest()}": raw(tensor) for tensor in tensors.values()}
    whole, damaged, *_ = names
    store.packs.mkdir(parents=True)
    (store.packs / whole).write_bytes(names[whole])
    (store.packs / damaged).write_bytes(bytes(len(names[damaged])))
    inode = (store.packs / whole).stat().st_ino
    manifest = externalize(store, "m", write_model("m", tensors | {"tied": tensors["t0"].clone()}), layout="separate")
    assert files(store.packs) == dict(sorted(names.items()))
    assert (store.packs / whole).stat().st_ino == inode
    assert all((ref.offset, manifest.extents[ref.extent].offset) == (0, 0) for ref in refs(manifest))
    before = files(store.packs)
    externalize(store, "n", write_model("n", tensors), layout="separate")
    assert files(store.packs) == before


def test_inline_keeps_the_files(store: WeightStore, write_pipeline) -> None:
    kept = {name: tensor for name, tensor in random_tensors().items() if not name.startswith(("F8_", "F64"))}
    source = write_pipeline("p", {"vae": kept, "unet": {"w": torch.rand(1000)}})
    manifest = externalize(store, "p", source, layout="inline")
    copies = {f"p_inline/{name}": data for name, data in files(source).items() if name.endswith(".safetensors")}
    assert files(store.packs) == copies
    assert not (store.path / "meta.json").exists()
    for part in ("vae", "unet"):
        expected = load_file(source / part / "diffusion_pytorch_model.safetensors")
        assert same(load_from_store(store.path, "p")[part], expected)
    again = externalize(store, "q", source, layout="inline")
    assert again.extents.keys() == manifest.extents.keys()
    assert (store.packs / "q_inline").is_dir()


@pytest.mark.drawn
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_extent_ids_are_equal_bytes(store: WeightStore, write_model, layout: Layout) -> None:
    """Nodes share extents by id: padding must not hide behind equal tensors."""
    tensors = {"a": torch.rand(3), "b": torch.rand(128), "c": torch.rand(128), "d": torch.rand(5)}
    ids: dict[str, bytes] = {}
    for number, chosen in enumerate(["abcd", "bc", "b", "a", "ab", "bca"]):
        for kind in LAYOUTS:
            store = WeightStore(store.path.parent / f"{number}-{kind}")
            source = write_model(f"m{number}", {name: tensors[name] for name in chosen})
            for extent in externalize(store, "m", source, layout=kind).extents.values():
                data = read_extent(store.packs, extent).tobytes()
                assert ids.setdefault(extent.id, data) == data
    assert len(set(ids.values())) == len(ids)


def test_a_cast_inline_is_stock_safetensors(store: WeightStore, write_model) -> None:
    tensors = {"w": torch.randn(30, 7), "i": torch.arange(5)}
    externalize(store, "m", write_model("m", tensors), layout="inline", dtype="bfloat16")
    expected = {"w": tensors["w"].bfloat16(), "i": tensors["i"]}
    assert same(load_file(store.packs / "m_inline" / "model.safetensors"), expected)
    assert same(load_from_store(store.path, "m")["model"], expected)


@pytest.mark.parametrize("limit", [4000, 100])
def test_inline_extents_stay_under_the_limit_and_aligned(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", limit)
    source = write_model("m", random_tensors())
    manifest = externalize(store, "m", source, layout="inline")
    for extent in manifest.extents.values():
        inside = [ref for ref in refs(manifest) if ref.extent == extent.id]
        assert extent.nbytes <= limit or len([ref for ref in inside if ref.nbytes]) == 1
        assert all(ref.offset % ITEM_BYTES[ref.dtype] == 0 for ref in inside)
    assert same(load_from_store(store.path, "m")["model"], load_file(source / "model.safetensors"))


def test_packs_are_staged_in_the_weight_dir(store: WeightStore, write_model, tmp_path: Path) -> None:
    folder = tmp_path / "fast-disk"
    seen = []

    def watch(self: PackFolder, staged: dict[str, Path]) -> None:
        seen.extend(staged.values())
        add_packs(self, staged)

    add_packs = PackFolder.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackFolder, "add", watch)
        for number, layout in enumerate(LAYOUTS):
            externalize(store, f"m{number}", write_model("m", {"w": torch.rand(9)}), layout=layout, weight_dir=folder)
    assert len(seen) == 3
    assert all(path.is_relative_to(folder) for path in seen)
    assert list(folder.iterdir()) == []
    assert verify(store, deep=True).damages == ()
