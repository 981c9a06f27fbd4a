"""Attaching: tensors are views of the extents' bytes."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from weights.externalize import externalize
from weights.loader import TORCH_DTYPES, attach, load_model
from weights.manifest import ExtentRef, Manifest
from weights.provider import LocalExtents
from weights.store import WeightStore


class CountedExtents(LocalExtents):
    """Remembers what was fetched."""

    def __init__(self, packs: Path) -> None:
        super().__init__(packs)
        self.fetched: list[str] = []

    def fetch(self, extents):
        self.fetched += [extent.id for extent in extents]
        return super().fetch(extents)


@pytest.fixture
def stored(tmp_path: Path, write_pipeline) -> tuple[Manifest, CountedExtents]:
    tensors = {name: torch.ones(3, 5).to(dtype) for name, dtype in TORCH_DTYPES.items()}
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
    for name, dtype in TORCH_DTYPES.items():
        assert (loaded[name].dtype, loaded[name].shape) == (dtype, (3, 5))
        assert torch.equal(loaded[name].to(torch.float64), torch.ones(3, 5, dtype=torch.float64))
    assert (loaded["scalar"].shape, loaded["scalar"].item()) == ((), 2.5)
    assert loaded["empty"].shape == (0, 7)


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
