"""The figures that a keeper tells of its extents, read from its book: by extent, and in all. Pure.

The caller holds the lock of the book.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.keeper.records import Held, ResidentExtent, Totals
from weights.manifest import ExtentRef
from weights.residency.admission import Admission
from weights.residency.entries import MAX_NAMED, Book


def residents_of(book: Book[Held], ids: Iterable[str] | None = None) -> list[ResidentExtent]:
    """Return those of `ids` that are here, each once; without them, all."""
    entries = book.entries
    chosen = entries.values() if ids is None else [entries[id_] for id_ in dict.fromkeys(ids) if id_ in entries]
    return [
        ResidentExtent(
            found.key,
            found.nbytes,
            dict(found.firm + found.callable),
            found.key in book.pinned,
            found.thing.source,
            found.num_uses,
        )
        for found in chosen
        if found.is_here and found.thing
    ]


def totals_of(book: Book[Held], *, num_coming: int) -> Totals:
    """Return how many extents are here, and bytes: of these, of leased ones, of pinned ones.

    `num_coming` of the book's entries are being loaded.
    """
    return Totals(len(book.entries) - num_coming, book.here_bytes, book.leased_bytes, book.pinned_bytes)


def callable_bytes_of(book: Book[Held]) -> int:
    """Return the bytes of extents that every holder may give back when asked."""
    return sum(entry.nbytes for entry in book.entries.values() if entry.callable and not entry.firm)


def wanted_bytes_of(book: Book[Held], queue: Admission[Held]) -> int:
    """Return the bytes that the first in the queue lacks; without one, the bytes over the budget."""
    if queue.first is not None:
        return book.plan_room(queue.first.wanted).lacking_bytes
    return max(0, book.used_bytes - book.budget_bytes)


def named(extents: Sequence[ExtentRef]) -> str:
    """Return what a refusal calls these extents."""
    packs = sorted({extent.pack for extent in extents})
    more = f" and {len(packs) - MAX_NAMED} more" if len(packs) > MAX_NAMED else ""
    return f"{len(extents)} extents of {', '.join(packs[:MAX_NAMED])}{more}"
