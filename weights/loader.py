"""Extents -> tensors. The tensors are views of the extents' bytes: attaching costs per tensor, not per byte."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from weights.manifest import Component, Manifest, TensorRef
from weights.provider import ExtentProvider, LocalExtents
from weights.reading.extents import ByteArray
from weights.store import WeightStore

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
}
# warnings.catch_warnings swaps process-wide state, and replicas attach from several threads.
_WARNINGS_LOCK = threading.Lock()


def attach(component: Component, buffers: Mapping[str, ByteArray]) -> dict[str, torch.Tensor]:
    """Tensors of a component as views of `buffers` (uint8 arrays by extent id).

    HAZARD: the memory is shared by every replica of the node and torch does not know that it is read-only.
    Nothing may write into these tensors in place.
    """
    ids = {ref.extent for ref in component.tensors.values()}
    bases = {id_: _bytes_tensor(buffers[id_]) for id_ in ids}
    return {name: _view(bases[ref.extent], ref) for name, ref in component.tensors.items()}


def load_model(
    manifest: Manifest, provider: ExtentProvider, components: Iterable[str] | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by component and name, for all components or the given ones."""
    names = list(manifest.components if components is None else components)
    buffers = provider.fetch(manifest.extents_of(names))
    return {name: attach(manifest.components[name], buffers) for name in names}


def load_from_store(store: Path, model: str) -> dict[str, dict[str, torch.Tensor]]:
    """Everything of one model in one call, in one process, without Ray."""
    weight_store = WeightStore(store)
    return load_model(weight_store.manifest(model), LocalExtents(weight_store.packs))


def _bytes_tensor(array: ByteArray) -> torch.Tensor:
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        return torch.from_numpy(array)


def _view(base: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    if ref.nbytes == 0:  # an array without bytes may have stride 0, which cannot be viewed as a wider type
        return torch.empty(ref.shape, dtype=TORCH_DTYPES[ref.dtype])
    flat = base[ref.offset : ref.offset + ref.nbytes]
    return flat.view(TORCH_DTYPES[ref.dtype]).view(ref.shape)
