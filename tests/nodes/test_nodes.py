"""Requests go on while nodes, links and the head's actors fail, come and go."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from kit.waiting import wait_until
from nodes.three_nodes import (
    CLOCKS_OFF_S,
    NAMES,
    PORT,
    QUESTIONS,
    WHOLE_S,
    Load,
    ThreeNodes,
    demo_fields,
    fields_of,
    posted,
)

from infra.bench.idle import SETTLE_S, Usage, idle_figures, print_usage, usage_by_name

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

REST_S: Final = 60.0
MOST_AT_REST: Final = {"head": (0.35, 2.5), "second": (0.15, 1.7), "third": (0.15, 1.7)}  # of a core, and GiB
PARTITION_S = 20.0
SMALL = {"num_cpus": 0.03}
NOTICED_S: Final = 10.0  # Serve looks this often whether a replica lives
# Of a node's 3 CPUs a worker has 2: two of these have no room there. All of the rest together take less than 1, so two
# nodes have room for one.
OVER_HALF: Final = 0.51
SPARE: Final = "spare"
LISTENING: Final = (sys.executable, "-c", f"import socket; socket.create_server(('0.0.0.0', {PORT})).accept()")
DEADLINE_S: Final = 3.0
CHANGED: Final = (
    "models.second-adder",
    "models.adder.description",
    "pipelines.sum-to-digit",
    "http.web",
    "access.max_concurrent",
    "admission.max_waiting",
    "admission.max_overtakes",
    "ingress.limits.max_images",
    "text_encoder.num_replicas",
    "text_encoder.cache_bytes",
    "text_encoder.batching.max_queue_delay_us",
    "worker.kv_cache_bytes",
)


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
    wait_until(lambda: cluster.asked(f"{cluster.url(name)}/healthz"), f"HAProxy on {name}", WHOLE_S)
    assert cluster.answers(cluster.url(name)) == expected


def test_nodes_at_rest(cluster: ThreeNodes) -> None:
    """Print the resources of each node's processes as `infra.bench idle` does, which has the targets.

    What is asserted lies above what they take, for other work on the machine. Pages of files that the nodes have in
    common, Python's and torch's, count by a third for each.
    """
    cluster.answers(cluster.url())
    time.sleep(SETTLE_S)
    before, start_s = usage_by_node(cluster), time.monotonic()
    time.sleep(REST_S)
    after, wall_s = usage_by_node(cluster), time.monotonic() - start_s
    total = {}
    for name in NAMES:
        figures = idle_figures(before[name], after[name], wall_s)
        print_usage(f"{name} at rest", figures)
        total[name] = figures["rows"][-1]
    for name, (share, size) in MOST_AT_REST.items():
        assert total[name]["share"] < share, name
        assert total[name]["own_bytes"] < size * 2**30, name


def usage_by_node(cluster: ThreeNodes) -> dict[str, dict[str, Usage]]:
    return {name: usage_by_name(cluster.nodes[name].processes()) for name in NAMES}


@pytest.mark.parametrize("actor", ["WeightRegistry", "Controller", "NodeKeeper", "ServeController"])
def test_an_actor_of_the_head_is_killed(cluster: ThreeNodes, actor: str) -> None:
    def kill() -> None:
        (victim, *_) = cluster.head.processes(f"ray::{actor}")
        victim.kill()
        wait_until(lambda: any(one != victim for one in cluster.head.processes(f"ray::{actor}")), "another one")

    disturbed(cluster, f"{actor} killed", kill)


@pytest.mark.skipif(not CLOCKS_OFF_S, reason="a wall clock that is off needs a C compiler")
def test_a_deadline_is_kept_while_the_clocks_of_nodes_are_5_s_apart(cluster: ThreeNodes) -> None:
    expected = cluster.answers(cluster.url())
    for name, off_s in CLOCKS_OFF_S.items():
        check_clock(cluster, name, off_s)
    for name in NAMES * 3:
        assert cluster.answers(cluster.url(name), DEADLINE_S) == expected

    def expired(name: str) -> tuple[int, float]:
        start_s = time.monotonic()
        return posted(cluster.url(name), *QUESTIONS[0], DEADLINE_S).status_code, time.monotonic() - start_s

    with (
        stopped_workers(cluster),
        ThreadPoolExecutor(3 * len(NAMES), initializer=cluster.network.switch.enter_network) as pool,
    ):
        ended = [*pool.map(expired, NAMES * 3)]
    assert {status for status, _ in ended} == {504}
    assert [took_s for _, took_s in ended if not DEADLINE_S <= took_s < DEADLINE_S + 4] == []
    assert cluster.answers(cluster.url()) == expected


def check_clock(cluster: ThreeNodes, name: str, off_s: int) -> None:
    """Fail unless the processes of the node that look at a request's time have a clock that is off by so much."""
    before_s = time.time()
    shown_s = float(cluster.nodes[name].run("date", "+%s.%N"))
    assert before_s <= shown_s - off_s <= time.time()
    proxies = [one for one in cluster.nodes[name].processes() if one.name() == "haproxy"]
    assert proxies
    for one in (*proxies, *cluster.replicas(name)):
        assert f"wall_clock_{off_s}.so" in Path(f"/proc/{one.pid}/maps").read_text(), one


@contextlib.contextmanager
def stopped_workers(cluster: ThreeNodes) -> Iterator[None]:
    """Let no worker do anything for the length of the block."""
    workers = [one for name in NAMES for one in cluster.replicas(name, "worker")]
    try:
        for one in workers:
            one.suspend()
        yield
    finally:
        for one in workers:
            one.resume()


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


def test_links_take_50_ms_and_lose_a_hundredth(cluster: ThreeNodes) -> None:
    def slow() -> None:
        for name in NAMES:
            cluster.network.plug(cluster.nodes[name], delay_s=0.05, loss=0.01)

    try:
        disturbed(cluster, "links of 50 ms and 1 % loss", slow, after=60)
    finally:
        for name in NAMES:
            cluster.network.plug(cluster.nodes[name])


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
    wait_until(lambda: not cluster.runs_ray(name) or cluster.is_whole(), "a node that is back or gave up", WHOLE_S)
    if not cluster.runs_ray(name):
        back(cluster, "another node in its place", name)


def test_a_rank_on_another_node_is_cut_off(cluster: ThreeNodes) -> None:
    """No node has room for two ranks of a worker. One is cut off: an exchange meets its bound, and all goes on once
    there is a worker again.
    """
    http = {"host": "0.0.0.0", "port": PORT, "route_prefix": "/split", "haproxy": {"replica_host": "0.0.0.0"}}
    few = {"num_replicas": len(NAMES), "num_cpus": 0.01}
    ranks = {"tensor": 2, "strategy": "PACK", "timeout_s": 5}
    begun_s = time.monotonic()
    cluster.up("split", http=http, ingress=few, text_encoder=few, worker={"num_cpus": OVER_HALF, "ranks": ranks})
    start_s = time.monotonic() - begun_s
    url = f"{cluster.url()}/split"
    expected = cluster.answers(url)
    (first,) = places_of(cluster, "ray::ServeReplica:split:worker")
    (second,) = places_of(cluster, "ray::RankFollower")
    assert first != second
    victim = cluster.nodes[first if second == cluster.head.name else second]
    with Load(cluster.network.switch, [url], expected) as load:
        load.more()
        cluster.network.cut(victim)
        time.sleep(PARTITION_S)
        cluster.network.heal(victim)
        load.more(40)
    seen = load.figures
    print(f"| rank cut off for 20 s | {seen.requests} | {len(seen.lost)} | {len(seen.wrong)} | {seen.gap_s:.1f} |")
    assert (seen.lost, seen.wrong) == ([], [])
    assert seen.gap_s < PARTITION_S + NOTICED_S + start_s
    assert cluster.down("split") == "cluster 'split' is down\n"
    wait_until(
        lambda: not cluster.runs_ray(victim.name) or cluster.is_whole(), "a node that is back or gave up", WHOLE_S
    )
    if not cluster.runs_ray(victim.name):
        back(cluster, "another node in its place", victim.name)


def places_of(cluster: ThreeNodes, title: str) -> set[str]:
    """Return the nodes on which processes of a title run."""
    return {name for name in NAMES if cluster.nodes[name].processes(title)}


def test_a_changed_config_is_applied(cluster: ThreeNodes) -> None:
    """Values of each kind at once, and some back; a node that joins has the room for successors, and drains after."""
    first = pids_of_replicas(cluster)
    join_beside_a_server(cluster)
    said: list[str] = []
    disturbed(cluster, "twelve values applied", lambda: said.append(cluster.apply(changed_fields())))
    assert [key for key in CHANGED if key not in said[0]] == []
    wait_until(lambda: first.isdisjoint(pids_of_replicas(cluster)), "successors of all", WHOLE_S)
    kept = changed_fields() | {"models": fields_of("studio")["models"]}
    kept["text_encoder"]["num_replicas"] = len(NAMES)
    disturbed(cluster, "some of them taken back", lambda: said.append(cluster.apply(kept)))
    assert "nothing to change" in cluster.apply(kept)
    disturbed(cluster, "the node that had room drains", lambda: cluster.end_by_sigterm(SPARE))
    cluster.wait_whole()


def pids_of_replicas(cluster: ThreeNodes) -> set[int]:
    return {one.pid for name in NAMES for one in cluster.replicas(name)}


def join_beside_a_server(cluster: ThreeNodes) -> None:
    """Let the spare node join with its port taken: it is named until what has it ends."""
    cluster.join(SPARE, *LISTENING)
    node = cluster.nodes[SPARE]

    def problems() -> list[str] | None:
        found: list[str] | None = cluster.asked(f"{cluster.url()}/admin/cluster").get("node_problems")
        return found

    (problem,) = wait_until(problems, "a node that is named", WHOLE_S)
    assert f"node {node.address} cannot listen on 0.0.0.0:{PORT} (Address already in use)" in problem
    (server,) = node.processes(" ".join(LISTENING[:2]))
    server.kill()
    wait_until(lambda: problems() == [], "a node that has no problem", WHOLE_S)


def changed_fields() -> dict[str, Any]:
    """Return the first cluster's config with a change of each key in CHANGED."""
    fields = fields_of("studio")
    adder = next(model for model in fields["models"] if model["id"] == "adder")
    fields["models"].append(adder | {"id": "second-adder"})
    adder["description"] = "adds"
    fields["http"]["web"] = False
    fields["pipelines"] = demo_fields()["pipelines"][:1]
    fields["access"] = {"max_concurrent": 1000}
    fields["admission"] = {"max_waiting": 77, "max_overtakes": 7}
    fields["ingress"]["limits"] = {"max_images": 9}
    fields["text_encoder"] |= {"num_replicas": len(NAMES) + 1, "cache_bytes": "32 MiB"}
    fields["text_encoder"]["batching"] = {"max_queue_delay_us": 1000}
    fields["worker"]["kv_cache_bytes"] = "17 MiB"
    return fields
