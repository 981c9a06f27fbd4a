"""Checkpoint -> store -> tensors: the bytes that went in come out, each kept once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weights.errors import FormatError
from weights.externalize import EXTENT_ALIGNMENT, TENSOR_ALIGNMENT, externalize
from weights.formats.checkpoint import LORA_FILE
from weights.loader import TORCH_DTYPES, load_from_store
from weights.reading.extents import read_extent
from weights.store import WeightStore

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    def value(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
        return tensor.dtype, tensor.shape, raw(tensor)

    return {name: value(tensor) for name, tensor in ours.items()} == {
        name: value(tensor) for name, tensor in theirs.items()
    }


def random_tensors() -> dict[str, torch.Tensor]:
    """Every dtype, odd sizes, a scalar, an empty one, and the same bytes twice."""
    tensors = {}
    for number, (name, dtype) in enumerate(TORCH_DTYPES.items()):
        data = torch.randint(
            0, 2 if dtype is torch.bool else 256, (number * 37 + 1, 3, dtype.itemsize), dtype=torch.uint8
        )
        tensors[name] = data.view(dtype).squeeze(-1)
    equal = {"first": torch.arange(5.0), "second": torch.arange(5.0)}
    return tensors | equal | {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_round_trip_is_byte_equal(store: WeightStore, write_model) -> None:
    source = write_model("m", random_tensors())
    manifest = externalize(store, "m", source)
    assert same(load_from_store(store.path, "m")["model"], load_file(source / "model.safetensors"))
    assert store.manifest("m") == manifest
    assert (manifest.kind, manifest.class_name, manifest.source) == ("llm", "TinyForCausalLM", str(source))


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
    monkeypatch.setattr("weights.externalize.MAX_EXTENT_BYTES", limit)
    sizes = [100, 7900, 1, 513, 4000, 511, 512, 20_000, 1, 3000]
    source = write_model("m", {f"t{i:02}": torch.randint(0, 255, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)})
    manifest = externalize(store, "m", source)
    assert len(manifest.extents) > 3
    for extent in manifest.extents.values():
        inside = [ref for ref in manifest.components["model"].tensors.values() if ref.extent == extent.id]
        assert extent.nbytes <= limit or len(inside) == 1
    assert same(load_from_store(store.path, "m")["model"], load_file(source / "model.safetensors"))


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


def test_a_shared_component_is_the_same_module(store: WeightStore, write_pipeline) -> None:
    vae = random_tensors()
    keys = []
    for name in ("a", "b"):
        source = write_pipeline(name, {"vae": vae, "unet": {"w": torch.rand(4)}})
        keys.append(externalize(store, name, source).components)
    assert keys[0]["vae"].module_key == keys[1]["vae"].module_key
    assert keys[0]["unet"].module_key != keys[1]["unet"].module_key


@pytest.mark.parametrize("wanted", NAMES)
def test_casting_rounds_as_torch_does(store: WeightStore, write_model, wanted: str) -> None:
    special = torch.tensor(
        [0.0, -0.0, 1e-45, 6e-8, 1e-40, 65504, 65519, 65520, 1e30, 3.4e38, float("inf"), float("nan")]
    )
    ties = 1 + torch.arange(64) * 2.0**-9
    values = torch.cat([special, -special, ties, torch.randn(1000), torch.randn(1000) * 1e-6]).double()
    tensors = {str(dtype): values.to(dtype) for dtype in FLOATS}
    others = {"int": torch.arange(4), "fp8": torch.randn(8).to(torch.float8_e4m3fn), "empty": torch.zeros(0)}
    source = write_model("m", tensors | others)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        externalize(store, "m", source, dtype=wanted)
    loaded = load_from_store(store.path, "m")["model"]
    for name, tensor in tensors.items():
        assert loaded[name].dtype == NAMES[wanted]
        torch.testing.assert_close(loaded[name], tensor.to(NAMES[wanted]), rtol=0, atol=0, equal_nan=True)
    assert (loaded["int"].dtype, loaded["fp8"].dtype) == (torch.int64, torch.float8_e4m3fn)
    assert loaded["empty"].dtype == NAMES[wanted]


def test_an_unchanged_source_is_not_read_again(store: WeightStore, write_model) -> None:
    source = write_model("m", {"w": torch.rand(10)})
    first = externalize(store, "m", source)
    before = files(store.path)
    assert externalize(store, "m", source) == first
    assert files(store.path) == before


def test_a_changed_source_is_a_new_version_and_the_old_pack_stays(store: WeightStore, write_model) -> None:
    source = write_model("m", {"w": torch.rand(10), "kept": torch.arange(100)})
    old = externalize(store, "m", source)
    old_file = (store.packs / "m_weight_combined").read_bytes()
    write_model("m", {"w": torch.rand(11), "kept": torch.arange(100)})
    new = externalize(store, "m", source)
    assert new.fingerprint != old.fingerprint
    assert (store.packs / "m_weight_combined").read_bytes() == old_file
    assert store.skeleton(old).is_dir()
    assert store.skeleton(new).is_dir()
    assert same(load_from_store(store.path, "m")["model"], load_file(source / "model.safetensors"))
    assert new.components["model"].tensors["kept"] == old.components["model"].tensors["kept"]


def test_other_settings_are_another_version(store: WeightStore, write_pipeline) -> None:
    source = write_pipeline("p", {"vae": {"w": torch.rand(4)}, "unet": {"w": torch.rand(4)}})
    assert set(externalize(store, "p", source).components) == {"vae", "unet"}
    part = externalize(store, "p", source, component="vae", dtype="float16")
    assert (part.kind, set(part.components)) == ("embedding", {"vae"})
    assert part.components["vae"].tensors["w"].dtype == "F16"


def test_the_skeleton_is_everything_but_the_weights(store: WeightStore, write_pipeline) -> None:
    source = write_pipeline("p", {"vae": {"w": torch.rand(4)}})
    manifest = externalize(store, "p", source)
    expected = {name: data for name, data in files(source).items() if not name.endswith(".safetensors")}
    assert files(store.skeleton(manifest)) == expected


@pytest.mark.parametrize("name", ["m", "new"])
def test_a_failure_leaves_the_store_as_it_was(store: WeightStore, write_pipeline, write_model, name: str) -> None:
    externalize(store, "m", write_model("good", {"w": torch.rand(4)}))
    before = files(store.path)
    source = write_pipeline("bad", {"vae": {"w": torch.rand(4)}, "unet": {"w": torch.rand(4)}})
    file = source / "unet" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FormatError, match=str(file)):
        externalize(store, name, source)
    with pytest.raises(FormatError, match="no such folder"):
        externalize(store, name, source / "gone")
    assert files(store.path) == before


def test_a_failure_while_writing_leaves_the_store_as_it_was(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    externalize(store, "m", write_model("good", {"w": torch.rand(4)}))
    before = files(store.path)

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weights.externalize._copy_skeleton", disk_full)
    with pytest.raises(OSError, match="No space"):
        externalize(store, "n", write_model("other", {"w": torch.rand(400)}))
    assert files(store.path) == before


def test_models_of_empty_tensors(store: WeightStore, write_model) -> None:
    for name, tensors in {
        "a": {"e": torch.zeros(0, 3)},
        "b": {"e": torch.zeros(2, 0, dtype=torch.int8)},
        "c": {},
    }.items():
        source = write_model(name, tensors)
        externalize(store, name, source)
        assert same(load_from_store(store.path, name)["model"], load_file(source / "model.safetensors"))


def test_an_adapter_keeps_its_metadata(store: WeightStore, tmp_path: Path) -> None:
    source = tmp_path / "lora"
    source.mkdir()
    save_file({"unet.q.lora_A.weight": torch.rand(2, 3)}, source / LORA_FILE, metadata={"rank": "2"})
    manifest = externalize(store, "bold", source)
    assert (manifest.kind, manifest.components["lora"].metadata) == ("adapter", {"rank": "2"})


WRITER = """
import sys
from pathlib import Path
from weights.externalize import externalize
from weights.store import WeightStore
for source in sys.argv[2:]:
    externalize(WeightStore(Path(sys.argv[1])), Path(source).name, Path(source))
"""


def test_several_processes_write_into_one_store(store: WeightStore, write_model) -> None:
    shared = {f"s{i}": torch.rand(2000) for i in range(4)}
    sources = [write_model(f"m{i}", shared | {"own": torch.rand(50 + i)}) for i in range(4)]
    orders = [sources, sources[::-1], sources[2:] + sources[:2]]
    command = [sys.executable, "-c", WRITER, str(store.path)]
    environment = os.environ | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen(command + [str(source) for source in order], env=environment) for order in orders]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    meta = store.read_meta()
    for extent in meta.extents.values():
        read_extent(store.packs, extent)
    for source in sources:
        assert same(load_from_store(store.path, source.name)["model"], load_file(source / "model.safetensors"))
        assert json.loads((store.skeleton(store.manifest(source.name)) / "config.json").read_text())
    # Stored once each, so the packs hold one copy of what is shared and one of each `own`, plus padding.
    assert len(meta.tensors) == 8
    assert sum(pack.stat().st_size for pack in store.packs.iterdir()) < 2 * 4 * shared["s0"].nbytes
    assert not list(store.path.glob(".staged*"))


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
