"""The Llama decoder and its siblings: Qwen2 adds biases to q, k and v, Qwen3 normalizes q and k, Mixtral has experts.

Parameter names are those of the Hugging Face checkpoints, so tensors are assigned without renaming. The
module computes everything but attention over the KV cache, which it asks `Attend` for.

Suffixes: T tokens of a step (of all sequences, one after the other), C hidden size, H query heads,
K key/value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from deployments.engines.llm.models.feed_forward import MLP, ExpertsSpec, MixtureOfExperts
from deployments.engines.nn.rotary import RotaryAngles, rotate


class _RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension; the mean is taken in float32 for any dtype of `x`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `x` (..., size); the result has its shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide.to(x.dtype)).to(x.dtype)


class KvHeads(NamedTuple):
    """The key/value heads of a layer: how many, and the elements of a key and of a value."""

    num_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The numbers that define a decoder, free of any config format.

    `windows`: how many tokens each layer attends to, itself included, 0 for all; empty where no layer has a window.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsSpec | None = None
    windows: tuple[int, ...] = ()

    @property
    def kv_layers(self) -> tuple[KvHeads, ...]:
        """Return the key/value heads of each layer."""
        return (KvHeads(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers


class Attend(Protocol):
    """Stores the keys and values of a step and attends over all that each sequence has so far."""

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        """The attention output, (T, H, D)."""


class _Attention(nn.Module):
    """Projections, optional q/k norm and rotary of one layer, around `Attend`."""

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, query_size, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv_size, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv_size, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(query_size, spec.hidden_size, bias=spec.output_bias)
        self.q_norm = _RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = _RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()

    def forward(self, x_TC: torch.Tensor, angles: RotaryAngles, attend: Attend) -> torch.Tensor:
        q_THD = self.q_norm(self.q_proj(x_TC).unflatten(-1, (-1, self.head_dim)))
        k_TKD = self.k_norm(self.k_proj(x_TC).unflatten(-1, (-1, self.head_dim)))
        v_TKD = self.v_proj(x_TC).unflatten(-1, (-1, self.head_dim))
        out_THD = attend(self.layer, rotate(q_THD, angles), rotate(k_TKD, angles), v_TKD)
        return self.o_proj(out_THD.flatten(1))


class _DecoderLayer(nn.Module):
    """_Attention and feed-forward, each normalized before and added to its input."""

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__()
        self.self_attn = _Attention(spec, layer)
        if spec.experts is not None and layer in spec.experts.layers:
            self.mlp: nn.Module = MixtureOfExperts(spec.hidden_size, spec.experts)
        else:
            self.mlp = MLP(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.input_layernorm = _RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = _RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, x_TC: torch.Tensor, angles: RotaryAngles, attend: Attend) -> torch.Tensor:
        x_TC = x_TC + self.self_attn(self.input_layernorm(x_TC), angles, attend)
        return x_TC + self.mlp(self.post_attention_layernorm(x_TC))


class _Decoder(nn.Module):
    """Embedding, layers and final norm (`model.*` in the checkpoints)."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(_DecoderLayer(spec, layer) for layer in range(spec.num_layers))
        self.norm = _RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, token_ids_T: torch.Tensor, angles: RotaryAngles, attend: Attend) -> torch.Tensor:
        x_TC = self.embed_tokens(token_ids_T)
        for layer in self.layers:
            x_TC = layer(x_TC, angles, attend)
        return self.norm(x_TC)


class LlamaForCausalLM(nn.Module):
    """A decoder with its output head. Build it under `torch.device("meta")`, then assign tensors."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.model = _Decoder(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def forward(self, token_ids_T: torch.Tensor, angles: RotaryAngles, attend: Attend) -> torch.Tensor:
        """Return hidden states (T, C) of the tokens of a step."""
        return self.model(token_ids_T, angles, attend)

    def logits(self, hidden_NC: torch.Tensor) -> torch.Tensor:
        """Return (N, V) scores of the next token, for the N rows that are asked for."""
        return self.lm_head(hidden_NC)
