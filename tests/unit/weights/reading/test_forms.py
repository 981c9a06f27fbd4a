"""The choice between an extent's plain bytes and its delta."""

from __future__ import annotations

import pytest

from weights.reading.forms import ASSUMED_DECODE_BYTES_PER_S, MeasuredRate, prefers_delta

MIB = 2**20


@pytest.mark.parametrize(
    ("read_gbps", "decode_gbps", "is_resident", "expected"),
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
    read_gbps: float | None, decode_gbps: float | None, is_resident: bool, expected: bool
) -> None:
    assert ASSUMED_DECODE_BYTES_PER_S == 1e9
    chosen = prefers_delta(
        100 * MIB,
        65 * MIB,
        base_is_resident=is_resident,
        read_bytes_per_s=read_gbps and read_gbps * 1e9,
        decode_bytes_per_s=decode_gbps and decode_gbps * 1e9,
    )
    assert chosen is expected


def test_a_rate_follows_what_is_measured_lately() -> None:
    rate = MeasuredRate()
    assert rate.bytes_per_s is None
    rate.add(0, 1.0)
    rate.add(100, 0.0)  # a clock too coarse says nothing
    assert rate.bytes_per_s is None
    rate.add(100, 1.0)
    assert rate.bytes_per_s == pytest.approx(100)
    for _ in range(50):
        rate.add(1000, 1.0)
    assert rate.bytes_per_s == pytest.approx(1000, rel=0.01)
