"""Two ranks, each with memory of its own on a simulated device: what each moves there."""

from __future__ import annotations

import pytest
from unit.deployments.services import test_worker_ranks as two_ranks
from unit.deployments.services.test_worker_ranks import MODEL, PACKED, Node
from unit.deployments.services.test_worker_ranks import node as node
from unit.deployments.services.test_worker_ranks import store as store

from weights.storage.store import WeightStore

pytestmark = [
    pytest.mark.drawn(of="file"),
    pytest.mark.parametrize("node", [{"device": "sim:0", "ranks": {"tensor": 2, "timeout_s": 20}}], indirect=True),
]


@pytest.mark.parametrize("model", [MODEL, *PACKED])
async def test_each_rank_moves_its_slices_alone(node: Node, store: WeightStore, model: str) -> None:
    await two_ranks.test_each_rank_moves_its_slices_alone(node, store, model)


async def test_a_switch_moves_the_difference_of_each_ranks_slices(node: Node, store: WeightStore) -> None:
    await two_ranks.test_a_switch_moves_the_difference_of_each_ranks_slices(node, store)
