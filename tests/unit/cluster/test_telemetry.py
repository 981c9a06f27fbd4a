"""Metrics of ingress, replicas, keepers and controller, as Prometheus gets them, and how many series they are."""

from __future__ import annotations

from typing import Any, ClassVar, get_args

import pytest
from unit.counting import operations

from cluster.admission.records import AdmissionSnapshot, ModelLoad
from cluster.process import telemetry
from cluster.process.telemetry import ControllerMetrics, EdgeMetrics, LoadMetrics, RequestMetrics, with_measured_sums
from deployments.ingress.admin.metrics import admission_metrics
from weights.reading.report import Stage, StageFigures


class Recorded:
    """A metric of Ray, reduced to its values by tags; a counter adds up."""

    found: dict[tuple[str, ...], float]
    num_series: ClassVar[dict[str, int]] = {}  # of each set of tags, by the metric's name

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = (), boundaries: Any = ()) -> None:
        assert description
        self.num_series[name] = len(boundaries) + 3 if boundaries else 1  # one without an end, the sum and the count
        self.name, self.tag_keys = name, tag_keys

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        tags = tags or {}
        assert tuple(tags) == self.tag_keys
        self.found[self.name, *tags.values()] = value

    observe = set

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        self.set(self.found.get((self.name, *(tags or {}).values()), 0.0) + value, tags)


def record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let metrics that are made from now on be recorded."""
    monkeypatch.setattr(Recorded, "found", {}, raising=False)
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(telemetry, kind, Recorded)


def test_a_text_is_counted_by_its_tokens_and_the_time_that_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch)
    metrics = EdgeMetrics()
    metrics.count_request("text", "a", 200)
    metrics.count_request("text", "a", 429)
    metrics.count_request("text", "a", 200)
    metrics.count_text("a", 7, 21, {"total": 500.0, "generate": 400.0}, 1)
    metrics.count_text("a", 7, 0, {"total": 9.0, "generate": 0.0}, 1)  # nothing was written
    metrics.count_text("b", 3, 22, {"total": 500.0, "generate": 400.0}, 2)  # eleven tokens each
    metrics.count_text("pipeline", 3, 2, {"total": 500.0}, 1)
    assert Recorded.found == {
        ("atelier_requests_total", "text", "a", "200"): 2,
        ("atelier_requests_total", "text", "a", "429"): 1,
        ("atelier_tokens_total", "a", "in"): 14,
        ("atelier_tokens_total", "a", "out"): 21,
        ("atelier_tokens_total", "b", "in"): 3,
        ("atelier_tokens_total", "b", "out"): 22,
        ("atelier_tokens_total", "pipeline", "in"): 3,
        ("atelier_tokens_total", "pipeline", "out"): 2,
        ("atelier_first_token_ms", "a"): 100.0,
        ("atelier_first_token_ms", "b"): 100.0,
        ("atelier_first_token_ms_measured_total", "a"): 100.0,
        ("atelier_first_token_ms_measured_total", "b"): 100.0,
        ("atelier_between_tokens_ms", "a"): 20.0,
        ("atelier_between_tokens_ms", "b"): 40.0,
        ("atelier_between_tokens_ms_measured_total", "a"): 20.0,
        ("atelier_between_tokens_ms_measured_total", "b"): 40.0,
    }


def test_steps_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch)
    metrics = RequestMetrics()
    for totals in ({"text": (5, 9)}, {"text": (5, 9)}, {"text": (7, 15), "image": (1, 1)}):
        metrics.count_steps(totals)
    assert Recorded.found == {
        ("atelier_steps_total", "text"): 7,
        ("atelier_step_outputs_total", "text"): 15,
        ("atelier_steps_total", "image"): 1,
        ("atelier_step_outputs_total", "image"): 1,
    }


def test_three_hundred_models_are_fewer_than_five_thousand_series(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress and a worker that have served each, with refusals and failures; language models have most."""
    record(monkeypatch)
    edge, replica, load, controller = EdgeMetrics(), RequestMetrics(), LoadMetrics("node"), ControllerMetrics()
    models = [f"model-{number}" for number in range(300)]
    for model in models:
        for status in (200, 429, 503):
            edge.count_request("text", model, status)
        edge.count_text(model, 1, 2, {"total": 2.0, "generate": 1.0}, 1)
    edge.count_request("text", "", 404)
    phases = ("queue", "switch", "encode", "prefill", "generate", "denoise", "decode", "total")
    for kind in ("text", "image", "clip", "embedding"):
        replica.count_request(kind, dict.fromkeys(phases, 1.0))
        replica.count_steps({kind: (1, 1)})
    replica.count_encodings(1, 1)
    replica.count_attached(1)
    load.count_loads(dict.fromkeys(get_args(Stage), StageFigures(1, 1.0, 1.0)))
    controller.note_tick(0.1, ["switch", "drain", "keep", "evict", "migrate"], 1)
    controller.note_workers(1, 1)
    loads = tuple(ModelLoad("worker", model, 1, 1.0, 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1, 1) for model in models)
    queue = [line for line in admission_metrics(AdmissionSnapshot(loads)).splitlines() if not line.startswith("#")]
    timed = {tags[0] for name, *tags in Recorded.found if name == "atelier_first_token_ms"}
    assert timed == {*models[:10], ""}  # histograms have most series
    series = sum(Recorded.num_series[name] for name, *_ in Recorded.found)
    assert 3000 < series + len(queue) < 5000


def test_a_controller_counts_what_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch)
    metrics = ControllerMetrics()
    metrics.note_tick(0.02, ["switch", "drain", "switch"], 7)
    metrics.note_tick(0.03, ["switch"], 0)
    metrics.note_workers(2, None)
    metrics.note_workers(2, 3)
    assert Recorded.found == {
        ("atelier_decisions_total", "switch"): 3,
        ("atelier_decisions_total", "drain"): 1,
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
