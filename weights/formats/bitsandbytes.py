"""Matrices that bitsandbytes quantized, as diffusers and transformers save them.

- NF4 and FP4: `x` in uint8, two elements in a byte, the first in its high half, each a place in `x.quant_map`, times
  `x.absmax` of its block. `x.quant_state.bitsandbytes__nf4` is JSON: shape, block size, and where `absmax` is
  quantized again (uint8, "nested"), the block size and the offset of that.
- int8: `x.weight` in I8, times `x.SCB` of its row over 127.

Source: bitsandbytes, `functional.py` (`QuantState`, `dequantize_4bit`, `int8_vectorwise_dequant`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from weights.formats.quantized import FLOATS, Array, Quantized, nibbles, read_all, read_rows
from weights.formats.scaled_matrices import Weights
from weights.formats.tensors import SourceTensor
from weights.formats.untrusted import is_shape, is_size, load_json, num_elements, shown
from weights.records.errors import FormatError

METHOD: Final = "bitsandbytes"
_STATES: Final = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_PARTS: Final = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_ROW_SCALES: Final = ".SCB"
_LAYOUT: Final = ".weight_format"
_MAX_STATE_BYTES: Final = 4096
_ONE_127TH: Final = np.float32(0.007874015718698502)  # as its kernel has it


def take_bitsandbytes(path: Path, tensors: Mapping[str, SourceTensor]) -> Weights:
    """Take the weights that bitsandbytes quantized out of tensors. Raises FormatError for parts that do not fit."""
    beside: set[str] = set()
    found: dict[str, Quantized] = {}
    for name, tensor in tensors.items():
        if end := next((end for end in _STATES if name.endswith(end)), ""):
            weight = name.removesuffix(end)
            found[weight] = _four_bits(path, weight, tensor, tensors)
            beside |= {name, *(f"{weight}{part}" for part in _PARTS)}
        elif name.endswith(_ROW_SCALES) and (module := name.removesuffix(_ROW_SCALES)) + ".weight" in tensors:
            found[f"{module}.weight"] = _rows_of_127ths(path, module, tensors)
            beside |= {name, f"{module}{_LAYOUT}"}
    return Weights({name: one for name, one in tensors.items() if name not in beside}, found)


def _four_bits(path: Path, name: str, state: SourceTensor, tensors: Mapping[str, SourceTensor]) -> Quantized:
    said = _read_state(path, name, state)
    shape, block = tuple(said["shape"]), said["blocksize"]
    size = num_elements(shape) or 0
    weight, absmax, table = (tensors.get(f"{name}{part}") for part in ("", ".absmax", ".quant_map"))
    if not (size and weight and absmax and table):
        raise FormatError(f"{path}: {shown(name)}: of 4 bits, and has no weight, .absmax or .quant_map")
    blocks, nested = -(-size // block), said.get("nested_blocksize")
    wanted = {"": ("U8", -(-size // 2)), ".quant_map": ("F32", 16), ".absmax": ("U8" if nested else "F32", blocks)}
    if nested:
        wanted |= {".nested_absmax": ("F32", -(-blocks // nested)), ".nested_quant_map": ("F32", 256)}
    parts = {end: _part(path, f"{name}{end}", tensors, *form) for end, form in wanted.items()}

    offset = float(said["nested_offset"]) if nested else 0.0
    return Quantized(weight.file, shape, _FourBits(parts, shape, block, nested or 0, offset))


@dataclass(frozen=True, slots=True)
class _FourBits:
    """Places in a table, times the scale of their block; with `nested`, scales are places in a table as well."""

    parts: Mapping[str, SourceTensor]
    shape: tuple[int, ...]
    block: int
    nested: int
    offset: float

    def compute(self, start: int, stop: int) -> Array:
        parts, size = self.parts, math.prod(self.shape)
        codes = nibbles(read_rows(parts[""], 0, parts[""].shape[0]), high_first=True)[:size]
        scales = read_all(parts[".absmax"])
        if self.nested:
            steps = np.repeat(read_all(parts[".nested_absmax"]), self.nested)[: len(scales)]
            scales = read_all(parts[".nested_quant_map"])[scales.astype(np.int64)] * steps + np.float32(self.offset)
        values = read_all(parts[".quant_map"])[codes] * np.repeat(scales, self.block)[:size]
        return values.reshape(self.shape[0], -1)[start:stop]


def _read_state(path: Path, name: str, state: SourceTensor) -> dict[str, Any]:
    if state.dtype != "U8" or state.nbytes > _MAX_STATE_BYTES:
        raise FormatError(f"{path}: {shown(name)}: its quant_state is {state.dtype} of {state.nbytes} bytes, no JSON")
    try:
        said = load_json(bytes(state.read()).decode())
    except ValueError as error:
        raise FormatError(f"{path}: {shown(name)}: its quant_state is no JSON: {error}") from None
    is_sound = isinstance(said, dict) and is_shape(said.get("shape")) and _is_block(said.get("blocksize"))
    if is_sound and said.get("nested_blocksize") is not None:
        is_sound = _is_block(said["nested_blocksize"]) and type(said.get("nested_offset")) in (int, float)
    if not is_sound:
        raise FormatError(f"{path}: {shown(name)}: its quant_state is {shown(said)}, expected shape and blocksize")
    found: dict[str, Any] = said
    return found


def _is_block(value: object) -> bool:
    return is_size(value) and value in (32, 64, 128, 256, 512, 1024, 2048, 4096)


def _part(path: Path, name: str, tensors: Mapping[str, SourceTensor], dtype: str, count: int) -> SourceTensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise FormatError(f"{path}: {shown(name)} is missing, which a matrix of 4 bits has")
    if tensor.dtype != dtype or num_elements(tensor.shape) != count or not tensor.shape:
        given = f"{tensor.dtype} {list(tensor.shape)}"
        raise FormatError(f"{path}: {shown(name)} is {given}, expected {count} elements of {dtype}")
    return tensor


def _rows_of_127ths(path: Path, module: str, tensors: Mapping[str, SourceTensor]) -> Quantized:
    weight, scales = tensors[f"{module}.weight"], tensors[f"{module}{_ROW_SCALES}"]
    if weight.dtype != "I8" or len(weight.shape) != 2 or scales.dtype not in FLOATS or scales.shape != weight.shape[:1]:
        given = f"{weight.dtype} {list(weight.shape)}"
        raise FormatError(f"{path}: {shown(module)} has scales SCB {list(scales.shape)}, and its weight is {given}")
    layout = tensors.get(f"{module}{_LAYOUT}")
    if layout is not None and any(layout.read()):
        raise FormatError(f"{path}: {shown(module + _LAYOUT)}: int8 in the layout of a card, expected 'row'")

    return Quantized(weight.file, weight.shape, _Rows127(weight, scales))


@dataclass(frozen=True, slots=True)
class _Rows127:
    """int8, times the largest of its row over 127."""

    weight: SourceTensor
    scales: SourceTensor

    def compute(self, start: int, stop: int) -> Array:
        values = read_rows(self.weight, start, stop).astype(np.float32).reshape(stop - start, -1)
        return values * read_all(self.scales)[start:stop, None] * _ONE_127TH
