"""A Hugging Face checkpoint as a Kuiper int8 file with its config and tokenizer beside it, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weights.errors import FormatError
from weights.formats.kuiper import LAYER_NAMES, TOP_NAMES, KuiperHeader, write_kuiper
from weights.formats.tensors import SourceTensor
from weights.quantization.folders import (
    ErrorSum,
    Progress,
    QuantizationReport,
    SourceModel,
    WrittenTensors,
    copy_small_files,
    read_array,
    staged_target,
)
from weights.quantization.group_int8 import quantize_groups

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
        values, latest["scales"], row = quantize_groups(f"{stem}.weight", read_array(tensor), group_size)
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
