"""Kernels of the simulated devices: views as torch makes them, and everything else by the host's own kernels.

One kernel does nearly all: it lays host tensors over the arguments, checks that all are on one device, lets the host
compute, and gives the results to the device. Results are those of the host, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from infra.sim.memory import HOST, DeviceMemory, adopt, block_of, host_alias, lay_over, storage_over, tensor_over
from weights.platform.torch_seam import below_autograd, has_kernel, op_names, schema_of

# These look at sizes only, so the host's kernel makes the view; aliasing and in-place on views are then torch's own.
_VIEWS: Final = (
    "as_strided",
    "view",
    "view.dtype",
    "_reshape_alias",
    "unfold",
    "view_as_real",
    "view_as_complex",
    "set_.source_Storage_storage_offset",
    "set_.source_Storage",
    "set_.source_Tensor",
)
# torch chooses among these by the type of the device before it asks for a kernel.
_CHOSEN_BY_DEVICE: Final = (
    "mkldnn_convolution",
    "convolution",
    "convolution_overrideable",
    "scaled_dot_product_attention",
    "lstm.input",
    "gru.input",
)
# As on CUDA, indices may be the host's; and of any op, numbers in a tensor of no dimension that is only read.
_TAKES_HOST_INDICES: Final = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")
_COMPOSITES: Final = (
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)

_TENSOR_TYPES: Final = ("Tensor", "Optional[Tensor]")
_Op = Any  # torch._ops.OpOverload


class SimulatedKernels:
    """The kernels of the simulated devices of this process, by which `memories` are filled."""

    def __init__(
        self, memories: Sequence[DeviceMemory], unsupported_ops: frozenset[str], host_ops: frozenset[str]
    ) -> None:
        self._memories = memories
        self._unsupported_ops = unsupported_ops
        self._host_ops = host_ops
        self._plans: dict[_Op, _Plan] = {}
        self._libraries: list[Any] = []

    def register(self) -> None:
        """Give torch these kernels, for the life of the process."""
        make_library: Any = torch.library.Library
        fallback = make_library("_", "IMPL")
        fallback.fallback(self._compute, "PrivateUse1")
        aten = make_library("aten", "IMPL")
        self._libraries = [fallback, aten]
        own: dict[str, Callable[..., Any]] = {
            "empty.memory_format": self._empty,
            "empty_strided": self._empty_strided,
            "_copy_from": self._copy_from,
            "_copy_from_and_resize": self._copy_from,
            "_local_scalar_dense": self._read_number,
            "resize_": self._resize,
        }
        own |= {name: partial(_view, _op(name)) for name in _VIEWS}
        # Else torch takes these apart before they come here: two steps instead of one, and another rounding.
        own |= {
            name: partial(self._compute, _op(name)) for name in [*_CHOSEN_BY_DEVICE, *_taken_apart()] if name not in own
        }
        for name, kernel in own.items():
            aten.impl(name, kernel, "PrivateUse1")
        for key in ("Conjugate", "Negative"):  # else a copy of what is lazily conjugated never ends
            aten.impl("_copy_from", torch.library.fallthrough_kernel, key)

    def empty_storage(self, device: torch.device, nbytes: int) -> torch.UntypedStorage:
        """Return memory of a device, with any content. Raises OutOfMemoryError."""
        return storage_over(self._memory(device), torch.empty(nbytes, dtype=torch.uint8).untyped_storage())

    def _memory(self, device: torch.device | None) -> DeviceMemory:
        index = (device.index if device is not None else None) or 0
        if index >= len(self._memories):
            raise RuntimeError(f"no device sim:{index}: {len(self._memories)} simulated devices here")
        return self._memories[index]

    def _empty(
        self,
        size: Sequence[int],
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        options: dict[str, Any] = {} if memory_format is None else {"memory_format": memory_format}
        _check_options(layout, pin_memory)
        return adopt(self._memory(device), torch.empty(size, dtype=dtype, device="cpu", **options))

    def _empty_strided(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> torch.Tensor:
        _check_options(layout, pin_memory)
        return adopt(self._memory(device), torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    def _copy_from(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        with below_autograd():
            hosts = [host_alias(side) if side.device.type == "sim" else side for side in (source, target)]
            begin_s = time.thread_time()
            hosts[1].copy_(hosts[0])
            copy_s = time.thread_time() - begin_s
            if source.device != target.device:
                if target.device.type == "sim":
                    self._memory(target.device).count_transfer(source.nbytes, is_upload=True, copy_s=copy_s)
                if source.device.type == "sim":
                    self._memory(source.device).count_transfer(source.nbytes, is_upload=False, copy_s=copy_s)
        return target

    def _read_number(self, tensor: torch.Tensor) -> Any:
        self._memory(tensor.device).count_transfer(tensor.element_size(), is_upload=False)
        with below_autograd():
            return host_alias(tensor).item()

    def _resize(self, tensor: torch.Tensor, size: Sequence[int], memory_format: Any = None) -> torch.Tensor:
        with below_autograd():
            self._follow_resized(tensor, torch.empty(size, dtype=tensor.dtype, device="meta"))
        return tensor

    def _follow_resized(self, tensor: torch.Tensor, like: torch.Tensor) -> None:
        """Give `tensor` the size and stride of `like`, in memory of its own when it needs more."""
        storage = tensor.untyped_storage()
        last = sum((size - 1) * stride for size, stride in zip(like.size(), like.stride(), strict=True))
        needed_bytes = (like.storage_offset() + last + 1) * like.element_size() if like.numel() else 0
        if needed_bytes > storage.nbytes():
            held = block_of(tensor).storage
            if held.nbytes() < needed_bytes:
                grown = torch.empty(needed_bytes, dtype=torch.uint8)
                grown[: storage.nbytes()] = block_of(tensor).typed(torch.uint8)
                held = grown.untyped_storage()
            storage = storage_over(self._memory(tensor.device), held)
        lay_over(tensor, storage, like)

    def _compute(self, op: _Op, *args: Any, **kwargs: Any) -> Any:
        plan = self._plans.get(op)
        if plan is None:
            plan = self._plans[op] = _Plan.of(op, self._unsupported_ops, self._host_ops)
        if not plan.is_supported:
            raise NotImplementedError(f"Could not run '{plan.name}': this simulated device was told not to support it")
        with below_autograd():
            call = _Call(plan)
            host_args = [call.on_host(arg) for arg in args]
            host_kwargs = {key: call.on_host(value) for key, value in kwargs.items()}
            call.check_written(args, kwargs)
            memory = self._memory(call.device)
            run = op
            for at in plan.tensor_places:
                # A number that was wrapped in a tensor comes here as a number, which another overload takes.
                if at < len(host_args) and isinstance(host_args[at], (bool, int, float, complex)):
                    run = op.overloadpacket
                    break
            begin_s = time.thread_time()
            result = run(*host_args, **host_kwargs)
            memory.count_kernel(time.thread_time() - begin_s)
            if plan.is_of_host:
                self._count_host_op(memory, call, result)
            for host, tensor in call.laid.values():
                if host.size() != tensor.size() or host.stride() != tensor.stride():  # an `out` that did not fit
                    self._follow_resized(tensor, host)
            return call.on_device(memory, result)

    def _count_host_op(self, memory: DeviceMemory, call: _Call, result: Any) -> None:
        """Count what a device without this op would copy: its arguments to the host, its results back."""
        memory.count_transfer(sum(host.nbytes for host, _ in call.laid.values()), is_upload=False)
        results = result if isinstance(result, (tuple, list)) else [result]
        memory.count_transfer(sum(one.nbytes for one in results if isinstance(one, torch.Tensor)), is_upload=True)


@dataclass(frozen=True, slots=True)
class _Plan:
    """All that is to be known of an op before a call of it."""

    name: str
    tensor_places: tuple[int, ...]
    written: tuple[tuple[int, str], ...]  # by place and by name
    takes_host_indices: bool
    is_supported: bool
    is_of_host: bool

    @classmethod
    def of(cls, op: _Op, unsupported_ops: frozenset[str], host_ops: frozenset[str]) -> _Plan:
        schema = schema_of(op)
        names = {schema.name, f"{schema.name}.{schema.overload_name}"}
        arguments = list(enumerate(schema.arguments))
        return cls(
            name=f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name,
            tensor_places=tuple(at for at, argument in arguments if str(argument.type) in _TENSOR_TYPES),
            written=tuple((at, one.name) for at, one in arguments if one.alias_info and one.alias_info.is_write),
            takes_host_indices=schema.name in _TAKES_HOST_INDICES,
            is_supported=not names & unsupported_ops,
            is_of_host=bool(names & host_ops),
        )


class _Call:
    """One call of an op: the host tensors that were laid over its arguments."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self.device: torch.device | None = None
        self.laid: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_host(self, value: Any, is_index: bool = False) -> Any:
        """Return an argument as the host's kernel takes it. Raises RuntimeError for one of another device."""
        if isinstance(value, torch.Tensor):
            device = value.device
            if device.type == "sim":
                self._note(device)
                host = host_alias(value)
                self.laid[id(host)] = (host, value)
                return host
            if device.type == "cpu" and (value.dim() == 0 or is_index):
                return value
            raise self._mixed(device)
        if isinstance(value, (list, tuple)):
            return [self.on_host(one, self._plan.takes_host_indices) for one in value]
        if isinstance(value, torch.device) and value.type == "sim":
            self._note(torch.device("sim", value.index or 0))
            return torch.device("cpu")
        return value

    def check_written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise RuntimeError when an argument that the op writes into is the host's."""
        for at, name in self._plan.written:
            target = args[at] if at < len(args) else kwargs.get(name)
            if isinstance(target, torch.Tensor) and target.device.type != "sim":
                raise self._mixed(target.device)

    def on_device(self, memory: DeviceMemory, result: Any) -> Any:
        """Return a result as a tensor of the device: an argument that was written, a view of one, or a new one."""
        if isinstance(result, (list, tuple)):
            return type(result)(self.on_device(memory, one) for one in result)
        if not isinstance(result, torch.Tensor):
            return result
        if known := self.laid.get(id(result)):
            return known[1]
        address = result.untyped_storage().data_ptr()
        for host, tensor in self.laid.values():
            if address and host.untyped_storage().data_ptr() == address:
                return tensor_over(memory, tensor.untyped_storage(), result)
        return adopt(memory, result)

    def _note(self, device: torch.device) -> None:
        if self.device is None:
            self.device = device
        elif device != self.device:
            raise self._mixed(device)

    def _mixed(self, other: torch.device) -> RuntimeError:
        return RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{self.device or 'sim'} and {other}! ({self._plan.name})"
        )


def _view(op: _Op, *args: Any, **kwargs: Any) -> Any:
    return op.redispatch(HOST, *args, **kwargs)


def _op(name: str) -> _Op:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _taken_apart() -> list[str]:
    """Return the ops that have a kernel of the host and one that is made of other ops."""
    names = [name for name in op_names() if name.startswith("aten::") and has_kernel(name, "CPU")]
    return [name.removeprefix("aten::") for name in names if any(has_kernel(name, key) for key in _COMPOSITES)]


def _check_options(layout: Any, pin_memory: bool | None) -> None:
    if layout not in (None, torch.strided):
        raise RuntimeError(f"the simulated device has only strided tensors, not {layout}")
    if pin_memory:
        raise RuntimeError("only host memory can be pinned, not that of a simulated device")
