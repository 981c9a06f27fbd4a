"""Starting a private Ray without the processes that nobody needs there: three of seven, and a second of the start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from ray._private.node import Node

# The autoscaler's loop, of which one node has no use; what copies the workers' logs to the driver, which does not ask
# for them; and the dashboard's server, which `include_dashboard=False` leaves with nothing but usage statistics.
UNNEEDED: Final = ("start_monitor", "start_log_monitor", "start_api_server")


@contextlib.contextmanager
def without_unneeded_processes() -> Iterator[None]:
    """Let a Ray that starts in the block leave them out, for which Ray 2.60 has no option."""
    known = {name: found for name in UNNEEDED if (found := Node.__dict__.get(name)) is not None}
    for name in known:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, found in known.items():
            setattr(Node, name, found)


def _start_nothing(node: Any, *arguments: Any, **options: Any) -> None:
    """Start no process."""
