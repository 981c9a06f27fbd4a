"""Texts of `atelier bench serve`, and which answers count as cached."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from configs.loading import load_cluster_config
from infra.bench.command.serve import _fresh_prompts, _fresh_questions, _line, _stock_models, _TimedAnswer

DEMO = Path(__file__).parents[4] / "configs/clusters/demo.yaml"
MAX_ROUNDS = 80  # of the command line


def test_no_text_comes_twice_and_there_are_enough_for_all_rounds() -> None:
    prompts, questions = list(_fresh_prompts(1)), list(_fresh_questions(1))
    assert len(set(prompts)) == len(prompts) >= 3 * (MAX_ROUNDS + 1) + 3 * MAX_ROUNDS + 4 * MAX_ROUNDS
    assert len(set(questions)) == len(questions) >= MAX_ROUNDS + 1 + 4 * MAX_ROUNDS


def test_the_peer_is_given_what_it_can_load() -> None:
    config = load_cluster_config(DEMO)
    paths = {model.id: Path(model.path) for model in config.models}
    found = _stock_models(config)
    assert {"digits-flux", "digits-sdxl", "adder"} <= set(found)
    for id_ in found:
        if not (paths[id_] / "model_index.json").exists():
            architectures = json.loads((paths[id_] / "config.json").read_text())["architectures"]
            assert [name for name in architectures if name.endswith("ForCausalLM")]


def test_a_seed_says_which_texts() -> None:
    first = list(itertools.islice(_fresh_prompts(5), 20))
    assert first == list(itertools.islice(_fresh_prompts(5), 20))
    assert first != list(itertools.islice(_fresh_prompts(6), 20))


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ({"encoder_cache": {"hits": 2, "misses": 0}}, True),
        ({"encoder_cache": {"hits": 1, "misses": 1}}, False),
        ({"encoder_cache": {"hits": 0, "misses": 2}}, False),
        ({}, None),
    ],
)
def test_an_answer_is_cached_when_no_encoder_ran_for_it(cache: dict[str, Any], expected: bool | None) -> None:
    assert _TimedAnswer(cache, 1.0, 1.0).is_cached is expected


def test_a_line_counts_cached_answers() -> None:
    uses = [{"encoder_cache": {"hits": hits, "misses": 1 - hits}} for hits in (1, 0, 1)]
    line = _line("image", [_TimedAnswer(use, 2.0, 4.0) for use in uses])
    assert (line.num_cached, line.num_answers, line.ratio) == (2, 3, 2.0)
    assert _line("chat", [_TimedAnswer({}, 2.0, 1.0)]).as_dict() == {
        "what": "chat",
        "ours_ms": 2.0,
        "stock_ms": 1.0,
        "ratio": 0.5,
        "answers": 1,
        "cached": None,
    }
