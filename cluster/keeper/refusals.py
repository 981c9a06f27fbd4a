"""What a refusal says: what was wanted, and who has the room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cluster.keeper.residents import Residents
from weights.manifest import ExtentRef

MAX_NAMED: Final = 5


def describe_need(extents: Sequence[ExtentRef]) -> str:
    packs = _named(sorted({extent.pack for extent in extents}))
    return f"{len(extents)} extents of {packs} need {sum(extent.nbytes for extent in extents)} bytes"


def describe_holders(residents: Residents) -> str:
    """Who has leases on how much, the greatest first, and how much is pinned."""
    holders = [f"{holder} ({nbytes} bytes)" for holder, nbytes in residents.bytes_by_holder().items()]
    pinned = f"; pinned: {residents.pinned_bytes} bytes" if residents.pinned_bytes else ""
    return f"leased by: {_named(holders) or 'nobody'}{pinned}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
