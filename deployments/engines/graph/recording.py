"""Recordings of forwards: the operations in the order in which they ran, and the buffers that they made.

A recording is the graph of a forward. It is topological by construction, and each architecture builds it by running.
On fake tensors it takes neither weights nor a device: it has the sizes of buffers, when each is born and let go, and so
the peak of the same forward on the device. Of a real call, `keeps_calls` keeps what is needed to run it again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weights.memory.devices import allocated_bytes, with_index
from weights.memory.lifetimes import Lifetime
from weights.platform.torch_seam import (
    UNSAFE_VIEW,
    DispatchMode,
    buffers_of,
    fake_blank,
    fake_mode,
    fake_view,
    is_fake,
    is_kernel_of_views,
    parameters_of,
)

MAX_NODES: Final = 200_000  # of one recording
_ATEN: Final[Any] = torch.ops.aten
# What gives the values of a tensor to Python, or to a kernel of others, by no operation.
_TELLERS: Final = frozenset(
    getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr")
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Buffer:
    """Memory that an operation of the forward made. Positions are those of nodes.

    It is `born` with a node, some node is the `last` to use it, and the forward lets go of it before node `died`: None
    for what outlives the forward.
    """

    nbytes: int
    born: int
    last: int
    died: int | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a kept call: over the memory of a buffer, or of a tensor that came from outside (`given`)."""

    number: int
    is_given: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Call:
    """An operation as it was called; `Slot`s stand for tensors, also in `results`."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Any


@dataclass(frozen=True, slots=True)
class Node:
    """An operation: its name, the layer that called it, and the buffers (by number) that it read and made.

    One that makes nothing writes in place, or gives a view. `given` are the storages from outside that it read.
    """

    op: str
    layer: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    given: tuple[int, ...] = ()
    call: Call | None = None


@dataclass(slots=True)
class Recording:
    """Nodes in the order in which they ran, and buffers in that in which they were born.

    `given` are the storages from outside that were read: weights (whose numbers are in `weights`), inputs, constants.
    They are known of fake tensors, and where calls or they are kept.
    """

    nodes: list[Node] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    given: list[torch.UntypedStorage] = field(default_factory=list)
    weights: frozenset[int] = frozenset()

    def eager_peak(self) -> int:
        """Return the most bytes that the forward held at once, as Python let go of them."""
        peak = held = 0
        deaths: dict[int, int] = {}
        for buffer in self.buffers:
            if buffer.died is not None:
                deaths[buffer.died] = deaths.get(buffer.died, 0) + buffer.nbytes
        buffers = iter(self.buffers)
        following = next(buffers, None)
        for at in range(len(self.nodes)):
            held -= deaths.get(at, 0)
            while following is not None and following.born == at:
                held += following.nbytes
                following = next(buffers, None)
            peak = max(peak, held)
        return peak

    def lifetimes(self) -> list[Lifetime[int]]:
        """Return when each buffer has to be there: from its birth to its last use, or to the end if it outlives."""
        end = len(self.nodes) - 1
        return [
            Lifetime(number, buffer.nbytes, buffer.born, end if buffer.died is None else buffer.last)
            for number, buffer in enumerate(self.buffers)
        ]


class Recorder(DispatchMode):
    """Records what runs within it in this thread: on fake tensors (`is_fake`), or a real call.

    HAZARD: kernels that are no operations of torch (`engines/native`) leave no trace.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        is_fake: bool = False,
        keeps_calls: bool = False,
        keeps_given: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        """Buffers of other devices are left out. `keeps_calls` keeps tensors alive, so that no buffer dies.

        `keeps_given` keeps those alone that come from outside.
        A forward that makes more than `max_bytes` in all ends with a RuntimeError.
        """
        super().__init__()
        self._bytes_left = math.inf if max_bytes is None else max_bytes
        self.recording = Recording()
        self._device = with_index(device)
        self._is_fake = is_fake
        self._keeps_calls = keeps_calls
        self._knows_given = is_fake or keeps_calls or keeps_given  # to know one is to keep it
        self._numbers: dict[int, int] = {}  # of buffers, by the ids of their storages
        self._given: dict[int, int] = {}
        self._alive: dict[int, Any] = {}  # what hears of a storage's end, by the number of its buffer
        self._layers: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        run = _fake_form(func) if self._is_fake else func
        if func.namespace == "prim":  # a question about a tensor
            return run(*args, **kwargs)
        nodes, at = self.recording.nodes, len(self.recording.nodes)
        if at >= MAX_NODES:
            raise RuntimeError(f"a forward of more than {MAX_NODES} operations is not recorded")
        used = list(tensors_in((args, kwargs)))
        reads = {number for tensor in used if (number := self._number_of(tensor)) is not None}
        outside = (one for one in used if self._number_of(one) is None) if self._knows_given else ()
        given = {self._given_number(one.untyped_storage()) for one in outside}
        known = {id(tensor.untyped_storage()) for tensor in used}
        results = run(*args, **kwargs)
        makes = [self._note_birth(one, at) for one in tensors_in(results) if self._is_new(one, known)]
        for number in reads:
            self.recording.buffers[number].last = at
        call = self._call(func, args, kwargs, results) if self._keeps_calls else None
        layer = self._layers[-1] if self._layers else ""
        nodes.append(Node(str(func), layer, tuple(sorted(reads)), tuple(makes), tuple(sorted(given)), call))
        return results

    @contextlib.contextmanager
    def naming(self, module: nn.Module, name: str = "") -> Iterator[None]:
        """Call nodes by the parts of a module within the block. Nobody else may run the module meanwhile."""
        handles = []
        for path, part in module.named_modules(prefix=name):
            handles.append(part.register_forward_pre_hook(partial(self._enter, path)))
            handles.append(part.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def note_told(self, teller: str, tensor: torch.Tensor) -> None:
        """Note that the values of a tensor were told by a method that is no operation, as if `item` had told them."""
        number, at = self._number_of(tensor), len(self.recording.nodes)
        reads = () if number is None else (number,)
        for one in reads:
            self.recording.buffers[one].last = at
        call = self._call(_ATEN.item.default, (tensor,), {}, teller)
        layer = self._layers[-1] if self._layers else ""
        self.recording.nodes.append(Node(f"Tensor.{teller}", layer, reads, (), call=call))

    def end(self, results: Any) -> None:
        """Note that the forward has given `results`: what is let go of from here on outlives it."""
        self._alive.clear()
        if self._keeps_calls:  # nothing was let go of
            outlive = {self._number_of(tensor) for tensor in tensors_in(results)}
            for number, buffer in enumerate(self.recording.buffers):
                buffer.died = None if number in outlive else buffer.last + 1

    def _enter(self, path: str, module: nn.Module, inputs: Any) -> None:
        self._layers.append(path)

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._layers.pop()

    def _number_of(self, tensor: torch.Tensor) -> int | None:
        return self._numbers.get(id(tensor.untyped_storage()))

    def _is_new(self, tensor: torch.Tensor, known: set[int]) -> bool:
        identity = id(tensor.untyped_storage())
        return tensor.device == self._device and identity not in known and identity not in self._numbers

    def _note_birth(self, tensor: torch.Tensor, at: int) -> int:
        storage = tensor.untyped_storage()
        self._bytes_left -= storage.nbytes()
        if self._bytes_left < 0:
            raise RuntimeError("the forward makes too much to be recorded")
        buffers, number = self.recording.buffers, len(self.recording.buffers)
        buffers.append(Buffer(allocated_bytes(self._device, storage.nbytes()), at, at))
        self._numbers[id(storage)] = number
        # torch keeps the object of a storage as long as the memory itself.
        kept: Any = storage if self._keeps_calls else weakref.ref(storage, partial(self._note_death, id(storage)))
        self._alive[number] = kept
        return number

    def _note_death(self, identity: int, _: Any) -> None:
        number = self._numbers.pop(identity, None)
        if number is not None:
            self._alive.pop(number, None)
            self.recording.buffers[number].died = len(self.recording.nodes)

    def _given_number(self, storage: torch.UntypedStorage) -> int:
        number = self._given.setdefault(id(storage), len(self._given))
        if number == len(self.recording.given):
            self.recording.given.append(storage)
        return number

    def _call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> Call:
        return Call(op, self._slots(args), self._slots(kwargs), self._slots(results))

    def _slots(self, value: Any) -> Any:
        """Return a value with slots in the place of its tensors."""
        if isinstance(value, torch.Tensor):
            number, is_given = self._number_of(value), False
            if number is None:
                number, is_given = self._given_number(value.untyped_storage()), True
            offset = int(value.storage_offset())
            return Slot(number, is_given, tuple(value.size()), value.stride(), offset, value.dtype)
        if isinstance(value, tuple):
            return tuple(map(self._slots, value))
        if isinstance(value, list):
            return [self._slots(one) for one in value]
        if isinstance(value, dict):
            return {key: self._slots(one) for key, one in value.items()}
        return value


class Listener(TorchFunctionMode):
    """Notes in a recorder that keeps calls where a forward is told values of a tensor without an operation."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _TELLERS:
            self._recorder.note_told(func.__name__, args[0])
        return func(*args, **(kwargs or {}))


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, padding: Any, stride: Any, dilation: Any, groups: int
) -> torch.Tensor:
    if is_fake(x) and x.is_contiguous() and weight.is_contiguous():
        sides = zip(x.shape[2:], weight.shape[2:], padding, stride, dilation, strict=True)
        made_sides = ((side + 2 * pad - gap * (reach - 1) - 1) // step + 1 for side, reach, pad, step, gap in sides)
        return fake_blank(x, (len(x), len(weight), *made_sides))
    made: torch.Tensor = _ATEN.convolution.default(
        x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups
    )
    return made


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
    """Return the host kernel's result, with heads behind the tokens: a simulated device computes with that kernel."""
    made: torch.Tensor = _ATEN.scaled_dot_product_attention.default(query, key, value, *more, **options)
    is_fused = made.ndim == 4 and query.shape[-1] == value.shape[-1]
    return made.transpose(1, 2).contiguous().transpose(1, 2) if is_fused else made


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return fake_blank(a, (a.shape[0], b.shape[1])) if is_fake(a) else _ATEN.mm.default(a, b)


def _product_and_sum(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **factors: Any) -> torch.Tensor:
    return _product(a, b) if is_fake(a) else _ATEN.addmm.default(bias, a, b, **factors)


def _elementwise(op: Any, *given: Any, **options: Any) -> Any:
    """Return a tensor like the largest one, where the size, the type and the order of the result are beyond doubt."""
    tensors = [one for one in given if not isinstance(one, float | int | str)]
    if not all(is_fake(one) and one.is_contiguous() for one in tensors):
        return op(*given, **options)
    largest = max(tensors, key=lambda one: (one.numel(), one.ndim))
    is_plain = largest.is_floating_point() and all(_fits_into(one, largest) for one in tensors)
    return fake_blank(largest, largest.shape) if is_plain else op(*given, **options)


def _fits_into(other: torch.Tensor, largest: torch.Tensor) -> bool:
    shape = (1,) * (largest.ndim - other.ndim) + tuple(other.shape)
    is_alike = (other.dtype, other.device, len(shape)) == (largest.dtype, largest.device, largest.ndim)
    return is_alike and all(own in (1, full) for own, full in zip(shape, largest.shape, strict=True))


def _layer_norm(x: torch.Tensor, shape: Sequence[int], *more: Any) -> Any:
    if not _is_plain_float32(x):
        return _ATEN.native_layer_norm.default(x, shape, *more)
    of_rows = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
    return fake_blank(x, x.shape), fake_blank(x, of_rows), fake_blank(x, of_rows)


def _group_norm(x: torch.Tensor, weight: Any, bias: Any, rows: int, channels: int, *more: Any) -> Any:
    if not _is_plain_float32(x):
        return _ATEN.native_group_norm.default(x, weight, bias, rows, channels, *more)
    of_groups = rows, more[1]
    return fake_blank(x, x.shape), fake_blank(x, of_groups), fake_blank(x, of_groups)


def _is_plain_float32(x: torch.Tensor) -> bool:
    """Return whether a norm of a tensor is of its type: that of other types depends on the device."""
    return is_fake(x) and x.dtype == torch.float32 and x.is_contiguous()


def _clone(x: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
    is_plain = is_fake(x) and (x.is_contiguous() or memory_format == torch.contiguous_format)
    return fake_blank(x, x.shape) if is_plain else _ATEN.clone.default(x, memory_format=memory_format)


def _concatenation(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    first = tensors[0]
    kinds = {(one.ndim, one.dtype, one.device, is_fake(one), one.is_contiguous()) for one in tensors}
    if kinds != {(first.ndim, first.dtype, first.device, True, True)}:
        return cast("torch.Tensor", _ATEN.cat.default(tensors, dim))
    size = list(first.shape)
    size[dim] = sum(one.shape[dim] for one in tensors)
    return fake_blank(first, size)


_ELEMENTWISE: Final = (
    *(_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.pow.Tensor_Scalar),
    *(getattr(_ATEN, name).default for name in ("silu", "gelu", "neg", "rsqrt", "exp", "sin", "cos")),
)
# Operations that fake tensors have no rule for, one that lays out memory otherwise, or one that takes long.
_FAKE_FORMS: Final[Mapping[Any, Callable[..., Any]]] = {
    _ATEN.mkldnn_convolution.default: _convolution,
    _ATEN.scaled_dot_product_attention.default: _attention,
    _ATEN.mm.default: _product,
    _ATEN.addmm.default: _product_and_sum,
    UNSAFE_VIEW: partial(fake_view, UNSAFE_VIEW),
    torch.ops.prim.device.default: lambda tensor: tensor.device,
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.native_group_norm.default: _group_norm,
    _ATEN.clone.default: _clone,
    _ATEN.cat.default: _concatenation,
    **{op: partial(_elementwise, op) for op in _ELEMENTWISE},
}


@functools.cache
def _fake_form(op: Any) -> Callable[..., Any]:
    """Return the function that runs in the place of an operation on fake tensors."""
    if (form := _FAKE_FORMS.get(op)) is not None:
        return form
    return partial(fake_view, op) if is_kernel_of_views(op) else cast("Callable[..., Any]", op)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))


def fake_weights(module: nn.Module, mode: AbstractContextManager[Any], device: torch.device) -> None:
    """Put fake tensors on `device` in the place of a module's parameters and buffers, which may be on `meta`."""
    with mode:
        for part in module.modules():
            for table in (parameters_of(part), buffers_of(part)):
                fakes: dict[str, Any] = {
                    name: torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=device)
                    for name, one in table.items()
                    if one is not None
                }
                if table is parameters_of(part):
                    fakes = {name: nn.Parameter(one, requires_grad=False) for name, one in fakes.items()}
                table.update(fakes)


def fake_copy(module: nn.Module, mode: AbstractContextManager[Any], device: torch.device) -> nn.Module:
    """Return a copy of a module with fake tensors on `device`. Nobody may change the module meanwhile."""
    attributes = (one for part in module.modules() for one in vars(part).values() if isinstance(one, torch.Tensor))
    kept = (*module.parameters(), *module.buffers(), *attributes)  # a product of parameters, say, cannot be copied
    twin = copy.deepcopy(module, {id(one): one for one in kept})
    fake_weights(twin, mode, device)
    return twin


def record(
    run: Callable[[], Any],
    recorder: Recorder,
    modules: Mapping[str, nn.Module],
    mode: AbstractContextManager[Any] | None = None,
) -> Recording:
    """Return the recording of `run`, on fake tensors where their `mode` is given. `modules` name its nodes."""
    with contextlib.ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(recorder.naming(module, name))
        if mode is not None:
            stack.enter_context(mode)
        stack.enter_context(torch.no_grad())
        stack.enter_context(recorder)
        recorder.end(run())
    found = recorder.recording
    weights = [one for module in modules.values() for one in (*module.parameters(), *module.buffers())]
    storages = {id(one.untyped_storage()) for one in weights if not one.is_meta}
    found.weights = frozenset(number for number, one in enumerate(found.given) if id(one) in storages)
    return found


def planned_peak(module: nn.Module, run: Callable[[Any, torch.Tensor], Any], shape: Sequence[int]) -> int:
    """Return the most bytes that `run` of a module and a tensor of that shape and the weights' dtype holds at once.

    It gets a copy without weights, and computes nothing. 0 for what cannot be recorded, as the log says.
    """
    weight = next(module.parameters())
    try:
        mode = fake_mode()
        twin = fake_copy(module, mode, weight.device)
        with mode:
            given = torch.empty(*shape, dtype=weight.dtype, device=weight.device)
        return record(lambda: run(twin, given), Recorder(weight.device, is_fake=True), {}, mode).eager_peak()
    except Exception as error:  # of any operation of a model that fake tensors have no rule for
        logger.info("the memory of a %s is not planned: %s", type(module).__name__, error)
        return 0
