"""The Serve router of the deployments whose requests have places: a call goes to the replica that it names.

A handle's option `session_id` has the name, or the route of the call's texts, which leads to the replica that has them
(`cluster/records/text_routes.py`). Calls without one go the way of Serve's own router.

HAZARD: Serve pickles this module by value, so that every process has a copy of it: nothing can be shared through it.

Calls between replicas end when the other node falls silent (no power, a cut link): nobody closes a connection then.

gRPC's own pings would tell, but a server of Serve's takes more than two in five minutes for an attack and has no
setting for it (Ray 2.60), and gRPC for Python shows nobody its sockets. So they are looked for among this process's
files, and the kernel asks the other kernel: a process that computes, or is stopped, counts as there. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import Collection
from functools import partial
from typing import Any, Final

import grpc
from ray.exceptions import ActorDiedError, RayError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.request_router import FIFOMixin, LocalityMixin, RequestRouter

from cluster.ray_seam import handles, shims
from cluster.records.text_routes import TextCalls, is_route

__all__ = ["CLASS", "IDLE_S", "INTERVAL_S", "SILENT_S", "PlacedRouter", "end_with_peers"]

CLASS: Final = f"{__name__}:PlacedRouter"
FULL_PAUSE_S: Final = 0.05  # until a replica is asked again that held as much as Serve lets in
LOOK_TIMEOUT_S: Final = 5.0
CONNECTED_S: Final = 3.0  # within which a call has its connection, even if the first words for it are lost


class PlacedRouter(FIFOMixin, LocalityMixin, RequestRouter):
    """The router of one handle."""

    def __init__(self, *args: Any, deployment_id: Any, self_node_id: str | None = None, **kwargs: Any) -> None:
        shims.require(shims.ROUTER)
        handles.bound_connecting()
        super().__init__(*args, deployment_id=deployment_id, self_node_id=self_node_id, **kwargs)
        self._node_id = self_node_id
        self._elsewhere: dict[str, tuple[str, int]] = {}  # addresses of replicas on other nodes
        self._deployment = deployment_id.app_name, deployment_id.name
        self._by_name: dict[str, Any] = {}
        self._out_of_reach: set[str] = set()
        self._looking: dict[str, asyncio.Task[None]] = {}  # whether a replica is dead
        self._ending: set[asyncio.Task[None]] = set()
        self._connecting: asyncio.TimerHandle | None = None
        self._text_calls = TextCalls()
        self._routes: dict[tuple[str, str], list[str]] = {}  # under way, by request and replica

    def update_replicas(self, replicas: list[Any]) -> None:
        """Tell the watchers."""
        super().update_replicas(replicas)
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        self._out_of_reach &= self._by_name.keys()
        self._elsewhere = {name: where for name, where in self._elsewhere.items() if name in self._by_name}
        self._tell()

    def create_replica_wrapper(self, replica_info: Any) -> Any:
        """Remember where it takes calls."""
        if replica_info.node_id != self._node_id:
            self._elsewhere[replica_info.replica_id.unique_id] = replica_info.node_ip, replica_info.port
        return super().create_replica_wrapper(replica_info)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Tell the watchers, before Serve's controller knows."""
        super().on_replica_actor_died(replica_id)
        self._by_name.pop(replica_id.unique_id, None)
        self._tell()

    def on_replica_actor_unavailable(self, replica_id: Any) -> None:
        """Remember who did not answer until it does, and find out whether it is dead: a broken connection is all that
        gRPC says.
        """
        super().on_replica_actor_unavailable(replica_id)
        name = replica_id.unique_id
        self._out_of_reach.add(name)
        if name in self._by_name and name not in self._looking:
            self._looking[name] = asyncio.create_task(self._look_whether_dead(self._by_name[name]))

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Watch over calls by gRPC, of whose ends Serve tells nobody (Ray 2.60)."""
        super().on_request_routed(pending_request, replica_id, result)
        result.add_done_callback(partial(self._on_end, replica_id))

    def on_new_queue_len_info(self, replica_id: Any, num_ongoing_requests: int) -> None:
        """Forget that it was out of reach."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._out_of_reach.discard(replica_id.unique_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Count a call with texts as over. Serve tells of every replica that was chosen, however the call ended."""
        super().on_request_completed(replica_id, internal_request_id)
        key = internal_request_id, replica_id.unique_id
        if routes := self._routes.get(key):
            self._text_calls.end(routes.pop(), replica_id.unique_id)
            if not routes:
                del self._routes[key]

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> list[list[Any]]:
        """Return two random replicas, of this node where it has some: the one with less work gets the request."""
        near = list(self.apply_locality_routing(pending_request))
        chosen = random.sample(near, min(2, len(near)))
        return [[self.curr_replicas[replica_id] for replica_id in chosen]] if chosen else []

    async def _choose_replica_for_request(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        """Return the replica that the request names. Overrides what Serve's own CapacityQueueRouter does (Ray 2.60).

        A replica may hold as much as Serve lets in although it has places: segments and the texts of workers come
        beside the admission queue. It is asked again.

        Raises ReplicaUnavailableError when it is gone or out of reach, and while it is found out whether it is dead:
        the ingress asks another one.
        """
        if self._connecting is None and self._elsewhere:
            later = asyncio.get_running_loop().call_later
            self._connecting = later(CONNECTED_S / 10, self._end_with_peers, CONNECTED_S)
        name = pending_request.metadata.session_id
        if not name:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if is_route(name):
            return await self._choose_encoder(pending_request, is_retry=is_retry)
        if is_retry and name not in self._out_of_reach:
            await asyncio.sleep(FULL_PAUSE_S)
        replica = self._by_name.get(name)
        if replica is None or name in (self._out_of_reach if is_retry else self._looking.keys() & self._out_of_reach):
            raise ReplicaUnavailableError(name)
        return replica

    async def _choose_encoder(self, pending_request: Any, *, is_retry: bool) -> Any:
        """Return the replica that a request's texts go to. One that is full is asked again: it may compute them now.

        While it is found out whether a replica is dead, it gets no texts; without any replica, Serve waits for one.
        """
        if is_retry:
            await asyncio.sleep(FULL_PAUSE_S)
        doubtful = self._out_of_reach if is_retry else self._looking.keys() & self._out_of_reach
        names = self._by_name.keys() - doubtful
        if not names:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        request = pending_request.metadata
        name = self._text_calls.begin(request.session_id, names)
        self._routes.setdefault((request.internal_request_id, name), []).append(request.session_id)
        return self._by_name[name]

    def _end_with_peers(self, again_s: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        self._connecting = loop.call_later(again_s, self._end_with_peers) if again_s else None
        loop.run_in_executor(None, end_with_peers, set(self._elsewhere.values()))  # an ingress has thousands of files

    def _on_end(self, replica_id: Any, call: Any) -> None:
        if isinstance(call, grpc.aio.Call) and not call.cancelled():
            ending = asyncio.create_task(self._look_at_end(replica_id, call))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _look_at_end(self, replica_id: Any, call: Any) -> None:
        if await call.code() == grpc.StatusCode.UNAVAILABLE:
            self.on_replica_actor_unavailable(replica_id)

    async def _look_whether_dead(self, replica: Any) -> None:
        try:
            num_ongoing_requests = await replica.get_queue_len(deadline_s=LOOK_TIMEOUT_S)
            self.on_new_queue_len_info(replica.replica_id, num_ongoing_requests)
        except ActorDiedError:
            self.on_replica_actor_died(replica.replica_id)
        except RayError:  # Serve's controller will know
            pass
        finally:
            del self._looking[replica.replica_id.unique_id]

    def _tell(self) -> None:
        handles.tell(self._deployment, frozenset(self._by_name))


IDLE_S: Final = 4
INTERVAL_S: Final = 2
SILENT_S: Final = 10  # also for what was sent and not acknowledged: then there are no questions
_FILES: Final = "/proc/self/fd"


def end_with_peers(addresses: Collection[tuple[str, int]]) -> int:
    """Let this process's connections to these hosts and ports end `SILENT_S` after the last sign of the other side.

    Returns how many there are.
    """
    num_found = 0
    for name in os.listdir(_FILES) if addresses and os.path.isdir(_FILES) else ():
        with contextlib.suppress(OSError):  # closed just now, or not connected
            if os.readlink(f"{_FILES}/{name}").startswith("socket:") and _end_with_peer(int(name), addresses):
                num_found += 1
    return num_found


def _end_with_peer(file: int, addresses: Collection[tuple[str, int]]) -> bool:
    with socket.socket(fileno=os.dup(file)) as found:  # the options are the connection's, whichever file they come by
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return False
        host, port = found.getpeername()[:2]
        if (host.removeprefix("::ffff:"), port) not in addresses:
            return False
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENT_S - IDLE_S) // INTERVAL_S)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
        return True
