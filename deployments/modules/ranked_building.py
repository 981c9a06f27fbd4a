"""Builders of a replica of several ranks: rank 0 builds what requests want, and the others their parts of it, by order.

A language model's matrices are divided among the ranks; of a denoiser and a VAE each has all. What they compute of them
are rows of a family's forwards and tiles of its images, or the calls of a pipeline that diffusers' own code runs and
the tiles of its videos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch

from configs.cluster import WorkerConfig
from configs.ranks import RanksConfig
from deployments.engines.building.build import IMPORT_LOCK
from deployments.engines.building.skeletons import blank_module
from deployments.engines.diffusion.families import FAMILIES, family_of
from deployments.engines.diffusion.pipeline import create_pipeline
from deployments.engines.diffusion.ranked_tiles import TILED_CLASSES, VIDEO_CLASSES, TilesFollower
from deployments.engines.llm.engine import step_follower
from deployments.engines.llm.models.stored_slices import copied_bytes, stored_slices
from deployments.engines.nn.batch_invariant import make_batch_invariant
from deployments.engines.nn.forwards import make_half_quick, make_quick
from deployments.engines.ranks.following import Follower, RankChannel
from deployments.engines.ranks.group import RankGroup
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.records.protocol import EngineError
from deployments.engines.stock.known import is_stock_class
from deployments.engines.stock.ranked_calls import DENOISERS, CallsFollower, computes_calls
from deployments.modules.builder import BuildOrder
from deployments.modules.loading import ComponentBuilder, batch_bounds, is_language_model
from weights.records.manifest import Component
from weights.residency.recent import Recent

ROWS, CALLS, STEPS, TILES = "rows", "calls", "steps", "tiles"  # what ranks compute of a part
MAX_PARTS: Final = 64  # components whose slices are known: of 1,000 tensors each has about 2 MB


class Peers(Protocol):
    """The other ranks of a replica, which build their parts of what rank 0 builds."""

    @property
    def group(self) -> RankGroup:
        """The group in which all of them compute."""

    def building(self, order: BuildOrder) -> AbstractContextManager[int]:
        """Have them build by the order during the body, and give the number that names it. Raises what one raises."""

    def release(self, number: int) -> None:
        """Have them let go of it."""


def layout_of(ranks: RanksConfig) -> RankLayout:
    """Return the layout that a config asks for."""
    return RankLayout(ranks.cfg, ranks.sequence, ranks.tensor)


class RankBuilder(ComponentBuilder):
    """The builder of any rank: it knows its own slices, and keeps all that ranks share on its device."""

    def __init__(self, settings: WorkerConfig, rank: int) -> None:
        super().__init__(settings)
        self._ranks = settings.ranks
        self._place = layout_of(settings.ranks).place(rank)
        self._own: Recent[str, tuple[Component, Component]] = Recent(MAX_PARTS)  # by module key, with what it is of

    def own_part(self, component: Component, skeleton: Path) -> Component:
        """Return the component with the slices that this rank has of a language model's matrices: all that it reads."""
        if not self._is_divided(component):
            return component
        known = self._own.get(component.module_key)
        if known is None or known[0] is not component:  # equal weights may lie elsewhere by now
            known = component, component.sliced(self._slices(component, skeleton))
            self._own.note(component.module_key, known)
        return known[1]

    def _slices(self, component: Component, skeleton: Path) -> Mapping[str, tuple[int, int, int]]:
        dtypes = {name: ref.dtype for name, ref in component.tensors.items()}
        try:
            return stored_slices(skeleton / component.folder, dtypes, self._place.tensor, self._ranks.tensor)
        except EngineError:  # told by whoever builds it
            return {}

    def copied_bytes(self, component: Component, skeleton: Path) -> int:
        """Return `ComponentBuilder.copied_bytes`. Raises EngineError for what ranks cannot divide."""
        sizes = {name: ref.nbytes for name, ref in component.tensors.items()}
        return (
            copied_bytes(skeleton / component.folder, sizes, self._ranks.tensor) if self._is_divided(component) else 0
        )

    def can_stream(self, component: Component) -> bool:
        """Return whether its blocks may come one after the other: not where each rank computes with it."""
        return super().can_stream(component) and not self._shares_rows

    def layer_caches(self, component: Component, skeleton: Path) -> Sequence[int] | None:
        """Return `ComponentBuilder.layer_caches`; None for what ranks divide, whose layers are not apart."""
        return None if self._is_divided(component) else super().layer_caches(component, skeleton)

    @property
    def _shares_rows(self) -> bool:
        """True where several ranks compute the forwards of a denoiser."""
        return self._ranks.cfg * self._ranks.sequence > 1

    def _is_divided(self, component: Component) -> bool:
        return self._ranks.tensor > 1 and is_language_model(component)


class _Shared(NamedTuple):
    """A thing that rank 0 has built and the others have parts of: the number that they know it by, and a channel."""

    thing: Any  # kept, since it is found by its id
    number: int
    channel: RankChannel
    kind: str
    nbytes: int  # of rank 0's own part


class LeadingBuilder(RankBuilder):
    """The builder of rank 0, which has its `peers` build with it."""

    def __init__(self, settings: WorkerConfig, peers: Peers) -> None:
        super().__init__(settings, 0)
        self._peers = peers
        self._shared: dict[int, _Shared] = {}  # what they have parts of, by id

    def build(self, order: BuildOrder, skeleton: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the thing that runs, of which the other ranks build their parts where all compute with it."""
        component, kind = order.component, self._kind_of(order)
        if kind is None:
            return self(component, skeleton, tensors)
        if is_language_model(component):
            order = replace(order, kv_cache_bytes=self.kv_cache_bytes(component, skeleton))
        with self._peers.building(order) as number:
            channel = RankChannel(self._peers.group, str(number))
            if is_language_model(component):
                thing: Any = self.build_engine(component, skeleton, tensors, channel)
            else:
                thing = self(component, skeleton, tensors)
        self._shared[id(thing)] = _Shared(thing, number, channel, kind, self.own_part(component, skeleton).nbytes)
        return thing

    def retire(self, thing: Any) -> None:
        """Take back what was built here and is not used any more, on all ranks."""
        if (shared := self._shared.pop(id(thing), None)) is not None:
            self._peers.release(shared.number)
        super().retire(thing)

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of weights of rank 0's parts of what all ranks compute."""
        return sum(shared.nbytes for shared in [*self._shared.values()])

    def channel_of(self, thing: Any, kind: str) -> RankChannel | None:
        """Return the way to the other ranks' parts of what was built here, where they compute that of it; else None.

        Pipelines of a family and others may have a denoiser in common: the ranks know it as that of the first one.
        """
        found = self._shared.get(id(thing))
        return found.channel if found is not None and found.kind == kind else None

    def _kind_of(self, order: BuildOrder) -> str | None:
        """Return the work on a component that all ranks share; None for one that rank 0 has alone."""
        component, class_name = order.component, order.class_name
        if is_language_model(component):
            return STEPS if self._is_divided(component) else None
        if not self._shares_rows:
            return None
        if class_name in FAMILIES:
            if component.name == "vae":
                return TILES if component.class_name in TILED_CLASSES else None
            is_denoiser = order.vae is not None and component.name == family_of(class_name).denoiser_name
            return ROWS if is_denoiser else None
        if component.name == "vae":
            return TILES if component.class_name in VIDEO_CLASSES else None
        ranks = self._ranks
        is_known = computes_calls(component.class_name or "", ranks.cfg, ranks.sequence)
        return CALLS if is_known and component.name in DENOISERS else None


class FollowingBuilder(RankBuilder):
    """The builder of another rank, in its `group`."""

    def __init__(self, settings: WorkerConfig, group: RankGroup) -> None:
        super().__init__(settings, group.rank)
        self._group = group

    def build_part(self, order: BuildOrder, skeleton: Path, tensors: Mapping[str, torch.Tensor]) -> Follower:
        """Return the function that computes this rank's part of a component, as rank 0 says. Raises EngineError."""
        component = order.component
        if is_language_model(component):
            config = replace(self.engine_config(component, skeleton), kv_cache_bytes=order.kv_cache_bytes)
            with IMPORT_LOCK:
                return step_follower(skeleton / component.folder, tensors, config, self._group)
        if component.name == "vae":
            vae = self(component, skeleton, tensors)
            if is_stock_class(order.class_name):  # as rank 0's
                make_half_quick(vae)
            else:
                make_batch_invariant(vae)
                make_quick(vae)
            return TilesFollower(self._group, vae)
        if is_stock_class(order.class_name):
            denoiser = self(component, skeleton, tensors)
            make_half_quick(denoiser)
            return CallsFollower(self._group, denoiser)
        assert order.vae is not None
        modules = {
            component.name: self(component, skeleton, tensors),
            order.vae.name: blank_module(order.vae, skeleton / order.vae.folder),  # it decodes nothing
        }
        device, bounds = self._settings.torch_device, batch_bounds(self._settings)
        return create_pipeline(order.class_name, skeleton, modules, device=device, bounds=bounds).follower(self._group)
