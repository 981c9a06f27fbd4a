"""The choice of the source that is expected to be fastest, and what a bad moment of a peer costs it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.peers.known_sources import KnownSources
from cluster.peers.protocol import PeerAddress
from cluster.peers.sources import (
    ASSUMED_GBPS,
    AVOID_S,
    FORGET_S,
    HALF_LIFE_BYTES,
    MAX_WAIT_S,
    MIN_SHARE,
    PATIENCE_S,
    STORAGE_MARGIN,
    AllBusy,
    BandwidthEstimate,
    Choice,
    FetchOutcome,
    FromPeers,
    FromStorage,
    NobodyLeft,
    PeerOffer,
    PeerRecord,
    ask_again_s,
    choose_source,
    patience_s,
)

GB = 10**9
NOW_S = 1000.0
UNKNOWN = BandwidthEstimate()

rates = st.floats(0.01, 100)


def measured(gbps: float) -> BandwidthEstimate:
    return UNKNOWN.observe(GB, 1 / gbps)


def at(node: str) -> PeerAddress:
    return PeerAddress(node, 1)


def choose(
    storage: BandwidthEstimate,
    known: dict[str, float | None],
    active: dict[str, int] | None = None,
    now_s: float = NOW_S,
) -> Choice:
    """Choose among nodes whose bandwidths are known, or None, since `NOW_S`."""
    offers = [PeerOffer(at(node), node, (active or {}).get(node, 0)) for node in known]
    records = {at(node): PeerRecord(measured(gbps), NOW_S) for node, gbps in known.items() if gbps}
    return choose_source(GB, storage, offers, records, now_s)


def order(choice: Choice) -> str:
    assert isinstance(choice, FromPeers)
    return "".join(address.host for address in choice.addresses)


class TestBandwidthEstimate:
    def test_knows_nothing_before_the_first_transfer(self) -> None:
        assert UNKNOWN.gbps is None

    def test_the_first_transfer_is_the_estimate(self) -> None:
        assert UNKNOWN.observe(3 * GB, 2.0).gbps == pytest.approx(1.5)

    def test_a_transfer_without_time_or_bytes_is_ignored(self) -> None:
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
    def test_storage_only_if_it_is_clearly_faster(self) -> None:
        assert isinstance(choose(measured(2), {"a": 1.0}), FromStorage)
        assert isinstance(choose(measured(2), {"a": 2.0}), FromPeers)
        assert isinstance(choose(measured(2), {"a": 1.01 * 2 / STORAGE_MARGIN}), FromPeers)
        assert isinstance(choose(measured(2), {"a": 0.99 * 2 / STORAGE_MARGIN}), FromStorage)

    def test_unmeasured_storage_is_no_better_than_a_slow_peer(self) -> None:
        assert isinstance(choose(UNKNOWN, {"a": 1e-3}), FromPeers)

    def test_that_peers_are_busy_is_no_reason_to_read_storage(self) -> None:
        assert isinstance(choose(measured(2), {"a": 2.0}, {"a": 1000}), FromPeers)

    def test_the_least_loaded_of_equals_comes_first_and_the_fastest_of_idle_ones(self) -> None:
        assert order(choose(UNKNOWN, {"a": 2.0, "b": 2.0, "c": 2.0}, {"a": 3, "b": 1, "c": 2})) == "bca"
        assert order(choose(UNKNOWN, {"a": 2.0, "b": 3.0, "c": 4.0})) == "cba"
        assert order(choose(UNKNOWN, {"a": 2.0, "b": 8.0}, {"a": 0, "b": 2})) == "ba"

    def test_equal_offers_keep_the_order_that_was_drawn(self) -> None:
        for nodes in ("abc", "bca", "cab"):
            assert order(choose(UNKNOWN, dict.fromkeys(nodes))) == nodes

    def test_an_unknown_peer_comes_after_an_equal_known_one_and_before_a_busy_one(self) -> None:
        assert order(choose(measured(1), {"a": None, "b": 3.0, "c": 3.0}, {"c": 1})) == "bac"

    def test_one_slow_transfer_excludes_a_peer_only_for_a_while(self) -> None:
        known = {"slow": 0.01, "fast": 2.0}
        assert order(choose(measured(1), known)) == "fast"
        assert isinstance(choose(measured(1), {"slow": 0.01}), FromStorage)
        assert order(choose(measured(1), {"slow": 0.01}, now_s=NOW_S + FORGET_S)) == "slow"
        record = PeerRecord(measured(0.01), NOW_S).observe(GB, 0.5, 1, NOW_S + FORGET_S)
        assert record.gbps(NOW_S + FORGET_S) == pytest.approx(2)  # and what was forgotten does not count any more

    def test_a_peer_that_failed_is_not_asked_for_a_while(self) -> None:
        offers, failed = [PeerOffer(at("a"), "a")], {at("a"): PeerRecord().failed(NOW_S)}
        assert choose_source(GB, UNKNOWN, offers, failed, NOW_S) == NobodyLeft()
        assert isinstance(choose_source(GB, UNKNOWN, offers, failed, NOW_S + AVOID_S), FromPeers)
        assert choose_source(GB, UNKNOWN, [], {}, NOW_S) == NobodyLeft()

    def test_a_busy_peer_is_not_asked_for_a_moment(self) -> None:
        offers = [PeerOffer(at(node), node) for node in "ab"]
        records = {at("a"): PeerRecord().busy(NOW_S + 2), at("b"): PeerRecord().busy(NOW_S + 1)}
        assert choose_source(GB, measured(1), offers, records, NOW_S) == AllBusy(NOW_S + 1)
        assert order(choose_source(GB, measured(1), offers, records, NOW_S + 1)) == "b"

    def test_a_busy_peer_is_waited_for_when_the_free_one_is_very_slow(self) -> None:
        offers = [PeerOffer(at(node), node) for node in ("busy", "slow")]
        records = {
            at("busy"): PeerRecord(measured(2), NOW_S).busy(NOW_S + 1),
            at("slow"): PeerRecord(measured(0.9 * MIN_SHARE * 2), NOW_S),
        }
        assert choose_source(GB, UNKNOWN, offers, records, NOW_S) == AllBusy(NOW_S + 1)

    def test_the_minimum_rate_of_a_peer_allows_for_transfers_that_share_the_link(self) -> None:
        offers, records = [PeerOffer(at("a"), "a")], {at("a"): PeerRecord(measured(2), NOW_S)}
        for num_sharing in (1, 8):
            plan = choose_source(GB, measured(1), offers, records, NOW_S, num_sharing)
            assert isinstance(plan, FromPeers)
            assert plan.min_gbps == pytest.approx(MIN_SHARE * 2 / num_sharing)
        plan = choose_source(GB, UNKNOWN, offers, {}, NOW_S)
        assert isinstance(plan, FromPeers)
        assert plan.min_gbps == 0  # nothing is known

    @given(rates, st.dictionaries(st.sampled_from("abcdefgh"), st.none() | rates, min_size=1), st.randoms())
    def test_a_plan_has_the_best_peer_first_and_none_far_below_it(
        self, storage_gbps: float, known: dict[str, float | None], chance: random.Random
    ) -> None:
        active = {node: chance.randrange(5) for node in known}
        plan = choose(measured(storage_gbps), known, active)
        assumed = max(ASSUMED_GBPS, storage_gbps, *(gbps or 0.0 for gbps in known.values()))
        alone = {node: gbps or assumed for node, gbps in known.items()}
        assert isinstance(plan, FromStorage) == (measured(storage_gbps).gbps > STORAGE_MARGIN * max(alone.values()))
        if isinstance(plan, FromPeers):
            times = [(1 + active[address.host]) / alone[address.host] for address in plan.addresses]
            assert times == pytest.approx(sorted(times))
            assert {address.host for address in plan.addresses} == {
                node
                for node, gbps in alone.items()
                if measured(gbps).gbps >= MIN_SHARE * max(alone.values()) * (1 - 1e-9)
            }

    def test_a_peer_without_bandwidth(self) -> None:
        assert isinstance(choose(measured(1), {"a": 1e-300}), FromStorage)


class TestWaiting:
    def test_the_pause_grows_to_a_bound_and_is_spread(self) -> None:
        pauses = [ask_again_s(num_times, 0.5) for num_times in range(2000)]
        assert pauses == sorted(pauses)
        assert (pauses[0], pauses[-1]) == (0.1, MAX_WAIT_S)
        assert ask_again_s(3, 0.0) * 3 == pytest.approx(ask_again_s(3, 1 - 1e-12))

    def test_patience_is_longer_where_storage_is_slow(self) -> None:
        assert patience_s(GB, UNKNOWN) == patience_s(GB, measured(10)) == PATIENCE_S
        assert patience_s(GB, measured(0.05)) == pytest.approx(40)


def test_a_busy_peer_is_left_alone_for_the_shortest_wait_and_is_not_avoided() -> None:
    sources, peer = KnownSources(random.Random(5)), PeerAddress("10.0.0.1", 1)
    sources.note_fetch("e", FetchOutcome(busy=[peer]), 1.0, NOW_S)
    record = sources.peers[peer]
    assert record.busy_until_s == NOW_S + ask_again_s(0, random.Random(5).random())
    assert record.avoided_until_s == -math.inf
