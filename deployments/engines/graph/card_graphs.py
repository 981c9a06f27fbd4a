"""Forwards that ran before, run again on a card: CUDA graphs, captured once over inputs that stay where they are.

A card's step is a thousand launches, and a small model's kernels end before Python has told the next. The graphs of a
module share one pool of memory, the largest first: what its forward let go holds those of the smaller ones. A larger
one that comes later ends the others and their pool, and they are captured again in its own when they are due.

Not run on a card yet: the tests have a double of `torch.cuda`.

HAZARD: one capture at a time in a process, in the thread that runs the module. Others may use the card meanwhile
(`thread_local`), but an allocation of theirs that fails just then fails for good: torch cannot empty its cache.
HAZARD: a capture that fails in the middle leaves torch's side stream the current one, and its generator believing that
it goes on. So a forward is watched first, and what would wait for the host is never captured.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from deployments.engines.graph.recording import Recorder, Recording, tensors_in
from deployments.engines.graph.replay import Forward, Inputs, NotReplayable, OwnInputs, Replays
from deployments.engines.graph.workspace import UNBOUNDED, Workspace
from weights.memory.devices import with_index
from weights.platform.torch_seam import buffers_of, parameters_of

MAX_POOL_BYTES: Final = 2**29  # of a module's graphs: where it is more, kernels take the time, not their launches
_WAITS: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_OF_INDICES: Final = ("aten.index.", "aten.index_put.", "aten.index_put_.", "aten._index_put_impl_.")
_OF_NUMBERS: Final = ("aten.lift_fresh", "aten.lift.")  # what torch.tensor ends with: its copy comes by no operation
_COPIES: Final = ("aten._to_copy.", "aten.copy_.", "aten.copy.")


def replays_on(
    replays: Replays | None, device: torch.device, module: nn.Module, workspace: Workspace = UNBOUNDED
) -> Replays | None:
    """Return the replays of a module as its device has them; None where it has none, as a simulated one."""
    if replays is None or device.type == "cpu":
        return replays
    if device.type != "cuda":
        return None
    return dataclasses.replace(replays, binder=CardGraphs(device, module, workspace))


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Pool:
    """The memory of several graphs, whose largest forward held `peak_bytes` when it ran.

    `marker` lives as long: by it the device's books know that this does.
    """

    handle: Any
    peak_bytes: int
    marker: torch.UntypedStorage = field(default_factory=lambda: torch.empty(1, dtype=torch.uint8).untyped_storage())
    nbytes: int = 0
    graphs: weakref.WeakSet[CapturedForward] = field(default_factory=weakref.WeakSet)


@dataclass(eq=False, slots=True, weakref_slot=True)
class CapturedForward:
    """A captured graph with its inputs and output. The pool's next replay overwrites the output.

    `kept` is the memory that it reads beside inputs and weights, `beside` are the modules whose weights it reads beside
    the owner's. `pool` is None once the graph has ended.
    """

    owner: CardGraphs
    inputs: OwnInputs
    graph: Any
    result: torch.Tensor
    kept: Sequence[torch.UntypedStorage]
    beside: Sequence[weakref.ref[nn.Module]]
    addresses: Sequence[int]
    pool: _Pool | None

    @property
    def is_current(self) -> bool:
        """Return whether it would run, and over the weights that the module has now."""
        return self.pool is not None and self.owner.addresses(_there(self.beside)) == self.addresses

    def run(self, inputs: Inputs, lasting: Inputs = ()) -> torch.Tensor:
        """Return the result for other inputs of the same shapes and dtypes."""
        self.inputs.fill(inputs, lasting)
        self.graph.replay()
        return self.result.clone()

    def end(self) -> None:
        """Let its memory go, whoever still knows it."""
        self.graph.reset()
        self.pool, self.inputs, self.kept = None, OwnInputs(()), ()
        self.result = torch.empty(0)


class CardGraphs:
    """The CUDA graphs of one module on one card. One thread at a time.

    Its pool counts as memory that the device's budget leaves free; where so much is not free there, nothing is
    captured. `cuda` is `torch.cuda`.
    """

    def __init__(
        self,
        device: torch.device,
        module: nn.Module,
        workspace: Workspace = UNBOUNDED,
        *,
        cuda: Any = torch.cuda,
        max_bytes: int = MAX_POOL_BYTES,
    ) -> None:
        self._device = with_index(device)
        self._tables = _tables_of(module)
        self._workspace = workspace
        self._cuda = cuda
        self._max_bytes = max_bytes
        self._stream: Any = None  # made by the thread that captures
        self._pool: _Pool | None = None

    def addresses(self, beside: Iterable[nn.Module] = ()) -> list[int]:
        """Return where the weights of the module, and of those beside it, are now."""
        return [tensor.data_ptr() for tensor in self._weights(beside)]

    def bind(
        self, inputs: Inputs, forward: Forward, lasting: Inputs = (), owners: Sequence[Any] = ()
    ) -> tuple[CapturedForward, torch.Tensor]:
        """Return a forward captured, and its result for these inputs.

        Raises NotReplayable, and what `forward` raises.
        """
        beside = [one for one in owners if isinstance(one, nn.Module)]
        if away := {str(tensor.device) for tensor in self._weights(beside)} - {str(self._device)}:
            raise NotReplayable(f"weights are elsewhere, or come block by block: on {', '.join(sorted(away))}")
        if self._stream is None:
            self._stream = self._cuda.Stream(self._device)
        own = OwnInputs(inputs, lasting)
        watch = _Watch(self._device)
        here = self._cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            # On the same stream, so that what a first call makes for it (cuBLAS's workspace, say) is not of the pool.
            with self._cuda.stream(self._stream), watch:
                found = forward(own.tensors)
        finally:
            here.wait_stream(self._stream)
        if watch.obstacle:
            raise NotReplayable(watch.obstacle)
        result = found.clone()
        del found
        return self._capture(own, forward, watch.recording, beside), result

    def _capture(
        self, own: OwnInputs, forward: Forward, watched: Recording, beside: Sequence[nn.Module]
    ) -> CapturedForward:
        addresses, pool = self.addresses(beside), self._pool_for(watched.eager_peak())
        graph = self._cuda.CUDAGraph()
        try:
            # The stream is put back here: where a capture fails, torch does not.
            with (
                self._cuda.stream(self._stream),
                self._cuda.graph(graph, pool=pool.handle, stream=self._stream, capture_error_mode="thread_local"),
            ):
                result = forward(own.tensors)
            self._count(pool)
        except BaseException as error:
            self._end(pool)
            if not isinstance(error, RuntimeError):
                raise
            # What broke a capture is raised within, and its end raises that it is broken.
            raise NotReplayable(f"its capture failed: {error.__context__ or error}") from None
        weights = {id(tensor.untyped_storage()) for tensor in self._weights(beside)}
        kept = [storage for storage in watched.given if id(storage) not in weights]
        others = [weakref.ref(one) for one in beside]
        captured = CapturedForward(self, own, graph, result, kept, others, addresses, pool)
        pool.graphs.add(captured)
        return captured

    def _pool_for(self, peak_bytes: int) -> _Pool:
        """Return the pool, a new one where the forward holds more than those before it."""
        if self._pool is not None and peak_bytes > self._pool.peak_bytes:
            self._end(self._pool)
        if self._pool is None:
            self._pool = _Pool(self._cuda.graph_pool_handle(), peak_bytes)
        return self._pool

    def _count(self, pool: _Pool) -> None:
        """Count what a pool has grown by. Raises NotReplayable where it is too much."""
        segments = self._cuda.memory_snapshot(pool.handle, include_traces=False)
        nbytes = sum(segment["total_size"] for segment in segments)
        if nbytes > self._max_bytes:
            raise NotReplayable(f"its memory would be {nbytes} bytes, and {self._max_bytes} are the most")
        if nbytes > pool.nbytes and not self._workspace.take_beside(pool.marker, nbytes - pool.nbytes):
            raise NotReplayable(f"{nbytes} bytes are not free beside the budget of {self._device}")
        pool.nbytes = nbytes

    def _end(self, pool: _Pool) -> None:
        """End a pool and its graphs: they are captured anew when they are due."""
        for captured in list(pool.graphs):
            captured.end()
        self._pool = None

    def _weights(self, beside: Iterable[nn.Module] = ()) -> Iterable[torch.Tensor]:
        tables = itertools.chain(self._tables, *map(_tables_of, beside))
        return (tensor for table in tables for tensor in table.values() if tensor is not None)


def _tables_of(module: nn.Module) -> list[dict[str, Any]]:
    return [table for part in module.modules() for table in (parameters_of(part), buffers_of(part))]


def _there(modules: Iterable[weakref.ref[nn.Module]]) -> Iterator[nn.Module]:
    return (found for one in modules if (found := one()) is not None)


class _Watch(Recorder):
    """Records a forward, and notes the first thing in it that no graph can hold."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, keeps_given=True)
        self.obstacle = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.obstacle:
            self.obstacle = self._obstacle(func, list(tensors_in((args, kwargs or {}))), list(tensors_in(results)))
        return results

    def _obstacle(self, op: Any, read: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> str:
        if not any(tensor.device == self._device for tensor in (*read, *results)):
            return ""  # the host's own, a constant
        name = str(op)
        masks = [one for one in read[1:] if one.dtype in (torch.bool, torch.uint8)]
        if masks if name.startswith(_OF_INDICES) else _WAITS.intersection(op.tags):
            return f"{name} tells the host what is on the card"
        if name.startswith(_OF_NUMBERS):
            return f"{name} copies numbers of Python to the card"
        # A single number of the host is part of a launch, as one of Python is.
        is_copy = name.startswith(_COPIES)
        away = [one for one in read if one.device != self._device and (one.ndim or is_copy)]
        away += [one for one in results if one.device != self._device]
        return f"{name} goes between the card and {away[0].device}" if away else ""
