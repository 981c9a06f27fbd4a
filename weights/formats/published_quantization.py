"""Language models as others quantize and publish them, read as plain ones: AWQ, GPTQ, compressed-tensors and fp8.

Where every row of a matrix has whole groups of consecutive elements with one scale, and integers of at most 8 bits, the
matrix becomes int8 with float32 scales (`quantization/group_int8.py`): the same values, bit for bit, since a difference
of integer and zero point fits. All others become wide: of the type that most other tensors have, rounded once.

Formats, in elements x of (outputs, inputs), by module:

- AWQ, gemm: qweight (in, out/8), qzeros (groups, out/8), scales (groups, out). Of 8 outputs in an int32, nibble 0 is
  the first, then 2, 4, 6, 1, 3, 5, 7. x = (q - zero) * scale.
- GPTQ: qweight (in * bits/32, out), qzeros (groups, out * bits/32), scales (groups, out), g_idx (in,), the group of
  each input. The zero points are one less than they are stored to be, modulo 2^bits, but for "gptq_v2".
- compressed-tensors: "pack-quantized" weight_packed (out, in * bits/32) of q + 2^(bits-1), weight_scale (out, groups);
  "int-quantized" and "float-quantized" weight (out, in). "naive-quantized" is either.
- fp8: weight (out, in) in F8_E4M3, weight_scale_inv for each block of `weight_block_size`.

Elements of an int32 are in order, from its lowest bits on, unless said otherwise. Sources: AutoAWQ `packing_utils.py`;
AutoGPTQ `qlinear_cuda_old.py`; compressed-tensors `pack_quantized.py`; transformers 5.23 `finegrained_fp8.py`. What
these do to activations when they run is not done here.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weights.formats.tensors import SourceTensor
from weights.formats.untrusted import shown
from weights.records.dtypes import GROUP_INT8_METHOD, tensor_nbytes
from weights.records.errors import FormatError

_Array = npt.NDArray[Any]
_Tensors = Mapping[str, SourceTensor]
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # of an int32's outputs among its nibbles
_DTYPES: Final[Mapping[str, Any]] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}
_FLOATS: Final = ("F32", "F16", "BF16")
_SUFFIXES: Final = (  # of a module's tensors, the one that the module is found by first
    *("qweight", "weight_packed", "weight_scale", "weight_scale_inv"),
    *("qzeros", "scales", "g_idx", "weight", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("input_scale", "input_zero_point", "input_global_scale"),
)
# Scales of what a server might quantize while it runs.
_UNREAD: Final = ("k_scale", "v_scale", "q_scale", "output_scale")
_MAX_SCHEMES: Final = 64
# Classes of transformers whose decoders compute with int8 by groups. A test compares them with the engine's.
INT8_CLASSES: Final = frozenset(
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")
)
METHODS: Final = ("awq", "gptq", "compressed-tensors", "fp8")


class Unquantized(NamedTuple):
    """The tensors of a quantized checkpoint as plain ones, and the config.json that goes with them."""

    tensors: dict[str, SourceTensor]
    config: bytes


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A tensor that is computed of others when it is read; `file` has the first of them."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    compute: Callable[[], _Array]

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return tensor_nbytes(self.dtype, self.shape)

    def read(self) -> bytes:
        """Return the bytes. Raises FormatError naming the file."""
        return np.ascontiguousarray(self.compute()).tobytes()


def read_quantized(path: Path, config: Mapping[str, Any], class_name: str, tensors: _Tensors) -> Unquantized | None:
    """Return a published quantized model as a plain one; None for what is none of `METHODS`.

    All matrices of a class that is none of `INT8_CLASSES` become wide.

    Only headers are looked at: each matrix is computed when it is read. Raises FormatError naming config.json or the
    tensor, for settings that are not supported and for shapes and types that do not fit them.
    """
    given = config.get("quantization_config")
    if not isinstance(given, dict) or given.get("quant_method") not in METHODS:
        return None
    where = path / "config.json"
    open_matrix = _OPENERS[given["quant_method"]](where, given)
    modules, plain = _sorted_out(tensors)
    if not modules:
        raise FormatError(f"{where}: quantization_config {shown(given)}, but no tensor is quantized so")
    matrices = {name: open_matrix(_Module(name, parts)) for name, parts in modules.items()}
    grouped = {name: one for name, one in matrices.items() if class_name in INT8_CLASSES and isinstance(one, _Grouped)}
    unit = math.gcd(*(one.columns // one.groups for one in grouped.values()))
    floats = Counter(tensor.dtype for tensor in plain.values() if tensor.dtype in _FLOATS)
    wide = floats.most_common(1)[0][0] if floats else "BF16"
    found = dict(plain)
    for name, one in matrices.items():
        file, shape = one.module.file, (one.rows, one.columns)
        if name not in grouped:
            found[f"{name}.weight"] = ComputedTensor(file, wide, shape, _rounded(one, wide))
            continue
        found[f"{name}.weight"] = ComputedTensor(file, "I8", shape, grouped[name].int8)
        num_scales = one.rows * one.columns // unit
        found[f"{name}.scales"] = ComputedTensor(file, "F32", (num_scales,), _repeated(grouped[name], unit))
    plainer = {key: value for key, value in config.items() if key != "quantization_config"}
    if unit:
        plainer["quantization_config"] = {"quant_method": GROUP_INT8_METHOD, "group_size": unit}
    return Unquantized(found, json.dumps(plainer, indent=2).encode())


def _sorted_out(tensors: _Tensors) -> tuple[dict[str, dict[str, SourceTensor]], dict[str, SourceTensor]]:
    """Return the parts of each quantized module by its name, and all other tensors."""
    quantized = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in _SUFFIXES[:4]}
    modules: dict[str, dict[str, SourceTensor]] = {name: {} for name in quantized}
    plain: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if module in modules and part in _SUFFIXES:
            modules[module][part] = tensor
        elif part not in _UNREAD:
            plain[name] = tensor
    return modules, plain


@dataclass(frozen=True, slots=True)
class _Module:
    """The tensors of a quantized layer by their last name."""

    name: str
    parts: Mapping[str, SourceTensor]

    @property
    def file(self) -> Path:
        return next(iter(self.parts.values())).file

    def shape(self, part: str, *dtypes: str, rank: int = 2) -> tuple[int, ...]:
        """Return the shape of a part. Raises FormatError unless it is there, of one of the types and of that rank."""
        tensor = self.parts.get(part)
        if tensor is None:
            raise FormatError(f"{self.file}: {shown(self.name)} has no {part}")
        if tensor.dtype not in dtypes or len(tensor.shape) != rank or 0 in tensor.shape:
            raise self.misfit(part, f"expected {' or '.join(dtypes)} of {rank} axes")
        return tensor.shape

    def check(self, part: str, shape: tuple[int, ...], *dtypes: str) -> None:
        """Raise FormatError unless a part has that shape and one of the types."""
        if self.shape(part, *dtypes, rank=len(shape)) != shape:
            raise self.misfit(part, f"expected {list(shape)}")

    def misfit(self, part: str, expected: str) -> FormatError:
        """Return the error for a part of another shape or type."""
        tensor = self.parts[part]
        name = shown(f"{self.name}.{part}")
        return FormatError(f"{self.file}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, {expected}")

    def array(self, part: str) -> _Array:
        """Read a part."""
        tensor = self.parts[part]
        return np.frombuffer(tensor.read(), _DTYPES[tensor.dtype]).reshape(tensor.shape)

    def floats(self, part: str) -> _Array:
        """Read a part as float32."""
        return self.array(part).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A quantized matrix (rows, columns) of a module."""

    module: _Module
    rows: int
    columns: int

    def wide(self) -> _Array:
        """Compute it as float32."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Grouped(_Matrix):
    """A matrix of integers of at most 8 bits, each row of which has `groups` of consecutive elements with one scale."""

    groups: int

    def integers(self) -> _Array:
        """Read the integers without the zero point, as int16."""
        raise NotImplementedError

    def scales(self) -> _Array:
        """Read the scales, float32 (rows, groups)."""
        raise NotImplementedError

    def wide(self) -> _Array:
        return self.integers() * np.repeat(self.scales(), self.columns // self.groups, axis=1)

    def int8(self) -> _Array:
        """Read the integers. Raises FormatError for zero points that are not in the middle."""
        found = self.integers()
        if found.min() < -128 or found.max() > 127:
            name = self.module.name
            raise FormatError(f"{self.module.file}: {name} has zero points that are not in the middle, as sym demands")
        return found.astype(np.int8)


def _unpacked(words: _Array, bits: int) -> _Array:
    """Return the unsigned integers of int32 words as uint8: (..., n) -> (..., n * 32/bits), the lowest bits first."""
    parts = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return parts
    return np.stack((parts & 15, parts >> 4), axis=-1).reshape(*words.shape[:-1], -1)


def _open_awq(where: Path, given: Mapping[str, Any]) -> Callable[[_Module], _Matrix]:
    if given.get("bits", given.get("w_bit")) != 4 or str(given.get("version", "gemm")).lower() != "gemm":
        raise _unsupported(where, given, "AWQ of 4 bits in the layout 'gemm'")

    def opened(module: _Module) -> _Matrix:
        columns, packed_rows = module.shape("qweight", "I32")
        groups, rows = module.shape("scales", *_FLOATS)
        if packed_rows * 8 != rows:
            raise module.misfit("qweight", f"expected {rows} outputs, as the scales have")
        _check_groups(module, "scales", columns, groups)
        module.check("qzeros", (groups, packed_rows), "I32")
        return _Awq(module, rows, columns, groups)

    return opened


@dataclass(frozen=True, slots=True)
class _Awq(_Grouped):
    """A matrix of AWQ, in the layout "gemm"."""

    def integers(self) -> _Array:
        zeros = np.repeat(self._ordered("qzeros"), self.columns // self.groups, axis=0)
        return (self._ordered("qweight").astype(np.int16) - zeros).T

    def scales(self) -> _Array:
        return self.module.floats("scales").T

    def _ordered(self, part: str) -> _Array:
        packed = _unpacked(self.module.array(part), 4)
        return packed.reshape(*packed.shape[:-1], -1, 8)[..., _AWQ_PLACES].reshape(packed.shape)


def _open_gptq(where: Path, given: Mapping[str, Any]) -> Callable[[_Module], _Matrix]:
    bits, version = given.get("bits"), given.get("checkpoint_format", "gptq")
    if bits not in (4, 8) or version not in ("gptq", "gptq_v2"):
        raise _unsupported(where, given, "GPTQ of 4 or 8 bits in the format 'gptq' or 'gptq_v2'")
    per_word, offset = 32 // bits, int(version == "gptq")

    def opened(module: _Module) -> _Matrix:
        packed_columns, rows = module.shape("qweight", "I32")
        columns, groups = packed_columns * per_word, module.shape("scales", *_FLOATS)[0]
        module.check("scales", (groups, rows), *_FLOATS)
        if rows % per_word:
            raise module.misfit("qweight", f"expected a multiple of {per_word} outputs")
        module.check("qzeros", (groups, rows // per_word), "I32")
        is_ordered = given.get("desc_act") is True
        if "g_idx" in module.parts or is_ordered:
            module.check("g_idx", (columns,), "I32")
        if not is_ordered:
            _check_groups(module, "scales", columns, groups)

        matrix = _Gptq(module, rows, columns, groups, bits, offset, is_ordered)
        if is_ordered or not (bits == 4 or given.get("sym") is True):
            return _WideGptq(module, rows, columns, matrix)
        return matrix

    return opened


@dataclass(frozen=True, slots=True)
class _Gptq(_Grouped):
    """A matrix of GPTQ, whose zero points are `offset` less than they are stored to be. One that `is_ordered` has its
    inputs in the order of their activations, and so in any group.
    """

    bits: int
    offset: int
    is_ordered: bool

    def integers(self) -> _Array:
        module, found = self.module, self.groups_of_inputs()
        if not self.is_ordered and (found != np.arange(self.columns) // (self.columns // self.groups)).any():
            raise FormatError(f"{module.file}: {module.name}.g_idx is out of order, and desc_act is not true")
        stored = _unpacked(module.array("qzeros"), self.bits).astype(np.int16)
        zeros = (stored + self.offset) & (2**self.bits - 1)
        values = _unpacked(module.array("qweight").T, self.bits).T.astype(np.int16)
        return (values - zeros[found]).T

    def scales(self) -> _Array:
        return self.module.floats("scales").T

    def groups_of_inputs(self) -> _Array:
        """Read the group of each input."""
        if "g_idx" not in self.module.parts:
            return np.arange(self.columns) // (self.columns // self.groups)
        found = self.module.array("g_idx")
        if found.min() < 0 or found.max() >= self.groups:
            raise FormatError(f"{self.module.file}: {self.module.name}.g_idx names groups beyond its {self.groups}")
        return found


@dataclass(frozen=True, slots=True)
class _WideGptq(_Matrix):
    """A matrix of GPTQ that int8 in groups of consecutive inputs cannot say."""

    gptq: _Gptq

    def wide(self) -> _Array:
        return self.gptq.integers() * self.gptq.scales()[:, self.gptq.groups_of_inputs()]


def _open_compressed(where: Path, given: Mapping[str, Any]) -> Callable[[_Module], _Matrix]:
    schemes = given.get("config_groups")
    groups = list(schemes.values()) if isinstance(schemes, dict) and len(schemes) <= _MAX_SCHEMES else []
    weights = [one.get("weights") for one in groups if isinstance(one, dict)]
    rules = [rule for rule in weights if isinstance(rule, dict)]
    if not rules or len(rules) < len(weights) or given.get("transform_config") or _is_sparse(given):
        raise _unsupported(where, given, "compressed-tensors with quantized, dense weights")
    bits = rules[0].get("num_bits")
    if bits not in (4, 8) or any(rule.get("num_bits") != bits for rule in rules):
        raise _unsupported(where, given, "compressed-tensors of 4 or 8 bits")

    def opened(module: _Module) -> _Matrix:
        if "weight_g_idx" in module.parts:
            raise FormatError(f"{module.file}: {module.name}.weight_g_idx: activation order is not supported here")
        if "weight_packed" in module.parts:
            return _open_packed(module, bits)
        if module.shape("weight", "I8", "F8_E4M3") and module.parts["weight"].dtype == "I8":
            return _open_int8(module)
        return _open_float8(module, "weight_scale")

    return opened


def _open_packed(module: _Module, bits: int) -> _Matrix:
    rows, packed_columns = module.shape("weight_packed", "I32")
    columns = packed_columns * 32 // bits
    groups = _check_row_scales(module, rows, columns)
    if "weight_zero_point" in module.parts:
        if bits != 4:
            raise module.misfit("weight_zero_point", "expected none beside 8 bits")
        module.check("weight_zero_point", (-(-rows // 8), groups), "I32")
    return _Packed(module, rows, columns, groups, bits)


@dataclass(frozen=True, slots=True)
class _RowScaled(_Grouped):
    """A matrix of compressed-tensors, whose integers are as they are stored."""

    def integers(self) -> _Array:
        return self.module.array("weight")

    def scales(self) -> _Array:
        found = self.module.floats("weight_scale")
        return np.broadcast_to(found.reshape(1 if found.size == 1 else self.rows, -1), (self.rows, self.groups))


@dataclass(frozen=True, slots=True)
class _Packed(_RowScaled):
    """A matrix of compressed-tensors, several of whose integers are in each int32."""

    bits: int

    def integers(self) -> _Array:
        values = _unpacked(self.module.array("weight_packed"), self.bits).astype(np.int16)
        if "weight_zero_point" not in self.module.parts:
            return values - 2 ** (self.bits - 1)
        zeros = _unpacked(self.module.array("weight_zero_point").T, self.bits).T[: self.rows]
        return values - np.repeat(zeros, self.columns // self.groups, axis=1)


def _open_int8(module: _Module) -> _Matrix:
    rows, columns = module.shape("weight", "I8")
    groups = _check_row_scales(module, rows, columns)
    if "weight_zero_point" in module.parts:
        raise module.misfit("weight_zero_point", "expected none: 8 bits without a middle are not supported")
    return _RowScaled(module, rows, columns, groups)


def _open_fp8(where: Path, given: Mapping[str, Any]) -> Callable[[_Module], _Matrix]:
    block = given.get("weight_block_size")
    is_block = isinstance(block, list) and len(block) == 2 and all(type(one) is int and one > 0 for one in block)
    if not (block is None or is_block):
        raise _unsupported(where, given, "fp8 with weight_block_size [rows, columns], or none")

    def opened(module: _Module) -> _Matrix:
        part = "weight_scale_inv" if "weight_scale_inv" in module.parts else "weight_scale"
        return _open_float8(module, part, tuple(block) if block else None)

    return opened


def _open_float8(module: _Module, part: str, block: tuple[int, int] | None = None) -> _Matrix:
    rows, columns = module.shape("weight", "F8_E4M3")
    scale = module.parts.get(part)
    blocked = (-(-rows // block[0]), -(-columns // block[1])) if block else (rows, 1)
    allowed = {(), (1,), (1, 1), blocked} | (set() if block else {(rows,)})
    if scale is None or scale.dtype not in _FLOATS or scale.shape not in allowed:
        if scale is None:
            raise FormatError(f"{module.file}: {shown(module.name)} has no {part}")
        raise module.misfit(part, f"expected floats of one number, or {list(blocked)}")

    return _Float8(module, rows, columns, part, block)


@dataclass(frozen=True, slots=True)
class _Float8(_Matrix):
    """A matrix of floats of 8 bits, with one scale, or one for each row, or for each `block` of (rows, columns)."""

    part: str
    block: tuple[int, int] | None

    def wide(self) -> _Array:
        factors = self.module.floats(self.part)
        if factors.size == 1:
            factors = factors.reshape(1, 1)
        elif self.block:
            rows, columns = self.block
            factors = np.repeat(np.repeat(factors, rows, axis=0)[: self.rows], columns, axis=1)[:, : self.columns]
        else:
            factors = factors.reshape(self.rows, 1)
        return self.module.floats("weight") * factors


_OPENERS: Final[Mapping[str, Callable[[Path, Mapping[str, Any]], Callable[[_Module], _Matrix]]]] = {
    "awq": _open_awq,
    "gptq": _open_gptq,
    "compressed-tensors": _open_compressed,
    "fp8": _open_fp8,
}


def _check_groups(module: _Module, part: str, columns: int, groups: int) -> None:
    if columns % groups:
        raise module.misfit(part, f"expected whole groups of {columns} inputs")


def _check_row_scales(module: _Module, rows: int, columns: int) -> int:
    """Return the groups of each row by the shape of `weight_scale`: (rows, groups), (rows,) or of one number."""
    scale = module.parts.get("weight_scale")
    if scale is None:
        raise FormatError(f"{module.file}: {shown(module.name)} has no weight_scale")
    if scale.dtype not in _FLOATS:
        raise module.misfit("weight_scale", f"expected {' or '.join(_FLOATS)}")
    if scale.shape in ((), (1,), (1, 1), (rows,)):
        return 1
    if len(scale.shape) != 2 or scale.shape[0] != rows or scale.shape[1] == 0 or columns % scale.shape[1]:
        raise module.misfit("weight_scale", f"expected whole groups of rows of [{rows}, {columns}]")
    return scale.shape[1]


def _repeated(matrix: _Grouped, unit: int) -> Callable[[], _Array]:
    """Return a function that computes flat scales, one for each `unit` elements."""
    times = matrix.columns // matrix.groups // unit
    return lambda: np.repeat(matrix.scales(), times, axis=1).astype(np.float32).ravel()


def _rounded(matrix: _Matrix, dtype: str) -> Callable[[], _Array]:
    return lambda: matrix.wide().astype(_DTYPES[dtype])


def _is_sparse(given: Mapping[str, Any]) -> bool:
    sparsity = given.get("sparsity_config")
    return isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense"


def _unsupported(where: Path, given: Mapping[str, Any], supported: str) -> FormatError:
    return FormatError(f"{where}: quantization_config {shown(given)} is not supported; supported is {supported}")
