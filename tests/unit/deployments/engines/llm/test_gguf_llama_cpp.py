"""Tokens of GGUF models against llama.cpp's own; skipped where `make judge-llama` has not compiled it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.bench.llm import mapped_tensors
from deployments.bench.llm_peer import LlamaCpp, llama_cpp_python
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.protocol import SamplingParams, TextRequest
from weights.quantization.checkpoints import quantize_checkpoint

DEMO = Path(__file__).parents[5] / "infra" / "demo"
PYTHON = llama_cpp_python()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="no llama-cpp-python: make judge-llama")]
QUESTIONS = ["What is 12 + 7?", "99 + 1", "0 + 1", "What is 40 + 2?", "1 + 0", "57 + 38"]
TEXTS = [
    *QUESTIONS,
    "  spaces\tand\nlines \r\n\n\n  ",
    "<|user|>3 + 4<|assistant|>",
    " <|user|> <|assistant|><|user|>",
    "<|us er|> </s> <s>",
    "12345 - (6 * 7) = 1e-9, 0x7f",
    "def f(x):\n\treturn {'a': [x ** 2], \"b\": x // 3}  # don't, we'll, I'M",
    "ünïcödé 👍🏽 e\u0301 日本語 שלום \uff41\uff42\uff43 \u00a0\u200b\ufeff",
    "".join(map(chr, range(32, 127))),
    "…—“quotes” ½ ² Ⅷ ٣ \U0001d7d8",
]


@pytest.fixture(scope="module", params=["gguf-q8_0", "gguf-q4_0"])
def adder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("adder") / "adder.gguf"
    quantize_checkpoint(DEMO / "models" / "adder", file, request.param)
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
    for question in QUESTIONS:
        prompt = engine.encode_chat([{"role": "user", "content": question}])
        engine.add_request(TextRequest(question, prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)))
        ours = []
        while engine.has_work:
            ours += [token for delta in engine.step() for token in delta.token_ids]
        assert ours == judge.ask("greedy", ids=list(prompt), count=4)["ids"]
