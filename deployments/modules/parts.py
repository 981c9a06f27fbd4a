"""The parts of a model that a request wants, and what each takes of a replica's budget. Nothing is leased here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from deployments.engines.diffusion.lora_names import DENOISER, component_of, num_changed, part_of
from deployments.engines.records.protocol import EngineError
from deployments.modules.budget import ModuleBudget
from deployments.modules.builder import Builder
from weights.memory.block_plan import BlockPlan, Share, block_of, plan_blocks
from weights.memory.layer_plan import (
    AUTO,
    DecoderSizes,
    GpuLayers,
    LayerPlan,
    decoder_sizes,
    host_names,
    layer_of,
    plan_layers,
)
from weights.records.dtypes import ITEM_BYTES
from weights.records.errors import BudgetExceeded, WeightsError
from weights.records.manifest import Component, ExtentRef, Manifest
from weights.residency.sizes import RemotePart

# Of the budget, left for the weights of the VAE and adapters if they do not want more, and no guess of activations:
# requests with and without adapters then have one module, instead of one each that come and go.
BESIDE_SHARE: Final = 0.25
_LEAST_PIECE: Final = 64 * 2**10
_STEPS: Final = 16  # to which room is rounded, so that requests with other adapters have the same plan
_BUFFERS_SHARE: Final = 0.5  # of a language model's room: beyond it, layers that stay gain more than those that come
WORKSPACE: Final = "activations"  # the part of a request that is memory for its forwards
HOST: Final = "the host"  # key of host-memory KV caches in the budget
CANNOT_SPLIT: Final = (
    "only the layers of our own decoders can be split between device and host (Llama, Mistral, Mixtral, Qwen2, Qwen3 "
    "and their like), not a model that transformers computes"
)

Wants = Callable[[Component], bool]


class PartName(NamedTuple):
    """An adapter may have the name of a component without being one."""

    name: str
    is_adapter: bool = False


WORKSPACE_PART: Final = PartName(WORKSPACE, is_adapter=True)  # of no pipeline

# What a tensor costs a replica that maps its bytes: Python's objects for it and its share of the module's.
OBJECT_BYTES: Final = 8 * 2**10


def object_footprint(component: Component, working_bytes: int, budget_bytes: int) -> Mapping[str, int]:
    """Return the cost of a module whose tensors are views of the node's shared memory: its Python objects, and its own
    allocations. One that allocates always fits, with adapters beside it: the budget counts kept modules, too.
    """
    nbytes = OBJECT_BYTES * len(component.tensors)
    return {component.module_key: max(nbytes, min(nbytes + working_bytes, beside_adapters(budget_bytes)))}


def beside_adapters(budget_bytes: int) -> int:
    """Return the bytes that a language model may take of a budget and leave room for its requests' adapters."""
    return budget_bytes - budget_bytes // 16


def device_footprint(component: Component, size_of: Callable[[int], int], working_bytes: int) -> Mapping[str, int]:
    """Return the device bytes of every distinct tensor, by hash, and those that the built module allocates."""
    footprint = {hash_: size_of(nbytes) for hash_, nbytes in component.bytes_by_hash.items()}
    return footprint | ({f"memory of {component.module_key}": working_bytes} if working_bytes else {})


def _streamed_footprint(
    component: Component, size_of: Callable[[int], int], plan: BlockPlan, working_bytes: int = 0
) -> Mapping[str, int]:
    """Return the device bytes of a component whose blocks come one after the other, or are the host's."""
    staying = [ref for name, ref in component.tensors.items() if name not in plan.staying_away]
    return {ref.sha256: size_of(ref.nbytes) for ref in staying} | {
        f"memory of {component.module_key}": 2 * size_of(plan.buffer_bytes) + working_bytes
    }


def workspace_pieces(nbytes: int) -> dict[str, int]:
    """Return a workspace as pieces that larger ones have too: of several, the largest counts, and not their sum.

    The last piece goes up to an eighth beyond.
    """
    pieces: dict[str, int] = {}
    start, step = 0, _LEAST_PIECE
    while start < nbytes:
        pieces[f"workspace from {start}"] = step
        start += step
        step = max(_LEAST_PIECE, 1 << max(0, start.bit_length() - 4))
    return pieces


def _room_part(manifest: Manifest, nbytes: int) -> Part:
    """Return the part of a request that is the room of its forwards, and has nothing in it."""
    pieces = workspace_pieces(nbytes)
    needed = sum(pieces.values())
    component = Component(
        name=WORKSPACE, library=WORKSPACE, class_name=None, folder=WORKSPACE, tensors={}, parts_hash=f"{needed}"
    )
    return Part(manifest, component, pieces, workspace_bytes=needed)


def distinct_bytes(*sizes: Mapping[str, int]) -> int:
    """Return the bytes of all names, those of one name once."""
    found: dict[str, int] = {}
    for size in sizes:
        found.update(size)  # not entry by entry: each request asks, of thousands of tensors
    return sum(found.values())


@dataclass(frozen=True, slots=True)
class Part:
    """A component of a manifest. `footprint` is what it counts against the replica's budget."""

    manifest: Manifest
    component: Component
    footprint: Mapping[str, int]
    working_bytes: int = 0  # of the device, that the built thing allocates itself; part of the footprint
    workspace_bytes: int = 0  # of the device, that a forward of its model needs at least; in the footprint, in pieces
    streamed: BlockPlan | None = None  # of a component that is larger than the budget, or is wanted to be split
    is_variant: bool = False  # its component is that of the manifest with a `parts_hash` of its own

    @property
    def extents(self) -> tuple[ExtentRef, ...]:
        """The extents that hold it."""
        return self.manifest.extents_of([self.component.name]) if self.component.tensors else ()


@dataclass(frozen=True, slots=True)
class RequestParts:
    """The parts that a request needs, taken all at once: two that each hold half of theirs would wait for ever."""

    model: str
    parts: Mapping[PartName, Part]

    @property
    def sizes(self) -> dict[str, Mapping[str, int]]:
        """Return the bytes that each counts against the budget, by module key."""
        return {part.component.module_key: part.footprint for part in self.parts.values()}

    def __str__(self) -> str:
        return f"{', '.join(name.name for name in self.parts)} of {self.model!r}"


class Merging(NamedTuple):
    """The LoRA of a request that its configuration wants to be merged, and the component that it changes, by name."""

    adapter: str
    denoiser: str


@dataclass(frozen=True, slots=True)
class Fitting:
    """The rule that fits the parts of a request into the budget: all of them whole by default.

    With `merging`, that adapter's private weights have their room. With `streams`, the largest component comes block by
    block where there is no room for all; without, only where there is none for it alone. There is room for a forward
    that takes `room_bytes` of the budget, as a part of its own.
    """

    merging: Merging | None = None
    streams: bool = False
    room_bytes: int = 0


WHOLE: Final = Fitting()


class Allocator(Protocol):
    """The memory of a device: a tensor may take more of it than it has bytes."""

    def size_of(self, nbytes: int) -> int: ...


class PartsPlanner:
    """The parts of requests on one replica. `budget_bytes` may change.

    With `is_on_node`, the weights are in the node's memory and only objects and working memory count. `models` is the
    store's folder of manifests and skeletons.
    """

    def __init__(
        self, budget: ModuleBudget, builder: Builder, memory: Allocator, models: Path, *, is_on_node: bool
    ) -> None:
        self.budget_bytes = budget.nbytes
        self._builder = builder
        self._memory = memory
        self._models = models
        self._streaming = None if budget.device == "cpu" else Streaming(builder, memory)
        self._layers = None if budget.is_host else LayerPlacing(builder, memory, budget.others, budget.host_bytes)
        self.is_on_node = is_on_node
        self.gpu_layers: dict[str, GpuLayers] = {}  # by model, where the config says so

    def skeleton(self, manifest: Manifest) -> Path:
        """Return the folder with everything of it but the weights."""
        return self._models / manifest.skeleton

    def plan(
        self,
        manifest: Manifest,
        wanted: Wants,
        adapters: Mapping[str, Manifest] | None = None,
        fitting: Fitting = WHOLE,
    ) -> dict[PartName, Part]:
        """Return the wanted parts of a model and of adapters, with what each takes of the budget.

        Raises WeightsError, BudgetExceeded among them, for a language model whose layers cannot be where `gpu_layers`
        wants them.
        """
        beside = adapters or {}
        parts = {
            PartName(component.name): self._part(manifest, component, self._workspace(manifest, component))
            for component in filter(wanted, manifest.components.values())
        }
        for name, adapter in beside.items():
            for component in filter(wanted, adapter.components.values()):
                needed = self._workspace(manifest, component, beside)
                parts[PartName(name, is_adapter=True)] = self._part(adapter, component, needed)
        if fitting.room_bytes and not self.is_on_node:
            parts[WORKSPACE_PART] = _room_part(manifest, fitting.room_bytes)
        if fitting.merging is not None:
            parts = merged_parts(parts, fitting.merging, self._memory.size_of) or parts
        if self._layers is not None:
            wish = self.gpu_layers.get(manifest.model, AUTO)
            parts = self._layers.fit_parts(parts, self.budget_bytes, wish, self.skeleton(manifest))
        if self._streaming is None:
            return parts
        return self._streaming.fit_parts(parts, self.budget_bytes, is_last_resort=fitting.streams)

    def _workspace(self, manifest: Manifest, component: Component, adapters: Collection[str] = ()) -> int:
        """Return the bytes of the budget that forwards of a component need at least, or of a model with adapters."""
        book = self._builder.footprints
        if book is None or book.memory is None:
            return 0
        return book.inside(book.least_bytes(manifest, component, adapters))

    def own_part(self, manifest: Manifest, component: Component) -> Component:
        """Return the part of a component that this replica's first rank has."""
        return self._builder.own_part(component, self.skeleton(manifest))

    def _part(self, manifest: Manifest, component: Component, needed_bytes: int) -> Part:
        folder = self.skeleton(manifest)
        working_bytes = self._builder.working_memory(component, folder)
        component = self._builder.own_part(component, folder)
        if self.is_on_node:
            return Part(manifest, component, object_footprint(component, working_bytes, self.budget_bytes))
        footprint = dict(device_footprint(component, self._memory.size_of, working_bytes))
        pieces = workspace_pieces(needed_bytes)
        return Part(manifest, component, footprint | pieces, working_bytes, sum(pieces.values()))


class Streaming:
    """The plans of parts that are larger than their device: the largest of a request comes there block by block."""

    def __init__(self, builder: Builder, memory: Allocator) -> None:
        self._builder = builder
        self._memory = memory
        self._plans: dict[tuple[str, int], BlockPlan | None] = {}  # by module key and bytes

    def fit_parts(
        self, parts: dict[PartName, Part], budget_bytes: int, *, is_last_resort: bool
    ) -> dict[PartName, Part]:
        """Return the parts of a request, the largest one streamed if all together are larger than the budget.

        Without `is_last_resort` only if it is larger alone. What has room in no way stays as it is.
        """
        total_bytes = distinct_bytes(*(part.footprint for part in parts.values()))
        if total_bytes <= budget_bytes:
            return parts
        can_stream = self._builder.can_stream
        sizes = {name: distinct_bytes(part.footprint) for name, part in parts.items() if can_stream(part.component)}
        name = max(sizes, key=lambda one: sizes[one], default=None)
        if name is None or (sizes[name] <= budget_bytes and not is_last_resort):
            return parts
        # Whole: what they share with it may be of blocks that come and go.
        others_bytes = distinct_bytes(*(part.footprint for other, part in parts.items() if other != name))
        if not others_bytes:
            others_bytes = parts[name].workspace_bytes
        room_bytes = budget_bytes - max(others_bytes, int(budget_bytes * BESIDE_SHARE))
        room_bytes -= room_bytes % max(1, budget_bytes // _STEPS)
        return {**parts, name: self._streamed(parts[name], room_bytes)}

    def _streamed(self, part: Part, room_bytes: int) -> Part:
        component = part.component
        key = component.module_key, room_bytes
        if key not in self._plans:
            sizes = {name: ref.nbytes for name, ref in component.tensors.items()}
            self._plans[key] = plan_blocks(sizes, room_bytes)
        plan = self._plans[key]
        if plan is None:
            return part
        # Another module than the one that is there as a whole, over the same weights.
        variant = component.model_copy(update={"parts_hash": f"{component.parts_hash} in {room_bytes} bytes"})
        return replace(
            part,
            component=variant,
            footprint={
                **_streamed_footprint(variant, self._memory.size_of, plan),
                **workspace_pieces(part.workspace_bytes),
            },
            streamed=plan,
            is_variant=True,
        )


class LayerPlacing:
    """The plans of language models some of whose layers are on other devices or computed on the host."""

    def __init__(
        self, builder: Builder, memory: Allocator, others: Sequence[str] = (), host_bytes: int | None = 0
    ) -> None:
        """`others` are devices that layers may be on as well, each with the same budget; `host_bytes` is the host's for
        the KV caches of its layers, None where it computes none.
        """
        self._builder = builder
        self._memory = memory
        self._others, self._host_bytes = others, host_bytes
        # By module key, bytes and wish; and whether layers may come through buffers.
        self._plans: dict[tuple[str, int, GpuLayers], tuple[LayerPlan, bool]] = {}

    def fit_parts(
        self, parts: dict[PartName, Part], budget_bytes: int, wanted: GpuLayers, skeleton: Path
    ) -> dict[PartName, Part]:
        """Return the parts of a request, the language model among them split as wanted: `auto` where it is too large.

        Raises as `plan_layers` does.
        """
        found = dict(parts)
        for name, part in parts.items():
            if name.is_adapter or (wanted == AUTO and distinct_bytes(part.footprint) <= budget_bytes):
                continue
            caches = self._builder.layer_caches(part.component, skeleton)
            if caches is not None:
                adapters = [other.footprint for key, other in parts.items() if key.is_adapter]
                step = max(1, budget_bytes - beside_adapters(budget_bytes))
                num_steps = max(1, -(-distinct_bytes(*adapters) // step))
                found[name] = self._split(part, caches, budget_bytes - num_steps * step, wanted)
            elif wanted != AUTO:
                raise WeightsError(f"gpu_layers {wanted!r} of {part.manifest.model!r}: {CANNOT_SPLIT}")
        return found

    def _planned(self, part: Part, sizes: DecoderSizes, room_bytes: int, wanted: GpuLayers) -> tuple[LayerPlan, bool]:
        """Return the plan, and whether it leaves room for the two buffers that the host's layers may come through.

        What the layers need themselves goes first.
        """
        plan_within = partial(
            plan_layers, sizes, wanted=wanted, model=part.manifest.model, has_host=self._host_bytes is not None
        )
        others = [room_bytes] * len(self._others)
        plan = plan_within(budgets=[room_bytes, *others])
        buffers_bytes = 2 * max(sizes.layers, default=0)
        if (
            plan.on(None)
            and buffers_bytes <= _BUFFERS_SHARE * room_bytes
            and self._builder.streams_layers(part.component)
        ):
            with contextlib.suppress(BudgetExceeded):
                return plan_within(budgets=[room_bytes - buffers_bytes, *others]), True
        return plan, False

    def _split(self, part: Part, caches: Sequence[int], room_bytes: int, wanted: GpuLayers) -> Part:
        component = part.component
        key = component.module_key, room_bytes, wanted
        if key not in self._plans:
            sizes = {name: self._memory.size_of(ref.nbytes) for name, ref in component.tensors.items()}
            self._plans[key] = self._planned(part, decoder_sizes(sizes, len(caches) - 1, caches), room_bytes, wanted)
        plan, has_buffers = self._plans[key]
        if plan.is_whole:
            return part
        # Another module than the one that is there as a whole, over the same weights.
        variant = component.model_copy(update={"parts_hash": f"{component.parts_hash} on {plan}"})
        hosts = host_names(component.tensors, plan)
        blocks = _host_blocks(component, plan, hosts) if has_buffers else BlockPlan((), 0, frozenset(), hosts)
        blocks = replace(blocks, shares=self._shares(component, plan, caches))
        working_bytes = caches[len(plan.on(0))]
        footprint = {
            **_streamed_footprint(variant, self._memory.size_of, blocks, working_bytes),
            **self._footprint_elsewhere(variant, blocks, caches[len(plan.on(None))] if plan.on(None) else 0),
        }
        return replace(
            part,
            component=variant,
            footprint=footprint,
            working_bytes=working_bytes,
            streamed=blocks,
            is_variant=True,
        )

    def _shares(self, component: Component, plan: LayerPlan, caches: Sequence[int]) -> dict[str, Share]:
        """Return the other devices' shares of a decoder, and its KV cache for those layers."""
        found = {}
        for place, device in enumerate(self._others, 1):
            if layers := plan.on(place):
                names = frozenset(name for name in component.tensors if layer_of(name) in layers)
                found[device] = Share(names, caches[len(layers)])
        return found

    def _footprint_elsewhere(self, component: Component, blocks: BlockPlan, host_bytes: int) -> dict[str, int]:
        """Return the bytes of a decoder on other devices and, for its KV cache, on the host, where it always fits."""
        memory = f"memory of {component.module_key}"
        found: dict[str, int] = {}
        for device, share in blocks.shares.items():
            refs = [component.tensors[name] for name in share.names]
            found |= {RemotePart(device, ref.sha256): self._memory.size_of(ref.nbytes) for ref in refs}
            found[RemotePart(device, memory)] = share.working_bytes
        if host_bytes:
            found[RemotePart(HOST, memory)] = min(host_bytes, beside_adapters(self._host_bytes or 0))
        return found


def _host_blocks(component: Component, plan: LayerPlan, hosts: frozenset[str]) -> BlockPlan:
    """Return the layers of the host as blocks that may come to the device through two buffers."""
    by_layer: dict[int, dict[str, int]] = {layer: {} for layer in plan.on(None)}
    for name in component.tensors:
        if name in hosts and (layer := layer_of(name)) is not None:
            by_layer[layer][name] = component.tensors[name].nbytes
    blocks = [block_of(f"layers.{layer}", sizes) for layer, sizes in by_layer.items()]
    return BlockPlan(blocks, max((block.nbytes for block in blocks), default=0), frozenset(), hosts)


def merged_parts(
    parts: Mapping[PartName, Part], merging: Merging, size_of: Callable[[int], int]
) -> dict[PartName, Part] | None:
    """Return the parts of a request with its LoRA merged, another module than the one beside it; None if it cannot be.

    Denoisers in float8 and packed ones are small because memory is short: their LoRAs stay as they are.
    """
    name = PartName(merging.adapter, is_adapter=True)
    lora, denoiser = parts.get(name), parts.get(PartName(merging.denoiser))
    if lora is None or denoiser is None:
        return None
    dtypes = {ref.dtype for ref in denoiser.component.tensors.values()}
    if denoiser.component.block_types or any(dtype.startswith("F8") for dtype in dtypes):
        return None
    item_bytes = max((ITEM_BYTES.get(dtype) or 0) for dtype in dtypes)
    sizes = _changed_elements(lora.component, merging.denoiser)
    merged_bytes = sum(size_of(count * item_bytes) for count in sizes)
    variant = lora.component.model_copy(
        update={"parts_hash": f"merged into {denoiser.component.module_key} as {merging.adapter}"}
    )
    footprint = {**lora.footprint, f"memory of {variant.module_key}": merged_bytes}
    merged = replace(
        lora, component=variant, footprint=footprint, working_bytes=lora.working_bytes + merged_bytes, is_variant=True
    )
    return {**parts, name: merged}


def _changed_elements(lora: Component, denoiser: str) -> list[int]:
    """Return the elements of each weight of the denoiser that a LoRA changes, as its own shapes tell."""
    layers: dict[str, dict[str, Sequence[int]]] = {}
    for name, ref in lora.tensors.items():
        with contextlib.suppress(EngineError):  # what is not read changes nothing
            layer, what = part_of(name)
            of, layer = component_of(layer)
            if of in (DENOISER, denoiser):
                layers.setdefault(layer, {})[what] = ref.shape
    found = [num_changed(shapes) for shapes in layers.values()]
    return [count for count in found if count]
