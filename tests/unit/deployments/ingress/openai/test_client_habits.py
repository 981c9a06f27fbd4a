"""Fields that clients of OpenAI and of other servers send, asked for by the real OpenAI client where it can."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from unit.deployments.ingress.http_fakes import (
    CHAT,
    CHATS,
    COMPLETION,
    COMPLETIONS,
    EMBEDDING,
    EMBEDDINGS,
    IMAGE,
    IMAGES,
    SWITCH,
    Replicas,
    problem,
)
from unit.deployments.ingress.openai.test_image_uploads import FILES, FORM

from deployments.engines.llm.chat import CalledTool, Function
from deployments.ingress.openai.embeddings import EmbeddingsBody
from deployments.ingress.openai.image_bodies import EditBody, GenerationBody
from deployments.ingress.openai.text import ChatBody, ChatMessage, CompletionBody
from deployments.ingress.openai.text_responses import ResponsesBody
from deployments.records import TextChunk

LAST: dict[str, Any] = {"timings_ms": {"total": 5.0}, "switch": SWITCH}
ADD: dict[str, Any] = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
BODIES = {IMAGES: IMAGE, CHATS: CHAT, COMPLETIONS: COMPLETION, EMBEDDINGS: EMBEDDING}
BODIES["responses"] = {"model": "chatty", "input": "x"}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            IMAGES,
            "n size quality style background moderation response_format output_format output_compression user stream "
            "partial_images seed lora control true_cfg_scale deterministic progress",
        ),
        (EMBEDDINGS, "encoding_format dimensions user pooling prompt_name input_type"),
        (
            CHATS,
            "n stream stop tools tool_choice logprobs logit_bias max_tokens frequency_penalty functions lora store",
        ),
        (COMPLETIONS, "n stream stop echo best_of suffix logprobs max_tokens presence_penalty stream_options"),
        ("responses", "instructions tools tool_choice text stream store metadata previous_response_id truncation"),
    ],
)
async def test_null_is_the_default(http: httpx.AsyncClient, replicas: Replicas, path: str, names: str) -> None:
    body = BODIES[path]
    plain = await http.post(f"/v1/{path}", json={**body, "seed": 3})
    asked = replicas.requests.pop()
    answer = await http.post(f"/v1/{path}", json={**body, "seed": 3, **dict.fromkeys(set(names.split()) - {"seed"})})
    assert (plain.status_code, answer.status_code) == (200, 200), answer.text
    drawn = {} if path != "responses" else {"seed": asked.seed}  # it has no field for that
    assert replicas.requests.pop().model_copy(update=drawn) == asked
    known = set(names.split()) - {"truncation"}
    assert not known & set(answer.headers.get("X-Atelier-Warning", "").replace("'", "").replace(",", "").split())


async def test_parts_may_have_nulls_too(http: httpx.AsyncClient, replicas: Replicas) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    function = {**ADD, "parameters": None, "strict": None, "description": None}
    messages = [
        {"role": "user", "content": "x", "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "y"},
    ]
    body = {**CHAT, "messages": messages, "tools": [{"type": "function", "function": function}]}
    answer = await http.post(f"/v1/{CHATS}", json={**body, "stream_options": {"include_usage": None}})
    assert answer.status_code == 200, answer.text
    (request,) = replicas.requests
    assert [turn.content for turn in request.messages] == ["x", "", "1", "", "y"]
    assert request.tools[0].function.parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_are_ignored_with_a_warning_everywhere(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(f"/v1/{path}", json={**BODIES[path], "steps": 5})
    assert (answer.status_code, answer.headers.get("X-Atelier-Warning")) == (
        200,
        "unknown fields were ignored: 'steps'",
    )
    assert answer.json()["warnings"][-1] == "unknown fields were ignored: 'steps'"


async def test_what_has_no_effect_on_an_image_is_said(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    raw = await client.images.with_raw_response.generate(
        model="flux", prompt="x", quality="hd", style="vivid", background="transparent", n=None, size=None
    )
    text = "without effect here: background 'transparent', quality 'hd', style 'vivid'"
    assert text in raw.headers["X-Atelier-Warning"]
    assert raw.parse().data
    edited = await client.images.with_raw_response.edit(
        model="flux", image=("a.png", FILES["image"]), prompt="x", input_fidelity="high", quality="auto"
    )
    assert "without effect here: input_fidelity 'high'" in edited.headers["X-Atelier-Warning"]
    generated = await http.post(f"/v1/{IMAGES}", json={**IMAGE, "input_fidelity": "high"})
    assert generated.headers["X-Atelier-Warning"] == "without effect here: input_fidelity 'high'"
    form = await http.post("/v1/images/edits", data={**FORM, "steps": "5"}, files={**FILES, "style_image": b"x"})
    assert (form.status_code, "'steps'" in form.headers["X-Atelier-Warning"]) == (200, True)
    streamed = await http.post(f"/v1/{IMAGES}", json={**IMAGE, "stream": True, "style": "vivid"})
    last = json.loads(streamed.text.strip().rpartition("data: ")[2])
    assert last["warnings"][-1] == "without effect here: style 'vivid'"
    assert "vivid" in streamed.headers["X-Atelier-Warning"]


async def test_minus_one_is_no_value(http: httpx.AsyncClient, replicas: Replicas) -> None:
    answer = await http.post(f"/v1/{IMAGES}", json={**IMAGE, "seed": -1})
    assert answer.status_code == 200
    assert replicas.requests[-1].seed in range(2**32), "drawn"
    assert (await http.post("/v1/images/edits", data={**FORM, "seed": "-1"}, files=FILES)).status_code == 200
    assert replicas.requests[-1].seed in range(2**32)
    for path, body in ((CHATS, CHAT), (COMPLETIONS, COMPLETION)):
        answer = await http.post(f"/v1/{path}", json={**body, "seed": -1, "top_k": -1, "max_tokens": -1})
        assert answer.status_code == 200, answer.text
        request = replicas.requests[-1]
        assert (request.top_k, request.max_tokens, request.seed in range(2**32)) == (0, None, True)
        assert problem(await http.post(f"/v1/{path}", json={**body, "max_tokens": -2}))["param"] == "max_tokens"


async def test_no_tokens_but_those_of_the_prompt(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    await client.completions.create(model="chatty", prompt="x", max_tokens=0, echo=True, logprobs=1)
    assert (replicas.requests[-1].max_tokens, replicas.requests[-1].echo) == (0, True)
    with pytest.raises(openai.BadRequestError, match="max_tokens of 0 needs echo"):
        await client.completions.create(model="chatty", prompt="x", max_tokens=0)


async def test_many_stops(client: openai.AsyncOpenAI, http: httpx.AsyncClient, replicas: Replicas) -> None:
    stops = [f"stop {number}" for number in range(64)]
    await client.chat.completions.create(**CHAT, stop=[*stops[:-1], ""])
    assert replicas.requests[-1].stop == tuple(stops[:-1]), "an empty one stops nothing"
    await client.completions.create(**COMPLETION, stop="")
    assert replicas.requests[-1].stop == ()
    assert problem(await http.post(f"/v1/{CHATS}", json={**CHAT, "stop": [*stops, "x"]}))["param"] == "stop"


def two_calls() -> list[TextChunk]:
    return [
        TextChunk("", 4, 1, tool_calls=(CalledTool(0, "call_1", "add", '{"a": '),)),
        TextChunk("", 4, 2, tool_calls=(CalledTool(0, "call_1", "add", "1}"),)),
        TextChunk("", 4, 3, tool_calls=(CalledTool(1, "call_2", "add", '{"a": 2}'),)),
        TextChunk("", 4, 4, "tool_calls", **LAST),
    ]


async def test_one_call_at_a_time(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    replicas.chunks = two_calls()
    tools: list[Any] = [{"type": "function", "function": ADD}]
    options: dict[str, Any] = {**CHAT, "tools": tools}
    for parallel, expected in ((True, ['{"a": 1}', '{"a": 2}']), (False, ['{"a": 1}'])):
        whole = await client.chat.completions.create(**options, parallel_tool_calls=parallel)
        calls: Any = whole.choices[0].message.tool_calls
        assert [call.function.arguments for call in calls] == expected
        async with client.chat.completions.stream(**options, parallel_tool_calls=parallel) as stream:
            async for _ in stream:
                pass
            choice = (await stream.get_final_completion()).choices[0]
        assert [call.function.arguments for call in choice.message.tool_calls or ()] == expected
        assert choice.finish_reason == "tool_calls"
        response = await client.responses.create(
            model="chatty", input="x", tools=[{"type": "function", **ADD, "strict": True}], parallel_tool_calls=parallel
        )
        assert [item.arguments for item in response.output if item.type == "function_call"] == expected
        assert response.parallel_tool_calls is parallel


async def test_functions_as_they_were_before_tools(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    replicas.chunks = two_calls()
    options: dict[str, Any] = {**CHAT, "functions": [ADD], "function_call": {"name": "add"}}
    whole = (await client.chat.completions.create(**options)).choices[0]
    assert whole.message.function_call
    assert (whole.finish_reason, whole.message.tool_calls) == ("function_call", None)
    assert (whole.message.function_call.name, whole.message.function_call.arguments) == ("add", '{"a": 1}')
    names, arguments, reasons = [], "", []
    async for chunk in await client.chat.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        if piece := choice.delta.function_call:
            names.append(piece.name)
            arguments += piece.arguments or ""
        reasons.append(choice.finish_reason)
    assert ([name for name in names if name], arguments, reasons[-1]) == (["add"], '{"a": 1}', "function_call")
    request = replicas.requests[0]
    assert (request.tools[0].function.name, request.tool_choice.function.name) == ("add", "add")
    history = [*CHAT["messages"], whole.message.to_dict(), {"role": "function", "name": "add", "content": "3"}]
    await client.chat.completions.create(**{**options, "messages": history, "function_call": "none"})
    request = replicas.requests[-1]
    assert [turn.role for turn in request.messages] == ["user", "assistant", "tool"]
    assert request.messages[1].tool_calls[0].id == request.messages[2].tool_call_id
    assert request.tool_choice == "none"


@pytest.mark.parametrize(
    "class_", [ChatBody, CompletionBody, EmbeddingsBody, GenerationBody, EditBody, ResponsesBody, ChatMessage, Function]
)
def test_the_openapi_page_says_where_null_may_stand(class_: type[BaseModel]) -> None:
    schema = class_.model_json_schema()
    for name, member in schema["properties"].items():
        assert ({"type": "null"} in member.get("anyOf", ())) is (name not in schema["required"]), name


async def test_prompts_of_embeddings_are_chosen_in_the_words_of_several_servers(
    http: httpx.AsyncClient, replicas: Replicas
) -> None:
    for asked, expected in [
        ({"prompt_name": "sts"}, ("sts", None)),
        ({"input_type": "query"}, (None, "query")),
        ({"input_type": "search_query"}, (None, "query")),
        ({"input_type": "passage"}, (None, "document")),
        ({"input_type": "search_document"}, (None, "document")),
    ]:
        assert (await http.post("/v1/embeddings", json=EMBEDDING | asked)).status_code == 200
        assert (replicas.requests[-1].prompt_name, replicas.requests[-1].input_type) == expected
    for asked in ({"input_type": "clustering"}, {"input_type": "query", "input": [[1, 2]]}):
        answer = await http.post("/v1/embeddings", json=EMBEDDING | asked)
        assert (answer.status_code, problem(answer)["param"]) == (400, "input_type")
