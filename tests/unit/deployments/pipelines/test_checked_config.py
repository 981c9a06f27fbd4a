"""Mistakes in pipelines that only the serving floor can see are told with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import ConfigFileError
from deployments.pipelines.planning import load_checked_config

DEMO = Path(__file__).parents[4] / "configs" / "clusters" / "demo.yaml"
TEXT = """
models: [{id: adder, path: /adder}]
pipelines:
  - id: fine
    inputs: {text: text}
    stages:
      - {name: question, function: sum_question, inputs: {text: $text}}
    outputs: {text: $question}
  - id: wrong
    inputs: {text: text}
    stages:
      - {name: question, function: sum_questoin, inputs: {text: $text}}
      - {name: other, function: sum_question, inputs: {words: $text}}
    outputs: {text: $question, other: $other}
"""


def line_of(part: str) -> int:
    return next(number for number, line in enumerate(TEXT.splitlines(), 1) if part in line)


def test_the_demo_is_sound() -> None:
    config = load_checked_config(DEMO)
    assert [pipeline.id for pipeline in config.pipelines] == ["sum-to-digit", "text-classifier"]


def test_all_mistakes_are_told_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT)
    with pytest.raises(ConfigFileError) as raised:
        load_checked_config(path)
    told = str(raised.value)
    assert str(path) in told
    assert "sum_questoin" in told
    assert "sum_question" in told.replace("sum_questoin", "")  # the nearest name
    assert f"{path.name}:{line_of('questoin')}" in told or f"line {line_of('questoin')}" in told
    assert f"{path.name}:{line_of('words')}" in told or f"line {line_of('words')}" in told
    assert "fine" not in told


def test_a_mistake_of_a_whole_pipeline_does_not_show_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT.replace(", other: $other", ""))
    with pytest.raises(ConfigFileError, match="no output needs") as raised:
        load_checked_config(path)
    assert "got" not in str(raised.value)


def test_mistakes_of_the_file_itself_come_first(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT.replace("models:", "modles:"))
    with pytest.raises(ConfigFileError, match="modles"):
        load_checked_config(path)
