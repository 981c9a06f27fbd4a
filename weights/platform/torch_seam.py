"""The only module of `weights` that uses private names of torch; `SHIMS` lists them by purpose.

`atelier doctor` prints what this torch lacks of them (`private_names.problems`).
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _python_dispatch

from weights.platform.private_names import Shim
from weights.records.errors import WeightsError

SHIMS: Final = (
    Shim(
        "modules: rebinding parameters and buffers",
        "no model is loaded",
        used=tuple(
            f"torch.nn:Module.{name}"
            for name in (
                *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
                *("_forward_hooks", "_forward_hooks_with_kwargs"),
            )
        ),
    ),
    Shim(
        "forward hooks that see keyword arguments",
        "no LoRA changes a pipeline that diffusers runs",
        used=("torch.nn:Module._forward_hooks_with_kwargs",),
        is_needed=False,
    ),
    Shim(
        "memory that several models share, for as long as one uses it",
        "no model is loaded on a device",
        used=("torch:UntypedStorage._new_with_weak_ptr",),
    ),
    Shim(
        "exported programs with other tensors",
        "no exported program is stored or loaded",
        changed={
            f"torch.export:ExportedProgram.{name}": "torch.export.exported_program"
            for name in ("_state_dict", "_constants", "_example_inputs")
        },
        is_needed=False,
    ),
    Shim(
        "exported programs compiled",
        "programs run as they are, not compiled",
        used=(
            "torch._inductor:aot_compile",
            "torch._inductor.package.package:package_aoti",
            "torch._C._aoti:AOTIModelPackageLoader.boxed_run",
        ),
        is_needed=False,
    ),
    Shim(
        "simulated devices",
        "device: sim does not start",
        changed={"torch:_has_compatible_shallow_copy_type": "torch.nn.modules.module"},
        used=(
            "torch.utils.backend_registration:_setup_privateuseone_for_python_backend",
            "torch._ops:OpOverload._schema",
            *(
                f"torch._C:{name}"
                for name in (
                    "DispatchKey",
                    "DispatchKeySet",
                    "TensorBase.data",
                    "_AutoDispatchBelowAutograd",
                    "_construct_storage_from_data_pointer",
                    "_dispatch_get_all_op_names",
                    "_dispatch_has_kernel_for_dispatch_key",
                    "_swap_tensor_impl",
                )
            ),
        ),
        is_needed=False,
    ),
    Shim(
        "recordings of forwards",
        "no forward is planned: batches keep to the bounds of the config",
        used=(
            *(f"torch._subclasses.fake_tensor:{name}" for name in ("FakeTensorMode", "in_kernel_invocation_manager")),
            *(f"torch.utils._python_dispatch:{name}" for name in ("TorchDispatchMode", "_disable_current_modes")),
            *(f"torch.ops:aten.{name}" for name in ("_unsafe_view", "_to_copy")),
        ),
        is_needed=False,
    ),
    Shim(
        "groups of processes with options of their own",
        "no model is computed by several ranks",
        used=(
            *(f"torch.distributed:ProcessGroupGloo.{name}" for name in ("_Options", "_Options._devices")),
            "torch._C._distributed_c10d:Backend.Options._timeout",
        ),
        is_needed=False,
    ),
)

UNSAFE_VIEW: Final[Any] = torch.ops.aten._unsafe_view.default  # a view that autograd takes for a copy
TO_COPY: Final[Any] = torch.ops.aten._to_copy.default  # what moves a tensor, or gives it another type
DispatchMode: Final[Any] = _python_dispatch.TorchDispatchMode
# Of simulated devices, which call it for every op. None where this torch has none: whoever asks is told so by SHIMS.
below_autograd: Final[Any] = getattr(torch._C, "_AutoDispatchBelowAutograd", None)  # a context manager


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the table of a module's own parameters: what is put into it is in the module."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the table of a module's own buffers: what is put into it is in the module."""
    return module._buffers


def forward_hooks_of(module: nn.Module) -> OrderedDict[Any, Callable[..., Any]]:
    """Return the table of the hooks that are called after a module's own forward, in its order; torch numbers its own.

    What is put into it is called as hooks are.
    """
    return cast("OrderedDict[Any, Callable[..., Any]]", module._forward_hooks)


def keyword_hooks_of(module: nn.Module) -> dict[Any, bool]:
    """Return the table of those of a module's hooks that are given its arguments by keyword as well, behind others."""
    return module._forward_hooks_with_kwargs


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of a module's own submodules."""
    return module._modules


def with_child(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """Return a module that has all that `module` has, the tensors as well, but for its submodule of that name."""
    changed = copy.copy(module)
    changed._modules = {**module._modules, name: child}
    return changed


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether a checkpoint of the module has the buffer."""
    return buffer not in module._non_persistent_buffers_set


_OF_THE_RESULT: Final = frozenset({"dtype", "layout", "device", "pin_memory"})  # a given tensor has its own


class OutForm(NamedTuple):
    """An operation that writes its results into tensors, which it is given by the names of `outs`.

    `takes` are the names of what it takes besides.
    """

    op: Any
    outs: tuple[str, ...]
    takes: frozenset[str]


@functools.cache
def out_form(op: Any) -> OutForm | None:
    """Return the form of an operation that writes into given tensors; None where torch has none."""
    wanted = [(one.name, str(one.type)) for one in op._schema.arguments]
    beside = [one for one in wanted if one[0] not in _OF_THE_RESULT]
    forms: dict[bool, OutForm] = {}  # by whether it takes the very same
    for name in op.overloadpacket.overloads():
        found = getattr(op.overloadpacket, name)
        arguments = found._schema.arguments
        outs = tuple(one.name for one in arguments if one.is_out)
        takes = [(one.name, str(one.type)) for one in arguments if not one.is_out]
        if outs and takes in (wanted, beside):
            forms[takes == wanted] = OutForm(found, outs, frozenset(name for name, _ in takes))
    return forms.get(True, forms.get(False))


@functools.cache
def is_written_to(op: Any) -> bool:
    """Return whether an operation writes into one of its arguments."""
    return bool(op._schema.is_mutable)


@functools.cache
def is_kernel_of_views(op: Any) -> bool:
    """Return whether an operation gives views of its first argument by a kernel of its own, not by other operations."""
    if op.namespace != "aten" or not op.is_view:
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def process_group(store: Any, rank: int, size: int, device: torch.device, address: str, timeout: timedelta) -> Any:
    """Return a process group that torch does not know: NCCL's for tensors on cards, gloo's for those of the host.

    This rank listens at `address` alone.
    """
    import torch.distributed

    distributed: Any = torch.distributed
    if device.type == "cuda":
        of_cards = distributed.ProcessGroupNCCL.Options()
        of_cards._timeout = timeout
        return distributed.ProcessGroupNCCL(store, rank, size, of_cards)
    options = distributed.ProcessGroupGloo._Options()
    options._devices, options._timeout = [distributed.ProcessGroupGloo.create_device(hostname=address)], timeout
    return distributed.ProcessGroupGloo(store, rank, size, options)


def fake_mode() -> Any:
    """Return a mode within which tensors have sizes and no memory, on any device."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # seconds, for what most processes never ask

    return FakeTensorMode(allow_non_fake_inputs=True)  # constants that are attributes of modules


def is_fake(tensor: Any) -> bool:
    """Return whether a tensor has a size and no values: what asks for one takes the way that needs most memory."""
    return type(tensor).__name__ == "FakeTensor"


def fake_view(op: Any, *args: Any, **options: Any) -> Any:
    """Return the result of a view operation on a fake tensor, by torch's kernel, without the mode's rules.

    These take tens of times as long where they see sizes for the first time. Of anything else, what the mode says.
    """
    given = args[0]
    if not is_fake(given) or given.constant is not None:  # what has values keeps them
        return op(*args, **options)
    with _sizes_alone(given.fake_mode):
        found = op(*args, **options)
    wrapped = [type(given)(given.fake_mode, one, given.fake_device) for one in _listed(found)]
    return wrapped[0] if isinstance(found, torch.Tensor) else wrapped


def fake_blank(like: Any, size: Sequence[int]) -> torch.Tensor:
    """Return a new fake tensor in C order, of the mode, device and dtype of one that is there."""
    with _sizes_alone(like.fake_mode):
        made = torch.empty(size, dtype=like.dtype, device="meta")
    return cast("torch.Tensor", type(like)(like.fake_mode, made, like.fake_device))


def without_modes() -> Any:
    """Return a context within which no dispatch mode of this thread sees what runs."""
    return _python_dispatch._disable_current_modes()


def _sizes_alone(mode: Any) -> Any:
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager

    return in_kernel_invocation_manager(mode)


def _listed(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def storage_at(weak_pointer: Any) -> torch.UntypedStorage | None:
    """Return the storage of a StorageWeakRef's `cdata`, None once nobody uses its memory."""
    return cast("torch.UntypedStorage | None", torch.UntypedStorage._new_with_weak_ptr(weak_pointer))


def with_tensors(program: ExportedProgram, tensors: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Return the same graph with other tensors and without example inputs.

    A shallow copy, because the constructor would change the graph it is given and forget its guards. Raises
    WeightsError when this torch keeps a program's tensors elsewhere.
    """
    changed = copy.copy(program)
    changed._state_dict = {name: tensors.get(name, value) for name, value in program.state_dict.items()}
    changed._constants = {name: tensors.get(name, value) for name, value in program.constants.items()}
    changed._example_inputs = None
    found = {**changed.state_dict, **changed.constants}
    if changed.example_inputs is not None or any(found[name] is not tensors[name] for name in found.keys() & tensors):
        raise WeightsError(f"torch {torch.__version__} does not let an exported program have other tensors")
    return changed


def compile_graph(module: fx.GraphModule, inputs: Sequence[Any], package: Path, options: Mapping[str, Any]) -> None:
    """Compile a graph of tensors alone, `inputs` as its placeholders know them, into the file `package` (.pt2).

    Raises what the compiler does, of many kinds.
    """
    from torch import _inductor
    from torch._inductor.package.package import package_aoti

    files = _inductor.aot_compile(module, tuple(inputs), options={**options, "aot_inductor.package": True})
    package_aoti(str(package), cast("list[Any]", files))


def open_compiled(package: Path) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Open a package of `compile_graph`. The function takes the tensors of all inputs, and empties their list.

    HAZARD: it checks neither types nor shapes nor strides. Opening runs code of the package. Raises RuntimeError.
    """
    # `aoti_load_package` would compile something first, to compare processors: for seconds, in this process, and
    # in a folder that others could have made. And a call of the model itself would read its own description each time.
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    return cast("Callable[..., list[torch.Tensor]]", loader(str(package), "model", False, 1, -1).boxed_run)


def host_keys() -> Any:
    """Return the dispatch keys of the host's kernels."""
    return torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def has_kernel(op: str, key: str) -> bool:
    """Return whether torch's dispatcher has a kernel of an op (aten::add.out) for the key (CPU)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


def op_names() -> list[str]:
    """Return the names of all ops of torch's dispatcher, such as aten::add.out."""
    return list(torch._C._dispatch_get_all_op_names())


def schema_of(op: Any) -> Any:
    """Return the schema of a torch.ops overload."""
    return op._schema


def storage_with_address(address: int, device: torch.device, num_bytes: int) -> torch.UntypedStorage:
    """Return a storage that says it is at the address. It owns nothing there."""
    make: Any = torch._C._construct_storage_from_data_pointer
    return cast("torch.UntypedStorage", make(address, device, num_bytes))


def register_device(name: str, module: Any) -> None:
    """Make torch know devices of that name, with `module` as `torch.<name>`. Experimental in torch."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(name, backend_module=module)


def patch_storages(name: str, make: Callable[[torch.device, int], torch.UntypedStorage]) -> None:
    """Let `make` make the storages (device, bytes) of devices of that name, for the life of the process.

    torch's own have no memory there, and kill the process when they are touched.
    """
    plain = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != name:
            return plain(cls, *args, **kwargs)
        (size,) = args or (0,)
        return make(torch.device(device), int(size))

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]


def patch_data(name: str) -> None:
    """Let `tensor.data = other` cross between the host and devices of that name, for the life of the process.

    As it may for CUDA: the tensor stays the same object.
    """
    inherited: Any = torch._C.TensorBase.data
    compatible = torch._has_compatible_shallow_copy_type

    def get(self: torch.Tensor) -> torch.Tensor:
        plain: torch.Tensor = inherited.__get__(self)
        return plain

    def put(self: torch.Tensor, value: torch.Tensor) -> None:
        if self.device == value.device or name not in (self.device.type, value.device.type):
            inherited.__set__(self, value)
            return
        fresh = value.detach().requires_grad_(self.requires_grad)
        torch._C._swap_tensor_impl(self, fresh)

    def has_compatible_shallow_copy_type(input: torch.Tensor, from_: torch.Tensor) -> bool:
        kinds = {input.device.type, from_.device.type}
        return kinds <= {"cpu", name} or compatible(input, from_)

    torch.Tensor.data = property(get, put)  # type: ignore[assignment]
    torch._has_compatible_shallow_copy_type = has_compatible_shallow_copy_type
