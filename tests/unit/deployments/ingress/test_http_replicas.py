"""The HTTP edge over replicas that are busy or die, and over a directory that changes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from unit.deployments.ingress.http_fakes import (
    CHAT,
    CHATS,
    COMPLETION,
    COMPLETIONS,
    CONFIG,
    EMBEDDING,
    EMBEDDINGS,
    IMAGE,
    IMAGES,
    KINDS,
    Held,
    Replicas,
    client_over,
    problem,
    served,
)
from unit.deployments.serve_fakes import FakeHandle

from cluster.admission.dispatcher import Dispatcher
from cluster.process.ray_calls import NamedActor
from cluster.registry.directory import Directory, DirectoryChange, ModelRecord
from cluster.registry.snapshot import RegistrySnapshot
from configs.admission import AdmissionConfig, ControllerConfig
from configs.http import HttpConfig
from configs.model import AdapterConfig, ModelConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.messages.terms import ENCODER, WORKER
from deployments.ingress.service.catalog import Health
from deployments.ingress.service.service import Service
from deployments.records import (
    ImageRequest,
    ImageResult,
)
from deployments.records.errors import InvalidRequest, Overloaded

PROMPT = {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["a"]}


async def test_what_is_too_much_is_refused_at_once_and_probes_answer() -> None:
    replicas = Held()
    watch, handle = RegistrySnapshot(NamedActor(lambda: replicas)), FakeHandle(replicas)
    admission = AdmissionConfig(max_waiting=2, max_waiting_per_model=1)
    worker = CONFIG.worker.model_copy(update={"max_running_images": 2})
    few = CONFIG.model_copy(update={"admission": admission, "worker": worker})
    service = Service(few, watch, handle, handle)
    async with client_over(create_http_app(service, few), timeout=10) as http:
        running = [asyncio.create_task(http.post(f"/v1/{IMAGES}", json=IMAGE)) for _ in range(3)]
        while len(replicas.requests) < 2 or not (await service.queue.snapshot()).tenants:
            await asyncio.sleep(0)
        refused = await http.post(f"/v1/{IMAGES}", json=IMAGE)
        assert (refused.status_code, problem(refused)["code"]) == (429, "queue_full")
        assert "1 requests wait for model 'flux'" in problem(refused)["message"]
        assert int(refused.headers["retry-after"]) >= 1
        other = await http.post("/v2/models/flux/infer", json={"inputs": [PROMPT]})
        assert (other.status_code, set(other.json())) == (429, {"error"})
        assert int(other.headers["retry-after"]) >= 1
        assert len(replicas.requests) == 2  # what waits, waits here
        for path in ("/healthz", "/v2/health/live", "/v2/health/ready", "/v1/models", "/admin/cluster"):
            assert (await http.get(path)).status_code == 200
        replicas.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3
        assert (await http.post(f"/v1/{CHATS}", json=CHAT)).status_code == 200
    watch.close()


async def test_a_client_that_goes_ends_the_work() -> None:
    replicas = Held()
    async with served(replicas) as (http, _, handle):
        going = asyncio.create_task(http.post(f"/v1/{IMAGES}", json=IMAGE))
        while not replicas.requests:
            await asyncio.sleep(0)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handle.responses[0].task


@pytest.mark.parametrize("path", ["/v2/models/flux/infer", f"/v1/{IMAGES}"])
async def test_a_request_has_its_time_and_then_its_work_ends(path: str) -> None:
    replicas = Held()
    watch, handle = RegistrySnapshot(NamedActor(lambda: replicas)), FakeHandle(replicas)
    short = CONFIG.model_copy(update={"http": HttpConfig(request_timeout_s=0.05)})
    tensor = {"name": "prompt", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}
    async with client_over(create_http_app(Service(short, watch, handle, handle), short)) as http:
        answer = await http.post(path, json={"inputs": [tensor]} if "infer" in path else IMAGE)
    assert answer.status_code == 504
    assert "exceeded its timeout of 0.05 s" in answer.text
    for response in handle.responses:
        with pytest.raises(asyncio.CancelledError):
            await response.task
    watch.close()


async def test_a_prompt_that_is_refused_ends_the_work_on_the_others() -> None:
    class OneIsBad(Held):
        async def on_generate(self, request: ImageRequest) -> ImageResult:
            if request.prompt == "bad":
                raise InvalidRequest("prompt: bad", "prompt")
            return await super().on_generate(request)

    replicas = OneIsBad()
    tensor = {"name": "prompt", "datatype": "BYTES", "shape": [3], "data": ["a", "bad", "b"]}
    async with served(replicas) as (http, _, handle):
        answer = await http.post("/v2/models/flux/infer", json={"inputs": [tensor]})
    assert answer.status_code == 400
    outcomes = await asyncio.gather(*(response.task for response in handle.responses), return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes if isinstance(outcome, asyncio.CancelledError)) == [
        "CancelledError"
    ] * (len(outcomes) - 1)


WORK = [(IMAGES, IMAGE), (CHATS, CHAT), (COMPLETIONS, COMPLETION), (EMBEDDINGS, EMBEDDING)]
STREAMS = [(CHATS, {**CHAT, "stream": True}), (COMPLETIONS, {**COMPLETION, "stream": True})]


@pytest.mark.parametrize(("path", "body"), WORK + STREAMS)
async def test_a_request_whose_replica_dies_is_answered_by_another(
    http: httpx.AsyncClient, replicas: Replicas, path: str, body: dict[str, Any]
) -> None:
    replicas.num_deaths = 1
    response = await http.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    assert "error" not in response.text
    assert len(replicas.requests) == 2
    assert replicas.requests[0] == replicas.requests[1]


@pytest.mark.parametrize(("path", "body"), WORK + STREAMS)
async def test_when_all_of_them_die_it_is_a_503(
    http: httpx.AsyncClient, replicas: Replicas, path: str, body: dict[str, Any]
) -> None:
    replicas.num_deaths = 99
    response = await http.post(f"/v1/{path}", json=body)
    assert (response.status_code, problem(response)["code"]) == (503, "replica_unavailable")
    assert problem(response)["message"] == "2 replicas were lost while they worked on this request"
    assert len(replicas.requests) == 2


async def test_the_death_of_a_replica_further_on_counts_and_an_error_does_not(
    http: httpx.AsyncClient, replicas: Replicas
) -> None:
    replicas.error = RayTaskError("generate", "Traceback", ActorUnavailableError("the encoder", None))
    assert (await http.post(f"/v1/{IMAGES}", json=IMAGE)).status_code == 503
    assert len(replicas.requests) == 2
    replicas.requests.clear()
    replicas.error = RayTaskError("generate", "Traceback", Overloaded("no room"))
    assert (await http.post(f"/v1/{IMAGES}", json=IMAGE)).status_code == 503
    assert len(replicas.requests) == 1


async def test_a_stream_that_has_begun_ends_with_a_typed_error(http: httpx.AsyncClient, replicas: Replicas) -> None:
    replicas.error_after, replicas.error_then = 2, ActorDiedError()
    response = await http.post(f"/v1/{CHATS}", json={**CHAT, "stream": True})
    last = json.loads(response.text.strip().split("data: ")[-1])
    assert (last["error"]["code"], last["error"]["type"]) == ("replica_unavailable", "server_error")
    assert "died after 2 pieces" in last["error"]["message"]
    assert len(replicas.requests) == 1


async def test_known_models_cost_no_call_of_the_registry(http: httpx.AsyncClient, replicas: Replicas) -> None:
    for path, body in WORK:
        assert (await http.post(f"/v1/{path}", json=body)).status_code == 200
    assert (await http.get("/v1/models/bold")).status_code == 200
    assert replicas.questions == []
    assert (await http.get("/v1/models/nothing")).status_code == 404
    assert replicas.questions == ["nothing"]


async def test_a_model_that_the_copy_has_not_heard_of_yet_is_asked_for(
    http: httpx.AsyncClient, replicas: Replicas
) -> None:
    assert (await http.get("/healthz")).status_code == 200
    entry = ModelConfig.model_validate({"id": "new", "path": "/n", "defaults": {"width": 24, "height": 24}})
    replicas.states["new"] = ModelRecord("new", "ready", "diffusion", 1, "v1", entry=entry, class_name="FluxPipeline")
    assert (await http.post(f"/v1/{IMAGES}", json={**IMAGE, "model": "new"})).status_code == 200
    assert (replicas.requests[0].width, replicas.requests[0].model_version) == (24, "v1")


@pytest.mark.parametrize(("path", "body"), WORK)
async def test_requests_carry_the_version_that_was_current_and_clients_cannot_choose_it(
    http: httpx.AsyncClient, replicas: Replicas, path: str, body: dict[str, Any]
) -> None:
    response = await http.post(f"/v1/{path}", json={**body, "model_version": "mine"})
    if response.status_code == 200:  # text ignores what it does not know, and says so
        assert "model_version" in response.headers["x-atelier-warning"]
    else:
        assert (response.status_code, problem(response)["param"]) == (400, "model_version")
        await http.post(f"/v1/{path}", json=body)
    assert replicas.requests[0].model_version == f"version of {body['model']}"


async def test_requests_carry_the_versions_of_their_adapters(http: httpx.AsyncClient, replicas: Replicas) -> None:
    await http.post(f"/v1/{IMAGES}", json={**IMAGE, "lora": [{"name": "bold"}]})
    assert replicas.requests[0].adapter_versions == {"bold": "version of bold"}


async def test_one_lora_alone_at_the_scale_of_the_config_is_merged(http: httpx.AsyncClient, replicas: Replicas) -> None:
    entry = AdapterConfig.model_validate({"id": "neon", "path": "/n", "base": ["flux"]})
    replicas.states["neon"] = ModelRecord("neon", "ready", "adapter", 1, "v1", entry=entry)
    cases = [([("bold", 0.8)], True), ([("bold", 1.0)], False), ([("neon", 0.8)], False), ([], False)]
    cases += [([("bold", 0.8), ("neon", 1.0)], False)]
    for uses, is_merged in cases:
        lora = [{"name": name, "scale": scale} for name, scale in uses]
        assert (await http.post(f"/v1/{IMAGES}", json={**IMAGE, "lora": lora})).status_code == 200
        assert replicas.requests[-1].merges_lora is is_merged
    asked = await http.post(f"/v1/{IMAGES}", json={**IMAGE, "lora": [{"name": "neon"}], "merges_lora": True})
    assert "merges_lora" in asked.headers["X-Atelier-Warning"]
    assert replicas.requests[-1].merges_lora is False, "it is the config's"


def state(id_: str, state: Any) -> ModelRecord:
    return ModelRecord(id_, state, KINDS.get(id_) if state in ("ready", "updating") else None)


@pytest.mark.parametrize(
    ("states", "status", "word"),
    [
        (["ready", "ready"], 200, "ok"),
        (["ready", "unavailable"], 200, "degraded"),
        (["ready", "updating"], 200, "ok"),
        (["unavailable", "unavailable"], 503, "degraded"),
        (["ready", "registering"], 200, "loading"),
        (["registering", "unavailable"], 503, "starting"),
    ],
)
async def test_health(http: httpx.AsyncClient, replicas: Replicas, states: list[str], status: int, word: str) -> None:
    replicas.states = {id_: state(id_, is_) for id_, is_ in zip(("flux", "clip"), states, strict=True)}
    response = await http.get("/healthz")
    assert (response.status_code, response.json()["status"]) == (status, word)
    assert (response.json()["models"], response.json()["models_ready"]) == (
        2,
        sum(is_ in ("ready", "updating") for is_ in states),
    )


async def test_health_follows_the_directory_and_counts_it_once_for_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    directory, changes = Directory("first"), asyncio.Queue[ModelRecord]()
    for record in (state("flux", "ready"), state("clip", "registering")):
        directory.apply(record)

    class Changing(Replicas):
        async def on_watch(self, revision: int, epoch: str, timeout_s: float, replica: str | None) -> DirectoryChange:
            if epoch:
                directory.apply(await changes.get())
            return directory.changes_since(revision, epoch)

    replicas, counted = Changing(), list[int]()
    count = Health.of
    monkeypatch.setattr(Health, "of", lambda *given, **more: counted.append(1) or count(*given, **more))
    async with served(replicas) as (http, service, _):
        for _ in range(3):
            assert (await http.get("/healthz")).json() == {"status": "loading", "models_ready": 1, "models": 2}
        changes.put_nowait(state("clip", "ready"))
        await service._snapshot.catch_up(lambda: service._snapshot.revision == ("first", 3))
        for _ in range(3):
            assert (await http.get("/healthz")).json() == {"status": "ok", "models_ready": 2, "models": 2}
            assert (await http.get("/v2/health/ready")).status_code == 200
    assert len(counted) == 2


@pytest.mark.parametrize("min_workers", [0, 1])
async def test_health_waits_for_who_answers_and_not_for_the_successor_of_one_that_died(min_workers: int) -> None:
    scaling = {"enabled": True, "scaling": {"min_workers": min_workers, "max_workers": 2}}
    config = CONFIG.model_copy(update={"controller": ControllerConfig.model_validate(scaling)})
    replicas = Replicas()
    replicas.states = {id_: state(id_, "ready") for id_ in ("flux", "clip")}
    watch, handle, queue = (
        RegistrySnapshot(NamedActor(lambda: replicas)),
        FakeHandle(replicas),
        Dispatcher(AdmissionConfig()),
    )
    async with client_over(create_http_app(Service(config, watch, handle, handle, queue=queue), config)) as http:

        async def health() -> tuple[int, str, int]:
            answer = await http.get("/healthz")
            assert (await http.get("/v2/health/ready")).status_code == (200 if answer.status_code == 200 else 503)
            return answer.status_code, answer.json()["status"], answer.json()["models_ready"]

        # A request lets the first worker start where there may be none.
        assert await health() == ((503, "starting", 0) if min_workers else (200, "loading", 1))
        queue.set_replicas(WORKER, [])
        queue.set_replicas(ENCODER, ["one"])
        assert await health() == ((200, "loading", 1) if min_workers else (200, "ok", 2))
        queue.set_replicas(WORKER, ["one"])
        assert await health() == (200, "ok", 2)
        for pool in (ENCODER, WORKER):
            queue.set_replicas(pool, [])
        assert await health() == (200, "ok", 2)
    watch.close()


async def test_health_does_not_wait_for_a_directory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.admin.routes.PROBE_TIMEOUT_S", 0.01)
    monkeypatch.setattr("deployments.ingress.kserve.models.PROBE_TIMEOUT_S", 0.01)

    class Silent(Replicas):
        async def on_watch(self, revision: int, epoch: str, timeout_s: float, replica: str | None) -> DirectoryChange:
            await asyncio.Event().wait()
            raise AssertionError

    replicas = Silent()
    async with served(replicas) as (http, *_):
        answer = await http.get("/healthz")
        assert (answer.status_code, answer.json()["status"]) == (503, "starting")
        assert (await http.get("/v2/health/ready")).status_code == 503
        assert (await http.get("/v2/health/live")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHATS, CHAT), (CHATS, {**CHAT, "max_tokens": 1}), (CHATS, {**CHAT, "stream": True}), (EMBEDDINGS, EMBEDDING)],
)
async def test_a_request_is_one_call_of_one_replica(path: str, body: dict[str, Any]) -> None:
    """From HAProxy to the ingress, and from there to who answers: nobody else is asked once the models are known."""
    replicas = Replicas()
    async with served(replicas) as (http, _, handle):
        assert (await http.get("/v1/models")).status_code == 200
        for number in range(1, 4):
            assert (await http.post(f"/v1/{path}", json=body)).status_code == 200
            assert (len(handle.responses), len(replicas.requests)) == (number, number)
    assert replicas.questions == []


@pytest.mark.parametrize(
    ("path", "body"), [(IMAGES, IMAGE), (CHATS, CHAT), (COMPLETIONS, COMPLETION), (EMBEDDINGS, EMBEDDING)]
)
async def test_phase_times_are_in_the_answer_and_its_header(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    response = await http.post(f"/v1/{path}", json=body)
    assert response.status_code == 200
    phases = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert {"total", "queue"} <= set(phases)
    assert all(float(ms) >= 0 for ms in phases.values())
    assert {phase: float(ms) for phase, ms in phases.items()} == response.json()["timings_ms"]


async def test_many_at_once(http: httpx.AsyncClient, replicas: Replicas) -> None:
    responses = await asyncio.gather(*(http.post(f"/v1/{IMAGES}", json={**IMAGE, "seed": i}) for i in range(20)))
    assert [response.json()["seed"] for response in responses] == list(range(20))
    assert len(replicas.requests) == 20
