"""The part of the book that has clients' files, and how far their batches are. SQLite, without a clock or Ray.

A file grows by pieces; each is on the disk before the book has its bytes. A batch's files end in the transaction in
which its job does: triggers see to that, whatever ends the job.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from cluster.jobs.records import ClientFile, LineResult, Order
from cluster.jobs.transactions import writing
from cluster.records.errors import FileInUse, JobsFull
from configs.jobs import JobsConfig

OUTPUT, ERRORS = "output_file_id", "error_file_id"  # of a batch's facts
TOTAL, COMPLETED, FAILED = "total", "completed", "failed"
INPUT: Final = "input_file_id"
OUTPUT_PURPOSE: Final = "batch_output"
MODEL_PURPOSE: Final = "model"  # of what models are registered from
KEEP_OUTPUT: Final = "keep_output_s"  # of a batch's facts: how long its files are kept after they began
SILENT_S: Final = 3600.0  # an upload without a further piece for so long is given up
_MAX_UPLOADS: Final = 64  # of one key at once
IsNeeded = Callable[[str], bool]  # whether a registered model needs the file of that name
FILES_SCHEMA: Final = (
    """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL, name TEXT NOT NULL,
    purpose TEXT NOT NULL, num_bytes INTEGER NOT NULL, created_s REAL NOT NULL, expires_s REAL, ended_s REAL,
    batch TEXT, keep_s REAL
)""",
    "CREATE INDEX IF NOT EXISTS files_by_key ON files (key, number)",
    "CREATE INDEX IF NOT EXISTS files_by_batch ON files (batch) WHERE batch IS NOT NULL",
    "CREATE TABLE IF NOT EXISTS lines (batch TEXT, number INTEGER, PRIMARY KEY (batch, number)) WITHOUT ROWID",
    """
CREATE TRIGGER IF NOT EXISTS batch_ends AFTER UPDATE OF ended_s ON jobs
WHEN NEW.ended_s IS NOT NULL AND NEW.endpoint = '/v1/batches' BEGIN
    UPDATE files SET ended_s = NEW.ended_s, expires_s = COALESCE(created_s + keep_s, NEW.expires_s)
    WHERE batch = NEW.id AND ended_s IS NULL;
    DELETE FROM lines WHERE batch = NEW.id;
END""",
    """
CREATE TRIGGER IF NOT EXISTS batch_goes AFTER DELETE ON jobs
WHEN OLD.ended_s IS NULL AND OLD.endpoint = '/v1/batches' BEGIN
    DELETE FROM files WHERE batch = OLD.id AND ended_s IS NULL;
    DELETE FROM lines WHERE batch = OLD.id;
END""",
)
_PAGE: Final = {
    "asc": """
SELECT * FROM files WHERE key = ? AND number > ? AND ended_s IS NOT NULL AND (expires_s IS NULL OR expires_s >= ?)
AND (?4 IS NULL OR purpose = ?4) ORDER BY number LIMIT ?5""",
    "desc": """
SELECT * FROM files WHERE key = ? AND number < ? AND ended_s IS NOT NULL AND (expires_s IS NULL OR expires_s >= ?)
AND (?4 IS NULL OR purpose = ?4) ORDER BY number DESC LIMIT ?5""",
}
_FIRST: Final = {"asc": 0, "desc": 2**62}
_USED: Final = "SELECT key, SUM(num_bytes) FROM files WHERE purpose != ? GROUP BY key"
_INPUTS: Final = """
SELECT json_extract(facts, '$.input_file_id') FROM jobs WHERE ended_s IS NULL AND endpoint = '/v1/batches'"""


def new_file_id(suffix: str = "") -> str:
    """Return the id of a file, which is its name on the disk."""
    return f"file-{secrets.token_hex(16)}{suffix}"


class FileBook:
    """The files of the book, and the lines of its batches. Blocks, and is not thread-safe."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database

    # files

    def begin(self, key: str, id_: str, now_s: float, purpose: str = "") -> ClientFile:
        """Begin a file, which is empty, and no one's to read until it ends. The same again is it. Raises JobsFull."""
        if (begun := self.unfinished(key, id_)) is not None:
            return begun
        ((count,),) = self._db.execute("SELECT COUNT(*) FROM files WHERE key = ? AND ended_s IS NULL", (key,))
        if count >= _MAX_UPLOADS:
            raise JobsFull(f"{count} files of this key are being uploaded, the maximum; end one of them")
        with writing(self._db) as run:
            run(
                "INSERT INTO files (id, key, name, purpose, num_bytes, created_s, expires_s)"
                " VALUES (?, ?, '', ?, 0, ?, ?)",
                (id_, key, purpose, now_s, now_s + SILENT_S),
            )
        return ClientFile(id_, key, "", purpose, 0, now_s, now_s + SILENT_S, None)

    def unfinished(self, key: str, id_: str) -> ClientFile | None:
        """Return a file that is being uploaded."""
        rows = self._db.execute(
            "SELECT * FROM files WHERE id = ? AND key = ? AND ended_s IS NULL AND batch IS NULL", (id_, key)
        ).fetchall()
        return _file_of(rows[0]) if rows else None

    def grow(self, id_: str, num_bytes: int, now_s: float) -> None:
        """Note that an unfinished file has so many bytes on the disk."""
        with writing(self._db) as run:
            run("UPDATE files SET num_bytes = ?, expires_s = ? WHERE id = ?", (num_bytes, now_s + SILENT_S, id_))

    def end(self, key: str, id_: str, name: str, purpose: str, expires_s: float, now_s: float) -> ClientFile | None:
        """End an upload, and return the file; the same again changes nothing. None for an unknown one."""
        with writing(self._db) as run:
            run(
                "UPDATE files SET name = ?, purpose = ?, expires_s = ?, ended_s = ?"
                " WHERE id = ? AND key = ? AND ended_s IS NULL AND batch IS NULL",
                (name, purpose, expires_s, now_s, id_, key),
            )
        return self.find(key, id_, now_s)

    def find(self, key: str, id_: str, now_s: float) -> ClientFile | None:
        """Return a file of a key; None for an unfinished, expired or unknown one."""
        rows = self._db.execute(
            "SELECT * FROM files WHERE id = ? AND key = ? AND ended_s IS NOT NULL"
            " AND (expires_s IS NULL OR expires_s >= ?)",
            (id_, key, now_s),
        ).fetchall()
        return _file_of(rows[0]) if rows else None

    def page(
        self, key: str, purpose: str | None, after: str | None, limit: int, order: Order, now_s: float
    ) -> list[ClientFile] | None:
        """Return up to `limit` files of a key by age, after the given one; None if that is unknown."""
        place = _FIRST[order]
        if after is not None:
            found = self._db.execute("SELECT number FROM files WHERE id = ? AND key = ?", (after, key)).fetchall()
            if not found:
                return None
            ((place,),) = found
        return [_file_of(row) for row in self._db.execute(_PAGE[order], (key, place, now_s, purpose, limit))]

    def forget(self, key: str, id_: str) -> bool:
        """Remove a file, and return whether there was one. Raises FileInUse while a batch needs it."""
        rows = self._db.execute("SELECT batch, ended_s FROM files WHERE id = ? AND key = ?", (id_, key)).fetchall()
        if not rows or (rows[0][0] is not None and rows[0][1] is None):  # unknown, or the output of a running batch
            return False
        if id_ in self._inputs():
            raise FileInUse(f"file {id_!r} is read by a batch that has not ended; cancel that first")
        with writing(self._db) as run:
            run("DELETE FROM files WHERE id = ?", (id_,))
        return True

    def expire(self, now_s: float, is_needed: IsNeeded) -> list[str]:
        """Remove the files whose time is over, but for those that a batch or a model needs; return their names."""
        over = self.expired(now_s)
        gone = [id_ for id_ in over if not is_needed(id_)]
        if over:
            with writing(self._db) as run:
                for id_ in over:
                    if id_ in gone:
                        run("DELETE FROM files WHERE id = ?", (id_,))
                    else:  # not looked at again for a while
                        run("UPDATE files SET expires_s = ? WHERE id = ?", (now_s + SILENT_S, id_))
        return gone

    def expired(self, now_s: float) -> list[str]:
        """Return the names of the files whose time is over, without those that batches read."""
        rows = self._db.execute("SELECT id FROM files WHERE expires_s < ?", (now_s,)).fetchall()
        inputs = self._inputs() if rows else ()
        return [id_ for (id_,) in rows if id_ not in inputs]

    def names(self) -> set[str]:
        """Return the names of all files, finished or not."""
        return {id_ for (id_,) in self._db.execute("SELECT id FROM files")}

    def check_room(self, key: str, num_bytes: int, config: JobsConfig, purpose: str = "") -> None:
        """Raise JobsFull if there is no room for so many further bytes of a key. One of several keys has half.

        Models have a room of their own.
        """
        if purpose == MODEL_PURPOSE:
            ((total,),) = self._db.execute("SELECT SUM(num_bytes) FROM files WHERE purpose = ?", (purpose,))
            if (total or 0) + num_bytes > config.max_models_bytes:
                raise JobsFull(
                    f"all uploaded models have {total or 0} of {config.max_models_bytes} bytes "
                    f"(jobs.max_models_bytes), and this one takes {num_bytes}: remove some of them"
                )
            return
        used: Counter[str] = Counter(dict(self._db.execute(_USED, (MODEL_PURPOSE,))))
        most = config.max_files_bytes
        if used.total() + num_bytes > most:
            raise JobsFull(f"all files have {used.total()} of {most} bytes; delete some, or wait until some have ended")
        if key and used[key] + num_bytes > most // 2:
            raise JobsFull(f"the files of this key have {used[key]} of {most // 2} bytes; delete some")

    def _inputs(self) -> set[str]:
        """Return the files that unfinished batches read."""
        return {id_ for (id_,) in self._db.execute(_INPUTS)}

    # batches

    def growing(self, batch: str) -> list[str]:
        """Return the names of the files that a batch has begun and not ended: they go with it."""
        rows = self._db.execute("SELECT id FROM files WHERE batch = ? AND ended_s IS NULL", (batch,))
        return [id_ for (id_,) in rows]

    def begin_lines(self, batch: str, total: int) -> list[int]:
        """Note the number of a batch's lines, and return which of them have ended."""
        with writing(self._db) as run:
            facts = self._facts_of(batch) | {TOTAL: total}
            run("UPDATE jobs SET facts = ? WHERE id = ?", (json.dumps(facts), batch))
        return [number for (number,) in self._db.execute("SELECT number FROM lines WHERE batch = ?", (batch,))]

    def not_ended(self, batch: str, results: Iterable[LineResult]) -> list[LineResult]:
        """Return the results of lines that have none yet, one of each line."""
        first = {result.number: result for result in reversed(list(results))}
        known = "SELECT 1 FROM lines WHERE batch = ? AND number = ?"
        return [one for one in first.values() if not self._db.execute(known, (batch, one.number)).fetchall()]

    def outputs(self, batch: str) -> dict[str, tuple[str, int]]:
        """Return id and size of a batch's files, by the names of their facts; a new id where there is none yet."""
        facts = self._facts_of(batch)
        found: dict[str, tuple[str, int]] = {}
        for fact in (OUTPUT, ERRORS):
            id_ = facts.get(fact)
            rows = self._db.execute("SELECT id, num_bytes FROM files WHERE id = ?", (id_,)).fetchall() if id_ else []
            found[fact] = tuple(rows[0]) if rows else (new_file_id(), 0)
        return found

    def end_lines(
        self,
        batch: str,
        results: Sequence[LineResult],
        files: Mapping[str, tuple[str, int]],
        now_s: float,
    ) -> None:
        """Note that lines have ended, and that their files have so many bytes now."""
        good = sum(one.is_good for one in results)
        with writing(self._db) as run:
            for one in results:
                run("INSERT INTO lines VALUES (?, ?)", (batch, one.number))
            facts = self._facts_of(batch)
            ((key,),) = run("SELECT key FROM jobs WHERE id = ?", (batch,)).fetchall()
            for fact, (id_, num_bytes) in files.items():
                facts[fact] = id_
                run(
                    "INSERT INTO files (id, key, name, purpose, num_bytes, created_s, batch, keep_s)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET num_bytes = excluded.num_bytes",
                    (
                        *(id_, key, f"{batch}_{'output' if fact == OUTPUT else 'error'}.jsonl", OUTPUT_PURPOSE),
                        *(num_bytes, now_s, batch, facts.get(KEEP_OUTPUT)),
                    ),
                )
            facts |= {COMPLETED: facts.get(COMPLETED, 0) + good, FAILED: facts.get(FAILED, 0) + len(results) - good}
            run("UPDATE jobs SET facts = ? WHERE id = ?", (json.dumps(facts), batch))

    def _facts_of(self, batch: str) -> dict[str, Any]:
        ((facts,),) = self._db.execute("SELECT facts FROM jobs WHERE id = ?", (batch,)).fetchall()
        found: dict[str, Any] = json.loads(facts)
        return found


def _file_of(row: sqlite3.Row) -> ClientFile:
    names = ("id", "key", "name", "purpose", "num_bytes", "created_s", "expires_s", "ended_s")
    return ClientFile(**{name: row[name] for name in names})
