"""Matrices that torchao quantized, as transformers and diffusers save them in safetensors.

`module._weight_qdata` in I8 or F8, times `module._weight_scale`, one for each block of rows and columns, behind
`module._weight_zero_point`, if there is one. The file's metadata has a JSON under `module.weight` that says the kind.
Source: torchao 0.18, `prototype/safetensors/safetensors_support.py`, `quantization/quantize_/workflows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from weights.formats.quantized import FLOATS, FLOATS8, Array, Quantized, read_all, read_rows
from weights.formats.scaled_matrices import Weights
from weights.formats.tensors import SourceTensor
from weights.formats.untrusted import load_json, shown
from weights.records.errors import FormatError

METHOD: Final = "torchao"
_VALUES: Final = "_qdata"
_KINDS: Final = {"Int8Tensor": ("I8",), "Float8Tensor": tuple(FLOATS8)}


def take_torchao(path: Path, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]) -> Weights:
    """Take the weights that torchao quantized. Raises FormatError for another kind, or parts that do not fit."""
    kept, found = dict(tensors), dict[str, Quantized]()
    for name in tensors:
        module, _, last = name.rpartition(".")
        if not (last.startswith("_") and last.endswith(_VALUES)):
            continue
        part = last[1:].removesuffix(_VALUES)
        own = f"{module}.{part}" if module else part
        stem = name.removesuffix(_VALUES)
        kind = _kind(path, own, metadata)
        values, scale, zero = kept.pop(name), kept.pop(f"{stem}_scale", None), kept.pop(f"{stem}_zero_point", None)
        found[own] = _matrix(path, own, _KINDS[kind], values, scale, zero)
        kept[own] = values
    return Weights(kept, found)


def _kind(path: Path, name: str, metadata: Mapping[str, str]) -> str:
    try:
        said = load_json(metadata.get(name, "null"))
    except ValueError as error:
        raise FormatError(f"{path}: the metadata of {shown(name)} is no JSON: {error}") from None
    kind = said.get("_type") if isinstance(said, dict) else None
    if kind not in _KINDS:
        raise FormatError(
            f"{path}: {shown(name)} is a {shown(kind)} of torchao, which is not read; read are {', '.join(_KINDS)}"
        )
    return str(kind)


def _matrix(
    path: Path,
    name: str,
    dtypes: tuple[str, ...],
    values: SourceTensor,
    scale: SourceTensor | None,
    zero: SourceTensor | None,
) -> Quantized:
    given = f"{values.dtype} {list(values.shape)}"
    if values.dtype not in dtypes or len(values.shape) != 2 or 0 in values.shape:
        raise FormatError(f"{path}: {shown(name)} of torchao is {given}, expected {' or '.join(dtypes)} of 2 axes")
    if scale is None or scale.dtype not in FLOATS or not _fits(scale, values):
        what = "is missing" if scale is None else f"is {scale.dtype} {list(scale.shape)}"
        raise FormatError(f"{path}: the scale of {shown(name)}, {given}, {what}; expected one for each block")
    if zero is not None and (zero.dtype not in (*FLOATS, "I8") or zero.shape != scale.shape):
        raise FormatError(f"{path}: the zero point of {shown(name)} is {zero.dtype} {list(zero.shape)}")
    return Quantized(values.file, values.shape, _Blocks(values, scale, zero))


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Elements behind a zero point, if any, times a scale; both of a block of rows and columns."""

    values: SourceTensor
    scale: SourceTensor
    zero: SourceTensor | None

    def compute(self, start: int, stop: int) -> Array:
        found = read_rows(self.values, start, stop).astype(np.float32).reshape(stop - start, -1)
        centred = found if self.zero is None else found - self._spread(self.zero, start, stop)
        return centred * self._spread(self.scale, start, stop)

    def _spread(self, tensor: SourceTensor, start: int, stop: int) -> Array:
        """Return one for each element of some rows."""
        rows, columns = self.values.shape
        table = read_all(tensor).reshape(tensor.shape or (1, 1))
        tall = np.repeat(table, rows // table.shape[0], axis=0)[start:stop]
        return np.repeat(tall, columns // table.shape[1], axis=1)


def _fits(scale: SourceTensor, values: SourceTensor) -> bool:
    if scale.shape == ():
        return True
    return len(scale.shape) == 2 and all(
        size and not whole % size for size, whole in zip(scale.shape, values.shape, strict=True)
    )
