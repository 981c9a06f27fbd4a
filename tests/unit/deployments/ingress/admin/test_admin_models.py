"""The admin API over a real directory whose checkpoints, keepers and replicas are fakes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from unit.cluster.registry.model_sources import Sources
from unit.deployments.ingress.http_fakes import client_over

from cluster.process.ray_calls import NamedActor
from cluster.ray_seam.templates.messages import FOLDER_VARIABLE, note_problem
from cluster.ray_seam.templates.process_files import record_process
from cluster.records.errors import NotKept
from cluster.registry.directory import DirectoryChange, Entry
from cluster.registry.importing import ImportProgress
from cluster.registry.manifests import ModelSummary
from cluster.registry.registrations import Registrations
from cluster.registry.served_models import ServedModels
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from configs.model import AdapterConfig, ModelConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.service.operations import MAX_MODELS, MAX_NODES
from deployments.ingress.service.service import Service
from deployments.records.errors import Overloaded
from weights.operations.feature_sizes import FeatureSizes
from weights.records.errors import FormatError, SourceRefused
from weights.storage.store import WeightStore

CONFIG = ClusterConfig.model_validate({"models": [{"id": "base", "path": "/base"}]})


def take_in(entry: Entry) -> ModelSummary:
    """A path's text decides: its version, and whether it can be used."""
    if "torn" in str(entry.path):
        raise FormatError(f"{entry.path}/model.safetensors: tensor 'w' is torn")
    kind = "adapter" if isinstance(entry, AdapterConfig) else "llm"
    fingerprint = str(entry.path).replace("/", "-")
    return ModelSummary(kind, 0, fingerprint, (), FeatureSizes(), "", {})


def check_source(entry: Entry) -> None:
    if "secret" in str(entry.path):
        raise SourceRefused(f"{entry.path}: outside of the folders that models may come from (model_roots: /base)")


class Registry:
    """The registry's actor handle. Errors arrive as Ray wraps them; while it is `dead` none of its own do."""

    def __init__(self, models: ServedModels) -> None:
        self.models = models
        self.dead = False
        self.news = asyncio.Event()  # cleared: who watches does not hear of changes yet
        self.news.set()
        self.holders: list[str] = []
        self.calls: list[Any] = []
        self.residency_now: Any = {"num_nodes": 0, "nodes": [], "models": {}}

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any) -> Any:
            if self.dead:
                raise ActorDiedError()
            try:
                return await getattr(type(self), f"on_{method}")(self, *arguments)
            except Exception as error:
                raise RayTaskError(method, "Traceback of the actor", error) from None

        return SimpleNamespace(remote=call)

    async def on_watch(self, revision: int, epoch: str, timeout_s: float, replica: str | None) -> DirectoryChange:
        change = await self.models.directory.watch(revision, epoch, timeout_s)
        await self.news.wait()
        return change

    async def on_find_model(self, model: str) -> Any:
        return await self.models.find_model(model)

    async def on_register(self, entry: Entry, wait: bool) -> Any:
        return await self.models.register(entry, wait=wait)

    async def on_unregister(self, model: str, purge: bool = False) -> Any:
        self.calls.append(("unregister", model, purge))
        return await self.models.unregister(model, purge=purge)

    async def on_prefetch(self, model: str) -> dict[str, str]:
        await self.models.find_model(model)
        self.calls.append(("prefetch", model))
        return {"n1": "", "n2": "the keeper is gone"}

    async def on_import_progress(self) -> list[ImportProgress]:
        return [ImportProgress("new", 3, 8)]

    async def on_want(self, model: str) -> None:
        self.models.directory.set_loaded(model, True)

    async def on_evict(self, model: str) -> list[str]:
        self.calls.append(("evict", model))
        if not self.holders:
            self.models.directory.set_loaded(model, False)
        return self.holders

    async def on_pin(self, model: str, pinned: bool) -> dict[str, str]:
        await self.models.find_model(model)
        self.calls.append(("pin", model, pinned))
        return {"n1": ""}

    async def on_residency(self, models: list[str], node_offset: int, max_nodes: int) -> Any:
        self.calls.append(("residency", models, node_offset, max_nodes))
        return self.residency_now


class Replicas:
    """A deployment handle; `answers` is what its replicas say to a broadcast."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[Any] = []

    def broadcast(self, method: str, *arguments: Any) -> Any:
        async def results_async(*, timeout_s: float, return_exceptions: bool) -> list[Any]:
            assert return_exceptions
            assert timeout_s > 0
            return self.answers

        self.calls.append((method, *arguments))
        return SimpleNamespace(results_async=results_async)


@pytest.fixture
async def registry(tmp_path: Path) -> Registry:
    registrations = Registrations(tmp_path / "registrations")
    models = ServedModels(
        CONFIG.entries, WeightStore(tmp_path / "store"), registrations, Sources(take_in, check_source), "first"
    )
    await models.begin_imports()
    await models.find_model("base")
    return Registry(models)


@pytest.fixture
def worker() -> Replicas:
    vae = {"component": "vae", "models": ["base", "other"], "bytes": 5, "leases": 1, "pinned": False}
    unet = {"component": "unet", "models": ["base"], "bytes": 7, "leases": 0, "pinned": True}
    first = {"name": "4db2180e", "modules": [vae, unet], "last_switches": {"base": {"switch_ms": 3.0}}}
    return Replicas(first, ActorDiedError(), {"name": "y5dll3lg", "modules": [vae]})


@pytest.fixture
async def http(registry: Registry, worker: Replicas, as_described: Any) -> AsyncIterator[httpx.AsyncClient]:
    watch = RegistrySnapshot(NamedActor(lambda: registry))
    encoder = Replicas(
        {"name": "b", "modules": [], "last_switches": {"base": {"switch_ms": 9.0}, "other": {"switch_ms": 1.0}}}
    )
    app = create_http_app(Service(CONFIG, watch, encoder, worker), CONFIG)
    hooks = as_described(app)
    async with client_over(app, "http://localhost", event_hooks=hooks) as client:
        yield client
    watch.close()


def problem(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return response.status_code, error["code"], error["param"]


async def test_a_model_is_registered_listed_replaced_and_removed(
    http: httpx.AsyncClient, registry: Registry, worker: Replicas
) -> None:
    made = await http.post("/admin/models", json={"id": "new", "path": "/one", "description": "adds"})
    assert (made.status_code, made.json()["state"], made.json()["description"]) == (201, "ready", "adds")
    assert (await http.get("/v1/models/new")).json() == made.json()
    assert (await http.post("/admin/models", json={"id": "new", "path": "/one"})).status_code == 200
    replaced = await http.post("/admin/models", json={"id": "new", "path": "/two"})
    assert replaced.status_code == 200
    found = registry.models.directory.get("new")
    assert found
    assert found.fingerprint == "-two"
    removed = await http.delete("/admin/models/new", params={"purge": "true"})
    assert (removed.status_code, removed.json()) == (200, {"id": "new", "deleted": True, "orphans": []})
    assert registry.calls == [("unregister", "new", True)]
    assert worker.calls == [("unpin", "new")]  # pins end with the model
    assert problem(await http.delete("/admin/models/new")) == (404, "model_not_found", "model")


async def test_imports_say_how_far_they_are(http: httpx.AsyncClient, registry: Registry) -> None:
    found = await http.get("/admin/imports")
    assert (found.status_code, found.json()) == (
        200,
        {"imports": [{"id": "new", "done_bytes": 3, "total_bytes": 8}]},
    )
    registry.dead = True
    assert problem(await http.get("/admin/imports"))[0] == 503


@pytest.mark.parametrize(
    ("method", "path", "status", "is_listed"),
    [
        ("POST", "", 201, True),
        ("POST", "", 200, True),
        ("DELETE", "/new", 200, False),
        ("DELETE", "/new", 404, False),
    ],
)
async def test_who_was_told_of_a_change_finds_it_in_the_list_however_late_the_news_come(
    http: httpx.AsyncClient, registry: Registry, method: str, path: str, status: int, is_listed: bool
) -> None:
    if status != 201:
        await http.post("/admin/models", json={"id": "new", "path": "/one", "description": "one"})
    registry.news.clear()
    if status == 404:
        await registry.models.unregister("new")
    body = {"id": "new", "path": "/two", "description": "two"} if method == "POST" else None
    asking = asyncio.create_task(http.request(method, f"/admin/models{path}", json=body))
    assert not (await asyncio.wait([asking], timeout=0.1))[0]
    registry.news.set()
    assert (await asking).status_code == status
    listed = {model["id"]: model["description"] for model in (await http.get("/v1/models")).json()["data"]}
    assert listed.get("new") == ("two" if is_listed else None)


async def test_a_path_outside_of_the_roots_is_refused_before_anything_changes(
    http: httpx.AsyncClient, registry: Registry
) -> None:
    for id_, is_there in (("new", False), ("base", True)):
        refused = await http.post("/admin/models", json={"id": id_, "path": "/secret"})
        assert problem(refused) == (400, "invalid_value", "path")
        assert "outside of the folders that models may come from (model_roots: /base)" in refused.text
        assert (id_ in registry.models.directory) == is_there
    assert (await http.get("/v1/models/base")).json()["state"] == "ready"
    found = registry.models.directory.get("base")
    assert found
    assert found.entry == CONFIG.entries["base"]


async def test_an_unloaded_model_is_not_ready_until_it_is_wanted_again(
    http: httpx.AsyncClient, registry: Registry, worker: Replicas
) -> None:
    worker.answers = [[], []]
    assert (await http.post("/v2/repository/models/base/unload", json={})).status_code == 200
    assert worker.calls[-1] == ("evict", "base")
    assert (await http.get("/v2/models/base/ready")).status_code == 503
    assert (await http.get("/healthz")).json()["status"] == "ok"
    index = {model["name"]: model for model in (await http.post("/v2/repository/index", json={})).json()}
    assert (index["base"]["state"], index["base"]["reason"]) == ("UNAVAILABLE", "unloaded")
    worker.answers = [None]
    assert (await http.post("/v2/repository/models/base/load", json={})).status_code == 200
    assert (await http.get("/v2/models/base/ready")).status_code == 200


async def test_what_is_in_use_is_not_unloaded(http: httpx.AsyncClient, registry: Registry, worker: Replicas) -> None:
    worker.answers = [["transformer"], []]
    refused = await http.post("/v2/repository/models/base/unload", json={})
    assert refused.status_code == 409
    assert "running requests or pins hold transformer" in refused.json()["error"]
    worker.answers, registry.holders = [[], []], ["worker-1"]
    refused = await http.post("/v2/repository/models/base/unload", json={})
    assert (refused.status_code, "held by worker-1" in refused.json()["error"]) == (409, True)
    assert (await http.get("/v2/models/base/ready")).status_code == 200


async def test_who_does_not_wait_gets_a_202(http: httpx.AsyncClient) -> None:
    made = await http.post("/admin/models", params={"wait": "false"}, json={"id": "new", "path": "/one"})
    assert (made.status_code, made.json()["state"]) == (202, "registering")
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.get("/v1/models/new")).json()["state"] == "ready"


async def test_an_adapter_is_known_to_its_base_and_named_when_the_base_goes(http: httpx.AsyncClient) -> None:
    await http.post("/admin/models", json={"id": "new", "path": "/one"})
    made = await http.post("/admin/models", json={"id": "lora", "path": "/l", "base": ["new", "base"]})
    assert (made.status_code, made.json()["kind"], made.json()["base"]) == (201, "adapter", ["new", "base"])
    assert (await http.delete("/admin/models/new")).json()["orphans"] == ["lora"]


async def test_a_new_model_that_cannot_be_used_leaves_nothing_behind(
    http: httpx.AsyncClient, registry: Registry
) -> None:
    response = await http.post("/admin/models", json={"id": "new", "path": "/torn"})
    assert problem(response) == (422, "unusable_checkpoint", "path")
    assert "/torn/model.safetensors: tensor 'w' is torn" in response.json()["error"]["message"]
    assert "new" not in registry.models.directory


async def test_an_update_that_cannot_be_used_leaves_the_version_before(http: httpx.AsyncClient) -> None:
    await http.post("/admin/models", json={"id": "new", "path": "/one"})
    response = await http.post("/admin/models", json={"id": "new", "path": "/torn"})
    assert problem(response) == (422, "unusable_checkpoint", "path")
    listed = (await http.get("/v1/models/new")).json()
    assert listed["state"] == "ready"
    assert "the version before goes on serving" in listed["error"]


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"path": "/one"}, (400, "invalid_value", "id")),
        ({"id": "x"}, (400, "invalid_value", "path")),
        ({"id": "../x", "path": "/one"}, (400, "invalid_value", "id")),
        ({"id": "x" * 129, "path": "/one"}, (400, "invalid_value", "id")),
        ({"id": "x", "path": "one"}, (400, "invalid_value", "path")),
        ({"id": "x", "path": "ftp://host/x"}, (400, "invalid_value", "path")),
        ({"id": "x", "path": "s3://user:secret@host/x"}, (400, "invalid_value", "path")),
        ({"id": "x", "path": 3}, (400, "invalid_value", "path")),
        ({"id": "x", "path": "/one", "dtype": "int4"}, (400, "invalid_value", "dtype")),
        ({"id": "x", "path": "/one", "colour": "red"}, (400, "invalid_value", "colour")),
        ({"id": "x", "path": "/one", "defaults": {"width": 1}}, (400, "invalid_value", "defaults.width")),
        ({"id": "x", "path": "/one", "base": []}, (400, "invalid_value", "base")),
        ({"id": "x", "path": "/one", "base": ["nope"]}, (400, "invalid_value", "base")),
        ({"id": "x", "path": "/one", "base": ["base"], "preload": True}, (400, "invalid_value", "preload")),
        ({"id": "base", "path": "/one", "base": ["base"]}, (409, "conflict", None)),
        ([], (400, "invalid_value", None)),
        (3, (400, "invalid_value", None)),
        (None, (400, "invalid_value", None)),
    ],
)
async def test_what_cannot_be_registered_is_refused_with_its_field(
    http: httpx.AsyncClient, registry: Registry, body: Any, expected: tuple[int, str, str | None]
) -> None:
    revision = registry.models.directory.revision
    assert problem(await http.post("/admin/models", json=body)) == expected
    assert registry.models.directory.revision == revision


async def test_a_registration_that_the_disk_does_not_take_is_not_the_callers_mistake(
    http: httpx.AsyncClient, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(entry: Entry, *, wait: bool) -> None:
        raise NotKept("/store/registrations/c/new.json: cannot be written: No space left on device")

    monkeypatch.setattr(registry.models, "register", refuse)
    refused = await http.post("/admin/models", json={"id": "new", "path": "/one"})
    assert problem(refused) == (503, "model_unavailable", None)
    assert "No space left on device" in refused.text


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("method", "path", "options", "expected"),
    [
        ("POST", "/admin/models?wait=perhaps", {"json": {"id": "x", "path": "/one"}}, (400, "invalid_value", "wait")),
        ("DELETE", "/admin/models/base", {}, (409, "conflict", None)),
        ("DELETE", "/admin/models/nope", {}, (404, "model_not_found", "model")),
        ("DELETE", "/admin/models/%2e%2e%2fx", {}, (404, "unknown_url", None)),
        ("POST", "/admin/models/nope/prefetch", {}, (404, "model_not_found", "model")),
        ("POST", "/admin/models/base/prefetch", {"json": {"tier": "disk"}}, (400, "invalid_value", "tier")),
        ("POST", "/admin/models/base/prefetch", {"json": {"level": 1}}, (400, "invalid_value", "level")),
        ("POST", "/admin/models/nope/pin", {}, (404, "model_not_found", "model")),
        ("DELETE", "/admin/models/nope/pin", {}, (404, "model_not_found", "model")),
        ("GET", "/admin/models/base/pin", {}, (405, "method_not_allowed", None)),
    ],
)
async def test_bad_admin_requests(
    http: httpx.AsyncClient, method: str, path: str, options: Any, expected: tuple[int, str, str | None]
) -> None:
    assert problem(await http.request(method, path, **options)) == expected


async def test_prefetch_and_pin_reach_nodes_and_workers(
    http: httpx.AsyncClient, registry: Registry, worker: Replicas
) -> None:
    host = await http.post("/admin/models/base/prefetch")
    assert host.json() == {"model": "base", "tier": "host", "nodes": {"n1": "", "n2": "the keeper is gone"}}
    assert worker.calls == []
    worker.answers = [None, RayTaskError("prefetch", "Traceback", Overloaded("no room for it"))]
    device = await http.post("/admin/models/base/prefetch", json={"tier": "device"})
    assert device.json()["workers"] == ["", "no room for it"]
    assert len(device.json()["text_encoders"]) == 1
    await http.post("/admin/models/base/pin")
    await http.delete("/admin/models/base/pin")
    assert worker.calls == [("prefetch", "base"), ("pin", "base"), ("unpin", "base")]
    assert registry.calls == [("prefetch", "base")] * 2 + [("pin", "base", True), ("pin", "base", False)]


async def test_the_cluster_is_shown_with_what_does_not_answer(http: httpx.AsyncClient, registry: Registry) -> None:
    resident = {"n1": {"host_bytes": 10, "num_extents": 1, "pinned": False, "holders": ["worker-1"], "hits": 2}}
    nodes = [{"node_id": "n1", "unreachable": "gone"}]
    registry.residency_now = {"num_nodes": 7, "nodes": nodes, "models": {"base": resident}}
    shown = (await http.get("/admin/cluster")).json()
    assert (shown["cluster"], shown["nodes"]) == ("atelier", registry.residency_now["nodes"])
    (base,) = shown["models"]
    assert (base["id"], base["state"], base["resident"]) == ("base", "ready", resident)
    assert base["last_switch"] == {"replica": "worker-4db2180e", "switch_ms": 3.0}
    assert base["built"] == [
        {"replica": "worker-4db2180e", "bytes": 12, "leases": 1, "pinned": True},
        {"replica": "worker-y5dll3lg", "bytes": 5, "leases": 1, "pinned": False},
    ]
    assert shown["text_encoders"][0]["modules"] == []
    assert shown["workers"][1]["unreachable"].startswith("The actor died")
    assert (shown["num_models"], shown["num_nodes"]) == (1, 7)


async def test_the_templates_of_processes_are_shown_where_there_are_some(
    http: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert "templates" not in (await http.get("/admin/cluster")).json()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    record_process(str(tmp_path), "template", "worker", os.getpid())
    record_process(str(tmp_path), "copy", "worker", os.getppid())
    note_problem(str(tmp_path), "no copy of template 'worker': it has ended")
    assert (await http.get("/admin/cluster")).json()["templates"] == {
        "templates": [{"name": "worker", "is_ready": True, "num_copies": 1}],
        "problems": ["no copy of template 'worker': it has ended"],
    }


async def test_of_many_models_and_nodes_a_page_is_asked_for_and_shown(
    http: httpx.AsyncClient, registry: Registry
) -> None:
    for number in range(30):
        await registry.models.register(ModelConfig(id=f"m{number}", path=Path("/c")))
    await http.post("/admin/models", json={"id": "last", "path": "/c"})  # so that the ingress has heard of all
    registry.calls.clear()
    first = (await http.get("/admin/cluster")).json()
    assert len(first["models"]) == first["num_models"] == 32
    pages = []
    for offset in range(0, 40, 10):
        query = {"model_offset": offset, "max_models": 10, "node_offset": 2 * offset, "max_nodes": 20}
        pages.append((await http.get("/admin/cluster", params=query)).json())
        ids = [model["id"] for model in pages[-1]["models"]]
        assert registry.calls[-1] == ("residency", ids, 2 * offset, 20)
    assert [model for page in pages for model in page["models"]] == first["models"]
    assert registry.calls[0][2:] == (0, MAX_NODES)
    for query in ({"max_models": MAX_MODELS + 1}, {"model_offset": -1}, {"max_nodes": "x"}):
        assert (await http.get("/admin/cluster", params=query)).status_code == 400


async def test_a_dead_registry_leaves_the_rest_to_be_seen_and_served(
    http: httpx.AsyncClient, registry: Registry
) -> None:
    assert (await http.get("/healthz")).status_code == 200
    registry.dead = True
    shown = (await http.get("/admin/cluster")).json()
    assert shown["registry"]["unreachable"].startswith("The actor died")
    assert [model["id"] for model in shown["models"]] == ["base"]
    assert (await http.get("/v1/models/base")).status_code == 200
    for response in (
        await http.post("/admin/models", json={"id": "x", "path": "/one"}),
        await http.post("/admin/models/base/pin"),
        await http.get("/v1/models/unheard-of"),
    ):
        assert problem(response)[:2] == (503, "model_unavailable")


async def test_many_watchers_and_registrations_at_once(http: httpx.AsyncClient, registry: Registry) -> None:
    bodies = [{"id": f"m{number % 10}", "path": f"/v{number}"} for number in range(60)]
    responses = await asyncio.gather(*(http.post("/admin/models", json=body) for body in bodies))
    assert {response.status_code for response in responses} <= {200, 201}
    listed = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
    assert sorted(listed) == ["base", *(f"m{number}" for number in range(10))]
    for number in range(10):
        found = registry.models.directory.get(f"m{number}")
        assert found
        assert (found.state, found.fingerprint) == ("ready", f"-v{number + 50}")
