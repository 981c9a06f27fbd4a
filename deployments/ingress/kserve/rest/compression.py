"""Compressed bodies (RFC 9110, "Content Codings"): gzip, and deflate, which means zlib's format."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Final

from starlette.requests import Request

from deployments.errors import InvalidRequest, RequestTooLarge

_MIN_COMPRESSED_BYTES: Final = 1024  # below, the answer would hardly get smaller
_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_LEVEL: Final = 1  # tensors gain little from more


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body as it was before it was compressed.

    Raises: RequestTooLarge above `max_bytes`, InvalidRequest for damage and for codings that are not known.
    """
    body = await request.body()
    encoding = request.headers.get("content-encoding", "")
    if not encoding:
        return body
    return await asyncio.to_thread(_decompressed, body, encoding, max_bytes)


async def compressed_if_accepted(request: Request, body: bytes, headers: dict[str, str]) -> bytes:
    """Return the body of a response, compressed if it is worth it and the client accepts it; `headers` then say so."""
    headers["Vary"] = "Accept-Encoding"
    coding = _accepted_coding(request.headers.get("accept-encoding", ""))
    if coding is None or len(body) < _MIN_COMPRESSED_BYTES:
        return body
    headers["Content-Encoding"] = coding
    return await asyncio.to_thread(_compressed, body, coding)


def _decompressed(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the decompressed body. Never makes more than `max_bytes`, however much the body would become.

    Raises: RequestTooLarge for more, InvalidRequest for damage and for codings that are not known.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in _WINDOW_BITS:
        raise InvalidRequest(f"Content-Encoding {encoding!r} is not known (known: gzip, deflate, identity)")
    decompressor = zlib.decompressobj(_WINDOW_BITS[name])
    try:
        plain = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {name}, as its Content-Encoding says: {error}") from None
    if len(plain) > max_bytes:
        raise RequestTooLarge(f"the body has more than {max_bytes} bytes when it is decompressed")
    if not decompressor.eof:
        raise InvalidRequest(f"the body is {name} that ends too early")
    if decompressor.unused_data:
        raise InvalidRequest(f"{len(decompressor.unused_data)} bytes follow the {name} data of the body")
    return plain


def _accepted_coding(accept_encoding: str) -> str | None:
    """Return the first known coding that the header accepts; None for the body as it is."""
    for part in accept_encoding.lower().split(","):
        name, _, weight = part.partition(";")
        refused = weight.replace(" ", "").rstrip("0") in ("q=", "q=0.")
        if name.strip() in ("gzip", "deflate") and not refused:
            return name.strip()
    return None


def _compressed(body: bytes, coding: str) -> bytes:
    return gzip.compress(body, _LEVEL) if coding == "gzip" else zlib.compress(body, _LEVEL)
