"""The Serve router of the deployments whose requests have places: a call goes to the replica that it names.

A handle's option `session_id` has the name. Calls without one, such as a worker's of the text encoders, go the way of
Serve's own router.

HAZARD: Serve pickles this module by value, so that every process has a copy of it: nothing can be shared through it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.exceptions import ReplicaUnavailableError

from deployments.services import replica_watch

__all__ = ["CLASS", "PlacedRouter"]

CLASS: Final = f"{__name__}:PlacedRouter"
FULL_PAUSE_S: Final = 0.05  # until a replica is asked again that held as much as Serve lets in


class PlacedRouter(PowerOfTwoChoicesRequestRouter):
    """The router of one handle."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_name: dict[str, Any] = {}
        self._out_of_reach: set[str] = set()

    def update_replicas(self, replicas: list[Any]) -> None:
        """Tell the watchers."""
        super().update_replicas(replicas)
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        self._out_of_reach &= self._by_name.keys()
        self._tell()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Tell the watchers, before Serve's controller knows."""
        super().on_replica_actor_died(replica_id)
        self._by_name.pop(replica_id.unique_id, None)
        self._tell()

    def on_replica_actor_unavailable(self, replica_id: Any) -> None:
        """Remember who did not answer until it does."""
        super().on_replica_actor_unavailable(replica_id)
        self._out_of_reach.add(replica_id.unique_id)

    def on_new_queue_len_info(self, replica_id: Any, num_ongoing_requests: int) -> None:
        """Forget that it was out of reach."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._out_of_reach.discard(replica_id.unique_id)

    async def _choose_replica_for_request(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        """Return the replica that the request names. Overrides what Serve's own CapacityQueueRouter does (Ray 2.60).

        A replica may hold as much as Serve lets in although it has places: segments and the texts of workers come
        beside the admission queue. It is asked again.

        Raises: ReplicaUnavailableError when it is gone or out of reach: the ingress asks another one.
        """
        name = pending_request.metadata.session_id
        if not name:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if is_retry and name not in self._out_of_reach:
            await asyncio.sleep(FULL_PAUSE_S)
        replica = self._by_name.get(name)
        if replica is None or (is_retry and name in self._out_of_reach):
            raise ReplicaUnavailableError(name)
        return replica

    def _tell(self) -> None:
        key = self._deployment_id.app_name, self._deployment_id.name
        replica_watch.tell(key, frozenset(self._by_name))
