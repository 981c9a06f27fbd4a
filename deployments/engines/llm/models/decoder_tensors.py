"""The tensors of our decoders by config and without torch: registered models are compared with them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from deployments.engines.llm.models.gguf_config import (
    FLOAT_KINDS,
    describe_gguf,
    gguf_names,
)
from deployments.engines.records.protocol import EngineError
from weights.formats.gguf import GgufHeader
from weights.formats.kuiper import KuiperHeader
from weights.formats.language_models import CLASS_NAMES
from weights.formats.untrusted import is_size

T = TypeVar("T")
# A size that a config leaves to its class is None, and is not compared.
Shape = tuple[int | None, ...]
_MIXTRAL: Final = re.compile(r"\.block_sparse_moe\.(gate|experts\.\d+\.(w1|w2|w3))\.")
_MIXTRAL_NAMES: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT: Final = re.compile(r"\.experts\.\d+\.")
_QUERY_NORMED: Final = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def renamed_experts(named: Mapping[str, T]) -> dict[str, T]:
    """Return a mapping by tensor name with Mixtral's names turned into Qwen3-MoE's."""
    return {_MIXTRAL.sub(_renamed, name): one for name, one in named.items()}


def _renamed(match: re.Match[str]) -> str:
    stem, _, leaf = match[1].rpartition(".")
    return f".mlp.{stem}.{_MIXTRAL_NAMES[leaf]}." if leaf in _MIXTRAL_NAMES else ".mlp.gate."


def decoder_shapes(class_name: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes of all tensors of our decoder for a class, by fields of its config.json.

    A head shared with the embedding is left out. A damaged number of layers yields very many.
    """
    hidden, heads, head_dim = (_size(config, key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if head_dim is None and hidden and heads and class_name not in _QUERY_NORMED:  # Qwen3 has a size of its own
        head_dim = hidden // heads
    key_heads = _size(config, "num_key_value_heads")
    if key_heads is None and class_name == "LlamaForCausalLM":
        key_heads = heads
    has_bias = bool(config.get("attention_bias")) and class_name in ("LlamaForCausalLM", *_QUERY_NORMED)
    rows = {"q": _product(heads, head_dim), "k": _product(key_heads, head_dim), "v": _product(key_heads, head_dim)}
    layer: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for part, count in rows.items():
        layer[f"self_attn.{part}_proj.weight"] = (count, hidden)
        if has_bias or class_name == "Qwen2ForCausalLM":
            layer[f"self_attn.{part}_proj.bias"] = (count,)
    layer["self_attn.o_proj.weight"] = (hidden, rows["q"])
    if has_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if class_name in _QUERY_NORMED:
        layer |= {f"self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
    vocabulary: Shape = (_size(config, "vocab_size"), hidden)
    yield "model.embed_tokens.weight", vocabulary
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", vocabulary
    for index in range(_size(config, "num_hidden_layers") or 0):
        for parts in (layer.items(), _feed_forward(class_name, config, index, hidden)):
            yield from ((f"model.layers.{index}.{name}", shape) for name, shape in parts)


def _feed_forward(
    class_name: str, config: Mapping[str, Any], layer: int, hidden: int | None
) -> Iterator[tuple[str, Shape]]:
    if not _has_experts(class_name, config, layer):
        has_bias = bool(config.get("mlp_bias")) and class_name == "LlamaForCausalLM"
        yield from _gated("mlp", _size(config, "intermediate_size"), hidden, has_bias=has_bias)
        return
    is_mixtral = class_name == "MixtralForCausalLM"
    count = _size(config, "num_local_experts" if is_mixtral or "num_experts" not in config else "num_experts")
    inner = _size(config, "intermediate_size" if is_mixtral else "moe_intermediate_size")
    yield "mlp.gate.weight", (count, hidden)
    for expert in range(count or 0):
        yield from _gated(f"mlp.experts.{expert}", inner, hidden)


def _has_experts(class_name: str, config: Mapping[str, Any], layer: int) -> bool:
    if class_name == "MixtralForCausalLM":
        return True
    if class_name != "Qwen3MoeForCausalLM":
        return False
    dense, step = config.get("mlp_only_layers") or (), _size(config, "decoder_sparse_step") or 1
    return layer not in dense and (layer + 1) % step == 0


def _gated(stem: str, inner: int | None, hidden: int | None, *, has_bias: bool = False) -> Iterator[tuple[str, Shape]]:
    for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        yield f"{stem}.{name}_proj.weight", shape
        if has_bias:
            yield f"{stem}.{name}_proj.bias", shape[:1]


def _size(config: Mapping[str, Any], key: str) -> int | None:
    named = config.get(key)
    return named if isinstance(named, int) and is_size(named) and named else None


def _product(left: int | None, right: int | None) -> int | None:
    return left * right if left and right else None


def check_decoder(class_name: str, config: Mapping[str, Any], given: Mapping[str, Sequence[int]]) -> None:
    """Raise EngineError for a tensor of the decoder that is missing or has another shape."""
    found = renamed_experts(given)
    for name, shape in decoder_shapes(class_name, config):
        if name not in found:
            raise EngineError(f"tensor {name!r} is missing, and its config says that it is there")
        _check_shape(name, found[name], shape)


def check_packed_decoder(
    class_name: str, config: Mapping[str, Any], given: Mapping[str, tuple[str, Sequence[int]]], group_size: int
) -> None:
    """Raise EngineError as `check_decoder` does, and for whole numbers without the scales of all their groups.

    `given` are types and shapes.
    """
    check_decoder(class_name, config, {name: shape for name, (_, shape) in given.items()})
    for name, (dtype, shape) in given.items():
        scales = name.removesuffix(".weight") + ".scales"
        if dtype != "I8" or not name.endswith(".weight"):
            continue
        if scales not in given:
            raise EngineError(f"tensor {name!r} has no scales")
        if (count := math.prod(given[scales][1]) * group_size) != math.prod(shape):
            raise EngineError(f"tensor {scales!r} is for {count} numbers, and {name!r} has {math.prod(shape)}")


def check_kuiper_decoder(header: KuiperHeader, config: Mapping[str, Any]) -> None:
    """Raise EngineError if the config has other dimensions or another kind than the file."""
    if header.is_llama2c and config.get("model_type", "llama") != "llama":
        raise EngineError(f"config.json says model_type {config['model_type']!r}, a llama2.c file holds llama")
    sizes = {
        "hidden_size": header.dim,
        "intermediate_size": header.hidden_dim,
        "num_hidden_layers": header.num_layers,
        "num_attention_heads": header.num_heads,
        "num_key_value_heads": header.num_kv_heads,
        "vocab_size": header.vocab_size,
        "max_position_embeddings": header.max_seq_len,
        "tie_word_embeddings": header.shared_classifier,
    }
    for key, size in sizes.items():
        if config.get(key, size) != size:
            raise EngineError(f"config.json says {key} {config[key]}, the Kuiper file {size}")


def check_gguf_decoder(headers: Sequence[GgufHeader]) -> None:
    """Raise EngineError for what `describe_gguf` refuses, for a tensor that is missing or of another shape, and for one
    of a part that has none in this model: left out, it would change the text. Others are left out."""
    described = describe_gguf(headers)
    names = gguf_names(described.fields["num_hidden_layers"])
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    stored_by_name = {name: stored for stored, name in names.items()}
    wanted: set[str] = set()
    for name, shape in decoder_shapes(CLASS_NAMES[described.model_type], described.fields):
        stacked = _EXPERT.sub(".experts.*.", name)
        stored = stored_by_name[stacked]
        if stored not in tensors:
            raise EngineError(f"tensor {stored!r} is missing ({name})")
        tensor = tensors[stored]
        _check_shape(stored, tensor.shape[1:] if stacked != name else tensor.shape, shape)
        if len(shape) == 1 and tensor.dtype not in FLOAT_KINDS:
            raise EngineError(f"tensor {stored!r} is {tensor.dtype}, expected one of {', '.join(FLOAT_KINDS)}")
        wanted.add(stored)
    parts = {stored.rpartition(".")[0] for stored in names}
    if surplus := [name for name in tensors if name not in wanted and name.rpartition(".")[0] in parts]:
        raise EngineError(f"tensor {surplus[0]!r} has no place in a {described.model_type} of this kind")


def _check_shape(name: str, given: Sequence[int], expected: Shape) -> None:
    sizes = [found if size is None else size for found, size in zip(given, expected, strict=False)]
    if len(given) != len(expected) or list(given) != sizes:
        wanted = ["any" if size is None else size for size in expected]
        raise EngineError(f"tensor {name!r} has shape {list(given)}, expected {wanted}")
