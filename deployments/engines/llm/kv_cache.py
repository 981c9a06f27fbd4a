"""The memory of past keys and values: how much of it there is, and the tensors that hold it.

They are kept in the dtype of the computation, or as int8 with a float16 scale for each head of each token: half of
bfloat16's memory, and an error of at most 0.4 % of the largest element of a head's vector. A token's int8 follow from
its own vectors alone, so what is read is the same whoever wrote it, and when.

Suffixes: L layers, S slots (one token each), K key/value heads, D head dimension, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import torch

from deployments.engines.llm.block_manager import BLOCK_SIZE, blocks_for
from deployments.engines.llm.models.llama import DecoderSpec
from deployments.engines.protocol import EngineError

KvDtype = Literal["auto", "int8"]  # auto: the dtype of the computation
_STEPS: Final = 127  # of int8, on either side of 0
_MAX_SCALE: Final = torch.finfo(torch.float16).max


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
    kv_dtype: KvDtype = "auto",
) -> CachePlan:
    """Fit the cache into `kv_cache_bytes`, but make it no larger than all sequences can use.

    `max_model_len` None means what both the model and the cache allow.

    Raises:
        EngineError: not one block fits, or the length that was asked for is more than the model or the cache
        allows.
    """
    vector_bytes = spec.head_dim * dtype.itemsize
    if kv_dtype == "int8":
        vector_bytes = spec.head_dim + torch.float16.itemsize
    block_bytes = 2 * spec.num_layers * BLOCK_SIZE * spec.num_kv_heads * vector_bytes
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


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Return the bytes of a device that this process has or could have; of the host, of its cgroup too.

    `root` is where /proc and /sys are.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return int(module.mem_get_info(device)[0] + module.memory_reserved(device))
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = root / "sys/fs/cgroup"
    try:
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no cgroup of version 2, or the root of all
        return free
    return free if most == "max" else max(0, min(free, int(most) - int(used)))


def cache_tensors(
    spec: DecoderSpec, num_blocks: int, dtype: torch.dtype, kv_dtype: KvDtype = "auto"
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of the tensors that hold the keys, and again the values.

    There is one slot behind the last block. Of int8, the second tensor has the scales.
    """
    heads = spec.num_layers, num_blocks * BLOCK_SIZE + 1, spec.num_kv_heads
    if kv_dtype == "int8":
        return [((*heads, spec.head_dim), torch.int8), (heads, torch.float16)]
    return [((*heads, spec.head_dim), dtype)]


class LayerSlots(NamedTuple):
    """The memory of one layer: keys and values (S, K, D), and their scales (S, K) where they are int8."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class KVCache:
    """Keys and values of all layers. Block b holds the slots b * 16 to b * 16 + 15.

    `null_slot` lies behind the last block: it is never written and reads as zeros, so padding that is
    gathered from it is finite whatever other sequences left in their blocks.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: KvDtype = "auto",
    ) -> None:
        self.null_slot = num_blocks * BLOCK_SIZE
        tensors = cache_tensors(spec, num_blocks, dtype, kv_dtype)
        self._keys = _Half([_zeros(shape, kind, device) for shape, kind in tensors], dtype)
        self._values = _Half([_zeros(shape, kind, device) for shape, kind in tensors], dtype)

    def layer_slots(self, layer: int) -> LayerSlots:
        """Return the memory of a layer."""
        keys, values = self._keys, self._values
        if keys.scales_LSK is None or values.scales_LSK is None:
            return LayerSlots(keys.vectors_LSKD[layer], values.vectors_LSKD[layer])
        return LayerSlots(
            keys.vectors_LSKD[layer], values.vectors_LSKD[layer], keys.scales_LSK[layer], values.scales_LSK[layer]
        )

    def write_slots(self, layer: int, slots_N: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor) -> None:
        """Store N tokens' keys and values."""
        self._keys.write(layer, slots_N, k_NKD)
        self._values.write(layer, slots_N, v_NKD)

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, each (from, to) in this order."""
        for source, target in copies:
            begin, end = source * BLOCK_SIZE, target * BLOCK_SIZE
            for tensor in (*self._keys.tensors, *self._values.tensors):
                tensor[:, end : end + BLOCK_SIZE] = tensor[:, begin : begin + BLOCK_SIZE]

    def read_run(self, layer: int, first_slot: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of slots that follow each other, each (N, K, D): views, unless they are int8."""
        run = slice(first_slot, first_slot + num_slots)
        return self._keys.read(layer, run), self._values.read(layer, run)

    def read_slots(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the slots, each (*slots.shape, K, D)."""
        flat = slots.flatten()
        keys, values = self._keys.read(layer, flat), self._values.read(layer, flat)
        return keys.view(*slots.shape, *keys.shape[1:]), values.view(*slots.shape, *values.shape[1:])


class _Half:
    """The keys, or the values."""

    def __init__(self, tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
        self.tensors, self._dtype = tensors, dtype
        self.vectors_LSKD = tensors[0]
        self.scales_LSK = tensors[1] if len(tensors) > 1 else None

    def write(self, layer: int, slots_N: torch.Tensor, x_NKD: torch.Tensor) -> None:
        if self.scales_LSK is not None:
            wide_NKD = x_NKD.float()
            scales_NK = (wide_NKD.abs().amax(-1) / _STEPS).clamp(max=_MAX_SCALE).half()
            divisors_NK1 = scales_NK.float().masked_fill(scales_NK == 0, 1)[..., None]
            x_NKD = (wide_NKD / divisors_NK1).round().clamp(-_STEPS, _STEPS).masked_fill(scales_NK[..., None] == 0, 0)
            x_NKD = x_NKD.to(torch.int8)
            self.scales_LSK[layer].index_copy_(0, slots_N, scales_NK)
        self.vectors_LSKD[layer].index_copy_(0, slots_N, x_NKD)

    def read(self, layer: int, slots: torch.Tensor | slice) -> torch.Tensor:
        vectors = _chosen(self.vectors_LSKD[layer], slots)
        if self.scales_LSK is None:
            return vectors
        scales = _chosen(self.scales_LSK[layer], slots).float()
        return (vectors * scales[..., None]).to(self._dtype)


def _chosen(tensor_S: torch.Tensor, slots: torch.Tensor | slice) -> torch.Tensor:
    return tensor_S[slots] if isinstance(slots, slice) else tensor_S.index_select(0, slots)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; numpy asks the kernel for zero pages, which cost nothing until they are
    # used.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
