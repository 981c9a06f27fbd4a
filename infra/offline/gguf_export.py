"""A Hugging Face checkpoint as one GGUF file (version 3) that llama.cpp, gguf-py and our engine open, tensor by tensor.

Matrices are quantized; a head is kept at 8 bits at least, as llama.cpp does. Norms, biases and the routers of experts
are float32. What has rows of no whole number of blocks is float16. Blocks are gguf-py's, bit for bit: gguf-py 0.19,
`quants.py`, classes `Q8_0` and `Q4_0` (which follow ggml's reference code).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from infra.offline.folders import (
    ErrorSum,
    Progress,
    QuantizationReport,
    QuantizedTensor,
    SourceModel,
    WrittenTensors,
    float_parts,
    read_array,
    staged_target,
)
from infra.offline.gguf_vocabulary import vocabulary_metadata
from weights.formats.ggml_values import unpack_blocks
from weights.formats.gguf import GgufValue, encode_gguf_header, write_gguf
from weights.formats.gguf_names import EXPERT_NAMES, FREQUENCY_FACTORS, LAYER_NAMES, TOP_NAMES
from weights.formats.tensors import SourceTensor
from weights.records.dtypes import tensor_nbytes
from weights.records.errors import FormatError, WeightsError

BlockKind = Literal["Q8_0", "Q4_0", "F32", "F16", "BF16"]
_PLAIN: Final = ("F32", "F16", "BF16")  # kinds without blocks

# model_type -> general.architecture, and whether rows of q and k go into the order of neighbouring RoPE pairs.
_ARCHITECTURES: Final = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "mixtral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
    "qwen3_moe": ("qwen3moe", False),
}
_MIXTRAL_NAMES: Final = {
    "mlp.gate": "block_sparse_moe.gate",
    "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
    "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
    "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
}
# general.file_type, llama.cpp's LLAMA_FTYPE_MOSTLY_*
_FILE_TYPES: Final = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
_COMPUTED: Final = "rotary_emb.inv_freq"  # that old checkpoints saved
_FLOAT16_MAX: Final = 65504.0
_BLOCK_ELEMENTS: Final = 32
_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Written:
    """A tensor of the file: its type, what it is made of, and the heads whose rows are to be reordered (0: none).

    Several `sources` are experts, one behind the other.
    """

    kind: str
    shape: tuple[int, ...]
    sources: tuple[SourceTensor, ...]
    num_heads: int = 0
    note: str = ""


def export_gguf(
    model: SourceModel, target: Path, kind: BlockKind, progress: Progress = lambda done, total: None
) -> QuantizationReport:
    """Write `target`, with the tokenizer of the model's folder.

    Raises FormatError for an architecture, a RoPE scaling or a tokenizer that the file cannot hold, and WeightsError
    for values that its types cannot express.
    """
    architecture, is_interleaved = _architecture(model)
    tensors = dict(_planned(model, kind, is_interleaved))
    metadata = _metadata(model, architecture, kind)
    metadata |= vocabulary_metadata(model.folder, model.config, tensors["token_embd.weight"].shape[0])
    factors = _frequency_factors(model)
    infos = {name: (written.kind, written.shape) for name, written in tensors.items()}
    readers: list[tuple[int, Callable[[], bytes | memoryview]]] = []
    if factors is not None:
        infos = {FREQUENCY_FACTORS: ("F32", factors.shape), **infos}
        readers.append((factors.nbytes, factors.tobytes))
    done = WrittenTensors(model.nbytes, progress)

    def packed(name: str, written: _Written) -> bytes:
        data, row = _packed(name, written)
        done.count(sum(source.nbytes for source in written.sources), row)
        return data

    for name, written in tensors.items():
        read = lambda name=name, written=written: packed(name, written)  # noqa: E731
        readers.append((tensor_nbytes(written.kind, written.shape), read))
    header = encode_gguf_header(metadata, infos)
    with staged_target(target, len(header) + sum(nbytes for nbytes, _ in readers)) as staged:
        write_gguf(staged, header, readers)
    return done.report()


def _architecture(model: SourceModel) -> tuple[str, bool]:
    found = _ARCHITECTURES.get(str(model.config.get("model_type")))
    if found is None:
        raise FormatError(
            f"{model.folder / 'config.json'}: model_type {model.config.get('model_type')!r} cannot be written as GGUF; "
            f"known are {', '.join(_ARCHITECTURES)}"
        )
    return found


def _planned(model: SourceModel, kind: BlockKind, is_interleaved: bool) -> Iterator[tuple[str, _Written]]:
    """Yield the file's tensors by name, those outside of layers first. Raises FormatError for one that has no place."""
    heads = model.integer("num_attention_heads")
    reordered = {"attn_q": heads, "attn_k": model.integer("num_key_value_heads", heads)} if is_interleaved else {}
    places = {theirs: ours for ours, theirs in TOP_NAMES.items()}
    is_mixtral = model.config.get("model_type") == "mixtral"
    in_layer = {
        _MIXTRAL_NAMES.get(theirs, theirs) if is_mixtral else theirs: ours
        for ours, theirs in (LAYER_NAMES | EXPERT_NAMES).items()
    }
    for layer in range(model.integer("num_hidden_layers")):
        places |= {f"model.layers.{layer}.{theirs}": f"blk.{layer}.{ours}" for theirs, ours in in_layer.items()}
    num_experts = _num_experts(model)
    left = {name for name in model.tensors if not name.endswith(_COMPUTED)}
    for theirs, ours in places.items():
        for leaf in ("weight", "bias"):
            part, several = ours.rpartition(".")[2], "*" in theirs
            names = [f"{theirs}.{leaf}".replace("*", str(expert)) for expert in range(num_experts if several else 1)]
            if not names or names[0] not in left:
                continue
            if missing := [name for name in names if name not in left]:
                raise FormatError(f"{model.folder}: tensor {missing[0]!r} is missing, {names[0]!r} is there")
            left.difference_update(names)
            if part == "output" and model.is_tied:
                continue
            sources = tuple(model.tensors[name] for name in names)
            if other := [name for name in names if model.tensors[name].shape != sources[0].shape]:
                raise FormatError(f"{model.folder}: tensor {other[0]!r} has another shape than {names[0]!r}")
            is_head = part == "output" or (part == "token_embd" and model.is_tied)
            written, note = _kind_of(part, sources[0].shape, "Q8_0" if is_head and kind not in _PLAIN else kind)
            shape = (num_experts, *sources[0].shape) if several else sources[0].shape
            yield f"{ours}.{leaf}", _Written(written, shape, sources, reordered.get(part, 0), note)
    if left:
        raise FormatError(f"{model.folder}: tensor {min(left)!r} has no name in GGUF")


def _num_experts(model: SourceModel) -> int:
    """Return the number of experts, which configs call one or the other; 0 for a model without."""
    keys = [key for key in ("num_local_experts", "num_experts") if model.config.get(key) is not None]
    return model.integer(keys[0]) if keys else 0


def _kind_of(part: str, shape: tuple[int, ...], kind: BlockKind) -> tuple[str, str]:
    if len(shape) == 1 or kind == "F32":
        return "F32", ""
    if part == "ffn_gate_inp":
        return "F32", "routes to experts"
    if kind not in _PLAIN and shape[-1] % _BLOCK_ELEMENTS:
        return "F16", f"rows of {shape[-1]} are no whole number of blocks of {_BLOCK_ELEMENTS}"
    return kind, ""


def _packed(name: str, written: _Written) -> tuple[bytes, QuantizedTensor]:
    """Return a tensor's bytes and what was lost."""
    errors, data = ErrorSum(), []
    try:
        for source in written.sources:
            array = read_array(source)
            if written.num_heads:
                # Rows of q and k from halves (rotate_half) to neighbouring pairs, head by head.
                halves = array.reshape(written.num_heads, 2, -1, *array.shape[1:])
                array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
            for part in float_parts(array, array.shape[-1] if array.ndim > 1 else 1):
                raw, restored = _pack_part(written.kind, part)
                errors.add(part, restored)
                data.append(raw)
    except WeightsError as error:
        raise WeightsError(f"tensor {name}: {error}") from None
    whole = b"".join(data)
    return whole, errors.result(name, written.kind, len(whole), written.note)


def _pack_part(kind: str, part: npt.NDArray[np.float32]) -> tuple[bytes, npt.NDArray[np.float32]]:
    if kind == "F32":
        return part.tobytes(), part
    if kind == "F16":
        if not np.abs(part).max(initial=0) <= _FLOAT16_MAX:
            raise WeightsError("F16 cannot express its values")
        half = part.astype(np.float16)
        return half.tobytes(), half.astype(np.float32)
    if kind == "BF16":
        brief = torch.from_numpy(part).bfloat16()
        return brief.view(torch.int16).numpy().tobytes(), brief.float().numpy()
    packed = _quantize_blocks(kind, part)
    return packed.tobytes(), unpack_blocks(kind, torch.from_numpy(packed)).numpy()


def _metadata(model: SourceModel, architecture: str, kind: BlockKind) -> dict[str, GgufValue]:
    """Return the general and the architecture's keys of the config."""
    config = model.config
    heads, hidden_size = model.integer("num_attention_heads"), model.integer("hidden_size")
    head_dim = model.integer("head_dim", hidden_size // heads)
    rope = _rope(model)
    found: dict[str, GgufValue] = {
        "block_count": model.integer("num_hidden_layers"),
        "context_length": model.integer("max_position_embeddings"),
        "embedding_length": hidden_size,
        "feed_forward_length": model.integer("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": model.integer("num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "vocab_size": model.integer("vocab_size"),
    }
    if window := _window(model):
        found["attention.sliding_window"] = window
    if num_experts := _num_experts(model):
        found |= {"expert_count": num_experts, "expert_used_count": model.integer("num_experts_per_tok")}
    if architecture == "qwen3moe":
        found["expert_feed_forward_length"] = model.integer("moe_intermediate_size")
        if config.get("norm_topk_prob") is not True:
            raise FormatError(f"{model.folder / 'config.json'}: norm_topk_prob is not true, which GGUF cannot express")
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        original = rope.get("original_max_position_embeddings") or model.integer("max_position_embeddings")
        found["rope.scaling.original_context_length"] = int(original)
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": model.folder.resolve().name,
        "general.file_type": _FILE_TYPES[kind],
        "general.quantization_version": 2,
        **{f"{architecture}.{key}": value for key, value in found.items()},
    }


def _window(model: SourceModel) -> int:
    """Return the window of attention, 0 for none. Raises FormatError where only some layers have it."""
    window, kinds = model.config.get("sliding_window"), set(model.config.get("layer_types") or ["sliding_attention"])
    is_used = model.config.get("use_sliding_window", True) and "sliding_attention" in kinds
    if not window or not is_used or window >= model.integer("max_position_embeddings"):
        return 0
    if model.config.get("model_type") not in ("mistral", "mixtral") or len(kinds) > 1:
        raise FormatError(
            f"{model.folder / 'config.json'}: sliding_window {window} of some layers has no place in GGUF"
        )
    return model.integer("sliding_window")


def _rope(model: SourceModel) -> dict[str, Any]:
    """Return `rope_parameters`, of transformers 4 too. Raises FormatError for a scaling that GGUF cannot hold."""
    config = model.config
    given = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta") or 10000.0,
        **(config.get("rope_scaling") or {}),
    }
    rope = dict(given) | {"rope_type": given.get("rope_type") or given.get("type") or "default"}
    known = {"default": set[str](), "linear": {"factor"}, "yarn": {"factor"}}
    known["llama3"] = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    where = model.folder / "config.json"
    if rope["rope_type"] not in known:
        raise FormatError(f"{where}: rope type {rope['rope_type']!r}; GGUF files are written for {', '.join(known)}")
    if missing := [key for key in known[rope["rope_type"]] if not isinstance(rope.get(key), int | float)]:
        raise FormatError(f"{where}: rope_parameters: {missing[0]} is {rope.get(missing[0])!r}, expected a number")
    usual: dict[str, float | None] = {
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
    }
    usual |= {"truncate": True, "partial_rotary_factor": 1.0}
    for key, value in usual.items():
        if rope.get(key, value) not in (value, None):
            raise FormatError(f"{where}: rope_parameters: {key} {rope[key]!r} has no place in GGUF")
    return rope


def _frequency_factors(model: SourceModel) -> npt.NDArray[np.float32] | None:
    """Return the divisors of the frequencies of llama3 scaling. Source: convert_hf_to_gguf.py, LlamaModel."""
    rope = _rope(model)
    if rope["rope_type"] != "llama3":
        return None
    head_dim = model.integer("head_dim", model.integer("hidden_size") // model.integer("num_attention_heads"))
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # within the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _quantize_blocks(kind: str, matrix: _Floats) -> _Bytes:
    """Return rows of blocks, (..., bytes), of rows (..., elements). `kind` is Q8_0 or Q4_0.

    Raises WeightsError for rows of no whole number of blocks, and for infinities and NaNs.
    """
    if not matrix.shape or matrix.shape[-1] % _BLOCK_ELEMENTS:
        raise WeightsError(f"rows of shape {list(matrix.shape)} are no whole number of blocks of {_BLOCK_ELEMENTS}")
    if not np.isfinite(matrix).all():
        raise WeightsError(f"{kind} cannot express the infinities or NaNs of a tensor of shape {list(matrix.shape)}")
    blocks = np.ascontiguousarray(matrix, np.float32).reshape(-1, _BLOCK_ELEMENTS)
    with np.errstate(over="ignore"):  # a scale beyond float16 becomes infinite, as it does in ggml
        packed = _quantize_q8_0(blocks) if kind == "Q8_0" else _quantize_q4_0(blocks)
    if not np.isfinite(packed[:, :2].copy().view(np.float16)).all():
        raise WeightsError(f"{kind} cannot express values of {float(np.abs(matrix).max()):g}: its scales are float16")
    return packed.reshape(*matrix.shape[:-1], -1)


def _quantize_q8_0(blocks: _Floats) -> _Bytes:
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _reciprocal(scales)
    whole = np.floor(np.abs(scaled))
    rounded = np.sign(scaled) * (whole + np.floor(2 * (np.abs(scaled) - whole)))  # half away from zero
    return np.concatenate((_as_half(scales), rounded.astype(np.int8).view(np.uint8)), axis=1)


def _quantize_q4_0(blocks: _Floats) -> _Bytes:
    """Return blocks whose largest element, with its sign, becomes -8."""
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scales = largest / np.float32(-8)
    values = np.trunc(blocks * _reciprocal(scales) + np.float32(8.5)).astype(np.uint8).clip(0, 15)
    half = _BLOCK_ELEMENTS // 2
    return np.concatenate((_as_half(scales), values[:, :half] | values[:, half:] << np.uint8(4)), axis=1)


def _reciprocal(scales: _Floats) -> _Floats:
    """Return 1 / scales, and 0 where that is none: such a block is zeros to float16."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scales
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _as_half(scales: _Floats) -> _Bytes:
    return scales.astype(np.float16).view(np.uint8)
