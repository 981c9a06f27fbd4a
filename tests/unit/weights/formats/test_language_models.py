"""What the files of a language model say of it, damaged ones included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weights.formats.gguf import encode_gguf_header
from weights.formats.language_models import language_model_facts


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"max_position_embeddings": 64}}, {"context_length": 64}),
        ({"config.json": {"text_config": {"max_position_embeddings": 32}}}, {"context_length": 32}),
        (
            {"config.json": {}, "chat_template.jinja": "{% if tools %}{% endif %} </think>"},
            {"knows_tools": True, "thinks": True},
        ),
        (
            {"config.json": {}, "tokenizer_config.json": {"chat_template": "{{ messages }}"}},
            {"knows_tools": False, "thinks": False},
        ),
        (
            {
                "config.json": {},
                "tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "tools"}]},
            },
            {"knows_tools": True, "thinks": False},
        ),
        ({"config.json": {"max_position_embeddings": -1}, "tokenizer_config.json": {"chat_template": 7}}, {}),
        ({}, {}),
        ({"config.json": "{"}, {}),
    ],
)
def test_facts(files: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert language_model_facts(tmp_path) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"llama.context_length": 8192, "tokenizer.chat_template": "{% if tools %}{% endif %}</think>"},
            {"context_length": 8192, "knows_tools": True, "thinks": True},
        ),
        (
            {"llama.context_length": 64, "tokenizer.chat_template": "{{ messages }}"},
            {"context_length": 64, "knows_tools": False, "thinks": False},
        ),
        ({"qwen2.context_length": 64, "tokenizer.chat_template": 7}, {}),
    ],
)
def test_facts_of_a_gguf_file(metadata: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "m.gguf.header").write_bytes(encode_gguf_header({"general.architecture": "llama"} | metadata, {}))
    assert language_model_facts(tmp_path) == expected


def test_a_damaged_gguf_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "m.gguf.header").write_bytes(b"GGUF, or not")
    assert language_model_facts(tmp_path) == {}
