"""Calls of actors: typed by the methods of the actor's class, and with nothing left behind by their errors."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import ray

from cluster.actor_names import NAMESPACE
from configs.cluster import PlacementConfig

P = ParamSpec("P")
R = TypeVar("R")


def call_actor(
    actor: Any, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
) -> Awaitable[R]:
    """Call an async method of an actor by its class's function, as in `call_actor(handle, Class.method, argument)`.

    Returns the reference, to be awaited or not. The handle knows names only; the function has the types, and a search
    for it finds its callers.
    """
    return cast("Awaitable[R]", getattr(actor, method.__name__).remote(*args, **kwargs))


def connect_actor(
    class_: type, name: str, max_calls: int, placement: PlacementConfig, *arguments: Any, **options: Any
) -> Any:
    """Return the handle of the detached actor of that name; the first caller starts it, with these arguments. Blocks.

    Ray starts it again with the same arguments whenever it dies, on a node as `placement` says. It takes `max_calls`
    calls at once, and no CPU.
    """
    actor = ray.remote(class_).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=max_calls,
        num_cpus=0,
        **placement.ray_options,
    )
    return actor.remote(*arguments, **options)


def get(refs: Any, timeout_s: float | None = None) -> Any:
    """Return `ray.get(refs)`. Raises an actor's own exception instead of Ray's wrapper around it.

    HAZARD: `ray.get` raises out of a frame that has the error among the values: a circle. It keeps the other values,
    and by way of the frames that called it whatever those get later, until Python looks for circles. In a process at
    rest that may be for ever, and the values are the node's shared memory.
    """
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        traceback.clear_frames(error.__traceback__)
        if not isinstance(error, ray.exceptions.RayTaskError) or not isinstance(error.cause, Exception):
            raise
        cause = error.with_traceback(None).cause
    try:
        raise cause
    finally:
        del cause
