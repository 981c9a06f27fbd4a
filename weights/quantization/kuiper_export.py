"""A Hugging Face checkpoint as a Kuiper int8 file with its config and tokenizer beside it, one tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weights.errors import FormatError, WeightsError
from weights.formats.checkpoint import read_checkpoint
from weights.formats.kuiper import LAYER_NAMES, TOP_NAMES, KuiperHeader, write_kuiper
from weights.formats.tensors import SourceTensor
from weights.formats.weight_files import read_json
from weights.loading.stage_transforms import DEFAULT_GROUP_SIZE, dequantize_int8, quantize_int8
from weights.quantization.report import QuantizedTensor, tensor_error

_FLOATS: Final = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_MODEL_TYPES: Final = ("llama", "qwen2")

_Array = npt.NDArray[Any]


def export_kuiper(
    source: Path, target: Path, *, group_size: int = DEFAULT_GROUP_SIZE, progress: Callable[[int], None] | None = None
) -> list[QuantizedTensor]:
    """Write `target`/model.bin and copies of the small files of `source`; `progress` hears of the elements done.

    q and k stay in halves, norms and the embedding float32, q/k/v biases behind the rest. Returns each matrix's error.
    Raises FormatError for a model that the format cannot hold, and WeightsError for what int8 cannot express.
    """
    config = read_json(source / "config.json")
    header = _kuiper_header_of(source, config, group_size)
    (component,) = read_checkpoint(source).components
    originals = _by_stored_name(source, component.tensors, header)
    if target.exists():
        raise FormatError(f"{target}: exists already")
    target.mkdir(parents=True)
    errors: list[QuantizedTensor] = []
    latest: dict[str, _Array] = {}

    def quantized(stem: str) -> bytes:
        # Values and scales are asked for one after the other; one matrix is in memory at a time.
        values = _read_floats(originals[f"{stem}.weight"])
        try:
            packed, latest["scales"] = quantize_int8(values, group_size)
        except WeightsError as error:
            raise WeightsError(f"tensor {stem}.weight: {error}") from None
        unpacked = dequantize_int8(packed, latest["scales"], group_size)
        errors.append(tensor_error(f"{stem}.weight", values, unpacked, packed.nbytes + latest["scales"].nbytes))
        if progress:
            progress(values.size)
        return packed.tobytes()

    readers: dict[str, Callable[[], bytes | memoryview]] = {}
    for name, dtype, _ in header.layout():
        stem, _, leaf = name.rpartition(".")
        if dtype == "I8":
            readers[name] = lambda stem=stem: quantized(stem)  # type: ignore[misc]
        elif leaf == "scales":
            readers[name] = lambda: latest["scales"].tobytes()
        else:
            readers[name] = lambda name=name: _read_floats(originals[name]).tobytes()  # type: ignore[misc]
    write_kuiper(target / "model.bin", header, readers)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in (".json", ".jinja", ".model", ".txt") and "safetensors" not in file.name:
            shutil.copyfile(file, target / file.name)
    return errors


def _kuiper_header_of(source: Path, config: dict[str, Any], group_size: int) -> KuiperHeader:
    """Return the header for a transformers config. Raises FormatError naming what the format cannot say."""
    where = source / "config.json"
    if config.get("model_type") not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise FormatError(f"{where}: model_type {config.get('model_type')!r}; a Kuiper file holds {known}")
    try:
        dim, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        header = KuiperHeader(
            dim=dim,
            hidden_dim=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            vocab_size=int(config["vocab_size"]),
            max_seq_len=int(config["max_position_embeddings"]),
            group_size=group_size,
            shared_classifier=bool(config.get("tie_word_embeddings", False)),
            has_biases=config.get("model_type") == "qwen2",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: not the config of a language model: {error}") from None
    if config.get("head_dim") not in (None, dim // heads):
        raise FormatError(f"{where}: head_dim {config['head_dim']}; a Kuiper file has only hidden_size / heads")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise FormatError(f"{where}: attention_bias or mlp_bias; a Kuiper file has room for qwen2's biases only")
    return header


def _by_stored_name(source: Path, tensors: dict[str, SourceTensor], header: KuiperHeader) -> dict[str, SourceTensor]:
    found: dict[str, SourceTensor] = {}
    for name, _, shape in header.layout():
        stem, _, leaf = name.rpartition(".")
        if leaf == "scales":
            continue
        parts = stem.split(".")
        given = f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}" if parts[0] == "layers" else TOP_NAMES[stem]
        tensor = tensors.get(f"{given}.{leaf}")
        if tensor is None or tensor.shape != shape or tensor.dtype not in _FLOATS:
            state = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise FormatError(f"{source}: tensor {given}.{leaf} is {state}, expected floats of {list(shape)}")
        found[name] = tensor
    return found


def _read_floats(tensor: SourceTensor) -> npt.NDArray[np.float32]:
    """Read one tensor as float32."""
    return np.frombuffer(tensor.read(), _FLOATS[tensor.dtype]).astype(np.float32).reshape(tensor.shape)
