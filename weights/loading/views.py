"""A component's tensors as views of its extents' bytes: attaching costs per tensor, not per byte.

Memory that the caller has already (as in aclmdlSetExternalWeightAddress of Ascend CANN) wins over reading. It is only
referred to: never copied, written or freed here, and the tensors that are views of it keep it alive.

Without a store, those of a checkpoint are views of its own files: for what reads a model once and judges it.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from weights.formats.checkpoint import read_checkpoint
from weights.formats.tensors import FileTensor
from weights.memory.host_pool import ByteArray
from weights.platform.torch_dtypes import TORCH_DTYPES, memory_form
from weights.records.dtypes import ITEM_BYTES
from weights.records.errors import ExtentCorrupt, FormatError, WeightsError
from weights.records.manifest import Component, ExtentRef, Manifest, SlicedRef, TensorRef

Tensors = dict[str, torch.Tensor]
Setters = Mapping[torch.dtype, Mapping[str, Callable[..., torch.Tensor]]]  # `Tensor.set_` by the tensor's name
# warnings.catch_warnings swaps process-wide state, and replicas attach from several threads.
WARNINGS_LOCK = threading.Lock()


def _bytes_tensor(array: ByteArray) -> torch.Tensor:
    """Return a uint8 tensor of the array's memory. HAZARD: torch does not know when it is read-only."""
    return bytes_tensors({"": array})[""]


def bytes_tensors(arrays: Mapping[str, ByteArray]) -> dict[str, torch.Tensor]:
    """Return uint8 tensors of the arrays' memory by the same names: to silence a warning takes longer than to make one.

    HAZARD: as of `_bytes_tensor`.
    """
    with WARNINGS_LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def given_extents(
    manifest: Manifest, components: Iterable[str], memory: Mapping[str, Any], *, verify: bool = False
) -> dict[str, torch.Tensor]:
    """Return the extents of `components` that lie in `memory` (whole files by location), as 1-D uint8 views, by id.

    A location is a path as in `ExtentRef.pack`. A buffer is a numpy array, a tensor of any device, or has the
    buffer protocol; it must be contiguous and is taken as bytes. Raises WeightsError: unknown location, buffer too
    small, a tensor in it that is not aligned to its element size, `verify` asked of device memory; and
    ExtentCorrupt when `verify` finds other bytes than were stored.
    """
    known = {extent.pack for extent in manifest.plain_extents.values()}
    for location in memory:
        if location not in known:
            shown = ", ".join(sorted(known)[:8]) + ", …" * (len(known) > 8)  # `separate` has a file per tensor
            raise WeightsError(f"external weights for {location!r}: {manifest.model} has no such file (known: {shown})")
    files = {location: _as_bytes(location, buffer) for location, buffer in memory.items()}
    names = list(components)
    extents = {extent.id: extent for extent in manifest.extents_of(names) if extent.has_plain and extent.pack in files}
    for component in names:
        for name, ref in manifest.components[component].tensors.items():
            if extent := extents.get(ref.extent):
                _check_tensor(f"{component}.{name}", ref.dtype, extent.offset + ref.offset, ref.nbytes, extent, files)
    views = {}
    for extent in extents.values():
        file = files[extent.pack]
        if extent.offset + extent.nbytes > file.numel():
            raise WeightsError(
                f"external weights for {extent.pack!r}: {file.numel()} bytes given, extent {extent.id} needs "
                f"{extent.offset + extent.nbytes}"
            )
        views[extent.id] = file[extent.offset : extent.offset + extent.nbytes]
        if verify:
            _verify(extent, views[extent.id])
    return views


def _as_bytes(location: str, buffer: Any) -> torch.Tensor:
    try:
        if isinstance(buffer, torch.Tensor):
            if not buffer.is_contiguous():
                raise ValueError("tensor is not contiguous")
            return buffer.detach().reshape(-1).view(torch.uint8)
        if not isinstance(buffer, np.ndarray):
            buffer = np.frombuffer(buffer, np.uint8) if len(memoryview(buffer)) else np.empty(0, np.uint8)
        if not buffer.flags.c_contiguous:
            raise ValueError("array is not contiguous")
        return _bytes_tensor(buffer.reshape(-1).view(np.uint8))
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise WeightsError(
            f"external weights for {location!r}: expected contiguous bytes (numpy array, tensor or buffer), "
            f"got {type(buffer).__name__}: {error}"
        ) from None


def _check_tensor(
    name: str, dtype: str, start: int, nbytes: int, extent: ExtentRef, files: Mapping[str, torch.Tensor]
) -> None:
    file = files[extent.pack]
    if start + nbytes > file.numel():
        raise WeightsError(
            f"external weights for {extent.pack!r}: {file.numel()} bytes given, tensor {name} needs {start + nbytes}"
        )
    item_bytes = ITEM_BYTES.get(dtype, 1)
    if start % item_bytes or (file.data_ptr() + start) % item_bytes:
        raise WeightsError(
            f"external weights for {extent.pack!r}: tensor {name} at byte {start} of memory at "
            f"{file.data_ptr():#x} is not aligned to the {item_bytes} bytes of a {dtype}"
        )


def _verify(extent: ExtentRef, view: torch.Tensor) -> None:
    if view.device.type != "cpu":
        raise WeightsError(f"external weights for {extent.pack!r}: memory of {view.device} cannot be verified")
    found = xxhash.xxh3_128_hexdigest(view.numpy().data)
    if found != extent.checksum:
        raise ExtentCorrupt(
            f"external weights for {extent.pack!r}: bytes {extent.offset}..{extent.offset + extent.nbytes} (extent "
            f"{extent.id}) have checksum {found}, expected {extent.checksum}",
            extent.id,
        )


def attach(component: Component, buffers: Mapping[str, ByteArray | torch.Tensor]) -> Tensors:
    """Return the tensors of a component as views of `buffers` (uint8 arrays or 1-D uint8 tensors, by extent id).

    A block-quantized tensor comes as its bytes: uint8, the last axis in bytes. A tensor that is not aligned to its
    element size (only the `inline` layout can have one) is a copy.

    HAZARD: the memory is shared by every replica of the node and torch does not know that it is read-only.
    Nothing may write into these tensors in place.
    """
    bases = {id_: _as_tensor(buffers[id_]) for id_ in component.extent_ids}
    found: Tensors = {}
    for (id_, dtype), rows in component.views.items():
        typed = _seen_as(bases[id_], TORCH_DTYPES[dtype])
        if typed is not None:  # one operation of torch per tensor and not three, of thousands
            start, as_strided = typed.storage_offset(), typed.as_strided
            found |= {row.name: as_strided(row.shape, row.strides, start + row.offset) for row in rows}
    if len(found) < len(component.tensors):
        for name, ref in component.tensors.items():
            if name not in found:
                found[name] = view_of(bases[ref.extent], ref)
    return found


def setters_of(parameters: Mapping[str, torch.Tensor]) -> Setters:
    """Return the setters that point parameters at other bytes, looked up once: a switch calls them a thousand times."""
    setters: dict[torch.dtype, dict[str, Callable[..., torch.Tensor]]] = {}
    for name, parameter in parameters.items():
        setters.setdefault(parameter.dtype, {})[name] = parameter.set_
    return setters


class Views(Mapping[str, torch.Tensor]):
    """The tensors that `attach` returns, made when one is asked for; or never, for parameters that are there already.

    HAZARD: as of `attach`.
    """

    def __init__(self, component: Component, buffers: Mapping[str, torch.Tensor]) -> None:
        """`buffers` are the component's extents, 1-D uint8, by id."""
        self._component = component
        self._buffers = buffers
        self._tensors: Tensors | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._tensors is None:
            self._tensors = attach(self._component, self._buffers)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._component.tensors)

    def __len__(self) -> int:
        return len(self._component.tensors)

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return next((base.device for base in self._buffers.values()), torch.device("cpu"))

    def put_into(self, setters: Setters) -> bool:
        """Make parameters see these bytes, which takes half the time of making tensors first.

        `setters` are those of parameters without gradients on the same device. Returns False when one of them has no
        plain view of its type here: then it sees what it saw before.
        """
        num_set = 0
        with torch.inference_mode():  # a fifth faster than without gradients alone
            for (id_, dtype), rows in self._component.views.items():
                typed = _seen_as(self._buffers[id_], TORCH_DTYPES[dtype])
                if typed is None:
                    continue
                storage, start, find = typed.untyped_storage(), typed.storage_offset(), setters.get(typed.dtype, {}).get
                for name, shape, strides, offset in rows:
                    put = find(name)
                    if put is not None:
                        put(storage, start + offset, shape, strides)
                        num_set += 1
        return num_set == sum(map(len, setters.values()))


def view_of(base: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Return the tensor `ref` as a view of its extent's bytes `base` (1-D uint8); exceptions as in `attach`."""
    dtype, shape = memory_form(ref.dtype, ref.shape)
    if ref.nbytes == 0:  # an array without bytes may have stride 0, which cannot be viewed as a wider type
        return torch.empty(shape, dtype=dtype, device=base.device)
    if isinstance(ref, SlicedRef):
        return _part_of(base, ref, dtype, shape)
    flat = base[ref.offset : ref.offset + ref.nbytes]
    if flat.storage_offset() % dtype.itemsize or flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)


def _part_of(base: torch.Tensor, ref: SlicedRef, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a part of a tensor, as `view_of` does: every row of it where it is in the whole one."""
    reach = sum((size - 1) * step for size, step in zip(shape, ref.strides, strict=True)) + 1
    flat = base[ref.offset : ref.offset + reach * dtype.itemsize]
    if flat.storage_offset() % dtype.itemsize or flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).as_strided(shape, ref.strides)


def _seen_as(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """View the whole elements of `base` (1-D uint8); None where the memory is not aligned to the type."""
    if base.data_ptr() % dtype.itemsize or base.storage_offset() % dtype.itemsize:
        return None
    return base[: base.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _as_tensor(buffer: ByteArray | torch.Tensor) -> torch.Tensor:
    return buffer if isinstance(buffer, torch.Tensor) else _bytes_tensor(buffer)


def mapped_tensors(model: Path) -> tuple[Path, Tensors, int]:
    """Return a checkpoint's description, its tensors as views of the mapped files, and the number of their elements.

    A folder describes it, or a GGUF file itself: beside it there may be others.

    The checkpoint is a language model's: one component. Raises FormatError for a folder or file of no known format.
    """
    (component,) = read_checkpoint(model).components
    stored = {name: tensor for name, tensor in component.tensors.items() if isinstance(tensor, FileTensor)}
    if len(stored) < len(component.tensors):
        raise FormatError(f"{model}: quantized by another program; import it into a store to read it")
    num_elements = sum(math.prod(tensor.shape) for tensor in stored.values())
    return (model if model.is_dir() or model.suffix == ".gguf" else model.parent), mapped_views(stored), num_elements


def mapped_views(stored: Mapping[str, FileTensor]) -> Tensors:
    """Return tensors of one file or several in their forms in memory, views of the mapped files.

    What is written there stays this process's own. Raises FormatError.
    """
    maps: dict[Path, npt.NDArray[np.uint8]] = {}
    found = {}
    for name, tensor in stored.items():
        if tensor.file not in maps:
            try:
                maps[tensor.file] = np.memmap(tensor.file, np.uint8, "c")
            except (OSError, ValueError) as error:
                raise FormatError(f"{tensor.file}: {error}") from None
        dtype, shape = memory_form(tensor.dtype, tensor.shape)
        # Cut before torch sees it: each tensor has a storage of its own, by which others know it.
        flat = maps[tensor.file][tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.offset % dtype.itemsize:  # a file may have an alignment of its own
            flat = flat.copy()
        found[name] = torch.from_numpy(flat).view(dtype).view(shape)
    return found
