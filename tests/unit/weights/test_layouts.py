"""Every layout to every other, and back to stock folders that stock libraries open."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from unit.weights.comparing import files

from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.operations.layouts import convert, write_inline
from weights.operations.maintenance import gc, remove_model
from weights.operations.repair import verify
from weights.records.errors import ExtentCorrupt, ModelNotStored, StoreError
from weights.records.manifest import Layout
from weights.storage.store import WeightStore

DEMO_MODELS = Path(__file__).parents[3] / "infra" / "demo" / "models"
LAYOUTS: tuple[Layout, ...] = ("combined", "separate", "inline")


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("digits-flux", "combined"),
        ("digits-sdxl", "inline"),
        ("bold", "separate"),
        ("adder", "separate"),
        ("texts-bert", "combined"),
        ("texts-head", "inline"),
    ],
)
def test_demo_models_come_back_byte_for_byte(store: WeightStore, tmp_path: Path, name: str, start: Layout) -> None:
    """The files, not just their tensors: the writer is as the stock one."""
    externalize(store, name, DEMO_MODELS / name, layout=start)
    others = [layout for layout in LAYOUTS if layout != start]
    for layout in (*others, start):
        assert convert(store, name, layout).layout == layout
        gc(store)
        assert verify(store, deep=True).damages == ()
        told: list[tuple[int, int]] = []
        write_inline(store, name, tmp_path / layout, lambda *far, told=told: told.append(far))
        assert told[-1] == (store.manifest(name).nbytes,) * 2  # each tensor is read once
        assert files(tmp_path / layout) == files(DEMO_MODELS / name)


def test_stock_libraries_open_what_is_written_back(store: WeightStore, tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline
    from transformers import AutoModelForCausalLM

    for name, layout in (("digits-flux", "separate"), ("adder", "combined")):
        externalize(store, name, DEMO_MODELS / name, layout=layout)
        write_inline(store, name, tmp_path / name)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "digits-flux", local_files_only=True)
    stored = load_from_store(store.path, "digits-flux")
    for part, tensors in stored.items():
        state = getattr(pipeline, part).state_dict()
        for name, tensor in tensors.items():
            torch.testing.assert_close(state[name], tensor.to(state[name].dtype), rtol=0, atol=0)
    llm = AutoModelForCausalLM.from_pretrained(tmp_path / "adder", local_files_only=True)
    state = llm.state_dict()
    for name, tensor in load_from_store(store.path, "adder")["model"].items():
        torch.testing.assert_close(state[name], tensor.to(state[name].dtype), rtol=0, atol=0)


def test_a_conversion_moves_what_is_the_models_own(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", 8000)
    shared, own = torch.rand(1000), torch.rand(2000)
    externalize(store, "a", write_model("a", {"shared": shared, "own": own}))
    externalize(store, "b", write_model("b", {"shared": shared}))
    before = store.manifest("b")
    told: list[tuple[int, int]] = []
    done = convert(store, "a", "separate", progress=lambda *far: told.append(far))
    assert sorted(told) == told
    assert (len(told), told[-1]) == (2, (12_000, 12_000))  # bytes
    refs = done.components["model"].tensors
    assert refs["shared"].extent == before.components["model"].tensors["shared"].extent
    assert (store.packs / f"weight_{refs['own'].sha256}").stat().st_size == own.nbytes
    assert store.manifest("b") == before
    gc(store)
    assert_same(load_from_store(store.path, "a")["model"], {"shared": shared, "own": own})
    assert_same(load_from_store(store.path, "b")["model"], {"shared": shared})
    assert {pack.name for pack in store.packs.iterdir()} == {"a_weight_combined", f"weight_{refs['own'].sha256}"}


def test_an_extent_that_another_model_uses_stays_whole(store: WeightStore, write_model) -> None:
    """Its bytes cannot go; a copy of those that only one of them names would take more."""
    shared = torch.rand(1000)
    first = externalize(store, "a", write_model("a", {"shared": shared, "own": torch.rand(2000)}))
    externalize(store, "b", write_model("b", {"shared": shared}))
    converted = convert(store, "a", "separate")
    assert (converted.layout, converted.extents) == ("separate", first.extents)
    remove_model(store, "b")
    gc(store)
    assert convert(store, "a", "combined").extents == first.extents
    assert all(extent.pack.startswith("weight_") for extent in convert(store, "a", "separate").extents.values())
    gc(store)
    assert verify(store, deep=True).damages == ()


def test_a_converted_model_is_the_same_module(store: WeightStore, write_model) -> None:
    first = externalize(store, "m", write_model("m", {"w": torch.rand(9), "v": torch.rand(3)}))
    for layout in ("inline", "separate"):
        converted = convert(store, "m", layout)
        assert converted.components["model"].module_key == first.components["model"].module_key
        assert converted.fingerprint == first.fingerprint
    assert converted == store.manifest("m")
    assert convert(store, "m", "separate") == converted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_written_again(store: WeightStore, tmp_path: Path, layout: Layout) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shards = {
        "model-00001-of-00002.safetensors": {"a": torch.rand(10), "b": torch.rand(3)},
        "model-00002-of-00002.safetensors": {"c": torch.rand(7, 2)},
    }
    for file, tensors in shards.items():
        save_file(tensors, source / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 1, "more": "kept"}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    externalize(store, "m", source, layout=layout)
    write_inline(store, "m", tmp_path / "out")
    for file in shards:
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes()
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert written == {"metadata": {"total_size": 27 * 4, "more": "kept"}, "weight_map": weight_map}
    externalize(store, "half", source, layout=layout, dtype="float16")
    write_inline(store, "half", tmp_path / "half")
    assert json.loads((tmp_path / "half" / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == 54
    assert_same(
        load_file(tmp_path / "half" / "model-00002-of-00002.safetensors"), {"c": shards[[*shards][1]]["c"].half()}
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gguf_file_comes_back(store: WeightStore, tmp_path: Path, layout: Layout) -> None:
    import gguf

    source = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_tensor("w", seeded_rng().random((4, 64), np.float32))
    blocks = gguf.quants.quantize(seeded_rng().random((6, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("odd", seeded_rng().random((3,), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    externalize(store, "g", source, layout=layout)
    for other in (*LAYOUTS, layout):
        convert(store, "g", other)
        gc(store)
        assert verify(store, deep=True).damages == ()
    write_inline(store, "g", tmp_path / "out")
    assert files(tmp_path / "out") == {"model.gguf": source.read_bytes()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kuiper_file_comes_back(store: WeightStore, tmp_path: Path, layout: Layout) -> None:
    dim, hidden, vocab, length = 8, 16, 10, 4
    floats = 2 * vocab * dim + 3 * dim + 4 * dim * dim + 3 * dim * hidden + 2 * length * (dim // 2 // 2)
    source = tmp_path / "model.bin"
    header = struct.pack("<7i", dim, hidden, 1, 2, 2, -vocab, length)
    source.write_bytes(header + seeded_rng().random(floats, np.float32).tobytes())
    externalize(store, "k", source, layout=layout)
    for other in (*LAYOUTS, layout):
        convert(store, "k", other)
        gc(store)
        assert verify(store, deep=True).damages == ()
    write_inline(store, "k", tmp_path / "out")
    assert files(tmp_path / "out") == {"model.bin": source.read_bytes()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pickle_comes_back_as_safetensors(store: WeightStore, tmp_path: Path, layout: Layout) -> None:
    tensors = {"w": torch.rand(5, 3), "i": torch.arange(4)}
    torch.save(tensors, tmp_path / "weights.pt")
    manifest = externalize(store, "p", tmp_path / "weights.pt", layout=layout, allow_torch=True)
    part = manifest.components["model"]
    assert (part.format, part.files) == ("torch", ("weights.pt",))  # what it was, wherever its tensors are
    write_inline(store, "p", tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "weights.safetensors"), tensors)
    with safe_open(tmp_path / "out" / "weights.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["weights.safetensors"]


@pytest.mark.parametrize("what", ["file", "link", "full"])
def test_nothing_is_overwritten(store: WeightStore, write_model, tmp_path: Path, what: str) -> None:
    externalize(store, "m", write_model("m", {"w": torch.rand(3)}))
    target = tmp_path / "target"
    if what == "full":
        target.mkdir()
        (target / "kept").touch()
    elif what == "file":
        target.touch()
    else:
        target.symlink_to(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match=r"target: exists and is not an empty folder"):
        write_inline(store, "m", target)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_target_is_filled(store: WeightStore, write_model, tmp_path: Path) -> None:
    source = write_model("m", {"w": torch.rand(3)})
    externalize(store, "m", source)
    (tmp_path / "target").mkdir()
    write_inline(store, "m", tmp_path / "target")
    assert files(tmp_path / "target") == files(source)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_is_named_and_not_passed_on(store: WeightStore, write_model, tmp_path: Path, layout: Layout) -> None:
    manifest = externalize(store, "m", write_model("m", {"a": torch.rand(30), "b": torch.rand(30)}), layout=layout)
    ref = manifest.components["model"].tensors["b"]
    extent = manifest.extents[ref.extent]
    pack = store.packs / extent.pack
    data = bytearray(pack.read_bytes())
    data[extent.offset + ref.offset] ^= 4
    pack.write_bytes(data)
    before = sorted(store.path.rglob("*"))
    other: Layout = "separate" if layout != "separate" else "combined"
    for attempt in (lambda: write_inline(store, "m", tmp_path / "out"), lambda: convert(store, "m", other)):
        with pytest.raises(ExtentCorrupt, match=rf"{pack.name}.*tensor model\.b"):
            attempt()
    assert sorted(store.path.rglob("*")) == before
    assert store.manifest("m") == manifest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sources", "store"]


def test_what_is_not_there_is_said(store: WeightStore, write_model, tmp_path: Path) -> None:
    manifest = externalize(store, "m", write_model("m", {"w": torch.rand(3)}))
    with pytest.raises(ModelNotStored, match="stored: m"):
        convert(store, "x", "inline")
    with pytest.raises(ModelNotStored, match="stored: m"):
        write_inline(store, "x", tmp_path / "out")
    (store.skeleton(manifest) / "config.json").unlink()
    store.skeleton(manifest).rmdir()
    with pytest.raises(StoreError, match="has lost its configs"):
        write_inline(store, "m", tmp_path / "out")
    with pytest.raises(StoreError, match="has lost its configs"):
        convert(store, "m", "inline")


def test_a_model_that_is_published_anew_meanwhile_is_not_converted(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    externalize(store, "m", write_model("m", {"w": torch.rand(3)}))
    published = []
    staged = WeightStore.staged

    def publish_first(self: WeightStore, kind: str, folder: Path | None = None):
        if not published:
            published.append(None)
            published[0] = externalize(store, "m", write_model("m", {"w": torch.rand(4)}))
        return staged(self, kind, folder)

    monkeypatch.setattr(WeightStore, "staged", publish_first)
    with pytest.raises(StoreError, match="published anew meanwhile"):
        convert(store, "m", "separate")
    assert store.manifest("m") == published[0]
