"""Medium and probe in, a way to read out."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weights.reading.strategy import Medium, Probe, ReadStrategy, choose_strategy, parse_strategy
from weights.records.errors import WeightsError

FAST_DIRECT = Probe(direct_gbps=3.0, buffered_gbps=2.0)
FAST_BUFFERED = Probe(direct_gbps=1.0, buffered_gbps=2.0)
REFUSED = Probe(direct_gbps=None, buffered_gbps=0.1)


def medium(kind: str) -> Medium:
    return Medium(kind, "fs", "/", "dev")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["local", "nfs", "network", "unknown"])
def test_the_probe_decides_where_direct_reading_is_possible(kind: str) -> None:
    assert choose_strategy(medium(kind), FAST_DIRECT).direct
    assert not choose_strategy(medium(kind), FAST_BUFFERED).direct
    assert not choose_strategy(medium(kind), REFUSED).direct


def test_at_a_near_tie_direct_reading_wins() -> None:
    assert choose_strategy(medium("local"), Probe(direct_gbps=1.9, buffered_gbps=2.0)).direct
    assert not choose_strategy(medium("local"), Probe(direct_gbps=1.7, buffered_gbps=2.0)).direct


def test_without_a_probe_only_a_local_disk_is_read_directly() -> None:
    kinds = ["local", "nfs", "network", "unknown", "fuse", "tmpfs"]
    assert [kind for kind in kinds if choose_strategy(medium(kind), None).direct] == ["local"]


@pytest.mark.parametrize("kind", ["tmpfs", "fuse"])
def test_memory_and_fuse_are_never_read_directly(kind: str) -> None:
    assert not choose_strategy(medium(kind), FAST_DIRECT).direct


def test_far_media_get_more_threads_and_fuse_gets_fewer() -> None:
    threads = {kind: choose_strategy(medium(kind), REFUSED).num_threads for kind in ("local", "nfs", "fuse")}
    assert threads["fuse"] < threads["local"] < threads["nfs"]


@given(st.sampled_from(["local", "nfs", "fuse", "tmpfs", "network", "unknown"]), st.sampled_from([None, FAST_DIRECT]))
def test_an_override_always_wins(kind: str, probe: Probe | None) -> None:
    override = ReadStrategy(True, 3, 8192)
    assert choose_strategy(medium(kind), probe, override) is override


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("direct:4:16MiB", ReadStrategy(True, 4, 16 * 2**20)),
        ("buffered:8:4MiB", ReadStrategy(False, 8, 4 * 2**20)),
        ("buffered:1:4KiB", ReadStrategy(False, 1, 4096)),
        ("direct:256:1GiB", ReadStrategy(True, 256, 2**30)),
    ],
)
def test_a_way_to_read_is_written_as_mode_threads_block(text: str, strategy: ReadStrategy) -> None:
    assert parse_strategy(text) == strategy
    assert parse_strategy(str(strategy)) == strategy


@pytest.mark.parametrize(
    "text",
    ["", "fast", "direct", "direct:4", "direct:0:4MiB", "direct:4:0MiB", "direct:4:1KiB", "direct:4:6KiB",
     "direct:257:4MiB", "direct:4:2GiB", "direct:4:4MB", "direct:-1:4MiB", " direct:4:4MiB", "direct:4:4MiB:x",
     "direct:4:999999999999GiB", "Direct:4:4MiB", "direct:٤:4MiB", "direct:4:4MiB\n"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(WeightsError, match=r"expected direct\|buffered:THREADS:BLOCK like `direct:4:16MiB`") as caught:
        parse_strategy(text)
    assert repr(text) in str(caught.value)


@given(st.text(max_size=40))
def test_no_text_makes_it_fail_otherwise(text: str) -> None:
    with contextlib.suppress(WeightsError):
        assert parse_strategy(text).num_threads >= 1
