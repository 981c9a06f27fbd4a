"""The settings that operators have made while the cluster ran. Lives on one event loop."""

from __future__ import annotations

import asyncio

from cluster.records.overrides import Overrides
from cluster.registry.registrations import KeptFile
from configs.admission import AdmissionConfig
from configs.batching import BatchingConfig
from configs.cluster import ClusterConfig


class RuntimeSettings:
    """Limits of replicas that start from now on, until the registry restarts; and orders by hand, kept in a file."""

    def __init__(self, overrides: KeptFile[Overrides]) -> None:
        self._overrides = overrides
        self._encoder_batching: BatchingConfig | None = None
        self._admission: AdmissionConfig | None = None

    def follow(self, before: ClusterConfig, after: ClusterConfig) -> None:
        """Remember limits that differ from the old config: replicas that start from now on use them."""
        if after.admission != before.admission:
            self._admission = after.admission
        if after.text_encoder.batching != before.text_encoder.batching:
            self._encoder_batching = after.text_encoder.batching

    async def set_encoder_batching(self, batching: BatchingConfig) -> None:
        """Set the dynamic batching of text encoders that start from now on. The config counts again after a restart."""
        self._encoder_batching = batching

    async def encoder_batching(self) -> BatchingConfig | None:
        """Return the dynamic batching that was set, None as long as it is the config's."""
        return self._encoder_batching

    async def set_admission(self, admission: AdmissionConfig) -> None:
        """Set the bounds and weights of admission queues that start from now on. As with batching, until a restart."""
        self._admission = admission

    async def admission(self) -> AdmissionConfig | None:
        """Return the admission settings that were set, None as long as they are the config's."""
        return self._admission

    async def set_overrides(self, overrides: Overrides) -> None:
        """Store operators' manual orders to the controller, also for the next registry. Raises OverrideRefused."""
        await asyncio.to_thread(self._overrides.save, overrides)

    async def overrides(self) -> Overrides:
        """Return the operators' orders over the controller's head."""
        return await asyncio.to_thread(self._overrides.read) or Overrides()
