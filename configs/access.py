"""The access to a cluster for callers and web pages: keys, their limits, checks of the headers Host and Origin."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from configs.model import StrictModel

Origin = Annotated[str, StringConstraints(pattern=r"^(\*|https?://[A-Za-z0-9._\[\]:-]+)$", to_lower=True)]
HostName = Annotated[str, StringConstraints(pattern=r"^(\*\.)?[A-Za-z0-9_]([A-Za-z0-9._-]*)$", to_lower=True)]
RequestRate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
MaxConcurrent = Annotated[int, Field(ge=1, le=2**31)]


class AccessConfig(StrictModel):
    """API keys and their limits, and the web pages whose requests are answered."""

    keys_file: Path | None = Field(
        None,
        description="hashed API keys, written by `atelier keys add`; read at this path by every ingress replica, and "
        "again when it changes; without it nobody needs a key",
    )
    requests_per_s: RequestRate | None = Field(
        None,
        description="requests per second of a key whose line does not say; null: no limit; not of admin keys. Each of "
        "several ingress replicas allows its part, so that requests that are spread unevenly get less",
    )
    max_concurrent: MaxConcurrent | None = Field(
        None,
        description="requests in progress of a key whose line does not say; null: no limit; not of admin keys. Each of "
        "several ingress replicas allows its part, rounded up",
    )
    insecure: bool = Field(
        False, description="listen beyond this machine although nobody needs a key; also `atelier up --insecure`"
    )
    cors_origins: tuple[Origin, ...] = Field(
        (), description="web pages that browsers let ask this server, such as https://app.example.com; *: all pages"
    )
    allowed_hosts: tuple[HostName, ...] = Field(
        (),
        description="names in the header Host, such as atelier.example.com or *.example.com; addresses and localhost "
        "always pass. Without any: no other name on a loopback address without keys, every name elsewhere",
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on `host`. Names are not looked up."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
