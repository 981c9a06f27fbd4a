"""/v1/jobs over HTTP: any request in the background, by the rights of its key, on any ingress, once."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from kit.waiting import until
from PIL import Image
from unit.deployments.ingress.http_fakes import CHAT, COMPLETION, CONFIG, EMBEDDING, IMAGE, Held, Replicas, problem
from unit.deployments.ingress.jobs.job_fakes import config_with_jobs, ended, ingress_over, owner_in

from cluster.jobs import file_book
from cluster.jobs.owner import JobOwner
from configs.access import AccessConfig
from deployments.ingress.access.keys import KeyEntry, add_key, hash_of, revoke_key
from deployments.ingress.jobs import desk, runner
from deployments.records.errors import GenerationFailed, QueueFull

OpenHttp = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]
CHATS, IMAGES = "/v1/chat/completions", "/v1/images/generations"


pytestmark = pytest.mark.usefixtures("quick_jobs")


async def begun(http: httpx.AsyncClient, endpoint: str, body: Any, **more: Any) -> str:
    answer = await http.post("/v1/jobs", json={"endpoint": endpoint, "body": body, **more})
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
    return str(answer.json()["id"])


def without_times(content: bytes) -> Any:
    found = json.loads(content)
    for name in ("created", "id", "timings_ms"):
        found.pop(name, None)
    return found


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHATS, CHAT),
        (IMAGES, IMAGE | {"seed": 3}),
        ("/v1/embeddings", EMBEDDING),
        ("/v1/chat/completions", CHAT | {"model": "no"}),
        ("/v1/chat/completions", {"model": "chatty"}),
        ("/v2/rerank", {"model": "ranker", "query": "a", "documents": ["a", "b"]}),
        ("/v1/messages", CHAT | {"max_tokens": 5}),
        ("/api/chat", CHAT | {"stream": False}),
    ],
)
async def test_a_result_is_what_the_endpoint_answers(http: httpx.AsyncClient, endpoint: str, body: Any) -> None:
    direct = await http.post(endpoint, json=body)
    job = await ended(http, await begun(http, endpoint, body))
    result = await http.get(f"/v1/jobs/{job['id']}/result")
    assert job["status"] == ("done" if direct.status_code == 200 else "failed")
    assert (result.status_code, job["result"]["status"]) == (direct.status_code,) * 2
    assert result.headers["content-type"] == direct.headers["content-type"] == job["result"]["content_type"]
    assert result.headers.get("x-atelier-warning") == direct.headers.get("x-atelier-warning")
    assert ("server-timing" in result.headers) == ("server-timing" in direct.headers)
    assert int(result.headers["content-length"]) == len(result.content) == job["result"]["bytes"]
    if "created_at" not in direct.text:
        assert without_times(result.content) == without_times(direct.content)
    assert (job["error"] is None) == (direct.status_code == 200)
    assert job["num_starts"] == 1


@pytest.mark.parametrize("has_acted", [False, True])
async def test_the_death_of_the_owner_is_no_failure_of_its_clients(
    as_described: Any, replicas: Replicas, owner: JobOwner, has_acted: bool
) -> None:
    """A job whose answer was lost is added once; whatever is asked of it is answered as soon as the owner is back."""
    dying: dict[str, bool] = {}
    async with ingress_over(replicas, owner, as_described, num_runners=0, dying=dying) as http:
        dying["add_job"] = has_acted
        id_ = await begun(http, CHATS, CHAT)
        for method, path in (("find_job", f"/v1/jobs/{id_}"), ("list_jobs", "/v1/jobs")):
            dying[method] = has_acted
            assert (await http.get(path)).status_code == 200
        assert [job["id"] for job in (await http.get("/v1/jobs")).json()["data"]] == [id_]
        dying["cancel_job"] = has_acted
        assert (await http.post(f"/v1/jobs/{id_}/cancel")).json()["status"] == "cancelled"
        dying["forget_job"] = has_acted
        assert (await http.delete(f"/v1/jobs/{id_}")).json()["deleted"]
        assert (await http.delete(f"/v1/jobs/{id_}")).status_code == 404
        assert not dying


@pytest.mark.parametrize("has_acted", [False, True])
async def test_the_death_of_the_owner_is_no_failure_of_who_sends_it_files(
    as_described: Any, replicas: Replicas, owner: JobOwner, has_acted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file and an upload whose beginning was lost are begun once, and one whose removal was lost is removed."""
    monkeypatch.setattr(file_book, "_MAX_UPLOADS", 1)  # so that there is no room for a second beginning
    dying: dict[str, bool] = {}
    async with ingress_over(replicas, owner, as_described, num_runners=0, dying=dying) as http:
        dying |= dict.fromkeys(("begin_file", "append_file", "end_file"), has_acted)
        sent = await http.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"})
        assert not dying, sent.text
        assert (await http.get("/v1/files")).json()["data"] == [sent.json()]
        file = f"/v1/files/{sent.json()['id']}"
        dying |= dict.fromkeys(("find_file", "read_file"), has_acted)
        assert (await http.get(f"{file}/content")).content == b"{}"
        dying["forget_file"] = has_acted
        assert (await http.delete(file)).json()["deleted"]
        assert (await http.delete(file)).status_code == 404

        dying["begin_model"] = has_acted
        begun = await http.post("/admin/uploads", json={"name": "a.gguf", "bytes": 4})
        upload = f"/admin/uploads/{begun.json()['id']}"
        dying["append_file"] = has_acted
        assert (await http.put(upload, params={"offset": 0}, content=b"GGUF")).json()["bytes"] == 4
        dying["end_file"] = has_acted
        assert (await http.post(upload, params={"bytes": 4})).json()["is_whole"]
        dying["forget_file"] = has_acted
        assert (await http.delete(upload)).json()["deleted"]
        assert (await http.delete(upload)).status_code == 404
        assert not dying


async def test_an_owner_that_stays_away_is_told(
    as_described: Any, replicas: Replicas, owner: JobOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "_AWAY_S", 0.0)
    async with ingress_over(replicas, owner, as_described, num_runners=0, dying={"add_job": False}) as http:
        answer = await http.post("/v1/jobs", json={"endpoint": CHATS, "body": CHAT})
        assert problem(answer)["code"] == "replica_unavailable"
        assert answer.status_code == 503


async def test_a_stream_is_kept_whole(http: httpx.AsyncClient) -> None:
    job = await ended(http, await begun(http, CHATS, CHAT | {"stream": True}))
    result = await http.get(f"/v1/jobs/{job['id']}/result")
    assert result.headers["content-type"].startswith("text/event-stream")
    pieces = [json.loads(line[6:]) for line in result.text.splitlines() if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == "Hello"
    assert result.text.endswith("data: [DONE]\n\n")


async def test_a_stream_is_read_from_its_beginning_as_long_as_its_job_is_kept(http: httpx.AsyncClient) -> None:
    id_ = await begun(http, CHATS, CHAT | {"stream": True})
    early = await http.get(f"/v1/jobs/{id_}/stream")
    await ended(http, id_)
    for answer in (early, await http.get(f"/v1/jobs/{id_}/stream")):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text == (await http.get(f"/v1/jobs/{id_}/result")).text
    failed = await begun(http, CHATS, CHAT | {"stream": True, "model": "no"})
    event = (await http.get(f"/v1/jobs/{failed}/stream")).text
    assert event.startswith("event: error\ndata: ")
    assert "no model 'no'" in json.loads(event.partition("data: ")[2])["error"]["message"]
    whole = await http.get(f"/v1/jobs/{await begun(http, CHATS, CHAT)}/stream")
    assert (whole.status_code, "did not ask for one" in problem(whole)["message"]) == (400, True)
    assert (await http.get("/v1/jobs/job_1/stream")).status_code == 404


async def test_a_stream_whose_job_begins_again_says_so(
    as_described: Any, owner: JobOwner, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "_WATCH_S", 0.01)
    offsets, follow = list[int](), owner.parts.follow_result

    async def noting(key: str, id_: str, start: int | None, offset: int, wait_s: float) -> Any:
        offsets.append(offset)
        return await follow(key, id_, start, offset, wait_s)

    monkeypatch.setattr(owner.parts, "follow_result", noting)
    async with ingress_over(replicas, owner, as_described, num_runners=0) as http:
        id_ = await begun(http, CHATS, CHAT | {"stream": True})
        following = asyncio.create_task(http.get(f"/v1/jobs/{id_}/stream"))
        await owner.take_jobs("one", 1, 1, 5.0)
        size = await owner.parts.add_part(id_, 1, 0, b"data: 1\n\n")
        await until(lambda: size in offsets)
        await owner.release_jobs("one")
        await owner.take_jobs("two", 1, 1, 5.0)
        text = (await following).text
    events = [event for event in text.split("\n\n") if not event.startswith(":")]
    assert events[0] == "data: 1"
    assert json.loads(events[1].partition("data: ")[2])["error"]["code"] == "job_restarted"
    assert events[2:] == [""]


async def test_a_job_is_followed_by_events_on_another_ingress(
    as_described: Any, owner: JobOwner, replicas: Replicas
) -> None:
    held = Held()
    async with (
        ingress_over(held, owner, as_described) as one,
        ingress_over(held, owner, as_described, num_runners=0) as other,
    ):
        id_ = await begun(one, IMAGES, IMAGE)
        waiting = asyncio.ensure_future(other.get(f"/v1/jobs/{id_}/events"))
        await until(lambda: held.requests)
        early = await other.get(f"/v1/jobs/{id_}/result")
        assert (early.status_code, problem(early)["code"]) == (409, "job_not_completed")

        async def is_further() -> Any:
            return (await other.get(f"/v1/jobs/{id_}")).json()["progress"] == 75

        await until(is_further)
        held.gate.set()
        events = (await waiting).text.split("\n\n")[:-1]
    names = [event.partition("\n")[0].removeprefix("event: ") for event in events]
    assert names[-1] == "job.done"
    assert set(names[:-1]) <= {"job.queued", "job.running"}
    last = json.loads(events[-1].partition("data: ")[2])
    assert (last["id"], last["status"], last["progress"]) == (id_, "done", 100)
    seen = [json.loads(event.partition("data: ")[2])["progress"] for event in events]
    assert 75 in seen


@pytest.mark.parametrize("way", ["cancel", "delete"])
async def test_a_job_that_is_not_wanted_ends_where_it_runs(as_described: Any, owner: JobOwner, way: str) -> None:
    held = Held()
    async with (
        ingress_over(held, owner, as_described) as one,
        ingress_over(held, owner, as_described, num_runners=0) as other,
    ):
        id_ = await begun(other, IMAGES, IMAGE)
        await until(lambda: held.requests)
        if way == "cancel":
            answer = await other.post(f"/v1/jobs/{id_}/cancel")
            assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
            again = await one.post(f"/v1/jobs/{id_}/cancel")
            assert again.json()["status"] == "cancelled"
        else:
            answer = await one.delete(f"/v1/jobs/{id_}")
            assert answer.json() == {"id": id_, "object": "job.deleted", "deleted": True}
            for call in (one.get(f"/v1/jobs/{id_}"), one.delete(f"/v1/jobs/{id_}"), one.get(f"/v1/jobs/{id_}/events")):
                answer = await call
                assert (answer.status_code, problem(answer)["code"]) == (404, "job_not_found")
        held.gate.set()
        await ended(one, await begun(one, IMAGES, IMAGE))  # the slot is another's
        found = await other.get(f"/v1/jobs/{id_}/result")
        assert found.status_code == (409 if way == "cancel" else 404)


async def test_jobs_are_listed_with_filters_and_pages(http: httpx.AsyncClient) -> None:
    ids = [await begun(http, CHATS, CHAT) for _ in range(3)]
    bad = await begun(http, "/v1/embeddings", {"model": "no", "input": "x"})
    for id_ in (*ids, bad):
        await ended(http, id_)

    async def listed(**params: Any) -> list[str]:
        page = (await http.get("/v1/jobs", params=params)).json()
        found = [job["id"] for job in page["data"]]
        assert (page["first_id"], page["last_id"]) == ((found[0], found[-1]) if found else (None, None))
        return found

    assert await listed() == [bad, *ids[::-1]]
    assert await listed(status="done", order="asc", limit=2) == ids[:2]
    assert await listed(after=ids[1], order="asc") == [ids[2], bad]
    assert await listed(endpoint="/v1/embeddings") == await listed(status="failed") == [bad]
    more = [(await http.get("/v1/jobs", params={"limit": limit})).json()["has_more"] for limit in (3, 4, 5)]
    assert more == [True, False, False]
    assert (await http.get("/v1/jobs", params={"after": "job_no"})).status_code == 404
    for wrong in ({"status": "finished"}, {"limit": 0}, {"order": "up"}):
        assert (await http.get("/v1/jobs", params=wrong)).status_code == 400


async def test_an_idempotency_key_is_a_field_or_a_header(http: httpx.AsyncClient, replicas: Replicas) -> None:
    first = await begun(http, CHATS, CHAT, idempotency_key="k")
    assert await begun(http, CHATS, CHAT, idempotency_key="k") == first
    asked = {"endpoint": CHATS, "body": CHAT}
    answer = await http.post("/v1/jobs", json=asked, headers={"Idempotency-Key": "k"})
    assert answer.json()["id"] == first
    answer = await http.post("/v1/jobs", json=asked | {"body": CHAT | {"seed": 1}, "idempotency_key": "k"})
    assert (answer.status_code, problem(answer)["param"]) == (409, "idempotency_key")
    answer = await http.post("/v1/jobs", json=asked | {"idempotency_key": "k" * 256})
    assert (answer.status_code, problem(answer)["param"]) == (400, "idempotency_key")
    await ended(http, first)
    assert len(replicas.requests) == 1


@pytest.mark.parametrize(("endpoint", "body"), [(CHATS, CHAT), ("/v1/completions", COMPLETION), (IMAGES, IMAGE)])
async def test_a_request_in_the_background_is_a_job(http: httpx.AsyncClient, endpoint: str, body: Any) -> None:
    direct = await http.post(endpoint, json=body | {"background": False})
    begun = await http.post(endpoint, json=body | {"background": True}, headers={"Idempotency-Key": "k"})
    assert (direct.status_code, begun.status_code) == (200, 202)
    job = await ended(http, begun.json()["id"])
    assert (job["status"], job["endpoint"], job["model"]) == ("done", endpoint, body["model"])
    result = await http.get(f"/v1/jobs/{job['id']}/result")
    assert (result.status_code, result.json().keys()) == (200, direct.json().keys())
    again = await http.post(endpoint, json=body | {"background": True}, headers={"Idempotency-Key": "k"})
    assert again.json()["id"] == job["id"]
    for one in (direct, begun):
        assert "x-atelier-warning" not in one.headers
    direct, begun = [await http.post(endpoint, json=body | {"odd": 1, "background": later}) for later in (False, True)]
    assert begun.headers["x-atelier-warning"] == direct.headers["x-atelier-warning"] != ""


async def test_an_unknown_field_beside_a_request_is_named(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/jobs", json={"endpoint": CHATS, "body": CHAT, "when": "tonight"})
    assert (answer.status_code, answer.headers["x-atelier-warning"]) == (202, "unknown fields were ignored: 'when'")


@pytest.mark.parametrize(
    ("wanted", "span"),
    [
        ("bytes=0-0", slice(0, 1)),
        ("bytes=2-5", slice(2, 6)),
        ("bytes=3-", slice(3, None)),
        ("bytes=-4", slice(-4, None)),
        ("bytes=5-999999", slice(5, None)),
        ("bytes=0-", slice(None)),
        ("bytes=1-2,4-5", slice(None)),
        ("bytes=-", slice(None)),
        ("lines=1-2", slice(None)),
        ("bytes=999999-", None),
        ("bytes=-0", None),
        ("bytes=5-2", None),
    ],
)
async def test_a_part_of_a_result_is_given(
    http: httpx.AsyncClient, wanted: str, span: slice | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = await begun(http, CHATS, CHAT)
    await ended(http, id_)
    whole = (await http.get(f"/v1/jobs/{id_}/result")).content
    monkeypatch.setattr("deployments.ingress.jobs.desk.PIECE_BYTES", 50)
    part = await http.get(f"/v1/jobs/{id_}/result", headers={"Range": wanted})
    if span is None:
        assert (part.status_code, part.headers["content-range"]) == (416, f"bytes */{len(whole)}")
        return
    right = range(len(whole))[span]
    assert part.content == whole[span]
    assert int(part.headers["content-length"]) == len(right)
    is_part = len(right) < len(whole)
    assert part.status_code == (206 if is_part else 200)
    expected = f"bytes {right.start}-{right.stop - 1}/{len(whole)}" if is_part else None
    assert part.headers.get("content-range") == expected


async def test_a_form_may_be_run_in_the_background(http: httpx.AsyncClient, replicas: Replicas) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 8), (200, 30, 30)).save(buffer, "png")
    fields = IMAGE | {"background": "true"}
    begun = await http.post("/v1/images/edits", data=fields, files={"image": ("a.png", buffer.getvalue())})
    assert begun.status_code == 202
    assert (await ended(http, begun.json()["id"]))["status"] == "done"
    assert replicas.requests[0].init_image[0, 0].tolist() == [200, 30, 30]


async def test_what_cannot_run_in_the_background_is_refused_at_once(http: httpx.AsyncClient) -> None:
    for endpoint, body in ((CHATS, CHAT), (IMAGES, IMAGE)):
        answer = await http.post(endpoint, json=body | {"background": True, "stream": True})
        assert (answer.status_code, problem(answer)["param"]) == (400, "background")
        assert (await http.post(endpoint, json={"model": "flux", "background": True})).status_code == 400
    assert (await http.get("/v1/jobs")).json()["data"] == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"endpoint": "/v1/no", "body": {}}, "'/v1/no' takes no POST that asks a model"),
        ({"endpoint": "/v1/models", "body": {}}, "takes no POST"),
        ({"endpoint": "/admin/models", "body": {}}, "takes no POST"),
        ({"endpoint": "/v1/jobs", "body": {}}, "takes no POST"),
        ({"endpoint": "/v1/jobs/x/cancel", "body": {}}, "takes no POST"),
        ({"endpoint": "http://elsewhere/v1/chat/completions", "body": {}}, "takes no POST"),
        ({"endpoint": "/v1/chat/completions?x=1", "body": {}}, "takes no POST"),
        ({"endpoint": "x" * 513, "body": {}}, "endpoint"),
        ({"endpoint": CHATS}, "body"),
        ({"endpoint": CHATS, "body": "x"}, "body"),
        ({"body": {}}, "endpoint"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    http: httpx.AsyncClient, replicas: Replicas, body: Any, words: str
) -> None:
    answer = await http.post("/v1/jobs", json=body)
    assert answer.status_code == 400
    assert words in problem(answer)["message"]
    assert (await http.get("/v1/jobs")).json()["data"] == []


async def test_what_is_refused_for_now_is_asked_again(http: httpx.AsyncClient, replicas: Replicas) -> None:
    replicas.error = QueueFull("queue full: 3 requests wait")
    id_ = await begun(http, CHATS, CHAT)
    await until(lambda: len(replicas.requests) > 3)
    assert (await http.get(f"/v1/jobs/{id_}")).json()["status"] == "running"
    replicas.error = None
    assert (await ended(http, id_))["status"] == "done"


async def test_the_time_of_a_job_ends(as_described: Any, owner: JobOwner, replicas: Replicas) -> None:
    replicas.error = QueueFull("queue full: 3 requests wait")
    async with ingress_over(replicas, owner, as_described, config_with_jobs(timeout_s=0.05)) as http:
        job = await ended(http, await begun(http, CHATS, CHAT))
    assert (job["status"], job["error"]["code"]) == ("failed", "queue_full")
    assert len(replicas.requests) > 1


async def test_a_job_may_take_longer_than_a_request(as_described: Any, owner: JobOwner, replicas: Replicas) -> None:
    held = Held()
    config = config_with_jobs(
        CONFIG.model_copy(update={"http": CONFIG.http.model_copy(update={"request_timeout_s": 0.05})})
    )
    async with ingress_over(held, owner, as_described, config) as http:
        direct = await http.post(IMAGES, json=IMAGE)
        assert direct.status_code == 504
        id_ = await begun(http, IMAGES, IMAGE)
        await until(lambda: len(held.requests) == 2)
        await asyncio.sleep(0.06)
        held.gate.set()
        assert (await ended(http, id_))["status"] == "done"
        held.gate.clear()
        named = await http.post(
            "/v1/jobs", json={"endpoint": IMAGES, "body": IMAGE}, headers={"x-request-timeout-seconds": "0.05"}
        )
        assert (await ended(http, named.json()["id"]))["error"]["code"] == "deadline_exceeded"


async def test_a_model_that_fails_has_failed_the_job(http: httpx.AsyncClient, replicas: Replicas) -> None:
    for error, code in ((GenerationFailed("the model failed"), "generation_failed"), (RuntimeError("x"), "internal")):
        replicas.error = error
        job = await ended(http, await begun(http, CHATS, CHAT))
        assert (job["status"], job["error"]["code"], job["result"]["status"]) == ("failed", code, 500)


async def test_a_result_that_is_too_large_is_none(as_described: Any, owner: JobOwner, replicas: Replicas) -> None:
    async with ingress_over(replicas, owner, as_described, config_with_jobs(max_result_bytes=1024)) as http:
        replicas.pieces = ["x" * 2000, ""]
        job = await ended(http, await begun(http, CHATS, CHAT))
        assert (job["status"], job["error"]["code"], job["result"]) == ("failed", "result_too_large", None)
        result = await http.get(f"/v1/jobs/{job['id']}/result")
        assert "more than 1024 bytes" in problem(result)["message"]


async def test_jobs_have_the_rights_and_the_jobs_of_their_key(
    as_described: Any, owner: JobOwner, replicas: Replicas, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    for name, more in {"mine": {"max_priority": 2, "max_concurrent": 1}, "yours": {"tenant": "team"}}.items():
        add_key(keys, KeyEntry(name=name, sha256=hash_of(f"atl_{name}"), **more))
    config = CONFIG.model_copy(update={"access": AccessConfig(keys_file=keys, allowed_hosts=["test"])})
    mine, yours = ({"Authorization": f"Bearer atl_{name}"} for name in ("mine", "yours"))
    asked = {"endpoint": IMAGES, "body": IMAGE}
    async with ingress_over(replicas, owner, as_described, config, num_runners=0) as http:
        ids = [
            (await http.post("/v1/jobs", json=asked, headers=key | {"x-priority": "1"})).json()["id"]
            for key in (mine, yours, mine)
        ]
        for call in (http.get, http.delete):
            assert (await call(f"/v1/jobs/{ids[0]}", headers=yours)).status_code == 404
        assert [one["id"] for one in (await http.get("/v1/jobs", headers=yours)).json()["data"]] == [ids[1]]
    async with ingress_over(replicas, owner, as_described, config) as http:
        for id_, key in zip(ids, (mine, yours, mine), strict=True):
            assert (await ended(http, id_, headers=key))["status"] == "done"
        assert len(replicas.requests) == 3
        assert {request.priority for request in replicas.requests} == {2}
    async with ingress_over(replicas, owner, as_described, config, num_runners=0) as http:
        id_ = (await http.post("/v1/jobs", json=asked, headers=yours)).json()["id"]
    revoke_key(keys, "yours")
    async with ingress_over(replicas, owner, as_described, config):
        await until(lambda: _has_ended(owner, "yours", id_))
    job = await owner.find_job("yours", id_)
    assert job is not None
    assert job.error is not None
    assert (job.status, job.error.code) == ("failed", "invalid_api_key")


async def test_who_hears_of_a_job_takes_no_place_of_its_key(
    as_described: Any, owner: JobOwner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The job counts once it runs: who waits for it must not keep it from running, and is not kept from hearing."""
    add_key(tmp_path / "keys", KeyEntry(name="mine", sha256=hash_of("atl_mine"), max_concurrent=1))
    access = AccessConfig(keys_file=tmp_path / "keys", allowed_hosts=["test"])
    config, mine = CONFIG.model_copy(update={"access": access}), {"Authorization": "Bearer atl_mine"}
    watch, watched, held = owner.watch_job, list[str](), Held()

    async def noting(key: str, id_: str, *seen: Any) -> Any:
        watched.append(id_)
        return await watch(key, id_, *seen)

    monkeypatch.setattr(owner, "watch_job", noting)
    async with ingress_over(held, owner, as_described, config, num_runners=0) as http:
        id_ = (await http.post("/v1/jobs", json={"endpoint": CHATS, "body": CHAT}, headers=mine)).json()["id"]
        path = f"/v1/jobs/{id_}"
        hearing = [asyncio.create_task(http.get(f"{path}/events", headers=mine))]
        await until(lambda: len(watched) == 1)
        image = asyncio.create_task(http.post(IMAGES, json=IMAGE, headers=mine))
        await until(lambda: held.requests)
        hearing.append(asyncio.create_task(http.get(f"{path}/events", headers=mine)))
        await until(lambda: len(watched) == 2)
        assert (await http.post(f"{path}/cancel", headers=mine)).status_code == 200
        assert all("job.cancelled" in one.text for one in await asyncio.gather(*hearing))
        held.gate.set()
        assert (await image).status_code == 200


async def _has_ended(owner: JobOwner, key: str, id_: str) -> bool:
    job = await owner.find_job(key, id_)
    return job is not None and job.has_ended


async def test_jobs_begin_again_in_the_next_life(as_described: Any, replicas: Replicas, tmp_path: Path) -> None:
    held, owner = Held(), owner_in(tmp_path)
    async with ingress_over(held, owner, as_described) as http:
        id_ = await begun(http, IMAGES, IMAGE | {"seed": 5})
        await until(lambda: held.requests)
    owner.close()
    owner = owner_in(tmp_path)
    async with ingress_over(replicas, owner, as_described) as http:
        job = await ended(http, id_)
        assert (job["status"], job["num_starts"]) == ("done", 2)
        assert (await http.get(f"/v1/jobs/{id_}/result")).status_code == 200
    owner.close()


async def test_an_ingress_that_ends_gives_its_jobs_back(as_described: Any, owner: JobOwner, replicas: Replicas) -> None:
    held = Held()
    async with ingress_over(replicas, owner, as_described, num_runners=0) as other:
        async with ingress_over(held, owner, as_described) as one:
            id_ = await begun(one, IMAGES, IMAGE)
            await until(lambda: held.requests)
        assert (await other.get(f"/v1/jobs/{id_}")).json()["status"] == "queued"
    async with ingress_over(replicas, owner, as_described) as next_:
        job = await ended(next_, id_)
        assert (job["status"], job["num_starts"]) == ("done", 2)


async def test_heartbeats_tell_of_running_jobs_alone(
    as_described: Any, owner: JobOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats, beat = list[set[str]](), owner.beat_jobs

    async def noted(name: str, progress: Any) -> list[str]:
        beats.append(set(progress))
        return await beat(name, progress)

    monkeypatch.setattr(owner, "beat_jobs", noted)
    monkeypatch.setattr(runner, "BEAT_S", 0.01)
    held = Held()
    async with ingress_over(held, owner, as_described) as http:
        await ended(http, await begun(http, "/v1/embeddings", EMBEDDING))
        id_ = await begun(http, IMAGES, IMAGE)
        await until(lambda: beats and beats[-1] == {id_})
        held.gate.set()
        await ended(http, id_)


async def test_a_folder_that_cannot_be_used_is_told(as_described: Any, replicas: Replicas, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("a file, where a folder is expected")
    async with ingress_over(replicas, owner_in(tmp_path), as_described) as http:
        for answer in (await http.post("/v1/jobs", json={"endpoint": CHATS, "body": CHAT}), await http.get("/v1/jobs")):
            assert answer.status_code == 503
            assert problem(answer)["code"] == "overloaded"
