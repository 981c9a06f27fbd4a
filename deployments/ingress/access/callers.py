"""Callers: a request's key becomes a caller with a tenant, rights and limits, for HTTP and gRPC alike."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self

from configs.access import AccessConfig
from deployments.ingress.access.keys import KeyEntry, KeysFile
from deployments.records.errors import NotAllowed, NotAuthenticated, RateLimited

# A request's need: nothing, any key, or an admin key.
Need = Literal["nothing", "key", "admin"]

# Of the request that this task works on: the tenant of its key, "" without keys; and the caller.
current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")
_current_caller: ContextVar[Caller | None] = ContextVar("_current_caller", default=None)
_current_count: ContextVar[contextlib.ExitStack | None] = ContextVar("_current_count", default=None)
CALLER: Final = "atelier.caller"  # in the ASGI scope: who asks, None where nobody needs a key
# The most urgent priority that the request may have; None is for the default one, and 1 without keys.
current_max_priority: ContextVar[int | None] = ContextVar("current_max_priority", default=1)

_BEARER: Final = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
_NO_KEY: Final = "no API key; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"
_WRONG_KEY: Final = "this API key does not hold: it is wrong, or was revoked"
_REVOKED_KEY: Final = "the API key of this job was revoked"
_NO_ADMIN: Final = "this needs an admin key; `atelier keys add NAME --admin` makes one"
_ROUNDING: Final = 1e-9  # of tokens: a client that waited as long as told is not refused for a rounding
_BURST_S: Final = 1.0  # an idle key may send at once the requests that its rate allows in this time


class Callers:
    """The callers known to one replica, by the keys file of the config. Lives on one event loop."""

    def __init__(
        self, config: AccessConfig, num_replicas: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._num_replicas = num_replicas
        self._clock = clock
        self._file = KeysFile(config.keys_file) if config.keys_file else None
        self._uses: dict[str, KeyUse] = {}
        self._revision = 0

    @property
    def need_keys(self) -> bool:
        """Return whether callers need a key at all."""
        return self._file is not None

    def identify(self, key: str | None, need: Need) -> Caller | None:
        """Return the caller, None where no key is needed.

        Raises NotAuthenticated without a valid key, NotAllowed where an admin's key is needed.
        """
        if self._file is None or need == "nothing":
            return None
        if key is None:
            raise NotAuthenticated(_NO_KEY)
        entry = self._file.keys().find(key)
        if entry is None:
            raise NotAuthenticated(_WRONG_KEY)
        if need == "admin" and not entry.admin:
            raise NotAllowed(_NO_ADMIN)
        return self._caller(entry)

    def named(self, name: str) -> Caller | None:
        """Return the caller of the key of that name, for jobs, which run later; None where no key is needed.

        Raises NotAuthenticated when the key is gone.
        """
        if self._file is None:
            return None
        for entry in self._file.keys().entries.values():
            if entry.name == name:
                return self._caller(entry)
        raise NotAuthenticated(_REVOKED_KEY)

    def _caller(self, entry: KeyEntry) -> Caller:
        return Caller(self, entry.sha256, entry.name, entry.share, self._max_priority_of(entry))

    def _find(self, digest: str) -> KeyEntry:
        assert self._file is not None
        entry = self._file.keys().entries.get(digest)
        if entry is None:
            raise NotAuthenticated(_WRONG_KEY)
        return entry

    def has(self, digest: str) -> bool:
        """Return whether the key of that hash holds still."""
        return self._file is None or digest in self._file.keys().entries

    def count_request(self, digest: str, *, is_look: bool = False) -> KeyUse:
        """Begin a request of the key of that hash. Raises NotAuthenticated when it holds no more, RateLimited.

        `is_look`: it may be beside as many others as the key may have in progress.
        """
        entry = self._find(digest)
        self._forget_revoked()
        use = self._uses.setdefault(entry.sha256, KeyUse())
        limits = self._limits_of(entry)
        use.begin_request(replace(limits, max_concurrent=None) if is_look else limits, self._clock())
        return use

    def _limits_of(self, entry: KeyEntry) -> KeyLimits:
        rate = entry.requests_per_s
        if not entry.admin:
            rate = rate if rate is not None else self._config.requests_per_s
        max_concurrent = entry.max_concurrent or (None if entry.admin else self._config.max_concurrent)
        return KeyLimits.share_of(rate, max_concurrent, self._num_replicas)

    def _max_priority_of(self, entry: KeyEntry) -> int | None:
        return entry.max_priority or (1 if entry.admin else self._config.max_priority)

    def _forget_revoked(self) -> None:
        assert self._file is not None
        if self._revision != self._file.revision:
            self._revision = self._file.revision
            held = self._file.keys().entries
            self._uses = {digest: use for digest, use in self._uses.items() if digest in held or use.num_in_progress}


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request or stream, by a key that was valid at its beginning.

    `digest` is the key's hash. `max_priority` is the most urgent one that the requests may have, None the default one.
    """

    callers: Callers
    digest: str = field(repr=False)
    name: str
    tenant: str
    max_priority: int | None = None

    @property
    def holds(self) -> bool:
        """Return whether the key was not revoked since."""
        return self.callers.has(self.digest)

    @contextlib.contextmanager
    def begin_request(self, *, is_look: bool = False) -> Iterator[None]:
        """Count one request of the key for as long as the context lasts. `is_look`: as in `Callers.count_request`.

        Raises NotAuthenticated when the key was revoked since, RateLimited.
        """
        use = self.callers.count_request(self.digest, is_look=is_look)
        with contextlib.ExitStack() as count:
            count.callback(use.end_request)
            _current_count.set(count)
            yield


@contextlib.contextmanager
def acting_for(caller: Caller | None) -> Iterator[None]:
    """Set the tenant, the most urgent priority, and the caller of `begin_current_request`, for this task and its
    children.
    """
    tenant, caller_before = current_tenant.set(caller.tenant if caller else ""), _current_caller.set(caller)
    max_priority = current_max_priority.set(caller.max_priority if caller else 1)
    try:
        yield
    finally:
        current_tenant.reset(tenant)
        _current_caller.reset(caller_before)
        current_max_priority.reset(max_priority)


def begin_current_request() -> contextlib.AbstractContextManager[None]:
    """Count one request of a stream for the caller of this task. Raises like `begin_request`."""
    caller = _current_caller.get()
    return caller.begin_request() if caller else contextlib.nullcontext()


def end_current_request() -> None:
    """Take the request of this task off its key's count: it only waits, for a job that counts itself."""
    if (count := _current_count.get()) is not None:
        count.close()


def current_key() -> str:
    """Return the name of the key that this task acts for, "" without keys."""
    caller = _current_caller.get()
    return caller.name if caller else ""


def shown_key(authorization: str | None, x_api_key: str | None) -> str | None:
    """Return the key of a request's headers, None without one. `Authorization` of another scheme is a proxy's."""
    found = _BEARER.fullmatch(authorization or "")
    return found[1] if found else (x_api_key or "").strip() or None


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of a key on one replica. None is for no limit."""

    requests_per_s: float | None
    max_concurrent: int | None

    @classmethod
    def share_of(cls, requests_per_s: float | None, max_concurrent: int | None, num_replicas: int) -> Self:
        """Return one replica's share of a cluster's limits: an equal part, and at least one request at a time.

        The proxy deals requests out evenly, so no replica asks another. All of a gRPC connection's calls meet one
        replica and its share.
        """
        rate = requests_per_s and requests_per_s / num_replicas
        return cls(rate, max_concurrent and -(-max_concurrent // num_replicas))


class KeyUse:
    """A key's use of its limits, which come with each request, since they may change."""

    def __init__(self) -> None:
        self.num_in_progress = 0
        self._tokens = float("inf")  # the bucket is full at first, however large it is
        self._seen_s = 0.0

    def begin_request(self, limits: KeyLimits, now_s: float) -> None:
        """Count one request, until `end_request`. `now_s` never goes back. Raises RateLimited; then nothing counts."""
        if limits.max_concurrent is not None and self.num_in_progress >= limits.max_concurrent:
            raise RateLimited(f"this key has as many requests in progress as it may ({limits.max_concurrent})")
        if limits.requests_per_s is not None:
            self._take_token(limits.requests_per_s, now_s)
        self.num_in_progress += 1

    def end_request(self) -> None:
        """Take one request off the count."""
        self.num_in_progress -= 1

    def _take_token(self, rate_per_s: float, now_s: float) -> None:
        """Let the bucket fill up, and take one token out of it."""
        full = max(1.0, rate_per_s * _BURST_S)
        tokens = min(full, self._tokens + (now_s - self._seen_s) * rate_per_s)
        self._seen_s = now_s
        self._tokens = tokens
        if tokens < 1.0 - _ROUNDING:
            wait_s = (1.0 - tokens) / rate_per_s
            raise RateLimited(
                f"this key has used up its rate ({rate_per_s:g} requests a second); try again in {wait_s:.3g} s",
                retry_after_s=wait_s,
            )
        self._tokens = tokens - 1.0
