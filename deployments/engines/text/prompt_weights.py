"""Weighted prompts in the Stable Diffusion WebUI's syntax: `(word)`, `(word:1.3)`, `[word]` and `BREAK`.

A bracket multiplies the weight of its contents: round ones by 1.1 or by the number after the colon, square ones by
1 / 1.1. A backslash before a bracket makes it a character. `BREAK` begins a new chunk. Prompts in Compel's syntax,
`word++`, `(a b)--` and `(a b)1.3`, are converted to it. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from deployments.engines.records.protocol import EngineError

ROUND: Final = 1.1
MAX_WEIGHT: Final = 10.0
MAX_DEPTH: Final = 50  # of brackets in each other, in ComfyUI's syntax: all that is inside is read again for each
_TOKENS: Final = re.compile(r"\\[()\[\]\\]|[(\[\])]|:\s*([+-]?\d{0,6}\.?\d{1,6})\s*\)|[^\\()\[\]:]+|[\\:]")
_MARKS: Final = {"+": 1.1, "-": 0.9}
# An escaped character, the end of a bracket with its weight, or a run of characters with marks after it.
_COMPEL: Final = re.compile(r"\\(.)|\)(\++|-+|\d{0,6}\.?\d{1,6}(?!\w))?|([^\s()\\\[\],;:!?\"]+)|(.)", re.DOTALL)
_COMPEL_CALL: Final = re.compile(r"\.(blend|and|swap)\s*\(")
_BREAK: Final = re.compile(r"\s*\bBREAK\b\s*")


class WeightedText(NamedTuple):
    """A piece of a prompt and the factor of its tokens' vectors."""

    text: str
    weight: float


def parse_weights(prompt: str) -> list[list[WeightedText]]:
    """Return the pieces of a prompt, by its chunks between BREAKs. An unclosed bracket ends with its chunk.

    Raises EngineError for a weight beyond MAX_WEIGHT.
    """
    chunks: list[list[WeightedText]] = [[]]
    for piece in _merged(_pieces(prompt)):
        first, *others = _BREAK.split(piece.text)
        chunks[-1].append(piece._replace(text=first))
        chunks += [[piece._replace(text=text)] for text in others]
    return [[piece for piece in chunk if piece.text] for chunk in chunks]


def parse_comfyui(prompt: str) -> list[WeightedText]:
    """Return the pieces of a prompt in ComfyUI's syntax: round brackets alone weigh, and a number in them is the weight
    itself, whatever is around them. Neighbours are not joined, since each piece is tokenized by itself.

    Source: ComfyUI, `comfy/sd1_clip.py`. Raises EngineError for a weight beyond MAX_WEIGHT or a depth beyond MAX_DEPTH.
    """
    escaped = prompt.replace("\\)", "\0").replace("\\(", "\1")
    return [
        piece._replace(text=piece.text.replace("\0", ")").replace("\1", "("))
        for piece in _comfyui_pieces(escaped, 1.0, 0)
    ]


def _comfyui_pieces(text: str, weight: float, depth: int) -> Iterator[WeightedText]:
    if depth > MAX_DEPTH:
        raise EngineError(f"prompt: more than {MAX_DEPTH} brackets stand in each other")
    for item in _bracketed(text):
        if len(item) > 1 and item.startswith("(") and item.endswith(")"):
            words, _, number = item[1:-1].rpartition(":")
            own = _number(number) if words else None
            inside = (item[1:-1], weight * ROUND) if own is None else (words, own)
            yield from _comfyui_pieces(*inside, depth + 1)
        elif not abs(weight) <= MAX_WEIGHT:
            raise EngineError(
                f"prompt: {item[:40]!r} has weight {weight:g}, expected {-MAX_WEIGHT:g} to {MAX_WEIGHT:g}"
            )
        else:
            yield WeightedText(item, weight)


def _bracketed(text: str) -> list[str]:
    """Return a text cut at its outer brackets. From a bracket on that is not closed it is one piece."""
    items: list[str] = []
    start = depth = 0
    for place, character in enumerate(text):
        if character == "(":
            if depth == 0 and place > start:
                items.append(text[start:place])
                start = place
            depth += 1
        elif character == ")":
            depth -= 1
            if depth == 0:
                items.append(text[start : place + 1])
                start = place + 1
    return items if start == len(text) else [*items, text[start:]]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def without_weights(prompt: str) -> str:
    """Return the prompt's words alone, for encoders that take no weights. Raises EngineError."""
    return " ".join("".join(piece.text for piece in chunk) for chunk in parse_weights(prompt)).strip()


def has_weights(prompt: str) -> bool:
    """Return whether any words of a prompt have a weight, or a chunk of their own. Raises EngineError."""
    chunks = parse_weights(prompt)
    return len(chunks) > 1 or any(piece.weight != 1.0 for chunk in chunks for piece in chunk)


def plain_texts(syntax: str, *texts: str | None) -> tuple[list[str | None], bool]:
    """Return texts of a `prompt_syntax` without weights, for encoders that take none, and whether any had one.

    Raises EngineError as `parse_weights` and `from_compel` do.
    """
    if syntax == "plain":
        return list(texts), False
    if syntax == "comfyui":
        pieces = [None if text is None else parse_comfyui(text) for text in texts]
        is_lost = any(piece.weight != 1 for some in pieces for piece in some or ())
        return [None if some is None else "".join(piece.text for piece in some) for some in pieces], is_lost
    read = [text if text is None or syntax == "weighted" else from_compel(text) for text in texts]
    is_lost = any(text is not None and has_weights(text) for text in read)
    return [None if text is None else without_weights(text) for text in read], is_lost


def weights_lost(class_name: str) -> str:
    """Return the warning for prompt weights that a pipeline cannot apply."""
    return f"weights in the prompt had no effect: {class_name} reads it with encoders that take none"


def from_compel(prompt: str) -> str:
    """Convert a prompt in Compel's syntax to that of `parse_weights`: each mark multiplies by 1.1 or 0.9.

    A bracket alone weighs nothing, and one without its other half is a character. Raises EngineError for a call.
    """
    if call := _COMPEL_CALL.search(prompt):
        raise EngineError(
            f"prompt: .{call[1]}() of Compel is not supported; supported are its weights: word+, (words)--, (words)1.2"
        )
    found: list[str] = []
    open_: list[int] = []
    for match in _COMPEL.finditer(prompt):
        escaped, weight, run, other = match.groups()
        if run is not None:
            bare = run.rstrip(".")
            stem = bare.rstrip("+-")
            marks, rest = bare[len(stem) :], run[len(bare) :]
            is_weighed = stem and len(set(marks)) == 1
            found.append(f"({stem}:{_factor(marks)}){rest}" if is_weighed else run)
        elif other == "(":
            open_.append(len(found))
            found.append("(")
        elif match[0].startswith(")"):
            found.append(f":{_factor(weight or '')})" if open_ else f"\\){weight or ''}")
            open_[-1:] = []
        else:
            character = escaped or other
            found.append(f"\\{character}" if character in "()[]\\" else character)
    for place in open_:
        found[place] = "\\("
    return "".join(found)


def _factor(weight: str) -> str:
    """Return the factor of marks, or of a number, for `parse_weights`."""
    factor = _MARKS[weight[0]] ** min(len(weight), 999) if weight[:1] in _MARKS else float(weight or 1)
    return f"{min(factor, 999_999):.6f}"


class _WeightedSpan(NamedTuple):
    """The pieces in a bracket, up to `last`, and their factor."""

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
    """Return the texts with the product of the factors of their spans. Spans do not cross."""
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
