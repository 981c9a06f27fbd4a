"""Reasoning that is ended behind so many tokens, in every form of reasoning."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.drawing import seeds
from kit.scripted_llm import BEGIN, save_scripted_llm

from deployments.engines.llm.answer_forms import HARMONY_THOUGHT, REASONING_FORMS
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.thought_budget import ThoughtBudget, ThoughtMarks
from deployments.records import ChatRequest
from deployments.services.text_prompts import text_requests

THINKING = ["<think>\n", "one", " two", " three", " four", ".\n</think>\n\n", "19", "."]


def written(engine: LLMEngine, **fields: Any) -> tuple[str, str, tuple[str, ...]]:
    """Return reasoning, text and warnings."""
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 40, **fields}
    (made,), use = text_requests(engine, ChatRequest.model_validate(asked))
    assert use is not None
    reader = use.reader()
    engine.add_request(made)
    pieces = []
    while engine.has_work:
        pieces += [reader.feed(delta.text) for delta in engine.step()]
    assert not engine.failures
    pieces.append(reader.flush())
    return "".join(one.reasoning for one in pieces), "".join(one.text for one in pieces), use.warnings


@pytest.fixture(scope="module", params=[[], ["<think>", "</think>"]], ids=["text", "special"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    folder: Path = tmp_path_factory.mktemp("model")
    special = request.param
    pieces = ["<think>", "one", " two", " three", " four", "</think>", "19", "."] if special else THINKING
    template = "{{ messages }}{# <think> </think> #}" + BEGIN + "{{ begun }}"
    tensors = save_scripted_llm(folder, pieces, template, special)
    return LLMEngine(folder, tensors, LLMEngineConfig(kv_cache_bytes=2**22))


@pytest.mark.parametrize(("budget", "thought"), [(0, ""), (1, "one"), (3, "one two three"), (4, "one two three four")])
def test_a_thought_ends_behind_its_budget(engine: LLMEngine, budget: int, thought: str) -> None:
    reasoning, text, warnings = written(engine, thinking_token_budget=budget)
    assert reasoning.strip() == thought
    assert warnings == ()
    if budget == 4 and "</think>" in engine.grammars.special_tokens:  # forced, and then the model's own way on
        assert text == "19."


@pytest.mark.parametrize("budget", [None, 6, 100])
def test_a_thought_that_is_short_enough_is_as_it_was(engine: LLMEngine, budget: int | None) -> None:
    reasoning, text, _ = written(engine, thinking_token_budget=budget)
    assert (reasoning.strip().rstrip("."), text) == ("one two three four", "19.")


def test_a_thought_that_the_prompt_begins_counts_from_there(engine: LLMEngine) -> None:
    (made,), use = text_requests(
        engine,
        ChatRequest.model_validate(
            {
                "model": "m",
                "messages": [{"role": "user", "content": "a"}],
                "chat_template_kwargs": {"begun": "<think>"},
                "thinking_token_budget": 0,
            }
        ),
    )
    assert use is not None
    assert isinstance(made.constraint, ThoughtBudget)
    assert made.constraint.is_thinking
    assert not made.constraint.is_free


def test_the_answer_behind_a_thought_that_was_ended_keeps_to_its_form(engine: LLMEngine) -> None:
    fields = {"chat_template_kwargs": {"begun": "<think>"}, "answer_grammar": {"choice": ["yes", "no"]}}
    reasoning, text, _ = written(engine, thinking_token_budget=3, temperature=1.5, seed=3, top_k=0, **fields)
    assert text in ("yes", "no")
    assert len(reasoning) < 40


def test_a_model_that_does_not_think_says_so(tmp_path: Path) -> None:
    tensors = save_scripted_llm(tmp_path, ["ok"], "{{ messages }}" + BEGIN)
    engine = LLMEngine(tmp_path, tensors, LLMEngineConfig(kv_cache_bytes=2**22))
    reasoning, text, (warning,) = written(engine, thinking_token_budget=3)
    assert (reasoning, text) == ("", "ok")
    assert "thinking_token_budget" in warning


@seeds(50)
@pytest.mark.parametrize("name", REASONING_FORMS)
def test_marks_are_found_wherever_tokens_cut_them(name: str, seed: int) -> None:
    """Tokens are characters or pieces of text here; what is thought beyond the budget is the end alone."""
    form, draw = REASONING_FORMS[name], random.Random(seed)
    opening, closing = (form.openings or (HARMONY_THOUGHT,))[0], form.closings[0]
    texts: list[str] = []

    def ids_of(text: str) -> list[int]:
        found = []
        while text:
            size = draw.randint(1, 6)
            texts.append(text[:size])
            found.append(len(texts) - 1)
            text = text[size:]
        return found

    closing_ids = tuple(ids_of(closing))
    marks = ThoughtMarks(form.openings or (HARMONY_THOUGHT,), form.closings, closing_ids, texts.__getitem__)
    budget = draw.randint(0, 5)
    constraint = ThoughtBudget(marks, budget, is_thinking=False)
    waiting = [*ids_of(f"Well {opening}"), *(ids_of("a")[0] for _ in range(40))]
    came: list[int] = []
    for _ in range(len(waiting) + len(closing_ids)):
        mask = np.zeros(64, np.int32)
        constraint.fill_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert constraint.is_free == (len(allowed) > 1)
        token = int(allowed[0]) if len(allowed) == 1 else waiting.pop(0)
        came.append(token)
        constraint.advance(token)
        constraint = constraint.fork()
    thought = "".join(texts[token] for token in came).partition(opening)[2].partition(closing)
    assert thought[1] == closing
    assert len(thought[0]) == budget
    assert not constraint.is_thinking
