"""The metrics of all nodes on one page. A node whose exporter is away costs the page that node's part, and is named."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

import httpx

from cluster.telemetry import Exporter, with_measured_sums
from deployments.ingress.responses import call_aside

_PAGE_S: Final = 5.0  # for all nodes together: Prometheus gives up after 10 s
_MAX_PAGE_BYTES: Final = 2**25  # of one node; a node with 16 replicas and 300 models has 4 MB
_MAX_CONNECTIONS: Final = 16
_UP: Final = "atelier_node_metrics_up"
_HEAD: Final = f"# HELP {_UP} Whether the node's exporter answered for this page.\n# TYPE {_UP} gauge\n"


class NodeMetrics:
    """Fetches the pages of the nodes that `find_exporters` returns, by their ids.

    While Ray does not say which nodes there are, those of the last time are asked.
    """

    def __init__(
        self,
        find_exporters: Callable[[], Mapping[str, Exporter]],
        page_s: float = _PAGE_S,
        max_page_bytes: int = _MAX_PAGE_BYTES,
    ) -> None:
        self._find_exporters = find_exporters
        self._page_s = page_s
        self._max_page_bytes = max_page_bytes
        self._known: Mapping[str, Exporter] = {}

    async def page(self, transport: httpx.AsyncBaseTransport | None = None) -> str:
        """Return the nodes' pages behind a gauge that is 0 for each whose page is missing."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._page_s
        with contextlib.suppress(Exception):  # Ray's head is away, which has many errors
            async with asyncio.timeout_at(end_s - self._page_s / 2):
                self._known = await asyncio.to_thread(self._find_exporters)
        limits = httpx.Limits(max_connections=_MAX_CONNECTIONS)
        async with httpx.AsyncClient(timeout=self._page_s, limits=limits, transport=transport) as client:
            fetching = (self._fetched(client, one.url, end_s) for one in self._known.values())
            pages = await asyncio.gather(*fetching)
        ups = (
            f'{_UP}{{node="{node}",address="{exporter.address}"}} {int(page is not None)}\n'
            for (node, exporter), page in zip(self._known.items(), pages, strict=True)
        )
        return "".join((_HEAD, *ups, *(page for page in pages if page is not None)))

    async def _fetched(self, client: httpx.AsyncClient, url: str, end_s: float) -> str | None:
        """Return a node's page; None where it does not come, is late or too large."""
        found = bytearray()
        try:
            async with asyncio.timeout_at(end_s), client.stream("GET", url) as answer:
                answer.raise_for_status()
                async for piece in answer.aiter_bytes():
                    found += piece
                    if len(found) > self._max_page_bytes:
                        return None
            text = found.decode()
        except (httpx.HTTPError, TimeoutError, UnicodeDecodeError):
            return None
        return await call_aside(len(found), with_measured_sums, text if text.endswith("\n") else f"{text}\n")
