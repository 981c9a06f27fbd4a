"""Observations of litellm, as a client of the cluster's OpenAI endpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}  # it would ask the internet for prices

import litellm
import numpy as np
from observing import SLOW_S, place, write

WHERE = place()
ASKED = WHERE.asked
SERVER: dict[str, Any] = {
    "api_base": f"{WHERE.url}/v1",
    "api_key": "none",
    "timeout": SLOW_S,
    "max_retries": 0,
}
CHAT: dict[str, Any] = SERVER | {
    "model": "openai/adder",
    "messages": [{"role": "user", "content": ASKED["sum"]}],
    "temperature": 0,
}
# litellm knows by a model's name whether it has dimensions.
VECTORS: dict[str, Any] = {"encoding_format": "float", "allowed_openai_params": ["dimensions"]}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 198}
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": NUMBER, "b": NUMBER},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TOOLS: dict[str, Any] = CHAT | {
    "model": "openai/adder-tools",
    "max_tokens": 100,
    "tools": [{"type": "function", "function": ADD}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
}
TOTAL = {
    "type": "object",
    "properties": {"total": NUMBER},
    "required": ["total"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "total", "schema": TOTAL, "strict": True}}


def chat_stream() -> dict[str, Any]:
    chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    return {
        "pieces": [chunk.choices[0].delta.content for chunk in chunks if chunk.choices],
        "usage": whole.usage.completion_tokens,
    }


def tools_stream() -> dict[str, Any]:
    whole = litellm.stream_chunk_builder(list(litellm.completion(**TOOLS, stream=True)))
    (call,) = whole.choices[0].message.tool_calls
    return {"name": call.function.name, "arguments": call.function.arguments}


def each(kind: str, call: Callable[..., Any], provider: str = "openai") -> dict[str, Any]:
    """Return the answers to all of the bodies of a kind, by their names."""
    bodies: dict[str, dict[str, Any]] = ASKED["bodies"][kind]
    answers = {}
    for name, body in bodies.items():
        answers[name] = call(**SERVER | body | {"model": f"{provider}/{body['model']}"}).model_dump()
    return answers


def embeddings() -> list[int]:
    answer = litellm.embedding(model="openai/minilm", input=ASKED["texts"], encoding_format="float", **SERVER)
    return WHERE.keep("litellm", np.array([item["embedding"] for item in answer.data], np.float32))


def image() -> str:
    options = {name: value for name, value in ASKED["image"].items() if name != "prompt"}
    prompt = ASKED["image"]["prompt"]
    answer = litellm.image_generation(prompt=prompt, model="openai/digits-flux", extra_body=options, **SERVER)
    return str(answer.data[0].b64_json)


def refusal(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the class that litellm made of an error, and what it says."""
    try:
        return {"answered": repr(call())}
    except Exception as error:
        return {"type": type(error).__name__, "status": getattr(error, "status_code", None), "message": str(error)}


def observations() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "chat", lambda: litellm.completion(**CHAT).model_dump()
    yield "chat_stream", chat_stream
    yield "tools", lambda: litellm.completion(**TOOLS).choices[0].model_dump()
    yield "tools_stream", tools_stream
    yield (
        "schema",
        lambda: litellm.completion(**CHAT, max_tokens=200, response_format=SCHEMA).choices[0].message.content,
    )
    yield "options_chats", lambda: each("chats", litellm.completion)
    yield "options_completions", lambda: each("completions", litellm.text_completion, "text-completion-openai")
    yield "options_embeddings", lambda: each("embeddings", partial(litellm.embedding, **VECTORS))
    yield "embeddings", embeddings
    yield "image", image
    yield (
        "response",
        lambda: (
            litellm.responses(model="openai/adder", input=ASKED["sum"], temperature=0, **SERVER)
            .output[0]
            .content[0]
            .text
        ),
    )
    yield "bad_request", lambda: refusal(lambda: litellm.completion(**CHAT | {"temperature": 9}))
    yield "not_found", lambda: refusal(lambda: litellm.completion(**CHAT | {"model": "openai/gpt-9"}))


if __name__ == "__main__":
    write(WHERE, observations())
