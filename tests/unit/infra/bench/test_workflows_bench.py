"""The bench of workflows: one queue is one prompt at a time, and users at once do not wait for each other."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from kit.serving import served
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from deployments.workflows.backend import ModelFacts
from deployments.workflows.checking import check
from deployments.workflows.reading import read_workflow
from infra.bench.workflows import WorkflowSettings, compare, run_round, workflow

SETTINGS = WorkflowSettings(users=4, prompts=2, rounds=2)


class Server:
    """A server whose prompts end with `status` a few turns of its loop later; it counts those that run at once."""

    def __init__(self, status: str = "success") -> None:
        self.status, self.running, self.most = status, 0, list[int]()
        self.models: list[str] = []
        self.sockets: dict[str, WebSocket] = {}
        routes = [Route("/prompt", self.prompt, methods=["POST"]), WebSocketRoute("/ws", self.talk)]
        self.app = Starlette(routes=routes)

    async def talk(self, socket: WebSocket) -> None:
        self.sockets[socket.query_params["clientId"]] = socket
        await socket.accept()
        await socket.receive()

    async def prompt(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.models.append(body["prompt"]["model"]["inputs"]["ckpt_name"])
        self.running += 1
        self.most.append(self.running)
        prompt_id = str(len(self.models))
        end = BackgroundTask(self.end, self.sockets[body["client_id"]], prompt_id)
        return JSONResponse({"prompt_id": prompt_id}, background=end)

    async def end(self, socket: WebSocket, prompt_id: str) -> None:
        other = {"type": "executing", "data": {"node": None, "prompt_id": "another"}}
        outcome = {"type": f"execution_{self.status}", "data": {"prompt_id": prompt_id}}
        for event in ({"type": "status", "data": {"status": {}}}, other, outcome):
            await socket.send_json(event)
        await asyncio.sleep(0.02)  # the others' prompts come meanwhile, unless they wait in the queue
        self.running -= 1
        await socket.send_json({"type": "executing", "data": {"node": None, "prompt_id": prompt_id}})


@asynccontextmanager
async def session_of(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    async with served(server.app) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield session


async def test_users_at_once_overlap_and_a_queue_has_one_prompt_at_a_time() -> None:
    server = Server()
    async with session_of(server) as session:
        found = await compare(session, SETTINGS, random.Random(1))
    each = SETTINGS.users * SETTINGS.prompts
    rounds = [server.most[start : start + each] for start in range(0, len(server.most), each)]
    assert sorted(min(max(one), 2) for one in rounds) == [1, 1, 1, 2, 2, 2]
    assert {model: server.models.count(model) for model in SETTINGS.models} == {
        model: len(server.models) // 2 for model in SETTINGS.models
    }
    assert found["ratio"] == pytest.approx(
        found["ways"]["at once"]["images_per_s"] / found["ways"]["one queue"]["images_per_s"]
    )


async def test_a_workflow_that_fails_ends_the_bench() -> None:
    async with session_of(Server("error")) as session:
        with pytest.raises(OSError, match="a workflow failed"):
            await run_round(session, SETTINGS, "at once", itertools.count())


def test_its_workflow_is_one_that_a_cluster_runs() -> None:
    class Catalog:
        def files(self, folder: str) -> Sequence[str]:
            return SETTINGS.models if folder == "checkpoints" else ()

        def models_of(self, folder: str, name: str) -> Sequence[str]:
            return (name,) if name in self.files(folder) else ()

        def facts(self, model: str) -> ModelFacts:
            return ModelFacts("FluxPipeline", {"pixels_per_latent": 4})

    for model, seed in zip(SETTINGS.models, itertools.count(), strict=False):
        read: Any = read_workflow(workflow(model, seed, SETTINGS))
        assert check(read, Catalog()).errors == ()
