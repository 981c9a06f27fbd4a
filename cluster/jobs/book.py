"""The book of jobs: their requests, their starts and their ends. SQLite, without a clock or Ray.

    queued -> running -> done | failed       running -> queued, when its ingress has died
    queued or running -> cancelled

Every change is one transaction, on the disk when its method returns. One process has the book open: others find it
locked. A job ends once: the end of an abandoned start changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from cluster.jobs.file_book import FILES_SCHEMA, FileBook
from cluster.jobs.hook_book import HOOKS_SCHEMA, HookBook, add_hook
from cluster.jobs.records import BATCHES, Headers, Job, JobAnswer, JobError, JobFilter, NewJob, Order, Status, TakenJob
from cluster.jobs.rows import job_of
from cluster.jobs.transactions import writing
from cluster.records.errors import JobConflict, JobsFull
from configs.jobs import JobsConfig
from weights.platform.durable import make_folder

logger = logging.getLogger("atelier.jobs")

BOOK_FILE: Final = "jobs.sqlite"
_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SETTINGS: Final = ("PRAGMA locking_mode = EXCLUSIVE", "PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL")
_SCHEMA: Final = (
    """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL, endpoint TEXT NOT NULL,
    headers TEXT NOT NULL, facts TEXT NOT NULL, priority INTEGER NOT NULL, idempotency_key TEXT, digest BLOB NOT NULL,
    status TEXT NOT NULL, num_starts INTEGER NOT NULL, num_bytes INTEGER NOT NULL, created_s REAL NOT NULL,
    started_s REAL, ended_s REAL, expires_s REAL, error TEXT, answer TEXT
)""",
    "CREATE TABLE IF NOT EXISTS bodies (id TEXT PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS by_key ON jobs (key, number)",
    "CREATE INDEX IF NOT EXISTS by_turn ON jobs (status, key, priority, number)",
    "CREATE UNIQUE INDEX IF NOT EXISTS by_idempotency ON jobs (key, idempotency_key) WHERE idempotency_key IS NOT NULL",
    *FILES_SCHEMA,
    *HOOKS_SCHEMA,
)
_PAGE: Final = {
    "asc": """
SELECT * FROM jobs WHERE key = ? AND number > ? AND (expires_s IS NULL OR expires_s >= ?)
AND (?4 IS NULL OR status = ?4) AND (?5 IS NULL OR endpoint = ?5) AND (?6 IS NULL OR idempotency_key = ?6)
ORDER BY number LIMIT ?7""",
    "desc": """
SELECT * FROM jobs WHERE key = ? AND number < ? AND (expires_s IS NULL OR expires_s >= ?)
AND (?4 IS NULL OR status = ?4) AND (?5 IS NULL OR endpoint = ?5) AND (?6 IS NULL OR idempotency_key = ?6)
ORDER BY number DESC LIMIT ?7""",
}
_FIRST: Final = {"asc": 0, "desc": 2**62}
_RUNNING_BY_KEY: Final = """
SELECT key, COUNT(*) FROM jobs WHERE status = 'running' AND (endpoint = ?) = ? GROUP BY key"""
_FIRST_QUEUED: Final = """
SELECT priority, key, MIN(number) FROM jobs WHERE status = 'queued' AND (endpoint = ?) = ? GROUP BY key, priority"""
_END: Final = """
UPDATE jobs SET status = ?, ended_s = ?, expires_s = ?, error = ?, answer = ?, num_bytes = ?
WHERE id = ? AND num_starts = ? AND ended_s IS NULL RETURNING id"""


def result_name(id_: str, start: int) -> str:
    """Return the name of a start's result file."""
    return f"{id_}.{start}"


class JobBook:
    """The book of one folder. Blocks, and is not thread-safe. Raises sqlite3.Error where the disk does not do."""

    def __init__(self, folder: Path, busy_s: float = 5.0) -> None:
        """Open the book. Raises sqlite3.OperationalError while another process has it, OSError."""
        make_folder(folder)
        file = folder / BOOK_FILE
        try:
            self._db = _opened(file, busy_s)
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode not in _DAMAGE:
                raise
            aside = file.with_name(f"{BOOK_FILE}.damaged-{secrets.token_hex(4)}")
            logger.error("%s is damaged (%s): it is %s now, and a new one begins", file, error, aside.name)
            file.rename(aside)
            for beside in (f"{BOOK_FILE}-wal", f"{BOOK_FILE}-journal"):
                (folder / beside).unlink(missing_ok=True)
            self._db = _opened(file, busy_s)
        self.files, self.hooks = FileBook(self._db), HookBook(self._db)

    def close(self) -> None:
        """Let another process have the book."""
        self._db.close()

    # what clients do

    def add(self, new: NewJob, config: JobsConfig, now_s: float) -> Job:
        """Take in a job that is queued, or return the one of its idempotency key. Raises JobConflict, JobsFull."""
        digest = _digest_of(new)
        with writing(self._db) as run:
            if new.idempotency_key is not None and (known := self._known(new, digest)) is not None:
                return known
            if (known := self.find(new.key, id_ := new.id, now_s)) is not None:
                return known
            self._check_room(new, config)
            texts = json.dumps(new.headers), json.dumps(dict(new.facts))
            run(
                "INSERT INTO jobs (id, key, endpoint, headers, facts, priority, idempotency_key, digest, status,"
                " num_starts, num_bytes, created_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'queued', 0, ?, ?)",
                (id_, new.key, new.endpoint, *texts, new.priority, new.idempotency_key, digest, len(new.body), now_s),
            )
            run("INSERT INTO bodies VALUES (?, ?)", (id_, new.body))
            if new.webhook is not None:
                add_hook(run, id_, new.webhook, now_s)
        job = self.find(new.key, id_, now_s)
        assert job is not None
        return job

    def find(self, key: str, id_: str, now_s: float) -> Job | None:
        """Return a job of a key; None for an expired or unknown one."""
        rows = self._db.execute(
            "SELECT * FROM jobs WHERE id = ? AND key = ? AND (expires_s IS NULL OR expires_s >= ?)",
            (id_, key, now_s),
        ).fetchall()
        return job_of(rows[0]) if rows else None

    def body(self, key: str, id_: str) -> bytes | None:
        """Return the body of an unfinished job's request; None for another job."""
        rows = self._db.execute(
            "SELECT body FROM bodies JOIN jobs USING (id) WHERE id = ? AND key = ?", (id_, key)
        ).fetchall()
        return rows[0][0] if rows else None

    def page(
        self, key: str, wanted: JobFilter, after: str | None, limit: int, order: Order, now_s: float
    ) -> list[Job] | None:
        """Return up to `limit` jobs of a key by age, after the given one; None if that is unknown."""
        place = _FIRST[order]
        if after is not None:
            found = self._db.execute("SELECT number FROM jobs WHERE id = ? AND key = ?", (after, key)).fetchall()
            if not found:
                return None
            ((place,),) = found
        values = (key, place, now_s, wanted.status, wanted.endpoint, wanted.idempotency_key, limit)
        return [job_of(row) for row in self._db.execute(_PAGE[order], values)]

    def cancel(self, key: str, id_: str, keep_s: float, now_s: float) -> Job | None:
        """End an unfinished job, and return its new state; None for an unknown one."""
        with writing(self._db) as run:
            run(
                "UPDATE jobs SET status = 'cancelled', ended_s = ?, expires_s = ?, num_bytes = 0"
                " WHERE id = ? AND key = ? AND ended_s IS NULL",
                (now_s, now_s + keep_s, id_, key),
            )
            run("DELETE FROM bodies WHERE id IN (SELECT id FROM jobs WHERE id = ? AND ended_s IS NOT NULL)", (id_,))
        return self.find(key, id_, now_s)

    def forget(self, key: str, id_: str) -> str | None:
        """Remove a job, and return the name of its result file; None for an unknown job."""
        with writing(self._db) as run:
            gone = run("DELETE FROM jobs WHERE id = ? AND key = ? RETURNING id, num_starts", (id_, key)).fetchall()
            for id_, _ in gone:
                run("DELETE FROM bodies WHERE id = ?", (id_,))
        return result_name(*gone[0]) if gone else None

    # what ingresses do

    def take(
        self, count: int, held: Mapping[str, int], max_of_key: int, now_s: float, *, are_batches: bool = False
    ) -> list[TakenJob]:
        """Begin up to `count` queued jobs: the most urgent, of the key with the fewest running, the oldest.

        `held` are the caller's running jobs by key, at most `max_of_key` each. Batches are apart from other jobs: they
        take hours.
        """
        taken: list[TakenJob] = []
        own = Counter(held)
        with writing(self._db) as run:
            kind = (BATCHES, are_batches)
            running = Counter(dict(run(_RUNNING_BY_KEY, kind)))
            while len(taken) < count:
                waiting = run(_FIRST_QUEUED, kind).fetchall()
                if (number := _next_turn(waiting, running, own, max_of_key)) is None:
                    break
                ((id_, start, key, endpoint, headers, created_s),) = run(
                    "UPDATE jobs SET status = 'running', num_starts = num_starts + 1, started_s = ? WHERE number = ?"
                    " RETURNING id, num_starts, key, endpoint, headers, created_s",
                    (now_s, number),
                ).fetchall()
                ((body,),) = run("SELECT body FROM bodies WHERE id = ?", (id_,)).fetchall()
                taken.append(TakenJob(id_, start, key, endpoint, _headers_of(headers), body, created_s))
                running[key] += 1
                own[key] += 1
        return taken

    def is_wanted(self, id_: str, start: int) -> Literal["open", "done", "gone"]:
        """Return whether a start's result is wanted, is here already, or is no longer wanted."""
        found = self._db.execute("SELECT num_starts, status, ended_s FROM jobs WHERE id = ?", (id_,)).fetchall()
        if not found or found[0][0] != start:
            return "gone"
        _, status, ended_s = found[0]
        return "open" if ended_s is None else "done" if status in ("done", "failed") else "gone"

    def end(self, id_: str, start: int, end: JobAnswer | JobError, num_bytes: int, keep_s: float, now_s: float) -> bool:
        """End a job with its answer, or without one. Return whether this start's answer was wanted."""
        status: Status = "done" if isinstance(end, JobAnswer) and end.is_good else "failed"
        answer = json.dumps([end.status, end.headers]) if isinstance(end, JobAnswer) else None
        said = end.error if isinstance(end, JobAnswer) else end
        error = None if said is None else json.dumps([said.code, said.message])
        with writing(self._db) as run:
            values = (status, now_s, now_s + keep_s, error, answer, num_bytes, id_, start)
            ended = run(_END, values).fetchall()
            if ended:
                run("DELETE FROM bodies WHERE id = ?", (id_,))
        return bool(ended)

    def running(self) -> list[tuple[str, int, str, str]]:
        """Return id, start, key and endpoint of the running jobs."""
        rows = self._db.execute("SELECT id, num_starts, key, endpoint FROM jobs WHERE status = 'running'")
        return [tuple(row) for row in rows]

    def requeue(
        self, lost: Collection[tuple[str, int]], config: JobsConfig, now_s: float, *, were_given_back: bool = False
    ) -> None:
        """Queue jobs of a dead ingress again; one without further starts has failed, unless it was given back."""
        for id_, start in lost:
            if were_given_back or start < config.max_starts:
                with writing(self._db) as run:
                    run(
                        "UPDATE jobs SET status = 'queued' WHERE id = ? AND num_starts = ? AND status = 'running'",
                        (id_, start),
                    )
                continue
            message = f"each of the {start} processes that began this job ended before it did, the most that may"
            self.end(id_, start, JobError("replica_unavailable", message), 0, config.keep_s, now_s)

    # room

    def sweep(self, config: JobsConfig, now_s: float) -> list[str]:
        """Remove expired ended jobs, and surplus ones; return their result files."""
        gone = self.expire(now_s)
        ((count, total),) = self._db.execute("SELECT COUNT(*), SUM(num_bytes) FROM jobs").fetchall()
        if count <= config.max_jobs and (total or 0) <= config.max_bytes:
            return gone
        rows = self._db.execute("SELECT id, key, num_bytes, ended_s, num_starts FROM jobs ORDER BY number").fetchall()
        surplus = set(_surplus(rows, config.max_bytes, config.max_jobs))
        with writing(self._db) as run:
            for id_ in surplus:
                run("DELETE FROM jobs WHERE id = ?", (id_,))
        return [*gone, *(result_name(row[0], row[4]) for row in rows if row[0] in surplus)]

    def expire(self, now_s: float) -> list[str]:
        """Remove the jobs whose time is over, and return the names of their result files."""
        with writing(self._db) as run:
            gone = run("DELETE FROM jobs WHERE expires_s < ? RETURNING id, num_starts", (now_s,)).fetchall()
        return [result_name(*row) for row in gone]

    def expired(self, now_s: float) -> list[str]:
        """Return the names of the result files whose time is over."""
        rows = self._db.execute("SELECT id, num_starts FROM jobs WHERE expires_s < ? AND answer IS NOT NULL", (now_s,))
        return [result_name(*row) for row in rows]

    def result_names(self) -> set[str]:
        """Return the names of all result files."""
        rows = self._db.execute("SELECT id, num_starts FROM jobs WHERE answer IS NOT NULL")
        return {result_name(*row) for row in rows}

    def _known(self, new: NewJob, digest: bytes) -> Job | None:
        rows = self._db.execute(
            "SELECT * FROM jobs WHERE key = ? AND idempotency_key = ?", (new.key, new.idempotency_key)
        ).fetchall()
        if not rows:
            return None
        if rows[0]["digest"] != digest:
            raise JobConflict(f"idempotency_key {new.idempotency_key!r} is that of another request, {rows[0]['id']}")
        return job_of(rows[0])

    def _check_room(self, new: NewJob, config: JobsConfig) -> None:
        """Raise JobsFull if the job has no room beside the unfinished ones."""
        ((count, total),) = self._db.execute(
            "SELECT COUNT(*) FILTER (WHERE key = ?), SUM(num_bytes) FROM jobs WHERE ended_s IS NULL", (new.key,)
        ).fetchall()
        if count >= config.max_unfinished:
            raise JobsFull(f"{count} jobs of this key are not finished, the maximum; wait for one of them")
        if (total or 0) + len(new.body) > config.max_bytes:
            raise JobsFull(f"the bodies of unfinished jobs have {total or 0} of {config.max_bytes} bytes; try again")


def _opened(file: Path, busy_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(file, timeout=busy_s, check_same_thread=False, isolation_level=None)
    connection.row_factory = sqlite3.Row
    try:
        for statement in (*_SETTINGS, "BEGIN EXCLUSIVE", *_SCHEMA, "COMMIT"):
            connection.execute(statement)
    except BaseException:
        connection.close()
        raise
    return connection


def _digest_of(new: NewJob) -> bytes:
    """Return the digest that two requests with one idempotency key must share. A form's text differs each time."""
    type_ = dict(new.headers).get("content-type", "")
    body = b"" if type_.startswith("multipart/") else new.body
    return hashlib.sha256(json.dumps([new.endpoint, type_.partition(";")[0]]).encode() + b"\0" + body).digest()


def _next_turn(
    waiting: Sequence[tuple[int, str, int]], running: Mapping[str, int], held: Mapping[str, int], max_of_key: int
) -> int | None:
    """Return the number of the next job, among the first ones of each key and priority; None for none."""
    may = [(priority, running[key], number) for priority, key, number in waiting if held[key] < max_of_key]
    return min(may)[2] if may else None


def _headers_of(text: str) -> Headers:
    return tuple((name, value) for name, value in json.loads(text))


def _surplus(rows: Sequence[tuple[Any, ...]], max_bytes: int, max_jobs: int) -> list[str]:
    """Return the ids of surplus ended jobs: the oldest of the key with the most bytes or jobs.

    `rows` begin with id, key, bytes and end, the oldest first.
    """
    by_key: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for id_, key, num_bytes, ended_s, *_ in rows:
        if ended_s is not None:
            by_key[key].append((id_, num_bytes))
    sizes = {key: sum(num_bytes for _, num_bytes in jobs) for key, jobs in by_key.items()}
    counts = {key: len(jobs) for key, jobs in by_key.items()}
    firsts = dict.fromkeys(by_key, 0)
    num_jobs, total = len(rows), sum(row[2] for row in rows)
    found = []
    while any(counts.values()) and (num_jobs > max_jobs or total > max_bytes):
        amounts = sizes if total > max_bytes else counts
        key = max(counts, key=lambda name: (counts[name] > 0, amounts[name]))
        id_, num_bytes = by_key[key][firsts[key]]
        firsts[key] += 1
        counts[key] -= 1
        sizes[key] -= num_bytes
        found.append(id_)
        num_jobs, total = num_jobs - 1, total - num_bytes
    return found
