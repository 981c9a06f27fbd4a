"""Images at addresses that chats name: fetched from hosts that the config names, never from an inner address.

A name is resolved once, all its addresses are looked at, and the connection goes to one of them: no second answer of
the name can lead elsewhere. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection
from typing import Final
from urllib.parse import SplitResult, urlsplit

import httpx

from cluster.admission.fair_slots import FairSlots, SlotsFull
from deployments.errors import InvalidRequest, QueueFull
from deployments.ingress.access.callers import current_tenant

SCHEMES: Final = ("http://", "https://")
_FETCH_S: Final = 10.0  # for one image
_MAX_FETCHING: Final = 8
_MAX_WAITING: Final = 64
_PORTS: Final = {"http": 80, "https": 443}
# Addresses that carry an inner one of IPv4 in themselves, of which the library knows not all: NAT64.
_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")
Resolve = Callable[[str, int], Awaitable[list[str]]]


async def _resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError where there is none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class ImageFetcher:
    """Fetches images from `hosts` ("host", or "host:port"), a few at a time, tenants in turn. On one event loop."""

    def __init__(self, hosts: Collection[str], max_bytes: int, resolve: Resolve = _resolve_host) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._resolve = resolve
        self._slots = FairSlots(_MAX_FETCHING, lambda: _MAX_WAITING)

    async def fetch(self, url: str, field: str) -> bytes:
        """Return the file at an address. Raises InvalidRequest naming `field`, or QueueFull."""
        parts = self._checked(url, field)
        try:
            await self._slots.acquire(current_tenant.get())
        except SlotsFull as full:
            text = f"server busy: {full.num_waiting} images wait to be fetched, the maximum; try again"
            raise QueueFull(text) from None
        try:
            async with asyncio.timeout(_FETCH_S):
                return await self._read(parts, field)
        except (TimeoutError, httpx.TimeoutException):
            raise InvalidRequest(f"{field}: {parts.hostname} did not send the image in {_FETCH_S:g} s", field) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            why = str(error)[:200] or type(error).__name__
            raise InvalidRequest(f"{field}: no image could be fetched from {parts.hostname}: {why}", field) from None
        finally:
            self._slots.release()

    def _checked(self, url: str, field: str) -> SplitResult:
        """Return the parts of an address. Raises InvalidRequest for a host that the config does not name."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise InvalidRequest(f"{field}: {url[:100]!r} is no address: {error}", field) from None
        if parts.username is not None or not host.isascii() or any(ord(letter) <= 32 for letter in url):
            raise InvalidRequest(f"{field}: an address with a host, and without a user or blanks, is expected", field)
        if not {host, f"{host}:{port or _PORTS[parts.scheme]}"} & self._hosts or (port and host in self._hosts):
            known = ", ".join(sorted(self._hosts)) or "none"
            raise InvalidRequest(
                f"{field}: images are fetched from hosts that the config names (ingress.image_hosts: {known}), and "
                f"{host[:100]!r}{f' at port {port}' if port else ''} is none of them; send the image as a data URL",
                field,
            )
        return parts

    async def _read(self, parts: SplitResult, field: str) -> bytes:
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        addresses = await self._resolve(host, port)
        if not addresses or any(is_inner(address) for address in addresses):
            raise InvalidRequest(f"{field}: {host} is at an inner address, from which nothing is fetched", field)
        address = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
        target = parts.path or "/"
        url = f"{parts.scheme}://{address}:{port}{target}{f'?{parts.query}' if parts.query else ''}"
        named = host if port == _PORTS[parts.scheme] else f"{host}:{port}"
        headers = {"Host": named, "Accept": "image/png, image/jpeg, image/webp", "Accept-Encoding": "identity"}
        context = await asyncio.to_thread(_tls) if parts.scheme == "https" else False
        async with (
            httpx.AsyncClient(verify=context, trust_env=False, timeout=_FETCH_S) as client,
            client.stream("GET", url, headers=headers, extensions={"sni_hostname": host}) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                why = " (redirects are not followed)" if answer.is_redirect else ""
                raise InvalidRequest(f"{field}: {host} answered {answer.status_code}{why}", field)
            data = bytearray()
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > self._max_bytes:
                    most = f"at most {self._max_bytes} are allowed"
                    raise InvalidRequest(f"{field}: the image at {host} has more bytes, {most}", field)
            return bytes(data)


def is_inner(address: str) -> bool:
    """Return whether an IP address is not one of the public network, or carries one that is not."""
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
