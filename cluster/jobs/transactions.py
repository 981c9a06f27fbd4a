"""Transactions of the book's database."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def writing(database: sqlite3.Connection) -> Iterator[Any]:
    """Yield `execute` of a transaction, which is atomic, and on the disk at the end."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database.execute
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
