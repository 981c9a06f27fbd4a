"""The ends of a quantization: a Hugging Face folder that is read, and a target that is whole or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weights.errors import FormatError
from weights.formats.checkpoint import read_checkpoint
from weights.formats.tensors import SourceTensor
from weights.formats.weight_files import read_json
from weights.storage.durable import disk_errors, make_folder, move, remove_path, sync_tree

_FLOATS: Final = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_SMALL_SUFFIXES: Final = (".json", ".jinja", ".model", ".txt")
_PART_ELEMENTS: Final = 2**22  # that are float32 at once

# Called with the bytes of the source that are done, and all of them.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A language model in a Hugging Face folder: config.json, and where its tensors are."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def is_tied(self) -> bool:
        """Return whether the head shares the embedding's matrix."""
        return bool(self.config.get("tie_word_embeddings", False))

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a size of the config. Raises FormatError for one that is missing or none."""
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise FormatError(f"{self.folder / 'config.json'}: {key} is {value!r}, expected a positive integer")
        return value


def read_model(folder: Path) -> SourceModel:
    """Read config and headers. Raises FormatError for what is no language model of plain floating tensors."""
    if not (folder / "config.json").is_file():
        raise FormatError(f"{folder}: no Hugging Face folder (no config.json); that is what can be quantized")
    config = read_json(folder / "config.json")
    if "quantization_config" in config:
        raise FormatError(f"{folder}: its weights are quantized already (quantization_config in config.json)")
    (component,) = read_checkpoint(folder).components
    for name, tensor in component.tensors.items():
        if tensor.dtype not in _FLOATS:
            raise FormatError(f"{folder}: tensor {name!r} is {tensor.dtype}, expected {', '.join(_FLOATS)}")
    return SourceModel(folder, config, component.tensors)


def read_array(tensor: SourceTensor) -> npt.NDArray[Any]:
    """Read one tensor in its own floating type."""
    return np.frombuffer(tensor.read(), _FLOATS[tensor.dtype]).reshape(tensor.shape)


def float_parts(array: npt.NDArray[Any], multiple: int) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the elements in float32 and in order, flat, some at a time: whole multiples of `multiple`."""
    flat = array.reshape(-1)
    step = max(1, _PART_ELEMENTS // multiple) * multiple
    for start in range(0, flat.size, step):
        yield flat[start : start + step].astype(np.float32)


@contextlib.contextmanager
def staged_target(target: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a path beside `target` that becomes it at the end; when anything fails, nothing is left of it.

    Raises FormatError when `target` is there already, and StoreError for what the file system refuses.
    """
    _refuse_existing(target)
    staged = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with disk_errors(target.parent, needed_bytes):
        try:
            make_folder(target.parent)
            yield staged
            sync_tree(staged)
            _refuse_existing(target)
            move(staged, target)
        finally:
            remove_path(staged)


def _refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise FormatError(f"{target}: exists already")


def copy_small_files(source: Path, target: Path) -> None:
    """Copy config, tokenizer and templates, but no list of weight files."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _SMALL_SUFFIXES and "safetensors" not in file.name:
            shutil.copyfile(file, target / file.name)
