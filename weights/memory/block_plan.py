"""A module in less memory than its weights take: which tensors stay on the device, which come block by block, and which
stay with the host, that computes their blocks. Pure.

Blocks are submodules that lists of the module have, found in the names of its tensors ("blocks.3.attn.to_q.weight": a
path with a number in it). One that is too large is taken apart. The others (embeddings, norms, projections) stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from pydantic import Field

ALIGNMENT: Final = 512  # of a tensor in a buffer, as in the device's own allocations
_MIN_BLOCKS: Final = 8  # that a budget has room for: two of them are buffers, and do not keep anything


@dataclass(frozen=True, slots=True)
class Block:
    """A submodule, by its path, whose tensors come together: the offset of each in a buffer, by the tensor's name."""

    path: str
    offsets: Mapping[str, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """A module's part on another device: tensors by name, and the bytes that it allocates there itself."""

    names: frozenset[str]
    working_bytes: int


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The `blocks` that take turns in two buffers of `buffer_bytes`. All tensors but the `streamed` ones stay on the
    device, those of `hosts` in host memory and those of `shares` on other devices: their blocks are computed there."""

    blocks: Sequence[Block]
    buffer_bytes: int
    streamed: frozenset[str]
    hosts: frozenset[str] = frozenset()
    shares: Mapping[str, Share] = field(default_factory=dict)

    @property
    def staying_away(self) -> frozenset[str]:
        """Return the tensors that have no memory of their own on the device."""
        return self.streamed.union(self.hosts, *(share.names for share in self.shares.values()))


Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a machine, for each second: bytes over the link to a device, bytes of weights that the host
    multiplies a row with, and operations of its products of many rows.
    """

    link_bytes_per_s: Rate
    host_bytes_per_s: Rate
    host_flops_per_s: Rate


Way = Literal["stay", "stream", "host"]


def choose_way(nbytes: int, num_weights: int, rows: int, rates: Rates, *, is_resident: bool = False) -> Way:
    """Choose where a block of weights computes its rows: on the device that has it, on the device after a copy over
    the link, or on the host.

    The host reads the weights once, and multiplies each with every row; what the device computes hides behind the link.
    """
    if is_resident:
        return "stay"
    host_s = max(nbytes / rates.host_bytes_per_s, 2 * num_weights * rows / rates.host_flops_per_s)
    return "stream" if nbytes / rates.link_bytes_per_s < host_s else "host"


@dataclass(slots=True)
class _Subtree:
    sizes: dict[str, int] = field(default_factory=dict)  # of all tensors below, by name
    own: bool = False  # has tensors itself
    children: dict[str, _Subtree] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(map(_aligned, self.sizes.values()))

    @property
    def is_list(self) -> bool:
        return not self.own and bool(self.children) and all(name.isdecimal() for name in self.children)


def plan_blocks(sizes: Mapping[str, int], budget_bytes: int) -> BlockPlan | None:
    """Return the plan that runs a module with tensors of these bytes within a budget and keeps most of it resident.

    None when the budget is too small for the tensors outside all blocks and twice the largest block.
    """
    found = list(_blocks(_tree(sizes), "", max(1, budget_bytes // _MIN_BLOCKS), in_list=False))
    blocks = [block_of(path, node.sizes) for path, node in sorted(found, key=lambda one: _natural(one[0]))]
    if not blocks:
        return None
    names = {name for block in blocks for name in block.offsets}
    rest_bytes = sum(_aligned(nbytes) for name, nbytes in sizes.items() if name not in names)
    buffer_bytes = max(block.nbytes for block in blocks)
    room_bytes = budget_bytes - rest_bytes - 2 * buffer_bytes
    if room_bytes < 0:
        return None
    turns = tuple(_spread(blocks, room_bytes))
    names = {name for block in turns for name in block.offsets}
    return BlockPlan(turns, max((block.nbytes for block in turns), default=0), frozenset(names))


def _tree(sizes: Mapping[str, int]) -> _Subtree:
    root = _Subtree()
    for name, nbytes in sizes.items():
        node = root
        node.sizes[name] = nbytes
        for part in name.split(".")[:-1]:
            node = node.children.setdefault(part, _Subtree())
            node.sizes[name] = nbytes
        node.own = True
    return root


def _blocks(node: _Subtree, path: str, max_bytes: int, *, in_list: bool) -> Iterator[tuple[str, _Subtree]]:
    """Yield the submodules that come and go."""
    is_small = node.nbytes <= max_bytes or not node.children
    if in_list and not node.is_list and is_small:
        yield path, node
        return
    for name, child in node.children.items():
        below = f"{path}.{name}" if path else name
        yield from _blocks(child, below, max_bytes, in_list=in_list or node.is_list)


def block_of(path: str, sizes: Mapping[str, int]) -> Block:
    """Return tensors of these bytes as one block, one behind the other."""
    offsets, end = {}, 0
    for name, nbytes in sizes.items():
        offsets[name] = end
        end += _aligned(nbytes)
    return Block(path, offsets, end)


def _spread(blocks: Sequence[Block], room_bytes: int) -> Iterator[Block]:
    """Yield the blocks that do not stay. Those that do lie evenly between them: while one computes, the next comes."""
    share = room_bytes / sum(block.nbytes for block in blocks)
    due_bytes = 0.0
    for block in blocks:
        due_bytes += share * block.nbytes
        if due_bytes >= block.nbytes:
            due_bytes -= block.nbytes
        else:
            yield block


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _natural(path: str) -> list[tuple[bool, int, str]]:
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"\.", path)]
