"""GGUF metadata as a transformers config, and the Hugging Face names of its tensors.

Keys: ggml/docs/gguf.md and llama.cpp's llama-arch.cpp.

Each hyperparameter is honoured or refused by name, so that none changes a text unseen. What they do: gguf-py's
constants.py; llama.cpp's llama-arch.cpp, llama-model.cpp and llama-context.cpp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from deployments.engines.records.protocol import EngineError
from weights.formats.gguf import GgufHeader, GgufValue, gguf_set, read_gguf, read_gguf_header
from weights.formats.gguf_names import CONTROL, EXPERT_NAMES, FREQUENCY_FACTORS, LAYER_NAMES, TOP_NAMES
from weights.formats.language_models import CLASS_NAMES
from weights.formats.untrusted import shown
from weights.records.errors import FormatError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# Keys of an architecture without an effect on our numbers, or read elsewhere (pooling.py, and the tokenizer).
_HARMLESS: Final = frozenset(
    {
        "vocab_size",
        "tensor_data_layout",
        "features_length",
        "pooling_type",
        "decoder_start_token_id",
        "attention.layer_norm_epsilon",  # of LayerNorm, which none of these models has
        "rope.scaling.finetuned",
    }
)
# Keys with their neutral values; any other value would change the result.
_NEUTRAL: Final[Mapping[str, tuple[GgufValue, ...]]] = {
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.output_scale": (0, 1),
    "attention.value_scale": (0, 1),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "use_parallel_residual": (False,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0, 1),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_gating_func": (0, 1),  # softmax
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "rope.scaling.alpha": (0,),
}
_LARGEST: Final = 1e30
_BETAS: Final = {"fast": 32.0, "slow": 1.0}  # of YaRN


class GgufKeys:
    """The hyperparameters of one architecture, each checked as it is read."""

    def __init__(self, metadata: Mapping[str, GgufValue], architecture: str) -> None:
        self._prefix = f"{architecture}."
        self._values = {
            key.removeprefix(self._prefix): value for key, value in metadata.items() if key.startswith(self._prefix)
        }
        self._read: set[str] = set()

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """Return a whole number. Raises EngineError for anything else, and for a missing one without default."""
        value = self._value(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self._error(key, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None, *, may_be_zero: bool = False) -> float:
        """Return a number above 0, or 0. Raises EngineError for anything else."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _LARGEST:
            raise self._error(key, value, "a positive number")
        if value == 0 and not may_be_zero:
            raise self._error(key, value, "a positive number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """Return a text. Raises EngineError for anything else."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._error(key, value, "a text")
        return value

    def check_rest(self) -> None:
        """Raise EngineError naming an unread key that may change the model's results."""
        for key in sorted(self._values.keys() - self._read - _HARMLESS):
            value = self._values[key]
            if key not in _NEUTRAL:
                raise EngineError(f"GGUF key {self._prefix}{key} ({shown(value)}) is not supported")
            if not isinstance(value, int | float) or value not in _NEUTRAL[key]:
                neutral = " or ".join(map(str, _NEUTRAL[key]))
                raise self._error(key, value, f"{neutral}: nothing else is supported")

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        return self._values.get(key, default)

    def _error(self, key: str, value: Any, expected: str) -> EngineError:
        return EngineError(f"GGUF key {self._prefix}{key} is {shown(value)}, expected {expected}")


def _rope_settings(keys: GgufKeys, context_length: int) -> tuple[dict[str, Any], float]:
    """Return RoPE's base and scaling in transformers' form, and the factor of cosine and sine beside it.

    A factor without a type is linear, as llama.cpp takes it. The scaling of Llama 3 comes as a tensor of frequency
    factors instead. Raises EngineError for a scaling that is not supported.
    """
    base = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise EngineError(f"GGUF rope scaling {shown(kind)} is not supported; supported are none, linear, yarn")
    old = keys.number("rope.scale_linear", 1.0, may_be_zero=True)  # the key's name before 2023
    factor = keys.number("rope.scaling.factor", old, may_be_zero=True) or 1.0
    original = keys.integer("rope.scaling.original_context_length", context_length)
    betas = {f"beta_{end}": keys.number(f"rope.scaling.yarn_beta_{end}", beta) for end, beta in _BETAS.items()}
    magnitude = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
    log_multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0, may_be_zero=True)
    mix = keys.number("rope.scaling.yarn_ext_factor", float(kind == "yarn"), may_be_zero=True)
    if mix not in (0, 1):
        raise EngineError(f"GGUF key rope.scaling.yarn_ext_factor is {mix:g}; supported are 0 and 1")
    if kind == "none":
        return {"rope_type": "default", **base}, magnitude
    if not mix:
        scaling = {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
        return scaling | base, magnitude
    if log_multiplier and factor > 1:
        magnitude /= 1 + 0.1 * log_multiplier * math.log(factor)
    yarn = {"factor": factor, "original_max_position_embeddings": original, **betas}
    return {"rope_type": "yarn", **yarn, **base}, magnitude


# The types of tensors that the engines support, without torch; `nn/packed_weights.py` unpacks them.
FLOAT_KINDS: Final = ("F32", "F16", "BF16")
BLOCK_KINDS: Final = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
# Name in general.architecture -> transformers' model type, and whether rows of q and k are in neighbouring RoPE pairs.
# The config's class is imported when it is needed: it brings much with it.
_FAMILIES: Final = {
    "llama": ("llama", True),  # Mistral and Mixtral as well, told apart by other keys
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
    "qwen3moe": ("qwen3_moe", False),
}
# Ends of a turn that files do not always name; llama.cpp finds them by the same texts.
_END_TEXTS: Final = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"})
# A damaged number must not become millions of modules, or gigabytes of frequencies.
_MAX_LAYERS: Final = 1024
_MAX_HEADS: Final = 2**16
_MAX_HEAD_DIM: Final = 2**16
MAX_EXPERTS: Final = 1024


def gguf_headers(model: Path) -> tuple[GgufHeader, ...]:
    """Return the headers of a GGUF file and its splits, or of the one GGUF model in a folder: its files, or
    their headers in the store. () without one.

    Raises EngineError naming the file that cannot be read.
    """
    try:
        if model.suffix == ".gguf" and model.is_file():
            files = gguf_set(model)
        else:
            files = sorted(model.glob("*.gguf.header")) or sorted(model.glob("*.gguf"))
        return tuple(_read_header(file, file.stat().st_mtime_ns) for file in files)
    except (FormatError, OSError) as error:
        raise EngineError(str(error)) from None


@functools.lru_cache(maxsize=4)
def _read_header(file: Path, mtime_ns: int) -> GgufHeader:
    """Parse a header once for config and tokenizer: a vocabulary takes a while."""
    return read_gguf_header(file) if file.suffix == ".header" else read_gguf(file)


class GgufDescription(NamedTuple):
    """A decoder by the metadata and tensors of a GGUF model: transformers' model type and fields of its config.

    `kinds` are the stored types by tensor, `window` is the length of the attention's window, 0 for none.
    """

    model_type: str
    fields: Mapping[str, Any]
    kinds: Mapping[str, str]
    is_interleaved: bool
    window: int
    rope_magnitude: float


def describe_gguf(headers: Sequence[GgufHeader]) -> GgufDescription:
    """Return the description in the metadata, checked without torch.

    Raises EngineError for an architecture, a RoPE scaling or a tensor type that is not supported, with those that are,
    and for a key that would change the model's results and is not honoured.
    """
    metadata = headers[0].metadata
    architecture = _architecture_of(metadata)
    keys = GgufKeys(metadata, architecture)
    kinds = {name: tensor.dtype for header in headers for name, tensor in header.tensors.items()}
    _check_kinds(kinds)
    num_layers = keys.integer("block_count", maximum=_MAX_LAYERS)
    num_heads = keys.integer("attention.head_count", maximum=_MAX_HEADS)
    hidden_size = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads, maximum=_MAX_HEAD_DIM)
    _check_layers(kinds, num_layers)
    _check_sizes(keys, architecture, head_dim, hidden_size)
    vocab_size = _num_embeddings(headers, hidden_size)
    context_length = keys.integer("context_length")
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    experts = _experts(keys, architecture, kinds, num_layers)
    _check_experts(headers, num_layers, experts)
    model_type, is_interleaved = _FAMILIES[architecture]
    if architecture == "llama":
        model_type = _llama_type(model_type, bool(experts), 0 < window < context_length)
    rope, magnitude = _rope_settings(keys, context_length)
    fields = dict(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=context_length,
        tie_word_embeddings="output.weight" not in kinds,
        rope_parameters=rope,
        attention_bias="blk.0.attn_q.bias" in kinds,
        mlp_bias="blk.0.ffn_gate.bias" in kinds,
        bos_token_id=_token_id(metadata, "bos"),
        eos_token_id=_end_tokens(metadata),
        **experts,
    )
    keys.check_rest()
    return GgufDescription(model_type, fields, kinds, is_interleaved, window, magnitude)


def _architecture_of(metadata: Mapping[str, Any]) -> str:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        raise EngineError(
            f"GGUF architecture {shown(architecture)} is not supported; supported are {_listed(_FAMILIES)}"
        )
    return architecture


def _llama_type(plain: str, has_experts: bool, has_window: bool) -> str:
    """Return the model type, of those whose files all say "llama"."""
    return "mixtral" if has_experts else "mistral" if has_window else plain


def _check_sizes(keys: GgufKeys, architecture: str, head_dim: int, hidden_size: int) -> None:
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise EngineError("GGUF models whose keys and values have heads of different sizes are not supported")
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise EngineError(f"rope must turn the whole head of {head_dim}, {architecture}.rope.dimension_count differs")
    if keys.integer("embedding_length_out", hidden_size) != hidden_size:
        raise EngineError(f"embedding_length is {hidden_size}, {architecture}.embedding_length_out differs")


def _num_embeddings(headers: Sequence[GgufHeader], hidden_size: int) -> int:
    embedding = next((h.tensors["token_embd.weight"] for h in headers if "token_embd.weight" in h.tensors), None)
    if embedding is None or len(embedding.shape) != 2:
        raise EngineError("the GGUF file has no matrix 'token_embd.weight'")
    if embedding.shape[1] != hidden_size:
        raise EngineError(
            f"tensor 'token_embd.weight' has shape {list(embedding.shape)}, expected rows of {hidden_size}"
        )
    return embedding.shape[0]


def gguf_config(headers: Sequence[GgufHeader]) -> PretrainedConfig:
    """Return the config in the metadata; its `packed_source` maps the tensors.

    Raises EngineError as `describe_gguf` does.
    """
    from deployments.engines.llm.models.packed import PackedSource

    model_type, fields, kinds, is_interleaved, window, magnitude = describe_gguf(headers)
    config = _config(model_type, **fields)
    if model_type in ("mistral", "mixtral"):
        config.sliding_window = window or None
    elif 0 < window < config.max_position_embeddings:  # its layers are not named; within it, all is full
        config.max_position_embeddings = window
    config.architectures = [CLASS_NAMES[model_type]]
    names = gguf_names(config.num_hidden_layers)
    factors = FREQUENCY_FACTORS if FREQUENCY_FACTORS in kinds else None
    config.packed_source = PackedSource(
        names, kinds, is_interleaved=is_interleaved, frequency_factors=factors, rope_magnitude=magnitude
    )
    return config


def _config(model_type: str, **fields: Any) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # transformers checks what it is given, and raises many kinds
        raise EngineError(f"the GGUF metadata does not describe a {model_type}: {error}") from None


def _check_layers(kinds: Mapping[str, str], num_layers: int) -> None:
    """Raise EngineError for announced layers that are missing: none is built in vain."""
    for layer in range(num_layers):
        if f"blk.{layer}.attn_q.weight" not in kinds:
            raise EngineError(f"tensor 'blk.{layer}.attn_q.weight' is missing, block_count is {num_layers}")


def gguf_names(num_layers: int) -> dict[str, str]:
    """Return Hugging Face's name of each tensor by GGUF's, `*` for the numbers of experts in one tensor."""
    layers = {
        f"blk.{layer}.{stored}": f"model.layers.{layer}.{name}"
        for layer in range(num_layers)
        for stored, name in (LAYER_NAMES | EXPERT_NAMES).items()
    }
    parts = {**TOP_NAMES, **layers}
    return {f"{stored}.{leaf}": f"{name}.{leaf}" for stored, name in parts.items() for leaf in ("weight", "bias")}


def _experts(keys: GgufKeys, architecture: str, kinds: Mapping[str, str], num_layers: int) -> dict[str, Any]:
    """Return the config's entries for experts, {} without any. Raises EngineError for a dense family with experts."""
    num_experts = keys.integer("expert_count", 0, minimum=0, maximum=MAX_EXPERTS)
    if not num_experts and not architecture.endswith("moe"):
        return {}
    if architecture not in ("llama", "qwen3moe"):
        raise EngineError(f"GGUF architecture {architecture!r} with experts is not supported; supported is qwen3moe")
    found: dict[str, Any] = {
        "num_local_experts": keys.integer("expert_count", maximum=MAX_EXPERTS),
        "num_experts_per_tok": keys.integer("expert_used_count", maximum=num_experts),
    }
    if architecture == "qwen3moe":  # llama.cpp has only normalized weights
        size = keys.integer("expert_feed_forward_length")
        dense = [layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" not in kinds]
        found |= {"moe_intermediate_size": size, "norm_topk_prob": True, "mlp_only_layers": dense}
    return found


def _check_experts(headers: Sequence[GgufHeader], num_layers: int, experts: Mapping[str, Any]) -> None:
    """Raise EngineError unless the stacked matrices have as many experts as the metadata says."""
    count = experts.get("num_local_experts")
    shapes = {name: tensor.shape for header in headers for name, tensor in header.tensors.items()}
    for name, shape in shapes.items():
        if name.endswith("_exps.weight") and shape[0] != count:
            raise EngineError(f"tensor {name!r} has shape {list(shape)}, expert_count is {count}")
    dense = experts.get("mlp_only_layers", ()) if count else range(num_layers)
    for layer in range(num_layers):
        if layer not in dense and f"blk.{layer}.ffn_gate_exps.weight" not in shapes:
            raise EngineError(f"tensor 'blk.{layer}.ffn_gate_exps.weight' is missing, expert_count is {count}")


def _check_kinds(kinds: Mapping[str, str]) -> None:
    for name, kind in kinds.items():
        if kind not in (*FLOAT_KINDS, *BLOCK_KINDS):
            known = _listed((*FLOAT_KINDS, *BLOCK_KINDS))
            raise EngineError(f"tensor {name!r} is {kind}, which is not supported; supported are {known}")


def _token_id(metadata: Mapping[str, GgufValue], name: str) -> int | None:
    value, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, tuple) else 0
    return value if type(value) is int and 0 <= value < count else None


def _end_tokens(metadata: Mapping[str, GgufValue]) -> list[int]:
    tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    named = {_token_id(metadata, "eos"), _token_id(metadata, "eot"), _token_id(metadata, "eom")} - {None}
    if isinstance(tokens, tuple) and not isinstance(types, str | int | float) and len(types) == len(tokens):
        found = {i for i, text in enumerate(tokens) if text in _END_TEXTS and types[i] == CONTROL}
        named |= found
    return sorted(token for token in named if token is not None)


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))
