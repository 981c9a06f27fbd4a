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
from cluster.jobs.records import JobFilter
from configs.access import AccessConfig
from configs.cluster import StoredResponsesConfig
from deployments.ingress.access.keys import KeyEntry, add_key, hash_of
from deployments.records import TextChunk
from deployments.records.errors import GenerationFailed


class HeldTexts(Replicas):
    """Holds all texts until `gate` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def on_chat(self, request: Any) -> Any:
        await self.gate.wait()
        return await super().on_chat(request)

    async def on_stream_text(self, request: Any) -> AsyncIterator[TextChunk]:
        """Hold the texts after their first piece."""
        is_first = True
        async for chunk in super().on_stream_text(request):
            yield chunk
            if is_first:
                await self.gate.wait()
            is_first = False


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
    for more in ({"input": []}, {"previous_response_id": "resp_no"}):
        answer = await http.post("/v1/responses", json={"model": "chatty", "input": "x", "background": True} | more)
        assert answer.status_code == 400
    assert problem(await http.get("/v1/responses/job_1"))["code"] == "response_not_found"
    job = (
        await http.post("/v1/jobs", json={"endpoint": "/v1/responses", "body": {"model": "chatty", "input": "x"}})
    ).json()
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel(job["id"])
    assert len((await http.get("/v1/jobs")).json()["data"]) == 1


async def begun_stream(client: openai.AsyncOpenAI, owner: JobOwner) -> tuple[asyncio.Task[Any], str]:
    """Return a request of a stream, and the id of its response, once its first text is here."""
    asked = client.responses.create(model="chatty", input="x", background=True, stream=True)
    asking = asyncio.create_task(asked)  # it ends with the stream: this transport is not one piece by piece

    async def id_of_begun() -> str | None:
        for job in await owner.list_jobs("", JobFilter(), None, 1, "desc") or ():
            found = await owner.parts.follow_result("", job.id, None, 0, 0.0)
            if found is not None and b"output_text.delta" in found[1]:
                return job.id
        return None

    return asking, await until(id_of_begun)


async def test_a_stream_in_the_background_goes_on_from_any_ingress(
    client: openai.AsyncOpenAI, replicas: HeldTexts, owner: JobOwner, as_described: Any
) -> None:
    asking, id_ = await begun_stream(client, owner)
    asking.cancel()  # the connection breaks
    assert (await client.responses.retrieve(id_)).status == "in_progress"
    async with ingress_over(replicas, owner, as_described, num_runners=0) as other:
        elsewhere = openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=other, max_retries=0)
        following = asyncio.create_task(elsewhere.responses.retrieve(id_, stream=True, starting_after=2))
        replicas.gate.set()
        rest = [event async for event in await following]
    whole = [event async for event in await client.responses.retrieve(id_, stream=True)]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert [event.model_dump() for event in rest] == [event.model_dump() for event in whole[3:]]
    text = "".join(event.delta for event in whole if event.type == "response.output_text.delta")
    assert (whole[-1].type, text) == ("response.completed", "Hello")
    done = await client.responses.retrieve(id_)
    assert (done.status, done.output_text, done.id) == ("completed", "Hello", id_)
    for after in (whole[-1].sequence_number, 10**6):
        none = await client.responses.retrieve(id_, stream=True, starting_after=after)
        assert [event async for event in none] == []
    plain = await client.responses.create(model="chatty", input="x", background=True)
    with pytest.raises(openai.BadRequestError, match="was not begun with"):
        await client.responses.retrieve(plain.id, stream=True)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_no", stream=True)


async def test_a_stream_in_the_background_ends_with_its_error(
    client: openai.AsyncOpenAI, replicas: HeldTexts, owner: JobOwner
) -> None:
    asking, id_ = await begun_stream(client, owner)
    await client.responses.cancel(id_)
    with pytest.raises(openai.APIError, match="the job is cancelled"):
        async for _ in await asking:
            pass


async def test_a_key_with_one_request_at_a_time_can_follow_its_response(
    replicas: HeldTexts, owner: JobOwner, tmp_path: Path
) -> None:
    """The stream waits for the job, which is the request that counts."""
    tmp_path.chmod(0o700)
    add_key(tmp_path / "keys", KeyEntry(name="mine", sha256=hash_of("atl_mine"), max_concurrent=1))
    config = CONFIG.model_copy(
        update={"access": AccessConfig(keys_file=tmp_path / "keys", allowed_hosts=["test"]), "grpc": None}
    )
    replicas.gate.set()
    async with ingress_over(replicas, owner, lambda _: {}, config) as http:
        mine = openai.AsyncOpenAI(api_key="atl_mine", base_url="http://test/v1", http_client=http, max_retries=0)
        stream = await mine.responses.create(model="chatty", input="x", background=True, stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        assert (await mine.responses.retrieve(events[-1].response.id)).output_text == "Hello"
