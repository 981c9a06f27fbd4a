"""Metrics: the ones that Atelier adds, and the endpoints where Ray exports all of them.

HAZARD: Ray's recorder sends the counts of a histogram's buckets, and makes its sum of their middles: 97 answers of
0.2 ms add up to 48.5 ms there. So each histogram has a counter with what was measured (`_measured_total`), and
`with_measured_sums` puts that in place of the sum. Who scrapes the nodes themselves divides that by the `_count`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from weights.reading.report import Stage, StageFigures

_TICK_BOUNDARIES_S = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
_PHASE_BOUNDARIES_MS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 3e4, 1e5]

_MAX_TIMED_MODELS: Final = 10
_TOKEN_BOUNDARIES_MS: Final = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3]


_MEASURED: Final = "_measured_total"
_SAMPLE: Final = re.compile(r"^(ray_atelier_\w+?)(_sum|_measured_total)(\{.*\})? (\S+)(.*)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class _MeasuredHistogram:
    """A histogram of Ray, and a counter with the true sum beside it."""

    def __init__(self, name: str, description: str, boundaries: list[float], tag_keys: tuple[str, ...] = ()) -> None:
        self._buckets = Histogram(name, description, boundaries=boundaries, tag_keys=tag_keys)
        self._sum = Counter(f"{name}{_MEASURED}", f"{description} The sum.", tag_keys=tag_keys)

    def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
        """Count a value of 0 or more."""
        self._buckets.observe(value, tags)
        if value > 0:  # Ray's counters take nothing else
            self._sum.inc(value, tags)


def with_measured_sums(page: str) -> str:
    """Return a page of metrics as Prometheus reads it, with the sums of Atelier's histograms as they were measured."""
    samples = [(found[1], found[2], _labels(found[3]), found[4]) for found in _SAMPLE.finditer(page)]
    measured = {(name, labels): value for name, kind, labels, value in samples if kind == _MEASURED}

    def corrected(found: re.Match[str]) -> str:
        value = measured.get((found[1], _labels(found[3]))) if found[2] == "_sum" else None
        return found[0] if value is None else f"{found[1]}_sum{found[3] or ''} {value}{found[5]}"

    return _SAMPLE.sub(corrected, page)


def _labels(text: str | None) -> frozenset[tuple[str, str]]:
    return frozenset(_LABEL.findall(text or ""))


class Exporter(NamedTuple):
    """A node's Prometheus endpoint."""

    address: str
    port: int

    @property
    def url(self) -> str:
        """The endpoint's page."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"


def node_exporters() -> dict[str, Exporter]:
    """Return the Prometheus endpoint of every node that is alive, by the node's id."""
    return {
        node["NodeID"]: Exporter(node["NodeManagerAddress"], node["MetricsExportPort"])
        for node in ray.nodes()
        if node["Alive"] and node["MetricsExportPort"]
    }


class EdgeMetrics:
    """Counters of the requests that an ingress replica has read: by model here, where few replicas count."""

    def __init__(self) -> None:
        self._requests = Counter(
            "atelier_requests_total",
            "Requests by HTTP status; 499: the client left.",
            tag_keys=("kind", "model", "status"),
        )
        self._tokens = Counter(
            "atelier_tokens_total", "Tokens of language models, of prompts and made.", tag_keys=("model", "direction")
        )
        self._first = _MeasuredHistogram(
            "atelier_first_token_ms",
            "Milliseconds from a request to its first token.",
            boundaries=_PHASE_BOUNDARIES_MS,
            tag_keys=("model",),
        )
        self._between = _MeasuredHistogram(
            "atelier_between_tokens_ms",
            "Mean milliseconds between two tokens of an answer.",
            boundaries=_TOKEN_BOUNDARIES_MS,
            tag_keys=("model",),
        )
        self._timed: set[str] = set()

    def count_request(self, kind: str, model: str, status: int) -> None:
        """Count a request that has its answer. `model` is "" where nobody knows such a model: names are bounded."""
        self._requests.inc(1, {"kind": kind, "model": model, "status": str(status)})

    def count_text(
        self, model: str, num_prompt_tokens: int, num_completion_tokens: int, timings_ms: Mapping[str, float], n: int
    ) -> None:
        """Count the tokens of a text, of `n` choices in all; `timings_ms` are those of its answer."""
        for direction, count in (("in", num_prompt_tokens), ("out", num_completion_tokens)):
            if count:
                self._tokens.inc(count, {"model": model, "direction": direction})
        if "generate" in timings_ms and num_completion_tokens:  # a pipeline does not tell
            tags = {"model": self._timed_name(model)}
            self._first.observe(max(0.0, timings_ms["total"] - timings_ms["generate"]), tags)
            if (num_later := num_completion_tokens / n - 1) > 0:
                self._between.observe(timings_ms["generate"] / num_later, tags)

    def _timed_name(self, model: str) -> str:
        """Return the name that a model's times are counted under: "" for those beyond the first few, since each has as
        many series as there are buckets."""
        if len(self._timed) < _MAX_TIMED_MODELS:
            self._timed.add(model)
        return model if model in self._timed else ""


class RequestMetrics:
    """Counters of a replica's work: the time in each phase, encodings, bytes attached, steps; not by model.

    There may be many replicas, and each would have a series of each for every model.
    """

    def __init__(self) -> None:
        self._phases = _MeasuredHistogram(
            "atelier_phase_ms",
            "Milliseconds that requests spent in a phase.",
            boundaries=_PHASE_BOUNDARIES_MS,
            tag_keys=("kind", "phase"),
        )
        self._encodings = Counter(
            "atelier_encodings_total", "Text encodings by where they came from.", tag_keys=("source",)
        )
        self._attached = Counter("atelier_attached_bytes_total", "Bytes attached by switches.")
        self._steps = Counter("atelier_steps_total", "Steps of engines, each of a batch.", tag_keys=("kind",))
        self._outputs = Counter(
            "atelier_step_outputs_total", "Requests in the batches of steps, each counted at each.", tag_keys=("kind",)
        )
        self._counted: dict[str, tuple[int, int]] = {}

    def count_request(self, kind: str, timings_ms: Mapping[str, float]) -> None:
        """Observe an answered request's milliseconds by phase."""
        for phase, ms in timings_ms.items():
            self._phases.observe(ms, {"kind": kind, "phase": phase})

    def count_encodings(self, hits: int, misses: int) -> None:
        """Count text encodings that came from the cache (hits) and from the encoder (misses)."""
        for source, count in (("cache", hits), ("encoder", misses)):
            if count:
                self._encodings.inc(count, {"source": source})

    def count_attached(self, nbytes: int) -> None:
        """Count the bytes that a switch has attached."""
        if nbytes:
            self._attached.inc(nbytes)

    def count_steps(self, totals: Mapping[str, tuple[int, int]]) -> None:
        """Count what is new since the last call; `totals` are the steps and their outputs so far, by kind."""
        for kind, found in totals.items():
            counted = self._counted.get(kind, (0, 0))
            for counter, now, before in zip((self._steps, self._outputs), found, counted, strict=True):
                if now > before:
                    counter.inc(now - before, {"kind": kind})
            self._counted[kind] = found


class LoadMetrics:
    """Counters of a node's loading: seconds, summed over threads, and bytes by stage. Thread-safe.

    Construct it inside the actor: Ray exports a metric from the process in which it was made.
    """

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        tags = ("stage", "node")
        self._seconds = Counter("atelier_load_stage_seconds_total", "Thread seconds spent loading.", tag_keys=tags)
        self._bytes = Counter("atelier_load_stage_bytes_total", "Bytes that passed a stage of loading.", tag_keys=tags)
        self._lock = threading.Lock()
        self._counted: dict[Stage, StageFigures] = {}

    def count_loads(self, stages: Mapping[Stage, StageFigures]) -> None:
        """Count what is new since the last call; `stages` are the totals so far."""
        with self._lock:
            for stage, found in stages.items():
                counted = self._counted.get(stage, StageFigures())
                tags = {"stage": stage, "node": self._node_id}
                # Totals of two threads may arrive in the wrong order, and a counter cannot decrease.
                if (seconds := found.busy_s - counted.busy_s) > 0:
                    self._seconds.inc(seconds, tags)
                if (nbytes := found.nbytes - counted.nbytes) > 0:
                    self._bytes.inc(nbytes, tags)
                self._counted[stage] = max(found, counted, key=lambda figures: figures.busy_s)


class ControllerMetrics:
    """Figures of the controller: its decisions by kind, the seconds of its ticks, requests that wait, and workers.

    Construct it inside the actor, as `LoadMetrics`.
    """

    def __init__(self) -> None:
        self._decisions = Counter("atelier_decisions_total", "Decisions of the controller.", tag_keys=("action",))
        self._ticks = _MeasuredHistogram(
            "atelier_controller_tick_s", "Seconds from a state to its orders.", boundaries=_TICK_BOUNDARIES_S
        )
        self._held = Gauge("atelier_held_requests", "Requests that wait for a place on a worker.")
        self._workers = Gauge("atelier_workers", "Workers that report, and workers wanted.", tag_keys=("which",))

    def note_tick(self, took_s: float, decisions: Iterable[str], num_held: int) -> None:
        """Note a tick: the action of each new decision, and how many requests wait."""
        self._ticks.observe(took_s)
        for action in decisions:
            self._decisions.inc(1, {"action": action})
        self._held.set(num_held)

    def note_workers(self, num_reporting: int, num_wanted: int | None) -> None:
        """Note how many workers there are, and how many are wanted where they come and go."""
        self._workers.set(num_reporting, {"which": "reporting"})
        if num_wanted is not None:
            self._workers.set(num_wanted, {"which": "wanted"})
