"""Load models: what is missing is read, and tensors are views of what was read, or private copies of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weights.errors import WeightsError
from weights.loading.external_memory import given_extents
from weights.loading.placement import ExtentSource, LoadedFiles, windows
from weights.loading.stage_transforms import StageTransform, apply_stage
from weights.loading.views import Tensors, attach, view_of
from weights.manifest import Component, Manifest, TensorRef
from weights.provider import ExtentProvider, LocalExtents
from weights.store import WeightStore

__all__ = ["load_from_store", "load_model"]


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
