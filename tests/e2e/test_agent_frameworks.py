"""Agents of frameworks over several turns, in environments of their own, with models in the forms of families."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import uvicorn
from integration.judging import judge, node_judge
from kit.waiting import wait_until
from unit.deployments.ingress.scripted_agents import ANSWER, THOUGHT, Agents, larger_limits
from unit.deployments.serve_fakes import FakeHandle

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service

pytestmark = pytest.mark.long

CITY = "Ulm"
SYNTAXES = ("hermes", "mistral-args", "qwen3-coder", "gemma4", "llama4")  # one of each kind


@pytest.fixture
def serve() -> Callable[[Agents], AbstractContextManager[str]]:
    """Return a function that serves replicas over HTTP, with an event loop in a thread, and gives their address."""

    @contextmanager
    def serving(replicas: Agents) -> Iterator[str]:
        listening = socket.create_server(("127.0.0.1", 0))
        config = larger_limits()

        async def run() -> None:
            watch, handle = RegistrySnapshot(NamedActor(lambda: replicas)), FakeHandle(replicas)
            app = create_http_app(Service(config, watch, handle, handle), config)
            server.append(uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)))
            await server[0].serve([listening])
            watch.close()

        server: list[uvicorn.Server] = []
        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        wait_until(lambda: server and server[0].started, "the server listens")
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server[0].should_exit = True
            thread.join()

    return serving


ASKED = {"question": "Will it rain?", "result": "rain"}


@pytest.mark.parametrize("family", SYNTAXES)
def test_clients_call_a_tool_and_tell_what_it_said(
    family: str, serve: Callable[[Agents], AbstractContextManager[str]], tmp_path: Path
) -> None:
    """litellm by four protocols, OpenAI's client for JavaScript and the AI SDK, whole and in streams."""
    expected = {"answer": ANSWER, "calls": [{"city": CITY, "days": 2}]}
    with serve(Agents(tmp_path / "model", family, CITY)) as url:
        litellm = judge("litellm_agents", "litellm", url, "none", tmp_path / "litellm", ASKED)
        node = node_judge("openai_agents", "openai_node", url, "none", tmp_path / "node", ASKED)
    for provider in ("openai", "hosted_vllm", "anthropic", "ollama_chat"):
        for name in (provider, f"{provider}_stream"):
            assert litellm[name] == expected | {"thoughts": THOUGHT}, name
    for way in ("chats", "responses"):
        for name in (way, f"{way}_stream"):
            assert node[name] == expected | {"thoughts": THOUGHT}, name
            assert node[f"ai_sdk_{name}"] == expected, name


@pytest.mark.parametrize("family", SYNTAXES)
def test_agents_call_a_tool_and_tell_what_it_said(
    family: str, serve: Callable[[Agents], AbstractContextManager[str]], tmp_path: Path
) -> None:
    with serve(Agents(tmp_path / "model", family, CITY)) as url:
        seen = judge("agent_loops", "agents", url, "none", tmp_path / "seen", ASKED)
    names = ["pydantic_ai_chat", "pydantic_ai_chat_stream", "pydantic_ai_responses", "pydantic_ai_anthropic"]
    for name in (*names, "langgraph"):
        assert seen[name] == {"answer": ANSWER, "calls": [{"city": CITY, "days": 2}]}, name
