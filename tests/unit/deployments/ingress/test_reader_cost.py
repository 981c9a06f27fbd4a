"""A reader of answers costs next to nothing beside what a streamed token costs otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest
from kit.scripted_llm import BEGIN, save_scripted_llm
from unit.deployments.engines.llm.test_answer_reader import FUNCTIONS
from unit.deployments.ingress.http_fakes import Replicas

from deployments.engines.llm.answer_forms import REASONING_FORMS, TOOL_FORMS, AnswerForm
from deployments.engines.llm.answer_reader import AnswerReader
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.records.protocol import SamplingParams, TextRequest
from deployments.records import TextChunk

PIECES = ["The ", "river ", "runs ", "past ", "the ", "town, ", "and ", "people ", "cross ", "a ", "bridge."] * 25
SHARE = 0.02


def seconds_each(times: int, act: Callable[[], object]) -> float:
    """Return the processor's time of one of so many, of the quickest of five."""
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        act()
        best = min(best, time.process_time() - start)
    return best / times


async def test_a_reader_costs_two_hundredths_of_a_token_at_most(
    http: httpx.AsyncClient, replicas: Replicas, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Even of a token of the smallest model, of one layer, and without processes between it and the client."""
    pieces = [f"{number} " for number in range(60)]
    folder = tmp_path_factory.mktemp("model")
    engine = LLMEngine(
        folder, save_scripted_llm(folder, pieces, "{{ messages }}" + BEGIN), LLMEngineConfig(kv_cache_bytes=2**24)
    )
    request = TextRequest("r", engine.encode_text(BEGIN), SamplingParams(max_tokens=50, temperature=0.0))

    def write() -> None:
        engine.add_request(request)
        while engine.has_work:
            engine.step()

    replicas.chunks = [*(TextChunk(piece, 4, 9) for piece in PIECES), TextChunk("", 4, 9, "stop", {"total": 1.0})]
    chat = {"model": "chatty", "messages": [{"role": "user", "content": "x"}], "stream": True}
    shown = []
    for _ in range(3):
        start = time.process_time()
        answer = await http.post("/v1/chat/completions", json=chat)
        shown.append((time.process_time() - start) / len(PIECES))
        assert "bridge" in answer.text
    token = seconds_each(50, write) + min(shown)

    def read(name: str) -> None:
        reader = AnswerReader(AnswerForm(TOOL_FORMS[name], REASONING_FORMS["think"]), FUNCTIONS)
        for piece in PIECES:
            reader.feed(piece)
        reader.flush()

    for name in ("hermes", "qwen3-coder", "deepseek-v3", "kimi-k3", "gemma4", "llama4"):
        share = seconds_each(len(PIECES), lambda name=name: read(name)) / token  # type: ignore[misc]
        print(f"{name}: {share:.2%} of {token * 1e6:.0f} us")
        assert share <= SHARE, name
