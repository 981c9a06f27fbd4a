"""One SQLite file in a folder, which all ingress replicas that share the folder use.

On several nodes the folder has to be a shared one (no write-ahead log: that needs the memory of one machine). What the
file has is of use for a while, and no more: a damaged one is begun anew.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any, Final

from weights.private_folder import private_folder, temporary_folder

_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_BUSY_S: Final = 2.0  # to wait for another replica's write
_SETTINGS: Final = "PRAGMA journal_mode = TRUNCATE; PRAGMA synchronous = OFF;"


class SharedFile:
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
