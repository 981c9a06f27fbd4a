"""Modules without weights that are kept, so that another model of the same structure is bound and not built.

A module is lent to one component at a time: a fine-tune that is resident beside its base has a module of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

from deployments.engines.building.build import Skeleton, build_skeleton
from deployments.engines.nn.packed_weights import Arithmetic
from weights.loading.modules import Binding, copy_structure
from weights.platform.torch_dtypes import TORCH_DTYPES, memory_form
from weights.records.errors import WeightsError
from weights.records.manifest import Component
from weights.residency.recent import Recent

MAX_FREE: Final = 16  # a blank FLUX transformer takes about 5 MB
MAX_TEMPLATES: Final = 32


@dataclass(frozen=True, slots=True)
class SkeletonStats:
    """Counts of blank modules: `num_free` wait for weights; the others since the start, by how they were made."""

    num_free: int
    num_templates: int
    num_built: int
    num_copied: int
    num_rebound: int


class SkeletonPool:
    """Blank modules by structure, the least recently used dropped first. Thread-safe.

    Of a structure that was prepared, or built before, one is kept to copy from, which is faster than to build.
    """

    def __init__(
        self, max_free: int = MAX_FREE, max_templates: int = MAX_TEMPLATES, arithmetic: Arithmetic = "fast"
    ) -> None:
        """`arithmetic` is that of products with packed weights."""
        self._arithmetic: Arithmetic = arithmetic
        self._lock = threading.Lock()
        self._free: Recent[int, tuple[str, Skeleton]] = Recent(max_free)
        # None: built once, and not needed for a second time yet.
        self._templates: Recent[str, Skeleton | None] = Recent(max_templates)
        self._in_use: weakref.WeakKeyDictionary[nn.Module, tuple[str, Binding]] = weakref.WeakKeyDictionary()
        self._num_built = self._num_copied = self._num_rebound = 0

    def build_module(
        self,
        key: str,
        library: str,
        class_name: str | None,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        *,
        optional_parts: Collection[str] = (),
        kinds: Mapping[str, str] = MappingProxyType({}),
    ) -> nn.Module:
        """Build as `build.build_module` does, with a kept module of the structure `key` if there is one."""
        skeleton = self._take(key)
        if skeleton is None:
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            skeleton = build_skeleton(
                library,
                class_name,
                folder,
                shapes,
                optional_parts=optional_parts,
                kinds=kinds,
                arithmetic=self._arithmetic,
            )
            self._note_built(key, skeleton)
        skeleton.binding.put_tensors(tensors)
        with self._lock:
            self._in_use[skeleton.module] = (key, skeleton.binding)
        return skeleton.module

    def prepare_skeleton(self, component: Component, folder: Path, optional_parts: Collection[str] = ()) -> None:
        """Make a structure before it is needed: its first module is there then, a second one is a copy of it.

        Raises EngineError.
        """
        key = component.structure_key
        with self._lock:
            if not key or self._templates.get(key) is not None:
                return
        skeleton = _blank(component, folder, optional_parts, self._arithmetic)
        self._remember(key, skeleton)
        if (first := _copy(skeleton)) is not None:
            self._keep(key, first)

    def retire_module(self, module: nn.Module) -> None:
        """Take the weights out of a module that nobody runs any more, and keep it for others.

        HAZARD: nobody else may use it from here on, since it may get other weights. Unknown modules are ignored.
        """
        with self._lock:
            key, binding = self._in_use.pop(module, ("", None))
        if binding is None:
            return
        binding.clear()
        if key:
            self._keep(key, Skeleton(module, binding))

    def skeleton_stats(self) -> SkeletonStats:
        with self._lock:
            templates = sum(template is not None for template in self._templates.values())
            return SkeletonStats(len(self._free), templates, self._num_built, self._num_copied, self._num_rebound)

    def _take(self, key: str) -> Skeleton | None:
        with self._lock:
            found = next((id_ for id_, (other, _) in reversed(self._free.items()) if other == key), None)
            if found is not None:
                self._num_rebound += 1
                return self._free.pop(found)[1]
            template = self._templates.get(key)
            if template is None:
                return None
            self._templates.move_to_end(key)
        copied = _copy(template)
        with self._lock:
            self._num_copied += copied is not None
        return copied

    def _keep(self, key: str, blank: Skeleton) -> None:
        with self._lock:
            self._free.note(id(blank.module), (key, blank))

    def _note_built(self, key: str, skeleton: Skeleton) -> None:
        """A structure that is built for the second time will be needed again."""
        with self._lock:
            self._num_built += 1
            is_second = key in self._templates
        if key:
            self._remember(key, _copy(skeleton) if is_second else None)

    def _remember(self, key: str, template: Skeleton | None) -> None:
        with self._lock:
            self._templates.note(key, template)


def blank_module(component: Component, folder: Path, optional_parts: Collection[str] = ()) -> nn.Module:
    """Return a component's module without its weights, in their dtype. Raises EngineError."""
    module, tensors = _blank(component, folder, optional_parts).module, component.tensors
    named = (name for name, _ in module.named_parameters() if name not in component.block_types)
    first = tensors.get(next(named)) or next(iter(tensors.values()))
    dtype = TORCH_DTYPES.get(first.dtype)
    # diffusers' own `to` warns of what is not the case
    return nn.Module.to(module, dtype) if dtype is not None and dtype.is_floating_point else module


def _blank(
    component: Component, folder: Path, optional_parts: Collection[str] = (), arithmetic: Arithmetic = "fast"
) -> Skeleton:
    return build_skeleton(
        component.library,
        component.class_name,
        folder,
        {name: memory_form(ref.dtype, ref.shape)[1] for name, ref in component.tensors.items()},
        optional_parts=optional_parts,
        kinds=component.block_types,
        arithmetic=arithmetic,
    )


def _copy(skeleton: Skeleton) -> Skeleton | None:
    """None for a module that cannot be copied: such are built each time."""
    try:
        return Skeleton(*copy_structure(*skeleton))
    except WeightsError:
        return None
