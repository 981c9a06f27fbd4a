"""The prediction of a shared forward: its formula, and its limits."""

from __future__ import annotations

import pytest

from infra.bench.rank_prediction import PUBLISHED, CardLink, TokenWork, predicted_s

WORK = TokenWork(rows=2, tokens=4096, width=1024, num_blocks=10, out_tokens=4000, out_width=64)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_step_is_its_share_and_what_its_ranks_send(count: int) -> None:
    link = CardLink(bytes_per_s=1e9, latency_s=1e-3)
    attention = 4 * 2 * 4096 * 1024 / count * (count - 1) / count
    sent = 2 * (10 * attention + 2 * 4000 * 64 / count * (count - 1))
    assert WORK.sent_bytes(count) == sent
    assert predicted_s(8.0, WORK, link, count) == pytest.approx(8 / count + sent / 1e9 + 21e-3)


def test_one_card_sends_nothing() -> None:
    assert predicted_s(8.0, WORK, CardLink(1.0), 1) == 8.0


def test_a_prediction_is_no_slower_than_what_was_published_and_within_its_half() -> None:
    """It leaves out what does not divide: a prediction above a peer's figure would be a mistake of the formula."""
    for one in PUBLISHED:
        for _, predicted, found in one.rows():
            assert 0.45 * found < predicted < 1.05 * found
