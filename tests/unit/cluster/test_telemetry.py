"""The controller's metrics, as Prometheus gets them."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import telemetry
from cluster.telemetry import ControllerMetrics


class Recorded:
    """A metric of Ray, reduced to its values by tags; a counter adds up."""

    found: dict[tuple[str, ...], float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = (), **_: Any) -> None:
        assert description
        self.name, self.tag_keys = name, tag_keys

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        tags = tags or {}
        assert tuple(tags) == self.tag_keys
        self.found[self.name, *tags.values()] = value

    observe = set

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        self.set(self.found.get((self.name, *(tags or {}).values()), 0.0) + value, tags)


def test_a_controller_counts_what_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "found", {}, raising=False)
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(telemetry, kind, Recorded)
    metrics = ControllerMetrics()
    metrics.note_tick(0.02, [("switch", "a"), ("drain", "b"), ("switch", "a")], 7)
    metrics.note_tick(0.03, [("switch", "a")], 0)
    metrics.note_workers(2, None)
    metrics.note_workers(2, 3)
    assert Recorded.found == {
        ("atelier_decisions_total", "switch", "a"): 3,
        ("atelier_decisions_total", "drain", "b"): 1,
        ("atelier_controller_tick_s",): 0.03,
        ("atelier_held_requests",): 0,
        ("atelier_workers", "reporting"): 2,
        ("atelier_workers", "wanted"): 3,
    }
