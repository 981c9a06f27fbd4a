"""Calls of actors: typed by the methods of the actor's class, and with nothing left behind by their errors.

Detached actors, which outlive the application, are ended by name, until the names are free again.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

import ray

from cluster.records.actor_names import NAMESPACE, names_beside_registry, registry_name
from cluster.records.errors import SessionError
from configs.cluster import ClusterConfig, PlacementConfig


def node_addresses() -> dict[str, str]:
    """Return the addresses of Ray's running nodes, by id. Asks Ray: blocks."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


P = ParamSpec("P")
R = TypeVar("R")

# The strategy by which Ray places an actor that others share. HAZARD: by default one that a replica of several ranks
# starts has one of that replica's places, and ends with it.
OWN_PLACE: Final = "DEFAULT"


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
        scheduling_strategy=OWN_PLACE,
        **placement.ray_options,
    )
    return actor.remote(*arguments, **options)


class NamedActor:
    """A detached actor that is found by its name, and anew after it has ended for good. Lives on one event loop.

    `connect` returns its handle, of a new one where there is none, and may block.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.known_handle: Any = None  # once it was found
        self._connect = connect
        self._connecting = asyncio.Lock()

    async def handle(self) -> Any:
        """Return the handle."""
        async with self._connecting:
            if self.known_handle is None:
                self.known_handle = await asyncio.to_thread(self._connect)
            return self.known_handle

    def note_failure(self, error: Exception) -> None:
        """Take in why a call failed: Ray restarts an actor under its handle, unless it was ended for good."""
        if isinstance(error, ray.exceptions.RayActorError):
            self.known_handle = None


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


END_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.1


def named_actors() -> list[str]:
    """Return the names of Atelier's actors, of whatever cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]


def named_everywhere() -> list[str]:
    """Return the names of all actors that have some and have not ended: Atelier's, and Serve's with its replicas."""
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]


def end_control_plane(config: ClusterConfig) -> None:
    """End the actors of a config in their order, its registry last: nobody else knows of them. Blocks.

    Raises SessionError when some would not end.
    """
    end_actors(partial(names_beside_registry, config))
    end_actors(lambda names: [name for name in names if name == registry_name(config)])


def end_actors(find: Callable[[Sequence[str]], Sequence[str]], timeout_s: float = END_TIMEOUT_S) -> None:
    """End the actors that `find` chooses of all names, in its order, and those that they started meanwhile. Blocks.

    Returns when their names are free. Raises SessionError naming those that did not end in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while names := find(named_actors()):
        problems = {name: problem for name in names if (problem := _end_actor(name))}
        if time.monotonic() >= deadline_s:
            what = "; ".join(f"{name}: {problems.get(name, 'it stays')}" for name in names)
            raise SessionError(f"actors that would not end: {what}")
        time.sleep(_POLL_S)


def _end_actor(name: str) -> str:
    """Kill the actor. Return the problem, "" for none, so that the other actors are still ended."""
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:  # it has ended just now
        return ""
    except Exception as error:
        return str(error).partition("\n")[0] or repr(error)
    return ""
