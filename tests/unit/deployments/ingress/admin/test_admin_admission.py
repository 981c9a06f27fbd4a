"""The admission queue for operators: shown, measured and changed while requests wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from unit.deployments.ingress.http_fakes import CONFIG, IMAGE, IMAGES, Held, Replicas, client_over
from unit.deployments.serve_fakes import FakeHandle

from cluster.admission.dispatcher import Dispatcher
from cluster.placement.serving.link import SlotLink
from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service


async def test_it_is_shown_and_changed_while_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.admin.routes.node_exporters", dict)
    replicas = Held()
    watch, handle = RegistrySnapshot(NamedActor(lambda: replicas)), FakeHandle(replicas)
    config = CONFIG.model_copy(update={"worker": CONFIG.worker.model_copy(update={"max_running_images": 2})})
    service = Service(config, watch, handle, handle)
    async with client_over(create_http_app(service, config), timeout=10) as http:
        asking = [asyncio.create_task(http.post(f"/v1/{IMAGES}", json=IMAGE)) for _ in range(5)]
        while not (await service.queue.snapshot()).models or (await service.queue.snapshot()).models[0].waiting < 3:
            await asyncio.sleep(0)
        shown = (await http.get("/admin/admission")).json()
        (flux,) = shown["models"]
        assert (flux["model"], flux["pool"], flux["waiting"], flux["running"]) == ("flux", "worker", 3, 2)
        assert flux["oldest_age_s"] >= 0
        assert shown["tenants"] == {"default": 3}
        (share,) = shown["shares"]
        assert [share[name] for name in ("model", "tenant", "waiting", "started")] == ["flux", "default", 3, 2]
        assert shown["replicas"]["worker"][0]["running"] == {"flux": 2}
        assert (await http.get("/admin/cluster")).json()["admission"]["models"][0]["waiting"] == 3
        page = (await http.get("/metrics")).text
        assert 'atelier_admission_waiting{pool="worker",model="flux"} 3\n' in page
        changed = await http.put("/admin/admission", json={"max_waiting_per_model": 3, "tenants": {"gold": {}}})
        assert changed.json()["admission"]["max_waiting_per_model"] == 3
        assert (await http.post(f"/v1/{IMAGES}", json=IMAGE)).status_code == 429
        wrong = await http.put("/admin/admission", json={"max_waiting": 0})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_waiting")
        replicas.gate.set()
        answers = await asyncio.gather(*asking)
        assert [answer.status_code for answer in answers] == [200] * 5
        ended = (await http.get("/admin/requests?after=0")).json()
        assert [one["model"] for one in ended["requests"]] == ["flux"] * 5
        assert all(one["arrived_s"] <= one["started_s"] <= one["ended_s"] for one in ended["requests"])
        assert (await http.get("/admin/requests")).json()["requests"] == []
        assert (await http.get("/admin/requests?after=-1")).status_code == 400
        (flux,) = (await http.get("/admin/admission")).json()["models"]
        assert (flux["waiting"], flux["running"], flux["started"], flux["refused"]) == (0, 0, 5, 1)
        assert flux["latency_s"] > 0
    watch.close()


async def test_an_ingress_that_starts_later_begins_with_what_was_set() -> None:
    replicas = Replicas()
    services = [Service(CONFIG, RegistrySnapshot(NamedActor(lambda: replicas)), replicas, replicas) for _ in range(3)]
    await services[1].operations.restore_admission()
    async with client_over(create_http_app(services[0], CONFIG), timeout=10) as http:
        assert (await http.put("/admin/admission", json={"max_waiting": 7})).status_code == 200
    await services[2].operations.restore_admission()
    assert [service.queue.config.max_waiting for service in services] == [7, CONFIG.admission.max_waiting, 7]


async def test_queues_of_several_ingresses_that_nobody_can_ask_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.admin.routes.node_exporters", dict)

    def connect() -> Any:
        raise ActorDiedError

    replicas, queue = Replicas(), Dispatcher(CONFIG.admission, num_sharing=2)
    queue.set_replicas("worker", ["one"])
    link = SlotLink("one", queue, NamedActor(connect))
    link.start()
    service = Service(
        CONFIG, RegistrySnapshot(NamedActor(lambda: replicas)), replicas, replicas, queue=queue, queues=link
    )
    async with client_over(create_http_app(service, CONFIG), timeout=10) as http:
        for answer in (await http.get("/admin/admission"), await http.put("/admin/admission", json={})):
            assert answer.status_code == 503
            assert "restarting" in answer.json()["error"]["message"]
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/healthz")).status_code == 200
        late = await http.post(f"/v1/{IMAGES}", json=IMAGE, headers={"x-request-timeout-seconds": "0.2"})
        assert late.status_code == 504, late.text
    link.close()
