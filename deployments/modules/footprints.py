"""Footprints of a replica's models: learned once per structure and size, beside the requests."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from deployments.engines.building.skeletons import blank_module
from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.rows import DEFAULT_BOUNDS, BatchBounds
from deployments.engines.graph.footprint import Footprint
from deployments.engines.graph.workspace import UNBOUNDED, Workspace
from deployments.engines.llm.engine_config import STEP_KIND
from deployments.modules.stock_parts import is_stock_part
from weights.formats.ip_adapter import count_tokens
from weights.formats.pipeline_parts import pipeline_variant
from weights.memory.forward_memory import ForwardMemory
from weights.records.manifest import Component, Manifest
from weights.residency.recent import Recent

if TYPE_CHECKING:
    from deployments.engines.diffusion.footprints import PipelineTwin
    from deployments.engines.diffusion.pipeline import AdapterShapes
    from deployments.engines.records.protocol import StockRequest
    from deployments.engines.stock.footprints import CallTwin
    from deployments.engines.text.footprints import TextFootprints

CLIP_TOKENS: Final = 77
MAX_STRUCTURES: Final = 8
MAX_SIZES: Final = 256  # of one structure

logger = logging.getLogger("atelier.replica")


@dataclass(slots=True, eq=False)
class _Known:
    """The footprints of one structure. `twin` is None until it is built, and where that failed."""

    footprints: dict[Hashable, Footprint] = field(default_factory=dict)
    twin: PipelineTwin | None = None
    is_hopeless: bool = False
    seen: set[tuple[int | str, ...]] = field(default_factory=set)  # height, width, tokens, and names of adapters
    least: dict[frozenset[str], int] = field(default_factory=dict)  # of the pipeline's own size, with these adapters
    call_twin: CallTwin | None = None  # of a stock pipeline
    calls: Recent[str, Mapping[str, int]] = field(default_factory=lambda: Recent(MAX_SIZES))  # of it, by `shape_of`


class FootprintBook:
    """The footprints of forwards on one device, by structure and kind. Thread-safe.

    The kinds of pipelines are those of `rows.workspace_kind` and `decode_kind`, those of text encoders `text_kind`.
    `memory` has the books in which the device's forwards take room, None where nobody counts it.
    """

    def __init__(self, device: str, bounds: BatchBounds = DEFAULT_BOUNDS) -> None:
        self.memory: ForwardMemory | None = None
        self.steps: dict[str, int] = {}  # by structure, what the largest step of a language model takes
        self._device = device  # by name: `sim` is no device of torch's before it is opened
        self._bounds = bounds
        self._lock = threading.Lock()
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._texts: OrderedDict[str, TextFootprints] = OrderedDict()

    def inside(self, nbytes: int) -> int:
        """Return the bytes of a forward that count against the budget: those that have no room beside it."""
        return 0 if self.memory is None else max(0, int(nbytes - self.memory.beside_bytes))

    def of(self, manifest: Manifest) -> dict[Hashable, Footprint]:
        """Return the footprints known of a pipeline's structure. Later ones are added to the same mapping."""
        return self._entry(manifest).footprints

    def of_text(self, component: Component, folder: Path) -> Workspace:
        """Return the room of the forwards of a text encoder, whose skeleton is in `folder`."""
        if self.memory is None:
            return UNBOUNDED
        return Workspace(self.memory, self._text(component, folder))

    def of_steps(self, component: Component) -> Workspace:
        """Return the room of the steps of a language model: that of the largest one, where it is known."""
        largest = self.steps.get(structure_of(component), 0)
        if self.memory is None or not largest:
            return UNBOUNDED
        return Workspace(self.memory, {STEP_KIND: Footprint(((1, largest),))})

    def _text(self, component: Component, folder: Path) -> TextFootprints:
        from deployments.engines.text.footprints import TextFootprints, make_text_twin

        with self._lock:
            new = TextFootprints(partial(make_text_twin, component, folder, torch.device(self._device)))
            found = self._texts.setdefault(structure_of(component), new)
            while len(self._texts) > MAX_STRUCTURES:
                self._texts.popitem(last=False)
            return found

    def knows(
        self, manifest: Manifest, height: int, width: int, num_tokens: int, adapters: Collection[str] = ()
    ) -> bool:
        """Return whether `learn` would have nothing to do."""
        known = self._entry(manifest)
        return known.is_hopeless or (height, width, num_tokens, *adapters) in known.seen

    def least_bytes(self, manifest: Manifest, component: Component, adapters: Collection[str] = ()) -> int:
        """Return the bytes of a component's forward, once `learn_defaults` has learned them: 0 before.

        It is that of one image of the pipeline's own size, of one text as long as an encoder reads, or of the largest
        step of a language model. With `adapters`, of which the component may be one, `learn_adapted` has learned it.
        """
        if component.library == "diffusers" or (adapters and manifest.kind == "diffusion"):
            least, beside = self._entry(manifest).least, set(adapters)
            return max(
                (most for names, most in least.items() if names <= beside and bool(names) == bool(beside)), default=0
            )
        if manifest.kind == "llm":
            return self.steps.get(structure_of(component), 0)
        found = self._texts.get(structure_of(component)) if _is_encoder(manifest, component) else None
        return found.least_bytes if found else 0

    def learn_defaults(self, manifest: Manifest, component: Component, folder: Path) -> None:
        """Learn what `least_bytes` tells of a component of a model, whose skeleton is in `folder`."""
        if component.library == "diffusers":
            self._learn_images(manifest, folder)
        elif _is_encoder(manifest, component):
            self._text(component, folder / component.folder).learn_default()

    def _learn_images(self, manifest: Manifest, folder: Path) -> None:
        known, plain = self._entry(manifest), frozenset[str]()
        if plain in known.least or (family := FAMILIES.get(manifest.class_name or "")) is None:
            return
        self.learn(manifest, folder, *_default_size(family, folder))
        known.least[plain] = max((one.bytes_of(1) for one in known.footprints.values()), default=0)

    def learn_adapted(self, manifest: Manifest, folder: Path, adapters: Mapping[str, tuple[Manifest, Path]]) -> None:
        """Learn what `least_bytes` tells of a pipeline with the ControlNets and IP-Adapters among these.

        Skeletons are in the folders. Only after `learn_defaults`, beside whose figure it stands. Takes up to seconds.
        """
        beside = {name: one for name, one in adapters.items() if one[0].kind in ("controlnet", "ip_adapter")}
        known, names = self._entry(manifest), frozenset(beside)
        if not (names and known.least) or (family := FAMILIES.get(manifest.class_name or "")) is None:
            return
        with self._lock:
            if known.is_hopeless or names in known.least or len(known.least) >= MAX_SIZES:
                return
            known.least[names] = 0
            with self._attempt(manifest, adapters):
                shapes = [(name, _blank_adapter(*one)) for name, one in beside.items()]
                twin = self._twin(manifest, folder)
                known.least[names] = twin.image_bytes(*_default_size(family, folder), shapes)

    def learn(
        self,
        manifest: Manifest,
        folder: Path,
        height: int,
        width: int,
        num_tokens: int,
        adapters: AdapterShapes = (),
    ) -> None:
        """Record forwards for images of that size, prompts of so many tokens, and these adapters. Takes up to seconds.

        What cannot be recorded (packed weights have kernels of their own) keeps to the bounds of the config, and the
        log says so once.
        """
        known, names = self._entry(manifest), [name for name, _ in adapters]
        with self._lock:
            if self.knows(manifest, height, width, num_tokens, names) or len(known.seen) >= MAX_SIZES:
                return
            with self._attempt(manifest, names):
                twin = self._twin(manifest, folder)
                known.footprints |= twin.footprints(height, width, num_tokens, self._bounds, adapters)
            known.seen.add((height, width, num_tokens, *names))

    def plan_call(
        self, manifest: Manifest, wanted: Callable[[Component], bool], folder: Path, request: StockRequest
    ) -> Mapping[str, int]:
        """Return `StockRequest.forward_bytes` of a request to a stock pipeline, of those modules that are `wanted`.

        Its skeleton is in `folder`. Rehearsed once for requests of the same shapes, which takes up to seconds. What
        cannot be recorded is left out, and the log says so once.
        """
        from deployments.engines.stock.footprints import shape_of, stretched

        known, shape = self._entry(manifest), shape_of(request)
        if shape not in known.calls and not known.is_hopeless:
            with self._attempt(manifest, ()):
                twin = self._call_twin(manifest, folder)
                known_before = set(twin.unplanned)
                known.calls.note(shape, twin.plan_call(stretched(request)))
                for name in twin.unplanned.keys() - known_before:
                    logger.info("the memory of %r (%s) is not planned: %s", manifest.model, name, twin.unplanned[name])
        names = {name for name, component in manifest.components.items() if wanted(component)}
        return {call: most for call, most in known.calls.get(shape, {}).items() if call.partition(".")[0] in names}

    def _call_twin(self, manifest: Manifest, folder: Path) -> CallTwin:
        from deployments.engines.stock.footprints import CallTwin

        known = self._entry(manifest)
        with self._lock:
            if known.call_twin is None:
                parts = {
                    name: one
                    for name, one in manifest.components.items()
                    if one.library == "diffusers" or is_stock_part(one)
                }
                known.call_twin = CallTwin(manifest.class_name or "", parts, folder, torch.device(self._device))
            return known.call_twin

    @contextlib.contextmanager
    def _attempt(self, manifest: Manifest, adapters: Collection[str]) -> Iterator[None]:
        """Say in the log what cannot be recorded within the block, and go on."""
        try:
            yield
        except Exception as error:  # of any operation of a model that fake tensors have no rule for
            self._entry(manifest).is_hopeless = not adapters  # else it may be the adapters'
            beside = f" with {', '.join(adapters)}" if adapters else ""
            logger.info("the memory of %r%s is not planned: %s", manifest.model, beside, error)

    def _twin(self, manifest: Manifest, folder: Path) -> PipelineTwin:
        from deployments.engines.diffusion.footprints import make_twin  # who never learns needs nothing of it

        known = self._entry(manifest)
        if known.twin is None:
            known.twin = make_twin(manifest, folder, torch.device(self._device))
        return known.twin

    def _entry(self, manifest: Manifest) -> _Known:
        key = tuple(sorted((name, part.structure_key) for name, part in manifest.components.items()))
        found = self._known.setdefault((manifest.class_name, key), _Known())
        while len(self._known) > MAX_STRUCTURES:
            self._known.popitem(last=False)
        return found


def _default_size(family: Family, folder: Path) -> tuple[int, int, int]:
    """Return height and width of an image of a pipeline's own size, and the tokens of a text as long as it reads."""
    uses = family.texts.encoders(None, "truncate")
    tokens = max((use.max_length or CLIP_TOKENS for use in uses), default=CLIP_TOKENS)
    width, height = family.defaults.sides(pipeline_variant(folder))
    return height, width, tokens


def _blank_adapter(manifest: Manifest, folder: Path) -> nn.Module | int:
    """Return `DenoisePipeline.adapter_shapes` of a ControlNet or an IP-Adapter, without its weights."""
    (component,) = manifest.components.values()
    if manifest.kind == "controlnet":
        return blank_module(component, folder / component.folder)
    return count_tokens({name: ref.shape for name, ref in component.tensors.items()})


def _is_encoder(manifest: Manifest, component: Component) -> bool:
    is_text = manifest.kind in ("diffusion", "embedding", "reranker", "classifier")
    return is_text and component.library == "transformers" and not is_stock_part(component)


def structure_of(component: Component) -> str:
    """Return the key of a component's structure."""
    return component.structure_key or component.module_key
