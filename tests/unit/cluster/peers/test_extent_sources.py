"""Which source is expected to be fastest, and that one read of storage is enough for a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.peers.extent_sources import (
    ASSUMED_GBPS,
    HALF_LIFE_BYTES,
    BandwidthEstimate,
    ComingOffer,
    FromPeers,
    FromStorage,
    PeerOffer,
    WaitForPeer,
    choose_source,
    plan_fetch,
)
from cluster.peers.peer_protocol import PeerAddress

GB = 10**9
UNKNOWN = BandwidthEstimate()

rates = st.floats(0.01, 100)
offers = st.builds(
    lambda index, gbps, active: peer(f"n{index}", gbps, active),
    st.integers(0, 99),
    st.none() | rates,
    st.integers(0, 8),
)


def measured(gbps: float) -> BandwidthEstimate:
    return UNKNOWN.observe(GB, 1 / gbps)


def peer(node: str, gbps: float | None, active: int = 0) -> PeerOffer:
    return PeerOffer(PeerAddress(node, 1), node, gbps, active)


def coming(node: str, gbps: float | None, left_s: float, num_waiting: int = 0) -> ComingOffer:
    return ComingOffer(PeerAddress(node, 1), node, gbps, left_s, num_waiting)


def addresses(*nodes: str) -> tuple[PeerAddress, ...]:
    return tuple(PeerAddress(node, 1) for node in nodes)


class TestBandwidthEstimate:
    def test_knows_nothing_before_the_first_transfer(self) -> None:
        assert UNKNOWN.gbps is None

    def test_the_first_transfer_is_the_estimate(self) -> None:
        assert UNKNOWN.observe(3 * GB, 2.0).gbps == pytest.approx(1.5)

    def test_what_took_no_time_or_moved_nothing_says_nothing(self) -> None:
        known = measured(2)
        for nbytes, seconds in [(0, 1.0), (-1, 1.0), (GB, 0.0), (GB, -1.0), (GB, math.inf), (GB, math.nan)]:
            assert known.observe(nbytes, seconds) == known

    @given(st.lists(st.tuples(st.integers(1, 4 * GB), st.floats(1e-3, 100)), min_size=1, max_size=20))
    def test_every_transfer_weighs_by_its_bytes_and_fades_by_the_bytes_after_it(
        self, transfers: list[tuple[int, float]]
    ) -> None:
        estimate = UNKNOWN
        for nbytes, seconds in transfers:
            estimate = estimate.observe(nbytes, seconds)
        weights = [
            2 ** -(sum(nbytes for nbytes, _ in transfers[index + 1 :]) / HALF_LIFE_BYTES)
            for index in range(len(transfers))
        ]
        total_bytes = sum(weight * nbytes for weight, (nbytes, _) in zip(weights, transfers, strict=True))
        total_s = sum(weight * seconds for weight, (_, seconds) in zip(weights, transfers, strict=True))
        assert estimate.gbps == pytest.approx(total_bytes / total_s / 1e9)

    def test_follows_a_change_within_a_few_half_lives(self) -> None:
        estimate = measured(10)
        for _ in range(20):
            estimate = estimate.observe(HALF_LIFE_BYTES // 4, HALF_LIFE_BYTES / 4 / 1e9)
        assert estimate.gbps == pytest.approx(1, rel=0.05)

    def test_a_small_transfer_that_was_all_latency_hardly_counts(self) -> None:
        estimate = UNKNOWN.observe(10_000, 0.01).observe(256 * 2**20, 256 * 2**20 / 2e9)
        assert estimate.gbps == pytest.approx(2, rel=0.1)

    def test_a_shared_transfer_is_counted_as_if_it_had_been_alone(self) -> None:
        assert UNKNOWN.observe(GB, 4.0, num_sharing=4).gbps == pytest.approx(1)


class TestChooseSource:
    def test_storage_when_nobody_else_has_it(self) -> None:
        assert choose_source(2 * GB, measured(1), []) == FromStorage(pytest.approx(2))

    def test_the_faster_one(self) -> None:
        assert choose_source(GB, measured(2), [peer("a", 1)]) == FromStorage(pytest.approx(0.5))
        plan = choose_source(GB, measured(2), [peer("a", 4)])
        assert plan == FromPeers(addresses("a"), pytest.approx(0.5), pytest.approx(0.25))

    def test_storage_only_if_it_is_faster(self) -> None:
        assert isinstance(choose_source(GB, measured(2), [peer("a", measured(2).gbps)]), FromPeers)

    def test_storage_is_shared_by_its_readers(self) -> None:
        assert isinstance(choose_source(GB, measured(4), [peer("a", 2.1)], storage_readers=0), FromStorage)
        assert isinstance(choose_source(GB, measured(4), [peer("a", 2.1)], storage_readers=1), FromPeers)

    def test_a_busy_peer_is_shared_by_its_transfers(self) -> None:
        plan = choose_source(GB, measured(1), [peer("busy", 4, active=2), peer("idle", 2)])
        assert plan == FromPeers(addresses("idle", "busy"), pytest.approx(0.25), pytest.approx(0.5))
        assert isinstance(choose_source(GB, measured(1), [peer("busy", 4, active=4)]), FromStorage)

    def test_who_is_slower_than_storage_is_no_fallback(self) -> None:
        plan = choose_source(GB, measured(2), [peer("slow", 1), peer("fast", 4), peer("fair", 3)])
        assert isinstance(plan, FromPeers)
        assert plan.addresses == addresses("fast", "fair")

    def test_an_unknown_peer_is_tried_by_one_at_a_time(self) -> None:
        assert isinstance(choose_source(GB, measured(3), [peer("a", None)]), FromPeers)
        assert isinstance(choose_source(GB, measured(3), [peer("a", None, active=1)]), FromStorage)

    def test_an_unknown_peer_comes_after_an_equal_known_one_and_before_a_busy_one(self) -> None:
        plan = choose_source(GB, measured(1), [peer("a", None), peer("b", 3), peer("c", 3, active=1)])
        assert isinstance(plan, FromPeers)
        assert plan.addresses == addresses("b", "a", "c")

    def test_unknown_storage_is_tried_when_the_known_peers_are_slow(self) -> None:
        assert isinstance(choose_source(GB, UNKNOWN, [peer("a", 0.18)]), FromStorage)
        plan = choose_source(GB, UNKNOWN, [peer("a", 2 * ASSUMED_GBPS)])
        assert plan == FromPeers(addresses("a"), 0.0, pytest.approx(0.5))

    @given(rates, st.lists(offers, max_size=8), st.integers(0, 8), st.randoms())
    def test_the_plan_is_the_minimum_whatever_the_order(
        self, storage_gbps: float, peers: list[PeerOffer], storage_readers: int, random: object
    ) -> None:
        peers = list({found.node: found for found in peers}.values())
        storage = measured(storage_gbps)
        plan = choose_source(GB, storage, peers, storage_readers)
        best = max([ASSUMED_GBPS, storage.gbps or 0.0, *(found.gbps or 0.0 for found in peers)])
        times_s = {found.address: (1 + found.active_transfers) / (found.gbps or best) for found in peers}
        storage_s = (1 + storage_readers) / storage_gbps
        assert plan.expected_s == pytest.approx(min([storage_s, *times_s.values()]))
        if isinstance(plan, FromPeers):
            assert [times_s[address] for address in plan.addresses] == pytest.approx(
                sorted(time_s for time_s in times_s.values() if time_s <= storage_s * (1 + 1e-9))
            )
        random.shuffle(peers)  # type: ignore[attr-defined]
        assert choose_source(GB, storage, peers, storage_readers) == plan

    def test_an_extent_without_bytes_and_a_peer_without_bandwidth(self) -> None:
        assert isinstance(choose_source(0, measured(1), [peer("a", 1)]), FromPeers)
        assert isinstance(choose_source(GB, measured(1), [peer("a", 1e-300)]), FromStorage)


class TestPlanFetch:
    def test_the_first_node_reads_storage_and_the_second_waits_for_it(self) -> None:
        assert plan_fetch(GB, UNKNOWN, []) == FromStorage(pytest.approx(1))
        plan = plan_fetch(GB, UNKNOWN, [], [coming("a", None, left_s=1)], storage_readers=1)
        assert plan == WaitForPeer("a", max_wait_s=pytest.approx(3), expected_s=pytest.approx(2))

    def test_a_slow_link_is_not_worth_waiting_for(self) -> None:
        plan = plan_fetch(GB, measured(1), [], [coming("a", 0.2, left_s=1)], storage_readers=1)
        assert plan == FromStorage(pytest.approx(2))

    def test_who_is_done_sooner_is_waited_for(self) -> None:
        plan = plan_fetch(GB, measured(1), [], [coming("a", 2, 1.0), coming("b", 2, 0.2)], storage_readers=2)
        assert isinstance(plan, WaitForPeer)
        assert plan.node == "b"

    def test_a_peer_that_has_it_goes_before_one_that_will(self) -> None:
        plan = plan_fetch(GB, measured(1), [peer("a", 4)], [coming("b", 4, left_s=0.5)])
        assert isinstance(plan, FromPeers)

    def test_a_busy_peer_goes_after_one_that_will_be_free(self) -> None:
        plan = plan_fetch(GB, measured(1), [peer("a", 4, active=3)], [coming("b", 4, left_s=0.1)])
        assert isinstance(plan, WaitForPeer)

    @pytest.mark.parametrize("num_nodes", [2, 3, 17, 64])
    @pytest.mark.parametrize("link_gbps", [2.0, 8.0])
    def test_a_cluster_reads_storage_once_and_doubles_the_copies_in_every_round(
        self, num_nodes: int, link_gbps: float
    ) -> None:
        cluster = SimulatedCluster(num_nodes, storage_gbps=1.0, link_gbps=link_gbps)
        cluster.run()
        assert cluster.num_storage_reads == 1
        assert cluster.now_s == pytest.approx(1 + math.ceil(math.log2(num_nodes)) / link_gbps)

    @pytest.mark.parametrize("num_nodes", [2, 3, 17, 64])
    def test_storage_as_fast_as_a_link_is_one_more_source(self, num_nodes: int) -> None:
        cluster = SimulatedCluster(num_nodes, storage_gbps=1.0, link_gbps=1.0)
        cluster.run()
        assert cluster.num_storage_reads <= 1 + math.log2(num_nodes)
        assert cluster.now_s <= 1.001 + math.ceil(math.log2(num_nodes))

    @pytest.mark.parametrize("num_nodes", [2, 5, 16])
    def test_slow_links_never_make_it_slower_than_everybody_reading_storage(self, num_nodes: int) -> None:
        cluster = SimulatedCluster(num_nodes, storage_gbps=1.0, link_gbps=0.1)
        cluster.run()
        assert cluster.now_s <= num_nodes * 1.001


@dataclass
class Flow:
    source: str  # a node, or "" for storage
    left_gb: float = 1.0


@dataclass
class SimulatedCluster:
    """Every node wants the same 1 GB at the same time; a source's bandwidth is shared by the flows out of it."""

    num_nodes: int
    storage_gbps: float
    link_gbps: float
    now_s: float = 0.0
    num_storage_reads: int = 0
    holders: set[str] = field(default_factory=set)
    flows: dict[str, Flow] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        for index in range(self.num_nodes):
            self.plan(f"n{index}")
        while self.flows:
            step_s = min(self.left_s(node) for node in self.flows)
            rates = {node: self.rate(flow) for node, flow in self.flows.items()}
            self.now_s += step_s
            for node, flow in self.flows.items():
                flow.left_gb -= rates[node] * step_s
            done = [node for node, flow in self.flows.items() if flow.left_gb < 1e-9]
            for node in done:
                del self.flows[node]
                self.holders.add(node)
            for node in [node for node, awaited in self.waiting.items() if awaited in done]:
                del self.waiting[node]
                self.plan(node)
        assert not self.waiting
        assert len(self.holders) == self.num_nodes

    def plan(self, node: str) -> None:
        sources = [flow.source for flow in self.flows.values()]
        awaited = list(self.waiting.values())
        plan = plan_fetch(
            GB,
            measured(self.storage_gbps),
            [peer(found, self.link_gbps, sources.count(found)) for found in self.holders],
            [coming(found, self.link_gbps, self.left_s(found), awaited.count(found)) for found in self.flows],
            storage_readers=sources.count(""),
        )
        if isinstance(plan, WaitForPeer):
            self.waiting[node] = plan.node
            return
        self.num_storage_reads += isinstance(plan, FromStorage)
        self.flows[node] = Flow(plan.addresses[0].host if isinstance(plan, FromPeers) else "")

    def rate(self, flow: Flow) -> float:
        num_sharing = sum(other.source == flow.source for other in self.flows.values())
        return (self.link_gbps if flow.source else self.storage_gbps) / num_sharing

    def left_s(self, node: str) -> float:
        return self.flows[node].left_gb / self.rate(self.flows[node])
