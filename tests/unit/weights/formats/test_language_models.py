"""The files of a language model, damaged ones included, and the facts read from them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from deployments.engines.llm.answer_forms import REASONING_FORMS, ReasoningForm
from weights.formats.gguf import encode_gguf_header
from weights.formats.language_models import language_model_details, language_model_facts
from weights.records.dtypes import tensor_nbytes
from weights.records.manifest import Component, Manifest, TensorRef


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


@pytest.mark.parametrize("form", REASONING_FORMS.values(), ids=REASONING_FORMS)
def test_a_template_of_every_form_of_reasoning_thinks(form: ReasoningForm, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages }}" + " ".join(form.signs + form.openings + form.closings)
    )
    assert language_model_facts(tmp_path)["thinks"]


def manifest_of(tensors: dict[str, tuple[str, tuple[int, ...]]], format_: Any = "safetensors") -> Manifest:
    """Return a manifest of tensors, of which those of one name before a dot are the same bytes."""
    refs = {
        name: TensorRef(
            extent="e",
            offset=0,
            nbytes=tensor_nbytes(dtype, shape),
            dtype=dtype,
            shape=shape,
            sha256=hashlib.sha256(name.split(".")[0].encode()).hexdigest(),
        )
        for name, (dtype, shape) in tensors.items()
    }
    component = Component(name="m", library="transformers", class_name=None, folder=".", tensors=refs, format=format_)
    return Manifest.model_construct(kind="llm", components={"m": component})


def test_details_of_a_config(tmp_path: Path) -> None:
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": True, "n_embd": 7}
    config = {"model_type": "qwen2_vl", "text_config": text | {"max_position_embeddings": -1}, "hidden_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    tied = {"w.a": ("BF16", (300, 64)), "w.b": ("BF16", (300, 64)), "norm": ("F32", (64,))}
    found = language_model_details(manifest_of(tied), tmp_path)
    assert (found.architecture, found.template, found.format) == ("qwen2_vl", "{{ messages }}", "safetensors")
    assert (found.quantization, found.num_parameters) == ("BF16", 300 * 64 + 64)
    expected = {"embedding_length": 64, "block_count": 2, "attention.head_count": 4}
    assert found.sizes == {f"qwen2_vl.{name}": value for name, value in expected.items()}


def test_details_of_a_gguf_file_are_its_own(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "llama",
        "general.basename": "tiny",
        "general.license": "x" * 1000,
        "llama.context_length": 8192,
        "llama.rope.freq_base": float("inf"),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }
    (tmp_path / "m.gguf.header").write_bytes(encode_gguf_header(metadata, {}))
    tensors = {"a": ("Q4_K", (64, 256)), "b": ("Q6_K", (8, 256)), "c": ("F32", (256,))}
    found = language_model_details(manifest_of(tensors, "gguf"), tmp_path)
    assert (found.format, found.quantization, found.num_parameters) == ("gguf", "Q4_K", 72 * 256 + 256)
    assert found.template == "{{ messages }}"
    assert found.sizes == {
        "general.architecture": "llama",
        "general.basename": "tiny",
        "llama.context_length": 8192,
    }


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": 7, "hidden_size": "x"}', None])
def test_damaged_files_and_packed_values_say_nothing(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    found = language_model_details(manifest_of({"q": ("I32", (8, 8)), "s": ("F16", (8, 8))}), tmp_path)
    assert (found.architecture, found.template, dict(found.sizes)) == ("", "", {})
    assert (found.quantization, found.num_parameters) == ("", 0)
