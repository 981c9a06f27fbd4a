"""Hosts that this server calls because a client says so: those that the config names, and no others.

A name is resolved once, all its addresses are checked, and the connection goes to one of them, so that no second answer
of the name can lead elsewhere. Inner addresses are not called, and redirects not followed.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import SplitResult, urlsplit

import httpx

from deployments.records.errors import InvalidRequest

_PORTS: Final = {"http": 80, "https": 443}
# Addresses that contain an inner IPv4 address, of which the library does not know all: NAT64.
_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")
Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError if there is none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class OuterHosts:
    """The named hosts ("host", or "host:port"). `setting` of the config names them, for the purpose `use`."""

    def __init__(
        self,
        hosts: Collection[str],
        setting: str,
        use: str,
        resolve: Resolve = resolve_host,
        *,
        may_be_inner: bool = False,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._setting, self._use = setting, use
        self._resolve = resolve
        self._may_be_inner = may_be_inner

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def checked(self, url: str, field: str, remedy: str = "") -> SplitResult:
        """Return the parts of an address. Raises InvalidRequest for a host that the config does not name."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise InvalidRequest(f"{field}: {url[:100]!r} is no address: {error}", field) from None
        if parts.scheme not in _PORTS:
            raise InvalidRequest(f"{field}: {url[:100]!r} is no address that begins with https:// or http://", field)
        if parts.username is not None or not host.isascii() or any(ord(letter) <= 32 for letter in url):
            raise InvalidRequest(f"{field}: an address with a host, and without a user or blanks, is expected", field)
        if not {host, f"{host}:{port or _PORTS[parts.scheme]}"} & self._hosts or (port and host in self._hosts):
            known = ", ".join(sorted(self._hosts)) or "none"
            raise InvalidRequest(
                f"{field}: {self._use} hosts that the config names ({self._setting}: {known}), and "
                f"{host[:100]!r}{f' at port {port}' if port else ''} is none of them{remedy}",
                field,
            )
        return parts

    @asynccontextmanager
    async def opened(
        self,
        method: str,
        parts: SplitResult,
        field: str,
        headers: Mapping[str, str],
        timeout_s: float,
        content: bytes | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Yield the beginning of a host's answer. Raises InvalidRequest for an inner address; HTTPError, OSError."""
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        addresses = await self._resolve(host, port)
        if not addresses or (not self._may_be_inner and any(is_inner(address) for address in addresses)):
            raise InvalidRequest(f"{field}: {host} is at an inner address, which this server does not call", field)
        address = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
        target = parts.path or "/"
        url = f"{parts.scheme}://{address}:{port}{target}{f'?{parts.query}' if parts.query else ''}"
        named = host if port == _PORTS[parts.scheme] else f"{host}:{port}"
        context = await asyncio.to_thread(_tls) if parts.scheme == "https" else False
        sent = {"Host": named, "Accept-Encoding": "identity", **headers}
        async with (
            httpx.AsyncClient(verify=context, trust_env=False, timeout=timeout_s) as client,
            client.stream(method, url, headers=sent, content=content, extensions={"sni_hostname": host}) as answer,
        ):
            yield answer


def is_inner(address: str) -> bool:
    """Return whether an IP address is outside the public network, or contains one that is."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found in _TRANSLATED:
            found = ipaddress.ip_address(int(found) & 0xFFFFFFFF)
        else:
            teredo = found.teredo[1] if found.teredo else None
            found = found.ipv4_mapped or found.sixtofour or teredo or found
    return not found.is_global or found.is_multicast


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)
