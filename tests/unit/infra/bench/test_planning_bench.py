"""The bench of plans: every forward's plan is within the targets, and is printed."""

from __future__ import annotations

import pytest

from infra.bench.planning import measure_plans, print_plans

pytestmark = pytest.mark.long  # FLUX.1-dev's shape takes seconds


def test_plans_take_what_is_alive_and_less_than_the_peers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(measure_plans())
    for row in rows:
        assert row["live_bytes"] <= row["plan_bytes"] <= 1.01 * row["live_bytes"], row["forward"]
        assert row["plan_bytes"] <= row["best_fit_bytes"]
        assert row["plan_bytes"] <= row["eager_bytes"] * (1 if "VAE" in row["forward"] else 0.9)
    print_plans(rows)
    shown = capsys.readouterr().out
    assert all(row["forward"][:20] in shown for row in rows)
