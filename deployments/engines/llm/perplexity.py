"""The perplexity of a text under a model, by which quantization is judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.nn import functional as F

from deployments.engines.llm.models.registry import create_model, load_config
from deployments.engines.llm.tokenizer import load_tokenizer
from deployments.engines.records.protocol import EngineError

_WINDOW_TOKENS = 512


@torch.inference_mode()
def perplexity(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    text: str,
    *,
    max_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Return exp of the mean negative log-likelihood of a text's tokens.

    The text is cut into independent windows; the first token of each is only read. Products are in
    float32 for any weights. `progress` gets the done and all tokens. Raises EngineError for texts of less
    than two tokens.
    """
    # Usually longer than the model's context, of which the tokenizer would warn.
    tokens = load_tokenizer(folder)(text, verbose=False)["input_ids"][:max_tokens]
    if len(tokens) < 2:
        raise EngineError(f"the text has {len(tokens)} tokens, expected at least 2")
    model = create_model(load_config(folder), tensors, torch.device("cpu"), arithmetic="exact")
    size = min(_WINDOW_TOKENS, model.spec.max_positions)
    attend = _Attend(model.spec.windows)
    loss, num_predicted = 0.0, 0
    for start in range(0, len(tokens) - 1, size):
        ids = torch.tensor(tokens[start : start + size])
        if len(ids) < 2:
            break
        hidden = model.module(ids, model.rotary.angles(torch.arange(len(ids)), model.dtype), attend)
        losses = F.cross_entropy(model.module.logits(hidden[:-1]).float(), ids[1:], reduction="sum")
        loss, num_predicted = loss + float(losses), num_predicted + len(ids) - 1
        progress(min(start + size, len(tokens)), len(tokens))
    return math.exp(min(loss / num_predicted, 700.0))


class _Attend:
    """Attends within one piece of text, from its beginning."""

    def __init__(self, windows: tuple[int, ...]) -> None:
        self._windows = windows

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in (q_THD, k_TKD, v_TKD))
        mask = torch.ones(len(q_THD), len(q_THD), dtype=torch.bool).tril()
        if self._windows and (window := self._windows[layer]):
            mask = mask.triu(1 - window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
