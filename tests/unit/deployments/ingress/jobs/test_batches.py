"""/v1/files and /v1/batches, judged by OpenAI's client: each line of a batch has its result in a file, once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from kit.waiting import until
from unit.deployments.ingress.http_fakes import CHAT, CONFIG, EMBEDDING, IMAGE, Held, Replicas, problem
from unit.deployments.ingress.jobs.job_fakes import config_with_jobs, ingress_over, owner_in

from cluster.jobs.file_book import new_file_id
from cluster.jobs.files import Clocks
from cluster.jobs.owner import JobOwner
from configs.access import AccessConfig
from configs.jobs import JobsConfig
from deployments.ingress.access.keys import KeyEntry, add_key, hash_of, revoke_key
from deployments.ingress.jobs import batch_run, desk
from deployments.records.errors import QueueFull

CHATS = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


pytestmark = pytest.mark.usefixtures("quick_jobs")


def client_of(http: httpx.AsyncClient, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=key, base_url="http://test/v1", http_client=http, max_retries=0)


def line(custom_id: str, body: Any = CHAT, url: str = CHATS, **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more)


async def uploaded(client: openai.AsyncOpenAI, *lines: str) -> str:
    file = await client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    return file.id


async def begun(client: openai.AsyncOpenAI, *lines: str, endpoint: Any = CHATS, **more: Any) -> Any:
    file = await uploaded(client, *lines)
    return await client.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h", **more)


async def ended(client: openai.AsyncOpenAI, id_: str) -> Any:
    async def look() -> Any:
        batch = await client.batches.retrieve(id_)
        return batch if batch.status in ENDED else None

    return await until(look)


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """Return the lines of a file by their custom ids, of which each is there once."""
    if file_id is None:
        return {}
    content = (await client.files.content(file_id)).content
    found = [json.loads(one) for one in content.splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found)
    return by_id


async def test_a_batch_runs_by_openais_client(http: httpx.AsyncClient, replicas: Replicas) -> None:
    client = client_of(http)
    bad = line("wrong", CHAT | {"model": "no"})
    batch = await begun(client, line("one"), bad, "", line("two", CHAT | {"max_tokens": 3}), metadata={"for": "me"})
    assert (batch.object, batch.endpoint, batch.status in ("validating", "in_progress")) == ("batch", CHATS, True)
    assert batch.output_file_id is None
    done = await ended(client, batch.id)
    assert (done.status, done.metadata, done.errors) == ("completed", {"for": "me"}, None)
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (3, 2, 1)
    assert done.completed_at >= done.in_progress_at >= done.created_at
    assert done.expires_at - done.created_at == 86_400
    good, wrong = await results(client, done.output_file_id), await results(client, done.error_file_id)
    assert (good.keys(), wrong.keys()) == ({"one", "two"}, {"wrong"})
    assert good["one"]["error"] is None
    assert good["one"]["response"]["status_code"] == 200
    direct = await client.chat.completions.create(**CHAT)
    answer = good["one"]["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == direct.choices[0].message.content == "Hello"
    assert wrong["wrong"]["response"]["status_code"] == 404
    assert wrong["wrong"]["response"]["body"]["error"]["code"] == "model_not_found"
    output = await client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.expires_at is not None
    assert [one.id async for one in client.batches.list()] == [batch.id]
    assert not (await client.batches.list(limit=1)).has_more


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [("/v1/embeddings", EMBEDDING), ("/v1/images/generations", IMAGE | {"seed": 1}), ("/api/chat", CHAT)],
)
async def test_a_batch_is_of_any_endpoint(
    http: httpx.AsyncClient, replicas: Replicas, endpoint: str, body: Any
) -> None:
    client = client_of(http)
    batch = await begun(client, line("a", body, endpoint), endpoint=endpoint)
    done = await ended(client, batch.id)
    (result,) = (await results(client, done.output_file_id)).values()
    if "prompt" in body:
        assert replicas.requests[0].priority == CONFIG.admission.priority_levels
    direct = await http.post(endpoint, json=body)
    if direct.headers["content-type"].startswith("application/json"):
        found = result["response"]["body"]
        times = ("created", "timings_ms")
        assert {k: v for k, v in found.items() if k not in times} == {
            k: v for k, v in direct.json().items() if k not in times
        }
    assert result["response"]["status_code"] == direct.status_code == 200


@pytest.mark.parametrize(
    ("lines", "code", "words", "number"),
    [
        (["{"], "invalid_request", "not valid JSON", 1),
        ([line("a"), "[1]"], "invalid_request", "no object", 2),
        ([line("a"), line("a")], "duplicate_custom_id", "'a' is that of an earlier line", 2),
        ([line("a", url="/v1/embeddings")], "invalid_request", "url: '/v1/embeddings', expected the endpoint", 1),
        ([line("a", method="GET")], "invalid_request", "method: 'GET', expected 'POST'", 1),
        ([line("a", body="x")], "invalid_request", "body: expected an object", 1),
        ([line("a", CHAT | {"stream": True})], "invalid_request", "stream", 1),
        ([line("x" * 513)], "invalid_request", "custom_id: expected a text of 1 to 512", 1),
        ([json.dumps({"method": "POST", "url": CHATS, "body": CHAT})], "invalid_request", "custom_id", 1),
        ([""], "empty_file", "no requests", None),
        ([line("a", {"x": [[]] * 70_000})], "invalid_request", "more lists", 1),
    ],
)
async def test_a_wrong_file_runs_nothing(
    http: httpx.AsyncClient, replicas: Replicas, lines: list[str], code: str, words: str, number: int | None
) -> None:
    client = client_of(http)
    done = await ended(client, (await begun(client, *lines)).id)
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    (error,) = done.errors.data
    assert (error.code, error.line) == (code, number)
    assert words in error.message
    assert replicas.requests == []


async def test_what_makes_no_sense_is_refused(http: httpx.AsyncClient) -> None:
    client = client_of(http)
    file = await uploaded(client, line("a"))
    asked = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h"}
    for wrong, param in (
        ({"input_file_id": "file-no"}, "input_file_id"),
        ({"endpoint": "/v1/batches"}, "endpoint"),
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ):
        answer = await http.post("/v1/batches", json=asked | wrong)
        assert (answer.status_code, problem(answer)["param"]) == (400, param)
    form = {"file": ("x", b"1")}
    for files, data, param in (
        (form, {"purpose": "fine-tune"}, "purpose"),
        (form, {}, "purpose"),
        ({"other": ("x", b"1")}, {"purpose": "batch"}, "file"),
        (form, {"purpose": "batch", "expires_after[anchor]": "x", "expires_after[seconds]": "3600"}, "expires_after"),
        (
            form,
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
            "expires_after",
        ),
    ):
        answer = await http.post("/v1/files", files=files, data=data)
        assert (answer.status_code, problem(answer)["param"]) == (400, param)
    assert (await http.post("/v1/files", json={"purpose": "batch"})).status_code == 400
    torn = {"content-type": "multipart/form-data; boundary=b"}
    for content in (
        b"",
        b"--b\r\n",
        b"no form",
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\nab',
    ):
        assert (await http.post("/v1/files", content=content, headers=torn)).status_code == 400
    assert [one.id async for one in client.files.list()] == [file]


async def test_files_are_kept_listed_read_and_deleted(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.openai.files.PIECE_BYTES", 1000)
    client = client_of(http)
    content = [bytes([65 + number]) * (2500 * number) for number in range(3)]
    files = [await client.files.create(file=(f"{n}.jsonl", one), purpose="batch") for n, one in enumerate(content)]
    for file, right in zip(files, content, strict=True):
        assert (file.bytes, file.purpose, file.object) == (len(right), "batch", "file")
        assert (await client.files.content(file.id)).content == right
        assert await client.files.retrieve(file.id) == file
    assert [one.id async for one in client.files.list(limit=2)] == [file.id for file in files[::-1]]
    assert [(await client.files.list(limit=limit)).has_more for limit in (2, 3, 4)] == [True, False, False]
    assert [one.id async for one in client.files.list(order="asc", purpose="batch")] == [file.id for file in files]
    assert [one.id async for one in client.files.list(purpose="batch_output")] == []
    assert (await client.files.delete(files[0].id)).deleted
    for call in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError):
            await call(files[0].id)
    short = await client.files.create(
        file=("x", b"1"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert short.expires_at is not None
    assert short.expires_at - short.created_at == 3600


async def test_a_file_is_bounded(as_described: Any, tmp_path: Path, replicas: Replicas) -> None:
    bounds = {"max_file_bytes": 2000, "max_files_bytes": 2**20}
    owner = owner_in(tmp_path, **bounds)
    async with ingress_over(replicas, owner, as_described, config_with_jobs(**bounds)) as http:
        client = client_of(http)
        await client.files.create(file=("x", b"1" * 2000), purpose="batch")
        with pytest.raises(openai.APIStatusError) as raised:
            await client.files.create(file=("x", b"1" * 2001), purpose="batch")
        assert raised.value.status_code == 413
        for _ in range(2**20 // 2000 - 1):
            begun = await owner.files.begin_file("", new_file_id())
            assert await owner.files.append_file("", begun.id, 0, b"1" * 2000) == 2000
            await owner.files.end_file("", begun.id, "x", "batch", None)
        with pytest.raises(openai.RateLimitError, match="all files have"):
            await client.files.create(file=("x", b"1" * 2000), purpose="batch")
        assert len([one async for one in client.files.list(limit=1000)]) == 2**20 // 2000
    owner.close()


async def test_a_large_file_is_never_whole_in_memory(
    http: httpx.AsyncClient, owner: JobOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is more than a body with images may have, and no piece is larger than one."""
    largest = 0
    append = owner.files.append_file

    async def noted(key: str, id_: str, offset: int, piece: bytes) -> int | None:
        nonlocal largest
        largest = max(largest, len(piece))
        return await append(key, id_, offset, piece)

    monkeypatch.setattr(owner.files, "append_file", noted)
    content = b"x" * (CONFIG.ingress.limits.max_upload_bytes * 2)
    file = await client_of(http).files.create(file=("x", content), purpose="batch")
    assert file.bytes == len(content)
    assert largest <= desk.PIECE_BYTES


async def test_files_and_batches_are_their_keys(
    as_described: Any, owner: JobOwner, replicas: Replicas, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    for name in ("mine", "yours"):
        add_key(keys, KeyEntry(name=name, sha256=hash_of(f"atl_{name}")))
    config = CONFIG.model_copy(update={"access": AccessConfig(keys_file=keys, allowed_hosts=["test"])})
    held = Held()
    async with ingress_over(held, owner, lambda _: {}, config, num_runners=0) as http:
        assert (await http.post("/v1/files", content=b"x" * 2**17)).status_code == 401
    async with ingress_over(held, owner, as_described, config) as http:
        mine, yours = client_of(http, "atl_mine"), client_of(http, "atl_yours")
        batch = await begun(mine, line("a", IMAGE, "/v1/images/generations"), endpoint="/v1/images/generations")
        for call in (yours.files.retrieve, yours.files.content, yours.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(batch.input_file_id)
        for other in (yours.batches.retrieve, yours.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await other(batch.id)
        assert [one async for one in yours.files.list()] == [one async for one in yours.batches.list()] == []
        with pytest.raises(openai.BadRequestError, match="is not kept here for this key"):
            await yours.batches.create(input_file_id=batch.input_file_id, endpoint=CHATS, completion_window="24h")
        with pytest.raises(openai.ConflictError, match="is read by a batch that has not ended"):
            await mine.files.delete(batch.input_file_id)
        await until(lambda: held.requests)
        revoke_key(keys, "mine")
        held.gate.set()
        await until(lambda: _has_ended(owner, "mine", batch.id))
    found = await owner.find_job("mine", batch.id)
    assert found is not None
    assert found.status == "done"


async def _has_ended(owner: JobOwner, key: str, id_: str) -> bool:
    job = await owner.find_job(key, id_)
    return job is not None and job.has_ended


async def test_a_cancelled_batch_has_what_was_done(as_described: Any, owner: JobOwner) -> None:
    class OneOfTwo(Held):
        async def on_generate(self, request: Any) -> Any:
            if request.prompt == "quick":
                return await Replicas.on_generate(self, request)
            return await super().on_generate(request)

    images = "/v1/images/generations"
    held = OneOfTwo()
    async with ingress_over(held, owner, as_described) as http:
        client = client_of(http)
        lines = [line(name, IMAGE | {"prompt": name}, images) for name in ("quick", "slow")]
        batch = await begun(client, *lines, endpoint=images)

        async def is_further() -> bool:
            counts = (await client.batches.retrieve(batch.id)).request_counts
            return bool(counts.completed == 1 and counts.total == 2)

        await until(is_further)
        cancelled = await client.batches.cancel(batch.id)
        assert (cancelled.status, cancelled.request_counts.completed) == ("cancelled", 1)
        held.gate.set()
        assert (await results(client, cancelled.output_file_id)).keys() == {"quick"}
        await client.files.delete(batch.input_file_id)
        again = await client.batches.cancel(batch.id)
        assert again.status == "cancelled"


async def test_a_batch_goes_on_in_the_next_life(as_described: Any, replicas: Replicas, tmp_path: Path) -> None:
    class Some(Replicas):
        """Half of the requests get no answer."""

        async def on_embed(self, request: Any) -> Any:
            if len(self.requests) % 2:
                self.requests.append(request)
                await asyncio.Event().wait()
            return await super().on_embed(request)

    url, count = "/v1/embeddings", 20
    lines = [line(f"{number}", EMBEDDING | {"input": f"{number}"}, url) for number in range(count)]
    some, owner = Some(), owner_in(tmp_path)
    async with ingress_over(some, owner, as_described) as http:
        client = client_of(http)
        batch = await begun(client, *lines, endpoint=url)

        async def is_further() -> bool:
            return bool((await client.batches.retrieve(batch.id)).request_counts.completed == count // 2)

        await until(is_further)
    owner.close()
    owner = owner_in(tmp_path)
    async with ingress_over(replicas, owner, as_described) as http:
        client = client_of(http)
        done = await ended(client, batch.id)
        assert (done.status, done.request_counts.completed, done.error_file_id) == ("completed", count, None)
        found = await results(client, done.output_file_id)
    assert sorted(found, key=int) == [f"{number}" for number in range(count)]
    assert len(replicas.requests) == count // 2, "what was done is not done again"
    owner.close()


async def test_lines_and_results_go_in_pieces_of_any_size(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "PIECE_BYTES", 50)
    client, url = client_of(http), "/v1/embeddings"
    lines = [line(f"{number}", EMBEDDING | {"input": "x" * number}, url) for number in range(1, 30)]
    done = await ended(client, (await begun(client, *lines, "", endpoint=url)).id)
    assert (done.status, done.request_counts.completed) == ("completed", 29)
    assert len(await results(client, done.output_file_id)) == 29


async def test_what_is_refused_for_now_is_asked_again(http: httpx.AsyncClient, replicas: Replicas) -> None:
    client = client_of(http)
    replicas.error = QueueFull("queue full: 3 requests wait")
    batch = await begun(client, line("a"))
    await until(lambda: len(replicas.requests) > 3)
    replicas.error = None
    assert (await ended(client, batch.id)).request_counts.completed == 1


async def test_the_window_of_a_batch_ends(as_described: Any, replicas: Replicas, tmp_path: Path) -> None:
    class LongAgo(Clocks):
        def unix_s(self) -> float:
            return 1000.0

    owner = JobOwner(tmp_path / "jobs", JobsConfig(), clocks=LongAgo())
    async with ingress_over(replicas, owner, as_described) as http:
        client = client_of(http)
        done = await ended(client, (await begun(client, line("a"), line("b"))).id)
        assert (done.status, done.output_file_id) == ("expired", None)
        assert (done.expired_at, done.request_counts.failed) == (1000, 2)
        found = await results(client, done.error_file_id)
    assert {name: one["error"]["code"] for name, one in found.items()} == dict.fromkeys("ab", "batch_expired")
    assert found["a"]["response"] is None
    assert replicas.requests == []
    owner.close()


async def test_batches_do_not_take_the_places_of_jobs(as_described: Any, owner: JobOwner) -> None:
    """Lines share half of the places of an ingress, and the batches themselves take none."""
    images, most = "/v1/images/generations", 4
    held = Held()
    async with ingress_over(held, owner, as_described, config_with_jobs(max_running=most)) as http:
        client = client_of(http)
        for _ in range(2):
            await begun(client, *(line(f"{number}", IMAGE, images) for number in range(9)), endpoint=images)
        await until(lambda: len(held.requests) == most // 2)
        job = (await http.post("/v1/jobs", json={"endpoint": CHATS, "body": CHAT})).json()

        async def is_done() -> bool:
            return bool((await http.get(f"/v1/jobs/{job['id']}")).json()["status"] == "done")

        await until(is_done)
        assert len([one for one in held.requests if hasattr(one, "prompt")]) == most // 2


async def test_a_batch_is_a_job(http: httpx.AsyncClient) -> None:
    client = client_of(http)
    batch = await begun(client, line("a"), extra_headers={"Idempotency-Key": "k"})
    again = await client.batches.create(
        input_file_id=batch.input_file_id,
        endpoint=CHATS,
        completion_window="24h",
        extra_headers={"Idempotency-Key": "k"},
    )
    assert again.id == batch.id
    done = await ended(client, batch.id)
    job = (await http.get(f"/v1/jobs/{batch.id}")).json()
    assert (job["status"], job["progress"], job["endpoint"]) == ("done", 100, "/v1/batches")
    assert (await http.delete(f"/v1/jobs/{batch.id}")).json()["deleted"]
    assert (await client.files.retrieve(done.output_file_id)).id == done.output_file_id
