"""A node's link to the other nodes: serves its extents, reports them to the registry, asks the registry for peers.

All of this is help that may fail: without the registry a node neither serves nor asks, and reads storage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import ray

from cluster.peers.client import PeerClient
from cluster.peers.protocol import RENEW_S, Located, Question, ResidencyReport
from cluster.peers.server import PeerServer, ServedMemory
from cluster.process.ray_calls import get

ANSWER_TIMEOUT_S: Final = 2.0
RETRY_S: Final = 1.0
_FULL_REPORT_S: Final = 10.0  # a registry that lost its map has it again after this
QUIET_S: Final = 5.0  # a registry that did not answer is not asked for this long
OPEN_WITHIN_S: Final = 5.0  # earlier requests, such as models to preload, wait: other nodes may be reading them

logger = logging.getLogger("atelier.peers")


class RegistryClient:
    """A keeper's side of the registry actor, which is looked up by name for each call.

    Each method raises the registry's own error, or Ray's while it is gone or silent for `timeout_s`.
    """

    def __init__(self, name: str, namespace: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._name, self._namespace, self._timeout_s = name, namespace, timeout_s

    def peer_secret(self) -> bytes:
        """Return the secret by which the cluster's keepers know each other."""
        return self._call("peer_secret")

    def locate(self, node_id: str, question: Question, load: int) -> Located:
        """Return the nodes that have the extents; `load` is the number that this node is sending."""
        return self._call("locate", node_id, question, load)

    def report_residency(self, node_id: str, report: ResidencyReport) -> None:
        """Tell the registry what the node holds and reads."""
        self._call("report_residency", node_id, report)

    def _call(self, method: str, *arguments: Any) -> Any:
        registry = ray.get_actor(self._name, namespace=self._namespace)
        return get(getattr(registry, method).remote(*arguments), self._timeout_s)


class PeerLink:
    """A node's peer server, its peer client, and the thread that reports to the registry.

    There is no server and no client before `start` and the registry's secret.
    """

    def __init__(
        self,
        registry: RegistryClient,
        node_id: str,
        host: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._node_id = node_id
        self._host = host
        self._clock = clock
        self._lock = threading.Lock()
        self._changes: dict[str, bool] = {}  # changes to report: by id, is it resident now
        self._claimed: set[str] = set()  # this node reads them from storage, for all
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._ends: tuple[PeerServer, PeerClient] | None = None
        self._opened = threading.Event()
        self._open_by_s = -float("inf")
        self._quiet_until_s = -float("inf")
        self._full_since_s = -float("inf")
        self._renewed_s = -float("inf")
        self._thread: threading.Thread | None = None

    def start(self, memory: ServedMemory) -> None:
        """Serve and report the memory's extents. The memory is never called from within `changed`."""
        self._open_by_s = self._clock() + OPEN_WITHIN_S
        self._thread = threading.Thread(target=self._report_until_closed, args=(memory,), name="peer-link", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str | None:
        """The peer server's "host:port", None while it is not open."""
        return str(self._ends[0].address) if self._ends else None

    @property
    def served_bytes(self) -> int:
        """Bytes sent to other nodes so far."""
        return self._ends[0].stats().served_bytes if self._ends else 0

    def client(self) -> PeerClient | None:
        """Return the client, None before the registry's secret is here."""
        return self._ends[1] if self._ends else None

    def changed(self, added: Sequence[str], removed: Sequence[str]) -> None:
        """Report these changes to the registry soon. Never blocks."""
        with self._lock:
            self._changes |= dict.fromkeys(removed, False) | dict.fromkeys(added, True)
            self._claimed.difference_update(added, removed)
        self._wake.set()

    def locate(self, question: Question) -> Located | None:
        """Return the registry's answer, None when it cannot be asked. Claims are renewed until `changed` names them.

        Blocks while the link opens, for `OPEN_WITHIN_S` from its start at most.
        """
        self._opened.wait(max(self._open_by_s - self._clock(), 0.0))
        if not self._ends or self._clock() < self._quiet_until_s:
            return None
        try:
            found = self._registry.locate(self._node_id, question, self._ends[0].active_transfers)
        except Exception as error:
            logger.info("the registry does not say which node has an extent: %s", error)
            self._quiet_until_s = self._clock() + QUIET_S
            return None
        if found.claimed:
            with self._lock:
                self._claimed.update(found.claimed)
            self._wake.set()
        return found

    def close(self) -> None:
        """Stop reporting, and close client and server."""
        self._closed.set()
        self._opened.set()
        self._wake.set()
        if self._thread:
            self._thread.join()
        if self._ends:
            server, client = self._ends
            client.close()
            server.close()

    def _report_until_closed(self, memory: ServedMemory) -> None:
        wait_s = 0.0
        while not self._closed.is_set():
            self._wake.wait(wait_s)
            self._wake.clear()
            if self._closed.is_set():
                return
            try:
                self._ends = self._ends or self._open(memory)
                self._opened.set()
                wait_s = RENEW_S if self._report(memory) else _FULL_REPORT_S
            except Exception as error:
                logger.debug("the registry does not answer: %s", error)
                self._full_since_s = -float("inf")  # it may have lost its map: the next report is a full one
                self._closed.wait(RETRY_S)
                wait_s = 0.0

    def _open(self, memory: ServedMemory) -> tuple[PeerServer, PeerClient]:
        secret = self._registry.peer_secret()
        return PeerServer(memory, secret, host=self._host), PeerClient(secret)

    def _report(self, memory: ServedMemory) -> bool:
        """Report changes. Return True while there are claims, which must be renewed soon."""
        with self._lock:
            changes, self._changes = self._changes, {}
            claimed = tuple(self._claimed)
        now_s = self._clock()
        is_full = now_s - self._full_since_s >= _FULL_REPORT_S
        is_renewal = bool(claimed) and now_s - self._renewed_s >= RENEW_S
        # Read after the changes were taken: every later one is reported again.
        added = memory.resident_ids() if is_full else [id_ for id_, is_here in changes.items() if is_here]
        removed = [id_ for id_, is_here in changes.items() if not is_here]
        if self._ends and (is_full or is_renewal or added or removed):
            server = self._ends[0]
            report = ResidencyReport(server.address, added, removed, is_full, server.active_transfers, claimed)
            self._registry.report_residency(self._node_id, report)
            self._renewed_s = now_s
        if is_full:
            self._full_since_s = now_s
        return bool(claimed)
