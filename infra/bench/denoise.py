"""`infra.bench denoise`: the denoise engine beside stock diffusers, without Ray, on one device thread.

The model has the structure of the demo's Flux, wider, with random content: a step of stock and one of ours do the same
arithmetic. Texts are random encodings, given to both. Every comparison alternates the two, and figures are medians.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from deployments.engines.costs.step_costs import StepCosts
from deployments.engines.diffusion.checkpoints import conditioning_of
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.records.protocol import ConditionedRequest, DiffusionOutput, DiffusionRequest
from infra.bench.command.figures import percentile
from infra.bench.denoise_loras import measure_loras
from infra.bench.denoise_models import SIDE_PX, BenchModel, make_model
from infra.bench.denoise_offload import measure_offload
from infra.bench.denoise_replay import measure_replay
from infra.bench.denoise_room import measure_room

LOADS: Final = (0.5, 0.8, 0.95)
CONCURRENT: Final = ((8, 16), (32, 16), (8, 64))  # requests, and the pixels of their sides
SIDES_PX: Final = (16, 64)  # a row of the first leaves a core idle, one of the second does not
MIXED_TOKENS: Final = (5, 9, 14, 16, 20, 27, 31, 40)
MIXED_PX: Final = (SIDE_PX, SIDE_PX * 3 // 2)


@dataclass(frozen=True, slots=True)
class DenoiseSettings:
    """The steps of a request, and of each part the rounds: so many, fewer beyond so many seconds, two at least."""

    rounds: int = 12
    part_s: float = 30.0
    num_steps: int = 8
    num_arrivals: int = 60

    def each_round(self) -> Iterator[int]:
        """Yield the numbers of the rounds, and one more in front, which is to warm up."""
        end_s = time.perf_counter() + self.part_s
        for number in range(self.rounds + 1):
            if number > 2 and time.perf_counter() > end_s:
                return
            yield number


QUICK: Final = DenoiseSettings(rounds=1, part_s=1.0, num_steps=4, num_arrivals=8)
_Arrival = tuple[float, ConditionedRequest]
PARTS: Final = (
    "single",
    "concurrent",
    "mixed",
    "arrivals",
    "stream",
    "invariance",
    "checkpoint",
    "loras",
    "offload",
    "room",
    "replay",
)


def measure_denoise(
    settings: DenoiseSettings, seed: int = 0, parts: Sequence[str] = PARTS
) -> Iterator[tuple[str, Any]]:
    """Measure part by part: yield the name of each of PARTS and its figures, which JSON can say."""
    torch.manual_seed(seed)
    with make_model(seed) as model:
        costs = StepCosts()
        ways: dict[str, Callable[[], Any]] = {
            "single": lambda: [_measure_single(model, settings, side_px) for side_px in SIDES_PX],
            "concurrent": lambda: [
                _measure_concurrent(model, settings, costs, count, side_px) for count, side_px in CONCURRENT
            ],
            "mixed": lambda: _measure_mixed(model, settings, seed),
            "arrivals": lambda: _measure_arrivals(model, settings, costs, seed),
            "stream": lambda: _measure_stream(model, settings, costs),
            "invariance": lambda: _measure_invariance(model, settings),
            "checkpoint": lambda: _measure_checkpoint(model, settings, costs),
            "loras": lambda: measure_loras(model, settings.num_steps, settings.part_s),
            "offload": lambda: measure_offload(settings.num_steps, settings.part_s, seed),
            "room": lambda: measure_room(settings.num_steps, 4 * settings.part_s, seed),
            "replay": lambda: measure_replay(settings.num_steps, settings.part_s, seed),
        }
        for name in parts:
            start = time.perf_counter()
            figures = ways[name]()
            sys.stderr.write(f"measured: {name} ({time.perf_counter() - start:.0f} s)\n")
            yield name, figures


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


def _measure_single(model: BenchModel, settings: DenoiseSettings, side_px: int) -> dict[str, float]:
    ours_s, stock_s, costs = [], [], StepCosts()
    for number in replace(settings, part_s=settings.part_s / len(SIDES_PX)).each_round():
        ours_s.append(_run(model, [model.request(settings.num_steps, seed=number, side_px=side_px)], costs)[0])
        stock_s.append(_timed(partial(model.stock_images, [number], settings.num_steps, side_px)))
    ours, stock = (settings.num_steps / statistics.median(seconds[1:]) for seconds in (ours_s, stock_s))
    return {"side_px": side_px, "ours_steps_per_s": ours, "stock_steps_per_s": stock, "ratio": ours / stock}


def _measure_concurrent(
    model: BenchModel, settings: DenoiseSettings, costs: StepCosts, count: int, side_px: int
) -> dict[str, Any]:
    """Compare with stock called for one request after the other, and once for all as one batch.

    The first rounds, in which the engine learns what batches cost, do not count.
    """
    makespans: dict[str, list[float]] = {"ours": [], "serial": [], "one_batch": []}
    means: dict[str, list[float]] = {name: [] for name in makespans}
    seeds = range(count)
    own = replace(settings, part_s=settings.part_s * 2 / len(CONCURRENT))
    for round_ in own.each_round():
        requests = [model.request(settings.num_steps, seed=seed, side_px=side_px) for seed in seeds]
        elapsed_s, latencies, _ = _run(model, requests, costs)
        if round_ == 0:
            continue
        makespans["ours"].append(elapsed_s)
        means["ours"].append(statistics.mean(latencies))
        start, ends = time.perf_counter(), []
        for seed in seeds:
            model.stock_images([seed], settings.num_steps, side_px)
            ends.append(time.perf_counter() - start)
        makespans["serial"].append(ends[-1])
        means["serial"].append(statistics.mean(ends))
        batch_s = _timed(lambda: model.stock_images(seeds, settings.num_steps, side_px))
        makespans["one_batch"].append(batch_s)
        means["one_batch"].append(batch_s)
    found: dict[str, Any] = {"num_requests": count, "side_px": side_px}
    for name in makespans:
        images_per_s = count / statistics.median(makespans[name])
        found[name] = {"images_per_s": images_per_s, "mean_latency_s": statistics.median(means[name])}
    found["ours_over_serial"] = found["ours"]["images_per_s"] / found["serial"]["images_per_s"]
    return found


def _measure_mixed(model: BenchModel, settings: DenoiseSettings, seed: int) -> dict[str, float]:
    """Count forwards for each step that all of 16 requests took, of many prompt lengths, alone and with two sizes."""
    chance = random.Random(seed)
    found = {}
    for name, sizes in (("lengths", MIXED_PX[:1]), ("lengths_and_sizes", MIXED_PX)):
        requests = [
            model.request(
                settings.num_steps, seed=number, num_tokens=chance.choice(MIXED_TOKENS), side_px=chance.choice(sizes)
            )
            for number in range(16)
        ]
        states = [model.ours.start_request(one.request, one.conditioning) for one in requests]
        with model.counting_forwards() as count:
            for _ in range(settings.num_steps):
                model.ours.step(states)
        found[f"{name}_forwards_per_step"] = count() / settings.num_steps
        kinds = {(one.conditioning["prompt_embeds"].shape[1], one.request.width) for one in requests}
        found[f"{name}_distinct"] = len(kinds)
    return found


def _measure_arrivals(
    model: BenchModel, settings: DenoiseSettings, costs: StepCosts, seed: int
) -> list[dict[str, float]]:
    """Measure latencies at shares of what stock can do serially: ours for real, the FIFO of stock by its own times."""
    alone_s = [_timed(partial(model.stock_images, [number], settings.num_steps)) for number in range(7)]
    service_s = statistics.median(alone_s)
    _run(model, [model.request(settings.num_steps, seed=number) for number in range(8)], costs)  # to know their costs
    chance = random.Random(seed)
    rows = []
    for load in LOADS:
        arrivals, now_s = [], 0.0
        most = int(load / service_s * settings.part_s / len(LOADS))  # arrivals in its share of the time
        for number in range(max(8, min(settings.num_arrivals, most))):
            now_s += chance.expovariate(load / service_s)
            arrivals.append((now_s, model.request(settings.num_steps, seed=number)))
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


def _measure_stream(model: BenchModel, settings: DenoiseSettings, costs: StepCosts) -> dict[str, float]:
    """Compare 8 requests with progress, and with three previews besides, to 8 silent ones."""
    ways: dict[str, dict[str, Any]] = {
        "silent": {},
        "progress": {"reports_steps": True},
        "progress_and_previews": {"reports_steps": True, "num_previews": 3},
        "checkpoint_every_step": {"checkpoint_steps": 1},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for round_ in settings.each_round():
        first = round_ % len(names)
        for name in names[first:] + names[:first]:  # who comes first finds caches as the last left them
            requests = [model.request(settings.num_steps, seed=number, **ways[name]) for number in range(8)]
            seconds[name].append(_run(model, requests, costs)[0])
    silent = seconds.pop("silent")[1:]
    return {
        f"{name}_overhead": statistics.median(one / other for one, other in zip(values[1:], silent, strict=True)) - 1
        for name, values in seconds.items()
    }


def _measure_invariance(model: BenchModel, settings: DenoiseSettings) -> list[dict[str, float]]:
    """Compare whole steps with those of the same denoiser as diffusers has it, whose results depend on the batch."""
    rows = []
    counts = 1, 2, 3, 5, 8
    own = replace(settings, part_s=settings.part_s / len(counts))
    for count in counts:
        seconds: dict[str, list[float]] = {"ours": [], "plain": []}
        for _ in own.each_round():
            for name, pipeline in (("ours", model.ours), ("plain", model.plain)):
                requests = [model.request(settings.num_steps, seed=number) for number in range(count)]
                states = [pipeline.start_request(one.request, one.conditioning) for one in requests]
                for _ in range(settings.num_steps):
                    seconds[name].append(_timed(partial(pipeline.step, states)))
        ours_s, plain_s = (statistics.median(values) for values in seconds.values())
        rows.append({"rows": count, "ours_ms": ours_s * 1e3, "plain_ms": plain_s * 1e3, "cost": ours_s / plain_s - 1})
    return rows


def _measure_checkpoint(model: BenchModel, settings: DenoiseSettings, costs: StepCosts) -> dict[str, float]:
    """Measure the size of a checkpoint, and the time until a request that goes on from it is back in the engine."""
    _, _, outputs = _run(model, [model.request(settings.num_steps, seed=0, checkpoint_steps=2)], costs)
    saved = next(output.checkpoint for output in outputs if output.checkpoint)
    resume_s = []
    for _ in range(12):
        engine = DiffusionEngine(model.ours, costs)
        request = model.request(settings.num_steps, seed=0).request

        def resume(engine: DiffusionEngine = engine, request: DiffusionRequest = request) -> None:
            engine.add_request(ConditionedRequest(request, conditioning_of(saved), resume_from=saved))

        resume_s.append(_timed(resume))
    return {"bytes": len(saved), "resume_ms": statistics.median(resume_s) * 1e3}


def print_part(name: str, figures: Any) -> None:
    """Print the figures of one part."""
    console = Console()
    if name == "single":
        for row in figures:
            console.print(
                f"single request, {row['side_px']} px: {row['ours_steps_per_s']:.1f} steps/s, "
                f"stock {row['stock_steps_per_s']:.1f}, {row['ratio']:.2f} x"
            )
    elif name == "concurrent":
        table = Table("concurrent", "images/s", "mean latency s", "of serial")
        for row in figures:
            for way in ("ours", "serial", "one_batch"):
                label = f"{row['num_requests']} x {row['side_px']} px, {way.replace('_', ' ')}"
                share = f"{row['ours_over_serial']:.2f} x" if way == "ours" else ""
                table.add_row(label, f"{row[way]['images_per_s']:.2f}", f"{row[way]['mean_latency_s']:.3f}", share)
        console.print(table)
    elif name == "mixed":
        for what in ("lengths", "lengths_and_sizes"):
            kinds, forwards = figures[f"{what}_distinct"], figures[f"{what}_forwards_per_step"]
            console.print(f"16 requests of {kinds} {what.replace('_', ' ')}: {forwards:.1f} forwards per step")
    elif name == "arrivals":
        table = Table("Poisson load", "ours p50 s", "p99 s", "FIFO serial p50 s", "p99 s")
        for row in figures:
            values = [f"{row[key]:.3f}" for key in ("ours_p50_s", "ours_p99_s", "fifo_p50_s", "fifo_p99_s")]
            table.add_row(f"{row['load']:.0%}", *values)
        console.print(table)
    elif name == "stream":
        for what, share in figures.items():
            console.print(f"{what.replace('_', ' ')}: {share:+.1%}")
    elif name == "invariance":
        table = Table("rows", "step ms", "not batch-invariant", "cost")
        for row in figures:
            table.add_row(str(row["rows"]), f"{row['ours_ms']:.2f}", f"{row['plain_ms']:.2f}", f"{row['cost']:+.1%}")
        console.print(table)
    elif name == "checkpoint":
        console.print(f"checkpoint: {figures['bytes']} bytes; back in the engine after {figures['resume_ms']:.2f} ms")
    elif name == "loras":
        table = Table("requests", "LoRAs", "step ms", "more than without", "forwards per step")
        for row in figures["steps"]:
            cells = f"{row['step_ms']:.2f}", f"{row['cost']:+.1%}", f"{row['forwards_per_step']:.1f}"
            table.add_row(str(row["num_requests"]), row["loras"], *cells)
        console.print(table)
        memory = figures["memory"]
        console.print(
            f"{memory['num_loras']} LoRAs of rank {memory['rank']} in one replica: {memory['lora_bytes'] / 1e6:.2f} MB "
            f"each; a merged checkpoint: {memory['merged_checkpoint_bytes'] / 1e6:.1f} MB, "
            f"its changed layers alone: {memory['merged_layers_bytes'] / 1e6:.1f} MB, made in {memory['merge_s']:.2f} s"
        )
    elif name == "offload":
        table = Table("device, of the pipeline", "steps/s", "MB over the link per step")
        for row in figures:
            uploaded = f"{row['uploaded_bytes_per_step'] / 1e6:.1f}"
            table.add_row(f"{row['share']:.0%}", f"{row['steps_per_s']:.1f}", uploaded)
        console.print(table)
    elif name == "room":
        table = Table("rows of a forward", "halvings", "rounds", "steps / CPU s", "/ planned, round by round")
        for row in figures:
            counts = str(row["halvings"]), str(row["rounds"])
            table.add_row(row["bound"], *counts, f"{row['steps_per_cpu_s']:.1f}", f"{row['to_planned']:.3f}")
        console.print(table)
    elif name == "replay":
        table = Table("denoiser", "requests", "step, CPU ms", "replayed", "ratio")
        for row in figures:
            cells = f"{row['eager_ms']:.2f}", f"{row['replayed_ms']:.2f}", f"{row['ratio']:.2f}"
            table.add_row(row["model"], str(row["num_requests"]), *cells)
        console.print(table)
