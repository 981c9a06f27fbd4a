"""The hyperparameters of a GGUF file: each is honoured or refused by name, so that none changes a text unseen.

Keys and what they do: gguf-py's constants.py; llama.cpp's llama-arch.cpp, llama-model.cpp and llama-context.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from deployments.engines.protocol import EngineError
from weights.formats.gguf import GgufValue
from weights.formats.untrusted import shown

# Keys of an architecture that change no number of ours, or that are read elsewhere (pooling.py, and the tokenizer).
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
# Keys with the values that change nothing; any other value would.
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
        """Return a whole number. Raises EngineError for anything else, and for one that is missing without default."""
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
        """Raise EngineError naming a key that nobody has read and that may change what the model computes."""
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


def rope_settings(keys: GgufKeys, context_length: int) -> tuple[dict[str, Any], float]:
    """Return RoPE's base and scaling as transformers has them, and what multiplies cosine and sine beside it.

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
