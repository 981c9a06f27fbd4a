"""Observations of agents by litellm: a question, a tool that it calls, and the answer behind it, by each provider.

`asked.json` has the question and the tool's `result`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}  # it would ask the internet for prices

import litellm
from observing import SLOW_S, place, write

WHERE = place()
ASKED = WHERE.asked
WEATHER = {
    "name": "weather",
    "description": "Tell the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}
# What litellm calls a protocol, and where that begins.
PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": "", "ollama_chat": ""}


def agent(provider: str, *, is_stream: bool) -> dict[str, Any]:
    """Return the answer, the arguments of the calls and the thoughts before them."""
    messages: list[Any] = [{"role": "user", "content": ASKED["question"]}]
    calls, thoughts = [], ""
    for _ in range(3):
        answer = litellm.completion(
            model=f"{provider}/chatty",
            messages=messages,
            tools=[{"type": "function", "function": WEATHER}],
            api_base=WHERE.url + PROVIDERS[provider],
            api_key="none",
            timeout=SLOW_S,
            max_retries=0,
            max_tokens=300,
            stream=is_stream,
        )
        whole = litellm.stream_chunk_builder(list(answer), messages=messages) if is_stream else answer
        message = whole.choices[0].message
        thoughts += getattr(message, "reasoning_content", None) or ""
        if not message.tool_calls:
            return {"answer": message.content, "calls": calls, "thoughts": thoughts}
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            calls.append(json.loads(call.function.arguments))
            result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": ASKED["result"]}
            messages.append(result)
    raise AssertionError(f"no answer after {messages!r}")


def observations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for provider in PROVIDERS:
        for is_stream in (False, True):
            name = f"{provider}{'_stream' if is_stream else ''}"
            yield name, lambda provider=provider, is_stream=is_stream: agent(provider, is_stream=is_stream)


if __name__ == "__main__":
    write(WHERE, observations())
