"""The terms of a request: its priority, its tenant and its time, as headers, metadata or records say them.

They accompany the request in a context variable: what it asks of other models on its way has the same.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

from cluster.admission.fair_slots import release_read_slot
from configs.admission import DEFAULT_TENANT, AdmissionConfig
from deployments.errors import DeadlineExceeded, InvalidRequest
from deployments.ingress.access.callers import current_max_priority

TIMEOUT: Final = "x-request-timeout-seconds"
PRIORITY: Final = "x-priority"
TENANT: Final = "x-tenant"
_MAX_SHOWN: Final = 64


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a request: `priority` 0 is the default one, `tenant` "" none.

    `is_inner`: it is a part of a request that was admitted. `is_trusted`: the tenant is that of an API key, and need
    not be listed in the config. `waited_s`: how long the request waited to be read; its time began before.
    """

    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None
    is_inner: bool = False
    is_trusted: bool = False
    waited_s: float = 0.0

    def within_rights(self, config: AdmissionConfig) -> Terms:
        """Return the terms with the most urgent priority that the caller's key may ask for, if they are more urgent."""
        most = min(current_max_priority.get() or config.default_priority, config.priority_levels)
        return self if (self.priority or config.default_priority) >= most else replace(self, priority=most)

    def checked(self, config: AdmissionConfig) -> Terms:
        """Return the terms with a priority and a tenant that `config` knows. Raises InvalidRequest."""
        if self.priority > config.priority_levels:
            raise InvalidRequest(
                f"priority {self.priority} is not served (known: 1, most urgent, to {config.priority_levels})",
                "priority",
            )
        tenant = self.tenant or DEFAULT_TENANT
        if tenant not in config.tenants and not self.is_trusted and tenant != DEFAULT_TENANT:
            if config.unknown_tenants == "refuse":
                known = ", ".join(sorted({DEFAULT_TENANT, *config.tenants})[:20])
                raise InvalidRequest(f"{TENANT}: no tenant {_shown(tenant)} (known: {known})", TENANT)
            tenant = DEFAULT_TENANT
        return replace(self, priority=self.priority or config.default_priority, tenant=tenant)


current_terms: ContextVar[Terms] = ContextVar("current_terms", default=Terms())  # noqa: B039  # it is frozen


def read_terms(headers: Mapping[str, str], key_tenant: str = "") -> Terms:
    """Return the terms that headers or gRPC metadata say. The tenant of an API key goes before the header's.

    Raises InvalidRequest naming the header.
    """
    priority = headers.get(PRIORITY, "").strip()
    if priority and not (priority.isascii() and priority.isdigit() and 1 <= len(priority) <= 9 and int(priority)):
        raise InvalidRequest(
            f"{PRIORITY}: expected a whole number from 1, most urgent, got {_shown(priority)}", PRIORITY
        )
    timeout_s = None
    if text := headers.get(TIMEOUT, "").strip():
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = math.nan
        if not 0 < timeout_s < math.inf:
            raise InvalidRequest(f"{TIMEOUT}: expected a number of seconds above 0, got {_shown(text)}", TIMEOUT)
    tenant = key_tenant or headers.get(TENANT, "").strip()
    return Terms(int(priority or 0), tenant, timeout_s, is_trusted=bool(key_tenant))


def with_fields(terms: Terms, request: Any) -> Terms:
    """Return the terms with what a record says itself."""
    timeouts = [given for given in (terms.timeout_s, getattr(request, "timeout_s", None)) if given is not None]
    return replace(
        terms,
        priority=getattr(request, "priority", 0) or terms.priority,
        tenant=terms.tenant or getattr(request, "tenant", ""),
        timeout_s=min(timeouts, default=None),
    )


@asynccontextmanager
async def within_request_time(what: str) -> AsyncIterator[None]:
    """Bound a wait that a request's read slot is not needed for: it counts as a part of the request's time.

    The slot is released first: others are read meanwhile. Raises DeadlineExceeded: the time ended before `what`.
    """
    release_read_slot()
    loop, terms = asyncio.get_running_loop(), current_terms.get()
    start = loop.time()
    try:
        async with asyncio.timeout(None if terms.timeout_s is None else terms.timeout_s - terms.waited_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"the request timed out before {what}", "timeout") from None
    current_terms.set(replace(terms, waited_s=terms.waited_s + loop.time() - start))


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")
