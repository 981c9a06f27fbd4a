"""Files that the caller has in memory win over reading, and are only referred to."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from weights.loading.loader import load_model
from weights.loading.provider import LocalExtents
from weights.operations.externalize import externalize
from weights.records.errors import ExtentCorrupt, WeightsError
from weights.records.manifest import Component, ExtentRef, Manifest, TensorRef
from weights.storage.store import WeightStore


class CountedExtents(LocalExtents):
    """Remembers what was fetched, also an empty list."""

    def __init__(self, packs: Path) -> None:
        super().__init__(packs)
        self.fetched: list[list[str]] = []

    def fetch(self, extents):
        self.fetched.append([extent.id for extent in extents])
        return super().fetch(extents)


@pytest.fixture
def tensors() -> dict[str, dict[str, torch.Tensor]]:
    return {
        "vae": {"w": torch.rand(33, 5), "b": torch.rand(7).to(torch.bfloat16), "none": torch.zeros(0, 3)},
        "unet": {"w": torch.rand(300, 5), "ids": torch.arange(9)},
    }


@pytest.fixture
def stored(tmp_path: Path, write_pipeline, tensors) -> tuple[Manifest, CountedExtents, dict[str, np.ndarray]]:
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "p", write_pipeline("p", tensors))
    files = {
        pack: np.fromfile(store.packs / pack, np.uint8)
        for pack in {extent.pack for extent in manifest.extents.values()}
    }
    return manifest, CountedExtents(store.packs), files


def forms(array: np.ndarray) -> dict[str, object]:
    """The same bytes as everything that may be given."""
    padded = np.zeros(-(-array.nbytes // 8) * 8, np.uint8)
    padded[: array.nbytes] = array
    return {
        "array": array,
        "wider array": padded.view(np.float64),
        "tensor": torch.from_numpy(array.copy()),
        "2-D tensor": torch.from_numpy(padded.copy()).view(torch.int16).view(-1, 4),
        "bytearray": bytearray(array),
        "bytes": array.tobytes(),
        "memoryview": memoryview(array.copy()),
    }


def test_given_memory_is_viewed_and_nothing_is_read(stored, tensors) -> None:
    manifest, provider, files = stored
    loaded = load_model(manifest, provider, external_weights=files)
    assert provider.fetched == []
    for component, expected in tensors.items():
        for name, tensor in expected.items():
            assert torch.equal(loaded[component][name], tensor)
            ref = manifest.components[component].tensors[name]
            extent = manifest.extents[ref.extent]
            if tensor.numel():
                start = files[extent.pack].ctypes.data + extent.offset + ref.offset
                assert loaded[component][name].data_ptr() == start


@pytest.mark.parametrize("form", list(forms(np.zeros(8, np.uint8))))
def test_every_kind_of_buffer_is_taken(stored, tensors, form: str) -> None:
    manifest, provider, files = stored
    given = {location: forms(array)[form] for location, array in files.items()}
    loaded = load_model(manifest, provider, external_weights=given, verify=True)
    assert provider.fetched == []
    assert all(torch.equal(loaded[part][name], tensor) for part in tensors for name, tensor in tensors[part].items())


def test_what_is_not_given_is_read(tmp_path: Path, write_model) -> None:
    store = WeightStore(tmp_path / "store")
    first, second = torch.rand(40), torch.rand(50)
    externalize(store, "a", write_model("a", {"x": first}))
    manifest = externalize(store, "b", write_model("b", {"x": first, "y": second}))
    shared = manifest.extents[manifest.components["model"].tensors["x"].extent]
    provider = CountedExtents(store.packs)
    given = {shared.pack: np.fromfile(store.packs / shared.pack, np.uint8)}
    loaded = load_model(manifest, provider, external_weights=given)["model"]
    assert provider.fetched == [[manifest.components["model"].tensors["y"].extent]]
    assert torch.equal(loaded["x"], first)
    assert torch.equal(loaded["y"], second)


def test_the_memory_is_never_written_and_freed_only_with_its_owner(stored) -> None:
    manifest, provider, files = stored
    (location,) = files
    memory = files.pop(location)
    before = memory.copy()
    owner = weakref.ref(memory)
    loaded = load_model(manifest, provider, external_weights={location: memory})
    assert np.array_equal(memory, before)
    del memory
    gc.collect()
    assert owner() is not None
    del loaded
    gc.collect()
    assert owner() is None


def test_the_tensors_of_device_memory_stay_there(stored) -> None:
    manifest, provider, files = stored
    given = {location: torch.empty(array.nbytes, dtype=torch.uint8, device="meta") for location, array in files.items()}
    loaded = load_model(manifest, provider, external_weights=given)
    assert {tensor.device.type for part in loaded.values() for tensor in part.values()} == {"meta"}
    with pytest.raises(WeightsError, match=r"memory of meta cannot be verified"):
        load_model(manifest, provider, external_weights=given, verify=True)


def test_an_unknown_location_is_refused_with_the_known_ones(stored) -> None:
    manifest, provider, files = stored
    with pytest.raises(WeightsError, match=r"'other': p has no such file \(known: p_weight_combined\)"):
        load_model(manifest, provider, external_weights={**files, "other": bytes(8)})


def test_memory_that_is_too_small_names_the_tensor(stored) -> None:
    manifest, provider, files = stored
    ((location, array),) = files.items()
    extents = sorted(manifest.extents.values(), key=lambda extent: extent.offset)
    last = extents[-1]
    needed = max(
        (last.offset + ref.offset + ref.nbytes, f"{component.name}.{name}")
        for component in manifest.components.values()
        for name, ref in component.tensors.items()
        if ref.extent == last.id
    )
    short = needed[0] - 1
    with pytest.raises(WeightsError, match=rf"{location}.*: {short} bytes given, tensor {needed[1]} needs {needed[0]}"):
        load_model(manifest, provider, external_weights={location: array[:short]})
    # What does not lie in the short part is not looked at.
    other = next(name for name, part in manifest.components.items() if last not in manifest.extents_of([part.name]))
    load_model(manifest, provider, [other], external_weights={location: array[:short]})


def test_misaligned_memory_is_refused(stored) -> None:
    manifest, provider, files = stored
    ((location, array),) = files.items()
    moved = np.zeros(array.nbytes + 8, np.uint8)
    start = 1 - moved.ctypes.data % 2
    moved[start : start + array.nbytes] = array
    with pytest.raises(WeightsError, match=r"tensor (vae|unet)\.\w+ at byte \d+ .* not aligned to the \d bytes"):
        load_model(manifest, provider, external_weights={location: moved[start : start + array.nbytes]})


def test_a_misaligned_tensor_of_the_inline_layout_is_refused() -> None:
    ref = TensorRef(extent="e", offset=2, nbytes=4, dtype="F32", shape=(1,), sha256="0" * 64)
    part = Component(name="m", library="l", class_name=None, folder=".", tensors={"w": ref})
    extent = ExtentRef(id="e", pack="model.safetensors", offset=8, nbytes=6, checksum="0" * 32)
    manifest = Manifest(
        model="m",
        kind="tensors",
        class_name=None,
        skeleton="m",
        source="s",
        fingerprint="f",
        layout="inline",
        components={"m": part},
        extents={"e": extent},
    )
    with pytest.raises(WeightsError, match=r"tensor m\.w at byte 10 .* the 4 bytes of a F32"):
        load_model(manifest, LocalExtents(Path()), external_weights={"model.safetensors": np.zeros(16, np.uint8)})


@pytest.mark.parametrize(
    "buffer", ["text", 7, None, np.zeros(20000, np.uint8)[::2], torch.zeros(20000, dtype=torch.uint8)[::2], [1, 2]]
)
def test_what_is_no_contiguous_memory_is_refused(stored, buffer: object) -> None:
    manifest, provider, _ = stored
    with pytest.raises(WeightsError, match=r"'p_weight_combined': expected contiguous bytes"):
        load_model(manifest, provider, external_weights={"p_weight_combined": buffer})


def test_verification_finds_a_flipped_bit(stored) -> None:
    manifest, provider, files = stored
    ((location, array),) = files.items()
    load_model(manifest, provider, external_weights=files, verify=True)
    extent = next(iter(manifest.extents.values()))
    array[extent.offset + extent.nbytes // 2] ^= 4
    with pytest.raises(ExtentCorrupt, match=rf"{location}.*extent {extent.id}.*expected {extent.checksum}"):
        load_model(manifest, provider, external_weights=files, verify=True)
