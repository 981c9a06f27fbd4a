"""The bench of workflows: one queue is one prompt at a time, and users at once do not wait for each other."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from deployments.workflows.backend import ModelFacts
from deployments.workflows.checking import check
from deployments.workflows.reading import read_workflow
from infra.bench.workflows import WorkflowSettings, compare, run_prompt, workflow

SETTINGS = WorkflowSettings(users=4, prompts=2, rounds=2)


class Server:
    """A server whose prompts end at the second look; it counts those that run at once."""

    def __init__(self, status: str = "success") -> None:
        self.status, self.looks, self.ended = status, dict[str, int](), 0
        self.most: list[int] = []
        self.models: list[str] = []
        routes = [
            Route("/prompt", self.prompt, methods=["POST"]),
            Route("/history/{prompt_id}", self.history),
        ]
        self.app = Starlette(routes=routes)

    async def prompt(self, request: Request) -> JSONResponse:
        body = await request.json()
        prompt_id = str(len(self.looks))
        self.looks[prompt_id] = 0
        self.models.append(body["prompt"]["model"]["inputs"]["ckpt_name"])
        self.most.append(len(self.looks) - self.ended)
        return JSONResponse({"prompt_id": prompt_id})

    async def history(self, request: Request) -> JSONResponse:
        prompt_id = request.path_params["prompt_id"]
        self.looks[prompt_id] += 1
        await asyncio.sleep(0)
        if self.looks[prompt_id] < 2:
            return JSONResponse({})
        self.ended += 1
        return JSONResponse({prompt_id: {"status": {"status_str": self.status}}})


def client_of(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://h")


async def test_users_at_once_overlap_and_a_queue_has_one_prompt_at_a_time() -> None:
    server = Server()
    async with client_of(server) as client:
        found = await compare(client, SETTINGS, random.Random(1))
    each = SETTINGS.users * SETTINGS.prompts
    rounds = [server.most[start : start + each] for start in range(0, len(server.most), each)]
    assert sorted(max(one) for one in rounds) == [1, 1, 1, 4, 4, 4]
    assert {model: server.models.count(model) for model in SETTINGS.models} == {
        model: len(server.models) // 2 for model in SETTINGS.models
    }
    assert found["ratio"] == pytest.approx(
        found["ways"]["at once"]["images_per_s"] / found["ways"]["one queue"]["images_per_s"]
    )


async def test_a_workflow_that_fails_ends_the_bench() -> None:
    async with client_of(Server("error")) as client:
        with pytest.raises(OSError, match="a workflow failed"):
            await run_prompt(client, workflow("m", 1, SETTINGS))


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
