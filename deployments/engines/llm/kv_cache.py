"""The memory of past keys and values: how much of it there is, and the two tensors that hold it.

Suffixes: S slots (one token each), K key/value heads, D head dimension, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from deployments.engines.llm.block_manager import BLOCK_SIZE, blocks_for
from deployments.engines.llm.models.llama import DecoderSpec
from deployments.engines.protocol import EngineError


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The plan of a KV cache: the number of blocks, and the greatest sequence length (prompt and completion)."""

    num_blocks: int
    max_model_len: int


def plan_cache(
    spec: DecoderSpec,
    dtype: torch.dtype,
    *,
    kv_cache_bytes: int,
    max_num_seqs: int,
    max_model_len: int | None,
) -> CachePlan:
    """Fit the cache into `kv_cache_bytes`, but make it no larger than all sequences can use.

    `max_model_len` None means what both the model and the cache allow.

    Raises:
        EngineError: not one block fits, or the length that was asked for is more than the model or the cache
        allows.
    """
    block_bytes = 2 * spec.num_layers * BLOCK_SIZE * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    affordable = kv_cache_bytes // block_bytes
    if affordable < 1:
        raise EngineError(
            f"kv_cache_bytes is {kv_cache_bytes}, but one block of {BLOCK_SIZE} tokens needs {block_bytes}"
        )
    if max_model_len is None:
        max_model_len = min(spec.max_positions, affordable * BLOCK_SIZE)
    if not 2 <= max_model_len <= spec.max_positions:
        raise EngineError(f"max_model_len is {max_model_len}, expected 2 to {spec.max_positions} (the model's)")
    if blocks_for(max_model_len) > affordable:
        needed = blocks_for(max_model_len) * block_bytes
        raise EngineError(f"max_model_len {max_model_len} needs {needed} bytes of KV cache, got {kv_cache_bytes}")
    return CachePlan(min(affordable, max_num_seqs * blocks_for(max_model_len)), max_model_len)


def cache_shape(spec: DecoderSpec, num_blocks: int) -> tuple[int, int, int, int]:
    """Return the shape (L, S, K, D) of the keys, and of the values, with one slot behind the last block."""
    return spec.num_layers, num_blocks * BLOCK_SIZE + 1, spec.num_kv_heads, spec.head_dim


class KVCache:
    """Keys and values of all layers. Block b holds the slots b * 16 to b * 16 + 15.

    `null_slot` lies behind the last block: it is never written and reads as zeros, so padding that is
    gathered from it is finite whatever other sequences left in their blocks.
    """

    def __init__(self, spec: DecoderSpec, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.null_slot = num_blocks * BLOCK_SIZE
        shape = cache_shape(spec, num_blocks)
        self._keys_LSKD = _zeros(shape, dtype, device)
        self._values_LSKD = _zeros(shape, dtype, device)

    def layer_slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory of a layer's keys and values, each (S, K, D)."""
        return self._keys_LSKD[layer], self._values_LSKD[layer]

    def write_slots(self, layer: int, slots_N: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor) -> None:
        """Store N tokens' keys and values."""
        self._keys_LSKD[layer].index_copy_(0, slots_N, k_NKD)
        self._values_LSKD[layer].index_copy_(0, slots_N, v_NKD)

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, each (from, to) in this order."""
        for source, target in copies:
            for half in (self._keys_LSKD, self._values_LSKD):
                begin, end = source * BLOCK_SIZE, target * BLOCK_SIZE
                half[:, end : end + BLOCK_SIZE] = half[:, begin : begin + BLOCK_SIZE]

    def read_run(self, layer: int, first_slot: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the keys and values of slots that follow each other, each (N, K, D)."""
        run = slice(first_slot, first_slot + num_slots)
        return self._keys_LSKD[layer, run], self._values_LSKD[layer, run]

    def read_slots(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the slots, each (*slots.shape, K, D)."""
        flat = slots.flatten()
        keys = self._keys_LSKD[layer].index_select(0, flat)
        values = self._values_LSKD[layer].index_select(0, flat)
        return keys.view(*slots.shape, *keys.shape[1:]), values.view(*slots.shape, *values.shape[1:])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; numpy asks the kernel for zero pages, which cost nothing until they are
    # used.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
