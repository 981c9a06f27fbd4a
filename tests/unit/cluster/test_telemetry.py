"""The controller's metrics, as Prometheus gets them."""

from __future__ import annotations

from typing import Any

import pytest
from unit.counting import operations

from cluster import telemetry
from cluster.telemetry import ControllerMetrics, with_measured_sums


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
        ("atelier_controller_tick_s_measured_total",): 0.05,
        ("atelier_held_requests",): 0,
        ("atelier_workers", "reporting"): 2,
        ("atelier_workers", "wanted"): 3,
    }


def test_sums_are_what_was_measured_and_not_the_middles_of_buckets() -> None:
    """As Ray exports 97 chats of 0.2 ms and an image of 3 s; labels stand in any order."""
    chats, images = 'kind="chat",model="a,b",phase="queue"', 'model="x\\"y",kind="image",phase="total"'
    page = f"""# HELP ray_atelier_phase_ms Milliseconds that requests spent in a phase.
# TYPE ray_atelier_phase_ms histogram
ray_atelier_phase_ms_bucket{{{chats},le="1.0"}} 97.0
ray_atelier_phase_ms_sum{{{chats}}} 48.5
ray_atelier_phase_ms_count{{{chats}}} 97.0
ray_atelier_phase_ms_sum{{{images}}} 3500.0 1700000000000
ray_atelier_phase_ms_sum{{kind="new"}} 0.5
# TYPE ray_atelier_phase_ms_measured_total counter
ray_atelier_phase_ms_measured_total{{kind="image",phase="total",model="x\\"y"}} 3001.25
ray_atelier_phase_ms_measured_total{{{chats}}} 19.4
ray_other_sum{{{chats}}} 7.0
ray_atelier_controller_tick_s_sum 4.0
ray_atelier_controller_tick_s_measured_total 0.25
"""
    expected = page.replace("} 48.5", "} 19.4").replace("} 3500.0 17", "} 3001.25 17")
    assert with_measured_sums(page) == expected.replace("tick_s_sum 4.0", "tick_s_sum 0.25")


def test_a_page_of_many_samples_takes_as_long_as_it_is() -> None:
    def cost(number: int) -> int:
        lines = [f'ray_atelier_x_{kind}{{n="{each}"}} {each}' for each in range(number) for kind in KINDS]
        return operations(lambda: with_measured_sums("\n".join(lines)))

    assert cost(1000) < 11 * cost(100)


KINDS = ("sum", "measured_total", "count")
