"""Many nodes load one model at once: storage is read once, and the time grows like the logarithm of their number.

Simulated, under a virtual clock; see `simulated_start`.
"""

from __future__ import annotations

import functools
import math

import pytest
from kit.drawing import seeds
from unit.cluster.peers.simulated_start import Flow, SimulatedStart

from cluster.peers.sources import MAX_WAIT_S
from cluster.registry.extent_locations import CLAIM_S, SLOW_S

MAX_STORAGE_RATIO = 1.05


def started(num_nodes: int, num_extents: int, seed: int = 1, **options: float) -> SimulatedStart:
    cluster = SimulatedStart(num_nodes, num_extents, seed=seed, **options)  # type: ignore[arg-type]
    cluster.want(list(cluster.nodes.values()))
    return cluster


def rounds(cluster: SimulatedStart) -> float:
    """Until the last node has everything, in units of one extent over an idle link."""
    return cluster.finish_s / (cluster.extent_bytes / cluster.node(0).down)


def everybody_has_everything(cluster: SimulatedStart) -> bool:
    return all(len(node.has) == len(cluster.ids) for node in cluster.nodes.values() if node.is_alive)


@functools.cache
def undisturbed_s() -> float:
    cluster = started(32, 40, seed=0)
    cluster.run()
    return cluster.finish_s


def test_256_nodes_read_storage_once() -> None:
    cluster = started(256, 16)
    cluster.run()
    assert everybody_has_everything(cluster)
    assert cluster.storage_ratio <= MAX_STORAGE_RATIO
    # Not much longer than one node takes alone for all of it, and few questions for so many extents.
    alone = started(1, 16)
    alone.run()
    assert cluster.finish_s < 6 * alone.finish_s
    assert cluster.num_questions < 256 * 16


@pytest.mark.drawn
@pytest.mark.parametrize("num_extents", [1, 8])
def test_the_rounds_grow_like_the_logarithm_of_the_number_of_nodes(num_extents: int) -> None:
    """Each doubling adds no more than a few rounds; one node after the other would add as many as there are nodes."""
    taken = {}
    for num_nodes in (2, 4, 16, 64, 256):
        cluster = started(num_nodes, num_extents)
        cluster.run()
        assert cluster.storage_ratio <= MAX_STORAGE_RATIO
        taken[num_nodes] = rounds(cluster)
    assert all(taken[n] <= taken[2] + 6 * math.log2(n / 2) for n in taken)
    assert taken[256] < 256 * num_extents / 4


@pytest.mark.drawn
@pytest.mark.parametrize("storage_gbps", [0.2, 1.25, 10.0])
def test_storage_is_spared_whatever_its_speed(storage_gbps: float) -> None:
    cluster = started(32, 40, storage_gbps=storage_gbps)
    cluster.run()
    assert everybody_has_everything(cluster)
    assert cluster.storage_ratio <= MAX_STORAGE_RATIO


def test_a_cluster_that_has_measured_its_storage_as_fast_as_a_link_reads_it_once_all_the_same() -> None:
    cluster = SimulatedStart(32, 40, seed=2)
    for node in cluster.nodes.values():
        node.queue.sources.storage = node.queue.sources.storage.observe(10**9, 10**9 / node.down)
    cluster.want(list(cluster.nodes.values()))
    cluster.run()
    assert cluster.storage_ratio <= MAX_STORAGE_RATIO


def test_peers_that_die_in_the_middle_of_a_transfer_are_replaced_by_others() -> None:
    cluster = started(32, 40, seed=0)

    def kill_one() -> None:
        giving = [node for node in cluster.nodes.values() if node.out]
        cluster.kill(cluster.chance.choice(giving))

    for share in (0.5, 0.6, 0.7, 0.8):
        cluster.at(share * undisturbed_s(), kill_one)
    cluster.run()
    assert sum(not node.is_alive for node in cluster.nodes.values()) == 4
    assert everybody_has_everything(cluster)
    assert cluster.storage_ratio <= MAX_STORAGE_RATIO
    assert cluster.finish_s < 2 * undisturbed_s()


def test_one_very_slow_peer_delays_only_itself() -> None:
    """Extents that it alone has read are read once more: nobody waits for its minutes."""
    cluster = SimulatedStart(64, 40, seed=3)
    cluster.node(5).up /= 1000
    cluster.want(list(cluster.nodes.values()))
    cluster.run()
    assert cluster.storage_ratio <= MAX_STORAGE_RATIO
    assert cluster.finish_s < undisturbed_s() + 5.0


def test_when_the_reader_of_an_extent_dies_another_takes_over_soon() -> None:
    cluster = started(32, 40, seed=0)
    num_lost = 0

    def kill_one() -> None:
        nonlocal num_lost
        dying = cluster.chance.choice(list(cluster.reading)).target
        num_lost = sum(flow.target is dying for flow in cluster.reading)
        cluster.kill(dying)

    cluster.at(0.3, kill_one)
    cluster.run()
    assert num_lost
    assert everybody_has_everything(cluster)
    # What the dead node had asked storage for counts as read.
    assert cluster.storage_bytes - num_lost * cluster.extent_bytes <= MAX_STORAGE_RATIO * cluster.model_bytes
    assert cluster.finish_s < undisturbed_s() + CLAIM_S + 4 * MAX_WAIT_S


@pytest.mark.drawn
@pytest.mark.parametrize(("slow_s", "num_more"), [(0.6 * SLOW_S, 0), (20 * SLOW_S, 1)])
def test_a_slow_disk_keeps_its_claim_and_a_very_slow_one_gets_company(slow_s: float, num_more: int) -> None:
    cluster = started(16, 40)
    slow: list[Flow] = []

    def slow_down() -> None:
        flow = cluster.chance.choice(list(cluster.reading))
        flow.target.read_bytes_per_s = cluster.extent_bytes / slow_s
        slow.extend(found for found in cluster.reading if found.target is flow.target)
        cluster._change_rates(flow)

    cluster.at(0.1, slow_down)
    cluster.run()
    others = [node.done_s or math.inf for node in cluster.nodes.values() if node is not slow[0].target]
    assert max(others) < min(slow_s, SLOW_S) + undisturbed_s()
    assert cluster.storage_bytes == cluster.model_bytes + num_more * len(slow) * cluster.extent_bytes


def test_nodes_that_join_late_take_nothing_from_storage() -> None:
    cluster = SimulatedStart(48, 40, seed=4)
    nodes = list(cluster.nodes.values())
    early, late, latest = nodes[:24], nodes[24:40], nodes[40:]
    cluster.want(early)
    cluster.at(1.0, lambda: cluster.want(late))
    cluster.at(20.0, lambda: cluster.want(latest))
    for node in late + latest:
        node.wanted = len(cluster.ids)  # so that the run goes on until they have it
    cluster.run()
    assert everybody_has_everything(cluster)
    assert cluster.storage_ratio <= MAX_STORAGE_RATIO
    assert max(node.done_s or math.inf for node in latest) < 20.0 + 5.0


@seeds(50)
def test_no_node_gives_more_at_once_than_it_may(seed: int) -> None:
    cluster = started(24, 12, seed, max_transfers=2)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, *(len(node.out) for node in cluster.nodes.values()))
        cluster.at(cluster.now_s + 0.01, look)

    look()
    cluster.run()
    assert most == 2
