"""Triton's system shared memory extension: regions of clients on this machine, whose bytes do not travel.

A region is a part of a file in /dev/shm that belongs to the client's user. Source: Triton, "Shared Memory
Extension". HAZARD: the files are never mapped, but read and written: their owners may truncate them at any time, and
a process that touches a mapped page behind the end of its file dies of SIGBUS.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import stat
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from configs.cluster import SharedMemoryConfig
from deployments.ingress.kserve.tensors import (
    InferRequest,
    InferResponse,
    RegionPart,
    SharedTensor,
    from_bytes,
    to_bytes,
)
from deployments.records.errors import InvalidRequest, NotAllowed, Overloaded

_FOLDER: Final = Path("/dev/shm")  # noqa: S108  # where POSIX keeps shared memory
_KEY: Final = re.compile(r"/?([A-Za-z0-9_][A-Za-z0-9._-]{0,250})")
_MAX_NAME_CHARS: Final = 256
_OFF: Final = "shared memory is switched off here (`ingress: {shared_memory: {}}`); send the data"

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED: Final = "01"  # other states may show another user: TIME_WAIT shows root
_MAX_HEADER_CHARS: Final = 80
Peer = tuple[str, int]  # address and port


class Owner(NamedTuple):
    """The owner of regions: the client's user, and the tenant of its key."""

    uid: int
    tenant: str


class RegionStatus(NamedTuple):
    """The listing of a region: `byte_size` bytes from `offset` on of the file `key`."""

    name: str
    key: str
    offset: int
    byte_size: int


class _Region:
    """A registered region. Its methods block."""

    def __init__(self, status: RegionStatus, file: int) -> None:
        self.status = status
        self._file: int | None = file
        self._lock = threading.Lock()

    def read(self, part: RegionPart) -> bytes:
        """Return the bytes of a part. Raises InvalidRequest, also when the file has become too short."""
        data = bytearray()
        with self._opened(part) as (file, start):
            while piece := os.pread(file, part.nbytes - len(data), start + len(data)):
                data += piece
        if len(data) < part.nbytes:
            raise self._wrong(f"its file {self.status.key!r} is shorter than when it was registered")
        return bytes(data)

    def write(self, part: RegionPart, data: bytes) -> None:
        """Write data at the beginning of a part. Raises InvalidRequest when there is no room for it."""
        if len(data) > part.nbytes:
            raise self._wrong(f"{len(data)} bytes do not fit into {part.nbytes}")
        num_written = 0
        with self._opened(part) as (file, start):
            while num_written < len(data):
                num_written += os.pwrite(file, memoryview(data)[num_written:], start + num_written)

    def close(self) -> None:
        """Close the file once no call uses it."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    @contextlib.contextmanager
    def _opened(self, part: RegionPart) -> Iterator[tuple[int, int]]:
        """Yield the file, which stays open meanwhile, and the beginning of the part. Raises InvalidRequest."""
        with self._lock:
            if self._file is None:
                raise self._wrong("it was unregistered")
            try:
                yield self._file, self.status.offset + part.offset
            except OSError as error:
                raise self._wrong(error.strerror or str(error)) from None

    def _wrong(self, text: str) -> InvalidRequest:
        return InvalidRequest(f"region {self.status.name!r}: {text}", self.status.name)


class SharedMemory:
    """The regions of all clients of one ingress replica, each seen by its owner only. Lives on one event loop.

    Without `config` it is switched off. All methods raise the ServiceErrors of `deployments.records.errors`.
    """

    def __init__(self, config: SharedMemoryConfig | None, folder: Path = _FOLDER) -> None:
        self._config = config
        self._folder = folder
        self._regions: dict[Owner, dict[str, _Region]] = {}
        self._num_bytes_read = 0  # of the requests in progress

    @property
    def is_on(self) -> bool:
        """Return whether the config enables shared memory."""
        return self._config is not None

    def list_regions(self, owner: Owner, name: str = "") -> list[RegionStatus]:
        """Return the regions of an owner, or one of them."""
        if name:
            return [self._find(owner, name).status]
        return [region.status for region in self._regions.get(owner, {}).values()]

    async def register(self, owner: Owner, status: RegionStatus) -> None:
        """Register a region of a file of the owner."""
        config, own = self._switched_on(), self._regions.setdefault(owner, {})
        if not 0 < len(status.name) <= _MAX_NAME_CHARS:
            raise InvalidRequest(f"name: from 1 to {_MAX_NAME_CHARS} characters are allowed", "name")
        if status.name in own:
            raise InvalidRequest(f"region {status.name!r} is registered already; unregister it first", "name")
        if len(own) >= config.max_regions:
            raise InvalidRequest(f"{len(own)} regions are registered, as many as may", "name")
        if status.offset < 0 or not 0 < status.byte_size <= config.max_region_bytes:
            text = f"byte_size: {status.byte_size} from {status.offset} on; from 1 to {config.max_region_bytes} may be"
            raise InvalidRequest(text, "byte_size")
        own[status.name] = _Region(status, _open_file(self._folder, owner.uid, status))

    async def unregister(self, owner: Owner, name: str = "") -> None:
        """Forget a region of an owner, or all of them. An unknown one is no error, as with Triton."""
        own = self._regions.get(owner, {})
        gone = [own.pop(known) for known in ([name] if name else list(own)) if known in own]
        if not own:
            self._regions.pop(owner, None)
        for region in gone:
            await asyncio.to_thread(region.close)

    @contextlib.asynccontextmanager
    async def read_inputs(self, request: InferRequest) -> AsyncIterator[InferRequest]:
        """Yield the request with the inputs that are in regions. Their bytes count for as long as the context lasts."""
        if not request.has_shared:
            yield request
            return
        config, owner = self._switched_on(), _owner_of(request)
        parts = [(one, self._part(owner, one.part)) for one in request.shared_inputs]
        for wish in request.outputs:
            if wish.part is not None:
                self._part(owner, wish.part)  # before any work is done
        num_bytes = sum(one.part.nbytes for one in request.shared_inputs)
        if self._num_bytes_read + num_bytes > config.max_read_bytes:
            raise Overloaded(f"the requests in progress have read {self._num_bytes_read} bytes of shared memory")
        self._num_bytes_read += num_bytes
        try:
            read = [
                from_bytes(one.name, one.datatype, one.shape, await asyncio.to_thread(region.read, one.part))
                for one, region in parts
            ]
            yield replace(request, inputs=(*request.inputs, *read), shared_inputs=())
        finally:
            self._num_bytes_read -= num_bytes

    async def write_outputs(self, request: InferRequest, response: InferResponse) -> InferResponse:
        """Write outputs into the wanted regions, and return the response with the others."""
        parts = {wish.name: wish.part for wish in request.outputs if wish.part is not None}
        if not parts:
            return response
        shared = []
        for value in response.outputs:
            if (part := parts.get(value.name)) is not None:
                data = to_bytes(value)
                await asyncio.to_thread(self._part(_owner_of(request), part).write, part, data)
                written = RegionPart(part.region, part.offset, len(data))
                shared.append(SharedTensor(value.name, value.datatype, value.shape, written))
        left = tuple(value for value in response.outputs if value.name not in parts)
        return replace(response, outputs=left, shared_outputs=tuple(shared))

    def _part(self, owner: Owner, part: RegionPart) -> _Region:
        """Return the region of a part that lies in it."""
        region = self._find(owner, part.region)
        if part.offset < 0 or part.nbytes < 0 or part.offset + part.nbytes > region.status.byte_size:
            text = f"has {region.status.byte_size} bytes, not {part.nbytes} from {part.offset} on"
            raise InvalidRequest(f"region {part.region!r} {text}", part.region)
        return region

    def _find(self, owner: Owner, name: str) -> _Region:
        self._switched_on()
        own = self._regions.get(owner, {})
        if name not in own:
            known = ", ".join(list(own)[:20]) or "none"
            raise InvalidRequest(f"no region {name[:_MAX_NAME_CHARS]!r} (registered: {known})", name)
        return own[name]

    def _switched_on(self) -> SharedMemoryConfig:
        if self._config is None:
            raise InvalidRequest(_OFF, "shared_memory_region")
        return self._config


def _owner_of(request: InferRequest) -> Owner:
    assert request.owner is not None  # the transports set it if has_shared
    return Owner(*request.owner)


def _open_file(folder: Path, uid: int, status: RegionStatus) -> int:
    """Return the open file of a region. Raises InvalidRequest; NotAllowed for one that is not the owner's."""
    if (found := _KEY.fullmatch(status.key)) is None:
        text = f"key: {status.key[:80]!r} is no name of shared memory: one word of letters, digits, '.', '_' and '-'"
        raise InvalidRequest(text, "key")
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.open(folder / found[1], flags)
    except OSError as error:
        raise InvalidRequest(f"key: {status.key!r}: {error.strerror or error}", "key") from None
    about = os.fstat(file)
    if stat.S_ISREG(about.st_mode) and about.st_uid == uid and about.st_size >= status.offset + status.byte_size:
        return file
    os.close(file)
    if about.st_uid != uid:
        raise NotAllowed(f"key: {status.key!r} belongs to another user than the client (uid {uid})")
    what = f"{about.st_size} bytes" if stat.S_ISREG(about.st_mode) else "no memory"
    text = f"key: {status.key!r} has {what}, not {status.byte_size} from {status.offset} on"
    raise InvalidRequest(text, "key")


def uid_of_client(peer: Peer | None, header: str | None = None) -> int:
    """Return the user of the client of a connection from `peer`; `header` is HAProxy's address of it.

    Raises NotAllowed for a client on another machine, or an unidentified one.
    """
    uid = _uid_of(peer)
    if header is not None and uid == os.geteuid():
        uid = _uid_of(_parsed(header))
    if uid is None:
        raise NotAllowed("shared memory is for clients on this machine, over a loopback address without a proxy")
    return uid


def _uid_of(peer: Peer | None, tables: tuple[Path, ...] = _TABLES) -> int | None:
    """Return the user whose end of an open connection has this address; None when there is none on this machine."""
    if peer is None:
        return None
    try:
        address = ipaddress.ip_address(peer[0])
    except ValueError:
        return None
    plain = getattr(address, "ipv4_mapped", None) or address
    if not plain.is_loopback:
        return None
    wanted = {f"{_hex(one)}:{peer[1]:04X}" for one in _forms(plain)}
    for table in tables:
        try:
            with table.open() as lines:
                for line in lines:
                    fields = line.split()
                    if fields[1] in wanted and fields[3] == _ESTABLISHED:
                        return int(fields[7])
        except OSError:
            continue
    return None


def _forms(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[bytes]:
    """Return an address as sockets have it: one of version 4 also as a socket of version 6 does."""
    mapped = [] if address.version == 6 else [b"\0" * 10 + b"\xff\xff" + address.packed]
    return [address.packed, *mapped]


def _hex(packed: bytes) -> str:
    """Return an address as the kernel writes it: words of four bytes in the order of this machine."""
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words)


def _parsed(header: str) -> Peer | None:
    """Return the address of HAProxy's header, `address:port`."""
    host, _, port = header[:_MAX_HEADER_CHARS].rpartition(":")
    return (host.strip("[]"), int(port)) if port.isascii() and port.isdigit() and len(port) <= 5 else None


def parse_grpc_peer(peer: str) -> Peer | None:
    """Return the address of a gRPC peer: `ipv4:127.0.0.1:4321`, `ipv6:%5B::1%5D:4321`."""
    kind, _, rest = peer.partition(":")
    return _parsed(rest.replace("%5B", "").replace("%5D", "")) if kind in ("ipv4", "ipv6") else None
