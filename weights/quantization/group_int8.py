"""A Hugging Face checkpoint with its matrices in int8, a scale per group of elements: safetensors under the same names.

Beside `x.weight` (I8) lies `x.scales` (F32, flat groups over the rows); `quantization_config` in config.json says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weights.dtypes import GROUP_INT8_METHOD
from weights.errors import WeightsError
from weights.formats.safetensors import write_safetensors
from weights.loading.stage_transforms import dequantize_int8, quantize_int8
from weights.quantization.folders import (
    ErrorSum,
    Progress,
    QuantizationReport,
    QuantizedTensor,
    SourceModel,
    WrittenTensors,
    copy_small_files,
    float_parts,
    read_array,
    staged_target,
)

_EMBEDDING: Final = "model.embed_tokens.weight"
_ROUTER: Final = ".gate.weight"

_Read = Callable[[], bytes | memoryview]


def quantize_groups(
    name: str, matrix: npt.NDArray[Any], group_size: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32], QuantizedTensor]:
    """Return int8 values of the matrix's shape, the scales of its flat groups, and what was lost.

    Raises WeightsError naming the tensor for infinities, NaNs, and a size of no whole number of groups.
    """
    errors = ErrorSum()
    values, scales = [], []
    try:
        for part in float_parts(matrix, group_size):
            packed, part_scales = quantize_int8(part, group_size)
            errors.add(part, dequantize_int8(packed, part_scales, group_size))
            values.append(packed)
            scales.append(part_scales)
    except WeightsError as error:
        raise WeightsError(f"tensor {name}: {error}") from None
    whole, all_scales = np.concatenate(values).reshape(matrix.shape), np.concatenate(scales)
    return whole, all_scales, errors.result(name, "I8", whole.nbytes + all_scales.nbytes)


def export_group_int8(
    model: SourceModel, target: Path, group_size: int, progress: Progress = lambda done, total: None
) -> QuantizationReport:
    """Write a folder that the engine runs without unpacking it. An embedding that is no head stays as it is.

    Raises WeightsError for what int8 cannot express.
    """
    done = WrittenTensors(model.nbytes, progress)

    def values_of(name: str) -> bytes:
        # HAZARD: the scales are a tensor of another type, written long before: the matrix is quantized twice, so that
        # one matrix is in memory at a time.
        values, _, row = quantize_groups(name, read_array(model.tensors[name]), group_size)
        done.count(model.tensors[name].nbytes - model.tensors[name].nbytes // 2, row)
        return values.tobytes()

    def scales_of(name: str) -> bytes:
        _, scales, _ = quantize_groups(name, read_array(model.tensors[name]), group_size)
        done.count(model.tensors[name].nbytes // 2)
        return scales.tobytes()

    written: dict[str, tuple[str, tuple[int, ...], _Read]] = {}
    for name, tensor in model.tensors.items():
        note = _reason_to_keep(model, name, tensor.shape, group_size)
        if note is not None:
            written[name] = tensor.dtype, tensor.shape, lambda n=name, t=tensor, w=note: done.as_it_is(n, t, w)  # type: ignore[misc]
            continue
        num_groups = int(np.prod(tensor.shape)) // group_size
        written[name] = "I8", tensor.shape, lambda name=name: values_of(name)  # type: ignore[misc]
        scales_name = f"{name.removesuffix('.weight')}.scales"
        written[scales_name] = "F32", (num_groups,), lambda name=name: scales_of(name)  # type: ignore[misc]
    with staged_target(target, model.nbytes) as staged:
        staged.mkdir()
        write_safetensors(staged / "model.safetensors", written, {"format": "pt"})
        copy_small_files(model.folder, staged)
        config = dict(model.config) | {
            "quantization_config": {"quant_method": GROUP_INT8_METHOD, "group_size": group_size}
        }
        (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return done.report()


def _reason_to_keep(model: SourceModel, name: str, shape: tuple[int, ...], group_size: int) -> str | None:
    """Return why a tensor is not quantized, "" for a vector; None for one that is."""
    if len(shape) != 2 or not name.endswith(".weight"):
        return "no matrix" if len(shape) > 2 else ""
    if name == _EMBEDDING and not model.is_tied:
        return "looked up by rows"
    if name.endswith(_ROUTER):
        return "routes to experts"
    if int(np.prod(shape)) % group_size:
        return f"no whole number of groups of {group_size}"
    return None
