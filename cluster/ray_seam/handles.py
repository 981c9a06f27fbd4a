"""Handles of deployments: their calls by gRPC, three times cheaper than calls of actors, and their replicas' names.

Serve makes the routers, one for each handle, and hands them nothing but values of the config: who wants to know which
replicas run meets them here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final

from cluster.ray_seam import shims

BY_GRPC: Final = "RAY_SERVE_USE_GRPC_BY_DEFAULT"  # in the environment of Serve's processes
OnReplicas = Callable[[frozenset[str]], None]

# By application and deployment.
_known: dict[tuple[str, str], frozenset[str]] = {}
_watchers: dict[tuple[str, str], list[OnReplicas]] = {}
_lock = threading.Lock()


def by_value(handle: Any) -> Any:
    """Return the handle with its calls by gRPC, where Serve is set to that; else as it is.

    A handle remembers the setting of the process that made it, where it is off; Serve's gRPC server is there in any
    case (Ray 2.60).
    """
    if shims.problems(shims.HANDLES):
        return handle
    return handle.options(_by_reference=False) if os.environ.get(BY_GRPC) == "1" else handle


def watch_replicas(handle: Any, on_replicas: OnReplicas) -> None:
    """Call `on_replicas` with the names of the deployment's running replicas, now and whenever they change.

    The calls come from Serve's thread.
    """
    key = handle.app_name, handle.deployment_name
    with _lock:
        _watchers.setdefault(key, []).append(on_replicas)
        known = _known.get(key)
    if known is not None:
        on_replicas(known)
    handle.options()  # makes the router, which nothing else does before the first call


def tell(key: tuple[str, str], names: frozenset[str]) -> None:
    """Tell the watchers of a deployment."""
    with _lock:
        _known[key] = names
        watchers = list(_watchers.get(key, ()))
    for on_replicas in watchers:
        on_replicas(names)
