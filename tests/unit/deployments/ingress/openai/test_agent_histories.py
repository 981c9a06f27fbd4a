"""Histories and bodies as agents send them: what is understood, and what is left out with a warning, and is no 400."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from unit.deployments.ingress.http_fakes import CHAT, CHATS, COMPLETIONS, CONFIG, Replicas, problem, served

from deployments.records import LEAST_TOP_P

QUESTION: Any = [{"role": "user", "content": "x"}]
MESSAGES: Any = {"model": "chatty", "max_tokens": 9, "messages": QUESTION}
ADD: Any = {"name": "add", "input_schema": {"type": "object"}}


async def test_a_call_that_was_cut_is_sent_back(http: httpx.AsyncClient, replicas: Replicas) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"ci'}}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    chat = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, refused, *QUESTION]
    answer = await http.post(f"/v1/{CHATS}", json={**CHAT, "messages": chat})
    assert answer.status_code == 200, answer.text
    _, cut, said, _ = replicas.requests[-1].messages
    assert cut.for_template()["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"ci'}
    assert said.text == "No."


async def test_calls_and_results_without_ids_belong_together(http: httpx.AsyncClient, replicas: Replicas) -> None:
    """As clients of Gemini's and of llama.cpp's send them; a result may name its function, or take the next call."""

    def call(name: str, id_: str | None = None) -> dict[str, Any]:
        return {"id": id_, "type": "function", "function": {"name": name, "arguments": {"a": name}}}

    said = {"role": "assistant", "tool_calls": [call("f"), call("g"), call("h", "own")]}
    results = [
        {"role": "tool", "name": "g", "content": "G"},
        {"role": "tool", "tool_call_id": "own", "content": None},
        {"role": "tool", "tool_call_id": "", "content": [{"type": "text", "text": "F"}]},
    ]
    chat = [
        *QUESTION,
        said,
        *results,
        {"role": "assistant", "tool_calls": [call("f")]},
        {"role": "tool", "content": "1"},
    ]
    for path in (f"/v1/{CHATS}", "/tokenize"):
        answer = await http.post(path, json={**CHAT, "messages": chat})
        assert answer.status_code == 200, answer.text
        _, first, *answered, second, last = replicas.requests[-1].messages
        ids = [one.id for one in first.tool_calls]
        assert len(set(ids)) == 3
        assert [(one.tool_call_id, one.text) for one in answered] == [(ids[1], "G"), ("own", ""), (ids[0], "F")]
        assert last.tool_call_id == second.tool_calls[0].id not in ids
        assert [json.loads(one.function.arguments) for one in first.tool_calls] == [{"a": name} for name in "fgh"]
    orphan = await http.post(f"/v1/{CHATS}", json={**CHAT, "messages": [*QUESTION, {"role": "tool", "content": "1"}]})
    assert (orphan.status_code, problem(orphan)["param"]) == (400, "messages.1.tool_call_id")


@pytest.mark.parametrize("name", ["two words", "mcp:db/list", "functions.f:0"])
async def test_a_call_is_sent_back_whatever_the_model_named_it(
    http: httpx.AsyncClient, replicas: Replicas, name: str
) -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    blocks = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": name, "input": {}}]}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": {}}}]}
    for path, body in (
        ("/v1/responses", {"model": "chatty", "input": items, "store": False}),
        ("/v1/messages", {**MESSAGES, "messages": [*QUESTION, blocks, *QUESTION]}),
        ("/api/chat", {**CHAT, "messages": [*QUESTION, called], "stream": False}),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert replicas.requests[-1].messages[1].tool_calls[0].function.name == name


async def test_parts_of_chats_in_the_words_of_other_apis(http: httpx.AsyncClient, replicas: Replicas) -> None:
    chat = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "output_text", "text": "b"}],
        },
        *QUESTION,
    ]
    answer = await http.post(f"/v1/{CHATS}", json={**CHAT, "messages": chat})
    assert answer.status_code == 200, answer.text
    asked, said, _ = replicas.requests[-1].messages
    assert (asked.text, said.text, said.reasoning) == ("a", "b", "Hm.")


async def test_thoughts_of_which_a_summary_alone_is_known(http: httpx.AsyncClient, replicas: Replicas) -> None:
    summary = [{"type": "summary_text", "text": "Hm."}]
    for thought, expected in (
        ({"summary": summary}, "Hm."),
        ({"summary": summary, "content": [{"type": "reasoning_text", "text": "So: "}]}, "So: "),
        ({"summary": [], "encrypted_content": "x"}, ""),
    ):
        items = [*QUESTION, {"type": "reasoning", **thought}, {"role": "assistant", "content": "b"}, *QUESTION]
        answer = await http.post("/v1/responses", json={"model": "chatty", "input": items, "store": False})
        assert answer.status_code == 200, answer.text
        assert (replicas.requests[-1].messages[1].reasoning or "") == expected


async def test_blocks_that_only_anthropic_s_servers_know(http: httpx.AsyncClient, replicas: Replicas) -> None:
    said = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "t", "name": "add", "input": {}},
    ]
    found = [
        {"type": "tool_reference", "tool_name": "add"},
        {"type": "search_result", "title": "Ferns", "source": "s", "content": [{"type": "text", "text": "green"}]},
    ]
    results = [{"type": "tool_result", "tool_use_id": "t", "content": found}]
    chat = [*QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
    tools = [ADD, {"type": "web_search_20250305", "name": "web_search"}]
    answer = await http.post("/v1/messages", json={**MESSAGES, "messages": chat, "tools": tools})
    assert answer.status_code == 200, answer.text
    warning = answer.headers["x-atelier-warning"]
    assert all(name in warning for name in ("server_tool_use", "tool_reference", "web_search_20250305"))
    request = replicas.requests[-1]
    assert [tool.function.name for tool in request.tools] == ["add"]
    assert [(one.role, one.text) for one in request.messages[1:]] == [("assistant", "Well."), ("tool", "Ferns\ngreen")]


async def test_items_of_openai_s_own_tools(http: httpx.AsyncClient, replicas: Replicas) -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c", "name": "shell", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    tools = [{"type": "web_search"}, {"type": "function", "name": "shell", "parameters": {"type": "object"}}]
    answer = await http.post("/v1/responses", json={"model": "chatty", "input": items, "tools": tools})
    assert answer.status_code == 200, answer.text
    warning = answer.headers["x-atelier-warning"]
    assert "web_search_call" in warning
    assert "tools.web_search" in warning
    request = replicas.requests[-1]
    assert [(one.role, one.text) for one in request.messages] == [
        ("user", "x"),
        ("assistant", ""),
        ("tool", "a b"),
        ("assistant", "No."),
    ]
    call = request.messages[1].tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("shell", {"input": "ls"})
    assert [tool.function.name for tool in request.tools] == ["shell"]


@pytest.mark.parametrize(
    ("path", "body", "field", "value"),
    [
        (f"/v1/{CHATS}", {**CHAT, "top_p": 0}, "top_p", LEAST_TOP_P),
        (f"/v1/{COMPLETIONS}", {"model": "chatty", "prompt": "x", "top_p": 0.0}, "top_p", LEAST_TOP_P),
        ("/v1/responses", {"model": "chatty", "input": "x", "top_p": 0}, "top_p", LEAST_TOP_P),
        ("/v1/messages", {**MESSAGES, "top_p": 0}, "top_p", LEAST_TOP_P),
        ("/api/chat", {**CHAT, "options": {"top_p": 0, "stop": ["x", ""]}, "stream": False}, "stop", ("x",)),
        ("/v1/messages", {**MESSAGES, "messages": [{"role": "user", "content": " "}]}, "model", "chatty"),
        (f"/v1/{COMPLETIONS}", {"model": "chatty", "prompt": "x", "suffix": ""}, "prompt", "x"),
        (f"/v1/{CHATS}", {**CHAT, "messages": [{"role": "user", "content": ""}]}, "model", "chatty"),
    ],
)
async def test_values_that_others_take(
    http: httpx.AsyncClient, replicas: Replicas, path: str, body: Any, field: str, value: Any
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert getattr(replicas.requests[-1], field) == value


async def test_seeds_below_zero_are_seeds(http: httpx.AsyncClient, replicas: Replicas) -> None:
    seeds = []
    for seed in (-5, -5, -6, 5):
        assert (await http.post(f"/v1/{CHATS}", json={**CHAT, "seed": seed})).status_code == 200
        seeds.append(replicas.requests[-1].seed)
    assert seeds[0] == seeds[1] >= 0
    assert len(set(seeds)) == 3
    assert seeds[3] == 5


async def test_many_tools_with_long_names(http: httpx.AsyncClient, replicas: Replicas) -> None:
    tools = [{"name": f"{'n' * 62}{number:03}", "input_schema": {"type": "object"}} for number in range(129)]
    async with served(
        replicas,
        CONFIG.model_copy(
            update={
                "ingress": CONFIG.ingress.model_copy(
                    update={"limits": CONFIG.ingress.limits.model_copy(update={"max_prompt_chars": None})}
                )
            }
        ),
    ) as door:
        answer = await door.http.post("/v1/messages", json={**MESSAGES, "tools": tools})
        assert answer.status_code == 200, answer.text
        assert len(replicas.requests[-1].tools) == 129
        long = await door.http.post(
            f"/v1/{CHATS}", json={**CHAT, "messages": [{"role": "user", "content": "a" * 33_000}]}
        )
        assert long.status_code == 200, long.text
    bounded = await http.post(f"/v1/{CHATS}", json={**CHAT, "messages": [{"role": "user", "content": "a" * 200}]})
    assert bounded.status_code == 400
    assert "ingress.limits.max_prompt_chars" in bounded.json()["error"]["message"]


async def test_ollama_s_own_examples(http: httpx.AsyncClient, replicas: Replicas) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    for path, body in (
        ("/api/generate", {"model": "chatty", "prompt": "Why is the sky blue?", "stream": False}),
        ("/api/chat", {"model": "chatty", "messages": QUESTION, "stream": False}),
        ("/api/show", {"model": "chatty"}),
        ("/api/embed", {"model": "clip", "input": ["a", "b"]}),
    ):
        answer = await http.post(path, content=json.dumps(body), headers=form)
        assert answer.status_code == 200, answer.text
    wrong = await http.post("/api/chat", content="no JSON", headers=form)
    assert (wrong.status_code, "not valid JSON" in wrong.json()["error"]) == (400, True)
    for nothing in ("", []):
        answer = await http.post("/api/embed", json={"model": "clip", "input": nothing})
        assert (answer.status_code, answer.json()["embeddings"]) == (200, [])
