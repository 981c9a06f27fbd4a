"""A rank's share of one of our decoders: some of its heads, of its feed-forward columns and of its head's rows.

The matrices of q, k, v, gate and up are cut by rows, those of o and down by columns: what these give, the ranks add up,
once for attention and once for the feed-forward part. So a layer's activations are whole on each rank, and norms, the
router of experts and the embedding are, too. (Transformers' `base_model_tp_plan` says the same.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch.nn import functional as F

from deployments.engines.llm.models.llama import DecoderSpec
from deployments.engines.llm.models.packed import PackedSource
from deployments.engines.nn.packed_weights import DENSE_KINDS, GROUP_INT8, PackedWeight
from deployments.engines.ranks.group import RankGroup
from deployments.engines.records.protocol import EngineError
from weights.operations.adapters import LoraPair
from weights.records.dtypes import BLOCK_SIZES

_ROWS: Final = 0
_COLUMNS: Final = 1
_DIMENSIONS: Final = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"), _ROWS),
    **dict.fromkeys(("o_proj", "down_proj"), _COLUMNS),
}
_PIECE: Final = 32  # columns that kernels compute together: a slice has whole ones where there are enough


class Slice(NamedTuple):
    """The part of a matrix: rows (0) or columns (1) `start` to `stop`."""

    dimension: int
    start: int
    stop: int


class RankShare(ABC):
    """The share of rank `rank` of `size` in a language model."""

    rank: int
    size: int

    @abstractmethod
    def slice_of(self, name: str) -> Slice | None:
        """Return the part of a matrix or a vector that the rank has; None for all."""

    @abstractmethod
    def whole_length(self, name: str) -> int:
        """Return the rows or columns that all ranks have together, of one with a slice."""

    def cut_pair(self, path: str, pair: LoraPair) -> LoraPair:
        """Return the rank's part of a LoRA of a layer: the outputs of `up` or the inputs of `down` that it has.

        What the parts add is summed up with the layer's own. A pair of another size stays as it is. Raises EngineError
        for a DoRA whose lengths are those of rows or columns that no rank has whole.
        """
        found = self.slice_of(f"{path}.weight")
        if found is None:
            return pair
        by_rows = found.dimension == _ROWS
        if self.whole_length(f"{path}.weight") != (len(pair.up) if by_rows else pair.down.shape[1]):
            return pair
        if pair.magnitude is not None and pair.by_input == by_rows:
            raise EngineError(f"a DoRA of {path!r} cannot be divided among {self.size} ranks (tensor {self.size})")

        def own(tensor: torch.Tensor | None, dimension: int) -> Any:
            part = None if tensor is None else tensor.narrow(dimension, found.start, found.stop - found.start)
            return part if part is None else part.contiguous()

        magnitude = own(pair.magnitude, 0)
        if by_rows:
            return replace(pair, up=own(pair.up, 0), bias=own(pair.bias, 0), magnitude=magnitude)
        return replace(pair, down=own(pair.down, 1), bias=None if self.rank else pair.bias, magnitude=magnitude)


@dataclass(frozen=True)
class DecoderShare(RankShare):
    """The share of rank `rank` of `size` in a decoder. Columns are cut at whole blocks of `block` elements.

    Raises:
        EngineError: the decoder cannot be divided among so many ranks.
    """

    whole: DecoderSpec
    rank: int
    size: int
    block: int = 1

    def __post_init__(self) -> None:
        spec, size = self.whole, self.size
        among = f"cannot be divided among {size} ranks (tensor {size})"
        if spec.num_heads % size:
            raise EngineError(f"{spec.num_heads} query heads {among}")
        if spec.num_kv_heads % size and size % spec.num_kv_heads:
            raise EngineError(f"{spec.num_kv_heads} key/value heads {among}: expected a multiple or a divisor")
        columns = spec.num_heads // size * spec.head_dim
        if columns % self.block:
            raise EngineError(f"o_proj {among}: {columns} columns each, in blocks of {self.block}")
        for inner in self._inner_sizes():
            if inner % self.block or inner // self.block < size:
                raise EngineError(f"down_proj's {inner} columns {among}: they are in blocks of {self.block}")
        if spec.vocab_size < size:
            raise EngineError(f"a vocabulary of {spec.vocab_size} tokens {among}")

    @classmethod
    def of_stored(cls, whole: DecoderSpec, rank: int, size: int, source: PackedSource | None) -> DecoderShare:
        """Return the share of a decoder whose matrices are of the `source`; None for plain ones."""
        return cls(whole, rank, size, 1 if source is None else _column_block(source))

    @cached_property
    def spec(self) -> DecoderSpec:
        """Return the numbers of the smaller decoder that the rank has."""
        experts = self.whole.experts
        return replace(
            self.whole,
            num_heads=self.whole.num_heads // self.size,
            num_kv_heads=max(1, self.whole.num_kv_heads // self.size),
            intermediate_size=_length(self._inner(self.whole.intermediate_size)),
            experts=experts and replace(experts, intermediate_size=_length(self._inner(experts.intermediate_size))),
            head_rows=_length(even_range(self.whole.vocab_size, self.rank, self.size)),
        )

    def slice_of(self, name: str) -> Slice | None:
        """Return the part of a matrix or a vector, by a name of Qwen3-MoE's form, that the rank has; None for all."""
        path, _, leaf = name.rpartition(".")
        part = path.rpartition(".")[2]
        if part not in _DIMENSIONS or (leaf == "bias" and _DIMENSIONS[part] == _COLUMNS):
            return None
        return Slice(_DIMENSIONS[part], *self._range(part, is_expert=".experts." in path))

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of a plain tensor: a view. A bias of a sum is rank 0's alone.

        What has not the whole matrix's size stays as it is: it came as that part, or its shape is refused by name.
        """
        found = self.slice_of(name)
        if (
            found is not None
            and tensor.dim() > found.dimension
            and self.whole_length(name) == tensor.shape[found.dimension]
        ):
            return tensor.narrow(found.dimension, found.start, found.stop - found.start)
        is_added_once = name.endswith((".o_proj.bias", ".down_proj.bias"))
        return torch.zeros_like(tensor) if is_added_once and self.rank else tensor

    def cut_packed(self, name: str, weight: PackedWeight) -> PackedWeight:
        """Return the rank's part of a packed matrix: a view, whose rows lie apart where it is of columns."""
        found = self.slice_of(name)
        if found is None or self.whole_length(name) != (weight.rows, weight.columns)[found.dimension]:
            return weight
        return _cut_packed(name, weight, found)

    def slice_of_scales(self, name: str, group_size: int) -> Slice | None:
        """Return the part of the flat scales of a matrix that the rank has; None for all: of columns they lie apart."""
        found = self.slice_of(name)
        if found is None or found.dimension == _COLUMNS or self.whole.hidden_size % group_size:
            return None
        by_row = self.whole.hidden_size // group_size
        return Slice(_ROWS, found.start * by_row, found.stop * by_row)

    def cut_scales(self, name: str, data: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
        """Return the flat scales of a matrix's groups: those of its part where it came as columns, which has all."""
        found = self.slice_of(name)
        is_part = found is not None and data.dim() == 2 and found.stop - found.start == data.shape[found.dimension]
        if found is None or found.dimension == _ROWS or not is_part or scales.numel() * group_size == data.numel():
            return scales
        columns = self.whole_length(name)
        if scales.numel() * group_size != len(data) * columns:
            return scales
        return _own_scales(name, scales, len(data), columns, group_size, found)

    def whole_length(self, name: str) -> int:
        """Return the rows or columns that all ranks have together, of a matrix or a vector with a slice."""
        last = replace(self, rank=self.size - 1).slice_of(name)
        assert last is not None
        return last.stop

    def _range(self, part: str, *, is_expert: bool) -> tuple[int, int]:
        spec = self.whole
        if part == "lm_head":
            return even_range(spec.vocab_size, self.rank, self.size)
        if part in ("gate_proj", "up_proj", "down_proj"):
            assert spec.experts is not None or not is_expert
            return self._inner(spec.experts.intermediate_size if is_expert and spec.experts else spec.intermediate_size)
        heads = spec.num_heads if part in ("q_proj", "o_proj") else spec.num_kv_heads
        first = self.rank * heads // self.size  # ranks of one key/value head have it each
        return first * spec.head_dim, (first + max(1, heads // self.size)) * spec.head_dim

    def _inner_sizes(self) -> Iterable[int]:
        spec, experts = self.whole, self.whole.experts
        if experts is None or len(experts.layers) < spec.num_layers:
            yield spec.intermediate_size
        if experts is not None:
            yield experts.intermediate_size

    def _inner(self, size: int) -> tuple[int, int]:
        return inner_range(size, self.rank, self.size, self.block)


def even_range(count: int, rank: int, size: int, unit: int = 1) -> tuple[int, int]:
    """Return the range of `count` that rank `rank` of `size` has, as even as whole units are."""
    units = count // unit
    start, stop = units * rank // size * unit, units * (rank + 1) // size * unit
    return start, stop if rank + 1 < size else count


def inner_range(count: int, rank: int, size: int, block: int = 1) -> tuple[int, int]:
    """Return the range of columns between two products: whole blocks, and whole pieces where there are enough."""
    piece = math.lcm(block, _PIECE)
    return even_range(count, rank, size, block if count % piece or count // piece < size else piece)


def gather_columns(ranks: RankGroup, own: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return the columns (..., sum of sizes) of which each rank has made its `own`."""
    parts = ranks.gather(F.pad(own, (0, max(sizes) - own.shape[-1])), "tensor")
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)


def _length(range_: tuple[int, int]) -> int:
    return range_[1] - range_[0]


def _column_block(source: PackedSource) -> int:
    kinds = {
        source.kinds[stored]
        for stored, name in source.names.items()
        if stored in source.kinds and name.endswith((".o_proj.weight", ".down_proj.weight"))
    }
    sizes = {GROUP_INT8: source.group_size, **dict.fromkeys(DENSE_KINDS, 1)}
    return math.lcm(*(sizes[kind] if kind in sizes else BLOCK_SIZES[kind][0] for kind in kinds))


def _cut_packed(name: str, weight: PackedWeight, part: Slice) -> PackedWeight:
    count = part.stop - part.start
    rows, columns = (count, weight.columns) if part.dimension == _ROWS else (weight.rows, count)
    if weight.kind == GROUP_INT8:
        return _cut_groups(name, weight._replace(rows=rows, columns=columns), weight, part)
    start, length = part.start, count
    if part.dimension == _COLUMNS and weight.kind not in DENSE_KINDS:
        elements, block_bytes = BLOCK_SIZES[weight.kind]
        start, length = (number // elements * block_bytes for number in (start, length))
    return weight._replace(data=weight.data.narrow(part.dimension, start, length), rows=rows, columns=columns)


def _cut_groups(name: str, cut: PackedWeight, weight: PackedWeight, part: Slice) -> PackedWeight:
    assert weight.scales is not None
    scales = _own_scales(name, weight.scales, weight.rows, weight.columns, weight.group_size, part)
    return cut._replace(data=weight.data.narrow(part.dimension, part.start, part.stop - part.start), scales=scales)


def _own_scales(name: str, scales: torch.Tensor, rows: int, columns: int, group_size: int, part: Slice) -> torch.Tensor:
    """Return the flat scales of a part, cut at whole groups. Raises EngineError where one goes over a row's border."""
    if columns % group_size:
        raise EngineError(f"tensor {name!r} has rows of {columns} in groups of {group_size}: ranks cannot divide it")
    by_group = group_size if part.dimension == _COLUMNS else 1
    start, length = part.start // by_group, (part.stop - part.start) // by_group
    return scales.view(rows, -1).narrow(part.dimension, start, length).contiguous().flatten()
