"""The Llama decoder and its siblings: Qwen2 adds biases to q, k and v, Qwen3 normalizes q and k, Mixtral has experts.

Parameter names are those of the Hugging Face checkpoints, so tensors are assigned without renaming. The
module computes everything but attention over the KV cache, which `Attend` does.

Suffixes: T tokens of a step (of all sequences, one after the other), C hidden size, H query heads,
K key/value heads, D head dimension, V vocabulary, E experts, U experts that a token uses.

A layer's feed-forward part is one gated MLP, or several experts of which each token takes a few. Parameter names are
those of Qwen3-MoE's checkpoints; `renamed_experts` makes them of Mixtral's. A packed file keeps all experts of a layer
in one tensor, of which each expert takes a view. Rotary embedding pairs dimension i with i + D/2, or, in GGUF's
`llama`, 2i with 2i + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from deployments.engines.llm.sequences.kv_cache import KvHeads


class RotaryAngles(NamedTuple):
    """Cosine and sine of every token's position, each (T, 1, D), ready to broadcast over heads."""

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool = False


class Rotary:
    """Turns positions into angles.

    `inverse_frequencies` is (D/2,) float32; `magnitude` multiplies cosine and sine (YaRN; 1.0 elsewhere).
    `is_interleaved` pairs neighbours, for weights whose rows of q and k are in that order.
    """

    def __init__(
        self, inverse_frequencies: torch.Tensor, magnitude: float = 1.0, *, is_interleaved: bool = False
    ) -> None:
        self.inverse_frequencies = inverse_frequencies
        self.magnitude = magnitude
        self.is_interleaved = is_interleaved

    def angles(self, positions_T: torch.Tensor, dtype: torch.dtype) -> RotaryAngles:
        """Return the angles of positions, computed in float32, in `dtype`."""
        half = positions_T[:, None].float() * self.inverse_frequencies
        full = half.repeat_interleave(2, dim=-1) if self.is_interleaved else torch.cat((half, half), dim=-1)
        full = full[:, None, :]
        return RotaryAngles(
            (full.cos() * self.magnitude).to(dtype),
            (full.sin() * self.magnitude).to(dtype),
            self.is_interleaved,
        )


def _rotate(x_THD: torch.Tensor, angles: RotaryAngles) -> torch.Tensor:
    """Turn every head of every token by its position's angles."""
    if angles.is_interleaved:
        turned = torch.stack((-x_THD[..., 1::2], x_THD[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = x_THD.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return x_THD * angles.cos + turned * angles.sin


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of a decoder; `layers` have them, others a plain MLP. `normalizes`: used weights sum up to 1."""

    num_experts: int
    num_used: int
    intermediate_size: int
    layers: frozenset[int]
    normalizes: bool = True


class _MLP(nn.Module):
    """The gated feed-forward: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TC)) * self.up_proj(x_TC))


class MixtureOfExperts(nn.Module):
    """Experts; each token takes those that the router `gate` scores best.

    An expert's product has only the rows of its tokens. Their number is padded to a `row_multiple` where
    products of few rows round by their number: a token's result must not depend on other tokens of its expert.
    `routed_rows` are those of the expert that is being computed, None for the router (`nn/lora.py`).
    """

    def __init__(self, hidden_size: int, spec: ExpertsSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, spec.num_experts, bias=False)
        self.experts = nn.ModuleList(_MLP(hidden_size, spec.intermediate_size) for _ in range(spec.num_experts))
        self.num_used = spec.num_used
        self.normalizes = spec.normalizes
        self.row_multiple = 1
        self.routed_rows: torch.Tensor | None = None

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        self.routed_rows = None  # the router has all rows, even after an expert that failed
        scores_TE = F.softmax(self.gate(x_TC).float(), dim=-1)
        weights_TU, chosen_TU = scores_TE.topk(self.num_used, dim=-1)
        if self.normalizes:
            weights_TU = weights_TU / weights_TU.sum(-1, keepdim=True)
        weights_TU = weights_TU.to(x_TC.dtype)
        out_TC = torch.zeros_like(x_TC)
        # In the order of the experts: a token's sum, and its order, depend on its own choice alone.
        for expert in sorted(set(chosen_TU.flatten().tolist())):
            tokens, places = torch.where(chosen_TU == expert)
            rows = x_TC[tokens]
            padded = F.pad(rows, (0, 0, 0, -len(rows) % self.row_multiple))
            self.routed_rows = tokens
            made = self.experts[expert](padded)[: len(rows)]
            out_TC.index_add_(0, tokens, made * weights_TU[tokens, places, None])
        return out_TC


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


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The numbers that define a decoder, free of any config format.

    `windows`: how many tokens each layer attends to, itself included, 0 for all; empty where no layer has a window.
    `head_rows`: how many rows of the head this rank of several has, 0 for all (`rank_share.py`).
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
    head_rows: int = 0

    @property
    def kv_layers(self) -> tuple[KvHeads, ...]:
        """Return the key/value heads of each layer."""
        return (KvHeads(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers


class Attend(Protocol):
    """Stores the keys and values of a step and attends over all of each sequence so far."""

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
        out_THD = attend(self.layer, _rotate(q_THD, angles), _rotate(k_TKD, angles), v_TKD)
        return self.o_proj(out_THD.flatten(1))


def _alone(x_TC: torch.Tensor) -> torch.Tensor:
    return x_TC


class _DecoderLayer(nn.Module):
    """_Attention and feed-forward, each normalized before and added to its input.

    Of a rank's slices, `sum_ranks` returns the sum of what each of the ranks has computed.
    """

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__()
        self.self_attn = _Attention(spec, layer)
        if spec.experts is not None and layer in spec.experts.layers:
            self.mlp: nn.Module = MixtureOfExperts(spec.hidden_size, spec.experts)
        else:
            self.mlp = _MLP(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.sum_ranks: Callable[[torch.Tensor], torch.Tensor] = _alone
        self.input_layernorm = _RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = _RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, x_TC: torch.Tensor, angles: RotaryAngles, attend: Attend) -> torch.Tensor:
        x_TC = x_TC + self.sum_ranks(self.self_attn(self.input_layernorm(x_TC), angles, attend))
        return x_TC + self.sum_ranks(self.mlp(self.post_attention_layernorm(x_TC)))


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
        self.lm_head = nn.Linear(spec.hidden_size, spec.head_rows or spec.vocab_size, bias=False)

    def forward(self, token_ids_T: torch.Tensor, angles: RotaryAngles, attend: Attend) -> torch.Tensor:
        """Return hidden states (T, C) of the tokens of a step."""
        return self.model(token_ids_T, angles, attend)

    def logits(self, hidden_NC: torch.Tensor) -> torch.Tensor:
        """Return (N, V) scores of the next token for the N wanted rows."""
        return self.lm_head(hidden_NC)
