"""Actors are found by cluster and config, and those of another life or cluster are not."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.records.actor_names import (
    cluster_key,
    clusters_of,
    controller_name,
    hash_of,
    keeper_name,
    keeper_nodes,
    names_beside_registry,
    names_of_cluster,
    registry_name,
)
from configs.changes import Concern
from configs.cluster import ClusterConfig


def config(name: str = "one", **more: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"name": name, "models": [{"id": "m", "path": "/m"}], **more})


def names(config: ClusterConfig) -> list[str]:
    key = cluster_key(config)
    return [
        keeper_name(key, "n1"),
        registry_name(config),
        keeper_name(key, "n2"),
        controller_name(config),
    ]


def test_what_no_control_plane_takes_is_in_the_names() -> None:
    changes: list[dict[str, Any]] = [{}, {"http": {"port": 8123}}, {"store": {"path": "/s"}}, {"name": "two"}]
    found = [names(config(**change)) for change in changes]
    assert len({name for some in found for name in some}) == 4 * len(changes)


@pytest.mark.parametrize(
    "change",
    [
        {"worker": {"num_replicas": 3, "kv_cache_bytes": "64 MiB"}},
        {"models": [{"id": "other", "path": "/other"}], "model_roots": ["/"]},
        {"adapters": [{"id": "a", "path": "/a", "base": ["m"]}]},
        {"admission": {"max_waiting": 3}, "ingress": {"limits": {"max_images": 1}}},
        {"controller": {"policy": "throughput-first", "tick_s": 0.5, "scaling": {"max_workers": 3}}},
        {"http": {"web": False}, "access": {"insecure": True}},
        {"text_encoder": {"batching": {"max_batch_size": 3}, "device": "cuda"}},
    ],
)
def test_the_control_plane_stays_for_what_it_takes_or_replicas_alone_need(change: dict[str, Any]) -> None:
    assert names(config(**change)) == names(config())


def test_every_process_makes_the_same_names_of_a_config() -> None:
    ops = [f"aten::op{number}" for number in range(20)]  # a set, whose order is the process's own
    sent = ClusterConfig.model_validate(config(simulated={"host_ops": ops}).model_dump(mode="json"))
    assert names(sent) == names(config(simulated={"host_ops": ops[::-1]}))
    assert hash_of(sent, Concern.WORKER) == hash_of(config(simulated={"host_ops": ops[::-1]}), Concern.WORKER)


def test_a_clusters_actors_are_told_from_all_others_and_end_in_order() -> None:
    mine = [*names(config()), *names(config(http={"port": 8123}))]
    others = [*names(config("one-2")), *names(config("on")), "one", "registry:", "SERVE_CONTROLLER_ACTOR", "x:one:y"]
    found = names_of_cluster("one", [*others, *mine])
    assert sorted(found) == sorted(mine)
    assert [name.split(":")[0] for name in found] == ["controller"] * 2 + ["registry"] * 2 + ["keeper"] * 4


def test_a_keepers_name_has_its_node() -> None:
    key = cluster_key(config())
    assert keeper_nodes(key, [keeper_name(key, "n1"), registry_name(config()), keeper_name(key, "n2")]) == ["n1", "n2"]
    assert keeper_nodes(cluster_key(config("other")), [keeper_name(key, "n1")]) == []


def test_a_config_knows_its_own_actors_and_actors_tell_their_clusters() -> None:
    old, new, other = config(), config(http={"port": 8123}), config("one-2")
    found = [*names(other), *names(old), *names(new)]
    assert clusters_of([*found, "SERVE_REPLICA::one#worker#x", "x:three:y", "registry:"]) == ["one", "one-2"]
    own = names_beside_registry(old, found)
    assert sorted([*own, registry_name(old)]) == sorted(names(old))
    assert own[0] == controller_name(old)
