"""The ranks of one model, by number: which share each one has, and with whom it exchanges what."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

from deployments.engines.records.protocol import EngineError

Axis = Literal["cfg", "sequence", "tensor"]
AXES: Final = get_args(Axis)
MAX_RANKS: Final = 64


class RankPlace(NamedTuple):
    """The place of a rank on each axis: its branch of guidance, its part of the tokens, its slice of the weights."""

    cfg: int
    sequence: int
    tensor: int


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The number of ranks along each axis.

    `cfg` computes the branches of guidance apart (1 or 2), `sequence` parts of the tokens, `tensor` slices of the
    weights. Ranks that exchange most, those of one `tensor` axis, have adjacent numbers.

    Raises:
        EngineError: a number is out of its range.
    """

    cfg: int = 1
    sequence: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            count, most = getattr(self, axis), 2 if axis == "cfg" else MAX_RANKS
            if type(count) is not int or not 1 <= count <= most:
                raise EngineError(f"ranks: {axis} is {count!r}, expected 1 to {most}")
        if self.size > MAX_RANKS:
            raise EngineError(f"ranks: {self} are {self.size} ranks, at most {MAX_RANKS} compute one model")

    def __str__(self) -> str:
        return ", ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.cfg * self.sequence * self.tensor

    def place(self, rank: int) -> RankPlace:
        """Return the place of a rank. Raises EngineError for a number that no rank has."""
        if not 0 <= rank < self.size:
            raise EngineError(f"rank {rank} is none of {self.size} ranks, which are 0 to {self.size - 1}")
        rest, tensor = divmod(rank, self.tensor)
        return RankPlace(*divmod(rest, self.sequence), tensor)

    def number(self, place: RankPlace) -> int:
        """Return the rank at a place."""
        return (place.cfg * self.sequence + place.sequence) * self.tensor + place.tensor

    def peers(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from this one along an axis alone, itself among them, in order."""
        place = self.place(rank)
        return tuple(self.number(place._replace(**{axis: index})) for index in range(getattr(self, axis)))


def adjacent_places(nodes: Sequence[Hashable]) -> list[int]:
    """Return the places of ranks 0 and on, of which each is on the node that `nodes` names: rank 0 has the first one.

    Ranks of one node have adjacent numbers, those beside rank 0 first, so that ranks that exchange most share a node.
    """
    order = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return sorted(range(len(nodes)), key=lambda place: order[nodes[place]])
