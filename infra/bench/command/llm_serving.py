"""The serving mode of `atelier bench llm`: requests that come when they come, and prompts beside a running stream.

Ours alone, in one process without HTTP: what is measured is the engine's scheduling. Requests arrive in real time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from deployments.engines.records.protocol import Engine, SamplingParams, TextDelta, TextRequest
from infra.bench.command.peers import TOKENS

TextEngine = Engine[TextRequest, TextDelta]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Serving:
    """A load: Poisson arrivals of equal requests, and the times within which one of them counts as served well."""

    rate_per_s: float
    num_requests: int
    n_prompt: int
    n_gen: int
    max_ttft_ms: float
    max_tpot_ms: float
    seed: int = 0

    def arrivals(self) -> list[tuple[float, TextRequest]]:
        """Return the requests with the seconds after the start at which they come."""
        draw, now, found = random.Random(self.seed), 0.0, []
        for number in range(self.num_requests):
            now += draw.expovariate(self.rate_per_s)
            found.append((now, _request(f"arrival-{number}", draw, self.n_prompt, self.n_gen)))
        return found


@dataclass(slots=True)
class RequestTimes:
    """Seconds after the start at which a request came, got its first token and its last one."""

    arrival_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from the request to its first token."""
        return (self.first_s - self.arrival_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Return the milliseconds per token behind the first."""
        return (self.last_s - self.first_s) * 1e3 / max(1, self.num_tokens - 1)


def _request(id_: str, draw: random.Random, n_prompt: int, n_gen: int) -> TextRequest:
    prompt = tuple(draw.choice(TOKENS) for _ in range(n_prompt))
    return TextRequest(id_, prompt, SamplingParams(max_tokens=n_gen, temperature=0, ignore_eos=True))


def serve_arrivals(
    engine: TextEngine,
    arrivals: Sequence[tuple[float, TextRequest]],
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[RequestTimes]:
    """Give an engine requests as they come, and note when their tokens do. Raises RuntimeError when one fails."""
    times = {request.request_id: RequestTimes(arrival_s) for arrival_s, request in arrivals}
    start, num_added = clock(), 0
    while num_added < len(arrivals) or engine.has_work:
        now = clock() - start
        while num_added < len(arrivals) and arrivals[num_added][0] <= now:
            engine.add_request(arrivals[num_added][1])
            num_added += 1
        if not engine.has_work:
            sleep(arrivals[num_added][0] - now)
            continue
        _note(engine, times, lambda: clock() - start)
    return list(times.values())


def _note(engine: TextEngine, times: dict[str, RequestTimes], now: Clock) -> None:
    deltas = engine.step()
    if engine.failures:
        raise RuntimeError(f"requests failed: {dict(engine.failures)}")
    after = now()
    for delta in deltas:
        one = times[delta.request_id]
        one.first_s = one.first_s if one.num_tokens else after
        one.last_s = after
        one.num_tokens += len(delta.token_ids)


def serving_figures(serving: Serving, times: Sequence[RequestTimes]) -> dict[str, Any]:
    """Return what a load's requests got: percentiles of TTFT and TPOT, tokens per second, and goodput."""
    duration_s = max(one.last_s for one in times)
    good = [one for one in times if one.ttft_ms <= serving.max_ttft_ms and one.tpot_ms <= serving.max_tpot_ms]
    return {
        "rate_per_s": serving.rate_per_s,
        "num_requests": len(times),
        "n_prompt": serving.n_prompt,
        "n_gen": serving.n_gen,
        "duration_s": duration_s,
        "tokens_per_s": sum(one.num_tokens for one in times) / duration_s,
        **_percentiles("ttft_ms", [one.ttft_ms for one in times]),
        **_percentiles("tpot_ms", [one.tpot_ms for one in times]),
        "max_ttft_ms": serving.max_ttft_ms,
        "max_tpot_ms": serving.max_tpot_ms,
        "goodput_per_s": len(good) / duration_s,
        "good_share": len(good) / len(times),
    }


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"{name}_p{part}": ordered[min(len(ordered) - 1, len(ordered) * part // 100)] for part in (50, 90, 99)}


def stream_beside_prompts(
    engine: TextEngine, n_prompt: int, n_gen: int, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """Measure the gaps between a stream's tokens: alone, and while there is always one prompt to be computed."""
    draw = random.Random(0)
    idle_ms, _ = _gaps(engine, draw, 0, n_gen, clock)
    busy_ms, num_prompts = _gaps(engine, draw, n_prompt, n_gen, clock)
    return {
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "idle_tpot_ms": statistics.median(idle_ms),
        "busy_tpot_ms": statistics.median(busy_ms),
        "busy_tpot_ms_max": max(busy_ms),
        "times_idle": statistics.median(busy_ms) / statistics.median(idle_ms),
        "prompts_per_s": num_prompts / (sum(busy_ms) / 1e3),
    }


def _gaps(engine: TextEngine, draw: random.Random, n_prompt: int, n_gen: int, clock: Clock) -> tuple[list[float], int]:
    """Return the milliseconds between the tokens of a stream, and how many prompts were done beside it."""
    engine.add_request(_request("stream", draw, 16, n_gen + 1))
    stamps: list[float] = []
    is_beside, is_over, num_prompts = False, False, 0
    while not is_over:
        if n_prompt and stamps and not is_beside:
            engine.add_request(_request("beside", draw, n_prompt, 1))
            is_beside = True
        deltas = engine.step()
        if engine.failures:
            raise RuntimeError(f"requests failed: {dict(engine.failures)}")
        for delta in deltas:
            if delta.request_id == "stream":
                stamps.append(clock())
                is_over = delta.is_last
            else:
                is_beside = False
                num_prompts += 1
    engine.abort("beside")
    return [(after - before) * 1e3 for before, after in pairwise(stamps)], num_prompts


def formatted_figures(rows: Sequence[dict[str, Any]]) -> str:
    """Return figures as a Markdown table for each of `rows`."""
    tables = []
    for row in rows:
        cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()]
        head = " | ".join(row), " | ".join("---:" for _ in row), " | ".join(cells)
        tables.append("\n".join(f"| {line} |" for line in head))
    return "\n\n".join(tables)
