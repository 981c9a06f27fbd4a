from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from deployments.cli.chat import _Conversation, _read_text
from deployments.console.client import ChatUsage, Client, ClientError

# Answers that a terminal or rich could take for more than text.
SPECIAL = {"smile": ":smile: [red]x[/red]", "escape": "\x1b]0;title\x07a\tb\n\x9b2Jc"}


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
        question = body["messages"][-1]["content"]
        if question == "fail":
            refusal = json.dumps({"error": {"message": "no replica"}}).encode()
            return httpx.Response(503, content=iter([refusal]))  # not read yet, as from a socket
        answer = SPECIAL.get(question, f"[{len(body['messages'])}]")
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": character}}]} for character in answer]
        finish = "length" if question == "long" else "stop"
        times = {"timings_ms": {"generate": 500.0}} if question == "timed" else {}
        events.append({"choices": [{"delta": {}, "finish_reason": finish}], **times})
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
    assert talk.take_text("one")
    assert talk.take_text("two")
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "[1]", "two"]
    assert out.getvalue().splitlines()[:2] == ["[1]", "3 tokens, the first after 500 ms, then 2.0 per second"]
    assert talk.take_text("timed")  # by the server's clock: pieces may come together
    assert out.getvalue().endswith("then 4.0 per second\n")
    server.bodies.pop()
    assert talk.take_text("/clear")
    assert talk.take_text("/system be brief")
    assert talk.take_text("three")
    assert [message["role"] for message in server.bodies[2]["messages"]] == ["system", "user"]
    assert talk.take_text("four")
    assert [message["role"] for message in server.bodies[3]["messages"]] == ["system", "user", "assistant", "user"]


def test_the_model_changes_to_one_that_is_there(talk: _Conversation, server: Server, out: io.StringIO) -> None:
    assert talk.take_text("/model larger")
    assert talk.take_text("one")
    assert server.bodies[0]["model"] == "larger"
    assert talk.take_text("/model flux")
    assert "no language model 'flux'; models: adder, larger" in out.getvalue()
    assert talk.take_text("/model")
    assert out.getvalue().endswith("\nmodels: adder, larger\n")
    assert talk.model == "larger"


def test_an_error_does_not_end_a_conversation_and_is_not_remembered(
    talk: _Conversation, server: Server, out: io.StringIO
) -> None:
    assert talk.take_text("fail")
    assert "no replica" in out.getvalue()
    assert talk.history == []
    assert talk.take_text("/nonsense")
    assert "no command /nonsense\n/model NAME" in out.getvalue()
    assert talk.take_text("/help")
    assert "no command /help" not in out.getvalue()
    assert talk.take_text("")  # the return key alone ends nothing, and asks nothing
    assert len(server.bodies) == 1
    assert not talk.take_text("/quit")


def test_loras_go_with_every_question_until_the_model_changes(server: Server, out: io.StringIO) -> None:
    client = Client("http://cluster")
    client._http = httpx.Client(base_url="http://cluster", transport=httpx.MockTransport(server))
    loras = [{"name": "polite", "scale": 0.5}]
    talk = _Conversation(client, "adder", Console(file=out), options={"lora": loras, "temperature": 0.0})
    for line in ("one", "two", "/model larger", "three"):
        assert talk.take_text(line)
    assert [body.get("lora") for body in server.bodies] == [loras, loras, None]
    assert [body["temperature"] for body in server.bodies] == [0.0] * 3


def test_without_a_name_the_first_language_model_answers(server: Server, out: io.StringIO) -> None:
    client = Client("http://cluster")
    client._http = httpx.Client(base_url="http://cluster", transport=httpx.MockTransport(server))
    assert _Conversation(client, None, Console(file=out)).model == "adder"
    with pytest.raises(ClientError, match=r"no language model 'flux' \(known: adder, larger\)"):
        _Conversation(client, "flux", Console(file=out))


def test_answers_are_shown_as_they_are_and_rule_no_terminal(talk: _Conversation, out: io.StringIO) -> None:
    assert talk.take_text("smile")
    assert talk.take_text("escape")
    assert talk.take_text("long")
    shown = out.getvalue()
    assert SPECIAL["smile"] in shown
    assert "]0;titlea\tb\n2Jc" in shown
    assert "\x1b" not in shown
    assert shown.count("cut off") == 1
    assert talk.history[3]["content"] == SPECIAL["escape"]  # the model gets back what it said


def test_ctrl_c_ends_an_answer_and_keeps_what_came(server: Server, out: io.StringIO) -> None:
    class Interrupted(Client):
        after = 2

        def chat_stream(self, **body: Any) -> Iterator[str | ChatUsage]:
            for number, piece in enumerate(super().chat_stream(**body)):
                if number == self.after:
                    raise KeyboardInterrupt
                yield piece

    client = Interrupted("http://cluster")
    client._http = httpx.Client(base_url="http://cluster", transport=httpx.MockTransport(server))
    talk = _Conversation(client, "adder", Console(file=out))
    assert talk.take_text("one")
    assert out.getvalue() == "[1 …\n"
    assert [turn["content"] for turn in talk.history] == ["one", "[1"]
    client.after = 0  # before anything came: as if it had not been asked
    assert talk.take_text("two")
    assert len(talk.history) == 2


def test_texts_of_several_lines_stand_between_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["one", '"""', "two", "three", '"""', '"""four"""', "", '"""five'])
    prompts: list[str] = []

    def type_line(prompt: str) -> str:
        prompts.append(prompt)
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", type_line)
    assert [_read_text("> ") for _ in range(6)] == ["one", "two\nthree", "four", "", "five", None]
    assert prompts == ["> ", "> ", "... ", "... ", "... ", "> ", "> ", "> ", "... ", "> "]
