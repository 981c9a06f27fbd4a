"""The room of models by a cluster's config, and the models without room. Pure.

One arithmetic for `atelier check`, which knows models by their headers, and for the registry, which has them in its
store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cluster.keeper.budgets import budget_within_store
from configs.cluster import ClusterConfig, ModelReplicaConfig, WorkerConfig
from weights.memory.layer_plan import AUTO, DecoderSizes, GpuLayers, plan_layers
from weights.memory.needs import Needs
from weights.records.errors import BudgetExceeded, WeightsError
from weights.residency.sizes import shown_bytes


class Shortage(NamedTuple):
    """A reason why a model cannot run; `is_wish`: the config's wish for the places of its layers is the reason."""

    text: str
    is_wish: bool = False


@dataclass(frozen=True, slots=True)
class ServiceRoom:
    """The room of each replica of a service. `key` is the budget's in the config; `computes_layers`: also on devices.

    Layers of language models have `num_devices`, and the host where `has_host`; or each of `num_ranks` has a slice of
    all of them.
    """

    section: str
    budget_bytes: int
    key: str
    is_on_host: bool
    computes_layers: bool
    num_devices: int
    has_host: bool
    num_ranks: int = 1

    @classmethod
    def of(cls, section: str, settings: ModelReplicaConfig) -> ServiceRoom:
        """Return the room that a section of the config gives."""
        return cls(
            section,
            settings.weights_budget_bytes,
            f"{section}.{settings.weights_budget_key}",
            settings.device == "cpu",
            section == "worker" and settings.torch_device != "cpu",
            1 + len(settings.other_devices),
            settings.host_bytes is not None,
            settings.ranks.tensor if isinstance(settings, WorkerConfig) else 1,
        )


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes of models that fit a node at once, None where nobody knows, and the room of each service."""

    node_bytes: int | None
    services: tuple[ServiceRoom, ...]

    @classmethod
    def of(cls, config: ClusterConfig) -> Room:
        """Return the room of a config. The nodes of a Ray that others started have stores that it does not know."""
        node_bytes = config.store.node_budget_bytes
        if config.ray.address is None:
            node_bytes = budget_within_store(node_bytes, config.ray.object_store_bytes, "this")
        sections = ("text_encoder", config.text_encoder), ("worker", config.worker)
        return cls(node_bytes, tuple(ServiceRoom.of(*section) for section in sections))

    def shortages(self, model: str, needs: Needs, gpu_layers: GpuLayers = AUTO) -> Iterator[Shortage]:
        """Yield the shortages of a model that is alone in memory. Without any, a replica could serve it."""
        for service in self.services:
            decoder = needs.divided if service.num_ranks > 1 else needs.decoder
            if service.computes_layers and decoder is not None:
                yield from _layer_shortages(model, decoder, service, gpu_layers)
                continue
            needed = dict(needs.services.get(service.section, {}))
            if service.is_on_host:
                total_bytes, limit_bytes, name = sum(needed.values()), self.node_bytes, "store.node_budget_bytes"
            else:  # a denoiser that is larger comes block by block
                needed = {part: nbytes for part, nbytes in needed.items() if part not in needs.in_blocks}
                total_bytes, limit_bytes, name = max(needed.values(), default=0), service.budget_bytes, service.key
            if limit_bytes is not None and total_bytes > limit_bytes:
                parts = " and ".join(needed)
                yield Shortage(
                    f"{name} is {shown_bytes(limit_bytes)}; {parts} of {model!r} need {shown_bytes(total_bytes)}"
                )


def rank_bytes(decoder: DecoderSizes, num_ranks: int) -> int:
    """Return the bytes of weights of a language model that each of so many ranks has: its slices, and all else."""
    return decoder.rest_bytes + -(-sum(decoder.layers) // num_ranks)


def _layer_shortages(
    model: str, decoder: DecoderSizes, service: ServiceRoom, gpu_layers: GpuLayers
) -> Iterator[Shortage]:
    """Yield the reasons why the layers of a language model do not fit where they are wanted, without its KV cache."""
    if service.num_ranks > 1:
        needed = rank_bytes(decoder, service.num_ranks)
        if needed > service.budget_bytes:
            yield Shortage(
                f"{service.key} is {shown_bytes(service.budget_bytes)}; each of {service.num_ranks} ranks needs "
                f"{shown_bytes(needed)} of {model!r}"
            )
        return
    if gpu_layers == AUTO and decoder.rest_bytes + sum(decoder.layers) <= service.budget_bytes:
        return
    budgets = [service.budget_bytes] * service.num_devices
    try:
        plan_layers(decoder, budgets, gpu_layers, model, has_host=service.has_host)
    except WeightsError as error:
        where = f" ({service.key})" if isinstance(error, BudgetExceeded) else ""
        yield Shortage(f"{error}{where}", is_wish=gpu_layers != AUTO)
