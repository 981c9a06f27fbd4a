"""Answers that models, templates and tests of other servers wrote, read as the package canitoolcall means them."""

from __future__ import annotations

import json
import random
from typing import Any, Final

import pytest
from kit.judges import judge_folder
from kit.seeding import seeded_random

from deployments.engines.llm.answer_forms import HARMONY_START, REASONING_FORMS, TOOL_FORMS, AnswerForm
from deployments.engines.llm.answer_reader import AnswerReader
from deployments.engines.llm.chat import Function, whole_calls

pytestmark = pytest.mark.long

# The beginnings of a file's or a model's name, the form of its calls, and that of its reasoning.
FORMS: Final = (
    ("qwen3-xml/", "qwen3-coder", "think"),
    ("qwen3-hermes/", "hermes", "think"),
    ("deepseek-ai/DeepSeek-V3.1", "deepseek-v3.1", "think"),
    ("deepseek-ai/DeepSeek-V3.2", "deepseek-v3.2", "think"),
    ("deepseek-ai/DeepSeek-V3", "deepseek-v3", "think"),
    ("deepseek-ai/DeepSeek-R1", "deepseek-v3", "think"),
    ("deepseek-ai/DeepSeek-V4.1", "deepseek-v4.1", "think"),
    ("deepseek-ai/DeepSeek-V4", "deepseek-v4", "think"),
    ("google/gemma-4", "gemma4", "gemma4"),
    ("zai-org/GLM", "glm", "think"),
    ("openai/gpt-oss", "harmony", "harmony"),
    ("moonshotai/Kimi-K3", "kimi-k3", "kimi-k3"),
    ("moonshotai/", "kimi-k2", "think"),
    ("meta-llama/Llama-4", "llama4", None),
    ("meta-llama/", "llama3", None),
)
MISSES: Final = {
    "deepseek/sglang-v4-self-closing-invoke",  # <invoke name="submit"/>, which no template writes
    "gpt-oss/harmony-marker-in-reasoning",  # a token of the form, written as text
    # A call that was cut is told as far as it came, and not left out.
    "deepseek/v32-truncated-second-parallel-call",
    "deepseek/v4-truncated-second-parallel-call",
    "deepseek/v41-truncated-second-parallel-call",
    "qwen3-hermes/truncated-second-parallel-call",
    # Nothing in the fixture says that its prompt began the thought.
    "glm/glm47-truncated-in-reasoning",
    "kimi/k26-truncated-in-reasoning",
    "kimi/k3-bug-truncated-reasoning-recorded",
    "kimi/k3-truncated-in-reasoning",
}


def fixtures() -> list[dict[str, Any]]:
    files = sorted(judge_folder("canitoolcall").glob("lib/*/site-packages/canitoolcall/_data/fixtures/*/*.jsonl"))
    assert files
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def form_of(fixture: dict[str, Any]) -> AnswerForm:
    names = (fixture["id"], fixture["models"][0])
    found = next((one for one in FORMS if any(name.startswith(one[0]) for name in names)), None)
    if found is None:
        assert fixture["family"] == "mistral"
        found = "", "mistral-args" if "[ARGS]" in fixture["raw_output"] else "mistral", "mistral"
    return AnswerForm(TOOL_FORMS[found[1]], REASONING_FORMS[found[2]] if found[2] else None)


def begun(fixture: dict[str, Any], form: AnswerForm) -> str:
    """Return the thought that the prompt has begun: it ends, and does not begin, in the answer."""
    if form.tools is TOOL_FORMS["harmony"]:
        return HARMONY_START
    thought, raw = form.reasoning, fixture["raw_output"]
    said = form.begun(fixture.get("generation_prompt") or "")
    if said or thought is None or any(one in raw for one in thought.openings):
        return said
    return thought.openings[0] if any(one in raw for one in thought.closings) else ""


def read(fixture: dict[str, Any], pieces: list[str]) -> tuple[str, str, Any]:
    form = form_of(fixture)
    functions = [
        Function.model_validate({"parameters": {"type": "object"}} | tool["function"])
        for tool in fixture["tools"] or ()
    ]
    reader = AnswerReader(form, functions)
    reader.feed(begun(fixture, form))
    is_cut = "truncated" in fixture["id"]
    found = [*map(reader.feed, pieces), reader.flush(is_cut=is_cut)]
    calls = whole_calls([call for piece in found for call in piece.calls])
    text, thought = ("".join(getattr(piece, name) for piece in found) for name in ("text", "reasoning"))
    return text, thought, [(call.name, call.arguments) for call in calls]


def cuts(text: str, draw: random.Random) -> list[str]:
    found, at = [], 0
    while at < len(text):
        size = draw.randint(1, 9)
        found.append(text[at : at + size])
        at += size
    return found


def test_published_answers_are_read_as_they_are_meant_however_they_are_cut() -> None:
    draw, wrong, num_read = seeded_random(), set(), 0
    for fixture in fixtures():
        raw = fixture["raw_output"]
        text, thought, calls = read(fixture, [raw])
        assert read(fixture, list(raw)) == (text, thought, calls), fixture["id"]
        assert read(fixture, cuts(raw, draw)) == (text, thought, calls), fixture["id"]
        if (expected := fixture.get("expected")) is None:
            continue  # what is no answer: nothing is raised
        num_read += 1
        try:
            told = [(name, json.loads(arguments)) for name, arguments in calls]
        except ValueError:
            told = [("", None)]
        meant = [(call["name"], call["arguments"]) for call in expected["tool_calls"] or ()]
        shown = [(expected[name] or "").strip() for name in ("content", "reasoning_content")]
        if (told, [text.strip(), thought.strip()]) != (meant, shown):
            wrong.add(fixture["id"])
    assert wrong == MISSES
    assert num_read > 400
