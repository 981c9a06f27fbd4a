"""Responses in the background, by OpenAI's client: begun, fetched, followed on, cancelled and deleted by their ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from kit.waiting import until
from unit.deployments.ingress.http_fakes import CONFIG, Replicas, problem
from unit.deployments.ingress.jobs.job_fakes import ingress_over

from cluster.jobs.owner import JobOwner
from configs.cluster import StoredResponsesConfig
from deployments.records.errors import GenerationFailed


class HeldTexts(Replicas):
    """Holds all texts until `gate` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def on_chat(self, request: Any) -> Any:
        await self.gate.wait()
        return await super().on_chat(request)


@pytest.fixture
def replicas() -> HeldTexts:
    return HeldTexts()


@pytest.fixture
async def http(
    as_described: Any, replicas: HeldTexts, owner: JobOwner, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    stored = StoredResponsesConfig(folder=tmp_path / "stored")
    config = CONFIG.model_copy(update={"ingress": CONFIG.ingress.model_copy(update={"stored_responses": stored})})
    async with ingress_over(replicas, owner, as_described, config) as client:
        yield client


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)


async def ended(client: openai.AsyncOpenAI, id_: str) -> Any:
    async def look() -> Any:
        found = await client.responses.retrieve(id_)
        return found if found.status not in ("queued", "in_progress") else None

    return await until(look)


async def test_a_response_is_made_in_the_background(client: openai.AsyncOpenAI, replicas: HeldTexts) -> None:
    begun = await client.responses.create(
        model="chatty", input="x", instructions="be short", background=True, metadata={"for": "me"}
    )
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    assert (begun.instructions, begun.metadata) == ("be short", {"for": "me"})

    async def runs() -> bool:
        return (await client.responses.retrieve(begun.id)).status == "in_progress"

    await until(runs)
    replicas.gate.set()
    done = await ended(client, begun.id)
    assert (done.id, done.status, done.output_text, done.background) == (begun.id, "completed", "Hello", True)
    direct = await client.responses.create(model="chatty", input="x", instructions="be short")
    assert (direct.output_text, direct.usage, direct.background) == (done.output_text, done.usage, False)
    await client.responses.create(model="chatty", input="y", previous_response_id=begun.id)
    assert [turn.role for turn in replicas.requests[-1].messages] == ["user", "assistant", "user"]
    await client.responses.delete(begun.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await call(begun.id)


async def test_a_response_in_the_background_is_cancelled(client: openai.AsyncOpenAI, replicas: HeldTexts) -> None:
    begun = await client.responses.create(model="chatty", input="x", background=True)
    cancelled = await client.responses.cancel(begun.id)
    assert (cancelled.id, cancelled.status, cancelled.output) == (begun.id, "cancelled", [])
    replicas.gate.set()
    assert (await client.responses.retrieve(begun.id)).status == "cancelled"


async def test_a_response_in_the_background_fails_with_its_reason(
    client: openai.AsyncOpenAI, replicas: HeldTexts
) -> None:
    replicas.error = GenerationFailed("the model failed")
    replicas.gate.set()
    begun = await client.responses.create(model="chatty", input="x", background=True)
    failed = await ended(client, begun.id)
    assert failed.status == "failed"
    assert (failed.error.code, failed.error.message) == ("generation_failed", "the model failed")


async def test_what_cannot_be_in_the_background_is_refused(http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    for more in ({"stream": True}, {"input": []}, {"previous_response_id": "resp_no"}):
        answer = await http.post("/v1/responses", json={"model": "chatty", "input": "x", "background": True} | more)
        assert answer.status_code == 400
    assert problem(await http.get("/v1/responses/job_1"))["code"] == "response_not_found"
    job = (
        await http.post("/v1/jobs", json={"endpoint": "/v1/responses", "body": {"model": "chatty", "input": "x"}})
    ).json()
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel(job["id"])
    assert len((await http.get("/v1/jobs")).json()["data"]) == 1
