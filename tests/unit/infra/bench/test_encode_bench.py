"""Texts that encoding is measured on, callers over HTTP, and figures from counts."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kit.seeding import seeded_random

from infra.bench.encode import print_encode_figures
from infra.bench.encode_cache import ENTRY_BYTES, TENSOR_BYTES, _entry_bytes, _filled
from infra.bench.encode_load import Load, Texts, interleaved, load_figures, post_all, ratio_figures
from infra.bench.encode_servers import EncoderCounts, arrival_padding

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def test_texts_are_distinct_mixed_and_those_of_their_seed() -> None:
    texts = Texts(WORDS, 7).draw(400)
    assert len(set(texts)) == 400
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) >= 5
    assert max(lengths) <= 200
    below = sum(length <= math.sqrt(5 * 200) for length in lengths)  # the middle of log-uniform lengths
    assert 0.4 < below / 400 < 0.6
    assert Texts(WORDS, 7).draw(400) == texts != Texts(WORDS, 8).draw(400)
    assert {len(text.split()) for text in Texts(WORDS, 7).draw(20, 33)} == {33}


def test_texts_are_not_given_out_twice_even_if_there_are_few() -> None:
    assert sorted(Texts(["a", "b"], 0).draw(4, 2)) == ["a a", "a b", "b a", "b b"]


def test_padding_in_the_order_of_arrival() -> None:
    rng = seeded_random()
    lengths = [rng.randint(1, 200) for _ in range(50)]
    groups = [lengths[start : start + 7] for start in range(0, 50, 7)]
    padded = [max(group) for group in groups for _ in group]
    assert arrival_padding(lengths, 7) == pytest.approx(1 - sum(lengths) / sum(padded))
    assert arrival_padding(lengths, 1) == arrival_padding([9] * 5, 3) == arrival_padding([], 3) == 0.0


def test_counts_are_since() -> None:
    before, after = EncoderCounts(1, 2, 3, 40, 5), EncoderCounts(11, 4, 6, 100, 25)
    since = after.since(before)
    assert since == EncoderCounts(10, 2, 3, 60, 20)
    assert since.padding_share == 0.25
    assert EncoderCounts(0, 0, 0, 0, 0).padding_share == 0.0


@asynccontextmanager
async def echo(status: int = 200) -> AsyncIterator[tuple[str, dict[str, int]]]:
    """A server that says what it was asked, and the most that it was asked at a time."""
    seen = {"now": 0, "most": 0}

    async def answer(request: web.Request) -> web.Response:
        seen["now"] += 1
        seen["most"] = max(seen["most"], seen["now"])
        await asyncio.sleep(0.005)
        seen["now"] -= 1
        return web.json_response(await request.json(), status=status)

    app = web.Application()
    app.router.add_post("/ask", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/ask", seen
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("num_callers", [1, 4])
async def test_every_body_is_asked_once_by_so_many_callers(num_callers: int) -> None:
    async with echo() as (url, seen):
        load = await post_all(url, [{"n": n} for n in range(12)], num_callers)
    assert load.answers == [{"n": n} for n in range(12)]
    assert seen["most"] == num_callers
    assert len(load.latencies_s) == 12
    assert min(load.latencies_s) >= 0.005
    assert load.wall_s >= 12 / num_callers * 0.005


async def test_a_bad_answer_ends_the_bench() -> None:
    async with echo(status=500) as (url, _):
        with pytest.raises(RuntimeError, match="answered 500"):
            await post_all(url, [{"n": 1}], 1)


def test_ways_take_turns_and_no_one_is_always_first() -> None:
    asked: list[tuple[str, int]] = []

    def way(name: str, number: int) -> Load:
        asked.append((name, number))
        return Load([0.5], 0.5, [])

    ways = {name: lambda number, name=name: way(name, number) for name in ("a", "b")}
    loads = interleaved(ways, 3)  # type: ignore[arg-type]
    assert asked == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert {name: len(rounds) for name, rounds in loads.items()} == {"a": 3, "b": 3}


def test_figures_of_rounds() -> None:
    ours = [Load([0.1] * 10, 1.0, []), Load([0.2] * 10, 2.0, []), Load([0.3] * 10, 0.5, [])]
    figures = load_figures(ours)
    assert figures["requests_per_s"] == 10
    assert figures["range"] == [5, 20]
    assert (figures["p50_ms"], figures["p99_ms"], figures["n"]) == (pytest.approx(200), pytest.approx(300), 30)
    peers = [Load([0.1] * 10, 2.0, []), Load([0.1] * 10, 2.0, []), Load([0.1] * 10, 2.0, [])]
    assert ratio_figures(ours, peers) == {"median": 2.0, "range": [1.0, 4.0]}


def test_a_cache_holds_as_many_entries_as_their_bytes_allow() -> None:
    import torch

    size = _entry_bytes(10, 64, 2)
    assert size == ENTRY_BYTES + TENSOR_BYTES + 10 * 64 * 2
    stats = _filled(20 * size + 1, lambda _: torch.zeros(10, 64, dtype=torch.bfloat16))
    assert (stats.entries, stats.nbytes) == (20, 20 * size)
    assert _filled(2**20, lambda _: torch.zeros(4), 3).entries == 3


def test_figures_are_shown_and_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    figures = _figures()
    print_encode_figures(figures, as_json=True)
    assert json.loads(capsys.readouterr().out) == figures
    print_encode_figures(figures, as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "encoded 1 times (target 1)" in shown
    assert "encoded 7 times" in shown
    assert "+12.5 ms beside one empty deployment" in shown
    assert "25.0 times" in shown


def _figures() -> dict[str, Any]:
    spread = {"p50": 1.0, "p95": 2.0, "p99": 3.0, "low": 0.5, "high": 4.0, "n": 9}
    side = {"requests_per_s": 30.0, "range": [20.0, 40.0], "p50_ms": 30.0, "p99_ms": 90.0, "n": 12}
    padding = {"counted": 0.05, "texts_per_batch": 12.0, "texts_per_forward": 4.0}
    padding |= {"arrival_same_size": 0.5, "arrival_max_size": 0.6}
    sides = {"atelier": side, "infinity-emb": side, "ratio": {"median": 1.5, "range": [1.0, 2.0]}, "padding": padding}
    live = {"trimmed": {"per_gib": 6400.0, "mean_tokens": 20.0}, "stock": {"per_gib": 256.0}, "ratio": 25.0}
    return {
        "throughput": {"minilm": {"least_cosine": 1.0, "callers": {"8": sides}}},
        "reload_ms": {"minilm": spread},
        "hits": {"minilm": {"http_ms": spread, "inside_ms": spread}},
        "overhead": {"64": {"ways": {}, "added_p50_ms": {"one empty deployment": 12.5}}},
        "live_entries": live | {"sentence": {"per_gib": 349525.3, "width": 384}},
        "identical": {
            "callers": 1000,
            "replicas": 2,
            "http": {"encoded": 1, "wall_s": 2.0},
            "handles": {"encoded": 7, "wall_s": 2.0},
        },
        "lookups": {"sentence embedding": {"other node": spread}},
    }
