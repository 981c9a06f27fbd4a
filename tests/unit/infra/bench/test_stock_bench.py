"""The stock bench: both sides run, and what it prints is what it measured."""

from __future__ import annotations

import json
import math

import pytest

from infra.bench.stock import Effort, measure_stock, print_stock_figures
from infra.bench.stock_models import CLASSES, TEXT_CLASSES, Sizes
from infra.bench.stock_texts import TextEffort, measure_texts, print_text_figures

pytestmark = pytest.mark.slow  # imports diffusers


@pytest.mark.long
def test_all_parts_have_figures(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = Sizes(width=64, layers=1, pixels=32, text_width=64, text_layers=1)
    figures = measure_stock(Effort(few_steps=1, num_steps=9, rounds=1, switches=1, tokens=8, sizes=sizes), seed=0)
    assert [row["class"] for row in figures["steps"]] == list(CLASSES)
    # The time of a step is a difference, which other work may turn where there are so few.
    assert all(row["whole_ratio"] > 0 and math.isfinite(row["stock"]) for row in figures["steps"])
    assert figures["switch"]["built"] == ["transformer"]
    assert figures["chat"]["step_ms"] > 0
    assert figures["chat"]["beside_ms"] > 0
    print_stock_figures(figures, as_json=False)
    assert "a chat's token takes" in capsys.readouterr().out
    print_stock_figures(figures, as_json=True)
    assert json.loads(capsys.readouterr().out)["switch"]["class"] == CLASSES[0]


@pytest.mark.long
def test_texts_are_those_of_generate(capsys: pytest.CaptureFixture[str]) -> None:
    effort = TextEffort(prompt=9, tokens=6, texts=3, rounds=2, width=128, layers=4)
    rows = measure_texts(effort, seed=0)
    assert [row["class"] for row in rows] == list(TEXT_CLASSES)
    assert all(row["equal"] == row["equal_several"] == 1 for row in rows)
    assert all(row["one_ratio"] > 0 and row["each_ratio"] > 0 for row in rows)
    print_text_figures(rows, effort, as_json=False)
    assert TEXT_CLASSES[0] in capsys.readouterr().out
    print_text_figures(rows, effort, as_json=True)
    assert len(json.loads(capsys.readouterr().out)) == len(TEXT_CLASSES)
