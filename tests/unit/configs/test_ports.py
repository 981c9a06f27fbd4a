"""Ports of one config: each is listened on by one part."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from configs.cluster import ClusterConfig


def config(**sections: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"models": [{"id": "m", "path": "/m"}], **sections})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"http": {"port": 8001}, "grpc": {}}, "grpc.port 8001 is http.port already"),
        ({"http": {"port": 8001, "host": "0.0.0.0"}, "grpc": {"host": "10.0.0.1"}}, "grpc.port 8001 is http.port"),
        ({"http": {"port": 8001}, "grpc": {"host": "localhost"}}, "grpc.port 8001 is http.port already"),
        ({"http": {"haproxy": {"stats_port": 8000}}}, "http.haproxy.stats_port 8000 is http.port already"),
        (
            {"http": {"haproxy": {"stats_port": 9000, "metrics_port": 9000}}},
            "http.haproxy.metrics_port 9000 is http.haproxy.stats_port already",
        ),
        (
            {"grpc": {"port": 9050}, "http": {"haproxy": {"first_replica_port": 9000}}},
            "http.haproxy.first_replica_port 9050 is grpc.port already",
        ),
    ],
)
def test_a_port_that_is_taken_by_another_part_is_a_mistake_at_its_key(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        config(**sections)
    told = [f"{'.'.join(map(str, error['loc']))} {error['msg']}" for error in refused.value.errors()]
    assert any(said in one for one in told), told


@pytest.mark.parametrize(
    "sections",
    [
        {"grpc": {}},
        {"http": {"port": 8001, "host": "10.0.0.1"}, "grpc": {"host": "10.0.0.2"}},
        {"http": {"proxy": "serve", "haproxy": {"stats_port": 8000}}},  # nobody listens there
        {"grpc": {"port": 9100}, "http": {"haproxy": {"first_replica_port": 9000}}},
    ],
)
def test_ports_of_other_addresses_are_none(sections: dict[str, Any]) -> None:
    assert [*config(**sections).shared_ports()] == []
