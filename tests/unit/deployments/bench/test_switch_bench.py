"""The tables of `atelier bench switch` fit a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from infra.bench.command import switch
from infra.bench.command.switch import LEGS, print_switch_figures
from infra.bench.command.switch_simulated import SWITCHES, WAYS

TIMES = {"p50": 523.45, "p95": 1234.56, "low": 212.34, "high": 1234.56, "n": 20}
SAME = {"bytes_moved": 0, "ms": TIMES}
SIBLING = {
    "bytes_different": 2_602_784_123,
    "host": {"bytes_moved": 2_629_632_123, "ratio": 1.0103},
    "cpu-private": {"bytes_moved": 2_602_784_123, "ratio": 1.0},
    "same_weights": {"host": SAME, "cpu-private": SAME},
}
LEG = dict.fromkeys(LEGS, TIMES) | {"sibling": SIBLING}


def figures() -> dict[str, Any]:
    return LEG | {
        "bytes": {"flux": 10**9, "sdxl": 10**9, "all": 3 * 10**9},
        "num_tensors": 1057,
        "attach_ms": dict.fromkeys(["imports_only", "new_replica", "kept_skeleton"], TIMES),
        "demo": LEG,
        "simulated": {
            "switches": {name: dict.fromkeys(WAYS, 16_233_788_000) for name in SWITCHES},
            "op_us": {"matmul 16x16": {"cpu": 52.5, "sim": 244.0}},
        },
        "pss": {"replicas": 4, "ratio": 1.0052, "private_bytes": 2e5},
        "flood": {"callers": 64, "read_ratio": 1.0},
        "churn": {"switches": 60, "switches_per_s": 3.8, "growth_bytes": {"store": 25e6}},
        "recovery": {"ms": TIMES, "read_bytes": 0},
    }


def test_no_row_breaks_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(switch, "Console", lambda: Console(width=80, force_terminal=False))
    print_switch_figures(figures(), as_json=False)
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(rows) == 3 + 2 * (len(LEGS) + 4) + len(SWITCHES) * len(WAYS) + 1
    assert all(len(row) > 2 and all(cell.strip() for cell in row[1:3]) for row in rows), rows
