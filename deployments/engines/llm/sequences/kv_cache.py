"""The memory of past keys and values: its size, and its tensors.

They are kept in the dtype of the computation (in float16 where packed weights are computed with in float32: the keys
of some models have elements of tens, which bfloat16 rounds too much), or as int8 with a float16 scale for each head of
each token: half of bfloat16's memory, and an error of at most 0.4 % of the largest element of a head's vector. A value
read from a token's int8 depends on its own vectors alone: it is the same in any step.

Suffixes: L layers of one shape, S slots (one token each), K key/value heads, D head dimension, N tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
import torch

from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE, blocks_for
from deployments.engines.records.protocol import EngineError


class KvHeads(NamedTuple):
    """The key/value heads of a layer: their number, and the elements of a key and of a value."""

    num_heads: int
    key_size: int
    value_size: int


KvDtype = Literal["auto", "int8"]  # auto: the dtype of the computation
_STEPS: Final = 127  # of int8, on either side of 0
_MAX_FLOAT16: Final = torch.finfo(torch.float16).max


class CachedSpec(Protocol):
    """The facts of a model for planning its cache."""

    @property
    def kv_layers(self) -> Sequence[KvHeads]:
        """The heads of each layer that attends."""

    @property
    def max_positions(self) -> int:
        """The longest sequence that the model was made for."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The plan of a KV cache: blocks, the greatest sequence length (prompt and completion), sequences at a time.

    The model was made for sequences of `max_positions`.
    """

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_positions: int


def plan_cache(
    spec: CachedSpec,
    dtype: torch.dtype,
    *,
    kv_cache_bytes: int,
    max_num_seqs: int,
    max_model_len: int | None,
    kv_dtype: KvDtype = "auto",
    fixed_bytes: int = 0,
    beside_bytes: int = 0,
) -> CachePlan:
    """Fit the cache into `kv_cache_bytes`, at most as large as all sequences can use.

    `max_model_len` None means the most that both the model and the cache allow. `beside_bytes` are those of a block of
    another model, which has as many of them.

    Raises:
        EngineError: not one block fits, or the wanted length is more than the model or the cache
        allows.
    """
    return plan_blocks(
        bytes_per_block(spec, dtype, kv_dtype) + beside_bytes,
        spec.max_positions,
        kv_cache_bytes=kv_cache_bytes,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        fixed_bytes=fixed_bytes,
    )


def bytes_per_block(spec: CachedSpec, dtype: torch.dtype, kv_dtype: KvDtype = "auto") -> int:
    """Return the bytes of a block's keys and values in all layers."""
    return BLOCK_SIZE * sum(
        heads.num_heads
        * (_vector_bytes(heads.key_size, dtype, kv_dtype) + _vector_bytes(heads.value_size, dtype, kv_dtype))
        for heads in spec.kv_layers
    )


def plan_blocks(
    block_bytes: int,
    max_positions: int,
    *,
    kv_cache_bytes: int,
    max_num_seqs: int,
    max_model_len: int | None,
    fixed_bytes: int = 0,
) -> CachePlan:
    """Fit blocks of so many bytes into `kv_cache_bytes`, for a model of so many positions. Raises as `plan_cache`.

    Any sequence has `fixed_bytes` beside its blocks: they take at most half, unless there is a single sequence.
    """
    if fixed_bytes:
        max_num_seqs = min(max_num_seqs, max(1, kv_cache_bytes // 2 // fixed_bytes))
    left = kv_cache_bytes - max_num_seqs * fixed_bytes
    if left < 0:
        raise EngineError(f"kv_cache_bytes is {kv_cache_bytes}, but the states of a sequence need {fixed_bytes}")
    affordable = left // max(1, block_bytes)
    if affordable < 1:
        least = fixed_bytes + block_bytes
        raise EngineError(f"kv_cache_bytes is {kv_cache_bytes}, but one block of {BLOCK_SIZE} tokens needs {least}")
    if max_model_len is None:
        max_model_len = min(max_positions, affordable * BLOCK_SIZE)
    if not 2 <= max_model_len <= max_positions:
        raise EngineError(f"max_model_len is {max_model_len}, expected 2 to {max_positions} (the model's)")
    if blocks_for(max_model_len) > affordable:
        needed = blocks_for(max_model_len) * block_bytes
        raise EngineError(f"max_model_len {max_model_len} needs {needed} bytes of KV cache, got {kv_cache_bytes}")
    num_blocks = min(affordable, max_num_seqs * blocks_for(max_model_len))
    return CachePlan(num_blocks, max_model_len, max_num_seqs, max_positions)


def _vector_bytes(size: int, dtype: torch.dtype, kv_dtype: KvDtype) -> int:
    return size + torch.float16.itemsize if kv_dtype == "int8" else size * dtype.itemsize


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
    spec: CachedSpec, num_blocks: int, dtype: torch.dtype, kv_dtype: KvDtype = "auto"
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of all tensors of a cache: of the keys first, then of the values.

    Layers of one shape share a tensor, with one slot behind the last block. Of int8, a second one has the scales.
    """
    sizes = [heads[:2] for heads in spec.kv_layers], [(heads.num_heads, heads.value_size) for heads in spec.kv_layers]
    return [
        tensor
        for of_layers in sizes
        for (count, size), num_layers in Counter(of_layers).items()
        for tensor in _shapes((num_layers, num_blocks * BLOCK_SIZE + 1, count), size, dtype, kv_dtype)
    ]


def _shapes(
    heads: tuple[int, ...], size: int, dtype: torch.dtype, kv_dtype: KvDtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    if kv_dtype == "int8":
        return [((*heads, size), torch.int8), (heads, torch.float16)]
    return [((*heads, size), dtype)]


class LayerSlots(NamedTuple):
    """The memory of one layer: keys and values (S, K, D), and their scales (S, K) where they are int8."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class KVCache:
    """Keys and values of all layers. Block b holds the slots b * 16 to b * 16 + 15.

    `null_slot` lies after the last block: it is never written and reads as zeros, so padding that is
    gathered from it is finite for any contents of other blocks.
    """

    def __init__(
        self,
        spec: CachedSpec,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: KvDtype = "auto",
        *,
        stored: torch.dtype | None = None,
        places: Sequence[torch.device] = (),
    ) -> None:
        """Make room for `num_blocks` blocks. Vectors are read in `dtype`, and kept in `stored`, of as many bytes.

        Each layer's cache is on `device`, or on its own of `places`.
        """
        self.null_slot = num_blocks * BLOCK_SIZE
        slots = num_blocks * BLOCK_SIZE + 1, stored or dtype, kv_dtype
        devices = places or [device] * len(spec.kv_layers)
        keys = [(heads.num_heads, heads.key_size, place) for heads, place in zip(spec.kv_layers, devices, strict=True)]
        values = [(one.num_heads, one.value_size, place) for one, place in zip(spec.kv_layers, devices, strict=True)]
        self._keys, self._values = _Half(keys, slots, dtype), _Half(values, slots, dtype)

    def layer_slots(self, layer: int) -> LayerSlots:
        """Return the memory of a layer."""
        (keys, key_scales), (values, value_scales) = self._keys.layers[layer], self._values.layers[layer]
        return LayerSlots(keys, values, key_scales, value_scales)

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
        """Return keys and values of consecutive slots, each (N, K, D): views, unless they are converted."""
        run = slice(first_slot, first_slot + num_slots)
        return self._keys.read(layer, run), self._values.read(layer, run)

    def read_slots(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the slots, each (*slots.shape, K, D)."""
        flat = slots.flatten()
        keys, values = self._keys.read(layer, flat), self._values.read(layer, flat)
        return keys.view(*slots.shape, *keys.shape[1:]), values.view(*slots.shape, *values.shape[1:])


class _Half:
    """The keys, or the values: of each layer a view (S, K, D), and one of its scales (S, K) for int8."""

    def __init__(
        self,
        sizes: list[tuple[int, int, torch.device]],
        slots: tuple[int, torch.dtype, KvDtype],
        dtype: torch.dtype,
    ) -> None:
        """`sizes` are (K, D) of each layer and its device, `slots` their number; then their dtypes."""
        self._dtype = dtype
        num_slots, stored, kv_dtype = slots
        num_layers = Counter(sizes)
        groups = {
            (heads, size, device): [
                zero_pages(shape, kind, device)
                for shape, kind in _shapes((count, num_slots, heads), size, stored, kv_dtype)
            ]
            for (heads, size, device), count in num_layers.items()
        }
        self.tensors = [tensor for group in groups.values() for tensor in group]  # each (L, S, K, ...)
        self.layers: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        places: Counter[tuple[int, int, torch.device]] = Counter()
        for one in sizes:
            vectors, *scales = (tensor[places[one]] for tensor in groups[one])
            self.layers.append((vectors, scales[0] if scales else None))
            places[one] += 1

    def write(self, layer: int, slots_N: torch.Tensor, x_NKD: torch.Tensor) -> None:
        vectors, scales = self.layers[layer]
        if scales is not None:
            wide_NKD = x_NKD.float()
            scales_NK = (wide_NKD.abs().amax(-1) / _STEPS).clamp(max=_MAX_FLOAT16).half()
            divisors_NK1 = scales_NK.float().masked_fill(scales_NK == 0, 1)[..., None]
            x_NKD = (wide_NKD / divisors_NK1).round().clamp(-_STEPS, _STEPS).masked_fill(scales_NK[..., None] == 0, 0)
            x_NKD = x_NKD.to(torch.int8)
            scales.index_copy_(0, slots_N, scales_NK)
        elif vectors.dtype == torch.float16:
            x_NKD = x_NKD.clamp(-_MAX_FLOAT16, _MAX_FLOAT16).half()
        vectors.index_copy_(0, slots_N, x_NKD)

    def read(self, layer: int, slots: torch.Tensor | slice) -> torch.Tensor:
        stored, scales = self.layers[layer]
        vectors = _chosen(stored, slots)
        if scales is None:
            return vectors.to(self._dtype)
        return (vectors * _chosen(scales, slots).float()[..., None]).to(self._dtype)


def _chosen(tensor_S: torch.Tensor, slots: torch.Tensor | slice) -> torch.Tensor:
    return tensor_S[slots] if isinstance(slots, slice) else tensor_S.index_select(0, slots)


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros whose memory is allocated at the first use."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; numpy asks the kernel for zero pages, which cost nothing until they are
    # used.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
