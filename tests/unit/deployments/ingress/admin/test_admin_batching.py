"""Dynamic batching of a running cluster's text encoders, changed and looked at, over fakes of registry and replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from unit.deployments.ingress.http_fakes import client_over

from cluster.process.ray_calls import NamedActor
from cluster.registry.directory import DirectoryChange
from cluster.registry.snapshot import RegistrySnapshot
from configs.batching import BatchingConfig
from configs.cluster import ClusterConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service
from deployments.records.errors import Overloaded

PATH = "/admin/text-encoders/batching"
CONFIG = ClusterConfig.model_validate(
    {"models": [{"id": "base", "path": "/base"}], "text_encoder": {"batching": {"max_batch_size": 5}}}
)


class Registry:
    """Its handle; `batching` is what it remembers."""

    def __init__(self) -> None:
        self.batching: BatchingConfig | None = None
        self.dead = False
        self.set_encoder_batching = SimpleNamespace(remote=self._set)
        self.encoder_batching = SimpleNamespace(remote=self._get)
        self.watch = SimpleNamespace(remote=self._watch)

    async def _set(self, batching: BatchingConfig) -> None:
        self._check()
        self.batching = batching

    async def _get(self) -> BatchingConfig | None:
        self._check()
        return self.batching

    async def _watch(self, revision: int, epoch: str, timeout_s: float) -> DirectoryChange:
        self._check()
        return DirectoryChange(1, "e", full=True)

    def _check(self) -> None:
        if self.dead:
            raise ActorDiedError


class Encoders:
    """Two replicas that are tuned, and whatever is in `others`."""

    def __init__(self) -> None:
        self.tuned: list[Any] = [CONFIG.text_encoder.batching] * 2
        self.others: list[Any] = []
        self.calls: list[Any] = []

    def broadcast(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, *arguments))
        if method == "retune":
            self.tuned = list(arguments) * 2
            answers: list[Any] = [None, None]
        elif method == "unpin":
            answers = [None, None]
        else:
            assert method == "describe"
            answers = [
                {"batching": {"batches": number}, "batching_config": batching.model_dump(mode="json"), "modules": []}
                for number, batching in enumerate(self.tuned)
            ]

        async def results_async(*, timeout_s: float, return_exceptions: bool) -> list[Any]:
            assert return_exceptions
            return answers + self.others

        return SimpleNamespace(results_async=results_async)


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def encoders() -> Encoders:
    return Encoders()


@pytest.fixture
async def http(registry: Registry, encoders: Encoders, as_described: Any) -> AsyncIterator[httpx.AsyncClient]:
    watch = RegistrySnapshot(NamedActor(lambda: registry))
    app = create_http_app(Service(CONFIG, watch, encoders, None), CONFIG)
    hooks = as_described(app)
    async with client_over(app, "http://localhost", event_hooks=hooks) as client:
        yield client
    watch.close()


async def test_a_change_reaches_all_replicas_and_is_remembered(
    http: httpx.AsyncClient, registry: Registry, encoders: Encoders
) -> None:
    body = {"max_batch_size": 16, "priority_levels": 3, "queue_policies": {"2": {"timeout_us": 50}}}
    wanted = BatchingConfig.model_validate(body)
    encoders.others = [RayTaskError("retune", "Traceback", Overloaded("busy")), ActorDiedError()]
    answer = await http.put(PATH, json=body)
    assert answer.status_code == 200
    assert BatchingConfig.model_validate(answer.json()["batching"]) == wanted == registry.batching
    assert encoders.calls == [("retune", wanted)]
    first, second, third, fourth = answer.json()["text_encoders"]
    assert (first, second, third) == ("", "", "busy")
    assert fourth.startswith("The actor died")


async def test_what_is_batched_is_shown_by_replica(
    http: httpx.AsyncClient, registry: Registry, encoders: Encoders
) -> None:
    shown = (await http.get(PATH)).json()
    assert shown["batching"]["max_batch_size"] == 5  # the config's
    assert [replica["stats"] for replica in shown["text_encoders"]] == [{"batches": 0}, {"batches": 1}]
    await http.put(PATH, json={"max_batch_size": 9})
    encoders.others = [ActorDiedError()]
    shown = (await http.get(PATH)).json()
    *replicas, lost = shown["text_encoders"]
    assert [replica["config"] for replica in replicas] == [shown["batching"]] * 2
    assert shown["batching"]["max_batch_size"] == 9
    assert lost["unreachable"].startswith("The actor died")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"max_batch_size": 0}, "max_batch_size", "greater than or equal to 1"),
        ({"max_batch_sise": 3}, "max_batch_sise", "unknown field"),
        ({"strategy": "fastest"}, "strategy", "prefer_latency"),
        ({"queue_policies": {"1": {"timeout_us": 0}}}, "queue_policies.1.timeout_us", "greater than or equal to 1"),
        ({"default_priority": 2}, None, "default_priority 2 is beyond priority_levels 1"),
        ({"strategy": "prefer_batch"}, None, "max_queue_delay_us"),
        ([], None, ""),
        (None, None, ""),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_changes(
    http: httpx.AsyncClient, registry: Registry, encoders: Encoders, body: Any, param: str | None, text: str
) -> None:
    refused = await http.put(PATH, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_value", param)
    assert text in error["message"]
    assert (registry.batching, encoders.calls) == (None, [])


async def test_replicas_follow_another_config_in_what_has_changed_of_it(registry: Registry, encoders: Encoders) -> None:
    """`atelier apply` asks one ingress. Replicas keep nothing for models that are gone."""
    watch = RegistrySnapshot(NamedActor(lambda: registry))
    operations = Service(CONFIG, watch, encoders, encoders).operations
    fields = CONFIG.model_dump(mode="json")
    assert await operations.follow(CONFIG, ClusterConfig.model_validate(fields | {"worker": {"num_threads": 2}})) == []
    assert encoders.calls == []
    after = ClusterConfig.model_validate(
        fields | {"models": [{"id": "new", "path": "/new"}], "text_encoder": {"batching": {"max_batch_size": 9}}}
    )
    encoders.others = [RayTaskError("retune", "Traceback", Overloaded("busy"))]
    assert await operations.follow(CONFIG, after) == ["a text encoder: busy"]
    assert registry.batching == after.text_encoder.batching
    assert encoders.calls == [("retune", after.text_encoder.batching), *[("unpin", "base")] * 2]
    watch.close()


async def test_without_a_registry_nothing_changes(
    http: httpx.AsyncClient, registry: Registry, encoders: Encoders
) -> None:
    await http.get(PATH)
    registry.dead = True
    refused = await http.put(PATH, json={"max_batch_size": 9})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
    assert ("retune", BatchingConfig(max_batch_size=9)) not in encoders.calls
    assert (await http.get(PATH)).json()["batching"]["max_batch_size"] == 5
