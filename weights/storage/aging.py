"""Since when the bytes of a path have been unneeded: a range keeps its clock as long as it stays unneeded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from weights.storage.index import Unneeded

Range = tuple[int, int]


def aged(unneeded: Mapping[str, Iterable[Range]], before: Iterable[Unneeded], now_s: float) -> list[Unneeded]:
    """The ranges (begin, end) of each path with their clocks: what `before` has goes on, the rest begins at `now_s`.

    A clock that is ahead of `now_s` was set by a wrong one and begins anew. Ranges of a path do not overlap.
    """
    clocks: dict[str, list[Unneeded]] = defaultdict(list)
    for known in before:
        clocks[known.path].append(known)
    return [
        piece
        for path, ranges in unneeded.items()
        for begin, end in ranges
        for piece in _pieces(path, begin, end, sorted(clocks[path], key=lambda known: known.begin), now_s)
    ]


def _pieces(path: str, begin: int, end: int, clocks: Iterable[Unneeded], now_s: float) -> Iterator[Unneeded]:
    for known in clocks:
        first, last = max(begin, known.begin), min(end, known.end)
        if first >= last:
            continue
        if begin < first:
            yield Unneeded(path, begin, first, now_s)
        yield Unneeded(path, first, last, min(known.since_s, now_s))
        begin = last
    if begin < end:
        yield Unneeded(path, begin, end, now_s)
