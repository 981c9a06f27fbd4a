"""A Hugging Face checkpoint with its matrices in int8, a scale per group of elements: safetensors under the same names.

Beside `x.weight` (I8) lies `x.scales` (F32, flat groups over the rows); `quantization_config` in config.json says so.

Or it is a Kuiper int8 file with its config and tokenizer beside it, written one tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from infra.offline.folders import (
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
from weights.formats.kuiper import LAYER_NAMES, TOP_NAMES, KuiperHeader, write_kuiper
from weights.formats.safetensors import write_safetensors
from weights.formats.tensors import SourceTensor
from weights.loading.stage_transforms import dequantize_int8, quantize_int8
from weights.records.dtypes import GROUP_INT8_METHOD
from weights.records.errors import FormatError, WeightsError

_EMBEDDING: Final = "model.embed_tokens.weight"
_ROUTER: Final = ".gate.weight"

_Read = Callable[[], bytes | memoryview]


def _quantize_groups(
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
        values, _, row = _quantize_groups(name, read_array(model.tensors[name]), group_size)
        done.count(model.tensors[name].nbytes - model.tensors[name].nbytes // 2, row)
        return values.tobytes()

    def scales_of(name: str) -> bytes:
        _, scales, _ = _quantize_groups(name, read_array(model.tensors[name]), group_size)
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


_MODEL_TYPES: Final = ("llama", "qwen2")

_Array = npt.NDArray[Any]


def export_kuiper(
    model: SourceModel, target: Path, group_size: int, progress: Progress = lambda done, total: None
) -> QuantizationReport:
    """Write `target`/model.bin and copies of the small files of the model's folder.

    q and k stay in halves, norms and the embedding float32, q/k/v biases behind the rest.
    Raises FormatError for a model that the format cannot hold, and WeightsError for what int8 cannot express.
    """
    header = _kuiper_header_of(model, group_size)
    originals = _by_stored_name(model, header)
    latest: dict[str, _Array] = {}
    done = WrittenTensors(model.nbytes, progress)

    def quantized(stem: str) -> bytes:
        # Values and scales are asked for one after the other; one matrix is in memory at a time.
        tensor = originals[f"{stem}.weight"]
        values, latest["scales"], row = _quantize_groups(f"{stem}.weight", read_array(tensor), group_size)
        done.count(tensor.nbytes, row)
        return values.tobytes()

    def widened(name: str) -> bytes:
        tensor = originals[name]
        values = read_array(tensor).astype(np.float32)
        errors = ErrorSum()
        errors.add(values.reshape(-1), values.reshape(-1))
        note = "float32 in this form" if values.ndim > 1 else ""
        done.count(tensor.nbytes, errors.result(name, "F32", values.nbytes, note))
        return values.tobytes()

    readers: dict[str, Callable[[], bytes | memoryview]] = {}
    for name, dtype, _ in header.layout():
        stem, _, leaf = name.rpartition(".")
        if dtype == "I8":
            readers[name] = lambda stem=stem: quantized(stem)  # type: ignore[misc]
        elif leaf == "scales":
            readers[name] = lambda: latest["scales"].tobytes()
        else:
            readers[name] = lambda name=name: widened(name)  # type: ignore[misc]
    with staged_target(target, model.nbytes) as staged:
        staged.mkdir()
        write_kuiper(staged / "model.bin", header, readers)
        copy_small_files(model.folder, staged)
    return done.report()


def _kuiper_header_of(model: SourceModel, group_size: int) -> KuiperHeader:
    """Return the header for a transformers config. Raises FormatError naming what the format cannot say."""
    config, where = model.config, model.folder / "config.json"
    if config.get("model_type") not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise FormatError(f"{where}: model_type {config.get('model_type')!r}; a Kuiper file holds {known}")
    dim, heads = model.integer("hidden_size"), model.integer("num_attention_heads")
    if config.get("head_dim") not in (None, dim // heads):
        raise FormatError(f"{where}: head_dim {config['head_dim']}; a Kuiper file has only hidden_size / heads")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise FormatError(f"{where}: attention_bias or mlp_bias; a Kuiper file has room for qwen2's biases only")
    return KuiperHeader(
        dim=dim,
        hidden_dim=model.integer("intermediate_size"),
        num_layers=model.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=model.integer("num_key_value_heads", heads),
        vocab_size=model.integer("vocab_size"),
        max_seq_len=model.integer("max_position_embeddings"),
        group_size=group_size,
        shared_classifier=model.is_tied,
        has_biases=config.get("model_type") == "qwen2",
    )


def _by_stored_name(model: SourceModel, header: KuiperHeader) -> dict[str, SourceTensor]:
    found: dict[str, SourceTensor] = {}
    for name, _, shape in header.layout():
        stem, _, leaf = name.rpartition(".")
        if leaf == "scales":
            continue
        parts = stem.split(".")
        given = f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}" if parts[0] == "layers" else TOP_NAMES[stem]
        tensor = model.tensors.get(f"{given}.{leaf}")
        if tensor is None or tensor.shape != shape:
            state = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise FormatError(f"{model.folder}: tensor {given}.{leaf} is {state}, expected floats of {list(shape)}")
        found[name] = tensor
    return found
