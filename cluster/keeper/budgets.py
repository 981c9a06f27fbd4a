"""The budget of a keeper within its node's object store. Ray is not imported: a config is checked by it, too."""

from __future__ import annotations

import logging
from typing import Final

_logger = logging.getLogger("atelier.keeper")

# Ray spills from 80 % of its store on; other objects, and holes between objects, need room as well.
MAX_SHARE: Final = 0.75
DEFAULT_SHARE: Final = 0.7


def max_budget_bytes(capacity_bytes: int) -> int:
    """Return the largest budget of a keeper whose object store has this capacity."""
    return int(capacity_bytes * MAX_SHARE)


def budget_within_store(budget_bytes: int | None, capacity_bytes: int, node_id: str) -> int:
    """Return the wanted budget, cut to the store's limit; None asks for the usual share."""
    if budget_bytes is None:
        return int(capacity_bytes * DEFAULT_SHARE)
    largest_bytes = max_budget_bytes(capacity_bytes)
    if budget_bytes > largest_bytes > 0:
        _logger.warning(
            "node %s keeps at most %d bytes, %.0f %% of its object store; %d were asked for",
            node_id,
            largest_bytes,
            MAX_SHARE * 100,
            budget_bytes,
        )
        return largest_bytes
    return budget_bytes
