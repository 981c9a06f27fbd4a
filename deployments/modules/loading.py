"""Builders of what a worker runs: modules of a pipeline, LLM engines, adapters."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from configs.cluster import WorkerConfig
from configs.simulated import SimulatedConfig
from deployments.engines.building.build import IMPORT_LOCK
from deployments.engines.building.skeletons import SkeletonPool
from deployments.engines.costs.node_threads import NodeThreads
from deployments.engines.diffusion.image_prompts import build_image_prompter
from deployments.engines.diffusion.lora_kinds import num_made
from deployments.engines.diffusion.rows import BatchBounds
from deployments.engines.llm.draft_model import divided
from deployments.engines.llm.engine import LLMEngine, layer_caches, working_bytes
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.footprints import step_bytes
from deployments.engines.llm.models.packed import compute_dtype
from deployments.engines.llm.sequences.kv_cache import free_memory
from deployments.engines.nn.streamed_blocks import end_streaming
from deployments.engines.ranks.following import RankChannel
from deployments.engines.records.protocol import EngineError
from deployments.engines.upscaling import build_upscaler
from deployments.modules.builder import Builder
from deployments.modules.encoders import KeyedEncoder, TextEncoderBuilder
from deployments.modules.footprints import FootprintBook, structure_of
from deployments.modules.parts import WORKSPACE, beside_adapters, workspace_pieces
from deployments.modules.stock_parts import is_stock_part, is_stock_text
from weights.formats.ip_adapter import LIBRARY as IP_ADAPTER
from weights.formats.upscaler import LIBRARY as UPSCALER
from weights.memory.block_plan import choose_way
from weights.memory.devices import allocated_bytes, open_device
from weights.memory.layer_plan import DecoderSizes, decoder_sizes, largest_caches, layer_of
from weights.memory.rates import measured_rates
from weights.memory.transfer import num_cores
from weights.operations.adapters import parse_adapter
from weights.platform.private_folder import private_folder, temporary_folder
from weights.platform.torch_dtypes import TORCH_DTYPES, memory_form
from weights.records.manifest import Component

_PLAIN: Final = frozenset({"F32", "F16", "BF16"})
_OF_DENOISING: Final = ("diffusers", "peft", IP_ADAPTER)  # libraries, as components name them
MIN_KV_CACHE_BYTES: Final = 64 * 2**20
# Of free memory: other processes need some, and what is not planned (a sampler, adapters, a card's libraries).
_FREE_SHARE: Final = 0.9

logger = logging.getLogger("atelier.replica")


class ComponentBuilder(Builder):
    """Makes a component of any kind: a module of a pipeline, an upscaler, an LLM engine, an adapter.

    Modules come from `skeletons` where one of their structure is kept. An LLM engine is made anew each time: its KV
    cache and its sequences belong to the weights that computed them, and it takes less than 10 ms.
    """

    def __init__(self, settings: WorkerConfig) -> None:
        self._settings = settings
        self.skeletons = SkeletonPool(arithmetic=settings.packed_arithmetic)
        self._cache_bytes: dict[str, int] = {}  # by module key
        self._spare_bytes: dict[tuple[str, int], int] = {}  # of KV caches that are `auto`, by module key and room
        self.footprints: FootprintBook = FootprintBook(settings.torch_device, batch_bounds(settings))
        self._encoders = TextEncoderBuilder(self.footprints)
        self._layer_caches: dict[str, Sequence[int] | None] = {}
        self._node_threads = node_threads(settings)

    def __call__(self, component: Component, skeleton: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
        if component.library == WORKSPACE:
            return None
        if not is_denoise_component(component):
            return self._encoders(component, skeleton, tensors)
        folder = skeleton / component.folder
        if component.library == "peft":
            return parse_adapter(folder, tensors, component.metadata)
        if component.library == UPSCALER:
            return build_upscaler(folder, tensors)
        if component.library == IP_ADAPTER:
            with IMPORT_LOCK:
                return build_image_prompter(folder, tensors)
        if component.library == "diffusers" or is_stock_part(component):
            return self.skeletons.build_module(
                component.structure_key,
                component.library,
                component.class_name,
                folder,
                tensors,
                kinds=component.block_types,
            )
        return self.build_engine(component, skeleton, tensors)

    def build_engine(
        self,
        component: Component,
        skeleton: Path,
        tensors: Mapping[str, torch.Tensor],
        ranks: RankChannel | None = None,
    ) -> LLMEngine:
        """Return the engine of a language model, which says its steps to the followers of `ranks`."""
        with IMPORT_LOCK:
            config, workspace = self.engine_config(component, skeleton), self.footprints.of_steps(component)
            return LLMEngine(skeleton / component.folder, tensors, config, workspace=workspace, ranks=ranks)

    def engine_config(self, component: Component, skeleton: Path) -> LLMEngineConfig:
        """Return the configuration of a language model's engine."""
        settings = self._settings
        return LLMEngineConfig(
            device=settings.torch_device,
            keeps_devices=True,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_step_tokens,
            max_prefill_beside_decode=settings.max_prefill_beside_decode,
            max_decode_delay=settings.max_decode_delay,
            is_deterministic=settings.deterministic,
            prompt_lookup=settings.prompt_lookup,
            kv_cache_bytes=self.kv_cache_bytes(component, skeleton),
            kv_dtype=settings.kv_dtype,
            arithmetic=settings.packed_arithmetic,
            decode_threads=settings.decode_threads,
            prefill_threads=settings.prefill_threads,
            node_threads=self._node_threads,
        )

    def prepare(self, component: Component, skeleton: Path) -> None:
        """Make its structure before it is needed. Raises EngineError."""
        if component.library == "diffusers" or is_stock_part(component):
            self.skeletons.prepare_skeleton(component, skeleton / component.folder)
        self._learn_steps(component, skeleton)
        nbytes = component.nbytes + self.working_memory(component, skeleton)  # reads a header, which may be large
        on_device = self._settings.torch_device != "cpu"
        if on_device and nbytes > self._settings.weights_budget_bytes and self.layer_caches(component, skeleton):
            self.streams_layers(component)  # measures while nothing else runs

    def _learn_steps(self, component: Component, skeleton: Path) -> None:
        """Learn what the largest step of a language model takes, before its cache takes what there is."""
        book, key = self.footprints, structure_of(component)
        if book.memory is None or not is_language_model(component) or key in book.steps:
            return
        forms = {name: memory_form(ref.dtype, ref.shape) for name, ref in component.tensors.items()}
        book.steps[key] = step_bytes(skeleton / component.folder, forms, self.engine_config(component, skeleton))

    def can_stream(self, component: Component) -> bool:
        """Return whether its blocks may come one after the other, where it is larger than the device."""
        return component.library == "diffusers"

    def working_memory(self, component: Component, skeleton: Path) -> int:
        """Return the bytes that what is built of a component allocates itself: an LLM's KV cache, or the matrices of an
        adapter that is no LoRA, in float32 at most.

        What cannot be built takes none; `__call__` says why.
        """
        if component.library == "peft":
            if component.module_key not in self._cache_bytes:
                shapes = {name: ref.shape for name, ref in component.tensors.items()}
                self._cache_bytes[component.module_key] = 4 * num_made(shapes)
            return self._cache_bytes[component.module_key]
        if not is_language_model(component):
            return 0
        if component.module_key not in self._cache_bytes:
            try:
                found = working_bytes(
                    **self._memory_settings(component, skeleton, self.kv_cache_bytes(component, skeleton)),
                    tensor_bytes={name: ref.nbytes for name, ref in self.own_part(component, skeleton).tensors.items()},
                )
                found += self.copied_bytes(component, skeleton)
            except EngineError:
                found = 0
            self._cache_bytes[component.module_key] = found
        return self._cache_bytes[component.module_key]

    def copied_bytes(self, component: Component, skeleton: Path) -> int:
        """Return the bytes of a language model that this process copies, since its parts of them lie apart."""
        return 0

    def streams_layers(self, component: Component) -> bool:
        """Return whether layers of the host can come to the device: plain ones, and so fast that a full step gains."""
        names, dtypes = component.tensors, {ref.dtype for ref in component.tensors.values()}
        is_plain = component.format == "safetensors" and dtypes <= _PLAIN and not any(".experts." in n for n in names)
        if not is_plain or self._settings.packed_arithmetic == "exact":
            return False
        try:
            rates = measured_rates(torch.device(self._settings.torch_device))
        except RuntimeError:  # no memory to measure with, so none to spare
            return False
        item_bytes = TORCH_DTYPES[next(iter(dtypes))].itemsize
        return choose_way(item_bytes, 1, self._settings.max_step_tokens, rates) == "stream"

    def layer_caches(self, component: Component, skeleton: Path) -> Sequence[int] | None:
        """Return the bytes that a language model allocates on the device where 0, 1, ... of its layers are there.

        None for a component that is no decoder of ours: its layers cannot be apart.
        """
        if component.name != "model" or component.library in ("diffusers", "peft"):
            return None
        if component.module_key not in self._layer_caches:
            found = self._caches_within(self.kv_cache_bytes(component, skeleton), component, skeleton)
            self._layer_caches[component.module_key] = found
        return self._layer_caches[component.module_key]

    def _caches_within(self, nbytes: int, component: Component, skeleton: Path) -> Sequence[int] | None:
        """Return `layer_caches` where the KV caches of all layers have so many bytes."""
        try:
            has_draft = bool(divided(component.tensors)[1])
            found = layer_caches(**self._memory_settings(component, skeleton, nbytes), has_draft=has_draft)
        except EngineError:  # told by whoever builds it
            return None
        numbers = {layer for name in component.tensors if (layer := layer_of(name)) is not None}
        return found if found is not None and numbers == set(range(len(found) - 1)) else None

    def _memory_settings(self, component: Component, skeleton: Path, kv_cache_bytes: int) -> dict[str, Any]:
        dtype = TORCH_DTYPES.get(next(iter(component.tensors.values())).dtype, torch.float32)
        if component.format in ("gguf", "kuiper"):
            dtype = compute_dtype(self._settings.packed_arithmetic)
        return {
            "folder": skeleton / component.folder,
            "dtype": dtype,
            "device": torch.device(self._settings.torch_device),
            "kv_cache_bytes": kv_cache_bytes,
            "kv_dtype": self._settings.kv_dtype,
            "max_num_seqs": self._settings.max_num_seqs,
        }

    def kv_cache_bytes(self, component: Component, skeleton: Path) -> int:
        """Return the bytes that an LLM's KV cache may take: a larger model has larger tokens, and longer texts."""
        asked = self._settings.kv_cache_bytes
        if asked != "auto":
            return asked or max(MIN_KV_CACHE_BYTES, component.nbytes // 2)
        largest = self.footprints.inside(self.footprints.steps.get(structure_of(component), 0))
        room = beside_adapters(self._settings.weights_budget_bytes) - sum(workspace_pieces(largest).values())
        if (key := (component.module_key, room)) not in self._spare_bytes:
            self._spare_bytes[key] = self._spare_cache_bytes(component, skeleton, room)
        return self._spare_bytes[key]

    def _spare_cache_bytes(self, component: Component, skeleton: Path, room: int) -> int:
        """Return the bytes that weights leave of each device's `room`: of the first one's, where that is enough (of
        several, half of the weights, as it is by default); else of all devices', for the layers that are there.
        """
        settings = self._settings
        # On shared memory, weights are the node's and no part of the budget.
        left = room - (0 if settings.device == "cpu" else component.nbytes)
        spare = max(MIN_KV_CACHE_BYTES, left)
        enough = component.nbytes // 2 if settings.other_devices else 0
        if settings.device in ("cpu", "cpu-private") or left >= max(MIN_KV_CACHE_BYTES, enough):
            return spare
        if self._caches_within(MIN_KV_CACHE_BYTES, component, skeleton) is None:
            return spare
        device = torch.device(settings.torch_device)
        sizes = {name: allocated_bytes(device, ref.nbytes) for name, ref in component.tensors.items()}

        def sizes_of(cache_bytes: int) -> DecoderSizes:
            caches = self._caches_within(cache_bytes, component, skeleton) or ()
            return decoder_sizes(sizes, len(caches) - 1, caches)

        rooms = [room] * (1 + len(settings.other_devices))
        host_bytes = None if settings.host_bytes is None else beside_adapters(settings.host_bytes)
        return max(spare, largest_caches(sizes_of, rooms, MIN_KV_CACHE_BYTES, host_bytes))

    def retire(self, thing: Any) -> None:
        """Take back what was built here and is not used any more."""
        if isinstance(thing, nn.Module):
            end_streaming(thing)
            self.skeletons.retire_module(thing)
        elif isinstance(thing, LLMEngine):
            thing.close()
        elif isinstance(thing, KeyedEncoder):
            self._encoders.retire(thing)


def within_memory(settings: WorkerConfig, simulated: SimulatedConfig | None) -> WorkerConfig:
    """Return settings with a budget that free memory can hold, where language models take what there is of it.

    So several of them never promise each other's memory: what does not fit into the budget together takes turns.
    Raises WeightsError for a device that is not there.
    """
    if settings.kv_cache_bytes != "auto":
        return settings
    names = (settings.torch_device, *settings.other_devices)
    free_bytes = int(_FREE_SHARE * min(free_memory(open_device(name, simulated)) for name in names))
    if settings.torch_device == "cpu":  # ranks of one host share its memory
        free_bytes //= settings.num_processes
    name = "resident_bytes" if settings.device == "cpu" else "device_budget_bytes"
    return settings.model_copy(update={name: max(1, min(settings.weights_budget_bytes, free_bytes))})


def node_threads(settings: WorkerConfig) -> NodeThreads | None:
    """Return the threads of this node, to be leased where steps have more of them than Ray reserves for a replica.

    None where they have not: then Ray keeps replicas apart.
    """
    share = math.ceil(settings.num_cpus)
    asked = (settings.num_threads or share, settings.prefill_threads or 1, settings.decode_threads or 1)
    if max(asked) <= max(1, share):
        return None
    try:
        return NodeThreads(private_folder(temporary_folder()) / "threads", num_cores())
    except OSError as error:
        logger.warning("threads are not leased, and replicas may compute on each other's cores: %s", error)
        return None


def batch_bounds(settings: WorkerConfig) -> BatchBounds:
    """Return the batch bounds of the pipelines of this service."""
    return BatchBounds(
        settings.max_batch_rows, settings.max_batch_pixels, settings.max_decode_pixels, settings.max_vae_bytes
    )


def is_language_model(component: Component) -> bool:
    """Return whether a worker builds an LLM engine of a component."""
    return component.name == "model" and component.library not in ("diffusers", "peft", UPSCALER, IP_ADAPTER)


def is_denoise_component(component: Component) -> bool:
    """Return whether the worker builds it: of a family's pipeline diffusers' modules, of a stock one all that does
    not encode its text alone, and of a single model everything.

    A Stable Diffusion's safety checker is of neither library that a replica knows, and nobody builds it.
    """
    is_known = component.name == "model" or component.library in _OF_DENOISING or is_stock_part(component)
    return is_known and not is_stock_text(component)


def is_pipeline_component(component: Component) -> bool:
    """Return whether a worker builds it that encodes the texts of its stock pipelines itself."""
    return is_denoise_component(component) or is_stock_text(component)
