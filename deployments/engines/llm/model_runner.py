"""Runs the model for the chunks of one step. Owns the KV cache; knows no queue and no text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from deployments.engines.llm.attention import plan_attention
from deployments.engines.llm.kv_cache import KVCache
from deployments.engines.llm.models.registry import LoadedModel
from deployments.engines.llm.scheduler import Chunk

# On the CPU, matrix products of 1 to 11 rows take other kernels, with other rounding, than products of more,
# unless the rows are a multiple of 4 (measured: torch 2.13, MKL, AVX-512; larger products agree bit for bit).
# Padding to it makes a token's logits independent of how many others share the step.
CPU_ROW_MULTIPLE = 4


class ModelRunner:
    """Prefill and decode alike: every chunk's tokens go through the layers in one flat batch."""

    def __init__(self, model: LoadedModel, num_blocks: int) -> None:
        self._model = model
        self._cache = KVCache(model.spec, num_blocks, model.dtype, model.device)
        self._row_multiple = CPU_ROW_MULTIPLE if model.device.type == "cpu" else 1

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Store the chunks' keys and values and return float32 logits on the CPU.

        The result is (N, vocabulary) with one row per chunk that is its sequence's last, in order. Running
        the same chunks again is harmless: the same slots get the same values.
        """
        model = self._model
        tokens = [token for chunk in chunks for token in chunk.sequence.token_ids[chunk.start : chunk.end]]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        angles = model.rotary.angles(self._padded(torch.tensor(positions)).to(model.device), model.dtype)
        attend = plan_attention(chunks, self._cache, model.device)
        hidden = model.module(self._padded(torch.tensor(tokens)).to(model.device), angles, attend)
        rows = _last_rows(chunks)
        if not rows:
            return torch.empty(0, model.spec.vocab_size)
        logits = model.module.logits(self._padded(hidden[rows]))
        return logits[: len(rows)].float().cpu()

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` with zeros behind it up to a multiple of `_row_multiple` rows."""
        missing = -len(rows) % self._row_multiple
        return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def _last_rows(chunks: Sequence[Chunk]) -> list[int]:
    """The row of the last token of every chunk after which a token is sampled."""
    rows, end = [], 0
    for chunk in chunks:
        end += chunk.num_tokens
        if chunk.is_last:
            rows.append(end - 1)
    return rows
