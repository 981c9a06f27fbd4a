"""The budget of a replica's module cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.cluster import ModelReplicaConfig


@dataclass(frozen=True, slots=True)
class ModuleBudget:
    """The bytes that weights may take on a device. `name` is what refusals call the budget.

    `others` are devices with the same budget each, which have layers of language models only; `host_bytes` bounds the
    KV caches of layers that the host computes, None where it computes none.
    """

    nbytes: int
    device: str = "cpu"
    name: str = "this replica's budget"
    others: Sequence[str] = ()
    host_bytes: int | None = 0

    @property
    def is_host(self) -> bool:
        """Tell whether it is the host's memory: there is no other device to leave layers off."""
        return self.device in ("cpu", "cpu-private")

    @classmethod
    def of(cls, settings: ModelReplicaConfig, section: str) -> ModuleBudget:
        """Return the budget that a section of the config gives each replica."""
        name = f"{section}.{settings.weights_budget_key}"
        return cls(settings.weights_budget_bytes, settings.device, name, settings.other_devices, settings.host_bytes)
