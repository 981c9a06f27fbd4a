"""The part of the book that has webhooks: their addresses, and the times of their tries. SQLite, without a clock."""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from cluster.jobs.records import DueHook, Webhook
from cluster.jobs.rows import job_of
from cluster.jobs.transactions import writing

# Between the tries, as Standard Webhooks recommends; after the last one the webhook is given up.
PAUSES_S: Final = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 36_000.0)
TRY_S: Final = 60.0  # in which a try is told to have ended; else there is another
HOOKS_SCHEMA: Final = (
    """
CREATE TABLE IF NOT EXISTS hooks (
    job TEXT PRIMARY KEY, url TEXT NOT NULL, secret TEXT NOT NULL, num_tries INTEGER NOT NULL, next_s REAL NOT NULL
)""",
    """
CREATE TRIGGER IF NOT EXISTS hook_goes AFTER DELETE ON jobs BEGIN DELETE FROM hooks WHERE job = OLD.id; END""",
)
_DUE: Final = """
SELECT jobs.*, url, secret, num_tries FROM hooks JOIN jobs ON jobs.id = hooks.job
WHERE ended_s IS NOT NULL AND next_s <= ? ORDER BY next_s LIMIT ?"""


class HookBook:
    """The webhooks of the book. Blocks, and is not thread-safe."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database

    def take(self, count: int, now_s: float) -> list[DueHook]:
        """Begin up to `count` tries that are due."""
        rows = self._db.execute(_DUE, (now_s, count)).fetchall()
        if rows:
            with writing(self._db) as run:
                for row in rows:
                    run(
                        "UPDATE hooks SET num_tries = num_tries + 1, next_s = ? WHERE job = ?",
                        (now_s + TRY_S, row["id"]),
                    )
        return [DueHook(job_of(row), Webhook(row["url"], row["secret"]), row["num_tries"] + 1) for row in rows]

    def end(self, job: str, num_tries: int, now_s: float, *, is_over: bool) -> bool:
        """End a try: the webhook was told, or refuses for good (`is_over`), or is told again later.

        Return False where it is given up.
        """
        goes_on = not is_over and num_tries <= len(PAUSES_S)
        with writing(self._db) as run:
            if goes_on:
                run(
                    "UPDATE hooks SET next_s = ? WHERE job = ? AND num_tries = ?",
                    (now_s + PAUSES_S[num_tries - 1], job, num_tries),
                )
            else:
                run("DELETE FROM hooks WHERE job = ?", (job,))
        return is_over or goes_on

    def next_s(self) -> float | None:
        """Return when the next try is due, None for never."""
        ((found,),) = self._db.execute(
            "SELECT MIN(next_s) FROM hooks JOIN jobs ON jobs.id = hooks.job WHERE ended_s IS NOT NULL"
        ).fetchall()
        return None if found is None else float(found)


def add_hook(run: Any, job: str, webhook: Webhook, now_s: float) -> None:
    """Add a job's webhook, in the transaction that adds the job."""
    run("INSERT INTO hooks VALUES (?, ?, ?, 0, ?)", (job, webhook.url, webhook.secret, now_s))
