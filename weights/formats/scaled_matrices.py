"""Matrices with scales beside them, as ComfyUI, musubi-tuner, Black Forest Labs and ModelOpt write them.

- 8 bits: F8_E4M3, F8_E5M2 or I8 `x.weight`, and `x.scale_weight` (ComfyUI before, musubi-tuner) or `x.weight_scale`: of
  one number, one for each row, or one for each of several runs of a row.
- nvfp4: two E2M1 in a byte, `x.weight_scale` in F8_E4M3 for each 16 of them, `x.weight_scale_2` for all. ComfyUI has
  the first in the high half of a byte, and the scales in tiles; ModelOpt and Black Forest Labs have neither.
- mxfp8: F8_E4M3, scales that are powers of two (E8M0) for each 32, in tiles.

ComfyUI says which in `x.comfy_quant`, JSON in uint8, or for all layers in the metadata `_quantization_metadata`.
`convrot`: the columns of what is stored are rotated. `x.pre_quant_scale` is for the inputs, and so for the columns.
`input_scale` and `scale_input` are for products with rounded activations, which are not computed here.
Sources: ComfyUI, `comfy/ops.py`, `comfy/quant_ops.py`, `comfy/utils.py`; diffusers, `quantizers/modelopt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from weights.formats.quantized import (
    FLOATS,
    FLOATS8,
    Array,
    Form,
    Quantized,
    e2m1,
    from_tiles,
    is_rotation_size,
    nibbles,
    num_tiled,
    read_all,
    read_rows,
    rotated,
)
from weights.formats.tensors import SourceTensor
from weights.formats.untrusted import load_json, shown
from weights.records.errors import FormatError

METADATA_KEY: Final = "_quantization_metadata"
OLD_SCALE: Final = ".scale_weight"
_SCALES: Final = (OLD_SCALE, ".weight_scale")
_SECOND: Final = ".weight_scale_2"
_OF_COLUMNS: Final = ".pre_quant_scale"
_OF_INPUTS: Final = (".scale_input", ".input_scale")
_FORMAT_END: Final = ".comfy_quant"
_MARKER: Final = "scaled_fp8"
_PREFIX: Final = "model.diffusion_model."  # which the names in the metadata may lack
BESIDE: Final = (*_OF_INPUTS, _SECOND, _OF_COLUMNS, _FORMAT_END, OLD_SCALE, _MARKER)
# Formats of ComfyUI's that are an element times a scale, by the type of the element.
_ELEMENTS: Final = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8_tensorwise": "I8"}
_ROTATED4: Final = "convrot_w4a4"
_FORMATS: Final = (*_ELEMENTS, "mxfp8", "nvfp4", _ROTATED4)
_NVFP4_BLOCK: Final = 16
_MXFP8_BLOCK: Final = 32
_ROTATION: Final = 256
_MAX_FORMAT_BYTES: Final = 4096
_MAX_LAYERS: Final = 100_000


class Weights(NamedTuple):
    """Tensors without those that describe others, and the matrices that these do describe, by name."""

    tensors: dict[str, SourceTensor]
    quantized: dict[str, Quantized]


class _Format(NamedTuple):
    name: str
    rotation: int = 0  # of the columns, in groups of so many


class _Layer(NamedTuple):
    """The weight of a layer and what is said of it. `scale_name` is for messages."""

    path: Path
    name: str
    scale_name: str
    weight: SourceTensor
    scale: SourceTensor
    second: SourceTensor | None
    of_columns: SourceTensor | None

    def misfit(self, expected: str) -> FormatError:
        """Return the error for parts that do not fit."""
        given = f"{self.weight.dtype} {list(self.weight.shape)}"
        scale = f"{shown(self.scale_name)} is {self.scale.dtype} {list(self.scale.shape)}"
        return FormatError(f"{self.path}: {scale}, its weight is {given}; expected {expected}")


def take_scaled(path: Path, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]) -> Weights:
    """Take scales and formats, and the weights that they are of, from among tensors.

    Raises FormatError: a format that is not read, scales that fit nothing.
    """
    formats = _formats(path, tensors, metadata)
    beside: set[str] = set()
    found: dict[str, Quantized] = {}
    for name, tensor in tensors.items():
        if name.rpartition(".")[2] == _MARKER or name.endswith((*_OF_INPUTS, _FORMAT_END)):
            beside.add(name)
            continue
        module = next((name.removesuffix(end) for end in _SCALES if name.endswith(end)), None)
        weight = tensors.get(f"{module}.weight")
        if module is None or weight is None:
            continue
        others = [f"{module}{end}" for end in (_SECOND, _OF_COLUMNS)]
        layer = _Layer(path, module, name, weight, tensor, *map(tensors.get, others))
        format_ = formats.get(module) or formats.get(module.removeprefix(_PREFIX))
        found[f"{module}.weight"] = _open(layer, format_)
        beside |= {name, *others}
    kept = {name: one for name, one in tensors.items() if name not in beside}
    if lone := next((name for name in kept if name.endswith((_SECOND, _OF_COLUMNS))), ""):
        raise FormatError(f"{path}: {shown(lone)} belongs to no weight with a weight_scale")
    return Weights(kept, found)


def _formats(path: Path, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]) -> dict[str, _Format]:
    """Return the formats of layers that say them. Raises FormatError for one that is not read."""
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
    return {layer: _format(path, layer, given) for layer, given in said.items()}


def _format(path: Path, layer: str, given: Any) -> _Format:
    said = given if isinstance(given, dict) else {}
    name, rotation = said.get("format"), 0
    if said.get("convrot") or name == _ROTATED4:
        rotation = said.get("convrot_groupsize", _ROTATION)
        if not is_rotation_size(rotation):
            raise FormatError(f"{path}: {shown(layer)} is rotated in groups of {shown(rotation)}, expected {_ROTATION}")
    if name not in _FORMATS or (rotation and name not in ("int8_tensorwise", _ROTATED4)):
        what = f"{shown(name)}{' with convrot' if rotation else ''}"
        raise FormatError(f"{path}: {shown(layer)} is in the format {what}, expected {', '.join(_FORMATS)}")
    return _Format(name, rotation)


def _open(layer: _Layer, format_: _Format | None) -> Quantized:
    """Return the matrix of a layer, in the format that its file says, or that its types tell."""
    weight = layer.weight
    is_packed = weight.dtype == "U8" and layer.scale.dtype == "F8_E4M3" and layer.second is not None
    if format_ is None and is_packed:
        found = _nvfp4(layer, is_ours=False)
    elif format_ is None:
        found = _of_elements(layer, weight.dtype)
    elif format_.name == "nvfp4":
        found = _nvfp4(layer, is_ours=True)
    elif format_.name == "mxfp8":
        found = _mxfp8(layer)
    elif format_.name == _ROTATED4:
        found = _signed_nibbles(layer)
    else:
        found = _of_elements(layer, _ELEMENTS[format_.name])
    if format_ and format_.rotation:
        found = _turned_back(layer, found, format_.rotation)
    return found if layer.of_columns is None else _with_columns(layer, found, layer.of_columns)


def _of_elements(layer: _Layer, dtype: str) -> Quantized:
    weight = layer.weight
    if dtype not in (*FLOATS8, "I8") or weight.dtype not in (dtype, "U8") or not weight.shape:
        what = shown(layer.scale_name)
        raise FormatError(f"{layer.path}: {what} is the scale of a weight in {weight.dtype}, expected one of 8 bits")
    if layer.second is not None:
        raise FormatError(f"{layer.path}: {shown(layer.name + _SECOND)}: a second scale, expected beside nvfp4 alone")
    return Quantized(weight.file, weight.shape, _Elements(weight, dtype, _scales(layer, weight.shape)))


@dataclass(frozen=True, slots=True)
class _Elements:
    """Elements times scales of (), (rows, 1) or (rows, runs)."""

    weight: SourceTensor
    dtype: str
    scales: Array

    def compute(self, start: int, stop: int) -> Array:
        values = read_rows(self.weight, start, stop, self.dtype).astype(np.float32)
        own = self.scales if self.scales.ndim == 0 else self.scales[start:stop].reshape(-1, 1)
        return values.reshape(own.size, -1) * own


def _scales(layer: _Layer, shape: tuple[int, ...]) -> Array:
    scale = layer.scale
    if scale.dtype not in FLOATS:
        raise layer.misfit(f"scales in {', '.join(FLOATS)}")
    found = read_all(scale)
    if found.size == 1:
        return found.reshape(())
    rows, columns = shape[0], int(np.prod(shape[1:]))
    if not rows or found.size % rows or columns % (found.size // rows) or scale.shape[0] != rows:
        raise layer.misfit(f"scales of one number, or whole runs of {rows} rows")
    return found.reshape(rows, -1)


def _nvfp4(layer: _Layer, *, is_ours: bool) -> Quantized:
    """Return a matrix of 4-bit floats; `is_ours`: as ComfyUI lays them out."""
    rows, half = _shape_of_packed(layer)
    columns = 2 * half
    blocks = columns // _NVFP4_BLOCK
    wanted = num_tiled(rows, blocks) if is_ours else rows * blocks
    scale, second = layer.scale, layer.second
    is_fit = scale.dtype in ("F8_E4M3", "U8") and scale.nbytes == wanted and (is_ours or scale.shape[0] == rows)
    if columns % _NVFP4_BLOCK or not is_fit:
        raise layer.misfit(f"a scale in F8_E4M3 for each {_NVFP4_BLOCK} columns")
    if second is None or second.dtype not in FLOATS or int(np.prod(second.shape)) != 1:
        raise FormatError(f"{layer.path}: {shown(layer.name + _SECOND)}: expected one number, the scale of all")

    return Quantized(layer.weight.file, (rows, columns), _Nvfp4(layer.weight, scale, second, is_ours))


@dataclass(frozen=True, slots=True)
class _Nvfp4:
    """Two elements in a byte, a scale for each 16, and one for all; `is_ours`: as ComfyUI lays them out."""

    weight: SourceTensor
    scale: SourceTensor
    second: SourceTensor
    is_ours: bool

    def compute(self, start: int, stop: int) -> Array:
        rows, half = self.weight.shape
        if self.is_ours:
            scales = from_tiles(read_all(self.scale, "F8_E4M3"), rows, 2 * half // _NVFP4_BLOCK)[start:stop]
        else:
            scales = read_rows(self.scale, start, stop, "F8_E4M3").astype(np.float32)
        packed = read_rows(self.weight, start, stop, "U8").reshape(stop - start, -1)
        values = e2m1(nibbles(packed, high_first=self.is_ours)).reshape(-1, _NVFP4_BLOCK)
        return values * (scales.reshape(-1, 1) * read_all(self.second))


def _mxfp8(layer: _Layer) -> Quantized:
    weight, scale = layer.weight, layer.scale
    if len(weight.shape) != 2 or weight.dtype not in ("F8_E4M3", "U8") or weight.shape[1] % _MXFP8_BLOCK:
        raise layer.misfit(f"F8_E4M3 (rows, columns), of whole blocks of {_MXFP8_BLOCK}")
    rows, columns = weight.shape
    blocks = columns // _MXFP8_BLOCK
    if scale.dtype not in ("F8_E8M0", "U8") or scale.nbytes != num_tiled(rows, blocks):
        raise layer.misfit(f"a scale in F8_E8M0 for each {_MXFP8_BLOCK} columns, in tiles")

    return Quantized(weight.file, (rows, columns), _Mxfp8(weight, scale))


@dataclass(frozen=True, slots=True)
class _Mxfp8:
    """F8_E4M3, times a power of two for each 32, in tiles."""

    weight: SourceTensor
    scale: SourceTensor

    def compute(self, start: int, stop: int) -> Array:
        rows, columns = self.weight.shape
        scales = from_tiles(read_all(self.scale, "F8_E8M0"), rows, columns // _MXFP8_BLOCK)[start:stop]
        values = read_rows(self.weight, start, stop, "F8_E4M3").astype(np.float32)
        return values.reshape(-1, _MXFP8_BLOCK) * scales.reshape(-1, 1)


def _signed_nibbles(layer: _Layer) -> Quantized:
    rows, half = _shape_of_packed(layer)
    form = _SignedNibbles(layer.weight, _scales(layer, (rows, 2 * half)))
    return Quantized(layer.weight.file, (rows, 2 * half), form)


@dataclass(frozen=True, slots=True)
class _SignedNibbles:
    """Two integers from -8 to 7 in a byte, the first in its low half, times scales as `_Elements` has them."""

    weight: SourceTensor
    scales: Array

    def compute(self, start: int, stop: int) -> Array:
        packed = read_rows(self.weight, start, stop, "U8").reshape(stop - start, -1)
        codes = nibbles(packed, high_first=False).astype(np.int8)
        own = self.scales if self.scales.ndim == 0 else self.scales[start:stop].reshape(-1, 1)
        return ((codes ^ 8) - 8).astype(np.float32).reshape(own.size, -1) * own


def _shape_of_packed(layer: _Layer) -> tuple[int, int]:
    weight = layer.weight
    if weight.dtype not in ("U8", "I8") or len(weight.shape) != 2 or 0 in weight.shape:
        raise layer.misfit("two elements in a byte, (rows, columns / 2)")
    return weight.shape[0], weight.shape[1]


def _turned_back(layer: _Layer, matrix: Quantized, group: int) -> Quantized:
    if len(matrix.shape) != 2 or matrix.shape[1] % group:
        raise layer.misfit(f"columns in whole groups of {group}, which are rotated")
    return replace(matrix, form=_Rotated(matrix.form, matrix.shape[1], group))


def _with_columns(layer: _Layer, matrix: Quantized, factors: SourceTensor) -> Quantized:
    if len(matrix.shape) != 2 or factors.dtype not in FLOATS or factors.shape != matrix.shape[1:]:
        name = shown(layer.name + _OF_COLUMNS)
        raise FormatError(
            f"{layer.path}: {name} is {factors.dtype} {list(factors.shape)}, expected floats {list(matrix.shape[1:])}"
        )
    return replace(matrix, form=_Columns(matrix.form, factors))


@dataclass(frozen=True, slots=True)
class _Rotated:
    """Another form, each group of whose columns is turned back."""

    form: Form
    columns: int
    group: int

    def compute(self, start: int, stop: int) -> Array:
        return rotated(self.form.compute(start, stop).reshape(stop - start, self.columns), self.group)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Another form times a factor for each column."""

    form: Form
    factors: SourceTensor

    def compute(self, start: int, stop: int) -> Array:
        return self.form.compute(start, stop).reshape(stop - start, -1) * read_all(self.factors)
