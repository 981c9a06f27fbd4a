"""The load of `infra.bench encode`: distinct texts, callers over HTTP that ask again when answered, and figures."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from infra.bench.command.figures import percentile

TIMEOUT_S: Final = 300.0


def vocabulary(folder: Path) -> list[str]:
    """Return the whole words of a WordPiece tokenizer: one token each."""
    words = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    return sorted(word for word in words if word.isascii() and word.isalpha() and len(word) > 2)


class Texts:
    """Random texts that were never given out before, from `seed`. Lengths are log-uniform: short ones are common."""

    def __init__(self, words: list[str], seed: int, least: int = 5, most: int = 200) -> None:
        self._words = words
        self._rng = random.Random(seed)
        self._lengths = (least, most)
        self._given: set[str] = set()

    def draw(self, number: int, num_words: int | None = None) -> list[str]:
        """Return new texts, of `num_words` each instead of mixed lengths where it is given."""
        return [self._one(num_words) for _ in range(number)]

    def _one(self, num_words: int | None) -> str:
        least, most = self._lengths
        while True:
            length = num_words or round(math.exp(self._rng.uniform(math.log(least), math.log(most))))
            text = " ".join(self._rng.choices(self._words, k=length))
            if text not in self._given:
                self._given.add(text)
                return text


@dataclass(frozen=True, slots=True)
class Load:
    """The outcome of one round. Answers are in the order of the texts."""

    latencies_s: list[float]
    wall_s: float
    answers: list[dict[str, Any]]

    @property
    def requests_per_s(self) -> float:
        """Requests per second over the whole round."""
        return len(self.latencies_s) / self.wall_s


def embeddings_load(url: str, model: str, texts: Sequence[str], num_callers: int) -> Load:
    """Send one text per request to `/v1/embeddings`, from a client of its own. Raises RuntimeError for a bad answer."""
    return asyncio.run(
        post_all(f"{url}/v1/embeddings", [{"model": model, "input": text} for text in texts], num_callers)
    )


async def post_all(url: str, bodies: Sequence[dict[str, Any]], num_callers: int) -> Load:
    """Post each body once, in order, by the first caller that is free. Connections stay open, and are opened before."""
    latencies_s = [0.0] * len(bodies)
    raw = [b""] * len(bodies)
    rest: Iterator[tuple[int, dict[str, Any]]] = iter(enumerate(bodies))
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def caller() -> None:
            for index, body in rest:
                start = time.perf_counter()
                async with session.post(url, json=body) as response:
                    raw[index] = await response.read()
                    if response.status != 200:
                        raise RuntimeError(f"{url} answered {response.status}: {raw[index]!r:.300}")
                latencies_s[index] = time.perf_counter() - start

        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(num_callers)))
        wall_s = time.perf_counter() - start
        return Load(latencies_s, wall_s, [json.loads(answer) for answer in raw])


def interleaved(ways: Mapping[str, Callable[[int], Load]], rounds: int) -> dict[str, list[Load]]:
    """Run every way once per round, in turn, and the other way round in every other one: no way is always first."""
    loads: dict[str, list[Load]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            loads[name].append(ways[name](number))
    return loads


def load_figures(loads: Sequence[Load]) -> dict[str, Any]:
    """Return requests per second: median of the rounds and range; latencies of all rounds together."""
    rates = [load.requests_per_s for load in loads]
    latencies_ms = [seconds * 1e3 for load in loads for seconds in load.latencies_s]
    return {
        "requests_per_s": statistics.median(rates),
        "range": [min(rates), max(rates)],
        "p50_ms": statistics.median(latencies_ms),
        "p99_ms": percentile(latencies_ms, 0.99),
        "n": len(latencies_ms),
    }


def ratio_figures(ours: Sequence[Load], peers: Sequence[Load]) -> dict[str, Any]:
    """Return requests per second, ours / the peer's of the same round: median and range."""
    ratios = [one.requests_per_s / other.requests_per_s for one, other in zip(ours, peers, strict=True)]
    return {"median": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
