"""A node reports its extents soon, and in full now and then, and nothing waits for the registry."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash
from kit.waiting import wait_until
from unit.cluster.peers.served import Served

from cluster.peers.client import PeerClient
from cluster.peers.link import QUIET_S, PeerLink, RegistryClient
from cluster.peers.protocol import Located, PeerAddress, Question, ResidencyReport
from weights.records.manifest import ExtentRef

SECRET = random.randbytes(32)
QUESTION = Question(("a",), max_claims=8)


class FakeRegistry(RegistryClient):
    """Keeps what is reported; fails as long as it is told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.reports: list[tuple[str | None, list[str], list[str], bool]] = []
        self.renewed: list[list[str]] = []
        self.num_located = 0
        self.num_asked = 0

    def peer_secret(self) -> bytes:
        self.num_asked += 1
        if self.error:
            raise self.error
        return SECRET

    def locate(self, node_id: str, question: Question, load: int) -> Located:
        self.num_located += 1
        if self.error:
            raise self.error
        assert (node_id, load) == ("node", 0)
        return Located(claimed=question.ids)

    def report_residency(self, node_id: str, report: ResidencyReport) -> None:
        if self.error:
            raise self.error
        assert (node_id, report.load) == ("node", 0)
        if report.reading:
            self.renewed.append(sorted(report.reading))
        if report.added or report.removed or report.is_full:
            self.reports.append((str(report.address), sorted(report.added), sorted(report.removed), report.is_full))


class Node:
    """Extents that are here, and the link that tells of them."""

    def __init__(self, directory: FakeRegistry) -> None:
        self.views: dict[str, Any] = {}
        self.now_s = 1000.0
        self.link = PeerLink(directory, "node", "127.0.0.1", clock=lambda: self.now_s)
        self.link.start(Served(self.views))

    def put(self, id_: str) -> None:
        self.views[id_] = np.frombuffer(random.randbytes(1000), np.uint8)
        self.link.changed([id_], [])


@pytest.fixture
def directory() -> FakeRegistry:
    return FakeRegistry()


@pytest.fixture
def node(directory: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr("cluster.peers.link.RETRY_S", 0.01)
    node = Node(directory)
    yield node
    node.link.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("peer-")]


def known(directory: FakeRegistry) -> set[str]:
    """Return the directory's view of the reports."""
    found: set[str] = set()
    for _, added, removed, full in directory.reports:
        found = set(added) if full else (found - set(removed)) | set(added)
    return found


def test_the_first_report_is_in_full_and_the_next_ones_are_news(node: Node, directory: FakeRegistry) -> None:
    wait_until(lambda: bool(directory.reports))
    assert directory.reports == [(node.link.address, [], [], True)]
    node.put("a")
    wait_until(lambda: known(directory) == {"a"})
    node.views.clear()
    node.link.changed([], ["a"])
    wait_until(lambda: known(directory) == set())
    assert [report[1:] for report in directory.reports[1:]] == [(["a"], [], False), ([], ["a"], False)]


def test_a_registry_that_was_away_hears_everything_again(node: Node, directory: FakeRegistry) -> None:
    node.put("a")
    wait_until(lambda: known(directory) == {"a"})
    directory.error = ConnectionError("the registry is gone")
    node.put("b")
    threading.Event().wait(0.05)
    directory.reports.clear()  # a new one, that knows nothing
    directory.error = None
    wait_until(lambda: known(directory) == {"a", "b"})
    assert directory.reports[0][3]


def test_now_and_then_everything_is_told_anyway(node: Node, directory: FakeRegistry) -> None:
    wait_until(lambda: bool(directory.reports))
    node.put("a")
    wait_until(lambda: len(directory.reports) == 2)
    node.now_s += 10.0
    node.put("b")
    wait_until(lambda: len(directory.reports) == 3)
    assert directory.reports[-1][1:] == (["a", "b"], [], True)


def test_resident_extents_are_served_to_a_client_with_the_secret(node: Node, directory: FakeRegistry) -> None:
    node.put("a")
    wait_until(lambda: node.link.address is not None)
    host, _, port = str(node.link.address).rpartition(":")
    data = node.views["a"]
    extent = ExtentRef(id="a", pack="p", offset=0, nbytes=1000, checksum=xxhash.xxh3_128_hexdigest(data))
    out = np.empty(1000, np.uint8)
    with PeerClient(SECRET) as client:
        client.fetch_extent([PeerAddress(host, int(port))], extent, lambda: out)
    assert out.tobytes() == data.tobytes()
    wait_until(lambda: node.link.served_bytes == 1000)


def test_a_registry_that_does_not_answer_is_left_alone_for_a_while(node: Node, directory: FakeRegistry) -> None:
    wait_until(lambda: node.link.address is not None)
    assert node.link.locate(QUESTION) == Located(claimed=("a",))
    directory.error = ConnectionError("the registry is gone")
    assert [node.link.locate(QUESTION) for _ in range(3)] == [None, None, None]
    assert directory.num_located == 2
    directory.error = None
    node.now_s += QUIET_S
    assert node.link.locate(QUESTION) == Located(claimed=("a",))


def test_claims_are_renewed_until_the_extent_is_resident_or_failed(
    node: Node, directory: FakeRegistry, monkeypatch: Any
) -> None:
    monkeypatch.setattr("cluster.peers.link.RENEW_S", 0.02)
    wait_until(lambda: node.link.address is not None)
    node.link.locate(Question(("a", "b"), 8))

    def renewed(ids: list[str]) -> bool:
        node.now_s += 0.02
        return directory.renewed[-1:] == [ids]

    wait_until(lambda: renewed(["a", "b"]))
    node.put("a")
    wait_until(lambda: renewed(["b"]))
    node.link.changed([], ["b"])
    wait_until(lambda: known(directory) == {"a"})
    num_renewed = len(directory.renewed)
    node.now_s += 1.0
    node.put("c")
    wait_until(lambda: known(directory) == {"a", "c"})
    assert len(directory.renewed) == num_renewed


def test_what_is_wanted_while_the_link_opens_waits_for_it(directory: FakeRegistry, monkeypatch: Any) -> None:
    """Else a node that starts reads what another one is reading."""
    monkeypatch.setattr("cluster.peers.link.RETRY_S", 0.01)
    directory.error = ConnectionError("the registry is starting")
    node = Node(directory)
    answers: list[Located | None] = []
    asking = threading.Thread(target=lambda: answers.append(node.link.locate(QUESTION)))
    asking.start()
    assert not answers
    directory.error = None
    asking.join(timeout=30)
    assert answers == [Located(claimed=("a",))]
    node.link.close()


def test_before_the_registry_answers_there_is_no_link(directory: FakeRegistry, monkeypatch: Any) -> None:
    monkeypatch.setattr("cluster.peers.link.RETRY_S", 0.01)
    monkeypatch.setattr("cluster.peers.link.OPEN_WITHIN_S", 0.05)
    directory.error = ConnectionError("no registry yet")
    begun_s = time.monotonic()
    node = Node(directory)
    assert (node.link.client(), node.link.address, node.link.served_bytes) == (None, None, 0)
    assert node.link.locate(QUESTION) is None
    num_asked = directory.num_asked
    assert 1 <= num_asked <= 2 + 2 * (time.monotonic() - begun_s) / 0.01, "with a pause before each time but the first"
    directory.error = None
    wait_until(lambda: node.link.client() is not None)
    node.link.close()
