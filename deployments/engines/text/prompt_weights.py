"""Prompts with weights, as the Stable Diffusion WebUI reads them: `(word)`, `(word:1.3)`, `[word]` and `BREAK`.

A bracket multiplies the weight of what is in it: round ones by 1.1 or by the number behind the colon, square ones by
1 / 1.1. A backslash before a bracket makes it a character. `BREAK` begins a new chunk. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from deployments.engines.protocol import EngineError

ROUND: Final = 1.1
MAX_WEIGHT: Final = 10.0
_TOKENS: Final = re.compile(r"\\[()\[\]\\]|[(\[\])]|:\s*([+-]?\d{0,6}\.?\d{1,6})\s*\)|[^\\()\[\]:]+|[\\:]")
_BREAK: Final = re.compile(r"\s*\bBREAK\b\s*")


class WeightedText(NamedTuple):
    """A piece of a prompt and the factor of its tokens' vectors."""

    text: str
    weight: float


def parse_weights(prompt: str) -> list[list[WeightedText]]:
    """Return the pieces of a prompt, by the chunks that BREAK parts it into. A bracket that is not closed ends with it.

    Raises EngineError for a weight beyond MAX_WEIGHT.
    """
    chunks: list[list[WeightedText]] = [[]]
    for piece in _merged(_pieces(prompt)):
        first, *others = _BREAK.split(piece.text)
        chunks[-1].append(piece._replace(text=first))
        chunks += [[piece._replace(text=text)] for text in others]
    return [[piece for piece in chunk if piece.text] for chunk in chunks]


def without_weights(prompt: str) -> str:
    """Return the prompt's words alone, for encoders that take no weights. Raises EngineError."""
    return " ".join("".join(piece.text for piece in chunk) for chunk in parse_weights(prompt)).strip()


def has_weights(prompt: str) -> bool:
    """Return whether any words of a prompt have a weight, or a chunk of their own. Raises EngineError."""
    chunks = parse_weights(prompt)
    return len(chunks) > 1 or any(piece.weight != 1.0 for chunk in chunks for piece in chunk)


class _WeightedSpan(NamedTuple):
    """The pieces in a bracket, to `last`, and their factor."""

    last: int
    factor: float


def _pieces(prompt: str) -> list[WeightedText]:
    texts: list[str] = []
    open_: list[tuple[str, int]] = []  # brackets, and the first piece in each
    spans: dict[int, list[_WeightedSpan]] = {}  # by their first piece, inner ones first

    def close(bracket: str, factor: float) -> bool:
        if not open_ or open_[-1][0] != bracket:
            return False
        first = open_.pop()[1]
        if first < len(texts):
            spans.setdefault(first, []).append(_WeightedSpan(len(texts) - 1, factor))
        return True

    for match in _TOKENS.finditer(prompt):
        mark = match[0]
        is_number = match[1] is not None
        if mark in ("(", "["):
            open_.append((mark, len(texts)))
        elif (is_number and close("(", float(match[1]))) or (mark == ")" and close("(", ROUND)):
            continue
        elif not (mark == "]" and close("[", 1 / ROUND)):
            texts.append(mark[1] if len(mark) == 2 and mark[0] == "\\" else mark)
    while open_:
        close(open_[-1][0], ROUND if open_[-1][0] == "(" else 1 / ROUND)
    return _weighted(texts, spans)


def _weighted(texts: Sequence[str], spans: Mapping[int, Sequence[_WeightedSpan]]) -> list[WeightedText]:
    """Return the texts with the product of the factors of the spans that each is in. Spans do not cross."""
    pieces: list[WeightedText] = []
    within: list[_WeightedSpan] = []  # with the product of all factors so far
    for number, text in enumerate(texts):
        for span in reversed(spans.get(number, ())):
            within.append(_WeightedSpan(span.last, span.factor * (within[-1].factor if within else 1.0)))
        weight = within[-1].factor if within else 1.0
        if not abs(weight) <= MAX_WEIGHT:
            raise EngineError(
                f"prompt: {text[:40]!r} has weight {weight:g}, expected {-MAX_WEIGHT:g} to {MAX_WEIGHT:g}"
            )
        pieces.append(WeightedText(text, weight))
        while within and within[-1].last == number:
            within.pop()
    return pieces


def _merged(pieces: Sequence[WeightedText]) -> list[WeightedText]:
    """Join neighbours of one weight: words across them are tokenized as the plain prompt's."""
    merged: list[WeightedText] = []
    for piece in pieces:
        if merged and merged[-1].weight == piece.weight:
            merged[-1] = WeightedText(merged[-1].text + piece.text, piece.weight)
        else:
            merged.append(piece)
    return merged
