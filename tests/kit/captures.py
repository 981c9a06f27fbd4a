"""A double of the part of `torch.cuda` that captures graphs, over tensors of any device whose memory is the host's.

As of the real one: in a capture nothing is computed, results lie where every replay writes them, graphs of a pool
overwrite each other, the host may not wait, and a capture that fails leaves its stream the current one. A pool has
room for its graphs where the largest came first; else it grows by all that the larger one makes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from deployments.engines.graph.recording import tensors_in
from weights.platform.torch_seam import DispatchMode, is_written_to

MAIN = "the stream of the thread"


class Card:
    """`torch.cuda`, as far as graphs need it. Operations in `unfit` (`aten.mul.Tensor`) cannot be captured."""

    def __init__(self, *unfit: str) -> None:
        self.unfit = unfit
        self.current: Any = MAIN
        self.pools: dict[tuple[int, int], weakref.WeakSet[_Graph]] = {}
        self._pool_bytes: dict[tuple[int, int], int] = {}

    def Stream(self, device: Any) -> _Stream:
        return _Stream()

    def current_stream(self, device: Any) -> Any:
        return _Stream() if self.current is MAIN else self.current

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> tuple[int, int]:
        handle = (0, len(self.pools) + 1)
        self.pools[handle] = weakref.WeakSet()
        self._pool_bytes[handle] = 0
        return handle

    def CUDAGraph(self) -> _Graph:
        return _Graph(self)

    @contextlib.contextmanager
    def graph(self, graph: _Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"  # other threads upload weights meanwhile
        before, self.current = self.current, stream
        graph.pool = pool
        try:
            with _Capturing(graph, self.unfit):
                yield
        finally:
            if graph.is_broken:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.current = before
        made = sum(tensor.untyped_storage().nbytes() for tensor in graph.made())
        others = [sum(one.untyped_storage().nbytes() for one in other.made()) for other in self.pools[pool]]
        if made > max(others, default=0):
            self._pool_bytes[pool] += made
        self.pools[pool].add(graph)

    def memory_snapshot(self, mempool_id: Any, include_traces: bool) -> list[dict[str, int]]:
        nbytes = self._pool_bytes[mempool_id]
        return [{"total_size": nbytes - nbytes // 2}, {"total_size": nbytes // 2}]

    def graphs(self) -> list[_Graph]:
        """Return the captures that have not ended."""
        return [graph for graphs in self.pools.values() for graph in graphs]


class _Stream:
    def wait_stream(self, other: _Stream) -> None:
        assert isinstance(other, _Stream)


class _Graph:
    def __init__(self, card: Card) -> None:
        self.card = card
        self.pool: Any = None
        self.is_broken = False
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def made(self) -> list[torch.Tensor]:
        """Return the tensors that a replay fills."""
        return [one for op, args, kwargs, results in self.calls for one in _fresh(args, kwargs, results)]

    def replay(self) -> None:
        assert self.calls, "a graph that has ended"
        for op, args, kwargs, results in self.calls:
            found = op(*args, **kwargs)
            fresh = {id(one) for one in _fresh(args, kwargs, results)}
            for own, new in zip(tensors_in(results), tensors_in(found), strict=True):
                if id(own) in fresh:
                    own.copy_(new)
        for graph in self.card.pools[self.pool]:
            if graph is not self:
                _spoil(graph.made())

    def reset(self) -> None:
        self.calls = []
        self.card.pools[self.pool].discard(self)


class _Capturing(DispatchMode):
    def __init__(self, graph: _Graph, unfit: tuple[str, ...]) -> None:
        super().__init__()
        self._graph = graph
        self._unfit = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.nonzero.default", *unfit)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        places = {one.device for one in tensors_in((args, kwargs))} | {torch.device(kwargs.get("device") or "meta")}
        crosses = str(func).startswith(("aten._to_copy", "aten.copy_")) and len(places - {torch.device("meta")}) > 1
        if self._graph.is_broken or crosses or str(func) in self._unfit:
            self._graph.is_broken = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        results = func(*args, **kwargs)
        self._graph.calls.append((func, args, kwargs, results))
        if not is_written_to(func):
            _spoil(_fresh(args, kwargs, results))
        return results


def _fresh(args: Any, kwargs: Any, results: Any) -> list[torch.Tensor]:
    """Return the tensors of a call whose memory it has made."""
    read = {one.untyped_storage().data_ptr() for one in tensors_in((args, kwargs))}
    return [one for one in tensors_in(results) if one.untyped_storage().data_ptr() not in read]


def _spoil(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
