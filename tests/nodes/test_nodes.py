"""Requests go on while nodes, links and the head's actors fail, come and go."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from kit.waiting import wait_until
from nodes.three_nodes import NAMES, PORT, Load, ThreeNodes

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

PARTITION_S = 20.0
SMALL = {"num_cpus": 0.03}


def disturbed(
    cluster: ThreeNodes, what: str, disturb: Callable[[], object], without: str = "", after: int = 20
) -> list[object]:
    """Ask HAProxy of all nodes but one before, during and after the disturbance: nothing may be lost or wrong.

    Prints a row of figures, and returns the answers of before.
    """
    expected = cluster.answers(cluster.url())
    urls = [cluster.url(name) for name in NAMES if name != without]
    with Load(cluster.network.switch, urls, expected) as load:
        load.more()
        disturb()
        load.more(after)
    seen = load.figures
    print(f"| {what} | {seen.requests} | {len(seen.lost)} | {len(seen.wrong)} | {seen.gap_s:.1f} |", *seen.lost)
    assert (seen.lost, seen.wrong) == ([], [])
    return expected


def back(cluster: ThreeNodes, what: str, name: str) -> None:
    """Let another node take the place of one that is gone: it gets a worker, and weights from its peers."""

    def join() -> None:
        cluster.join(name)
        cluster.wait_whole()

    expected = disturbed(cluster, what, join, without=name)
    wait_until(lambda: cluster.asked(f"{cluster.url(name)}/healthz"), f"HAProxy on {name}")
    assert cluster.answers(cluster.url(name)) == expected


@pytest.mark.parametrize("actor", ["WeightRegistry", "Controller", "NodeKeeper", "ServeController"])
def test_an_actor_of_the_head_is_killed(cluster: ThreeNodes, actor: str) -> None:
    def kill() -> None:
        (victim, *_) = cluster.head.processes(f"ray::{actor}")
        victim.kill()
        wait_until(lambda: any(one != victim for one in cluster.head.processes(f"ray::{actor}")), "another one")

    disturbed(cluster, f"{actor} killed", kill)


def test_two_clusters_on_one_ray(cluster: ThreeNodes) -> None:
    """The second one comes, answers as the first does, and goes."""
    url = f"{cluster.url()}/other"
    answers: list[object] = []

    def come_and_go() -> None:
        http = {"host": "0.0.0.0", "port": PORT, "route_prefix": "/other", "haproxy": {"replica_host": "0.0.0.0"}}
        cluster.up("other", http=http, ingress=SMALL, text_encoder=SMALL, worker=SMALL)
        answers.extend(cluster.answers(url))
        assert cluster.down("other") == "cluster 'other' is down\n"

    expected = disturbed(cluster, "second cluster comes and goes", come_and_go)
    assert answers == expected
    assert cluster.asked(f"{url}/healthz") == {}


def test_a_changed_config_is_applied(cluster: ThreeNodes) -> None:
    """`tests/e2e/test_applied.py` has a change of each kind, on one node."""

    def apply() -> None:
        assert "models, adapters and limits are those of the config" in cluster.apply(admission={"max_waiting": 77})

    try:
        disturbed(cluster, "limits applied", apply)
    finally:
        cluster.apply()
    assert "nothing to change" in cluster.apply()


def test_links_take_50_ms_and_lose_a_hundredth(cluster: ThreeNodes) -> None:
    def slow() -> None:
        for node in cluster.nodes.values():
            cluster.network.plug(node, delay_s=0.05, loss=0.01)

    try:
        disturbed(cluster, "links of 50 ms and 1 % loss", slow, after=60)
    finally:
        for node in cluster.nodes.values():
            cluster.network.plug(node)


def test_a_node_that_is_told_to_end_drains(cluster: ThreeNodes) -> None:
    name = cluster.fullest()
    disturbed(cluster, "node ended by SIGTERM", lambda: cluster.end_by_sigterm(name), without=name)
    assert "did not finish draining" not in cluster.ray_log  # its words for a node on which something stays
    back(cluster, "node joined", name)


@pytest.mark.parametrize("is_silent", [False, True], ids=["processes", "power"])
def test_a_node_dies(cluster: ThreeNodes, is_silent: bool) -> None:
    """The kernel of a node whose processes are killed still ends their connections; one without power says nothing."""
    name = cluster.fullest()

    def kill() -> None:
        if is_silent:
            cluster.network.cut(cluster.nodes[name])
        cluster.nodes[name].kill()

    disturbed(cluster, f"node killed{', silently' * is_silent}", kill, without=name, after=60)
    back(cluster, "another node in its place", name)


def test_a_node_is_cut_off_for_20_s(cluster: ThreeNodes) -> None:
    """Ray may have given it up meanwhile, and ends its processes then: whoever watches the node starts Ray again."""
    name = cluster.fullest()

    def cut() -> None:
        cluster.network.cut(cluster.nodes[name])
        time.sleep(PARTITION_S)
        cluster.network.heal(cluster.nodes[name])

    disturbed(cluster, "node cut off for 20 s", cut, without=name)
    wait_until(lambda: not cluster.runs_ray(name) or cluster.is_whole(), "a node that is back or gave up")
    if not cluster.runs_ray(name):
        back(cluster, "another node in its place", name)
