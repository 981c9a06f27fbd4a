"""Torch's own checkpoint files (`.pt`, `.pth`, `.bin`): pickles, read without running any code in them.

Imported by `weights.formats.checkpoint` alone, when it is allowed.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weights.formats.untrusted import MAX_SHOWN_CHARS, shown
from weights.platform.torch_dtypes import DTYPE_NAMES
from weights.records.errors import FormatError

_NESTS = ("state_dict", "model", "params_ema", "params")  # where trainers keep the weights beside their own state


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor of a mapped file; views and tied tensors become bytes of their own when they are read.

    HAZARD: the file is mapped, so one that is cut short while it is open ends the process with SIGBUS.
    """

    file: Path
    dtype: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def read(self) -> memoryview:
        """Return the bytes in C order; a view of the file where they lie in it like that."""
        plain = self.tensor.resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy().data if self.nbytes else memoryview(b"")


def read_torch_file(path: Path) -> dict[str, TorchTensor]:
    """Read the tensors of a state dict, or of the one under `state_dict`, `model`, `params_ema` or `params`.

    Raises FormatError naming the entry: code in the pickle (it is not run), anything but plain dense tensors.
    """
    value = _load(path)
    for nest in _NESTS:
        if isinstance(value, Mapping) and isinstance(value.get(nest), Mapping):
            value = value[nest]
            break
    if not isinstance(value, Mapping):
        raise FormatError(f"{path}: holds a {type(value).__name__}, expected a dict of tensors")
    file_bytes = path.stat().st_size
    entries = {_name(path, name): _entry(path, name, leaf, file_bytes) for name, leaf in value.items()}
    storages = {entry.tensor.untyped_storage().data_ptr(): entry.tensor for entry in entries.values()}
    storage_bytes = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    if storage_bytes > file_bytes:  # torch grows a bare pickle's storage when a tensor claims more than it has
        raise FormatError(f"{path}: its tensors lie in {storage_bytes} bytes, the file has {file_bytes}")
    return entries


def _load(path: Path) -> Any:
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _refuse_compression(path)
        # Files older than torch 1.6 are bare pickles, which cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)  # noqa: TID251
    except FormatError:
        raise
    except Exception as error:  # damage surfaces as nearly every type there is, from struct.error to AttributeError
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FormatError(
            f"{path}: not a file of plain tensors, refused without running any of it: {reason[0][:MAX_SHOWN_CHARS]}"
        ) from None


def _refuse_compression(path: Path) -> None:
    """Raise FormatError for compressed records: torch writes none, and one could unpack to any size."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise FormatError(f"{path}: record {info.filename!r} is compressed, which torch's files never are")


def _name(path: Path, name: Any) -> str:
    try:
        if isinstance(name, str) and name.encode("utf-8"):
            return name
    except UnicodeEncodeError:
        pass
    raise FormatError(f"{path}: entry {shown(name)} has no name that is text")


def _entry(path: Path, name: str, leaf: Any, file_bytes: int) -> TorchTensor:
    if not isinstance(leaf, torch.Tensor):
        raise FormatError(
            f"{path}: {shown(name)} is a {type(leaf).__name__}, expected a tensor (a dict of tensors only)"
        )
    tensor = leaf.detach()
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
        raise FormatError(f"{path}: tensor {shown(name)} is {kind}, expected a dense tensor")
    if tensor.dtype not in DTYPE_NAMES:
        raise FormatError(
            f"{path}: tensor {shown(name)}: unknown dtype {tensor.dtype} (known: {', '.join(DTYPE_NAMES.values())})"
        )
    entry = TorchTensor(path, DTYPE_NAMES[tensor.dtype], tensor)
    if entry.nbytes > file_bytes:
        raise FormatError(
            f"{path}: tensor {shown(name)} repeats its elements to {entry.nbytes} bytes, more than the file's "
            f"{file_bytes}"
        )
    return entry
