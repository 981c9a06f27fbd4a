"""The ends of a quantization: a Hugging Face folder that is read, a target that is whole or not there, losses."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weights.formats.checkpoint import read_checkpoint
from weights.formats.folder import read_json
from weights.formats.tensors import SourceTensor
from weights.platform.durable import disk_errors, make_folder, move, remove_path, sync_tree
from weights.records.errors import FormatError

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


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """One tensor: bits per weight with its scales, and errors relative to the root mean square of its elements.

    `note` says why a matrix was not quantized.
    """

    name: str
    kind: str
    num_elements: int
    bits_per_weight: float
    rms_error: float
    max_error: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The tensors of a model as they were written."""

    tensors: Sequence[QuantizedTensor]

    @property
    def bits_per_weight(self) -> float:
        """The mean over all elements, those of norms and of what was left as it is included."""
        return sum(t.bits_per_weight * t.num_elements for t in self.tensors) / sum(t.num_elements for t in self.tensors)


class ErrorSum:
    """Compares a tensor with what was written of it, part by part."""

    def __init__(self) -> None:
        self._num_elements = 0
        self._squares = 0.0
        self._squared_errors = 0.0
        self._max_error = 0.0

    def add(self, original: npt.NDArray[np.float32], restored: npt.NDArray[np.float32]) -> None:
        """Compare a part with what its packed bytes stand for."""
        difference = original - restored
        self._num_elements += original.size
        self._squares += float(np.square(original, dtype=np.float64).sum())
        self._squared_errors += float(np.square(difference, dtype=np.float64).sum())
        self._max_error = max(self._max_error, float(np.abs(difference).max(initial=0)))

    def result(self, name: str, kind: str, nbytes: int, note: str = "") -> QuantizedTensor:
        """Return what has come together, for a tensor that takes `nbytes`."""
        count = self._num_elements
        size = math.sqrt(self._squares / count) or 1.0
        rms = math.sqrt(self._squared_errors / count)
        return QuantizedTensor(name, kind, count, 8 * nbytes / count, rms / size, self._max_error / size, note)


class WrittenTensors:
    """The tensors of a target as they are written, one after the other: what was lost, and how far the work is."""

    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self._rows: list[QuantizedTensor] = []
        self._done_bytes = 0
        self._total_bytes = total_bytes
        self._progress = progress

    def count(self, source_bytes: int, row: QuantizedTensor | None = None) -> None:
        """Count bytes of the source that are done, and a tensor with its row."""
        if row is not None:
            self._rows.append(row)
        self._done_bytes += source_bytes
        self._progress(self._done_bytes, self._total_bytes)

    def as_it_is(self, name: str, tensor: SourceTensor, note: str) -> bytes | memoryview:
        """Return the bytes of a tensor that is not quantized, and count it."""
        count = max(1, math.prod(tensor.shape))
        row = QuantizedTensor(name, tensor.dtype, count, 8 * tensor.nbytes / count, 0.0, 0.0, note)
        self.count(tensor.nbytes, row)
        return tensor.read()

    def report(self) -> QuantizationReport:
        """Return all rows."""
        return QuantizationReport(self._rows)
