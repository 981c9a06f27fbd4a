"""`infra.bench encode`: the text-encoder service beside infinity-emb, and beside a load of the encoder per request.

Ours is a whole cluster over HTTP; each side has as many torch threads, on the same cores, which the client shares.
Both serve the same folders in float32. All texts of the throughput are distinct, so that no cache has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from ray import serve

from deployments.console.output import Column, print_line, print_table
from deployments.console.running import cluster_up
from infra.bench.command.figures import percentile, summary
from infra.bench.encode_cache import live_entries, measure_lookups, measure_nodes
from infra.bench.encode_load import (
    Load,
    Texts,
    embeddings_load,
    interleaved,
    load_figures,
    post_all,
    ratio_figures,
    vocabulary,
)
from infra.bench.encode_reload import reload_ms
from infra.bench.encode_servers import (
    EncoderCounts,
    arrival_padding,
    cluster_config,
    deploy_empty,
    encoder_counts,
    infinity_environment,
    infinity_server,
    minilm_folder,
    write_t5,
)

OURS: Final = "atelier"
INFINITY: Final = "infinity-emb"
MINILM, T5 = "minilm", "t5"
WARM_TEXTS: Final = 32
MAX_BATCH: Final = 32  # of both sides, by default
INSIDE_TARGET_MS: Final = 1.0
EMBEDDING_WIDTH: Final = 384  # of MiniLM


@dataclass(frozen=True, slots=True)
class EncodeSettings:
    """The number of repetitions of each measurement. `requests`: per round, by the number of callers."""

    rounds: int = 3
    requests: tuple[tuple[int, int], ...] = ((1, 20), (8, 48), (64, 128))
    num_reloads: int = 3
    num_hits: int = 200
    num_overhead: int = 256
    num_identical: int = 1000
    num_threads: int = 1


def measure_encode(settings: EncodeSettings, seed: int, cache: Path) -> dict[str, Any]:
    """Measure, and return JSON-able figures. `cache` keeps the peer's environment for the next time."""
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints when a process of it dies, and stdout is for figures
        return _measure(settings, seed, cache)


def _measure(settings: EncodeSettings, seed: int, cache: Path) -> dict[str, Any]:
    environment = infinity_environment(cache)
    load_average = [os.getloadavg()]
    with tempfile.TemporaryDirectory() as name:
        folder, minilm = Path(name), minilm_folder()
        models = {MINILM: minilm, T5: write_t5(folder / "t5", minilm, seed)}
        words = vocabulary(minilm)
        texts = Texts(words, seed)
        memory = live_entries(models[T5], Texts(words, seed, 5, 40).draw(64), EMBEDDING_WIDTH)
        with contextlib.ExitStack() as running:
            peer = running.enter_context(infinity_server(environment, models, settings.num_threads))
            ours = running.enter_context(cluster_up(cluster_config(folder, models, settings.num_threads), ""))
            load_average.append(os.getloadavg())
            urls = {OURS: ours, INFINITY: peer}
            found = {model: _throughput(urls, model, texts, settings) for model in models}
            reloads = {model: reload_ms(path, texts.draw(settings.num_reloads), 1) for model, path in models.items()}
            hits = {model: _hits(ours, model, texts, settings.num_hits) for model in models}
            overhead = _overhead(ours, texts, settings)
            serve.shutdown()  # here: Serve would connect to another Ray to do it later
        load_average.append(os.getloadavg())
        lookups = measure_lookups(minilm, texts)
        nodes = measure_nodes(folder / "nodes", models, T5, texts, settings.num_identical, settings.num_threads)
    return {
        "throughput": found,
        "reload_ms": {model: summary(times) for model, times in reloads.items()},
        "hits": hits,
        "overhead": overhead,
        "live_entries": memory,
        "lookups": lookups,
        **nodes,
        "seed": seed,
        "rounds": settings.rounds,
        "threads": settings.num_threads,
        "load_average": load_average,
    }


def _throughput(urls: Mapping[str, str], model: str, texts: Texts, settings: EncodeSettings) -> dict[str, Any]:
    same = _same_vectors(urls, model, texts)
    found: dict[str, Any] = {"least_cosine": same, "callers": {}}
    for num_callers, number in settings.requests:
        inputs = [texts.draw(number) for _ in range(settings.rounds)]
        counts: list[EncoderCounts] = []
        ways = {name: partial(_round, url, model, inputs, num_callers) for name, url in urls.items()}
        ways[OURS] = partial(_counted, urls[OURS], ways[OURS], counts)
        loads = interleaved(ways, settings.rounds)
        found["callers"][str(num_callers)] = {
            **{name: load_figures(rounds) for name, rounds in loads.items()},
            "ratio": ratio_figures(loads[OURS], loads[INFINITY]),
            "padding": _padding(counts, loads[OURS]),
        }
    return found


def _round(url: str, model: str, inputs: Sequence[Sequence[str]], num_callers: int, number: int) -> Load:
    return embeddings_load(url, model, inputs[number], num_callers)


def _counted(url: str, way: Any, counts: list[EncoderCounts], number: int) -> Load:
    before = encoder_counts(url)
    load: Load = way(number)
    counts.append(encoder_counts(url).since(before))
    return load


def _padding(counts: Sequence[EncoderCounts], loads: Sequence[Load]) -> dict[str, float]:
    """Return shares of the positions that forwards worked on: what was counted, and what batches of the same mean
    size, and of the largest, would have had in the order of arrival.
    """
    lengths = [answer["usage"]["prompt_tokens"] for load in loads for answer in load.answers]
    total = EncoderCounts(*(sum(getattr(one, name) for one in counts) for name in EncoderCounts.__slots__))
    if total.texts != len(lengths):
        raise RuntimeError(f"{total.texts} texts were encoded for {len(lengths)} requests: the counts are of others")
    mean_size = max(1, round(total.texts / total.batches))
    return {
        "counted": total.padding_share,
        "texts_per_batch": total.texts / total.batches,
        "texts_per_forward": total.texts / total.forwards,
        "arrival_same_size": arrival_padding(lengths, mean_size),
        "arrival_max_size": arrival_padding(lengths, MAX_BATCH),
    }


def _same_vectors(urls: Mapping[str, str], model: str, texts: Texts) -> float:
    """Return the least cosine between vectors of the same text; warms both sides up."""
    inputs = texts.draw(WARM_TEXTS)
    loads = [embeddings_load(url, model, inputs, 8) for url in urls.values()]
    ours, theirs = (
        np.array([answer["data"][0]["embedding"] for answer in load.answers], dtype=np.float64) for load in loads
    )
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float(((ours * theirs).sum(axis=1) / norms).min())


def _hits(url: str, model: str, texts: Texts, number: int) -> dict[str, Any]:
    """Ask for the same text again, by one caller; return milliseconds over HTTP, and inside the replica."""
    load = embeddings_load(url, model, texts.draw(1) * (number + 1), 1)
    if [answer["encoder_cache"]["misses"] for answer in load.answers] != [1] + [0] * number:
        raise RuntimeError("a text that had been encoded was not found in the cache")
    inside = [answer["timings_ms"]["switch"] + answer["timings_ms"]["encode"] for answer in load.answers[1:]]
    return {"http_ms": _latency([s * 1e3 for s in load.latencies_s[1:]]), "inside_ms": _latency(inside)}


def _overhead(url: str, texts: Texts, settings: EncodeSettings) -> dict[str, Any]:
    """Return latencies of cached texts beside empty applications behind the same proxy, by 64 callers and by one."""
    cached = [{"model": MINILM, "input": text} for text in texts.draw(64, 20)]
    asyncio.run(post_all(f"{url}/v1/embeddings", cached, 8))
    targets = {"cached embedding": f"{url}/v1/embeddings"}
    targets |= {name: url + prefix for name, prefix in deploy_empty().items()}

    def post_cached(target: str, num_callers: int, _: int) -> Load:
        number = settings.num_overhead if num_callers > 1 else settings.num_overhead // 4
        bodies = list(islice(cycle(cached), number))
        return asyncio.run(post_all(target, bodies, num_callers))

    found: dict[str, Any] = {}
    for num_callers in (64, 1):
        ways = {name: partial(post_cached, target, num_callers) for name, target in targets.items()}
        loads = interleaved(ways, settings.rounds + 1)
        figures = {name: load_figures(rounds[1:]) for name, rounds in loads.items()}  # the first meets the replicas
        empty_ms = {name: one["p50_ms"] for name, one in figures.items()}
        own_ms = empty_ms.pop("cached embedding")
        added = {name: own_ms - other_ms for name, other_ms in empty_ms.items()}
        found[str(num_callers)] = {"ways": figures, "added_p50_ms": added}
    return found


def _latency(samples_ms: Sequence[float]) -> dict[str, Any]:
    return summary(samples_ms) | {"p99": percentile(samples_ms, 0.99)}


def print_encode_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print tables, or the figures as one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    _print_throughput(figures["throughput"])
    _print_padding(figures["throughput"])
    for model, found in figures["reload_ms"].items():
        print_line(f"{model} loaded for each request: {found['p50']:.0f} ms per request ({_range(found)})")
    _print_hits(figures)
    for line in _show_lines(figures):
        print_line(line)


def _print_throughput(models: dict[str, Any]) -> None:
    rows, ratios = [], []
    for model, found in models.items():
        for num_callers, sides in found["callers"].items():
            load, ratio = f"{model}, {num_callers} callers", sides["ratio"]
            low, high = ratio["range"]
            ratios.append(f"{load}: Atelier / peer {ratio['median']:.2f} ({low:.2f} to {high:.2f})")
            for name in [name for name in sides if name not in ("ratio", "padding")]:
                one = sides[name]
                rates = f"{one['range'][0]:.1f} to {one['range'][1]:.1f}"
                times = [f"{one[key]:.1f}" for key in ("p50_ms", "p99_ms")]
                rows.append([load, name, f"{one['requests_per_s']:.1f}", rates, *times])
    figures = (Column(header, align="right") for header in ("requests/s", "range", "p50 ms", "p99 ms"))
    print_table((Column("requests", "text"), Column("side", "text"), *figures), rows, title="over HTTP")
    for line in ratios:
        print_line(line)


def _print_padding(models: dict[str, Any]) -> None:
    rows = []
    for model, found in models.items():
        for num_callers, sides in found["callers"].items():
            one = sides["padding"]
            shares = [f"{one[name]:.1%}" for name in ("counted", "arrival_same_size", "arrival_max_size")]
            rows.append([f"{model}, {num_callers} callers", *shares, f"{one['texts_per_batch']:.1f}"])
    headers = ("Atelier", "as they came", "as they came, by 32", "texts/batch")
    columns = (Column("requests", "text"), *(Column(header, align="right") for header in headers))
    print_table(columns, rows, title="padding, of all positions")


def _print_hits(figures: dict[str, Any]) -> None:
    rows = {
        f"{model}, {where}": found[key]
        for model, found in figures["hits"].items()
        for where, key in ((f"in the replica (target {INSIDE_TARGET_MS:g} ms)", "inside_ms"), ("HTTP", "http_ms"))
    }
    rows |= {
        f"{what}, {place}": found for what, places in figures["lookups"].items() for place, found in places.items()
    }
    columns = (Column("where", "text"), *(Column(one, align="right") for one in ("p50 ms", "p95 ms")))
    cells = [[name, f"{found['p50']:.2f}", f"{found['p95']:.2f}", _range(found)] for name, found in rows.items()]
    print_table((*columns, Column("range", align="right")), cells, title="the same text again")


def _show_lines(figures: dict[str, Any]) -> list[str]:
    same, live = figures["identical"], figures["live_entries"]
    lines = [
        f"{same['callers']} callers at once of one text over {way}, {same['replicas']} replicas: encoded "
        f"{same[way]['encoded']} times (target 1) in {same[way]['wall_s']:.1f} s"
        for way in ("http", "handles")
    ]
    lines.append(
        f"live T5-XXL encodings per GiB: {live['trimmed']['per_gib']:.0f} trimmed "
        f"(mean {live['trimmed']['mean_tokens']:.1f} tokens), {live['stock']['per_gib']:.0f} padded to 512: "
        f"{live['ratio']:.1f} times; sentence embeddings of {live['sentence']['width']}: "
        f"{live['sentence']['per_gib']:.0f}"
    )
    for num_callers, found in figures["overhead"].items():
        for name, added in found["added_p50_ms"].items():
            lines.append(f"{num_callers} callers, cached texts: {added:+.1f} ms beside {name}")
    return lines


def _range(found: dict[str, Any]) -> str:
    return f"{found['low']:.2f} to {found['high']:.2f}"
