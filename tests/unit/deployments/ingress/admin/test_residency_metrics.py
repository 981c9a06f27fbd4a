"""Residency as Prometheus text: read back by Prometheus' own parser, with hostile names, and with absent nodes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from kit.seeding import seeded_random
from kit.waiting import until
from prometheus_client.parser import text_string_to_metric_families

from deployments.ingress.admin.metrics import ResidencyMetrics, residency_metrics
from deployments.ingress.service.operations import Page

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(page: str) -> Samples:
    families = text_string_to_metric_families(page)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def node(name: str, **changes: int) -> dict[str, Any]:
    names = ("resident_bytes", "leased_bytes", "pinned_bytes", "budget_bytes", "read_bytes", "peer_bytes")
    return {"node_id": name, **dict.fromkeys((*names, "num_evicted"), 0), **changes}


def replica(name: str, **changes: Any) -> dict[str, Any]:
    told = {"name": name, "resident_bytes": 0, "leased_bytes": 0, "budget_bytes": 0, "num_switches": 0}
    return {**told, "arena": None, "modules": [], **changes}


def test_every_figure_arrives_with_its_labels_and_to_the_last_byte() -> None:
    random = seeded_random()
    resident, budget, read_bytes, peers = (random.randrange(2**53) for _ in range(4))
    used, total = random.randrange(1000), random.randrange(1000, 2000)
    hostile = 'a"b\\c\nd'
    arena = {f"{state}_bytes": random.randrange(2**40) for state in ("resident", "leased", "pinned", "lingering")}
    arena |= {"budget_bytes": budget, "device": "sim:0"}
    second = {**arena, "device": "sim:1", "leased_bytes": random.randrange(2**40)}
    modules = [
        {"component": "model", "models": ["chat", hostile], "kv_blocks": {"used": used, "total": total}},
        {"component": "vae", "models": ["flux"]},
    ]
    ranks = {"processes": [{"rank": 0, "process": 7, "sent_bytes": used}, {"rank": 1}]}
    found = read(
        residency_metrics(
            {
                "nodes": [node("n", resident_bytes=resident, read_bytes=read_bytes, peer_bytes=peers)],
                "workers": [
                    replica("w", arena=arena, other_arenas=[second], modules=modules, num_switches=3, ranks=ranks)
                ],
                "text_encoders": [replica("t", leased_bytes=7)],
            }
        )
    )

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    worker, encoder = {"service": "workers", "replica": "w"}, {"service": "text_encoders", "replica": "t"}
    assert value("atelier_node_weights_bytes", node="n", state="resident") == resident
    assert value("atelier_node_read_bytes_total", node="n", source="storage") == read_bytes
    assert value("atelier_node_read_bytes_total", node="n", source="peers") == peers
    assert value("atelier_device_bytes", **worker, device="sim:0", state="budget") == budget
    assert value("atelier_device_bytes", **worker, device="sim:0", state="pinned") == arena["pinned_bytes"]
    assert value("atelier_device_bytes", **worker, device="sim:1", state="leased") == second["leased_bytes"]
    assert value("atelier_kv_blocks", **worker, model=f"chat,{hostile}", state="used") == used
    assert value("atelier_kv_blocks", **worker, model=f"chat,{hostile}", state="total") == total
    assert value("atelier_replica_switches_total", **worker) == 3
    assert value("atelier_replica_modules_bytes", **encoder, state="leased") == 7
    assert sum(name == "atelier_kv_blocks" for name, _ in found) == 2
    assert value("atelier_rank_sent_bytes_total", **worker, rank="0") == used
    assert sum(name == "atelier_rank_sent_bytes_total" for name, _ in found) == 1  # rank 1 does not answer


def test_what_is_away_is_not_there() -> None:
    away = {"unreachable": "it restarts"}
    found = read(
        residency_metrics(
            {"nodes": [{"node_id": "m", **away}, node("n")], "workers": [away], "text_encoders": [replica("t")]}
        )
    )
    assert {dict(labels).get("node") for _, labels in found} == {"n", None}
    assert {dict(labels).get("replica") for _, labels in found} == {"t", None}


async def test_all_who_ask_at_once_share_one_look_and_a_late_one_is_an_empty_part() -> None:
    asked, answered = 0, asyncio.Event()

    async def describe_cluster(page: Page) -> Any:
        nonlocal asked
        asked += 1
        await answered.wait()
        cluster = {"nodes": [node("n")], "workers": [], "text_encoders": []}
        return SimpleNamespace(model_dump=lambda **_: cluster)

    operations: Any = SimpleNamespace(describe_cluster=describe_cluster)
    metrics = ResidencyMetrics(operations)
    asking = [asyncio.create_task(metrics.page()) for _ in range(8)]
    await until(lambda: asked == 1)
    asking.pop().cancel()  # a client that leaves takes nothing from the others
    answered.set()
    pages = await asyncio.gather(*asking)
    assert asked == 1
    assert len(set(pages)) == 1
    assert read(pages[0])

    answered.clear()
    assert await ResidencyMetrics(operations, look_s=0.01).page() == ""
