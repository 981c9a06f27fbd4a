"""Figures of `infra.bench door`, its requests, and what the targets say."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.seeding import seeded_random
from kit.waiting import wait_until

from configs.loading import load_cluster_config
from infra.bench.door import QUICK, DoorSettings, _bench_config
from infra.bench.door_figures import (
    Target,
    _retry_error,
    cancel_figures,
    draw_arrivals_s,
    latency_figures,
    lost,
    overload_figures,
    work_rate,
)
from infra.bench.door_load import CANCELLED, GONE, Outcome
from infra.bench.door_overload import num_open_files
from infra.bench.door_report import find_targets, print_door_figures
from infra.bench.door_requests import NUM_CACHED, Requests

DEMO = Path(__file__).parents[4] / "configs/clusters/demo.yaml"


def outcome(kind: str = "a", status: int = 200, sent_s: float = 0.0, took_s: float = 0.1, **fields: Any) -> Outcome:
    return Outcome(kind, status, sent_s, sent_s + took_s / 2, sent_s + took_s, **fields)


def test_arrivals_are_those_of_a_poisson_process_and_of_their_seed() -> None:
    times_s = draw_arrivals_s(50.0, 100.0, random.Random(3))
    assert times_s == sorted(times_s) == draw_arrivals_s(50.0, 100.0, random.Random(3))
    assert times_s != draw_arrivals_s(50.0, 100.0, random.Random(4))
    assert times_s[0] >= 0
    assert times_s[-1] < 100
    counts = list(Counter(int(time_s) for time_s in times_s).values())
    mean = sum(counts) / 100
    variance = sum((count - mean) ** 2 for count in counts) / 100
    assert 46 < mean < 54  # five standard errors
    assert 0.5 < variance / mean < 1.7  # of a Poisson distribution: 1


def test_latencies_and_rates_of_rounds() -> None:
    rng = seeded_random()
    rounds = [[outcome(sent_s=rng.random(), took_s=rng.uniform(0.1, 2)) for _ in range(11)] for _ in range(3)]
    figures = latency_figures(rounds)
    took_s = sorted(one.done_s - one.sent_s for one_round in rounds for one in one_round)
    assert figures["p50_ms"] == pytest.approx(took_s[16] * 1e3)
    assert figures["p99_ms"] == pytest.approx(took_s[-1] * 1e3)
    assert figures["first_p50_ms"] == pytest.approx(took_s[16] / 2 * 1e3)
    assert figures["gap_p50_ms"] is None
    rates = sorted(11 / (max(o.done_s for o in one) - min(o.sent_s for o in one)) for one in rounds)
    assert figures["requests_per_s"] == pytest.approx(rates[1])


def test_there_is_no_figure_of_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"1 of 2 requests failed.*status=503"):
        latency_figures([[outcome(), outcome(status=503)]])


def test_an_answer_after_its_deadline_is_not_good() -> None:
    assert outcome(took_s=1.0, timeout_s=1.5).is_good
    assert not outcome(took_s=2.0, timeout_s=1.5).is_good
    assert not outcome(status=429).is_good


def test_work_counts_what_a_request_costs() -> None:
    cheap = [outcome("cheap", took_s=1.0 + index / 10) for index in range(10)]
    dear = [outcome("dear", took_s=2.5), outcome("dear", status=504, took_s=1.5), outcome("dear", took_s=9.0)]
    costs_s = {"cheap": 0.1, "dear": 1.0}
    # done between 1 and 3: every cheap one, one dear one
    assert work_rate(cheap + dear, costs_s, 1.0, 3.0) == pytest.approx((10 * 0.1 + 1.0) / 2)


def test_a_server_that_answers_only_what_is_cheap_has_no_goodput() -> None:
    offered = [outcome(kind, 200 if kind == "cheap" else 429) for kind in ("cheap", "dear") for _ in range(50)]
    figures = overload_figures(offered, {"cheap": 0.01, "dear": 1.0}, peak=0.9, start_s=0.0, end_s=1.0)
    assert figures["goodput_share"] == pytest.approx(0.5 / 0.9)
    assert (figures["num_good"], figures["num_refused"], figures["in_time_share"]) == (50, 50, 1.0)
    assert figures["without_retry_after"] == 50


def test_of_a_burst_the_last_good_answer_ends_the_time_and_errors_count_as_admitted() -> None:
    burst = [outcome(took_s=took_s, timeout_s=5.0) for took_s in (1.0, 2.0, 4.0, 6.0)] + [outcome(status=GONE)]
    figures = overload_figures(burst, {"a": 1.0}, peak=1.0)
    assert figures["goodput_share"] == pytest.approx(3 / 4)
    later = [replace(one, sent_s=one.sent_s + 2, done_s=one.done_s + 2) for one in burst]  # so long the client took
    assert overload_figures(later, {"a": 1.0}, peak=1.0)["goodput_share"] == pytest.approx(3 / 4)
    assert figures["in_time_share"] == pytest.approx(3 / 5)
    assert figures["statuses"] == {"0": 1, "200": 4}
    nothing = overload_figures([outcome(status=429)], {"a": 1.0}, peak=1.0)
    assert (nothing["goodput_share"], nothing["in_time_share"], nothing["p50_ms"]) == (0.0, None, None)


@pytest.mark.parametrize(
    ("told_s", "true_s", "error"),
    [(4.0, 4.0, 0.0), (1.0, 0.1, 0.0), (4.0, 5.0, 0.0), (2.0, 8.0, 0.75), (16.0, 8.0, 1.0), (10.0, 8.0, 0.25)],
)
def test_retry_after_is_compared_with_the_first_admission(told_s: float, true_s: float, error: float) -> None:
    assert _retry_error(told_s, true_s) == pytest.approx(error)


def test_only_probers_say_how_wrong_retry_after_was() -> None:
    refused = [outcome(status=429, retry_after_s=1.0)] * 5
    probes = [outcome(status=429, retry_after_s=8.0, admitted_after_s=after_s) for after_s in (2.0, 8.0, 10.0)]
    figures = overload_figures(refused + probes, {"a": 1.0}, 1.0, 0.0)["retry_after"]
    assert figures["probes"] == [[8.0, 2.0], [8.0, 8.0], [8.0, 10.0]]
    assert figures["median_error"] == pytest.approx(0.2)
    assert figures["within_quarter"] == pytest.approx(2 / 3)


def test_lost_and_cancelled_requests_are_counted_by_what_became_of_them() -> None:
    seen = [outcome()] * 5 + [outcome(status=500)] * 2 + [outcome(status=GONE, problem="reset")]
    assert lost(seen) == {"num_requests": 8, "num_lost": 3, "problems": {"status 500": 2, "reset": 1}}
    ended = [outcome(status=status) for status in (CANCELLED, CANCELLED, 200, 429, 500, GONE)]
    assert cancel_figures(ended) == {"cancelled": 2, "answered": 1, "refused": 1, "other": 2}


@pytest.mark.parametrize(
    ("figure", "is_floor", "verdict"),
    [
        (1.0, False, "met"),
        (1.1, False, "missed"),
        (1.1, True, "met"),
        (0.9, True, "missed"),
        (None, True, "not measured"),
    ],
)
def test_a_target_is_met_missed_or_not_measured(figure: float | None, is_floor: bool, verdict: str) -> None:
    assert Target("x", figure, 1.0, is_floor).verdict == verdict


def test_requests_are_new_and_those_of_their_seed() -> None:
    drawn = [Requests(5).draw_mix(41), Requests(5).draw_mix(41)]
    assert drawn[0] == drawn[1] != Requests(6).draw_mix(41)
    counts = Counter(ask.kind for ask in drawn[0])
    assert sorted(counts.values()) == [10, 10, 10, 11]
    requests = Requests(7)
    texts = [ask.body["input"] for _ in range(3) for ask in requests.makers["new embedding"](20) if ask.body]
    assert len(set(texts)) == 60
    prompts = [ask.body["prompt"] for _ in range(3) for ask in requests.makers["image"](50) if ask.body]
    assert len(set(prompts)) == 150
    cached = [json.dumps(ask.body) for _ in range(3) for ask in requests.makers["cached embedding"](NUM_CACHED)]
    assert len(set(cached)) == NUM_CACHED


def test_the_cluster_is_the_demo_with_a_store_of_the_bench(tmp_path: Path) -> None:
    demo = load_cluster_config(DEMO)
    config = _bench_config(demo, tmp_path, "serve", num_ingresses=2)
    assert config.store.path == tmp_path / "store"
    assert config.ingress.num_replicas == 2
    assert {model.id for model in config.models} - {model.id for model in demo.models} == {"minilm"}
    assert config.http.port != demo.http.port
    assert config.worker == demo.worker


def test_quick_is_smaller_in_everything() -> None:
    full = DoorSettings()
    assert QUICK.rounds < full.rounds
    assert sum(number for _, number in QUICK.requests) < sum(number for _, number in full.requests)
    assert QUICK.overload.num_cancels < full.overload.num_cancels
    assert sum(QUICK.overload.bursts) < sum(full.overload.bursts)


def _figures(worse: float) -> dict[str, Any]:
    """Figures of a run whose every figure is on its target, or by the factor `worse` beside it."""

    def side(ms: float, per_s: float = 1.0) -> dict[str, Any]:
        return {"p50_ms": ms, "p99_ms": ms, "first_p50_ms": ms, "gap_p50_ms": None, "requests_per_s": per_s, "n": 1}

    own = side(1.15 * worse)
    doors = {kind: {"1": {"atelier": own, "stock": side(1.0)}} for kind in ("chat", "image")}
    doors["new embedding"] = {
        num_callers: {"atelier": side(1.0, rate / worse), "infinity-emb": side(1.0)}
        for num_callers, rate in (("1", 1.0), ("8", 1.0), ("64", 1.5))
    }
    load = {
        "num_requests": 9,
        "num_good": 4,
        "num_refused": 4,
        "goodput_share": 0.9 / worse,
        "in_time_share": 0.95 / worse,
        "p50_ms": 1.0,
        "refused_p50_ms": 1.0,
        "without_retry_after": worse - 1,
        "retry_after": {"median_error": 0.25 * worse},
    }
    nothing = {"denoising": 0, "num_waiting": 0, "leased_bytes": worse - 1, "open_files": 10}
    return {
        "doors": {"haproxy": doors},
        "overload": {
            "peak": {"requests_per_s": 20.0, "costs_s": {"chat": 0.01}},
            "loads": {"3 x capacity": load},
            "health": {"p99_ms": 100.0 * worse, "failed": worse - 1},
            "ingress_bytes": {"before": 0, "most": 128 * 2**20 * worse, "after": 0},
        },
        "cancelled_step": {"step_ms": 30.0, "gone_ms": 35.0 * worse, "poll_ms": 5.0},
        "cancels": {
            "cancelled": 500,
            "answered": 1,
            "refused": 2,
            "other": 0,
            "wall_s": 1.0,
            "before": nothing,
            "after": nothing | {"open_files": 18 * worse},
        },
        "kill": {"num_ingresses": 2, "num_requests": 60, "num_lost": worse - 1, "problems": {}},
        "took_s": 80.0,
        "load_average": [[1.0], [2.0]],
    }


def test_every_target_is_held_to_its_figure() -> None:
    on, off = (find_targets(_figures(worse)) for worse in (1.0, 1.25))
    assert [target.what for target in on if target.verdict != "met"] == []
    assert [target.what for target in off if target.verdict != "missed"] == []
    assert len({target.what for target in on}) == len(on) >= 16


def test_figures_are_shown_and_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    figures = _figures(1.25)
    figures["targets"] = [target.as_dict() for target in find_targets(figures)]
    print_door_figures(figures, as_json=True)
    assert json.loads(capsys.readouterr().out) == figures
    print_door_figures(figures, as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "missed" in shown
    assert "capacity of the mix: 20.0 requests/s" in shown
    assert "160 at the most" in shown


def test_connections_that_clients_keep_open_are_no_files_left_open() -> None:
    process = psutil.Process()
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as clients:
        before = num_open_files(process)

        def connect() -> tuple[socket.socket, socket.socket]:
            client = clients.enter_context(socket.create_connection(server.getsockname()))
            return client, clients.enter_context(server.accept()[0])

        connect()
        assert num_open_files(process) == before + 1  # the client's end, which is here, too
        client, _ = connect()
        client.close()  # and nobody has closed the other end
        wait_until(lambda: num_open_files(process) == before + 2, "a connection whose client has gone")
