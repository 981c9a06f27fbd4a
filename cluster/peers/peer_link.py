"""A node's link to the others: serves what it holds, tells the registry of it, asks it who has what.

Everything here is help that may fail: without the registry a node neither serves nor asks, and reads storage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import ray

from cluster.peers.fetch_queue import Located, Question
from cluster.peers.peer_client import PeerClient
from cluster.peers.peer_server import Lookup, PeerServer
from cluster.ray_calls import get
from weights.residency.claims import RENEW_S

ANSWER_TIMEOUT_S: Final = 2.0
RETRY_S: Final = 1.0
FULL_REPORT_S: Final = 10.0  # a registry that has lost what it knew knows it again after this
QUIET_S: Final = 5.0  # a registry that did not answer is not asked for so long

logger = logging.getLogger("atelier.peers")


class Directory(Protocol):
    """The registry, as a keeper needs it. Any exception means that it is of no help now."""

    def peer_secret(self) -> bytes: ...

    def locate(self, node_id: str, question: Question, load: int) -> Located: ...

    def renew_claims(self, node_id: str, ids: Sequence[str]) -> None: ...

    def report_residency(
        self, node_id: str, address: str | None, added: Sequence[str], removed: Sequence[str], full: bool, load: int
    ) -> None: ...


class RayDirectory:
    """The registry actor, found by its name when it is needed."""

    def __init__(self, name: str, namespace: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._name, self._namespace, self._timeout_s = name, namespace, timeout_s

    def peer_secret(self) -> bytes:
        return self._ask("peer_secret")

    def locate(self, node_id: str, question: Question, load: int) -> Located:
        return self._ask("locate", node_id, question, load)

    def renew_claims(self, node_id: str, ids: Sequence[str]) -> None:
        self._ask("renew_claims", node_id, list(ids))

    def report_residency(
        self, node_id: str, address: str | None, added: Sequence[str], removed: Sequence[str], full: bool, load: int
    ) -> None:
        self._ask("report_residency", node_id, address, list(added), list(removed), full, load)

    def _ask(self, method: str, *arguments: Any) -> Any:
        registry = ray.get_actor(self._name, namespace=self._namespace)
        return get(getattr(registry, method).remote(*arguments), self._timeout_s)


class PeerLink:
    """Starts at once, in a thread of its own; until the registry has told the secret there is no client.

    `lookup` and `resident_ids` say what is here; they are never called from within `changed`.
    """

    def __init__(
        self,
        directory: Directory,
        node_id: str,
        host: str,
        lookup: Lookup,
        resident_ids: Callable[[], list[str]],
        *,
        full_report_s: float = FULL_REPORT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._node_id = node_id
        self._host = host
        self._lookup = lookup
        self._resident_ids = resident_ids
        self._full_report_s = full_report_s
        self._clock = clock
        self._lock = threading.Lock()
        self._news: dict[str, bool] = {}  # by id: is it here now
        self._claimed: set[str] = set()  # to read from storage for all
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._ends: tuple[PeerServer, PeerClient] | None = None
        self._quiet_until_s = self._full_since_s = self._renewed_s = -float("inf")
        self._thread = threading.Thread(target=self._run, name="peer-link", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str | None:
        return str(self._ends[0].address) if self._ends else None

    @property
    def served_bytes(self) -> int:
        return self._ends[0].stats().served_bytes if self._ends else 0

    def client(self) -> PeerClient | None:
        return self._ends[1] if self._ends else None

    def changed(self, added: Sequence[str], removed: Sequence[str]) -> None:
        """Tell the registry soon. Never waits."""
        with self._lock:
            self._news |= dict.fromkeys(removed, False) | dict.fromkeys(added, True)
            self._claimed.difference_update(added, removed)
        self._wake.set()

    def locate(self, question: Question) -> Located | None:
        """What the registry answers; None when it cannot be asked. Claims are renewed until `changed` tells of them."""
        if not self._ends or self._clock() < self._quiet_until_s:
            return None
        try:
            found = self._directory.locate(self._node_id, question, self._ends[0].active_transfers)
        except Exception as error:
            logger.info("nobody says which node has an extent: %s", error)
            self._quiet_until_s = self._clock() + QUIET_S
            return None
        if found.claimed:
            with self._lock:
                self._claimed.update(found.claimed)
            self._wake.set()
        return found

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._thread.join()
        if self._ends:
            server, client = self._ends
            client.close()
            server.close()

    def _run(self) -> None:
        wait_s = 0.0
        while not self._closed.is_set():
            self._wake.wait(wait_s)
            self._wake.clear()
            if self._closed.is_set():
                return
            try:
                self._ends = self._ends or self._open()
                wait_s = RENEW_S if self._report() else self._full_report_s
            except Exception as error:
                logger.debug("the registry does not answer: %s", error)
                self._full_since_s = -float("inf")  # what it knows is unknown
                self._closed.wait(RETRY_S)
                wait_s = 0.0

    def _open(self) -> tuple[PeerServer, PeerClient]:
        secret = self._directory.peer_secret()
        return PeerServer(self._lookup, secret, host=self._host), PeerClient(secret)

    def _report(self) -> bool:
        """Whether there are claims, which must be renewed soon."""
        with self._lock:
            news, self._news = self._news, {}
            claimed = list(self._claimed)
        now_s = self._clock()
        full = now_s - self._full_since_s >= self._full_report_s
        # After the news were taken: what changes from here on is news again.
        added = self._resident_ids() if full else [id_ for id_, here in news.items() if here]
        removed = [id_ for id_, here in news.items() if not here]
        if self._ends and (full or added or removed):
            load = self._ends[0].active_transfers
            self._directory.report_residency(self._node_id, self.address, added, removed, full, load)
        if full:
            self._full_since_s = now_s
        if claimed and now_s - self._renewed_s >= RENEW_S:
            self._directory.renew_claims(self._node_id, claimed)
            self._renewed_s = now_s
        return bool(claimed)
