"""The names of a deployment's running replicas, from the routers of this process to who wants to know them.

Serve makes the routers, one for each handle, and hands them nothing but values of the config: they meet here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

OnReplicas = Callable[[frozenset[str]], None]

# By application and deployment.
_known: dict[tuple[str, str], frozenset[str]] = {}
_watchers: dict[tuple[str, str], list[OnReplicas]] = {}
_lock = threading.Lock()


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
