from __future__ import annotations

import io
import itertools
import json
from typing import Any

import httpx
import pytest
from rich.console import Console

from deployments.cli.chat import _Conversation
from deployments.cli.client import Client


class Server:
    """Answers chats with the number of messages, one character a piece, and lists its models."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            kinds = {"adder": "llm", "larger": "llm", "flux": "diffusion"}
            return httpx.Response(200, json={"data": [{"id": name, "kind": kind} for name, kind in kinds.items()]})
        body = json.loads(request.content)
        self.bodies.append(body)
        if body["messages"][-1]["content"] == "fail":
            return httpx.Response(503, json={"error": {"message": "no replica"}})
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {"content": character}}]} for character in f"[{len(body['messages'])}]"
        ]
        events.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}})
        return httpx.Response(200, text="".join(f"data: {json.dumps(event)}\n\n" for event in events))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def talk(server: Server, out: io.StringIO) -> _Conversation:
    client = Client("http://cluster")
    client._http = httpx.Client(base_url="http://cluster", transport=httpx.MockTransport(server))
    ticks = itertools.count(0, 0.5)
    return _Conversation(client, "adder", Console(file=out, width=100), lambda: next(ticks))


def test_a_conversation_remembers_what_was_said(talk: _Conversation, server: Server, out: io.StringIO) -> None:
    assert talk.take_line("one")
    assert talk.take_line("two")
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "[1]", "two"]
    assert out.getvalue().splitlines()[:2] == ["[1]", "3 tokens, the first after 500 ms, then 2.0 per second"]
    assert talk.take_line("/clear")
    assert talk.take_line("/system be brief")
    assert talk.take_line("three")
    assert [message["role"] for message in server.bodies[2]["messages"]] == ["system", "user"]
    assert talk.take_line("four")
    assert [message["role"] for message in server.bodies[3]["messages"]] == ["system", "user", "assistant", "user"]


def test_the_model_changes_to_one_that_is_there(talk: _Conversation, server: Server, out: io.StringIO) -> None:
    assert talk.take_line("/model larger")
    assert talk.take_line("one")
    assert server.bodies[0]["model"] == "larger"
    assert talk.take_line("/model flux")
    assert "models: adder, larger" in out.getvalue()
    assert talk.model == "larger"


def test_an_error_does_not_end_a_conversation_and_is_not_remembered(
    talk: _Conversation, server: Server, out: io.StringIO
) -> None:
    assert talk.take_line("fail")
    assert "no replica" in out.getvalue()
    assert talk.history == []
    assert talk.take_line("/nonsense")
    assert "/model NAME" in out.getvalue()
    assert not talk.take_line("/quit")
    assert not talk.take_line("")


def test_loras_go_with_every_question_until_the_model_changes(server: Server, out: io.StringIO) -> None:
    client = Client("http://cluster")
    client._http = httpx.Client(base_url="http://cluster", transport=httpx.MockTransport(server))
    loras = [{"name": "polite", "scale": 0.5}]
    talk = _Conversation(client, "adder", Console(file=out), loras=loras)
    for line in ("one", "two", "/model larger", "three"):
        assert talk.take_line(line)
    assert [body.get("lora") for body in server.bodies] == [loras, loras, None]
