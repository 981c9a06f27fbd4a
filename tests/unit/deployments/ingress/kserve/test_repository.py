"""Index, load and unload over a service without replicas, as values and over REST."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deployments.ingress.error_forms import install_error_handlers
from deployments.ingress.kserve.repository import ModelIndex, Repository, Statistics
from deployments.ingress.kserve.rest.routes import create_repository_router
from deployments.ingress.service.answers import PrefetchAnswer, Tier
from deployments.ingress.service.catalog import ModelCard
from deployments.records.errors import Conflict, InvalidRequest, ModelUnavailable, UnknownModel


class FakeOperations:
    """As the real ones: an evicted model is unavailable until it is prefetched again. `problems` by kind of replica."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self.problems: dict[str, list[str]] = {"workers": ["", ""], "text_encoders": [""]}
        self.held: set[str] = set()
        self.calls: list[tuple[str, str]] = []

    async def prefetch_model(self, model: str, tier: Tier) -> PrefetchAnswer:
        self.calls.append(("prefetch", model))
        self._service.cards[model] = ModelCard(model, "diffusion", "ready")
        return PrefetchAnswer(model=model, tier=tier, nodes={}, **self.problems)

    async def evict_model(self, model: str) -> None:
        self.calls.append(("evict", model))
        if model in self.held:
            raise Conflict(f"{model}: 3 bytes are in use")
        self._service.cards[model] = ModelCard(model, "diffusion", "unavailable", error="unloaded")


@pytest.fixture
def operations(service: Any) -> FakeOperations:
    service.operations = FakeOperations(service)
    return service.operations


@pytest.fixture
def repository(service: Any, operations: FakeOperations) -> Repository:
    return Repository(service)


@pytest.fixture
async def web(repository: Repository) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    statistics = Statistics()
    statistics.succeeded("flux", timings_ms={"denoise": 2.0, "total": 3.0}, batch_size=2)
    install_error_handlers(app)
    app.include_router(create_repository_router(repository, statistics))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client


async def entry_of(repository: Repository, name: str) -> ModelIndex:
    return next(entry for entry in await repository.index() if entry.name == name)


async def test_the_state_is_that_of_the_directory(repository: Repository, service: Any) -> None:
    service.cards["late"] = ModelCard("late", None, "registering")
    states = {entry.name: entry.state for entry in await repository.index()}
    assert states == {
        "flux": "READY",
        "adder": "READY",
        "minilm": "READY",  # updating: the version before is served
        "broken": "UNAVAILABLE",
        "late": "LOADING",
        "scale": "READY",  # a pipeline
    }
    assert (await entry_of(repository, "broken")).reason == "tensor 'w' is torn"
    assert {entry.state for entry in await repository.index(ready=True)} == {"READY"}


async def test_unload_and_load(repository: Repository, operations: FakeOperations) -> None:
    await repository.unload("flux", {"unload_dependents": True})
    assert await entry_of(repository, "flux") == ModelIndex("flux", "1", "UNAVAILABLE", "unloaded")
    await repository.load("flux")
    assert (await entry_of(repository, "flux")).state == "READY"
    assert operations.calls == [("evict", "flux"), ("prefetch", "flux")]


async def test_what_is_in_use_stays(repository: Repository, operations: FakeOperations) -> None:
    operations.held.add("flux")
    with pytest.raises(Conflict, match="in use"):
        await repository.unload("flux")
    assert (await entry_of(repository, "flux")).state == "READY"


async def test_a_model_is_loaded_when_one_replica_of_a_kind_has_it(
    repository: Repository, operations: FakeOperations
) -> None:
    operations.problems["workers"] = ["no room", ""]
    await repository.load("flux")
    operations.problems["workers"] = ["no room", "dead"]
    with pytest.raises(ModelUnavailable, match="no room"):
        await repository.load("flux")
    operations.problems = {"workers": [], "text_encoders": ["torn"]}
    with pytest.raises(ModelUnavailable, match="torn"):
        await repository.load("flux")


@pytest.mark.parametrize(
    ("call", "class_", "words"),
    [
        (lambda r: r.load("nothing"), UnknownModel, "known: flux"),
        (lambda r: r.unload("nothing"), UnknownModel, "known: flux"),
        (lambda r: r.load("broken"), ModelUnavailable, "torn"),
        (lambda r: r.load("bold"), InvalidRequest, "adapter"),
        (lambda r: r.unload("bold"), InvalidRequest, "adapter"),
        (lambda r: r.unload("scale"), InvalidRequest, "no weights of its own"),
        (lambda r: r.load("flux", {"config": "{}"}), InvalidRequest, "got config"),
        (lambda r: r.unload("flux", {"force": True}), InvalidRequest, "takes unload_dependents, got force"),
        (lambda r: r.load("flux", None, "elsewhere"), InvalidRequest, "elsewhere"),
        (lambda r: r.index(repository="elsewhere"), InvalidRequest, "elsewhere"),
        (lambda r: r.names("flux", "2"), UnknownModel, "no version '2'"),
        (lambda r: r.names("bold"), InvalidRequest, "adapter"),
    ],
)
async def test_what_is_refused(
    repository: Repository, operations: FakeOperations, call: Any, class_: type[Exception], words: str
) -> None:
    with pytest.raises(class_, match=words):
        await call(repository)
    assert operations.calls == []


async def test_a_pipeline_has_nothing_to_load(repository: Repository, operations: FakeOperations) -> None:
    await repository.load("scale")
    assert operations.calls == []


@pytest.mark.parametrize("body", [b"", b"{}", b'{"ready": false}'])
async def test_the_index_over_rest(web: httpx.AsyncClient, body: bytes) -> None:
    answer = await web.post("/v2/repository/index", content=body)
    assert answer.status_code == 200
    assert answer.json()[0] == {"name": "flux", "version": "1", "state": "READY", "reason": ""}
    assert len(answer.json()) == 5
    assert len((await web.post("/v2/repository/index", json={"ready": True})).json()) == 4


async def test_unload_and_load_over_rest(web: httpx.AsyncClient, operations: FakeOperations) -> None:
    for action, body in (("unload", {"parameters": {"unload_dependents": False}}), ("load", {})):
        answer = await web.post(f"/v2/repository/models/flux/{action}", json=body)
        assert (answer.status_code, answer.content) == (200, b"")
    assert operations.calls == [("evict", "flux"), ("prefetch", "flux")]
    operations.held.add("flux")
    answer = await web.post("/v2/repository/models/flux/unload")
    assert (answer.status_code, answer.json()) == (409, {"error": "flux: 3 bytes are in use"})


@pytest.mark.parametrize("path", ["/v2/models/flux/stats", "/v2/models/flux/versions/1/stats", "/v2/models/stats"])
async def test_statistics_over_rest(web: httpx.AsyncClient, path: str) -> None:
    found = (await web.get(path)).json()["model_stats"]
    assert len(found) == (5 if path == "/v2/models/stats" else 1)
    assert (found[0]["name"], found[0]["version"], found[0]["inference_count"]) == ("flux", "1", 2)
    assert found[0]["inference_stats"]["compute_infer"] == {"count": 1, "ns": 2_000_000}
    assert found[0]["batch_stats"][0]["compute_output"] == {"count": 1, "ns": 1_000_000}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/v2/repository/index", b"[]", 400, "expected an object"),
        ("POST", "/v2/repository/index", b"{", 400, "not valid JSON"),
        ("POST", "/v2/repository/index", b"[" * 100_000, 400, "not valid JSON"),
        ("POST", "/v2/repository/index", b'{"ready": 1}', 400, "ready"),
        ("POST", "/v2/repository/models/flux/load", b'{"parameters": []}', 400, "parameters"),
        ("POST", "/v2/repository/models/nothing/load", b"", 404, "nothing"),
        ("POST", "/v2/repository/models/broken/load", b"", 503, "torn"),
        ("GET", "/v2/models/nothing/stats", b"", 404, "nothing"),
        ("GET", "/v2/models/flux/versions/2/stats", b"", 404, "version"),
    ],
)
async def test_errors_over_rest(
    web: httpx.AsyncClient, method: str, path: str, body: bytes, status: int, words: str
) -> None:
    answer = await web.request(method, path, content=body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert words in answer.json()["error"]
