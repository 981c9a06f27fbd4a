"""The admission queue for operators: shown, measured and changed while requests wait."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from unit.deployments.ingress.http_fakes import CONFIG, IMAGE, IMAGES, Replicas
from unit.deployments.serve_fakes import FakeHandle

from cluster.registry.snapshot import RegistrySnapshot
from deployments.ingress.http import create_http_app
from deployments.ingress.service import Service
from deployments.records import ImageRequest, ImageResult


class Held(Replicas):
    """Holds all work."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def on_generate(self, request: ImageRequest) -> ImageResult:
        self.requests.append(request)
        await self.gate.wait()
        return await super().on_generate(request)


async def test_it_is_shown_and_changed_while_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.admin.routes.metrics_urls", list)
    replicas = Held()
    watch, handle = RegistrySnapshot(lambda: replicas), FakeHandle(replicas)
    config = CONFIG.model_copy(update={"worker": CONFIG.worker.model_copy(update={"max_running_images": 2})})
    service = Service(config, watch, handle, handle)
    transport = httpx.ASGITransport(create_http_app(service, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10) as http:
        asking = [asyncio.create_task(http.post(f"/v1/{IMAGES}", json=IMAGE)) for _ in range(5)]
        while not service.queue.snapshot().models or service.queue.snapshot().models[0].waiting < 3:
            await asyncio.sleep(0)
        shown = (await http.get("/admin/admission")).json()
        (flux,) = shown["models"]
        assert (flux["model"], flux["pool"], flux["waiting"], flux["running"]) == ("flux", "worker", 3, 2)
        assert flux["oldest_age_s"] >= 0
        assert shown["tenants"] == {"default": 3}
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
        (flux,) = (await http.get("/admin/admission")).json()["models"]
        assert (flux["waiting"], flux["running"], flux["started"], flux["refused"]) == (0, 0, 5, 1)
        assert flux["latency_s"] > 0
    watch.close()
