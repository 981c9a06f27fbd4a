"""The choice between an extent's plain bytes and its delta."""

from __future__ import annotations

import pytest

from weights.reading.forms import ASSUMED_DECODE_BYTES_PER_S, MeasuredRate, prefers_delta

MIB = 2**20


@pytest.mark.parametrize(
    ("plain_gbps", "decode_gbps", "is_resident", "expected"),
    [
        (0.1, 1.0, True, True),  # 6.5 + 1 against 10
        (0.3, 1.0, True, True),
        (0.4, 1.0, True, False),
        (0.4, 2.0, True, True),
        (3.0, 1.0, True, False),
        (0.1, 1.0, False, False),  # the base's bytes come on top
        (0.1, None, True, True),
        (1.0, None, True, False),
        (None, 1.0, True, False),  # nobody has measured the medium
    ],
)
def test_the_form_that_is_here_sooner_is_read(
    plain_gbps: float | None, decode_gbps: float | None, is_resident: bool, expected: bool
) -> None:
    assert ASSUMED_DECODE_BYTES_PER_S == 1e9
    chosen = prefers_delta(
        100 * MIB,
        65 * MIB,
        base_is_resident=is_resident,
        plain_bytes_per_s=plain_gbps and plain_gbps * 1e9,
        read_bytes_per_s=None,
        decode_bytes_per_s=decode_gbps and decode_gbps * 1e9,
    )
    assert chosen is expected


def test_what_deltas_were_read_at_counts_where_it_is_known() -> None:
    rates = {"base_is_resident": True, "plain_bytes_per_s": 5e8, "decode_bytes_per_s": 4e9}
    assert prefers_delta(100 * MIB, 65 * MIB, read_bytes_per_s=None, **rates)
    assert not prefers_delta(100 * MIB, 65 * MIB, read_bytes_per_s=3e8, **rates)


def test_a_rate_follows_what_is_measured_lately() -> None:
    rate = MeasuredRate()
    assert rate.bytes_per_s is None
    rate.add(MIB - 1, 1.0)
    rate.add(MIB, 0.0)  # a clock too coarse says nothing
    assert rate.bytes_per_s is None
    rate.add(MIB, 1.0)
    assert rate.bytes_per_s == pytest.approx(MIB)
    for _ in range(50):
        rate.add(10 * MIB, 1.0)
    assert rate.bytes_per_s == pytest.approx(10 * MIB, rel=0.01)
