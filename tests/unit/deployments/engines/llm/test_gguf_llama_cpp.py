"""Tokens of GGUF models against llama.cpp's own; skipped where `make judge-llama` has not compiled it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.bench.llm_peer import LlamaCpp, llama_cpp_python
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.protocol import SamplingParams, TextRequest
from weights.loading.mapped_checkpoint import mapped_tensors
from weights.quantization.checkpoints import quantize_checkpoint

DEMO = Path(__file__).parents[5] / "infra" / "demo"
PYTHON = llama_cpp_python()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="no llama-cpp-python: make judge-llama")]
TEXTS = [
    "What is 12 + 7?",
    "99 + 1",
    "  spaces\tand\nlines ",
    "<|user|>3 + 4<|assistant|>",
    "12345 - (6 * 7)",
    "ünïcödé 👍",
]


@pytest.fixture(scope="module")
def adder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("adder") / "adder.gguf"
    quantize_checkpoint(DEMO / "models" / "adder", file, "gguf-q8_0")
    return file


@pytest.fixture(scope="module")
def judge(adder: Path) -> Iterator[LlamaCpp]:
    assert PYTHON is not None
    with LlamaCpp(PYTHON, adder, n_ctx=96, n_batch=96) as process:
        yield process


def test_the_ids_of_a_text(adder: Path, judge: LlamaCpp) -> None:
    engine = LLMEngine(adder.parent, mapped_tensors(adder)[1])
    for text in TEXTS:
        ours = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ours == judge.ask("tokens", text=text)["ids"], text


def test_greedy_tokens(adder: Path, judge: LlamaCpp) -> None:
    engine = LLMEngine(adder.parent, mapped_tensors(adder)[1])
    for question in TEXTS[:2]:
        prompt = engine.encode_chat([{"role": "user", "content": question}])
        engine.add_request(TextRequest(question, prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)))
        ours = []
        while engine.has_work:
            ours += [token for delta in engine.step() for token in delta.token_ids]
        assert ours == judge.ask("greedy", ids=list(prompt), count=4)["ids"]
