"""Pipelines with matrices of 8 bits, as UIs publish them, read as plain ones: elements times scales, rounded once.

- Plain: F8_E4M3 or F8_E5M2 without scales. In bfloat16 and float16 every value is itself.
- With scales: `x.scale_weight` (ComfyUI before, musubi-tuner) or `x.weight_scale` beside `x.weight`: of one number, one
  for each row, or one for each of several runs of a row. `x.comfy_quant` has the format in JSON, in uint8, and the
  metadata `_quantization_metadata` those of all layers; `scaled_fp8` says that there are some.

`input_scale` and `scale_input` are for products with rounded activations, which are not computed here. What our own
`atelier quantize` writes, and `fp8_linear.py` computes with, stays as it is. Sources: ComfyUI, `comfy/ops.py`,
`comfy/quant_ops.py`, `comfy/utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weights.formats.published_quantization import ComputedTensor
from weights.formats.tensors import SourceTensor
from weights.formats.untrusted import load_json, shown
from weights.records.errors import FormatError

_Array = npt.NDArray[Any]
METADATA_KEY: Final = "_quantization_metadata"
_FLOAT8: Final[Mapping[str, Any]] = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
_FLOATS: Final[Mapping[str, Any]] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16
}  # fmt: skip
_STORED: Final[Mapping[str, Any]] = {**_FLOAT8, **_FLOATS, "I8": np.int8}
# Formats of ComfyUI's that are an element times a scale, by the type of the element.
_FORMATS: Final = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8_tensorwise": "I8"}
_SCALES: Final = (".scale_weight", ".weight_scale")
_OF_INPUTS: Final = (".scale_input", ".input_scale")
_FORMAT_END: Final = ".comfy_quant"
_MARKER: Final = "scaled_fp8"
_OTHER_SCALES: Final = (".weight_scale_2", ".pre_quant_scale", ".weight_zeros", ".weight_codebook", ".weight_s_rel")
_MAX_FORMAT_BYTES: Final = 4096
_MAX_LAYERS: Final = 100_000


class Scaled(NamedTuple):
    """A matrix of 8 bits: the type of its elements, and their scales, float32 of (), (rows, 1) or (rows, runs)."""

    dtype: str
    scales: _Array

    def rows(self, start: int, stop: int) -> Scaled:
        """Return those of some rows."""
        return self if self.scales.ndim == 0 else Scaled(self.dtype, self.scales[start:stop])


class Weights(NamedTuple):
    """Tensors without those that describe others, and what they say of matrices by name."""

    tensors: dict[str, SourceTensor]
    scaled: dict[str, Scaled]


def read_scales(path: Path, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]) -> Weights:
    """Take scales and formats from among tensors.

    Raises FormatError: a format that is not read, scales that fit nothing.
    """
    formats = _formats(path, tensors, metadata)
    kept: dict[str, SourceTensor] = {}
    scaled: dict[str, Scaled] = {}
    for name, tensor in tensors.items():
        if name.endswith(_OTHER_SCALES):
            raise FormatError(f"{path}: {shown(name)}: 4-bit floats and matrices with zero points are not read")
        if name.rpartition(".")[2] == _MARKER or name.endswith((*_OF_INPUTS, _FORMAT_END)):
            continue
        layer = next((name.removesuffix(end) for end in _SCALES if name.endswith(end)), None)
        weight = tensors.get(f"{layer}.weight")
        if layer is None or weight is None:
            kept[name] = tensor
            continue
        dtype = formats.get(layer, weight.dtype)
        if dtype not in (*_FLOAT8, "I8") or weight.dtype not in (dtype, "U8"):
            raise FormatError(
                f"{path}: {shown(name)} is the scale of a weight in {weight.dtype}, expected one of 8 bits"
            )
        scaled[f"{layer}.weight"] = Scaled(dtype, _scales(path, name, tensor, weight.shape))
    for name, tensor in kept.items():
        if tensor.dtype == "I8" and name.endswith(".weight") and name not in scaled:
            raise FormatError(f"{path}: {shown(name)} is of 8-bit integers without a scale")
    return Weights(kept, scaled)


def _formats(path: Path, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the types of the elements of layers that say them. Raises FormatError for one that is not read."""
    said: dict[str, Any] = {}
    if METADATA_KEY in metadata:
        try:
            layers = load_json(metadata[METADATA_KEY])["layers"]
            said |= dict(layers) if len(layers) <= _MAX_LAYERS else {}
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"{path}: metadata {METADATA_KEY!r} cannot be read: {error}") from None
    for name, tensor in tensors.items():
        if name.endswith(_FORMAT_END):
            if tensor.nbytes > _MAX_FORMAT_BYTES:
                raise FormatError(f"{path}: {shown(name)} has {tensor.nbytes} bytes, at most {_MAX_FORMAT_BYTES}")
            try:
                said[name.removesuffix(_FORMAT_END)] = load_json(bytes(tensor.read()).decode())
            except ValueError as error:
                raise FormatError(f"{path}: {shown(name)} is no JSON: {error}") from None
    found = {}
    for layer, given in said.items():
        format_ = given.get("format") if isinstance(given, dict) else None
        is_rotated = isinstance(given, dict) and bool(given.get("convrot"))
        if not isinstance(format_, str) or format_ not in _FORMATS or is_rotated:
            what = f"{shown(format_)}{' with convrot' if is_rotated else ''}"
            raise FormatError(f"{path}: {shown(layer)} is in the format {what}, expected {', '.join(_FORMATS)}")
        found[layer] = _FORMATS[format_]
    return found


def _scales(path: Path, name: str, tensor: SourceTensor, shape: tuple[int, ...]) -> _Array:
    if tensor.dtype not in _FLOATS:
        raise FormatError(f"{path}: {shown(name)} is {tensor.dtype}, expected {', '.join(_FLOATS)}")
    found = np.frombuffer(tensor.read(), _FLOATS[tensor.dtype]).astype(np.float32)
    if found.size == 1:
        return found.reshape(())
    rows, columns = (shape[0], int(np.prod(shape[1:]))) if shape else (0, 0)
    if not rows or found.size % rows or columns % (found.size // rows) or tensor.shape[0] != rows:
        raise FormatError(f"{path}: {shown(name)} has shape {list(tensor.shape)}, its weight {list(shape)}")
    return found.reshape(rows, -1)


def has_eight_bits(tensors: Mapping[str, SourceTensor]) -> bool:
    """Return whether some of the tensors are 8-bit floats."""
    return any(tensor.dtype in _FLOAT8 for tensor in tensors.values())


def wide_type(tensors: Mapping[str, SourceTensor]) -> str:
    """Return the type that wide tensors get: float16 where most others are that, else bfloat16."""
    types = [tensor.dtype for tensor in tensors.values()]
    return "F16" if types.count("F16") > types.count("BF16") + types.count("F32") else "BF16"


def widened(tensors: Mapping[str, SourceTensor], scaled: Mapping[str, Scaled], dtype: str) -> dict[str, SourceTensor]:
    """Return the tensors with all that are floats, and what `scaled` describes, in one type. Nothing is read yet."""
    return {
        name: wide(tensor, scaled.get(name), dtype)
        if name in scaled or (tensor.dtype in (*_FLOAT8, *_FLOATS) and tensor.dtype != dtype)
        else tensor
        for name, tensor in tensors.items()
    }


def wide(tensor: SourceTensor, scaled: Scaled | None, dtype: str) -> ComputedTensor:
    """Return a tensor in another type, times its scales."""

    def compute() -> _Array:
        own = scaled.dtype if scaled else tensor.dtype
        values = np.frombuffer(tensor.read(), _STORED[own]).astype(np.float32)
        if scaled is not None:
            scales = scaled.scales.reshape(-1, 1) if scaled.scales.ndim else scaled.scales
            values = (values.reshape(scales.size, -1) * scales).reshape(-1)
        with np.errstate(over="ignore"):  # too large becomes infinite, as in torch
            return values.astype(_FLOATS[dtype]).reshape(tensor.shape)

    return ComputedTensor(tensor.file, dtype, tensor.shape, compute)


def read_as_plain(
    path: Path, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]
) -> dict[str, SourceTensor]:
    """Return the tensors of a component as plain ones where some have 8 bits, unless our own layers compute with them.

    Raises FormatError as `read_scales` does.
    """
    if not has_eight_bits(tensors) or _is_our_own(tensors):
        return dict(tensors)
    found = read_scales(path, tensors, metadata)
    return widened(found.tensors, found.scaled, wide_type(tensors))


def _is_our_own(tensors: Mapping[str, SourceTensor]) -> bool:
    """Return whether all matrices of 8 bits have scales as `atelier quantize` writes them, without anything else."""
    for name, tensor in tensors.items():
        if name.endswith((*_OF_INPUTS, *_OTHER_SCALES, _FORMAT_END, _SCALES[0], _MARKER)):
            return False
        if tensor.dtype in _FLOAT8:
            scale = tensors.get(f"{name}_scale")
            is_ours = tensor.dtype == "F8_E4M3" and len(tensor.shape) == 2 and scale is not None
            if not is_ours or scale is None or scale.shape not in ((), (tensor.shape[0], 1)):
                return False
    return True
