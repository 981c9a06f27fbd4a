"""The layers of a BERT in the compiled kernels (native/encoder.h), where they are the faster ones.

Of 64 tokens through MiniLM, torch's GELU and attention take a quarter of the time, and of 5 tokens, calls of Python and
of torch's small operations. In bfloat16 all but what products take stays in float32, which is nearer to the exact
result than stock's.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from transformers.activations import GELUActivation

from deployments.engines.libraries.library_seam import has_hooks
from deployments.engines.native.library import Affine, Encoder, EncoderLayer, load_kernels
from deployments.engines.nn.few_rows import most_rows
from weights.platform.torch_seam import is_fake

_VECTOR: Final = 16  # elements: encoder.h leaves no remainder


def encoded(module: Any, hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor | None:
    """Return the last layer's vectors (B, L, D) of embeddings and a 0/1 mask; None where the kernels are not for them.

    Those of padding are zeros. A text's vectors do not depend on the other texts, bit for bit.
    """
    is_host = hidden_BLD.is_cpu and not is_fake(hidden_BLD)
    kernels = load_kernels() if is_host and hidden_BLD.numel() <= most_rows() * hidden_BLD.shape[-1] else None
    if kernels is None or not (hidden_BLD.dtype == torch.float32 or kernels.has_half_products):
        return None
    encoder = _encoder_of(module, hidden_BLD.dtype)
    if encoder is None:
        return None
    attended_BL = mask_BL.bool()
    lengths = attended_BL.sum(1)
    if int(lengths.sum()) == mask_BL.numel():
        return kernels.encode(encoder, hidden_BLD.flatten(0, 1).contiguous(), lengths).view(hidden_BLD.shape)
    found_BLD = torch.zeros_like(hidden_BLD)
    found_BLD[attended_BL] = kernels.encode(encoder, hidden_BLD[attended_BL], lengths)
    return found_BLD


def _encoder_of(module: Any, dtype: torch.dtype) -> Encoder | None:
    """Return the layers for the kernels, which a part with a hook, or of another kind or dtype, is not for."""
    config = module.config
    sizes = config.hidden_size // config.num_attention_heads, config.hidden_size, config.intermediate_size
    if any(size % _VECTOR for size in sizes) or dtype not in (torch.float32, torch.bfloat16):
        return None
    layers = (EncoderLayer * config.num_hidden_layers)()
    for place, layer in enumerate(module.encoder.layer):
        attention, self_attention = layer.attention, layer.attention.self
        parts = (
            *(self_attention.query, self_attention.key, self_attention.value, attention.output.dense),
            *(attention.output.LayerNorm, layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm),
        )
        if not _is_exact_gelu(layer.intermediate.intermediate_act_fn) or not all(_fits(part, dtype) for part in parts):
            return None
        layers[place] = EncoderLayer(*(Affine(part.weight.data_ptr(), part.bias.data_ptr()) for part in parts))
    return Encoder(
        layers,
        len(layers),
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.layer_norm_eps,
        sizes[0] ** -0.5,
    )


def _is_exact_gelu(activation: Any) -> bool:
    return type(activation) is GELUActivation and activation.act is nn.functional.gelu and not has_hooks(activation)


def _fits(part: Any, dtype: torch.dtype) -> bool:
    if type(part) not in (nn.Linear, nn.LayerNorm) or has_hooks(part) or part.bias is None:
        return False
    return all(one.dtype == dtype and one.is_cpu and one.is_contiguous() for one in (part.weight, part.bias))
