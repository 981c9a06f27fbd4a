"""Responses that are kept: followed on, referred to, read again and forgotten, by the real OpenAI client."""

from __future__ import annotations

import gc
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from kit.clock import Clock
from unit.deployments.ingress.http_fakes import CONFIG, SWITCH, Replicas, problem

from configs.cluster import StoredResponsesConfig
from deployments.engines.llm.chat import CalledTool
from deployments.ingress.openai import kept
from deployments.ingress.openai.kept import StoredResponse, StoredResponses
from deployments.ingress.openai.text_responses import ItemReference, KeptItems
from deployments.records import TextChunk

LAST: dict[str, Any] = {"timings_ms": {"total": 5.0}, "switch": SWITCH}


def turns_of(request: Any) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in request.messages]


async def test_a_response_follows_on_another(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    first = await client.responses.create(model="chatty", input="one", instructions="Be brief.")
    async with client.responses.stream(model="chatty", input="two", previous_response_id=first.id) as stream:
        async for _ in stream:
            pass
        second = await stream.get_final_response()
    third = await client.responses.create(
        model="chatty", input="three", previous_response_id=second.id, instructions="Be kind."
    )
    before = [("user", "one"), ("assistant", "Hello"), ("user", "two"), ("assistant", "Hello"), ("user", "three")]
    assert turns_of(replicas.requests[-1]) == [("system", "Be kind."), *before], "instructions are of one request"
    assert (first.previous_response_id, third.previous_response_id) == (None, second.id)
    assert first.to_dict()["store"] is True
    again = await client.responses.retrieve(second.id)
    assert (again.output_text, again.usage, again.created_at) == ("Hello", second.usage, second.created_at)
    assert [item.id for item in again.output] == [item.id for item in second.output]  # type: ignore[union-attr]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="is kept here for this key"):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="send the whole chat instead") as caught:
        await client.responses.create(model="chatty", input="four", previous_response_id=third.id)
    assert caught.value.param == "previous_response_id"


async def test_items_of_an_answer_are_meant_by_their_ids(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    replicas.chunks = [
        TextChunk("Well.", 4, 1),
        TextChunk("", 4, 2, tool_calls=(CalledTool(0, "call_1", "weather", '{"a": 1}'),)),
        TextChunk("", 4, 5, "tool_calls", **LAST),
    ]
    first = await client.responses.create(model="chatty", input="rain?")
    question: Any = {"role": "user", "content": "rain?"}
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    result: Any = {"type": "function_call_output", "call_id": "call_1", "output": "yes"}
    second = await client.responses.create(model="chatty", input=[question, *references, result])
    (_, answer, tool) = replicas.requests[-1].messages
    assert (answer.content, answer.tool_calls[0].function.arguments) == ("Well.", '{"a": 1}')
    assert (tool.role, tool.tool_call_id, tool.content) == ("tool", "call_1", "yes")
    await client.responses.delete(first.id)
    await client.responses.create(model="chatty", input="so?", previous_response_id=second.id)
    assert [turn.role for turn in replicas.requests[-1].messages] == ["user", "assistant", "tool", "assistant", "user"]
    with pytest.raises(openai.BadRequestError, match="nothing is kept here") as caught:
        await client.responses.create(model="chatty", input=[question, *references])
    assert caught.value.param == "input.1.id"


async def test_what_is_meant_often_is_read_once(make: Any) -> None:
    """Each of a thousand references to one long answer would be a copy of it."""
    text = {"type": "output_text", "text": "x" * 10_000}
    output = {"id": f"msg_{'0' * 32}_0", "type": "message", "role": "assistant", "content": [text]}
    kept = make(Clock(1000.0))
    kept.keep("a", StoredResponse(f"resp_{'0' * 32}", None, b"[]", json.dumps({"output": [output]}).encode()))
    items = [ItemReference(id=output["id"])] * 1_000  # type: ignore[arg-type]
    found = KeptItems(kept, "a", 100_000).resolved(items)
    assert (len(found), len({id(item) for item in found})) == (1_000, 1)


async def test_what_is_not_to_be_kept_is_not(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    found = await client.responses.create(model="chatty", input="x", store=False)
    assert found.to_dict()["store"] is False
    assert (await http.get(f"/v1/responses/{found.id}")).status_code == 404
    for wrong in ("resp_0", "x" * 300, "msg_" + "0" * 32 + "_0"):
        answer = await http.post(
            "/v1/responses", json={"model": "chatty", "input": [{"type": "item_reference", "id": wrong}]}
        )
        assert (answer.status_code, problem(answer)["param"]) == (400, "input.0.id")


async def test_the_second_turn_of_the_ai_sdk(http: httpx.AsyncClient, replicas: Replicas) -> None:
    """As `generateText` of `ai` 6.0.326 with the default provider of `@ai-sdk/openai` 3.0.141 sends it."""
    user = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    first = (await http.post("/v1/responses", json={"model": "chatty", "input": [user], "store": True})).json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    second = await http.post("/v1/responses", json={"model": "chatty", "input": [user, reference, user]})
    assert second.status_code == 200, second.text
    assert turns_of(replicas.requests[-1]) == [("user", "Hi"), ("assistant", "Hello"), ("user", "Hi")]


async def test_an_answer_that_cannot_be_kept_says_so(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("database or disk is full")

    monkeypatch.setattr(StoredResponses, "keep", full)
    found = (await client.responses.create(model="chatty", input="x")).to_dict()
    assert (found["store"], found["warnings"]) == (
        False,
        ["store: the response could not be kept: database or disk is full"],
    )
    events = [event async for event in await client.responses.create(model="chatty", input="x", stream=True)]
    assert events[-1].type == "response.completed"
    assert events[-1].response.to_dict()["store"] is False


def response(name: str, nbytes: int = 100, previous: str | None = None) -> StoredResponse:
    return StoredResponse(name, previous, b"", bytes(nbytes))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., StoredResponses]:
    def made(clock: Clock, **options: Any) -> StoredResponses:
        return StoredResponses(StoredResponsesConfig(folder=tmp_path / "kept", **options), "cluster", clock)

    return made


def test_only_its_own_tenant_finds_a_response(make: Any) -> None:
    store = make(Clock(1000.0))
    store.keep("me", response("a"))
    assert store.find("you", "a") is None
    assert not store.forget("you", "a")
    assert store.find("me", "a") == response("a")
    assert store.forget("me", "a")
    assert store.find("me", "a") is None


def test_a_response_ends_some_time_after_its_last_use(make: Any) -> None:
    clock = Clock(1000.0)
    store = make(clock, ttl_s=10)
    for name in ("used", "unused"):
        store.keep("", response(name))
    clock.now_s += 8
    assert store.find("", "used")
    clock.now_s += 8
    assert store.find("", "used")
    assert store.find("", "unused") is None


def test_expired_responses_take_no_room(make: Any) -> None:
    clock = Clock(1000.0)
    store = make(clock, ttl_s=10, max_bytes=1000)
    for number in range(9):
        store.keep("before", response(f"a{number}"))
    clock.now_s += 11
    for number in range(9):
        store.keep("now", response(f"b{number}"))
    assert all(store.find("now", f"b{number}") for number in range(9))


def test_replicas_share_what_is_kept(make: Any, tmp_path: Path) -> None:
    first, second = make(Clock(1000.0)), make(Clock(1000.0))
    threads = [
        threading.Thread(target=lambda store, name: store.keep("", response(name)), args=(store, f"{name}{number}"))
        for number in range(20)
        for name, store in (("a", first), ("b", second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(second.find("", f"a{number}") and first.find("", f"b{number}") for number in range(20))
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0


def test_the_oldest_of_those_with_the_most_end_first(make: Any) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng, clock, most = random.Random(seed), Clock(1000.0), 100_000
    store = make(clock, max_bytes=most)
    sizes: dict[tuple[str, str], int] = {}
    for number in range(400):
        clock.now_s += 1
        tenant = "loud" if number % 10 else "quiet"
        size = rng.randrange(1, 5000) if tenant == "loud" else 200
        store.keep(tenant, response(str(number), size))
        sizes[tenant, str(number)] = size
    left = {key for key in sizes if store.find(*key)}
    assert sum(sizes[key] for key in left) <= most * (1 + 1 / kept._SWEEPS) + 5000
    assert sum(sizes[key] for key in left) > most / 2
    assert {key for key in sizes if key[0] == "quiet"} <= left, "who keeps little loses nothing to who keeps much"
    loud = sorted(int(name) for tenant, name in left if tenant == "loud")
    assert loud == [number for number in range(loud[0], 400) if number % 10], "the newest"


@pytest.mark.drawn
@pytest.mark.parametrize("damage", [b"no database at all" * 100, None])
def test_a_damaged_file_is_begun_anew(make: Any, tmp_path: Path, damage: bytes | None) -> None:
    store = make(Clock(1000.0))
    store.keep("", response("a"))
    del store
    gc.collect()  # closes the file
    file = tmp_path / "kept" / "responses.sqlite"
    content = bytearray(damage or file.read_bytes())
    if damage is None:
        place = content.index(b"CREATE TABLE")
        content[place : place + 12] = bytes([200]) * 12
    file.write_bytes(content)
    again = make(Clock(1000.0))
    assert again.find("", "a") is None
    for name in ("b", "c"):
        try:
            again.keep("", response(name))
        except OSError:
            continue
    assert again.find("", "c"), "at the second time at the latest"


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = StoredResponses(StoredResponsesConfig(folder=tmp_path / "file" / "below"), "cluster")
    assert store.find("", "a") is None
    with pytest.raises(OSError, match="file"):
        store.keep("", response("a"))


async def test_a_long_chat_is_bounded(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    text = "x" * (CONFIG.ingress.limits.max_upload_bytes // 3)
    replicas.pieces = [text, ""]
    references: Any = []
    for _ in range(4):
        answer = await client.responses.create(model="chatty", input="x")
        references.append({"type": "item_reference", "id": answer.output[0].id})
    with pytest.raises(openai.APIStatusError, match="more than") as caught:
        await client.responses.create(model="chatty", input=references)
    assert (caught.value.status_code, json.loads(caught.value.response.text)["error"]["param"]) == (413, "input.2.id")
