"""Images in prompts: what a model's vision tower makes of them, and which of the tokens stand for them.

Suffixes: P tokens of a prompt, R rows of an image's features (one for each token that stands for it), C hidden size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class ImageFeatures(NamedTuple):
    """The rows (R, C) that stand for an image among embeddings, and those that are added behind the first layers.

    `is_tensor`: the class wants the former as a tensor, and not in a list.
    """

    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()
    is_tensor: bool = False


@dataclass(slots=True, eq=False, weakref_slot=True)
class PromptImage:
    """An image as its model's processor leaves it: `text` stands for it in a prompt, with `num_rows` placeholders.

    `digest` is that of its pixels. `inputs` go to the vision tower; when it has run, `features` stand in their place.
    """

    digest: bytes
    text: str
    inputs: dict[str, torch.Tensor]
    num_rows: int = 0  # not counted yet
    features: ImageFeatures | None = None
    grid: torch.Tensor | None = None  # of classes whose positions are those in the image


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt. `rows` (P,) has for each token its row of all images' features, -1 where there is none.

    `known_positions` (3, P) are those of classes that count an image's rows and columns. Tokens of a run in `spans` see
    each other, so that they are computed together: (start, end), in order.
    """

    images: tuple[PromptImage, ...]
    rows: torch.Tensor
    known_positions: torch.Tensor | None = None
    spans: tuple[tuple[int, int], ...] = ()
    _bounds: tuple[tuple[int, int, int], ...] = field(init=False)  # of each image: its tokens, and its first row
    _shift: int = field(init=False)  # from the places of what follows the prompt to positions

    def __post_init__(self) -> None:
        places = torch.nonzero(self.rows >= 0)[:, 0].tolist()
        bounds, first = [], 0
        for image in self.images:
            bounds.append((places[first], places[first + image.num_rows - 1] + 1, first))
            first += image.num_rows
        object.__setattr__(self, "_bounds", tuple(bounds))
        behind = 0 if self.known_positions is None else int(self.known_positions.max()) + 1 - len(self.rows)
        object.__setattr__(self, "_shift", behind)

    def identity(self, start: int, end: int) -> bytes:
        """Return everything beside the tokens `start` to `end` that their keys depend on: the images among them,
        and where each begins.
        """
        return b"".join(
            image.digest + struct.pack("<q", first)
            for image, (first, last, _) in zip(self.images, self._bounds, strict=True)
            if first < end and start < last
        )

    def among(self, start: int, end: int) -> Iterator[tuple[PromptImage, torch.Tensor, torch.Tensor]]:
        """Yield the images that the tokens `start` to `end` stand for: which of these do, and for which rows of it."""
        rows = self.rows[start:end]
        for image, (first, last, first_row) in zip(self.images, self._bounds, strict=True):
            if first < end and start < last:
                tokens = torch.nonzero((rows >= first_row) & (rows < first_row + image.num_rows))[:, 0]
                if len(tokens):
                    yield image, tokens, rows[tokens] - first_row

    def positions(self, start: int, end: int) -> torch.Tensor:
        """Return the positions (3, tokens) of `start` to `end`, of a prompt that has them, and of what follows it."""
        assert self.known_positions is not None
        known = self.known_positions[:, start:end]
        begin = max(start, self.known_positions.shape[1]) + self._shift
        return torch.cat([known, torch.arange(begin, begin + end - start - known.shape[1]).expand(3, -1)], 1)

    def whole_end(self, start: int, end: int) -> int:
        """Return the end of a chunk from `start` that should end at `end`: not within a span, unless it began there.

        Then it goes on to the span's end.
        """
        for first, last in self.spans:
            if first < end < last:
                return first if first > start else last
        return end


def runs_of(rows_P: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return the runs of tokens that stand for images, each (start, end)."""
    is_image = torch.nn.functional.pad((rows_P >= 0).int(), (1, 1))
    edges = torch.nonzero(is_image.diff())[:, 0].tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))
