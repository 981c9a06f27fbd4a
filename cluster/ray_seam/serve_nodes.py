"""Serve's list of nodes: its controller asks Ray for it, in three calls, at each of ten steps a second.

In an idle cluster that is three quarters of what Ray's own server does, and a third of what the controller does. A
second is early enough to hear of a node: its own start takes longer. Used by Serve's controller alone
(`haproxy.install`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from cluster.ray_seam import shims

PERIOD_S: Final = 1.0

_logger = logging.getLogger("ray.serve")


def look_up_nodes_seldom(clock: Callable[[], float] = time.monotonic) -> None:
    """Let the controller, in whose process this is called, ask Ray for the nodes once in `PERIOD_S`.

    A Ray that has another name for it goes on as by itself.
    """
    if found := shims.problems(shims.NODE_LOOKS):
        _logger.warning(f"Serve asks Ray for all nodes at each of its steps: {found[0]}")
        return
    from ray.serve._private.cluster_node_info_cache import ClusterNodeInfoCache

    ClusterNodeInfoCache.update = seldom(ClusterNodeInfoCache.update, clock)


def seldom(update: Callable[[Any], None], clock: Callable[[], float]) -> Callable[[Any], None]:
    """Return what calls `update` unless it succeeded less than `PERIOD_S` ago; of one cache in a process."""
    due_s = -float("inf")

    def update_when_due(cache: Any) -> None:
        nonlocal due_s
        now_s = clock()
        if now_s >= due_s:
            update(cache)
            due_s = now_s + PERIOD_S

    return update_when_due
