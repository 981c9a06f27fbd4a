"""Steps that end between two layers since nobody wants them; threads of prompts and of completions."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from deployments.engines.records.protocol import EngineError

NUM_LAYERS = 4  # and prompts of a multiple of 16 tokens, which are padded nowhere


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama", 0, num_hidden_layers=NUM_LAYERS)


def record_layers(engine, monkeypatch, during=lambda layer: None) -> list[tuple[int, int]]:
    """Return the list that gets (layer, tokens) of every layer that runs; `during` is called in its midst."""
    ran: list[tuple[int, int]] = []
    for number, layer in enumerate(engine._runner._model.module.model.layers):
        plain = layer.mlp.forward

        def forward(x, number=number, plain=plain):
            ran.append((number, len(x)))
            during(number)
            return plain(x)

        monkeypatch.setattr(layer.mlp, "forward", forward)
    return ran


@pytest.mark.parametrize("at", range(NUM_LAYERS - 1))
def test_a_prompt_that_nobody_wants_ends_before_its_next_layer(at, model, request_of, prompt_of, monkeypatch):
    engine = model.engine()
    ran = record_layers(engine, monkeypatch, lambda layer: layer == at and engine.request_cancel("long"))
    engine.add_request(request_of("long", prompt_of(208)))
    assert engine.step() == []
    assert ran == [(layer, 208) for layer in range(at + 1)]
    assert not engine.has_work
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    engine.abort("long")  # as the loop does, when the step is over
    assert not engine._cancelled


def test_another_thread_may_say_so_at_any_time(model, request_of, prompt_of, monkeypatch):
    engine = model.engine()
    is_computing, is_cancelled = threading.Event(), threading.Event()

    def wait(layer: int) -> None:
        is_computing.set()
        assert is_cancelled.wait(30)

    ran = record_layers(engine, monkeypatch, wait)
    engine.add_request(request_of("long", prompt_of(200)))
    stepping = threading.Thread(target=engine.step)
    stepping.start()
    assert is_computing.wait(30)
    engine.request_cancel("long")
    is_cancelled.set()
    stepping.join(30)
    assert len(ran) == 1
    assert not engine.has_work


def test_the_others_of_the_step_get_the_same(model, run_all, request_of, prompt_of, monkeypatch):
    engine, is_over = model.engine(max_decode_delay=1e9), []

    def during(layer: int) -> None:
        if layer == 2 and not is_over and any(one.request_id == "left" for one in engine._scheduler._prefilling):
            is_over.append(engine.request_cancel("left"))

    record_layers(engine, monkeypatch, during)
    requests = [
        request_of("first", prompt_of(9), max_tokens=12),
        request_of("left", prompt_of(180), max_tokens=12),
        request_of("seeded", prompt_of(30), max_tokens=12, temperature=1.0, seed=3),
    ]
    got = run_all(engine, requests, (0, 3, 3))
    alone = run_all(model.engine(), requests[::2], (0, 3))
    assert is_over
    assert got["left"].token_ids == []
    assert got["first"].token_ids == alone["first"].token_ids == model.greedy(prompt_of(9), 12)
    assert got["seeded"].token_ids == alone["seeded"].token_ids
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_step_goes_on_that_is_mostly_for_others(model, request_of, prompt_of, monkeypatch):
    engine = model.engine()
    ran = record_layers(engine, monkeypatch, lambda layer: engine.request_cancel("short"))
    engine.add_request(request_of("long", prompt_of(96)))
    engine.add_request(request_of("short", prompt_of(16)))
    assert {delta.request_id for delta in engine.step()} == {"long", "short"}
    assert ran == [(layer, 112) for layer in range(NUM_LAYERS)]
    engine.abort("short")
    assert {delta.request_id for delta in engine.step()} == {"long"}


def test_prompts_and_completions_have_threads_of_their_own(model, run_all, request_of, prompt_of, monkeypatch):
    leased = []
    lease = SimpleNamespace(leased=lambda count: nullcontext(leased.append(count)))
    engine = model.engine(decode_threads=2, prefill_threads=3, node_threads=lease)
    before, seen = torch.get_num_threads(), []
    record_layers(engine, monkeypatch, lambda layer: seen.append(torch.get_num_threads()))
    found = run_all(engine, [request_of("r", prompt_of(9), max_tokens=3)])["r"]
    assert seen == [3] * NUM_LAYERS + [2] * 2 * NUM_LAYERS
    assert leased == [3, 2, 2]
    assert torch.get_num_threads() == before
    assert found.token_ids == model.greedy(prompt_of(9), 3)


def test_threads_that_change_bits_are_refused_where_bits_are_promised(model):
    with pytest.raises(EngineError, match="2 threads decode and 1 compute prompts"):
        model.engine(decode_threads=2, prefill_threads=1, is_deterministic=True)
    model.engine(decode_threads=2, prefill_threads=2, is_deterministic=True)
