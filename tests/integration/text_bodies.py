"""Requests with every option of the text endpoints, which all of OpenAI's clients send, as plain JSON."""

from __future__ import annotations

from typing import Any, Final

_QUESTION: Final = [{"role": "user", "content": "What is 12 + 7?"}]
_CHAT: Final = {"model": "adder", "messages": _QUESTION, "temperature": 0}
_ADD: Final = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
_CALL: Final = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
_RESULT: Final = {"role": "tool", "tool_call_id": "call-1", "content": "57"}
_CALLED: Final = [*_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, _RESULT]

CHATS: Final[dict[str, dict[str, Any]]] = {
    "several": {**_CHAT, "n": 3, "temperature": 1.5, "top_p": 0.9, "seed": 5, "max_tokens": 6},
    "log probabilities": {**_CHAT, "logprobs": True, "top_logprobs": 3},
    "penalties": {**_CHAT, "frequency_penalty": 1.5, "presence_penalty": -0.5, "max_completion_tokens": 8},
    "bias": {**_CHAT, "logit_bias": {"21": -100, "22": 2.5}, "max_tokens": 6},
    "stop": {**_CHAT, "stop": ["9", "zz"]},
    "json": {**_CHAT, "response_format": {"type": "json_object"}, "max_tokens": 40},
    "tool result": {
        **_CHAT,
        "model": "adder-tools",
        "messages": _CALLED,
        "tools": [{"type": "function", "function": _ADD}],
        "tool_choice": "none",
        "max_tokens": 8,
    },
}
_COMPLETION: Final = {"model": "adder", "temperature": 0, "max_tokens": 5}
COMPLETIONS: Final[dict[str, dict[str, Any]]] = {
    "prompts with echo": {**_COMPLETION, "prompt": ["3 + 4", "5 + 1 = "], "echo": True, "logprobs": 2},
    "token ids": {**_COMPLETION, "prompt": [[5, 6, 7], [8, 9]]},
    "several of one": {**_COMPLETION, "prompt": "3 + 4", "n": 2, "best_of": 2, "temperature": 1, "seed": 3},
    "stop": {**_COMPLETION, "prompt": "3 + 4", "stop": "7", "presence_penalty": 0.5},
}
EMBEDDINGS: Final[dict[str, dict[str, Any]]] = {
    "dimensions": {"model": "texts-short", "input": ["a text", "another"], "dimensions": 32},
    "language model": {"model": "adder", "input": ["3 + 4", "5 + 1"]},
}
BODIES: Final = {"chats": CHATS, "completions": COMPLETIONS, "embeddings": EMBEDDINGS}


def essence(answer: dict[str, Any]) -> list[Any]:
    """Return the contents of an answer's choices or vectors: texts, reasons, and numbers apart from rounding."""
    if "choices" not in answer:
        return [[round(number, 4) for number in item["embedding"]] for item in answer["data"]]
    return [_choice(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def _choice(choice: dict[str, Any]) -> Any:
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("content"):
        scores = [(one["token"], round(one["logprob"], 2), len(one["top_logprobs"])) for one in logprobs["content"]]
    else:
        scores = [(one, None if one is None else round(one, 2)) for one in logprobs.get("token_logprobs") or ()]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, choice["finish_reason"], scores
