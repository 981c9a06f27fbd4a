"""The certificates that clients trust are read once in a process: to read them takes each client 18 ms.

A pytest plugin. A test that waits for a server's answer makes a client for each look at it. Only the contexts of
httpx's defaults are shared; a test of certificates has a file of its own.
"""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Iterator
from typing import Any

import certifi
import pytest


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> Iterator[None]:
    """Give all clients that trust the usual authorities one context."""
    usual, make = {os.environ.get("SSL_CERT_FILE"), certifi.where()} - {None}, ssl.create_default_context
    shared = functools.cache(lambda file: make(cafile=file))

    def context(*purpose: Any, cafile: Any = None, **more: Any) -> ssl.SSLContext:
        if purpose or more or cafile not in usual:
            return make(*purpose, cafile=cafile, **more)
        return shared(cafile)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", context)
        yield
