"""The token vectors of BERT and its relatives, without what transformers does around their layers in every call.

Of a short text's forward, transformers' own Python is a tenth to a sixth (5.23): masks, signatures looked up anew, a
dozen calls of modules that only call others, and a pooler whose result no embedding needs. The parts with weights are
called as stock calls them, and the results are the same, bit for bit, but for products of few rows (`few_rows.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from deployments.engines.library_seam import attends_by_sdpa, has_known_layers
from deployments.engines.nn.few_rows import multiply_few
from weights.torch_seam import is_fake


def has_bert_layers(module: Any) -> bool:
    """Return whether `token_vectors` gives what this module does.

    Classes with the same parts in the same order: what they differ in, their positions, is left to stock.
    """
    return has_known_layers(type(module)) and not module.config.is_decoder and attends_by_sdpa(module.config)


def token_vectors(module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    """Return the last layer's vectors (B, L, D) of ids and a 0/1 mask, both (B, L). Not for training."""
    hidden_BLD: torch.Tensor = module.embeddings(input_ids=ids_BL)
    # The only text of a forward has no padding; of a recorded one, nobody knows.
    is_whole = len(mask_BL) == 1 or (not is_fake(mask_BL) and bool(mask_BL.all()))
    attended_B11L = None if is_whole else mask_BL[:, None, None, :].bool()
    for layer in module.encoder.layer:
        hidden_BLD = _attend(layer.attention, hidden_BLD, attended_B11L)
        inner_BLD = layer.intermediate.intermediate_act_fn(multiply_few(layer.intermediate.dense, hidden_BLD))
        hidden_BLD = layer.output.LayerNorm(multiply_few(layer.output.dense, inner_BLD) + hidden_BLD)
    return hidden_BLD


def _attend(attention: Any, hidden_BLD: torch.Tensor, attended_B11L: torch.Tensor | None) -> torch.Tensor:
    heads, output = attention.self, attention.output
    split = (*hidden_BLD.shape[:2], -1, heads.attention_head_size)
    query, key, value = (
        multiply_few(product, hidden_BLD).view(split).transpose(1, 2)
        for product in (heads.query, heads.key, heads.value)
    )
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=attended_B11L, scale=heads.scaling)
    attended_BLD = multiply_few(output.dense, found.transpose(1, 2).flatten(2))
    result: torch.Tensor = output.LayerNorm(attended_BLD + hidden_BLD)
    return result
