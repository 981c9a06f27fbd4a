"""The access to a cluster for callers and web pages: keys, their limits, checks of the headers Host and Origin."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from configs.batching import MAX_PRIORITY_LEVELS
from configs.model import StrictModel

Origin = Annotated[str, StringConstraints(pattern=r"^(\*|https?://[A-Za-z0-9._\[\]:-]+)$", to_lower=True)]
HostName = Annotated[str, StringConstraints(pattern=r"^(\*\.)?[A-Za-z0-9_]([A-Za-z0-9._-]*)$", to_lower=True)]
RequestRate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
MaxConcurrent = Annotated[int, Field(ge=1, le=2**31)]
MaxPriority = Annotated[int, Field(ge=1, le=MAX_PRIORITY_LEVELS)]


class AccessConfig(StrictModel):
    """API keys and their limits, and the web pages whose requests are answered."""

    keys_file: Path | None = Field(
        None,
        description="file of hashed API keys, written by `atelier keys add`; every ingress replica reads it at this "
        "path, and again when it changes; without it no key is needed",
    )
    requests_per_s: RequestRate | None = Field(
        None,
        description="default rate limit per key, in requests per second; null: no limit. Admin keys have none. "
        "Several ingress replicas divide it evenly, so unevenly spread requests get less",
    )
    max_concurrent: MaxConcurrent | None = Field(
        None,
        description="default limit of concurrent requests per key; null: no limit. Admin keys have none. Several "
        "ingress replicas divide it, rounded up",
    )
    max_priority: MaxPriority | None = Field(
        None,
        description="default for the most urgent priority that a key may use (1 is the most urgent); more urgent "
        "requests get this one; null: admission.default_priority. Admin keys may use all, and so may everybody without "
        "a keys file",
    )
    insecure: bool = Field(False, description="listen beyond this machine without keys; also `atelier up --insecure`")
    cors_origins: tuple[Origin, ...] = Field(
        (), description="origins of web pages that may call this server, such as https://app.example.com; *: all"
    )
    allowed_hosts: tuple[HostName, ...] = Field(
        (),
        description="accepted names in the header Host, such as atelier.example.com or *.example.com; addresses and "
        "localhost always pass. Empty: no other name on a loopback address without keys, every name elsewhere",
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on `host`. Names are not looked up."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
