"""Options that many commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str | None, typer.Option(help="Where the cluster listens; default: the one that is up.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")]


def cluster_client(url: str | None) -> Any:
    """A client of the cluster at `url`, or of the first one that is up on this machine."""
    from cluster.session import record_folder, running_sessions
    from deployments.client import Client

    if url is None:
        sessions = running_sessions(record_folder())
        url = sessions[0].url if sessions else DEFAULT_URL
    return Client(url)
