"""A rank's share of a model that transformers computes, by its class's own plan for ranks.

A plan gives modules and parameters a style: which rows or columns of a matrix a rank has, and what the ranks exchange
around a forward (`planned_forwards.py`). What has none is whole on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn

from deployments.engines.libraries.library_seam import CheckpointLayout
from deployments.engines.llm.models.rank_share import RankShare, Slice, even_range, inner_range
from deployments.engines.llm.models.stock_classes import OWN_CACHE, PAGED, RECURRENT
from deployments.engines.records.protocol import EngineError
from weights.loading.modules import tied_groups

_ROWS: Final = -2
_COLUMNS: Final = -1
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_HEADS: Final[Mapping[str, str]] = {"q_proj": "query", "k_proj": "key/value", "v_proj": "key/value"}


class Style(NamedTuple):
    """The cut of a matrix, the same of each of its `parts`, and the changes of a module's inputs and outputs."""

    dimension: int | None = None
    parts: int = 1
    inputs: Literal["", "cut", "own tokens"] = ""
    outputs: Literal["", "summed", "gathered"] = ""


_WHOLE: Final = Style()
STYLES: Final[Mapping[str, Style]] = {
    "colwise": Style(_ROWS),
    "packed_colwise": Style(_ROWS, parts=2),
    "colwise_gather_output": Style(_ROWS, outputs="gathered"),
    "rowwise": Style(_COLUMNS, outputs="summed"),
    "packed_rowwise": Style(_COLUMNS, parts=2),
    "rowwise_split_input": Style(_COLUMNS, inputs="cut", outputs="summed"),
    "embedding_rowwise": Style(_ROWS, inputs="own tokens", outputs="summed"),
    "moe_tp_experts": Style(outputs="summed"),
    # What these do, they do to gradients, or to tensors of the library's own kind.
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"), _WHOLE),
}


class _Cut(NamedTuple):
    """The part `start` to `stop` of each of a tensor's `parts`, which have `length` each, along a dimension."""

    dimension: int
    start: int
    stop: int
    length: int
    parts: int

    @property
    def size(self) -> int:
        return self.parts * (self.stop - self.start)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole tensor: a view, unless the tensor has several parts."""
        starts = (number * self.length + self.start for number in range(self.parts))
        found = [tensor.narrow(self.dimension, start, self.stop - self.start) for start in starts]
        return found[0] if self.parts == 1 else torch.cat(found, dim=self.dimension)


def check_class(name: str) -> None:
    """Raise EngineError for a class of transformers that ranks do not divide, whatever its plan says."""
    if name not in PAGED:
        has = "a cache of its own" if name in OWN_CACHE else "recurrent layers" if name in RECURRENT else "vision"
        raise EngineError(f"ranks do not divide a {name}, which has {has}: expected tensor 1")


def _stacks_experts(converter: Any, cut: _Cut) -> bool:
    """Return whether a parameter is made of matrices of experts, which can be cut one by one."""
    kinds = [type(one).__name__ for one in converter.operations]
    if cut.parts == 1:
        return kinds == ["MergeModulelist"]
    return kinds == ["MergeModulelist", "Concatenate"] and converter.operations[1].dim == cut.dimension


@dataclass(eq=False)
class PlannedShare(RankShare):
    """The share of rank `rank` of `size` in a `module` that was built whole, without weights.

    Raises:
        EngineError: the plan of its class cannot divide it among so many ranks.
    """

    module: Any
    rank: int
    size: int
    styles: Mapping[str, Style] = field(init=False)  # by path, with `*` for the number of a layer
    _cuts: dict[str, _Cut] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        name, plan = type(self.module).__name__, self.module.tp_plan
        check_class(name)
        if not self.module.config.base_model_tp_plan:
            raise EngineError(f"transformers has no plan for ranks of a {name}: tensor is {self.size}, expected 1")
        if unknown := sorted(set(plan.values()).difference(STYLES)):
            raise EngineError(f"the plan of a {name} has style {unknown[0]!r}; supported are {', '.join(STYLES)}")
        self.styles = {path: STYLES[style] for path, style in plan.items()}
        for path, parameter in self.module.named_parameters(remove_duplicate=False):
            style = self.style_of(path, self.style_of(path.rpartition(".")[0]))
            # The bias of a sum is rank 0's alone, and whole.
            if style.dimension is not None and (style.dimension == _ROWS or parameter.ndim > 1):
                dimension = max(0, parameter.ndim + style.dimension)
                length = parameter.shape[dimension] // style.parts
                self._cuts[path] = _Cut(dimension, *self._range(path, length, self.rank), length, style.parts)
        for group in tied_groups(self.module):
            if len({self._cuts.get(path) for path in group}) > 1:
                raise EngineError(f"{' and '.join(map(repr, group))} of a {name} are one, and ranks divide one alone")

    def style_of(self, path: str, default: Style = _WHOLE) -> Style:
        """Return the style of a module or parameter."""
        return self.styles.get(_NUMBER.sub("*", f"{path}.")[:-1], default)

    def ranges(self, path: str) -> list[tuple[int, int]]:
        """Return the ranges that all ranks have of the rows or columns of a module's matrix."""
        length = self._cuts[f"{path}.weight"].length
        return [self._range(f"{path}.weight", length, rank) for rank in range(self.size)]

    def _range(self, path: str, length: int, rank: int) -> tuple[int, int]:
        owner, _, leaf = path.rpartition(".")[0].rpartition(".")
        head_size = self._head_size(owner, leaf)
        if head_size and not self.style_of(f"{owner}.{leaf}").outputs:
            heads, rest = divmod(length, head_size)
            if rest or (heads % self.size and (leaf == "q_proj" or self.size % heads)):
                raise EngineError(f"{heads} {_HEADS[leaf]} heads cannot be divided {self._among}")
            first = rank * heads // self.size  # ranks of one key/value head have it each
            return first * head_size, (first + max(1, heads // self.size)) * head_size
        if length < self.size:
            raise EngineError(f"{length} rows or columns of {path!r} cannot be divided {self._among}")
        if length % self.size:
            return inner_range(length, rank, self.size)
        return even_range(length, rank, self.size)

    @property
    def _among(self) -> str:
        return f"among {self.size} ranks (tensor {self.size})"

    def _head_size(self, owner: str, leaf: str) -> int:
        """Return the rows of a head of a projection, which a rank has whole; 0 for a module that is none."""
        part = self.module.get_submodule(owner)
        size = getattr(part, "head_dim", 0) if leaf in _HEADS else 0
        return getattr(part, "v_head_dim", size) if size and leaf == "v_proj" else size

    def slice_of(self, name: str) -> Slice | None:
        """Return the part of a parameter that the rank has; None for all of it, and for parts that lie apart."""
        cut = self._cuts.get(name)
        return None if cut is None or cut.parts > 1 else Slice(*cut[:3])

    def whole_length(self, name: str) -> int:
        """Return the length of the dimension along which a parameter is cut."""
        return self._cuts[name].length

    def stored_slices(self, layout: CheckpointLayout) -> dict[str, Slice]:
        """Return the slices of a checkpoint's tensors, by their names, of which the rank needs no whole."""
        found = {stored: part for name, stored in layout.renamed.items() if (part := self.slice_of(name)) is not None}
        for name, (converter, parts) in layout.merged.items():
            cut = self._cuts.get(name)
            if cut is not None and _stacks_experts(converter, cut):
                found |= {stored: Slice(cut.dimension - 1, cut.start, cut.stop) for stored, _ in parts}
        return found

    def copied_bytes(self, layout: CheckpointLayout, sizes: Mapping[str, int]) -> int:
        """Return the bytes that a rank copies of a checkpoint's tensors of these `sizes`: its parts that lie apart."""
        cuts = {stored: self._cuts.get(name) for name, stored in layout.renamed.items()}
        return sum(sizes[stored] // self.size for stored, cut in cuts.items() if cut is not None and cut.parts > 1)

    def divide(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make the module one of this rank's sizes, and return its parts of `tensors`, by the names of parameters."""
        made: dict[int, nn.Parameter] = {}
        for path, part in self.module.named_modules():
            for leaf, parameter in list(part.named_parameters(recurse=False)):
                if (cut := self._cuts.get(f"{path}.{leaf}")) is not None:
                    shape = [*parameter.shape]
                    shape[cut.dimension] = cut.size
                    if id(parameter) not in made:
                        made[id(parameter)] = nn.Parameter(parameter.new_empty(shape), requires_grad=False)
                    setattr(part, leaf, made[id(parameter)])
            if isinstance(part, nn.Linear):
                part.out_features, part.in_features = part.weight.shape
            elif isinstance(part, nn.Embedding) and f"{path}.weight" in self._cuts:
                part.padding_idx = None
        return {name: self._own(name, tensor) for name, tensor in tensors.items()}

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of a tensor; one of another size is that part already, or its shape is refused."""
        cut = self._cuts.get(name)
        if cut is not None:
            is_whole = tensor.ndim > cut.dimension and tensor.shape[cut.dimension] == cut.parts * cut.length
            return cut.of(tensor) if is_whole else tensor
        is_added_once = self.style_of(name.rpartition(".")[0]).outputs == "summed" and tensor.ndim == 1
        return torch.zeros_like(tensor) if is_added_once and self.rank else tensor
