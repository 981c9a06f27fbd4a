"""The Serve router of the deployments whose requests have places: a call goes to the replica that it names.

A handle's option `session_id` has the name. Calls without one, such as a worker's of the text encoders, go the way of
Serve's own router.

HAZARD: Serve pickles this module by value, so that every process has a copy of it: nothing can be shared through it.
"""

from __future__ import annotations

from typing import Any, Final

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.exceptions import ReplicaUnavailableError

from deployments.services import replica_watch

__all__ = ["CLASS", "PlacedRouter"]

CLASS: Final = f"{__name__}:PlacedRouter"


class PlacedRouter(PowerOfTwoChoicesRequestRouter):
    """The router of one handle."""

    def update_replicas(self, replicas: list[Any]) -> None:
        """Tell the watchers."""
        super().update_replicas(replicas)
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        self._tell()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Tell the watchers, before Serve's controller knows."""
        super().on_replica_actor_died(replica_id)
        self._by_name.pop(replica_id.unique_id, None)
        self._tell()

    async def _choose_replica_for_request(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        """Return the replica that the request names. Overrides what Serve's own CapacityQueueRouter does (Ray 2.60).

        Raises: ReplicaUnavailableError when it is gone, or has just not taken the request: the ingress asks again.
        """
        name = pending_request.metadata.session_id
        if not name:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        replica = self._by_name.get(name)
        if replica is None or is_retry:
            raise ReplicaUnavailableError(name)
        return replica

    def _tell(self) -> None:
        key = self._deployment_id.app_name, self._deployment_id.name
        replica_watch.tell(key, frozenset(self._by_name))
