"""Tensors as views of extents' bytes: attaching costs per tensor, not per byte."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weights.dtypes import BLOCK_SIZES
from weights.errors import WeightsError
from weights.loading.external_memory import bytes_tensor, given_extents
from weights.loading.placement import ExtentSource, LoadedFiles, windows
from weights.loading.stage_transforms import StageTransform, apply_stage
from weights.manifest import Component, Manifest, TensorRef
from weights.provider import ExtentProvider, LocalExtents
from weights.reading.extents import ByteArray
from weights.store import WeightStore
from weights.torch_dtypes import TORCH_DTYPES

__all__ = ["Tensors", "attach", "load_from_store", "load_model", "memory_form", "view_of"]

Tensors = dict[str, torch.Tensor]


def attach(component: Component, buffers: Mapping[str, ByteArray | torch.Tensor]) -> Tensors:
    """Return the tensors of a component as views of `buffers` (uint8 arrays or 1-D uint8 tensors, by extent id).

    A block-quantized tensor comes as its bytes: uint8, the last axis in bytes. A tensor that is not aligned to its
    element size (only the `inline` layout can have one) is a copy.

    HAZARD: the memory is shared by every replica of the node and torch does not know that it is read-only.
    Nothing may write into these tensors in place.
    """
    ids = {ref.extent for ref in component.tensors.values()}
    bases = {id_: _as_tensor(buffers[id_]) for id_ in ids}
    found: Tensors = {}
    for (id_, dtype), rows in component.views.items():
        typed = _seen_as(bases[id_], TORCH_DTYPES[dtype])
        if typed is not None:  # one operation of torch per tensor and not three, of thousands
            start, as_strided = typed.storage_offset(), typed.as_strided
            found |= {row.name: as_strided(row.shape, row.strides, start + row.offset) for row in rows}
    if len(found) < len(component.tensors):
        for name, ref in component.tensors.items():
            if name not in found:
                found[name] = view_of(bases[ref.extent], ref)
    return found


def load_model(
    manifest: Manifest,
    provider: ExtentProvider,
    components: Iterable[str] | None = None,
    *,
    external_weights: Mapping[str, Any] | None = None,
    verify: bool = False,
    stage: StageTransform | None = None,
    loaded: LoadedFiles | None = None,
    device: str = "cpu",
) -> dict[str, Tensors]:
    """Load the tensors of all components or the given ones; returned by component and name.

    `external_weights` are files that the caller has in memory, by location (`ExtentRef.pack`): their tensors are
    views of it on whatever device it is, and the provider is not asked; `verify` checks their checksums.
    `device` is "cpu" (views of what the provider gives), "cpu-private" (copies that may be written), or an accelerator.
    `loaded` shares what is on a device already, by (device, file and extent); private copies are never shared.
    `stage` makes private tensors of every tensor, a window of extents at a time; equal references stay tied.
    Raises WeightsError for unknown components or devices, and for external memory that does not fit.
    """
    names = list(manifest.components if components is None else components)
    for name in names:
        if name not in manifest.components:
            raise WeightsError(f"{manifest.model} has no component {name!r} (known: {', '.join(manifest.components)})")
    given = given_extents(manifest, names, external_weights or {}, verify=verify)
    wanted = [extent for extent in manifest.extents_of(names) if extent.id not in given]
    source = ExtentSource(provider, device, loaded, will_copy=stage is not None)
    if stage is None:
        bases = given | source.load_extents(wanted)
        return {name: attach(manifest.components[name], bases) for name in names}
    staged = _stage_window(manifest, names, given, stage)
    for window in windows(wanted):
        staged |= _stage_window(manifest, names, source.load_extents(window), stage)
    return {name: _merged(manifest.components[name], staged) for name in names}


def load_from_store(store: Path, model: str) -> dict[str, Tensors]:
    """Load everything of one model in one call, in one process, without Ray."""
    weight_store = WeightStore(store)
    return load_model(weight_store.manifest(model), LocalExtents(weight_store.packs))


def memory_form(dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of a stored tensor in memory: its own, or uint8 bytes of its blocks."""
    if dtype in BLOCK_SIZES:
        elements, nbytes = BLOCK_SIZES[dtype]
        return torch.uint8, (*shape[:-1], shape[-1] // elements * nbytes)
    return TORCH_DTYPES[dtype], shape


def view_of(base: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Return the tensor `ref` as a view of its extent's bytes `base` (1-D uint8); exceptions as in `attach`."""
    dtype, shape = memory_form(ref.dtype, ref.shape)
    if ref.nbytes == 0:  # an array without bytes may have stride 0, which cannot be viewed as a wider type
        return torch.empty(shape, dtype=dtype, device=base.device)
    flat = base[ref.offset : ref.offset + ref.nbytes]
    if flat.storage_offset() % dtype.itemsize or flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)


def _seen_as(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """View the whole elements of `base` (1-D uint8); None where the memory is not aligned to the type."""
    if base.data_ptr() % dtype.itemsize or base.storage_offset() % dtype.itemsize:
        return None
    return base[: base.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _stage_window(
    manifest: Manifest, names: Sequence[str], bases: Mapping[str, torch.Tensor], stage: StageTransform
) -> dict[tuple[str, str], Tensors]:
    """Apply `stage` to the tensors that lie in `bases`; returned by (component, name) and suffix."""
    once: dict[TensorRef, Tensors] = {}
    staged = {}
    for component in names:
        for name, ref in manifest.components[component].tensors.items():
            if ref.extent in bases:
                if ref not in once:
                    once[ref] = apply_stage(stage, name, view_of(bases[ref.extent], ref))
                staged[component, name] = once[ref]
    return staged


def _merged(component: Component, staged: Mapping[tuple[str, str], Tensors]) -> Tensors:
    merged: Tensors = {}
    for name in component.tensors:
        for suffix, tensor in staged[component.name, name].items():
            if suffix and name + suffix in component.tensors:
                raise WeightsError(f"{component.name}: staging {name!r} adds {name + suffix!r}, which exists already")
            merged[name + suffix] = tensor
    return merged


def _as_tensor(buffer: ByteArray | torch.Tensor) -> torch.Tensor:
    return buffer if isinstance(buffer, torch.Tensor) else bytes_tensor(buffer)
