"""Handles of deployments: their calls by gRPC, three times cheaper than calls of actors, and their replicas' names.

Serve makes the routers, one for each handle, and hands them nothing but values of the config: who wants to know which
replicas run meets them here.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc

from cluster.ray_seam import shims

BY_GRPC: Final = "RAY_SERVE_USE_GRPC_BY_DEFAULT"  # in the environment of Serve's processes
CONNECT_S: Final = 2.0  # for a connection to a replica: enough where the first frame of it is lost
_DIRECT: Final = "grpc.enable_http_proxy", 0  # no proxy of the environment, which would get the calls otherwise
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


@functools.cache
def bound_connecting() -> None:
    """Let this process's channels give up after `CONNECT_S` where nobody answers, as where a node is gone.

    gRPC itself waits for 20 s, in which it holds all calls of the channel up. Who makes channels before is not bounded.
    The channels are direct ones, too: gRPC itself goes by way of `http_proxy`, which knows no replicas.
    """
    if not shims.problems(shims.CHANNELS):
        for name in ("insecure_channel", "secure_channel"):
            setattr(grpc.aio, name, functools.partial(_bounded_channel, getattr(grpc.aio, name)))


def _bounded_channel(
    make: Callable[..., Any], *arguments: Any, options: Iterable[Any] | None = None, **given: Any
) -> Any:
    # By its name the least time between two tries: each has so long, too.
    bound = "grpc.min_reconnect_backoff_ms", round(CONNECT_S * 1000)
    return make(*arguments, options=[*(options or ()), bound, _DIRECT], **given)


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
