"""Responses that outlive their requests: rows in a file that ingress replicas share.

They are kept for `previous_response_id`, for references to their items, and to be read again: what their file loses
costs a client its short way to say what was said before, no more.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from configs.cluster import StoredResponsesConfig
from weights.platform.private_folder import private_folder, temporary_folder

_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_BUSY_S: Final = 2.0  # to wait for another replica's write
_SETTINGS: Final = "PRAGMA journal_mode = TRUNCATE; PRAGMA synchronous = OFF;"
_RESPONSES_FILE: Final = "responses.sqlite"
_SWEEPS: Final = 16  # while `max_bytes` are written
_RESPONSES_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, used_s REAL NOT NULL, nbytes INTEGER NOT NULL,
    previous_id TEXT, input BLOB NOT NULL, answer BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON responses (tenant, used_s, nbytes);
"""
_USED: Final = """
UPDATE responses SET used_s = ? WHERE id = ? AND tenant = ? AND used_s >= ? RETURNING id, previous_id, input, answer
"""
_EXPIRED: Final = "DELETE FROM responses WHERE used_s < ?"
_SIZES: Final = "SELECT tenant, SUM(nbytes) FROM responses GROUP BY tenant ORDER BY 2 DESC"
_OLDEST: Final = """
DELETE FROM responses WHERE id IN (
    SELECT id FROM (
        SELECT id, SUM(nbytes) OVER (ORDER BY used_s, id) - nbytes AS before FROM responses WHERE tenant = ?
    ) WHERE before < ?
)
"""


class _SharedFile:
    """The file `name` of a folder: the config's, or one of this user in the temporary directory, called `own_name`.

    Thread-safe; calls block for a moment. `schema` is run whenever the file is opened.
    """

    def __init__(self, folder: Path | None, own_name: str, name: str, schema: str) -> None:
        self.folder = folder or temporary_folder() / own_name
        self._is_own = folder is None
        self._name = name
        self._schema = schema
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def run(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """Run a statement, and return its rows. Raises OSError; a file that is damaged is removed before."""
        with self._lock:
            try:
                with self._opened() as connection:
                    return connection.execute(statement, values).fetchall()
            except (sqlite3.Error, UnicodeDecodeError) as error:
                is_damaged = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) in _DAMAGE
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                for file in self.folder.glob(f"{self._name}*") if is_damaged else ():
                    file.unlink(missing_ok=True)
                raise OSError(str(error)) from error

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            if self._is_own:
                private_folder(self.folder.parent)
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.folder / self._name, timeout=_BUSY_S, check_same_thread=False)
            self._connection.executescript(_SETTINGS + self._schema)
        return self._connection


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response: the items of its own request and the answer as JSON, and the previous response."""

    id: str
    previous_id: str | None
    input: bytes
    answer: bytes


class StoredResponses:
    """The kept responses, bounded by age and by bytes; the oldest of the tenants with the most go first.

    Only its own tenant finds a response. Thread-safe; calls block for a moment. If the file cannot be used, nothing
    is found, and `keep` raises OSError.
    """

    def __init__(self, config: StoredResponsesConfig, cluster: str, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._file = _SharedFile(config.folder, f"responses-{cluster}", _RESPONSES_FILE, _RESPONSES_SCHEMA)
        self._clock = clock
        self._lock = threading.Lock()
        self._unswept_bytes = config.max_bytes  # left there by others

    def keep(self, tenant: str, response: StoredResponse) -> None:
        """Keep a response. Raises OSError if the file cannot be used."""
        nbytes = len(response.input) + len(response.answer)
        row = (response.id, tenant, self._clock(), nbytes, response.previous_id, response.input, response.answer)
        with self._lock:
            self._file.run("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._unswept_bytes += nbytes
            if self._unswept_bytes * _SWEEPS >= self._config.max_bytes:
                self._unswept_bytes = 0
                self._sweep()

    def find(self, tenant: str, id_: str) -> StoredResponse | None:
        """Return a response, and renew its age; None for an expired or unknown one."""
        now = self._clock()
        with self._lock, contextlib.suppress(OSError):
            rows = self._file.run(_USED, (now, id_, tenant, now - self._config.ttl_s))
            return StoredResponse(*rows[0]) if rows else None
        return None

    def forget(self, tenant: str, id_: str) -> bool:
        """Forget a response, and return whether there was one."""
        with self._lock, contextlib.suppress(OSError):
            return bool(self._file.run("DELETE FROM responses WHERE id = ? AND tenant = ? RETURNING id", (id_, tenant)))
        return False

    def _sweep(self) -> None:
        """Remove expired responses, and those above the limit. HAZARD: other ingress replicas sweep the same file."""
        self._file.run(_EXPIRED, (self._clock() - self._config.ttl_s,))
        sizes = self._file.run(_SIZES, ())
        surplus = sum(nbytes for _, nbytes in sizes) - self._config.max_bytes
        for tenant, nbytes in sizes:
            if surplus <= 0:
                return
            above = min(surplus, nbytes - self._config.max_bytes // len(sizes))  # of an equal share
            self._file.run(_OLDEST, (tenant, above))
            surplus -= above
