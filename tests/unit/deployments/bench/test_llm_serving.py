"""The serving mode of `atelier bench llm` on an engine whose steps take a set time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from deployments.engines.records.protocol import TextDelta, TextRequest
from infra.bench.command.llm_serving import (
    RequestTimes,
    Serving,
    serve_arrivals,
    serving_figures,
    stream_beside_prompts,
)


class SteadyEngine:
    """Gives every running request a token a step; prompts take a step for each 100 tokens. A step takes `step_s`,
    and `prompt_s` more where a prompt is in it."""

    def __init__(self, step_s: float = 0.01, prompt_s: float = 0.02) -> None:
        self.now, self.step_s, self.prompt_s = 0.0, step_s, prompt_s
        self.failures: dict[str, Exception] = {}
        self.left: dict[str, list[int]] = {}  # prompt tokens, tokens

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def add_request(self, request: TextRequest) -> None:
        self.left[request.request_id] = [len(request.prompt_token_ids), request.sampling.max_tokens]

    def abort(self, request_id: str) -> None:
        self.left.pop(request_id, None)

    def step(self) -> list[TextDelta]:
        deltas, has_prompt = [], False
        for id_, left in list(self.left.items()):
            if left[0] > 0:
                has_prompt = True
                left[0] -= 100
            if left[0] <= 0:
                left[1] -= 1
                reason = None if left[1] else "length"
                deltas.append(TextDelta(id_, "x", (1,), 1, 1, reason))
                if reason:
                    del self.left[id_]
        self.now += self.step_s + has_prompt * self.prompt_s
        return deltas


def test_arrivals_are_poisson_and_repeatable() -> None:
    serving = Serving(5.0, 4000, 7, 3, 1, 1)
    arrivals = serving.arrivals()
    assert [at for at, _ in arrivals] == [at for at, _ in serving.arrivals()]
    gaps = [b - a for a, b in pairwise([0.0, *(at for at, _ in arrivals)])]
    assert sum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.1)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # 1 / e
    assert all(len(request.prompt_token_ids) == 7 and request.sampling.max_tokens == 3 for _, request in arrivals)


def test_times_are_counted_from_the_arrival_even_when_the_engine_is_late() -> None:
    engine = SteadyEngine()
    serving = Serving(2.0, 30, 250, 5, 1, 1)
    arrivals = serving.arrivals()
    times = serve_arrivals(engine, arrivals, engine.clock, engine.sleep)
    for (at, _), one in zip(arrivals, times, strict=True):
        assert one.arrival_s == at
        assert one.num_tokens == 5
        assert 0.09 - 1e-9 <= one.first_s - at <= 0.09 + 0.03 + 1e-9  # three steps, and what is left of the one before
        assert 0.04 - 1e-9 <= one.last_s - one.first_s <= 4 * 0.03 + 1e-9


def test_a_failure_ends_the_measurement() -> None:
    engine = SteadyEngine()
    engine.failures = {"arrival-0": ValueError("broken")}
    with pytest.raises(RuntimeError, match="broken"):
        serve_arrivals(engine, Serving(2.0, 3, 10, 2, 1, 1).arrivals(), engine.clock, engine.sleep)


def test_goodput_counts_what_keeps_both_limits() -> None:
    times = [
        RequestTimes(0.0, 0.1, 1.1, 11),  # 100 ms each
        RequestTimes(1.0, 1.6, 2.6, 11),  # first token too late
        RequestTimes(2.0, 2.1, 4.0, 11),  # others too slow
        RequestTimes(3.0, 3.2, 3.2, 1),  # one token alone
    ]
    figures = serving_figures(Serving(1.0, 4, 5, 11, max_ttft_ms=500, max_tpot_ms=150), times)
    assert figures["goodput_per_s"] == pytest.approx(2 / 4.0)
    assert figures["good_share"] == 0.5
    assert figures["tokens_per_s"] == pytest.approx(34 / 4.0)
    assert figures["ttft_ms_p50"] == pytest.approx(200)
    assert figures["tpot_ms_p99"] == pytest.approx(190)


def test_a_stream_beside_prompts() -> None:
    engine = SteadyEngine()
    figures = stream_beside_prompts(engine, 500, 50, engine.clock)
    assert figures["idle_tpot_ms"] == pytest.approx(10)
    assert figures["busy_tpot_ms"] == pytest.approx(30)
    assert figures["times_idle"] == pytest.approx(3)
    assert figures["prompts_per_s"] == pytest.approx(10 / 1.5)  # five steps of 30 ms each
    assert not engine.has_work
