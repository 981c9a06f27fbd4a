"""Casts and quantization while tensors are loaded: plain formulas, private results, bounded memory."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from unit.weights.comparing import raw

from weights.loading import loader
from weights.loading.loader import load_model
from weights.loading.provider import LocalExtents
from weights.loading.stage_transforms import Cast, Fp8Scaled, Int8Group
from weights.operations.externalize import externalize
from weights.records.errors import WeightsError
from weights.records.manifest import Component, ExtentRef, Manifest, TensorRef
from weights.storage.store import WeightStore

TARGETS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


class HeldExtents(LocalExtents):
    """Keeps what it gave, as a node's shared memory does."""

    def __init__(self, packs: Path) -> None:
        super().__init__(packs)
        self.given: dict[str, np.ndarray] = {}

    def fetch(self, extents):
        self.given |= super().fetch(extents)
        return {extent.id: self.given[extent.id] for extent in extents}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    matrix = torch.randn(6, 128) * 30
    return {
        "matrix": matrix,
        "half": (torch.randn(4, 64) * 100).half(),
        "brain": torch.randn(3, 64).bfloat16(),
        "double": torch.randn(2, 64, dtype=torch.float64),
        "cube": torch.randn(2, 3, 4),
        "bias": torch.randn(64),
        "ids": torch.arange(20),
        "flags": torch.rand(4, 64) > 0.5,
        "eight": torch.randn(4, 64).to(torch.float8_e5m2),
        "tied": matrix.clone(),
    }


@pytest.fixture
def stored(tmp_path: Path, write_model, tensors) -> tuple[Manifest, HeldExtents]:
    store = WeightStore(tmp_path / "store")
    return externalize(store, "m", write_model("m", tensors)), HeldExtents(store.packs)


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_cast_is_that_of_torch(stored, tensors, target: str) -> None:
    manifest, provider = stored
    staged = load_model(manifest, provider, stage=Cast(target))["model"]
    for name, tensor in tensors.items():
        expected = tensor.to(TARGETS[target]) if tensor.is_floating_point() and name != "eight" else tensor
        assert (staged[name].dtype, staged[name].shape) == (expected.dtype, expected.shape)
        assert raw(staged[name]) == raw(expected)


def test_int8_groups_are_the_plain_formula(stored, tensors) -> None:
    manifest, provider = stored
    staged = load_model(manifest, provider, stage=Int8Group(32))["model"]
    quantized = {"matrix", "half", "brain", "double", "tied"}
    assert set(staged) == set(tensors) | {f"{name}.scales" for name in quantized}
    for name in set(tensors) - quantized:
        assert raw(staged[name]) == raw(tensors[name])
    for name in quantized:
        groups = tensors[name].float().reshape(-1, 32)
        scales = groups.abs().amax(1) / 127
        assert torch.equal(staged[f"{name}.scales"].reshape(-1), scales)
        assert torch.equal(staged[name], (groups / scales[:, None]).round().to(torch.int8).view(tensors[name].shape))


def test_scaled_fp8_is_the_plain_formula(stored, tensors) -> None:
    manifest, provider = stored
    staged = load_model(manifest, provider, stage=Fp8Scaled())["model"]
    assert {name for name in staged if name.endswith(".scale")} == {
        f"{name}.scale" for name in ("matrix", "half", "brain", "double", "tied")
    }
    for name in ("matrix", "half", "brain", "double"):
        values = tensors[name].float()
        scale = values.abs().max() / 448
        assert torch.equal(staged[f"{name}.scale"], scale)
        assert raw(staged[name]) == raw((values / scale).clamp(-448, 448).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("device", ["cpu", "cpu-private"])
@pytest.mark.parametrize("stage", [Cast("BF16"), Cast("F32"), Int8Group(), Fp8Scaled()])
def test_staged_tensors_are_private(stored, stage, device: str) -> None:
    manifest, provider = stored
    staged = load_model(manifest, provider, stage=stage, device=device)["model"]
    before = {id_: array.copy() for id_, array in provider.given.items()}
    for tensor in staged.values():
        tensor.view(-1).view(torch.uint8).fill_(85)
    assert all(np.array_equal(array, before[id_]) for id_, array in provider.given.items())


def test_tied_tensors_are_staged_once(stored) -> None:
    manifest, provider = stored
    staged = load_model(manifest, provider, stage=Int8Group())["model"]
    assert staged["tied"].data_ptr() == staged["matrix"].data_ptr()
    assert staged["tied.scales"].data_ptr() == staged["matrix.scales"].data_ptr()


def test_memory_of_the_caller_is_staged_as_well(stored, tensors) -> None:
    manifest, provider = stored
    store_packs = {extent.pack for extent in manifest.extents.values()}
    files = {pack: np.fromfile(provider._reader._packs / pack, np.uint8) for pack in store_packs}
    before = {pack: array.copy() for pack, array in files.items()}
    staged = load_model(manifest, provider, stage=Cast("F16"), external_weights=files)["model"]
    assert not provider.given
    assert torch.equal(staged["matrix"], tensors["matrix"].half())
    staged["ids"].zero_()
    assert all(np.array_equal(files[pack], before[pack]) for pack in files)


def test_no_more_than_a_window_is_held_beside_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.windows, "__defaults__", (800,))
    extents = [ExtentRef(id=f"e{n}", pack="p", offset=4096 * n, nbytes=400, checksum="0" * 32) for n in range(9)]
    refs = {
        f"t{n}": TensorRef(extent=f"e{n}", offset=0, nbytes=400, dtype="F32", shape=(100,), sha256="0" * 64)
        for n in range(9)
    }
    part = Component(name="m", library="l", class_name=None, folder=".", tensors=refs)
    manifest = Manifest(
        model="m",
        kind="tensors",
        class_name=None,
        skeleton="m",
        source="s",
        fingerprint="f",
        components={"m": part},
        extents={extent.id: extent for extent in extents},
    )
    given: list[weakref.ref[np.ndarray]] = []
    held: list[int] = []

    class Provider:
        def fetch(self, extents):
            gc.collect()
            held.append(sum(array() is not None for array in given))
            arrays = {extent.id: np.full(extent.nbytes, int(extent.id[1:]), np.uint8) for extent in extents}
            given.extend(weakref.ref(array) for array in arrays.values())
            return arrays

    staged = load_model(manifest, Provider(), stage=Cast("F16"))["m"]
    assert len(held) == 5
    assert max(held) <= 2
    assert list(staged) == list(refs)


def test_a_name_that_exists_already_is_not_taken(tmp_path: Path, write_model) -> None:
    store = WeightStore(tmp_path / "store")
    source = write_model("m", {"w": torch.rand(2, 64), "w.scales": torch.rand(3)})
    manifest = externalize(store, "m", source)
    with pytest.raises(WeightsError, match=r"model: staging 'w' adds 'w.scales', which exists already"):
        load_model(manifest, LocalExtents(store.packs), stage=Int8Group())


def test_what_cannot_be_quantized_is_named(stored, tmp_path: Path, write_model) -> None:
    manifest, provider = stored
    with pytest.raises(WeightsError, match=r"tensor '\w+': \d+ elements .* groups of 100"):
        load_model(manifest, provider, stage=Int8Group(100))
    store = WeightStore(tmp_path / "other")
    bad = externalize(store, "n", write_model("n", {"w": torch.full((2, 64), torch.inf)}))
    for stage in (Int8Group(), Fp8Scaled()):
        with pytest.raises(WeightsError, match=r"tensor 'w': .*infinities"):
            load_model(bad, LocalExtents(store.packs), stage=stage)


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(WeightsError, match=r"'F64' while staging \(known: BF16, F16, F32, F8_E4M3\)"):
        Cast("F64")  # type: ignore[arg-type]
