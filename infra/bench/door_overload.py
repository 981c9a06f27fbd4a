"""Overload, cancelled requests and a killed ingress replica in `infra.bench door`."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import psutil

from infra.bench.command.figures import percentile
from infra.bench.command.machine import own_memory_bytes
from infra.bench.door_figures import (
    cancel_figures,
    draw_arrivals_s,
    lost,
    overload_figures,
    requests_per_s,
    work_rate,
)
from infra.bench.door_load import Ask, LoadGenerator, Outcome
from infra.bench.door_report import print_loads, say
from infra.bench.door_requests import Requests

INGRESS: Final = "ray::ServeReplica:bench-door:ingress"
HEALTH_PERIOD_S: Final = 0.05
MEMORY_PERIOD_S: Final = 0.5
CAPACITY_CALLERS: Final = 64
NUM_PROBERS: Final = 12  # of a load, about: those who ask again until they are admitted
QUIET_TIMEOUT_S: Final = 60.0
# Requests that are cancelled in the middle, of as many images together as the demo's worker has under way at once
# (`max_running_images`): their common step is long beside the way to the worker.
NUM_LONG, LONG_ROWS, LONG_STEPS, SHORT_STEPS = 4, 4, 200, 8
MAX_KILL_REQUESTS: Final = 20_000
POLL_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """The sizes of the overload. `deadline_s` and `burst_deadline_s`: of every request under load and in a burst.

    A load lasts longer than its deadline.
    """

    num_costs: int = 48
    capacity_s: float = 4.0
    factors: tuple[float, ...] = (1.5, 3.0, 10.0)
    load_s: float = 9.0
    deadline_s: float = 3.0
    bursts: tuple[int, ...] = (1000, 5000)
    burst_deadline_s: float = 8.0
    num_cancels: int = 10_000
    cancel_callers: int = 96
    cancel_s: tuple[float, float] = (0.001, 2.0)


def measure_overload(load: LoadGenerator, url: str, requests: Requests, settings: OverloadSettings) -> dict[str, Any]:
    """Measure capacity, then loads beyond it and bursts, of requests of all kinds; no text of theirs is cached."""
    say("capacity")
    peak = _capacity(load, url, requests, settings)
    costs_s: dict[str, float] = peak["costs_s"]
    memory_bytes, loads = [_ingress_bytes()], dict[str, dict[str, Any]]()
    with _Watch(url) as watch:
        for factor in settings.factors:
            arrivals_s = draw_arrivals_s(factor * peak["requests_per_s"], settings.load_s, requests.rng)
            asks = [
                replace(ask, at_s=at_s, timeout_s=settings.deadline_s)
                for ask, at_s in zip(requests.draw_mix(len(arrivals_s)), arrivals_s, strict=True)
            ]
            outcomes = _loaded(load, url, asks)
            # From the first deadline on: until then there are fewer answers than later, because nothing was under way.
            name = f"{factor:g} x capacity"
            loads[name] = overload_figures(outcomes, costs_s, peak["work_rate"], settings.deadline_s, settings.load_s)
            print_loads({name: loads[name]}, is_error=True)
        for number in settings.bursts:
            asks = [replace(ask, timeout_s=settings.burst_deadline_s) for ask in requests.draw_mix(number)]
            outcomes = _loaded(load, url, asks)
            name = f"{number} at once"
            loads[name] = overload_figures(outcomes, costs_s, peak["work_rate"])
            print_loads({name: loads[name]}, is_error=True)
    memory_bytes.append(_ingress_bytes())
    return {
        "peak": peak,
        "loads": loads,
        "health": watch.figures(),
        "ingress_bytes": {"before": memory_bytes[0], "after": memory_bytes[1], "most": watch.most_bytes},
        "left_behind": _wait_until_quiet(url),
    }


def _capacity(load: LoadGenerator, url: str, requests: Requests, settings: OverloadSettings) -> dict[str, Any]:
    """Return the rates of the mix that as many callers reach as fill the batches, and what a request of a kind costs.

    A kind's cost is the time per request when there are requests of this kind only.
    """
    costs_s = {}
    for name, asks in requests.draw_kinds(settings.num_costs).items():
        outcomes = load.run("closed", url, asks, num_callers=CAPACITY_CALLERS)
        costs_s[name] = 1 / requests_per_s(outcomes)
    asks = requests.draw_mix(round(settings.capacity_s / statistics.mean(costs_s.values())))
    outcomes = load.run("closed", url, asks, num_callers=CAPACITY_CALLERS)
    rate = work_rate(outcomes, costs_s, 0.0, max(one.done_s for one in outcomes))
    return {"requests_per_s": requests_per_s(outcomes), "work_rate": rate, "costs_s": costs_s}


def _loaded(load: LoadGenerator, url: str, asks: Sequence[Ask]) -> list[Outcome]:
    outcomes = load.run("open", url, asks, probe_every=max(1, len(asks) // NUM_PROBERS // 2))
    _wait_until_quiet(url)
    return outcomes


class _Watch:
    """Asks for /healthz over and over from a process of its own, and reads the memory of the ingress."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._prober = LoadGenerator()
        self._outcomes: list[Outcome] = []
        self._stop = threading.Event()
        self._reading = threading.Thread(target=self._read_memory, daemon=True)
        self.most_bytes = 0

    def __enter__(self) -> _Watch:
        self._prober.begin_order("watch", self._url, [Ask("health", "/healthz")], period_s=HEALTH_PERIOD_S)
        self._reading.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._outcomes = self._prober.stop()
        self._prober.close()
        self._reading.join()

    def figures(self) -> dict[str, Any]:
        latencies_ms = [one.latency_s * 1e3 for one in self._outcomes]
        return {
            "p50_ms": statistics.median(latencies_ms),
            "p99_ms": percentile(latencies_ms, 0.99),
            "most_ms": max(latencies_ms),
            "n": len(latencies_ms),
            "failed": sum(one.status != 200 for one in self._outcomes),
        }

    def _read_memory(self) -> None:
        processes = _ingress_processes()
        while not self._stop.wait(MEMORY_PERIOD_S):
            with contextlib.suppress(OSError):  # it ended just now
                self.most_bytes = max(self.most_bytes, sum(own_memory_bytes(process.pid) for process in processes))


def measure_cancels(load: LoadGenerator, url: str, requests: Requests, settings: OverloadSettings) -> dict[str, Any]:
    """Give up requests of all kinds at random moments; return what became of them, and what they left behind.

    The moments are log-uniform: on the way in, in a queue, in a batch, in a step, and some after the answer.
    """
    asks = [
        replace(ask, cancel_s=math.exp(requests.rng.uniform(*map(math.log, settings.cancel_s))))
        for ask in requests.draw_mix(settings.num_cancels)
    ]
    say(f"{settings.num_cancels} requests that are given up")
    before = _wait_until_quiet(url) | _sizes_of_ingress()
    start_s = time.monotonic()
    outcomes = load.run("closed", url, asks, num_callers=settings.cancel_callers)
    wall_s = time.monotonic() - start_s
    after = _wait_until_quiet(url) | _sizes_of_ingress()
    return cancel_figures(outcomes) | {"wall_s": wall_s, "before": before, "after": after}


def measure_cancelled_step(url: str, model: str, rounds: int) -> dict[str, Any]:
    """Return how long a step of long requests takes, and how long after their clients left the requests still run.

    The second is too long by the time of a question whether they run at the most, which is measured, too.
    """
    say("cancelled steps")
    body = {"model": model, "prompt": "a handwritten six", "n": LONG_ROWS}
    step_ms, gone_ms, poll_ms = list[float](), list[float](), list[float]()
    with httpx.Client(base_url=url, timeout=QUIET_TIMEOUT_S, trust_env=False) as client:
        for _ in range(rounds):
            with _sent_off(url, body | {"num_inference_steps": SHORT_STEPS}) as connections:
                answers = [json.loads(connection.getresponse().read()) for connection in connections]
            step_ms.append(max(answer["timings_ms"]["denoise"] for answer in answers) / SHORT_STEPS)
            with _sent_off(url, body | {"num_inference_steps": LONG_STEPS}):
                asked_s = time.monotonic()
                while _busy(client)["denoising"] < NUM_LONG:
                    if time.monotonic() > asked_s + QUIET_TIMEOUT_S:
                        raise RuntimeError(f"{NUM_LONG} requests of {LONG_ROWS} images do not run beside each other")
                    time.sleep(POLL_S)
                time.sleep(0.3)  # in the middle of their steps
            left_s = asked_s = time.perf_counter()
            while _busy(client)["denoising"]:
                poll_ms.append((time.perf_counter() - asked_s) * 1e3)
                asked_s = time.perf_counter()
            gone_ms.append((asked_s - left_s) * 1e3)
    found = {"step_ms": step_ms, "gone_ms": gone_ms, "poll_ms": poll_ms or gone_ms}
    return {name: statistics.median(samples) for name, samples in found.items()}


@contextlib.contextmanager
def _sent_off(url: str, body: dict[str, Any]) -> Iterator[list[http.client.HTTPConnection]]:
    """Send as many requests as `NUM_LONG` from as many connections, which are closed at the end of the block."""
    connections = [http.client.HTTPConnection(urlsplit(url).netloc, timeout=QUIET_TIMEOUT_S) for _ in range(NUM_LONG)]
    try:
        for seed, connection in enumerate(connections):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/images/generations", json.dumps(body | {"seed": seed}), headers)
        yield connections
    finally:
        for connection in connections:
            connection.close()


def measure_kill(
    load: LoadGenerator,
    url: str,
    requests: Requests,
    length_s: float,
    num_callers: int,
) -> dict[str, Any]:
    """Kill one of the ingress replicas with SIGKILL in the middle of a load; return how many requests were lost."""
    say("an ingress replica is killed under load")
    victims = _ingress_processes()
    asks = requests.draw_mix(MAX_KILL_REQUESTS)
    load.begin_order("closed", url, asks, num_callers=num_callers, max_s=length_s)
    time.sleep(length_s / 3)
    requests.rng.choice(victims).kill()
    return lost(load.finish_order()) | {"num_ingresses": len(victims)}


def _wait_until_quiet(url: str) -> dict[str, Any]:
    """Wait until nothing runs and nothing is leased, for a minute at the most; return what is left."""
    start_s = time.monotonic()
    with httpx.Client(base_url=url, timeout=QUIET_TIMEOUT_S, trust_env=False) as client:
        while any((busy := _busy(client)).values()) and time.monotonic() < start_s + QUIET_TIMEOUT_S:
            time.sleep(0.05)
    return {**busy, "after_s": time.monotonic() - start_s}


def _busy(client: httpx.Client) -> dict[str, int]:
    """Return sums over the workers: requests that denoise, that wait for room, and bytes that requests lease.

    A cluster that does not tell is busy: it counts as one of each.
    """
    figures = "denoising", "num_waiting", "leased_bytes"
    answer = client.get("/admin/cluster")
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        say(f"no answer yet: {answer.text}")
        return dict.fromkeys(figures, 1)
    workers = answer.raise_for_status().json()["workers"]
    return {name: sum(worker[name] for worker in workers) for name in figures}


def _ingress_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(INGRESS):
                found.append(process)
    return found


def _ingress_bytes() -> int:
    return sum(own_memory_bytes(process.pid) for process in _ingress_processes())


def num_open_files(process: psutil.Process) -> int:
    """Return how many files a process has open, but for connections that its clients keep open to it.

    HAProxy keeps some fifty that nobody uses. What it has closed itself counts.
    """
    connections = process.net_connections("tcp")
    ports = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
    kept = sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port in ports for one in connections)
    return process.num_fds() - kept


def _sizes_of_ingress() -> dict[str, int]:
    return {"ingress_bytes": _ingress_bytes(), "open_files": sum(map(num_open_files, _ingress_processes()))}
