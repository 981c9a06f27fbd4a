"""Forwards that ran before, run again: recorded calls over memory that was planned ahead, bound once to their tensors.

A small model's step is a thousand calls, half of which make views. With fixed addresses a view is made once, a result
goes to its place, and nothing of the module's own Python runs. The bits are the same: before a recording is used, it
has run beside the module on other inputs than it was made of, and what then differs is never used.

HAZARD: a recording knows the operations of torch alone. What else a forward depends on has to be in its key, and a
kernel that is no operation of torch, or a number that was read from an input, ends in a refusal.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch

from deployments.engines.graph.recording import Call, Listener, Node, Recorder, Recording, Slot, record, tensors_in
from deployments.engines.native.operations import joined
from weights.memory.lifetimes import place
from weights.platform.torch_seam import is_written_to, out_form
from weights.residency.recent import Recent

MIN_FORWARDS: Final = 16  # equal ones, before one is recorded: to record and to try costs as much as some five
MAX_RECORDINGS: Final = 16  # of a model
MAX_KEYS: Final = 256  # whose forwards are counted
MAX_BYTES: Final = 64 * 2**20  # of all that a forward makes: where it is more, kernels take the time, not calls
MAX_LASTING_BYTES: Final = 64 * 2**20  # of the copies of adapters that all recordings of a model have
_MAKES_NOTHING: Final = ("aten.empty.", "aten.new_empty.", "aten.empty_like.", "aten.empty_strided.")
_OF_SHAPES: Final = tuple(  # of a tensor they take the shape alone
    f"aten.{name}." for name in ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
)

Inputs = Sequence[torch.Tensor]
Forward = Callable[[Inputs], torch.Tensor]
logger = logging.getLogger(__name__)


class NotReplayable(Exception):
    """A recording that would not give what the forward gives, and why."""


class BoundForward(Protocol):
    """A forward that can be run again without the module. One thread at a time."""

    @property
    def is_current(self) -> bool:
        """Return whether it would run, and over the weights that the module has now."""

    def run(self, inputs: Inputs, lasting: Inputs = ()) -> torch.Tensor:
        """Return the result for other inputs of the same shapes and dtypes."""


class Binder(Protocol):
    """Binds forwards, so that they are run again: to recorded calls on the host, to a graph on a card."""

    def bind(
        self, inputs: Inputs, forward: Forward, lasting: Inputs = (), owners: Sequence[Any] = ()
    ) -> tuple[BoundForward, torch.Tensor]:
        """Return `forward` of inputs and lasting ones bound, and its result for these. `owners` are as for `Replays`.

        Raises NotReplayable for one that cannot be, and what `forward` raises.
        """


class OwnInputs:
    """The tensors that a bound forward reads: copies of what it is given. Lasting ones are copied when others come."""

    def __init__(self, inputs: Inputs, lasting: Inputs = ()) -> None:
        self._changing = [one.clone() for one in inputs]
        self._lasting = [one.clone() for one in lasting]
        self._copied = [weakref.ref(one) for one in lasting]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return all of them, the lasting ones last."""
        return self._changing + self._lasting

    def fill(self, inputs: Inputs, lasting: Inputs) -> None:
        """Take other values, of the same shapes and dtypes."""
        for own, given in zip(self._changing, inputs, strict=True):
            own.copy_(given)
        for number, (own, given) in enumerate(zip(self._lasting, lasting, strict=True)):
            if self._copied[number]() is not given:
                own.copy_(given)
                self._copied[number] = weakref.ref(given)


@dataclass(slots=True)
class BoundCalls:
    """The calls of a recording, bound to tensors over a workspace.

    `inputs` have the tensors that they read, `result` is what they leave; it is overwritten by whoever uses the
    workspace next.
    """

    inputs: OwnInputs
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
    result: torch.Tensor
    is_current: bool = True  # a weight stays where it is for as long as a call is bound to it

    def run(self, inputs: Inputs, lasting: Inputs = ()) -> torch.Tensor:
        """Return the result for other inputs of the same shapes and dtypes."""
        self.inputs.fill(inputs, lasting)
        for call, args, kwargs in self.calls:
            call(*args, **kwargs)
        return self.result.clone()


def _check_inputs(recording: Recording, inputs: Inputs) -> None:
    """Check that no call gave a number, or a shape, that depends on values of the inputs.

    Such a one has become a constant of the calls behind it. Raises NotReplayable, naming the call.
    """
    storages = {id(one.untyped_storage()) for one in inputs}
    given = {number for number, storage in enumerate(recording.given) if id(storage) in storages}
    dependent: set[int] = set()

    def depends(slot: Slot) -> bool:
        return slot.number in (given if slot.is_given else dependent)

    for node in recording.nodes:
        assert node.call is not None
        if node.op.startswith(_OF_SHAPES + _MAKES_NOTHING) or not any(
            depends(slot) for slot in _slots((node.call.args, node.call.kwargs))
        ):
            continue
        if not _is_of_tensors(node.call.results):
            raise NotReplayable(f"{node.op} in {node.layer or 'the forward'} reads a number from an input")
        if any(map(depends, _shaping(node.call))):
            raise NotReplayable(f"the shape that {node.op} in {node.layer or 'the forward'} gives depends on an input")
        written = [*_slots(node.call.results)]
        if is_written_to(node.call.op):
            written += _slots(node.call.args[:1])
        for slot in written:
            (given if slot.is_given else dependent).add(slot.number)


def _bind_calls(
    recording: Recording, inputs: OwnInputs, result: torch.Tensor, workspace: torch.UntypedStorage
) -> BoundCalls:
    """Return the calls of a recording that gave `result` of `inputs`, over the workspace, which grows if it must.

    Raises NotReplayable.
    """
    _check_inputs(recording, inputs.tensors)
    plan = place(recording.lifetimes())
    if workspace.nbytes() < plan.nbytes:
        workspace.resize_(plan.nbytes)  # the tensors that are bound to it follow
    bound: dict[Slot, torch.Tensor] = {}

    def tensor(slot: Slot) -> torch.Tensor:
        if slot not in bound:
            start = 0 if slot.is_given else plan.offsets[slot.number]
            storage = recording.given[slot.number] if slot.is_given else workspace
            offset = start // slot.dtype.itemsize + slot.offset
            bound[slot] = torch.empty(0, dtype=slot.dtype).set_(storage, offset, slot.size, slot.stride)
        return bound[slot]

    calls = joined((call for node in recording.nodes for call in _calls_of(node, tensor)), workspace)
    return BoundCalls(inputs, calls, tensor(_result_slot(recording, result)))


@dataclass(slots=True)
class HostCalls:
    """Binds forwards on the host to the memory of one workspace. One thread at a time.

    Those that make more than `max_bytes` are not bound.
    """

    max_bytes: int = MAX_BYTES
    workspace: torch.UntypedStorage = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8).untyped_storage())

    def bind(
        self, inputs: Inputs, forward: Forward, lasting: Inputs = (), owners: Sequence[Any] = ()
    ) -> tuple[BoundForward, torch.Tensor]:
        """Return `forward` bound, and its result for these inputs. Raises NotReplayable, and what `forward` raises."""
        own = OwnInputs(inputs, lasting)
        recorder = Recorder(inputs[0].device, keeps_calls=True, max_bytes=self.max_bytes)
        results: list[torch.Tensor] = []

        def run() -> list[torch.Tensor]:
            results.append(forward(own.tensors))
            return results

        with Listener(recorder):
            recording = record(run, recorder, {})
        return _bind_calls(recording, own, results[0], self.workspace), results[0]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Counted:
    """The forwards of a key: their number, then the bound one, which is used once it `is_tried`.

    That has copies of `lasting_bytes`; `ends` hear of the end of those over whose weights it is bound.
    """

    count: int = 0
    bound: BoundForward | None = None
    is_tried: bool = False
    is_refused: bool = False
    lasting_bytes: int = 0
    ends: Sequence[weakref.ref[Any]] = ()

    def unbind(self, count: int = 0) -> None:
        """Let the bound forward go; so many are counted anew."""
        self.bound, self.is_tried, self.count, self.lasting_bytes, self.ends = None, False, count, 0, ()


@dataclass(slots=True)
class Replays:
    """The forwards of one module that are replayed. One thread at a time.

    `is_checked`: each replay runs beside the module, and a difference is an error.
    """

    is_checked: bool = False
    min_forwards: int = MIN_FORWARDS
    binder: Binder = field(default_factory=HostCalls)
    max_lasting_bytes: int = MAX_LASTING_BYTES
    _known: Recent[Hashable, _Counted] = field(default_factory=lambda: Recent(MAX_KEYS))

    def run(
        self, key: Hashable, inputs: Inputs, forward: Forward, lasting: Inputs = (), owners: Sequence[Any] = ()
    ) -> torch.Tensor:
        """Return `forward` of inputs and lasting ones, or the same bits of a replay.

        `lasting` are tensors whose values stay, so that those of an adapter are copied once and not in each step.
        `owners` are others than the module whose weights the forward reads: a recording goes when one of them does.
        `forward` may depend on what `key` names, on the inputs, and on nothing else; on weights that stay where they
        are. Raises what `forward` raises, and AssertionError where a checked replay differs.
        """
        known = self._known.used((key, tuple(map(weakref.ref, owners))), _Counted)
        known.count += 1
        if known.bound is not None and not known.bound.is_current:
            known.unbind(count=1)
        if known.is_refused or known.count < self.min_forwards:
            return forward([*inputs, *lasting])
        if known.bound is None:
            return self._bind(known, inputs, forward, lasting, owners)
        if known.is_tried and not self.is_checked:
            return known.bound.run(inputs, lasting)
        return self._compare(known, known.bound, inputs, forward, lasting)

    def _bind(
        self, known: _Counted, inputs: Inputs, forward: Forward, lasting: Inputs, owners: Sequence[Any]
    ) -> torch.Tensor:
        try:
            known.lasting_bytes = sum(one.nbytes for one in lasting)
            if known.lasting_bytes > self.max_lasting_bytes:
                raise NotReplayable(f"copies of its adapters would be {known.lasting_bytes} bytes")
            known.bound, result = self.binder.bind(inputs, forward, lasting, owners)
        except (NotReplayable, RuntimeError) as error:
            logger.info("a forward is not replayed: %s", str(error))  # whose frames keep the memory of what was tried
            known.is_refused = True
        if known.bound is None:
            return forward([*inputs, *lasting])
        # In the thread that lets an owner go: a run of this forward keeps its owners.
        known.ends = [weakref.ref(one, partial(_unbind, weakref.ref(known))) for one in owners]
        self._bound_in_their_bounds()
        return result

    def _compare(
        self, known: _Counted, bound: BoundForward, inputs: Inputs, forward: Forward, lasting: Inputs
    ) -> torch.Tensor:
        result = forward([*inputs, *lasting])
        is_equal = _have_equal_bits(bound.run(inputs, lasting), result)
        if not is_equal and known.is_tried:
            raise AssertionError("a replayed forward differs from the module's own")
        if not is_equal:
            logger.warning("a recorded forward is not used: on other inputs it differs from the module's own")
            known.unbind()
            known.is_refused = True
        known.is_tried = True
        return result

    def _bound_in_their_bounds(self) -> None:
        count = num_bytes = 0
        for one in reversed([one for one in self._known.values() if one.bound is not None]):
            count, num_bytes = count + 1, num_bytes + one.lasting_bytes
            if count > MAX_RECORDINGS or num_bytes > self.max_lasting_bytes:  # the least recently used
                num_bytes -= one.lasting_bytes
                one.unbind()


def _unbind(known: weakref.ref[_Counted], _: Any) -> None:
    if (found := known()) is not None:
        found.unbind()


def _calls_of(
    node: Node, tensor: Callable[[Slot], torch.Tensor]
) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return the call that a node needs in a replay: none for a view, or for memory that others fill."""
    call = node.call
    assert call is not None
    args, kwargs = _bound(call.args, tensor), _bound(call.kwargs, tensor)
    if is_written_to(call.op):
        yield call.op, args, kwargs
    elif node.makes and not node.op.startswith(_MAKES_NOTHING):
        results = [tensor(slot) for slot in _slots(call.results)]
        form = out_form(call.op)
        if form is not None and len(form.outs) == len(results):
            kept = {name: value for name, value in kwargs.items() if name in form.takes}
            yield form.op, args, kept | dict(zip(form.outs, results, strict=True))
        else:
            yield _copying(call.op, results), args, kwargs


def _copying(op: Any, results: Sequence[torch.Tensor]) -> Callable[..., None]:
    """Return the operation with its results copied to their places, where it has no form that writes there."""

    def run(*args: Any, **kwargs: Any) -> None:
        for result, made in zip(results, tensors_in(op(*args, **kwargs)), strict=True):
            result.copy_(made)

    return run


def _result_slot(recording: Recording, result: torch.Tensor) -> Slot:
    """Return the slot of the forward's result: its last mention has its shape and place."""
    form = tuple(result.size()), result.stride(), int(result.storage_offset()), result.dtype
    outliving = {number for number, buffer in enumerate(recording.buffers) if buffer.died is None}
    for node in reversed(recording.nodes):
        assert node.call is not None
        for slot in _slots(node.call.results):
            found = slot.size, slot.stride, slot.offset, slot.dtype
            if found == form and slot.number in outliving and not slot.is_given:
                return slot
    raise NotReplayable("the result is not a tensor that the forward has made")


def _have_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results are the same, NaN and the sign of zero included."""
    flat = [found.contiguous().view(torch.uint8) for found in (one, other)]
    return torch.equal(*flat)


def _bound(value: Any, tensor: Callable[[Slot], torch.Tensor]) -> Any:
    if isinstance(value, Slot):
        return tensor(value)
    if isinstance(value, tuple):
        return tuple(_bound(one, tensor) for one in value)
    if isinstance(value, list):
        return [_bound(one, tensor) for one in value]
    if isinstance(value, dict):
        return {key: _bound(one, tensor) for key, one in value.items()}
    return value


def _shaping(call: Call) -> Iterator[Slot]:
    """Return the tensors whose values say which shape the result of a call has: of indices, those that are masks."""
    if torch.Tag.dynamic_output_shape not in call.op.tags:
        return iter(())
    if call.op.name().startswith("aten::index"):
        return (slot for slot in _slots(call.args[1:]) if slot.dtype in (torch.bool, torch.uint8))
    return _slots((call.args, call.kwargs))


def _slots(value: Any) -> Iterator[Slot]:
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _slots(one)
    elif isinstance(value, dict):
        yield from _slots(list(value.values()))


def _is_of_tensors(results: Any) -> bool:
    if isinstance(results, tuple | list):
        return all(map(_is_of_tensors, results))
    return results is None or isinstance(results, Slot)
