"""A model for which the cluster has no room: its requests are told so with the numbers, and not to come again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from ray.exceptions import RayTaskError
from unit.deployments.ingress.http_fakes import (
    CHAT,
    CONFIG,
    EMBEDDING,
    IMAGE,
    STATUSES,
    Replicas,
    Served,
    client_over,
    served,
)

from cluster.records.errors import ModelTooLarge
from deployments.ingress.openai.models import create_models_router
from deployments.ingress.service.model_answers import Nearness

NUMBERS = "store.node_budget_bytes is 358.0 MiB; model of 'm' need 433.0 MiB"


class Small(Replicas):
    """A cluster too small for every model, whose registry says so."""

    def __init__(self) -> None:
        super().__init__()
        self.states = {id_: replace(found, state="does_not_fit", error=NUMBERS) for id_, found in STATUSES.items()}

    async def on_prefetch(self, model: str) -> dict[str, str]:
        raise RayTaskError("prefetch", "Traceback", ModelTooLarge(f"model {model!r} does not fit: {NUMBERS}"))

    async def on_pin(self, model: str, pinned: bool) -> dict[str, str]:
        return await self.on_prefetch(model)


@pytest.fixture
async def small() -> AsyncIterator[Served]:
    async with served(Small(), CONFIG) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/images/generations", IMAGE),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/embeddings", EMBEDDING),
        ("/admin/models/chatty/prefetch", {}),
        ("/admin/models/chatty/pin", None),
    ],
)
async def test_its_requests_are_answered_with_the_numbers(small: Served, path: str, body: Any) -> None:
    answer = await small.http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert NUMBERS in answer.json()["error"]["message"]
    assert "retry-after" not in answer.headers


async def test_it_is_listed_so_and_never_as_ready_soon(small: Served) -> None:
    async def near() -> dict[str, Nearness]:
        return {id_: Nearness("disk", 10.0) for id_ in STATUSES}

    app = FastAPI()
    app.include_router(create_models_router(small.service, near))
    async with client_over(app) as http:
        listed = (await http.get("/v1/models?all=true&nearness=true")).json()["data"]
    assert {(one["state"], one["error"], one.get("ready_in_s")) for one in listed if one["kind"] != "pipeline"} == {
        ("does_not_fit", NUMBERS, None)
    }
    assert (await small.service.listing.health()).num_ready == 0
