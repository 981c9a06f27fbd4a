"""Pipelines in low precision, as UIs, trainers and libraries publish them, read as plain ones.

Each matrix is computed once in float32, by the formula of who wrote it, and rounded once to 16 bits: F8 without
scales, `scaled_matrices.py`, `bitsandbytes.py`, `torchao.py`, `svdquant.py`. What our own `atelier quantize` writes,
and `fp8_linear.py` computes with, stays as it is. Forms that are not read are refused by their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from weights.formats.bitsandbytes import METHOD, take_bitsandbytes
from weights.formats.published_quantization import ComputedTensor
from weights.formats.quantized import FLOATS, FLOATS8, Array, Quantized, read_rows, round_to
from weights.formats.scaled_matrices import BESIDE, Weights, take_scaled
from weights.formats.svdquant import METHOD as NUNCHAKU
from weights.formats.svdquant import take_svdquant
from weights.formats.tensors import SourceTensor
from weights.formats.torchao import METHOD as TORCHAO
from weights.formats.torchao import take_torchao
from weights.formats.untrusted import shown
from weights.records.errors import FormatError

_FORMS: Final = (
    "F8, int8, mxfp8 and nvfp4 with scales (ComfyUI, ModelOpt), SVDQuant (nunchaku), bitsandbytes, torchao's int8 and "
    "fp8, and GGUF"
)
PLAIN_METHODS: Final = (
    METHOD,
    TORCHAO,
    "modelopt",
    "fp8",
    NUNCHAKU,
)  # `quant_method` of configs whose weights are read as plain ones
# Ends of names, and the form that has them.
_UNREAD: Final = {
    ".wscales": "SVDQuant (nunchaku) without its qweight",
    ".wzeros": "SVDQuant (nunchaku) without its qweight",
    ".qweight": "AWQ or GPTQ",
    ".weight_zeros": "ComfyUI's awq_w4a16",
    ".weight_codebook": "ComfyUI's asym_w4a8_int8",
    ".weight_s_rel": "ComfyUI's asym_w4a8_int8",
    ".weight_quantizer._scale": "ModelOpt before its export",
    ".weight_quantizer._amax": "ModelOpt before its export",
    ".weight_quantizer._double_scale": "ModelOpt before its export",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "fp8 with scales of blocks",
}


def read_quantized_parts(path: Path, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]) -> Weights:
    """Return the matrices in low precision among the tensors of a component or file, and all that is plain.

    Raises FormatError naming the tensor and its form: one that is not read, parts that do not fit.
    """
    packed = take_svdquant(path, tensors, metadata)
    for name in packed.tensors:
        if form := next((form for end, form in _UNREAD.items() if name.endswith(end)), ""):
            raise FormatError(f"{path}: {shown(name)} is of {form}, which is not read; read are {_FORMS}")
    first = take_torchao(path, packed.tensors, metadata)
    scaled = take_scaled(path, first.tensors, metadata)
    others = take_bitsandbytes(path, scaled.tensors)
    found = packed.quantized | first.quantized | scaled.quantized | others.quantized
    for name, tensor in others.tensors.items():
        if name in found:
            continue
        if tensor.dtype in FLOATS8:
            found[name] = _cast(tensor)
        elif tensor.dtype in ("I8", "U8") and name.endswith(".weight"):
            what = "8-bit integers without a scale" if tensor.dtype == "I8" else "bytes, and nothing says what they are"
            raise FormatError(f"{path}: {shown(name)} is of {what}; read are {_FORMS}")
    return Weights(others.tensors, found)


@dataclass(frozen=True, slots=True)
class _Cast:
    """Elements as they are."""

    tensor: SourceTensor

    def compute(self, start: int, stop: int) -> Array:
        return read_rows(self.tensor, start, stop).astype(np.float32)


def _cast(tensor: SourceTensor) -> Quantized:
    return Quantized(tensor.file, tensor.shape, _Cast(tensor))


def wide_type(tensors: Mapping[str, SourceTensor]) -> str:
    """Return the type that wide tensors get: float16 where most others are that, else bfloat16."""
    types = [tensor.dtype for tensor in tensors.values()]
    return "F16" if types.count("F16") > types.count("BF16") + types.count("F32") else "BF16"


def most_common_float(tensors: Mapping[str, SourceTensor]) -> str:
    """Return the plain floating type that most of the tensors have, bfloat16 where none has any."""
    counts = Counter(tensor.dtype for tensor in tensors.values() if tensor.dtype in FLOATS)
    return counts.most_common(1)[0][0] if counts else "BF16"


def widened(
    tensors: Mapping[str, SourceTensor], quantized: Mapping[str, Quantized], dtype: str
) -> dict[str, SourceTensor]:
    """Return the tensors with all that are floats, and what is `quantized`, in one type. Nothing is read yet."""
    return {
        name: wide(quantized[name], dtype)
        if name in quantized
        else wide(_cast(tensor), dtype)
        if tensor.dtype in FLOATS and tensor.dtype != dtype
        else tensor
        for name, tensor in tensors.items()
    }


def wide(matrix: Quantized, dtype: str) -> ComputedTensor:
    """Return a matrix that is computed when it is read, in a plain type."""
    return ComputedTensor(matrix.file, dtype, matrix.shape, lambda: round_to(matrix.wide(), dtype))


def read_as_plain(
    path: Path, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]
) -> dict[str, SourceTensor]:
    """Return the tensors of a component as plain ones where some are in low precision, unless our own layers compute
    with them.

    Raises FormatError as `read_quantized_parts` does.
    """
    if _is_our_own(tensors):
        return dict(tensors)
    found = read_quantized_parts(path, tensors, metadata)
    return widened(found.tensors, found.quantized, wide_type(found.tensors)) if found.quantized else found.tensors


def _is_our_own(tensors: Mapping[str, SourceTensor]) -> bool:
    """Return whether all matrices of 8 bits have scales as `atelier quantize` writes them, without anything else."""
    if not any(tensor.dtype in FLOATS8 for tensor in tensors.values()):
        return False
    for name, tensor in tensors.items():
        if name.endswith(BESIDE):
            return False
        if tensor.dtype in FLOATS8:
            scale = tensors.get(f"{name}_scale")
            is_ours = tensor.dtype == "F8_E4M3" and len(tensor.shape) == 2 and scale is not None
            if not is_ours or scale is None or scale.shape not in ((), (tensor.shape[0], 1)):
                return False
    return True
