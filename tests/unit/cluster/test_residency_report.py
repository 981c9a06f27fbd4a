"""The picture of what is resident where."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cluster.residency_report import cluster_residency


@dataclass(frozen=True)
class Stats:
    node_id: str
    resident_bytes: int = 30


def extent(id_: str, *holders: str, pinned: bool = False) -> Any:
    return SimpleNamespace(id=id_, nbytes=10, holders=holders, pinned=pinned, source="storage", hits=2)


def test_models_have_what_is_resident_of_them_on_each_node() -> None:
    residents = {
        "n1": [extent("a", "worker-1"), extent("shared", "worker-2", "worker-1", pinned=True)],
        "n2": [extent("shared", pinned=True)],
    }
    stats = {"n1": Stats("n1"), "n2": Stats("n2")}
    found = cluster_residency(stats, residents, {"m": ("a", "shared", "absent"), "s": ("shared",), "cold": ("x",)})
    assert found["models"]["m"]["n1"] == {
        "host_bytes": 20,
        "num_extents": 2,
        "pinned": False,
        "holders": ["worker-1", "worker-2"],
        "hits": 4,
    }
    assert found["models"]["s"]["n2"]["pinned"]
    assert set(found["models"]) == {"m", "s"}
    assert found["nodes"] == [{"node_id": "n1", "resident_bytes": 30}, {"node_id": "n2", "resident_bytes": 30}]
    assert json.loads(json.dumps(found)) == found


def test_a_node_that_does_not_answer_is_shown_as_unreachable() -> None:
    stats = {"n1": Stats("n1"), "n2": TimeoutError(), "n3": ConnectionError("gone")}
    found = cluster_residency(stats, {"n1": ConnectionError("later"), "n2": TimeoutError(), "n3": []}, {"m": ("a",)})
    assert found["nodes"][0]["resident_bytes"] == 30
    assert [node.get("unreachable") for node in found["nodes"]] == [None, "TimeoutError", "gone"]
    assert found["models"] == {}
