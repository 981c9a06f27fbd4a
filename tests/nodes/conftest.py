"""One cluster over three nodes for all scenarios, each of which begins with a whole one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nodes.namespaces import missing
from nodes.three_nodes import NAMES, ThreeNodes


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeNodes]:
    if reason := missing():
        pytest.skip(reason)
    with ThreeNodes(tmp_path_factory.mktemp("nodes")) as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: ThreeNodes) -> ThreeNodes:
    for name in NAMES:
        if not _cluster.runs_ray(name):  # a scenario has failed in the middle
            _cluster.join(name)
    _cluster.wait_whole()
    return _cluster
