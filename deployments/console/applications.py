"""The application of a cluster on a Ray that others started: the check before its start, and its end.

It is named after its cluster. Several clusters on one Ray share its Serve, and so the port; each has a path of its own.
"""

from __future__ import annotations

import functools
import logging

from cluster.process.ray_calls import end_actors, named_actors
from cluster.ray_seam.serve_control import running_serve
from cluster.records.actor_names import clusters_of, names_of_cluster
from cluster.records.errors import SessionError
from configs.cluster import ClusterConfig


def check_beside_others(config: ClusterConfig) -> bool:
    """Return whether Serve runs on this Ray and can run the cluster's application, too.

    Raises SessionError for another port than Serve's, and for a path that belongs to another application.
    """
    serve = running_serve()
    if serve is None:
        return False
    if serve.http_port != config.http.port:
        raise SessionError(
            f"Serve of this Ray listens on port {serve.http_port} for all its applications "
            f"({', '.join(sorted(serve.routes)) or 'none now'}), and not on {config.http.port}: set "
            f"`http: {{port: {serve.http_port}}}`"
        )
    for name, route in serve.routes.items():
        if name != config.name and route == config.http.route_prefix:
            raise SessionError(
                f"the path {route} of this Ray's Serve belongs to {name!r}: give {config.name!r} one of its own, with "
                f"`http: {{route_prefix: /{config.name}}}`"
            )
    return True


def clusters_here() -> list[str]:
    """Return the names of the clusters on the Ray that this process has joined."""
    return clusters_of(named_actors())


def end_cluster(name: str) -> None:
    """Remove a cluster's application from a running Ray, then its actors, which replicas would restart.

    Serve ends after its last application. Raises SessionError if a part does not end.
    """
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it says on the terminal what it deletes
    try:
        running = (
            running_serve()
        )  # not `serve.status`, which asks a Serve that this process knew, and others have ended
        if running and name in running.routes:
            serve.delete(name)
        if running and not running.routes.keys() - {name}:
            serve.shutdown()
    finally:
        end_actors(functools.partial(names_of_cluster, name))
