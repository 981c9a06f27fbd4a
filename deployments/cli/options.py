"""Options that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_CONFIG = Path("configs/clusters/demo.yaml")

ConfigPath = Annotated[Path, typer.Argument(help="Cluster YAML.")]
Url = Annotated[str | None, typer.Option(help="Where the cluster listens; default: the one that is up.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")]


def cluster_client(url: str | None) -> Any:
    """A client of the cluster at `url`, or of the first one that is up on this machine."""
    from cluster.session import record_folder, running_sessions
    from deployments.cli.client import Client

    if url is None:
        sessions = running_sessions(record_folder())
        url = sessions[0].url if sessions else DEFAULT_URL
    return Client(url)
