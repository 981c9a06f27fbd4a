"""Load a component: its tensors onto the device, the module, engine or adapter around them, and what that took."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from configs.cluster import WorkerConfig
from deployments.engines.build import IMPORT_LOCK
from deployments.engines.diffusion.rows import BatchBounds
from deployments.engines.llm.engine import LLMEngine, working_bytes
from deployments.engines.llm.kv_cache import free_memory, spare_bytes
from deployments.engines.llm.models.packed import compute_dtype
from deployments.engines.nn.streamed_blocks import end_streaming, stream_blocks
from deployments.engines.protocol import EngineError
from deployments.engines.skeletons import SkeletonPool
from deployments.errors import ModelUnavailable
from deployments.modules.built_modules import Built, Part, PartName, Slot, distinct_bytes, object_footprint
from deployments.modules.device_tier import DeviceTier, Fetched, Tensors
from deployments.modules.manifest_versions import ManifestVersions
from deployments.records import SwitchReport
from deployments.text.encoders import KeyedEncoder, TextEncoderBuilder
from weights.adapters import parse_adapter
from weights.errors import ExtentCorrupt
from weights.manifest import Component, ExtentRef, Manifest
from weights.torch_dtypes import TORCH_DTYPES

# Component, its skeleton folder, its tensors (HAZARD: maybe views on shared memory) -> the thing that runs.
Builder = Callable[[Component, Path, Tensors], Any]

MIN_KV_CACHE_BYTES: Final = 64 * 2**20
Filling = tuple[Slot, Part]


def fill_slots(
    filling: Sequence[Filling],
    beside: Sequence[Sequence[ExtentRef]],
    tier: DeviceTier,
    build: Builder,
    skeleton: Callable[[Manifest], Path],
    clock: Callable[[], float],
) -> Iterator[Built | Exception]:
    """Yield what each slot is filled with, or why it cannot be, one after the other. Blocking.

    Extents `beside` are asked for together with the others and released: their modules are here. `skeleton` returns the
    folder of a manifest. A slot fails with what `tier` raises, ExtentCorrupt naming the tensors, or ModelUnavailable.
    """
    try:
        together = _fetch_together(filling, beside, tier, clock)
    except Exception as error:
        yield from [error] * len(filling)
        return
    slots = [slot for slot, _ in filling]
    tier.hold(slots)
    try:
        for slot, part in filling:
            found: Built | Exception
            try:
                found = _fill_slot(slot, part, tier, together, build, skeleton(part.manifest), clock)
            except Exception as error:
                found = error
            tier.end_hold([slot])  # before whoever waits hears of it
            yield found
    finally:
        tier.end_hold(slots)


@dataclass(frozen=True, slots=True)
class _FetchedTogether:
    """The extents that one call got for all slots of a request, and its cost, which the first of them carries."""

    fetched: Fetched
    first: Slot
    fetch_s: float


async def locate_parts(filling: Sequence[Filling], manifests: ManifestVersions) -> list[Filling]:
    """Find the bytes where they are now: a slot may be of a manifest that was fetched before they were moved."""
    located: list[Filling] = []
    for slot, part in filling:
        manifest = await manifests.locate(part.manifest)
        component = manifest.components.get(part.component.name)
        if component and part.streamed:
            component = component.model_copy(update={"parts_hash": part.component.parts_hash})
        if manifest is not part.manifest and component and component.module_key == slot.key:
            part = replace(part, manifest=manifest, component=component)
            slot.component, slot.extents = component, part.extents
        located.append((slot, part))
    return located


def _fetch_together(
    filling: Sequence[Filling], beside: Sequence[Sequence[ExtentRef]], tier: DeviceTier, clock: Callable[[], float]
) -> _FetchedTogether | None:
    """Fetch the extents of all slots in one round trip to the keeper. Blocking. Raises what `tier` raises.

    Extents `beside` are asked for together with the others and released: their modules are here. None when each slot
    has to ask for itself: the tier wants it so, or damage must be found and named.
    """
    start = clock()
    try:
        fetched = tier.fetch([slot.extents for slot, _ in filling], beside)
    except ExtentCorrupt:
        return None
    return _FetchedTogether(fetched, filling[0][0], clock() - start) if fetched else None


def _fill_slot(
    slot: Slot,
    part: Part,
    tier: DeviceTier,
    together: _FetchedTogether | None,
    build: Builder,
    skeleton: Path,
    clock: Callable[[], float],
) -> Built:
    """Place the tensors of a part on the device and build it. Blocking.

    Raises what `tier` raises, ExtentCorrupt naming the tensors, and ModelUnavailable.
    """
    pays = together is not None and together.first is slot
    start = clock() - (together.fetch_s if together and pays else 0.0)
    try:
        placed = tier.place_component(
            part.component,
            slot.extents,
            slot.holder,
            together.fetched if together else None,
            part.working_bytes,
            part.streamed,
        )
        slot.is_placed = True
    except ExtentCorrupt as error:
        damaged = _tensor_names(part.component, slot.extents, str(error))
        raise ExtentCorrupt(f"{error}; it holds {damaged}") from error
    attached = clock()
    try:
        thing = build(part.component, skeleton, placed.tensors)
        if placed.stream is not None:
            stream_blocks(thing, placed.stream)
    except Exception as error:  # of many libraries; none of it is the fault of the request that came first
        raise ModelUnavailable(f"{part.component.name} of {part.manifest.model!r} cannot be built: {error}") from error
    return Built(
        thing,
        attach_ms=(attached - start) * 1e3,
        build_ms=(clock() - attached) * 1e3,
        storage_bytes=placed.storage_bytes + (together.fetched.storage_bytes if together and pays else 0),
        host_bytes=placed.host_bytes,
        device_bytes=placed.device_bytes,
        reused_bytes=placed.reused_bytes,
    )


def switch_report(
    model: str,
    switch_ms: float,
    slots: Mapping[PartName, Slot],
    fresh: Collection[PartName],
    built: Mapping[PartName, Built],
) -> SwitchReport:
    """Sum up a switch; `fresh` names those of `slots` that were built for it."""
    new = [built[name] for name in slots if name in fresh]
    kept_bytes = distinct_bytes(*(slot.tensors for name, slot in slots.items() if name not in fresh))
    return SwitchReport(
        model=model,
        switch_ms=switch_ms,
        attach_ms=sum(one.attach_ms for one in new),
        build_ms=sum(one.build_ms for one in new),
        attached_bytes=sum(slots[name].nbytes for name in fresh),
        built=tuple(name.name for name in slots if name in fresh),
        reused=tuple(name.name for name in slots if name not in fresh),
        storage_bytes=sum(one.storage_bytes for one in new),
        host_bytes=sum(one.host_bytes for one in new),
        device_bytes=sum(one.device_bytes for one in new),
        reused_bytes=kept_bytes + sum(one.reused_bytes for one in new),
    )


def _tensor_names(component: Component, extents: Sequence[ExtentRef], message: str) -> str:
    """The tensors of the extents that `message` names: what the damage takes down."""
    named = {extent.id for extent in extents if extent.id in message}
    names = [f"{component.name}.{name}" for name, ref in component.tensors.items() if ref.extent in named]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more tensors" if len(names) > 4 else "")


class ComponentBuilder:
    """Makes a component of any kind: a module of a pipeline, an LLM engine, an adapter.

    Modules come from `skeletons` where one of their structure is kept. An LLM engine is made anew each time: its KV
    cache and its sequences belong to the weights that computed them, and it takes less than 10 ms.
    """

    def __init__(self, settings: WorkerConfig) -> None:
        self._settings = settings
        self.skeletons = SkeletonPool()
        self._encoders = TextEncoderBuilder()
        self._cache_bytes: dict[str, int] = {}  # by module key
        self._spare_bytes: dict[str, int] = {}  # likewise; the same for the budget and for the engine

    def __call__(self, component: Component, skeleton: Path, tensors: dict[str, torch.Tensor]) -> Any:
        if not is_denoise_component(component):
            return self._encoders(component, skeleton, tensors)
        folder = skeleton / component.folder
        if component.library == "peft":
            return parse_adapter(folder, tensors, component.metadata)
        if component.library == "diffusers":
            key = component.structure_key
            return self.skeletons.build_module(key, component.library, component.class_name, folder, tensors)
        with IMPORT_LOCK:
            return LLMEngine(
                folder,
                tensors,
                device=self._settings.torch_device,
                max_num_seqs=self._settings.max_num_seqs,
                max_num_batched_tokens=self._settings.max_step_tokens,
                max_prefill_beside_decode=self._settings.max_prefill_beside_decode,
                max_decode_delay=self._settings.max_decode_delay,
                is_deterministic=self._settings.deterministic,
                kv_cache_bytes=self._kv_cache_bytes(component),
                kv_dtype=self._settings.kv_dtype,
                arithmetic=self._settings.packed_arithmetic,
                decode_threads=self._settings.decode_threads,
                prefill_threads=self._settings.prefill_threads,
            )

    def prepare(self, component: Component, skeleton: Path) -> None:
        """Make its structure before it is needed. Raises EngineError."""
        if component.library == "diffusers":
            self.skeletons.prepare_skeleton(component, skeleton / component.folder)

    def can_stream(self, component: Component) -> bool:
        """Return whether its blocks may come one after the other, where it is larger than the device."""
        return component.library == "diffusers"

    def private_footprint(self, component: Component) -> Mapping[str, int]:
        """Return what a component costs beside the node's shared memory: Python's objects, and an LLM's KV cache.

        One LLM always fits, however large its cache: the replica's budget is of what is kept for later, too.
        """
        footprint = object_footprint(component)
        if not is_denoise_component(component) or component.library in ("diffusers", "peft"):
            return footprint
        (nbytes,) = footprint.values()
        budget_bytes = self._settings.weights_budget_bytes
        return {component.module_key: min(nbytes + self._kv_cache_bytes(component), budget_bytes)}

    def working_memory(self, component: Component, skeleton: Path) -> int:
        """Return the bytes that what is built of a component allocates on the device: an LLM's KV cache.

        What cannot be built takes none; `__call__` says why.
        """
        if not is_denoise_component(component) or component.library in ("diffusers", "peft"):
            return 0
        if component.module_key not in self._cache_bytes:
            dtype = TORCH_DTYPES.get(next(iter(component.tensors.values())).dtype, torch.float32)
            if component.format in ("gguf", "kuiper"):
                dtype = compute_dtype(self._settings.packed_arithmetic)
            try:
                found = working_bytes(
                    skeleton / component.folder,
                    dtype,
                    torch.device(self._settings.torch_device),
                    kv_cache_bytes=self._kv_cache_bytes(component),
                    kv_dtype=self._settings.kv_dtype,
                    max_num_seqs=self._settings.max_num_seqs,
                )
            except EngineError:
                found = 0
            self._cache_bytes[component.module_key] = found
        return self._cache_bytes[component.module_key]

    def _kv_cache_bytes(self, component: Component) -> int:
        """Return the bytes that an LLM's KV cache may take: a larger model has larger tokens, and longer texts."""
        asked = self._settings.kv_cache_bytes
        if asked == "auto":
            return self._spare_bytes_for(component)
        return asked or max(MIN_KV_CACHE_BYTES, component.nbytes // 2)

    def _spare_bytes_for(self, component: Component) -> int:
        """Return what a model leaves, the first time that it is asked for, to its KV cache."""
        if component.module_key not in self._spare_bytes:
            device = torch.device(self._settings.torch_device)
            # On shared memory, weights are the node's and no part of the budget.
            weights_bytes = 0 if self._settings.device == "cpu" else component.nbytes
            spare = spare_bytes(self._settings.weights_budget_bytes, free_memory(device), weights_bytes)
            self._spare_bytes[component.module_key] = max(MIN_KV_CACHE_BYTES, spare)
        return self._spare_bytes[component.module_key]

    def retire(self, thing: Any) -> None:
        """Take back what was built here and is not used any more."""
        if isinstance(thing, nn.Module):
            end_streaming(thing)
            self.skeletons.retire_module(thing)
        elif isinstance(thing, KeyedEncoder):
            self._encoders.retire(thing)


def batch_bounds(settings: WorkerConfig) -> BatchBounds:
    """Return the batch bounds of the pipelines of this service."""
    return BatchBounds(
        settings.max_batch_rows, settings.max_batch_pixels, settings.max_decode_pixels, settings.max_vae_bytes
    )


def is_denoise_component(component: Component) -> bool:
    """Return whether the worker builds it: of a pipeline diffusers' modules, of a single model everything.

    A Stable Diffusion's safety checker is of neither library that a replica knows, and nobody builds it.
    """
    return component.name == "model" or component.library in ("diffusers", "peft")
