"""Attaching: tensors are views of the extents' bytes."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng

from weights.loading.loader import LoadedFiles, load_model, windows
from weights.loading.provider import LocalExtents
from weights.loading.views import attach
from weights.operations.externalize import externalize
from weights.platform.torch_dtypes import TORCH_DTYPES
from weights.records.errors import WeightsError
from weights.records.manifest import Component, ExtentRef, Manifest, TensorRef
from weights.storage.store import WeightStore


class CountedExtents(LocalExtents):
    """Remembers what was fetched."""

    def __init__(self, packs: Path) -> None:
        super().__init__(packs)
        self.fetched: list[str] = []

    def fetch(self, extents):
        self.fetched += [extent.id for extent in extents]
        return super().fetch(extents)


class GivenExtents:
    """Extents that are in shared memory already."""

    def __init__(self, buffers) -> None:
        self._buffers = buffers

    def fetch(self, extents):
        return {extent.id: self._buffers[extent.id] for extent in extents}


# Of a pipeline, whose engines compute with no others: these become wide or single when it comes in.
KEPT = {name: dtype for name, dtype in TORCH_DTYPES.items() if name not in ("F8_E4M3", "F8_E5M2", "F64")}


@pytest.fixture
def stored(tmp_path: Path, write_pipeline) -> tuple[Manifest, CountedExtents]:
    tensors = {name: torch.ones(3, 5).to(dtype) for name, dtype in KEPT.items()}
    extra = {"scalar": torch.tensor(2.5, dtype=torch.bfloat16), "empty": torch.zeros(0, 7)}
    source = write_pipeline("p", {"vae": tensors | extra, "unet": {"w": torch.rand(2000)}})
    store = WeightStore(tmp_path / "store")
    return externalize(store, "p", source), CountedExtents(store.packs)


def test_attaching_copies_nothing(stored) -> None:
    manifest, provider = stored
    vae = manifest.components["vae"]
    buffers = provider.fetch(manifest.extents_of(["vae"]))
    for name, tensor in attach(vae, buffers).items():
        ref = vae.tensors[name]
        assert tensor.nbytes == ref.nbytes
        if tensor.nbytes:
            assert tensor.data_ptr() == buffers[ref.extent].ctypes.data + ref.offset


def test_every_dtype_has_its_values(stored) -> None:
    manifest, provider = stored
    loaded = load_model(manifest, provider)["vae"]
    for name, dtype in KEPT.items():
        assert (loaded[name].dtype, loaded[name].shape) == (dtype, (3, 5))
        assert torch.equal(loaded[name].to(torch.float64), torch.ones(3, 5, dtype=torch.float64))
    assert (loaded["scalar"].shape, loaded["scalar"].item()) == ((), 2.5)
    assert loaded["empty"].shape == (0, 7)


def test_a_model_of_no_pipeline_keeps_every_dtype(tmp_path: Path, write_model) -> None:
    tensors = {name: torch.ones(3, 5).to(dtype) for name, dtype in TORCH_DTYPES.items()}
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "m", write_model("m", tensors))
    loaded = load_model(manifest, CountedExtents(store.packs))["model"]
    assert {name: tensor.dtype for name, tensor in loaded.items()} == TORCH_DTYPES
    assert all(torch.equal(tensor.double(), torch.ones(3, 5).double()) for tensor in loaded.values())


def test_only_what_is_asked_for_is_fetched(stored) -> None:
    manifest, provider = stored
    assert set(load_model(manifest, provider, ["unet"])) == {"unet"}
    assert provider.fetched == [ref.id for ref in manifest.extents_of(["unet"])]
    assert set(load_model(manifest, provider)) == {"vae", "unet"}


def test_a_tensor_outlives_its_buffer(stored) -> None:
    manifest, provider = stored
    tensor = load_model(manifest, provider, ["vae"])["vae"]["F32"]
    assert tensor.sum() == 15


def test_no_warning_leaks_from_any_thread(stored) -> None:
    manifest, provider = stored
    buffers = provider.fetch(manifest.extents_of(["vae"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=attach, args=(manifest.components["vae"], buffers)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        warnings.warn("still heard", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["still heard"]


def test_extents_are_listed_once_and_in_a_stable_order(stored) -> None:
    manifest, _ = stored
    listed = manifest.extents_of(["unet", "vae"])
    assert listed == manifest.extents_of(["vae", "unet"])
    assert len(listed) == len(set(listed)) == len(manifest.extents)
    assert isinstance(listed[0], ExtentRef)
    assert manifest.nbytes == sum(part.nbytes for part in manifest.components.values())


def test_a_read_only_array_stays_read_only(stored) -> None:
    manifest, provider = stored
    buffers = provider.fetch(manifest.extents_of(["vae"]))
    attach(manifest.components["vae"], buffers)
    assert not any(np.asarray(array).flags.writeable for array in buffers.values())


def test_unknown_components_and_devices_are_refused(stored) -> None:
    manifest, provider = stored
    with pytest.raises(WeightsError, match=r"p has no component 'decoder' \(known: vae, unet\)"):
        load_model(manifest, provider, ["decoder"])
    for device in ("tpu:0", "meta", "cpu:private", "", "cuda:", "cuda:x", "sim:-1", "simulated"):
        with pytest.raises(
            WeightsError, match=rf"device '{device}' \(known: cpu, cpu-private, cuda, cuda:<n>, sim, sim:<n>\)"
        ):
            load_model(manifest, provider, device=device)
    with pytest.raises(WeightsError, match=rf"device 'cuda:99': {torch.cuda.device_count()} CUDA devices here"):
        load_model(manifest, provider, device="cuda:99")
    assert provider.fetched == []


def test_private_tensors_may_be_written(stored) -> None:
    manifest, provider = stored
    buffers = provider.fetch(manifest.extents_of(["vae"]))
    given = GivenExtents(buffers)
    private = load_model(manifest, given, ["vae"], device="cpu-private")["vae"]
    private["F32"].fill_(7)
    assert load_model(manifest, given, ["vae"])["vae"]["F32"].sum() == 15


def test_two_models_that_share_a_file_load_it_once(tmp_path: Path, write_model) -> None:
    store = WeightStore(tmp_path / "store")
    shared, own = torch.rand(100), torch.rand(70)
    first = externalize(store, "a", write_model("a", {"x": shared}))
    second = externalize(store, "b", write_model("b", {"x": shared, "y": own}))
    provider, loaded = CountedExtents(store.packs), LoadedFiles()
    a = load_model(first, provider, loaded=loaded)["model"]
    b = load_model(second, provider, loaded=loaded)["model"]
    assert a["x"].data_ptr() == b["x"].data_ptr()
    assert torch.equal(b["y"], own)
    assert len(provider.fetched) == len(set(provider.fetched)) == 2
    assert set(loaded.num_loads.values()) == {1}
    del a, b
    load_model(first, provider, loaded=loaded)
    assert len(provider.fetched) == 3


def test_private_copies_are_never_shared(stored) -> None:
    manifest, provider = stored
    loaded = LoadedFiles()
    first, second = (load_model(manifest, provider, device="cpu-private", loaded=loaded) for _ in range(2))
    assert first["unet"]["w"].data_ptr() != second["unet"]["w"].data_ptr()
    assert not loaded.num_loads


def test_an_upload_is_shared_by_device(stored, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, provider = stored
    uploads: list[torch.device] = []

    def to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        uploads.append(device)
        return tensor.clone()

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which the first device of CUDA sets for the process
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.Tensor, "to", to)
    loaded = LoadedFiles()
    held = [load_model(manifest, provider, ["unet"], device=name, loaded=loaded) for name in ("cuda", "cuda:1")]
    assert [str(device) for device in uploads] == ["cuda:1"]
    assert held[0]["unet"]["w"].data_ptr() == held[1]["unet"]["w"].data_ptr()
    held.append(load_model(manifest, provider, ["unet"], device="cuda:0", loaded=loaded))
    assert [str(device) for device in uploads] == ["cuda:1", "cuda:0"]


def test_windows_hold_so_many_bytes_or_one_extent() -> None:
    sizes = [3, 4, 9, 1, 1, 8]
    extents = [
        ExtentRef(id=f"e{number}", pack="p", offset=0, nbytes=nbytes, checksum="0" * 32)
        for number, nbytes in enumerate(sizes)
    ]
    assert [[extent.nbytes for extent in window] for window in windows(extents, 8)] == [[3, 4], [9], [1, 1], [8]]


def test_block_quantized_tensors_come_as_their_bytes() -> None:
    blocks = seeded_rng().integers(0, 256, 2 * 3 * 18, np.uint8)
    ref = TensorRef(extent="e", offset=0, nbytes=blocks.nbytes, dtype="Q4_0", shape=(2, 96), sha256="0" * 64)
    part = Component(name="m", library="gguf", class_name=None, folder=".", tensors={"w": ref})
    tensor = attach(part, {"e": blocks})["w"]
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (2, 54))
    assert np.array_equal(tensor.numpy().reshape(-1), blocks)


def test_a_tensor_at_an_odd_place_is_an_aligned_copy() -> None:
    values = seeded_rng().random(5, np.float32)
    buffer = np.concatenate([np.zeros(3, np.uint8), values.view(np.uint8)])
    ref = TensorRef(extent="e", offset=3, nbytes=values.nbytes, dtype="F32", shape=(5,), sha256="0" * 64)
    part = Component(name="m", library="l", class_name=None, folder=".", tensors={"w": ref})
    tensor = attach(part, {"e": buffer})["w"]
    assert tensor.data_ptr() % 4 == 0
    assert np.array_equal(tensor.numpy(), values)
