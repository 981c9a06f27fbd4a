"""Graphs of a card, on a double of it: what shares memory, what ends them, and what is never captured."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kit.captures import MAIN, Card
from torch import nn

from deployments.engines.graph.card_graphs import CardGraphs, replays_on
from deployments.engines.graph.replay import Forward, Replays
from deployments.engines.graph.workspace import Workspace
from weights.memory.device_arena import DeviceArena

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Model:
    """Two layers with replays on a double of a card. `calls` are the rows of the forwards that ran in the module."""

    def __init__(self, *unfit: str, layers: nn.Module | None = None, **options: Any) -> None:
        self.layers = layers or nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        self.card = Card(*unfit)
        self.graphs = CardGraphs(HOST, self.layers, cuda=self.card, **options)
        self.replays = Replays(min_forwards=2, binder=self.graphs)
        self.calls: list[int] = []

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        self.calls.append(len(inputs[0]))
        found: torch.Tensor = self.layers(inputs[0])
        return found

    def run(self, rows: int, times: int = 1, forward: Forward | None = None) -> int:
        """Run forwards, compare each with the layers, and return how many of the last one ran in the module."""
        for _ in range(times):
            before, inputs = len(self.calls), [torch.randn(rows, 8)]
            found = self.replays.run(rows, inputs, forward or self.forward)
            assert torch.equal(found, self.layers(inputs[0]))
            assert self.card.current is MAIN
        return len(self.calls) - before

    @property
    def pool_bytes(self) -> int:
        live = {graph.pool for graph in self.card.graphs()}
        return sum(one["total_size"] for pool in live for one in self.card.memory_snapshot(pool, include_traces=False))


def test_smaller_graphs_take_the_memory_of_the_largest_whatever_came_first() -> None:
    model, alone = Model(), Model()
    assert alone.run(16, times=4) == 0
    for rows in (2, 4):
        model.run(rows, times=4)
    assert model.run(16, times=4) == 0
    assert [len(graph.calls) > 0 for graph in model.card.graphs()] == [True]  # the others ended
    for rows in (2, 4):
        assert model.run(rows) == 1  # and are captured again when they are due
        assert model.run(rows, times=3) == 0
    assert model.run(16) == 0
    assert len({graph.pool for graph in model.card.graphs()}) == 1
    assert model.pool_bytes == alone.pool_bytes


def test_weights_that_moved_end_their_graphs() -> None:
    model = Model()
    assert model.run(3, times=4) == 0
    for part in (model.layers[0], model.layers[2]):
        part.weight = nn.Parameter(torch.randn_like(part.weight), requires_grad=False)
        assert model.run(3) == 1
        assert model.run(3, times=4) == 0


def test_blocks_that_come_one_by_one_stay_in_the_module(caplog: pytest.LogCaptureFixture) -> None:
    class Streamed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, self[0].weight = self[0].weight, nn.Parameter(real, requires_grad=False)
            found = super().forward(x)
            self[0].weight = weight
            return found

    caplog.set_level(logging.INFO, "deployments.engines.graph.replay")
    real = torch.randn(8, 8)
    model = Model(layers=Streamed(nn.Linear(8, 8, device="meta", bias=False)))
    assert model.run(3, times=4) == 1
    assert "weights are elsewhere, or come block by block: on meta" in caplog.text
    assert not model.card.pools


def scaled_by_sum(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def masked(x: torch.Tensor) -> torch.Tensor:
    return x[x.isfinite()].view_as(x) * 2


def scaled_by_number(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(2.0)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (scaled_by_sum, "aten._local_scalar_dense.default tells the host"),
        (masked, "aten.index.Tensor tells the host"),
        (scaled_by_number, "aten.lift_fresh.default copies numbers of Python"),
    ],
)
def test_what_waits_for_the_host_is_never_captured(
    forward: Callable[[torch.Tensor], torch.Tensor], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deployments.engines.graph.replay")

    class Layers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(x)

    model = Model(layers=Layers())
    assert model.run(3, times=4) == 1
    assert caplog.text.count(reason) == 1
    assert not model.card.pools


def test_a_capture_that_fails_leaves_all_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    """The watch knows nothing of this kernel."""
    caplog.set_level(logging.INFO, "deployments.engines.graph.replay")
    model = Model("aten.gelu.default")
    assert model.run(3, times=5) == 1
    assert "not permitted when stream is capturing" in caplog.text
    assert not model.card.graphs()


def test_what_a_forward_reads_beside_its_weights_is_kept() -> None:
    class Scaled(nn.Module):
        factor = torch.full((8,), 3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    model = Model(layers=Scaled())
    assert model.run(3, times=4) == 0
    Scaled.factor = Scaled.factor.clone()  # a cache that was made anew: the graph reads what was there
    assert model.run(3) == 0


@pytest.mark.parametrize("room", ["beside the budget", "of a graph's own bound"])
def test_a_pool_counts_in_the_books_of_the_device(room: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deployments.engines.graph.replay")
    needed = Model()
    needed.run(16, times=4)
    memory = DeviceArena("cpu-private", 1000).forwards
    memory._beside_bytes = 2.0 * needed.pool_bytes
    model = Model(workspace=Workspace(memory, {}), max_bytes=2 * needed.pool_bytes)
    assert model.run(16, times=4) == 0
    assert memory.beside_bytes == needed.pool_bytes
    model.layers[0].weight = nn.Parameter(torch.randn(64, 8), requires_grad=False)
    model.run(64, times=4)  # too much: its pool and those of the others are gone
    assert memory.beside_bytes == 2 * needed.pool_bytes
    assert not model.card.graphs()
    if room == "beside the budget":
        with memory.lend(int(1.5 * needed.pool_bytes)):
            assert model.run(16, times=4) == 1
        assert "are not free beside the budget of cpu" in caplog.text
    else:
        assert f"and {2 * needed.pool_bytes} are the most" in caplog.text
    assert memory.beside_bytes == 2 * needed.pool_bytes


def test_what_a_pool_grows_by_is_counted_beside_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card's pool has gaps, which here are 100 bytes for each graph."""
    memory = DeviceArena("cpu-private", 1000).forwards
    memory._beside_bytes = 100_000.0
    model = Model(workspace=Workspace(memory, {}))
    plain = model.card.memory_snapshot

    def with_gaps(pool: Any, include_traces: bool) -> list[dict[str, int]]:
        return [*plain(pool, include_traces), {"total_size": 100 * len(model.card.graphs())}]

    monkeypatch.setattr(model.card, "memory_snapshot", with_gaps)
    for number, rows in enumerate((16, 4, 2), 1):
        assert model.run(rows, times=4) == 0
        assert len(model.card.graphs()) == number
        assert memory.beside_bytes == 100_000 - model.pool_bytes


def test_a_device_has_the_replays_that_fit_it() -> None:
    replays, module = Replays(), nn.Linear(2, 2)
    assert replays_on(None, HOST, module) is None
    assert replays_on(replays, HOST, module) is replays
    assert replays_on(replays, torch.device("meta"), module) is None
    found = replays_on(Replays(is_checked=True), torch.device("cuda", 0), module)
    assert found is not None
    assert found.is_checked
    assert isinstance(found.binder, CardGraphs)


def test_torchs_own_takes_the_calls_that_the_double_takes() -> None:
    inspect.signature(torch.cuda.graph).bind(None, pool=None, stream=None, capture_error_mode="thread_local")
    inspect.signature(torch.cuda.memory_snapshot).bind((0, 1), include_traces=False)
    for name in ("graph_pool_handle", "current_stream", "stream"):
        inspect.signature(getattr(torch.cuda, name)).bind(*[HOST] * (name != "graph_pool_handle"))
    for cls, names in ((torch.cuda.CUDAGraph, ("replay", "reset", "pool")), (torch.cuda.Stream, ("wait_stream",))):
        assert all(callable(getattr(cls, name)) for name in names)
