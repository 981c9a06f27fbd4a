"""One page of all nodes' metrics, with some exporters away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from unit.deployments.ingress.http_fakes import Replicas

from cluster.process.telemetry import Exporter
from deployments.ingress.admin.metrics import NodeMetrics

GOOD = '# TYPE ray_x gauge\nray_x{{n="{}"}} 1'
NODES = {f"node{number}": Exporter(f"10.0.0.{number}", 9000) for number in range(1, 7)}


class Piecewise(httpx.AsyncByteStream):
    """A body of pieces without an end."""

    def __init__(self, piece: bytes) -> None:
        self._piece = piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield self._piece


async def exporters(request: httpx.Request) -> httpx.Response:
    """Node 1 and 2 answer; 3 refuses, 4 hangs, 5 sends without an end, 6 has no text."""
    match request.url.host[-1]:
        case "1" | "2":
            return httpx.Response(200, text=GOOD.format(request.url.host[-1]))
        case "3":
            raise httpx.ConnectError("refused")
        case "4":
            await asyncio.Event().wait()
            raise AssertionError
        case "5":
            return httpx.Response(200, stream=Piecewise(b"ray_y 1\n" * 100))
        case _:
            return httpx.Response(200, content=b"\xff\xfe")


def values(page: str, name: str, label: str) -> dict[str, float]:
    families = {family.name: family.samples for family in text_string_to_metric_families(page)}
    return {one.labels[label]: one.value for one in families.get(name, [])}


async def test_a_page_that_misses_nodes_names_them_and_has_the_others() -> None:
    metrics = NodeMetrics(lambda: NODES, page_s=0.5, max_page_bytes=5000)
    page = await metrics.page(httpx.MockTransport(exporters))
    assert "ray_y" not in page
    assert page.count("ray_x{") == 2
    ups = values(page.partition("# TYPE ray_x")[0], "atelier_node_metrics_up", "address")
    assert ups == {f"10.0.0.{number}": float(number < 3) for number in range(1, 7)}


async def test_the_nodes_of_the_last_time_are_asked_while_ray_does_not_answer() -> None:
    answers = [{"node1": NODES["node1"]}, ConnectionError("no head"), {}]

    def find() -> dict[str, Exporter]:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    metrics = NodeMetrics(find)
    pages = [await metrics.page(httpx.MockTransport(exporters)) for _ in range(3)]
    assert [values(page, "atelier_node_metrics_up", "node") for page in pages] == [{"node1": 1.0}] * 2 + [{}]


def test_an_address_of_ipv6_is_in_brackets() -> None:
    assert Exporter("fd00::1", 9000).url == "http://[fd00::1]:9000/metrics"


async def test_the_page_comes_without_any_node(
    http: httpx.AsyncClient, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`http` was opened with the real function; the closed port is nobody's."""
    closed = {"gone": Exporter("127.0.0.1", 1)}
    monkeypatch.setattr("cluster.process.telemetry.ray.nodes", lambda: [node(one) for one in closed.values()])
    answer = await http.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'atelier_node_metrics_up{node="id",address="127.0.0.1"} 0\n' in answer.text
    assert "# TYPE atelier_admission_waiting gauge" in answer.text


def node(exporter: Exporter) -> dict[str, object]:
    return {"NodeID": "id", "NodeManagerAddress": exporter.address, "MetricsExportPort": exporter.port, "Alive": True}
