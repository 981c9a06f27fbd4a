"""A diffusers pipeline whose denoiser has its matrices in float8 (e4m3), with scales that are powers of two.

Beside `x.weight` (F8_E4M3) lies `x.weight_scale` (F32): one number, or one per row, (rows, 1). A power of two is exact
in bfloat16 and float16 too, so a cast on the way into the store changes no weight, and costs no precision: e4m3 rounds
relatively, but for what is 2^14 times smaller than the largest element.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from infra.offline.folders import (
    ErrorSum,
    Progress,
    QuantizationReport,
    QuantizedTensor,
    WrittenTensors,
    float_parts,
    read_array,
    staged_target,
)
from weights.formats.checkpoint import read_checkpoint
from weights.formats.safetensors import write_safetensors
from weights.formats.tensors import SourceTensor
from weights.records.errors import FormatError, WeightsError

Scales = Literal["row", "tensor"]
_FLOATS: Final = ("F32", "F16", "BF16")
_MAX_E4M3: Final = 448.0
_LEAST_EXPONENT: Final = -24  # of a float16: rows that are smaller than 2^-15 lose precision instead

_Read = Callable[[], bytes | memoryview]


def export_fp8(
    source: Path,
    target: Path,
    component: str,
    kept: Sequence[str],
    scales: Scales = "row",
    progress: Progress = lambda done, total: None,
) -> QuantizationReport:
    """Write the pipeline of the folder `source` to the new folder `target`; but for `component`, files are copied.

    Matrices whose names fit a pattern of `kept` stay as they are. Raises FormatError for what is no such pipeline, and
    WeightsError for infinities and NaNs; then `target` is not there.
    """
    checkpoint = read_checkpoint(source)
    part = next((part for part in checkpoint.components if part.name == component), None)
    if checkpoint.kind != "diffusion" or part is None:
        raise FormatError(f"{source}: no diffusers pipeline with a {component!r}")
    done = WrittenTensors(sum(tensor.nbytes for tensor in part.tensors.values()), progress)

    def values_of(name: str, tensor: SourceTensor) -> bytes:
        values, _, row = _quantize_rows(name, read_array(tensor), scales)
        done.count(tensor.nbytes, row)
        return values.tobytes()

    def scales_of(name: str, tensor: SourceTensor) -> bytes:
        return _scales_of(name, read_array(tensor), scales).tobytes()

    written: dict[str, tuple[str, tuple[int, ...], _Read]] = {}
    for name, tensor in part.tensors.items():
        note = _reason_to_keep(name, tensor, kept)
        if note is not None:
            written[name] = tensor.dtype, tensor.shape, lambda n=name, t=tensor, w=note: done.as_it_is(n, t, w)  # type: ignore[misc]
            continue
        shape = (tensor.shape[0], 1) if scales == "row" else ()
        written[name] = "F8_E4M3", tensor.shape, lambda n=name, t=tensor: values_of(n, t)  # type: ignore[misc]
        written[f"{name}_scale"] = "F32", shape, lambda n=name, t=tensor: scales_of(n, t)  # type: ignore[misc]
    nbytes = sum(tensor.nbytes for each in checkpoint.components for tensor in each.tensors.values())
    with staged_target(target, nbytes) as new:
        shutil.copytree(source, new, ignore=lambda folder, names: _left_out(source / part.folder, folder, names))
        write_safetensors(new / part.folder / "diffusion_pytorch_model.safetensors", written, {"format": "pt"})
    return done.report()


def _quantize_rows(
    name: str, matrix: npt.NDArray[Any], scales: Scales
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32], QuantizedTensor]:
    """Return e4m3 values of the matrix's shape, their scales, and what was lost.

    Raises WeightsError naming the tensor for infinities and NaNs.
    """
    found = _scales_of(name, matrix, scales)
    by_row = np.broadcast_to(found, (len(matrix), 1))
    values = np.empty(matrix.shape, ml_dtypes.float8_e4m3fn)
    errors, start = ErrorSum(), 0
    for flat in float_parts(matrix, matrix.shape[1]):
        part = flat.reshape(-1, matrix.shape[1])
        here = slice(start, start := start + len(part))
        values[here] = (part / by_row[here]).astype(ml_dtypes.float8_e4m3fn)
        errors.add(part, values[here].astype(np.float32) * by_row[here])
    return values, found, errors.result(name, "F8_E4M3", values.nbytes + found.nbytes)


def _scales_of(name: str, matrix: npt.NDArray[Any], scales: Scales) -> npt.NDArray[np.float32]:
    """Return the least powers of two by which all elements are at most 448: (rows, 1), or one number; 1 for zeros."""
    largest = np.abs(matrix).max(axis=1, keepdims=True).astype(np.float32)
    if not np.isfinite(largest).all():
        raise WeightsError(f"tensor {name}: float8 cannot express its infinities or NaNs")
    largest = largest if scales == "row" else largest.max()
    exponents = np.ceil(np.log2(largest / np.float32(_MAX_E4M3), where=largest > 0, out=np.zeros_like(largest)))
    exponents = np.maximum(exponents, _LEAST_EXPONENT)
    return np.asarray(np.ldexp(np.float32(1), exponents.astype(np.int32)), np.float32)


def _reason_to_keep(name: str, tensor: SourceTensor, kept: Sequence[str]) -> str | None:
    """Return why a tensor is not quantized, "" for what is no matrix; None for one that is."""
    if len(tensor.shape) != 2 or not name.endswith(".weight") or tensor.dtype not in _FLOATS or not tensor.nbytes:
        return ""
    return "keeps its precision" if any(fnmatchcase(name, pattern) for pattern in kept) else None


def _left_out(denoiser: Path, folder: str, names: list[str]) -> list[str]:
    """Return the files that are not copied: hidden ones, and of the denoiser all but its config."""
    return [name for name in names if name.startswith(".") or (Path(folder) == denoiser and name != "config.json")]
