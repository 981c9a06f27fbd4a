"""Long texts as several encodings: as many for every text of a request, and joined again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def level_chunks(chunked: Sequence[Sequence[T]], empty: Callable[[int], T]) -> list[tuple[T, ...]]:
    """All with as many chunks as the longest has: `empty(index)` is a chunk without text for the text `index`.

    Classifier-free guidance runs prompt and negative prompt as rows of one batch, and SDXL joins two encoders' rows
    side by side: all four need one length.
    """
    most = max(len(chunks) for chunks in chunked)
    return [
        (*chunks, *[empty(index)] * (most - len(chunks))) if len(chunks) < most else tuple(chunks)
        for index, chunks in enumerate(chunked)
    ]


def join_chunks(encodings: Sequence[Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
    """Return one encoding: "penultimate" (L, D) of all chunks behind each other; "pooled" is the first one's."""
    if len(encodings) == 1:
        return encodings[0]
    joined = torch.cat([encoding["penultimate"] for encoding in encodings])
    return {"pooled": encodings[0]["pooled"], "penultimate": joined}
