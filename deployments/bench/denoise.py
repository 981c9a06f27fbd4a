"""`atelier bench denoise`: the denoise engine beside stock diffusers, without Ray, on one device thread.

The model has the structure of the demo's Flux, wider, with random content: a step of stock and one of ours do the same
arithmetic. Texts are random encodings, given to both. Every comparison alternates the two, and figures are medians.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from deployments.bench.denoise_models import WIDTH_PX, BenchModel, make_model
from deployments.bench.figures import percentile
from deployments.engines.diffusion.checkpoints import conditioning_of
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.step_costs import StepCosts
from deployments.engines.protocol import ConditionedRequest, DiffusionOutput, DiffusionRequest

LOADS: Final = (0.5, 0.8, 0.95)
NUM_CONCURRENT: Final = (8, 32)
MIXED_TOKENS: Final = (5, 9, 14, 16, 20, 27, 31, 40)
MIXED_PX: Final = (WIDTH_PX, WIDTH_PX * 3 // 2)


@dataclass(frozen=True, slots=True)
class Effort:
    """The number of repetitions, and the length of each part."""

    rounds: int = 5
    num_steps: int = 8
    num_arrivals: int = 60


QUICK: Final = Effort(rounds=1, num_steps=4, num_arrivals=8)
_Arrival = tuple[float, ConditionedRequest]


def measure_denoise(effort: Effort, seed: int = 0) -> dict[str, Any]:
    """Measure, and return the figures as one JSON-able object."""
    torch.manual_seed(seed)
    with make_model(seed) as model:
        costs = StepCosts()
        _say("warming up")
        _run(model, [model.request(effort.num_steps, seed=number) for number in range(max(NUM_CONCURRENT))], costs)
        parts: dict[str, Callable[[], Any]] = {
            "single": lambda: _measure_single(model, effort, costs),
            "concurrent": lambda: [_measure_concurrent(model, effort, costs, count) for count in NUM_CONCURRENT],
            "mixed": lambda: _measure_mixed(model, effort, seed),
            "arrivals": lambda: _measure_arrivals(model, effort, costs, seed),
            "stream": lambda: _measure_stream(model, effort, costs),
            "invariance": lambda: _measure_invariance(model, effort),
            "checkpoint": lambda: _measure_checkpoint(model, effort, costs),
        }
        found: dict[str, Any] = {"threads": torch.get_num_threads(), "num_steps": effort.num_steps}
        for name, measure in parts.items():
            _say(f"measuring: {name}")
            found[name] = measure()
        return found


def _run(
    model: BenchModel, requests: Sequence[ConditionedRequest], costs: StepCosts
) -> tuple[float, list[float], list[DiffusionOutput]]:
    """Return seconds in all, the latency of each request, and every output; all arrive at once."""
    engine = DiffusionEngine(model.ours, costs)
    outputs, latencies = [], []
    start = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            outputs.append(output)
            if output.is_last:
                latencies.append(time.perf_counter() - start)
    _check(latencies, requests)
    return time.perf_counter() - start, latencies, outputs


def _check(latencies: Sequence[float], requests: Sequence[object]) -> None:
    if len(latencies) != len(requests):
        raise RuntimeError(f"{len(latencies)} of {len(requests)} requests ended")


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _measure_single(model: BenchModel, effort: Effort, costs: StepCosts) -> dict[str, float]:
    ours_s, stock_s = [], []
    for number in range(2 * effort.rounds + 1):
        ours_s.append(_run(model, [model.request(effort.num_steps, seed=number)], costs)[0])
        stock_s.append(_timed(partial(model.stock_images, [number], effort.num_steps)))
    ours, stock = (effort.num_steps / statistics.median(seconds[1:]) for seconds in (ours_s, stock_s))
    return {"ours_steps_per_s": ours, "stock_steps_per_s": stock, "ratio": ours / stock}


def _measure_concurrent(model: BenchModel, effort: Effort, costs: StepCosts, count: int) -> dict[str, Any]:
    """Compare with stock called for one request after the other, and once for all as one batch."""
    makespans: dict[str, list[float]] = {"ours": [], "serial": [], "one_batch": []}
    means: dict[str, list[float]] = {name: [] for name in makespans}
    seeds = range(count)
    for _ in range(effort.rounds):
        elapsed_s, latencies, _ = _run(model, [model.request(effort.num_steps, seed=seed) for seed in seeds], costs)
        makespans["ours"].append(elapsed_s)
        means["ours"].append(statistics.mean(latencies))
        start, ends = time.perf_counter(), []
        for seed in seeds:
            model.stock_images([seed], effort.num_steps)
            ends.append(time.perf_counter() - start)
        makespans["serial"].append(ends[-1])
        means["serial"].append(statistics.mean(ends))
        batch_s = _timed(lambda: model.stock_images(seeds, effort.num_steps))
        makespans["one_batch"].append(batch_s)
        means["one_batch"].append(batch_s)
    found: dict[str, Any] = {"num_requests": count}
    for name in makespans:
        images_per_s = count / statistics.median(makespans[name])
        found[name] = {"images_per_s": images_per_s, "mean_latency_s": statistics.median(means[name])}
    return found


def _measure_mixed(model: BenchModel, effort: Effort, seed: int) -> dict[str, float]:
    """Count forwards for each step that all of 16 requests took, of many prompt lengths, alone and with two sizes."""
    chance = random.Random(seed)
    found = {}
    for name, sizes in (("lengths", MIXED_PX[:1]), ("lengths_and_sizes", MIXED_PX)):
        requests = [
            model.request(
                effort.num_steps, seed=number, num_tokens=chance.choice(MIXED_TOKENS), side_px=chance.choice(sizes)
            )
            for number in range(16)
        ]
        states = [model.ours.start(one.request, one.conditioning) for one in requests]
        with model.counting_forwards() as count:
            for _ in range(effort.num_steps):
                model.ours.step(states)
        found[f"{name}_forwards_per_step"] = count() / effort.num_steps
        kinds = {(one.conditioning["prompt_embeds"].shape[1], one.request.width) for one in requests}
        found[f"{name}_distinct"] = len(kinds)
    return found


def _measure_arrivals(model: BenchModel, effort: Effort, costs: StepCosts, seed: int) -> list[dict[str, float]]:
    """Measure latencies at shares of what stock can do serially: ours for real, the FIFO of stock by its own times."""
    alone_s = [_timed(partial(model.stock_images, [number], effort.num_steps)) for number in range(effort.rounds + 2)]
    service_s = statistics.median(alone_s)
    chance = random.Random(seed)
    rows = []
    for load in LOADS:
        arrivals, now_s = [], 0.0
        for number in range(effort.num_arrivals):
            now_s += chance.expovariate(load / service_s)
            arrivals.append((now_s, model.request(effort.num_steps, seed=number)))
        latencies = _play(model, arrivals, costs)
        free_s, waits = 0.0, []
        for arrival_s, _ in arrivals:
            free_s = max(free_s, arrival_s) + service_s
            waits.append(free_s - arrival_s)
        row = {"load": load}
        for name, samples in (("ours", latencies), ("fifo", waits)):
            row |= {f"{name}_p50_s": statistics.median(samples), f"{name}_p99_s": percentile(samples, 0.99)}
        rows.append(row)
    return rows


def _play(model: BenchModel, arrivals: Sequence[_Arrival], costs: StepCosts) -> list[float]:
    """Return latencies from the planned arrivals on: one that comes during a step has waited for its end."""
    engine = DiffusionEngine(model.ours, costs)
    waiting, arrived, latencies = list(reversed(arrivals)), {}, []
    start = time.perf_counter()
    while waiting or engine.has_work:
        now_s = time.perf_counter() - start
        if waiting and not engine.has_work:
            time.sleep(max(0.0, waiting[-1][0] - now_s))
            now_s = max(now_s, waiting[-1][0])
        while waiting and waiting[-1][0] <= now_s:
            arrival_s, request = waiting.pop()
            arrived[request.request_id] = arrival_s
            engine.add_request(request)
        for output in engine.step():
            if output.is_last:
                latencies.append(time.perf_counter() - start - arrived[output.request_id])
    _check(latencies, arrivals)
    return latencies


def _measure_stream(model: BenchModel, effort: Effort, costs: StepCosts) -> dict[str, float]:
    """Compare 8 requests with progress, and with three previews besides, to 8 silent ones."""
    ways: dict[str, dict[str, Any]] = {
        "silent": {},
        "progress": {"reports_steps": True},
        "progress_and_previews": {"reports_steps": True, "num_previews": 3},
        "checkpoint_every_step": {"checkpoint_steps": 1},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(2 * effort.rounds):
        for name, asked in ways.items():
            requests = [model.request(effort.num_steps, seed=number, **asked) for number in range(8)]
            seconds[name].append(_run(model, requests, costs)[0])
    silent_s = statistics.median(seconds.pop("silent"))
    return {f"{name}_overhead": statistics.median(values) / silent_s - 1 for name, values in seconds.items()}


def _measure_invariance(model: BenchModel, effort: Effort) -> list[dict[str, float]]:
    """Compare whole steps with those of the same denoiser as diffusers has it, whose results depend on the batch."""
    rows = []
    for count in (1, 2, 3, 5, 8):
        seconds: dict[str, list[float]] = {"ours": [], "plain": []}
        for _ in range(2 * effort.rounds + 1):
            for name, pipeline in (("ours", model.ours), ("plain", model.plain)):
                requests = [model.request(effort.num_steps, seed=number) for number in range(count)]
                states = [pipeline.start(one.request, one.conditioning) for one in requests]
                for _ in range(effort.num_steps):
                    seconds[name].append(_timed(partial(pipeline.step, states)))
        ours_s, plain_s = (statistics.median(values) for values in seconds.values())
        rows.append({"rows": count, "ours_ms": ours_s * 1e3, "plain_ms": plain_s * 1e3, "cost": ours_s / plain_s - 1})
    return rows


def _measure_checkpoint(model: BenchModel, effort: Effort, costs: StepCosts) -> dict[str, float]:
    """Measure the size of a checkpoint, and the time until a request that goes on from it is back in the engine."""
    _, _, outputs = _run(model, [model.request(effort.num_steps, seed=0, checkpoint_steps=2)], costs)
    saved = next(output.checkpoint for output in outputs if output.checkpoint)
    resume_s = []
    for _ in range(4 * effort.rounds):
        engine = DiffusionEngine(model.ours, costs)
        request = model.request(effort.num_steps, seed=0).request

        def resume(engine: DiffusionEngine = engine, request: DiffusionRequest = request) -> None:
            engine.add_request(ConditionedRequest(request, conditioning_of(saved), resume_from=saved))

        resume_s.append(_timed(resume))
    return {"bytes": len(saved), "resume_ms": statistics.median(resume_s) * 1e3}


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def print_denoise_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print tables, or the figures as one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    console, single = Console(), figures["single"]
    console.print(
        f"single request: {single['ours_steps_per_s']:.1f} steps/s, stock {single['stock_steps_per_s']:.1f}, "
        f"{single['ratio']:.2f} x"
    )
    table = Table("concurrent", "images/s", "mean latency s")
    for row in figures["concurrent"]:
        for name in ("ours", "serial", "one_batch"):
            label = f"{row['num_requests']}, {name.replace('_', ' ')}"
            table.add_row(label, f"{row[name]['images_per_s']:.2f}", f"{row[name]['mean_latency_s']:.3f}")
    console.print(table)
    mixed = figures["mixed"]
    for name in ("lengths", "lengths_and_sizes"):
        kinds, forwards = mixed[f"{name}_distinct"], mixed[f"{name}_forwards_per_step"]
        console.print(f"16 requests of {kinds} {name.replace('_', ' ')}: {forwards:.1f} forwards per step")
    table = Table("Poisson load", "ours p50 s", "p99 s", "FIFO serial p50 s", "p99 s")
    for row in figures["arrivals"]:
        values = [f"{row[key]:.3f}" for key in ("ours_p50_s", "ours_p99_s", "fifo_p50_s", "fifo_p99_s")]
        table.add_row(f"{row['load']:.0%}", *values)
    console.print(table)
    for name, share in figures["stream"].items():
        console.print(f"{name.replace('_', ' ')}: {share:+.1%}")
    table = Table("rows", "step ms", "not batch-invariant", "cost")
    for row in figures["invariance"]:
        table.add_row(str(row["rows"]), f"{row['ours_ms']:.2f}", f"{row['plain_ms']:.2f}", f"{row['cost']:+.1%}")
    console.print(table)
    saved = figures["checkpoint"]
    console.print(f"checkpoint: {saved['bytes']} bytes; back in the engine after {saved['resume_ms']:.2f} ms")
