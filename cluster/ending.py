"""Ending detached actors, which outlive the application: by name, until the names are free again.

Ray takes most of a second to import: where it is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from cluster.actor_names import NAMESPACE, names_beside_registry, registry_name
from cluster.errors import SessionError
from configs.cluster import ClusterConfig

END_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.1


def named_actors() -> list[str]:
    """Return the names of Atelier's actors, of whatever cluster."""
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]


def named_everywhere() -> list[str]:
    """Return the names of all actors that have some and have not ended: Atelier's, and Serve's with its replicas."""
    import ray

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
    import ray

    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:  # it has ended just now
        return ""
    except Exception as error:
        return str(error).partition("\n")[0] or repr(error)
    return ""
