"""Whether a file is a pickle, and the door to reading one: without torch for who does not ask for it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from weights.errors import FormatError
from weights.formats.tensors import SourceTensor

_ZIP_MAGIC = b"PK\3\4"
_PROTOCOLS = (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")  # how a pickle of protocol 2 to 5 begins


def is_pickle(path: Path) -> bool:
    """Whether the file begins as torch's do: a zip archive, or a bare pickle."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    return magic == _ZIP_MAGIC or magic[:2] in _PROTOCOLS


def read_pickle(path: Path, *, allow_torch: bool) -> Mapping[str, SourceTensor]:
    """The tensors of a torch file. Raises FormatError unless it is allowed, and for all that is not plain tensors.

    It takes a permission because even torch's restricted reader is a program that interprets its input.
    """
    if not allow_torch:
        raise FormatError(
            f"{path}: a pickle, which is only read where that is allowed (allow_torch); better: save it as safetensors"
        )
    # By name, so that only who reads a pickle imports torch: the control plane imports these modules.
    module = importlib.import_module("weights.formats.torch_file")
    tensors: Mapping[str, SourceTensor] = module.read_torch_file(path)
    return tensors
