"""`infra.bench extrapolate`: images with extrapolated steps beside images of fewer steps, and eight requests at once.

Demo denoisers and random texts. Time is the thread's CPU time, ways in turn; PSNR is that of latents, to those of all
steps.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from configs.options import Acceleration
from deployments.console.output import Column, print_table
from deployments.engines.diffusion.pipeline import DenoisePipeline
from infra.bench.denoise_replay import make_pipeline, start_request

MODELS: Final = ("digits-flux", "digits-sdxl")
NUM_STEPS: Final = 20
TOGETHER: Final = 8
WAYS: Final[Mapping[str, tuple[int, Acceleration | None]]] = {
    "all steps": (NUM_STEPS, None),
    "interval 2, order 1": (NUM_STEPS, Acceleration(interval=2, order=1)),
    "interval 2, order 2": (NUM_STEPS, Acceleration(interval=2, order=2)),
    "interval 3, order 1": (NUM_STEPS, Acceleration(interval=3, order=1)),
    "interval 3, order 2": (NUM_STEPS, Acceleration(interval=3, order=2)),
    "at most 6, error 0.05": (NUM_STEPS, Acceleration(interval=6, order=1, max_error=0.05)),
    "12 steps": (12, None),
    "10 steps": (10, None),
    "8 steps": (8, None),
}
_COLUMNS: Final = (
    Column("model"),
    Column("way"),
    Column("forwards", align="right"),
    Column("PSNR, dB", align="right"),
    Column("ms", align="right"),
    Column("speed", align="right"),
)


def measure_extrapolation(rounds: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each model and way of one request, and of eight, half of which are extrapolated."""
    with torch.no_grad():
        return [row for name in MODELS for row in _measure(name, rounds, seed)]


def _measure(name: str, rounds: int, seed: int) -> list[dict[str, Any]]:
    pipeline = make_pipeline(name, None)
    times: dict[str, list[float]] = {way: [] for way in (*WAYS, "eight", "eight, half extrapolated")}
    errors: dict[str, list[float]] = {way: [] for way in WAYS}
    forwards = dict.fromkeys(WAYS, 0)
    peaks = []
    for round_ in range(-1, rounds):  # the first is not counted
        whole = torch.empty(0)
        for way, (num_steps, rule) in WAYS.items():
            latents, took_s, forwards[way] = _run(pipeline, [seed + round_], num_steps, [rule])
            whole = latents if way == "all steps" else whole
            if round_ >= 0:
                times[way].append(took_s)
                errors[way].append(float((latents - whole).square().mean()))
        rule = WAYS["interval 3, order 1"][1]
        seeds = range(seed + TOGETHER * round_, seed + TOGETHER * (round_ + 1))
        for way, rules in (("eight", [None, None]), ("eight, half extrapolated", [None, rule])):
            _, took_s, _ = _run(pipeline, seeds, NUM_STEPS, rules)
            times[way] += [took_s] if round_ >= 0 else []
        peaks.append(float(whole.abs().max()))
    peak = statistics.mean(peaks)
    medians = {way: statistics.median(found) * 1e3 for way, found in times.items()}
    return [
        {
            "model": name,
            "way": way,
            "forwards": forwards.get(way),
            "psnr_db": _psnr(errors[way], peak) if way in errors and way != "all steps" else None,
            "ms": ms,
            "speed": medians["eight" if way.startswith("eight") else "all steps"] / ms,
        }
        for way, ms in medians.items()
    ]


def _psnr(errors: Sequence[float], peak: float) -> float:
    error = statistics.mean(errors)
    return 10 * math.log10(peak**2 / error) if error else math.inf


def _run(
    pipeline: DenoisePipeline, seeds: Sequence[int], num_steps: int, rules: Sequence[Acceleration | None]
) -> tuple[torch.Tensor, float, int]:
    """Return the latents of requests that have the rules in turn, the CPU seconds, and the forwards of the first."""
    states = [
        start_request(pipeline, number, num_steps, rules[place % len(rules)]) for place, number in enumerate(seeds)
    ]
    num_forwards, begin_s = 0, time.thread_time()
    while running := [state for state in states if not state.done]:
        while skipping := [state for state in running if state.is_extrapolated]:
            pipeline.step(skipping)
            running = [state for state in states if not state.done]
        if running:
            num_forwards += not states[0].done
            pipeline.step(running)
    return torch.cat([state.latents for state in states]), time.thread_time() - begin_s, num_forwards


def print_extrapolation(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table."""
    print_table(
        _COLUMNS,
        [
            [
                row["model"],
                row["way"],
                "" if row["forwards"] is None else str(row["forwards"]),
                "" if row["psnr_db"] is None else f"{row['psnr_db']:.1f}",
                f"{row['ms']:.1f}",
                f"{row['speed']:.2f}",
            ]
            for row in rows
        ],
    )
