"""Code that comes with a model is never run, and nobody is asked whether it may be."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.engines.llm.models.registry import load_config
from deployments.engines.llm.tokenizer import load_tokenizer
from deployments.engines.records.protocol import EngineError
from deployments.engines.text import encoder


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The question that transformers asks the terminal, by itself for half a minute each; here the answer is yes."""
    asked: list[str] = []

    def answer(question: str = "") -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr(builtins, "input", answer)
    return asked


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose classes come with it."""
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w').close()\n")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    classes = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", None]}
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": classes}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "own", "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("load", [load_tokenizer, encoder.load_tokenizer, load_config])
def test_it_is_refused_and_nobody_is_asked(model: Path, questions: list[str], load: Callable[[Path], Any]) -> None:
    with pytest.raises(EngineError, match=r"code that comes with (a|the) model"):
        load(model)
    assert not questions
    assert not (model / "was-run").exists()
