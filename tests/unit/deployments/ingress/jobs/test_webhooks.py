"""Webhooks: a client's server is told of its job's end, signed so that OpenAI's client takes it, until it has heard."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from kit.waiting import until
from unit.deployments.ingress.http_fakes import CHAT, Replicas, problem
from unit.deployments.ingress.jobs.job_fakes import config_with_jobs, ended, ingress_over

from cluster.jobs import hook_book
from cluster.jobs.owner import JobOwner
from configs.cluster import ClusterConfig
from deployments.ingress.jobs import webhooks

CHATS = "/v1/chat/completions"
SECRET = f"whsec_{base64.b64encode(random.randbytes(32)).decode()}"


@pytest.fixture(autouse=True)
def quick(quick_jobs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_book, "PAUSES_S", (0.0, 0.0))


class Listener:
    """A client's server. It answers with `statuses` in turn, with 200 after them; `hears` are (head, headers, body)."""

    def __init__(self, *statuses: str) -> None:
        self.hears: list[tuple[str, dict[str, str], bytes]] = []
        self.port = 0
        self._statuses = list(statuses)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        self.hears.append((head, headers, await reader.readexactly(int(headers["content-length"]))))
        status = self._statuses.pop(0) if self._statuses else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
        writer.close()


@asynccontextmanager
async def listening(*statuses: str) -> AsyncIterator[Listener]:
    listener = Listener(*statuses)
    server = await asyncio.start_server(listener.serve, "127.0.0.1", 0)
    listener.port = server.sockets[0].getsockname()[1]
    async with server:
        yield listener


def config_of(port: int, *, may_be_inner: bool = True) -> ClusterConfig:
    return config_with_jobs(webhooks={"hosts": [f"127.0.0.1:{port}"], "may_be_inner": may_be_inner})


def asking_for(port: int, **more: str) -> dict[str, str]:
    return {"X-Webhook-Url": f"http://127.0.0.1:{port}/hook?a=b", "X-Webhook-Secret": SECRET} | more


async def test_the_end_of_a_batch_is_told_as_openais_client_takes_it(
    as_described: Any, replicas: Replicas, owner: JobOwner
) -> None:
    async with listening() as told, ingress_over(replicas, owner, as_described, config_of(told.port)) as http:
        client = openai.AsyncOpenAI(
            api_key="none", base_url="http://test/v1", http_client=http, max_retries=0, webhook_secret=SECRET
        )
        line = json.dumps({"custom_id": "a", "method": "POST", "url": CHATS, "body": CHAT})
        file = await client.files.create(file=("a.jsonl", line.encode()), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHATS, completion_window="24h", extra_headers=asking_for(told.port)
        )
        await until(lambda: told.hears)
        head, headers, body = told.hears[0]
        assert head == "POST /hook?a=b HTTP/1.1"
        assert headers["host"] == f"127.0.0.1:{told.port}"
        event = client.webhooks.unwrap(body, headers)
        assert (event.type, event.data.id) == ("batch.completed", batch.id)
        for wrong in (body + b" ", body.replace(b"completed", b"failed")):
            with pytest.raises(openai.InvalidWebhookSignatureError):
                client.webhooks.unwrap(wrong, headers)


async def test_it_is_told_until_it_has_heard_with_one_id(
    as_described: Any, replicas: Replicas, owner: JobOwner
) -> None:
    refusals = ("500 Internal Server Error", "302 Found\r\nLocation: http://127.0.0.1/")
    async with listening(*refusals) as told, ingress_over(replicas, owner, as_described, config_of(told.port)) as http:
        for body in (CHAT, CHAT | {"model": "no"}):
            asked = {"endpoint": CHATS, "body": body}
            job = (await http.post("/v1/jobs", json=asked, headers=asking_for(told.port))).json()
            await ended(http, job["id"])
            await until(lambda: told.hears[-1:] and not owner_has_hooks(owner))
        types = [json.loads(body)["type"] for _, _, body in told.hears]
        assert types == ["job.completed"] * 3 + ["job.failed"]
        assert len({headers["webhook-id"] for _, headers, _ in told.hears}) == 2


def owner_has_hooks(owner: JobOwner) -> bool:
    return bool(owner._disk.book._db.execute("SELECT 1 FROM hooks").fetchall())


@pytest.mark.parametrize(("statuses", "count"), [(["410 Gone"], 1), (["500 No"] * 9, 3)])
async def test_it_is_given_up(
    as_described: Any, replicas: Replicas, owner: JobOwner, statuses: list[str], count: int
) -> None:
    async with listening(*statuses) as told, ingress_over(replicas, owner, as_described, config_of(told.port)) as http:
        await http.post("/v1/jobs", json={"endpoint": CHATS, "body": CHAT}, headers=asking_for(told.port))
        await until(lambda: told.hears and not owner_has_hooks(owner))
        assert len(told.hears) == count


async def test_what_no_ingress_has_told_is_told_by_another(
    as_described: Any, replicas: Replicas, owner: JobOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_book, "TRY_S", 0.0)  # the time of a dead one's try is over
    async with listening() as told:
        config = config_of(told.port)
        async with ingress_over(replicas, owner, as_described, config, num_runners=0) as http:
            headers = asking_for(told.port)
            job = (await http.post("/v1/jobs", json={"endpoint": CHATS, "body": CHAT}, headers=headers)).json()
            (taken,) = await owner.take_jobs("dead", 1, 1, 0.0)
            assert await owner.hooks.take_hooks(9, 0.0) == [], "it has not ended"
            await owner.cancel_job("", job["id"])
            (due,) = await owner.hooks.take_hooks(9, 0.0)
            assert (due.job.id, due.num_tries, taken.id) == (job["id"], 1, job["id"])
        async with ingress_over(replicas, owner, as_described, config):
            await until(lambda: told.hears)
            await until(lambda: not owner_has_hooks(owner))
        assert json.loads(told.hears[0][2])["type"] == "job.cancelled"


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"X-Webhook-Url": "http://other.example/"}, "is none of them"),
        ({"X-Webhook-Url": "ftp://127.0.0.1/"}, "no address that begins with"),
        ({"X-Webhook-Url": "http://user@127.0.0.1/"}, "without a user"),
        ({"X-Webhook-Url": "http://127.0.0.1:{port}/" + "x" * 2048}, "characters, at most 2048"),
        ({"X-Webhook-Secret": "whsec_c2hvcnQ="}, "24 to 64 bytes"),
        ({"X-Webhook-Secret": "no base64"}, "the secret"),
        ({"X-Webhook-Secret": SECRET.removeprefix("whsec_")}, "expected whsec_"),
    ],
)
async def test_what_cannot_be_told_is_refused_at_once(
    as_described: Any, replicas: Replicas, owner: JobOwner, headers: dict[str, str], words: str
) -> None:
    port = 9999
    async with ingress_over(replicas, owner, as_described, config_of(port)) as http:
        given = {name: value.replace("{port}", str(port)) for name, value in headers.items()}
        answer = await http.post("/v1/jobs", json={"endpoint": CHATS, "body": CHAT}, headers=asking_for(port) | given)
        assert answer.status_code == 400
        assert words in problem(answer)["message"]
        secret_alone = {"X-Webhook-Secret": SECRET}
        answer = await http.post("/v1/jobs", json={"endpoint": CHATS, "body": CHAT}, headers=secret_alone)
        assert answer.status_code == 400
        assert (await http.get("/v1/jobs")).json()["data"] == []


async def test_an_inner_address_is_not_called(
    as_described: Any, replicas: Replicas, owner: JobOwner, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as told:
        config = config_of(told.port, may_be_inner=False)
        async with ingress_over(replicas, owner, as_described, config) as http:
            await http.post("/v1/jobs", json={"endpoint": CHATS, "body": CHAT}, headers=asking_for(told.port))
            await until(lambda: "is given up" in caplog.text)
        assert "inner address" in caplog.text
        assert told.hears == []


async def test_a_server_that_never_answers_is_left(
    as_described: Any,
    replicas: Replicas,
    owner: JobOwner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(webhooks, "TELL_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with ingress_over(replicas, owner, as_described, config_of(port)) as http:
            await http.post("/v1/jobs", json={"endpoint": CHATS, "body": CHAT}, headers=asking_for(port))
            await until(lambda: "is given up" in caplog.text)
