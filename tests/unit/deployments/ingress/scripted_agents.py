"""A model with the template and words of a family behind the HTTP edge: it thinks, calls a tool, tells its result."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kit.scripted_llm import BEGIN, save_scripted_llm
from unit.deployments.engine_loops import text_service_of, written_chunks
from unit.deployments.engines.llm.family_templates import TEMPLATES
from unit.deployments.ingress.http_fakes import CONFIG, Replicas

from configs.cluster import ClusterConfig
from deployments.engines.libraries.chat_rendering import render_chat_template
from deployments.engines.llm.answer_forms import TOOL_FORMS
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.records import TextChunk, TextResult
from deployments.services.text_service import whole_text

TOLD: Final = "<|told|>"  # what a prompt ends with whose last message is a tool's result
CITY: Final = 'Ulm "on" \\ Donau\n{<x>} é'
ARGUMENTS: Final = {"city": CITY, "days": 2}
PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
THOUGHT, ANSWER = "I have to look.", "It will rain."
FAMILIES: Final = [name for name in TOOL_FORMS if name != "harmony"]  # whose prompts end with a text of its own
_TAIL: Final = (
    "{# </think> #}{% if add_generation_prompt %}{{ '"
    + TOLD
    + "' if messages[-1].role == 'tool' else '"
    + BEGIN
    + "' }}{% endif %}"
)


def larger_limits() -> ClusterConfig:
    """Return the config of the fakes, with room for prompts that have tools."""
    limits = CONFIG.ingress.limits.model_copy(update={"max_prompt_chars": 20_000})
    return CONFIG.model_copy(update={"ingress": CONFIG.ingress.model_copy(update={"limits": limits})})


class Agents(Replicas):
    """Replicas whose texts a real engine writes."""

    def __init__(self, folder: Path, family: str, city: str = CITY) -> None:
        super().__init__()
        template = TEMPLATES[family] + _TAIL
        call = _written(TEMPLATES[family], {"city": city, "days": 2})
        pieces = ["<think>\n", THOUGHT, "\n</think>\n\n", *_pieces(call)]
        tensors = save_scripted_llm(folder, pieces, template, others={TOLD: ["It will", " rain."]})
        self.engine = LLMEngine(folder, tensors, LLMEngineConfig(kv_cache_bytes=2**24))
        self._texts = text_service_of(self.engine)

    async def on_stream_text(self, request: Any) -> AsyncIterator[TextChunk]:
        self._arrived(request)
        for chunk in await written_chunks(self._texts, request):
            yield chunk

    async def on_write_text(self, request: Any) -> TextResult:
        return whole_text(request.model, [chunk async for chunk in self.on_stream_text(request)])


def _written(template: str, arguments: dict[str, Any]) -> str:
    """Return a call as the template writes it in a history."""
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    asked = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    if template is TEMPLATES["deepseek-v3.1"]:
        call = {**call, "function": SimpleNamespace(**call["function"]).__dict__ | {"arguments": _json(arguments)}}
    whole = render_chat_template(
        template,
        "family",
        [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}],
        tools,
        {},
        {"add_generation_prompt": False},
    )
    prompt = render_chat_template(template, "family", asked, tools, {})
    return whole[len(prompt) :].removesuffix("<|im_end|>\n")


def _json(arguments: dict[str, Any]) -> str:
    import json

    return json.dumps(arguments, ensure_ascii=False)


def _pieces(text: str) -> list[str]:
    """Cut a text into pieces of which none comes twice: a scripted model goes by its last token."""
    draw = random.Random(7)
    for longest in (12, 20, 40, len(text)):
        pieces, at = [], 0
        while at < len(text):
            size = draw.randint(1 + longest // 2, longest)
            pieces.append(text[at : at + size])
            at += size
        if len(set(pieces)) == len(pieces):
            return pieces
    return [text]
