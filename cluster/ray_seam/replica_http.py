"""The HTTP server that Serve starts in an ingress replica for HAProxy: what stands before Serve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from ray.serve._private import replica
from starlette.types import ASGIApp

from cluster.ray_seam import shims
from cluster.ray_seam.old_clients import PlainConnection
from cluster.ray_seam.request_ids import RequestIds
from cluster.records.errors import RayIncompatible


def put_before_serve(wrap: Callable[[ASGIApp], ASGIApp], prepare: Callable[[uvicorn.Server], None]) -> None:
    """Let `wrap` of Serve's application answer, in a server that `prepare` is given before it starts.

    Raises RayIncompatible, also where a server starts before that.
    """
    shims.require(shims.REPLICA_HTTP)
    start_server: Callable[..., Awaitable[Any]] = replica.start_asgi_http_server

    async def start(app: ASGIApp, *arguments: Any, **options: Any) -> Any:
        running, server = await start_server(wrap(app), *arguments, **options)
        if server.started or server.config.loaded:  # then what is changed in it has no effect
            raise RayIncompatible("Serve's HTTP server runs before it could be prepared")
        app = server.config.app() if server.config.factory else server.config.app
        server.config.app, server.config.factory = RequestIds(app), False  # around Serve, which would repeat any id
        server.config.http = PlainConnection
        prepare(server)
        return running, server

    replica.start_asgi_http_server = start
