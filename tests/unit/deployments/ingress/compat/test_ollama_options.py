"""Ollama's options as the fields of a record: what counts as not given, and both sides of each bound."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.ingress.compat.ollama import OllamaOptions
from deployments.records import LEAST_TOP_P


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({}, {}),
        ({"num_predict": 1}, {"max_tokens": 1}),
        ({"num_predict": 0}, {}),
        ({"num_predict": -1}, {}),
        ({"seed": 0}, {"seed": 0}),
        ({"seed": -1}, {}),
        ({"top_k": -5}, {"top_k": 0}),
        ({"top_k": 1}, {"top_k": 1}),
        ({"top_p": 0.0}, {"top_p": LEAST_TOP_P}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["", "b"]}, {"stop": ("b",)}),
        ({"stop": [""]}, {}),
        ({"repeat_penalty": 1.5, "temperature": 0.0}, {"repetition_penalty": 1.5, "temperature": 0.0}),
        ({"mirostat": 2}, {}),
    ],
)
def test_options_are_fields(given: dict[str, Any], fields: dict[str, Any]) -> None:
    assert OllamaOptions(**given).fields() == fields
