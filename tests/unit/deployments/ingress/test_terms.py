"""Priorities, tenants and deadlines of requests, from headers, parameters and records to the admission queue."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from unit.deployments.ingress.http_fakes import (
    CHAT,
    CHATS,
    CONFIG,
    EMBEDDING,
    EMBEDDINGS,
    IMAGE,
    IMAGES,
    Replicas,
    problem,
)
from unit.deployments.serve_fakes import FakeHandle

from cluster.admission.records import Demand
from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.admission import AdmissionConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.messages.terms import read_terms
from deployments.ingress.service.service import Service
from deployments.records.errors import InvalidRequest

TENANTS = AdmissionConfig.model_validate({"tenants": {"gold": {"weight": 3}}, "default_timeout_s": 20.0})


class Edge:
    """The HTTP app, and the asks that came to its queue."""

    def __init__(self, admission: AdmissionConfig = TENANTS) -> None:
        self.asks: list[Demand] = []
        replicas = Replicas()
        self.watch = RegistrySnapshot(NamedActor(lambda: replicas))
        config = CONFIG.model_copy(update={"admission": admission})
        handle = FakeHandle(replicas)
        self.service = Service(config, self.watch, handle, handle)
        submit = self.service.queue.submit

        def spied(ask: Demand) -> int:
            self.asks.append(ask)
            return submit(ask)

        self.service.queue.submit = spied  # type: ignore[method-assign]
        transport = httpx.ASGITransport(create_http_app(self.service, config), raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def __aenter__(self) -> Edge:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        self.watch.close()


@pytest.mark.parametrize(
    ("path", "body"), [(IMAGES, IMAGE), (CHATS, CHAT), (CHATS, CHAT | {"stream": True}), (EMBEDDINGS, EMBEDDING)]
)
async def test_headers_reach_the_queue_with_every_endpoint(path: str, body: dict[str, Any]) -> None:
    headers = {"x-priority": "1", "X-Tenant": "gold", "x-request-timeout-seconds": "7.5"}
    async with Edge() as edge:
        assert (await edge.http.post(f"/v1/{path}", json=body, headers=headers)).status_code == 200
        assert (await edge.http.post(f"/v1/{path}", json=body)).status_code == 200
    said, default = edge.asks
    assert (said.priority, said.tenant, said.deadline_s) == (1, "gold", 7.5)
    assert (default.priority, default.tenant, default.deadline_s) == (2, "default", 20.0)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("headers", "param", "text"),
    [
        ({"x-priority": "-1"}, "x-priority", "from 1, most urgent, got '-1'"),
        ({"x-priority": "0"}, "x-priority", "got '0'"),
        ({"x-priority": "high"}, "x-priority", "got 'high'"),
        ({"x-priority": "9"}, "priority", "priority 9 is not served (known: 1, most urgent, to 3)"),
        ({"x-request-timeout-seconds": "nan"}, "x-request-timeout-seconds", "above 0, got 'nan'"),
        ({"x-request-timeout-seconds": "-3"}, "x-request-timeout-seconds", "got '-3'"),
        ({"x-request-timeout-seconds": "inf"}, "x-request-timeout-seconds", "got 'inf'"),
        ({"x-request-timeout-seconds": "soon"}, "x-request-timeout-seconds", "got 'soon'"),
        ({"x-tenant": "nobody"}, "x-tenant", "no tenant 'nobody' (known: default, gold)"),
        ({"x-tenant": "x" * 500}, "x-tenant", "no tenant 'xxx"),
    ],
)
async def test_what_they_cannot_mean_is_refused_in_each_protocols_form(
    headers: dict[str, str], param: str, text: str
) -> None:
    async with Edge() as edge:
        answer = await edge.http.post(f"/v1/{IMAGES}", json=IMAGE, headers=headers)
        assert (answer.status_code, problem(answer)["param"]) == (400, param)
        assert text in problem(answer)["message"]
        assert len(problem(answer)["message"]) < 300
        other = await edge.http.post("/v2/models/chatty/generate", json={"text_input": "x"}, headers=headers)
        assert (other.status_code, set(other.json())) == (400, {"error"})
        assert text in other.json()["error"]
        assert (await edge.http.get("/healthz", headers=headers)).status_code == 200
    assert not edge.asks


async def test_unknown_tenants_may_count_as_the_default_one() -> None:
    async with Edge(AdmissionConfig(unknown_tenants="default")) as edge:
        await edge.http.post(f"/v1/{IMAGES}", json=IMAGE, headers={"x-tenant": "nobody"})
    assert [ask.tenant for ask in edge.asks] == ["default"]


async def test_parameters_of_the_other_protocol_and_fields_of_records_say_the_same() -> None:
    parameters = {"priority": 3, "timeout": 2_500_000}
    async with Edge() as edge:
        body = {"text_input": "x", "parameters": parameters}
        assert (await edge.http.post("/v2/models/chatty/generate", json=body)).status_code == 200
        await edge.service.generate({**IMAGE, "priority": 3, "timeout_s": 2.5, "tenant": "gold"})
        with pytest.raises(InvalidRequest, match="no tenant 'nobody'"):
            await edge.service.chat({**CHAT, "tenant": "nobody"})
    assert [(ask.priority, ask.deadline_s, ask.tenant) for ask in edge.asks] == [
        (3, 2.5, "default"),
        (3, 2.5, "gold"),
    ]


async def test_nobody_gets_more_time_than_the_config_gives() -> None:
    async with Edge() as edge:
        await edge.http.post(f"/v1/{IMAGES}", json=IMAGE, headers={"x-request-timeout-seconds": "1e9"})
    assert edge.asks[0].deadline_s == CONFIG.http.request_timeout_s


def test_the_tenant_of_a_key_goes_before_the_headers() -> None:
    terms = read_terms({"x-tenant": "gold"}, key_tenant="of-the-key")
    assert terms.checked(TENANTS).tenant == "of-the-key"
