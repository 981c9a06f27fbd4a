"""Pack files that the caller has in memory already, as in aclmdlSetExternalWeightAddress of Ascend CANN.

Such memory wins over reading. It is only referred to: never copied, written or freed here, and the tensors that are
views of it keep it alive.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from weights.dtypes import ITEM_BYTES
from weights.errors import ExtentCorrupt, WeightsError
from weights.manifest import ExtentRef, Manifest
from weights.reading.extents import ByteArray

# warnings.catch_warnings swaps process-wide state, and replicas attach from several threads.
WARNINGS_LOCK = threading.Lock()


def bytes_tensor(array: ByteArray) -> torch.Tensor:
    """Return a uint8 tensor of the array's memory. HAZARD: torch does not know when it is read-only."""
    return bytes_tensors({"": array})[""]


def bytes_tensors(arrays: Mapping[str, ByteArray]) -> dict[str, torch.Tensor]:
    """Return uint8 tensors of the arrays' memory by the same names: to silence a warning takes longer than to make one.

    HAZARD: as of `bytes_tensor`.
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
        return bytes_tensor(buffer.reshape(-1).view(np.uint8))
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
