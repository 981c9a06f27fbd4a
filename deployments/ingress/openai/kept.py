"""Responses and videos that outlive their requests: rows in files that ingress replicas share, and videos' own files.

Responses are kept for `previous_response_id`, for references to their items, and for later reading. One that their
file loses costs a client only its short way to repeat the conversation.

The replica that makes a video writes a heartbeat. A video without a new one, while another
replica looks for a while, has failed: its replica has ended, and no other makes it. The looks are timed by a clock
that is never set: when the machine's clock steps, all beats are old at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from configs.cluster import StoredResponsesConfig, VideosConfig
from deployments.records.errors import QueueFull
from weights.platform.durable import replaced
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
Status = Literal["queued", "in_progress", "completed", "failed"]
LOST_S: Final = 20.0  # without a heartbeat of its replica
_VIDEOS_FILE: Final = "videos.sqlite"
_NAME: Final = re.compile(r"\.?(video_[0-9a-f]{32})\.(mp4|webm)(\.[0-9a-f]{32})?")  # 128 random bits; or staged
_OLD_FILE_S: Final = 3600.0  # of a file without a row
_VIDEOS_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS videos (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created_s REAL NOT NULL, beat_s REAL NOT NULL, status TEXT NOT NULL,
    progress INTEGER NOT NULL, ended_s REAL, nbytes INTEGER NOT NULL, facts TEXT NOT NULL, error TEXT
);
CREATE INDEX IF NOT EXISTS by_creation ON videos (tenant, created_s);
"""
_INSERT: Final = """
INSERT INTO videos SELECT ?, ?, ?, ?, 'queued', 0, NULL, 0, ?, NULL WHERE
    (SELECT COUNT(*) FROM videos WHERE tenant = ? AND ended_s IS NULL) < ?
RETURNING *
"""
_PAGES: Final = {
    "asc": """
SELECT * FROM videos WHERE tenant = ? AND (ended_s IS NULL OR ended_s >= ?) AND (created_s, id) > (?, ?)
ORDER BY created_s, id LIMIT ?
""",
    "desc": """
SELECT * FROM videos WHERE tenant = ? AND (ended_s IS NULL OR ended_s >= ?) AND (created_s, id) < (?, ?)
ORDER BY created_s DESC, id DESC LIMIT ?
""",
}
_ENDS: Final = {"asc": (-math.inf, ""), "desc": (math.inf, "")}
_COMPLETE: Final = """
UPDATE videos SET status = 'completed', progress = 100, ended_s = ?, nbytes = ?, facts = ?
WHERE id = ? AND ended_s IS NULL RETURNING id
"""


_LOST: Final = """
UPDATE videos SET status = 'failed', ended_s = ?, error = ? WHERE id = ? AND beat_s = ? AND ended_s IS NULL
"""
_LOST_ERROR: Final = {"code": "server_error", "message": "the ingress that had this video made has ended; ask again"}


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


@dataclass(frozen=True, slots=True)
class KeptVideo:
    """A video. `facts` are for its answer, `error` is why it failed, `ended_s` the time of its end."""

    id: str
    created_s: float
    status: Status
    progress: int
    ended_s: float | None
    facts: Mapping[str, Any]
    error: Mapping[str, str] | None


class KeptVideos:
    """The videos of a cluster, bounded by age, number and bytes; the oldest of the tenants with the most go first.

    Only its own tenant finds a video. Thread-safe; calls block for a moment. They raise OSError where the folder cannot
    be used.
    """

    def __init__(
        self,
        config: VideosConfig,
        cluster: str,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._file = _SharedFile(config.folder, f"videos-{cluster}", _VIDEOS_FILE, _VIDEOS_SCHEMA)
        self._clock, self._monotonic = clock, monotonic
        self._lock = threading.Lock()
        self._beats: dict[str, tuple[float, float]] = {}  # of unfinished videos: the last one, and its first sight

    def add(self, tenant: str, facts: Mapping[str, Any], most_unfinished: int) -> KeptVideo:
        """Add a queued video. Raises QueueFull when the tenant has too many unfinished ones."""
        now, id_ = self._clock(), f"video_{secrets.token_hex(16)}"
        self._fail_lost()
        values = (id_, tenant, now, now, json.dumps(facts), tenant, most_unfinished)
        rows = self._file.run(_INSERT, values)
        if not rows:
            raise QueueFull(f"{most_unfinished} videos of this key are not finished, the maximum; wait for one of them")
        self._sweep()
        return self._video_of(rows[0])

    def note_progress(self, id_: str, progress: int, *, has_begun: bool) -> bool:
        """Write a video's heartbeat, and return whether the video is still wanted."""
        status = "in_progress" if has_begun else "queued"
        statement = (
            "UPDATE videos SET beat_s = ?, progress = ?, status = ? WHERE id = ? AND ended_s IS NULL RETURNING id"
        )
        return bool(self._file.run(statement, (self._clock(), progress, status, id_)))

    def complete(self, id_: str, file: bytes, suffix: str, facts: Mapping[str, Any]) -> None:
        """Keep the file of a video, if it is still wanted."""
        path = self._file.folder / f"{id_}.{suffix}"
        with replaced(path) as staged:
            staged.write_bytes(file)
        if not self._file.run(_COMPLETE, (self._clock(), len(file), json.dumps(facts), id_)):
            path.unlink(missing_ok=True)
        self._sweep()

    def fail(self, id_: str, code: str, message: str) -> None:
        """Note why a video could not be made."""
        statement = "UPDATE videos SET status = 'failed', ended_s = ?, error = ? WHERE id = ? AND ended_s IS NULL"
        self._file.run(statement, (self._clock(), json.dumps({"code": code, "message": message}), id_))

    def find(self, tenant: str, id_: str) -> KeptVideo | None:
        """Return a video; None for an expired or unknown one."""
        self._fail_lost()
        rows = self._file.run("SELECT * FROM videos WHERE id = ? AND tenant = ?", (id_, tenant))
        video = self._video_of(rows[0]) if rows else None
        return None if video is None or self._is_old(video) else video

    def page(self, tenant: str, after: str | None, limit: int, order: Literal["asc", "desc"]) -> list[KeptVideo] | None:
        """Return up to `limit` videos by age, after the given one; None if that is unknown."""
        place = [_ENDS[order]]
        if after is not None:
            place = self._file.run("SELECT created_s, id FROM videos WHERE id = ? AND tenant = ?", (after, tenant))
            if not place:
                return None
        self._fail_lost()
        values = tenant, self._clock() - self._config.ttl_s, *place[0], limit
        return [self._video_of(row) for row in self._file.run(_PAGES[order], values)]

    def file_of(self, video: KeptVideo) -> Path | None:
        """Return the file of a video; None if there is none."""
        paths = (self._file.folder / f"{video.id}.{suffix}" for suffix in ("mp4", "webm"))
        return next((path for path in paths if path.is_file()), None)

    def forget(self, tenant: str, id_: str) -> bool:
        """Forget a video and stop its making. Return whether there was one."""
        if not self._file.run("DELETE FROM videos WHERE id = ? AND tenant = ? RETURNING id", (id_, tenant)):
            return False
        self._remove_files([id_])
        return True

    def _video_of(self, row: tuple[Any, ...]) -> KeptVideo:
        id_, _, created_s, _, status, progress, ended_s, _, facts, error = row
        found = None if error is None else json.loads(error)
        return KeptVideo(id_, created_s, status, progress, ended_s, json.loads(facts), found)

    def _fail_lost(self) -> None:
        """Note the failure of videos whose heartbeat has not changed since a look some time ago."""
        now_s = self._monotonic()
        with self._lock:
            found = dict(self._file.run("SELECT id, beat_s FROM videos WHERE ended_s IS NULL"))
            known = self._beats
            self._beats = {
                id_: known[id_] if id_ in known and known[id_][0] == beat_s else (beat_s, now_s)
                for id_, beat_s in found.items()
            }
            for id_, (beat_s, since_s) in self._beats.items():
                if since_s < now_s - LOST_S:
                    self._file.run(_LOST, (self._clock(), json.dumps(_LOST_ERROR), id_, beat_s))

    def _is_old(self, video: KeptVideo) -> bool:
        return video.ended_s is not None and video.ended_s < self._clock() - self._config.ttl_s

    def _sweep(self) -> None:
        """Remove expired videos, and those above the limits. HAZARD: other ingress replicas sweep the same folder."""
        now = self._clock()
        old = self._file.run("DELETE FROM videos WHERE ended_s < ? RETURNING id", (now - self._config.ttl_s,))
        rows = self._file.run("SELECT id, tenant, nbytes, ended_s FROM videos ORDER BY created_s, id")
        surplus = _surplus(rows, self._config.max_bytes, self._config.max_videos)
        for id_ in surplus:
            self._file.run("DELETE FROM videos WHERE id = ?", (id_,))
        self._remove_files([*(id_ for (id_,) in old), *surplus])
        kept = {id_ for id_, *_ in rows}
        for path in self._file.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and match[1] not in kept:
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < now - _OLD_FILE_S:
                        path.unlink()

    def _remove_files(self, ids: list[str]) -> None:
        for id_ in ids:
            for suffix in ("mp4", "webm"):
                (self._file.folder / f"{id_}.{suffix}").unlink(missing_ok=True)


def _surplus(rows: list[tuple[Any, ...]], max_bytes: int, max_videos: int) -> list[str]:
    """Return the ids of surplus ended videos: the oldest of the tenant with the most bytes or videos.

    `rows` have id, tenant, bytes and end, the oldest first.
    """
    by_tenant: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for id_, tenant, nbytes, ended_s in rows:
        if ended_s is not None:
            by_tenant[tenant].append((id_, nbytes))
    num_videos, total_bytes = len(rows), sum(row[2] for row in rows)
    found = []
    while by_tenant and (num_videos > max_videos or total_bytes > max_bytes):
        size = (lambda videos: sum(nbytes for _, nbytes in videos)) if total_bytes > max_bytes else len
        tenant = max(by_tenant, key=lambda name: size(by_tenant[name]))
        id_, nbytes = by_tenant[tenant].pop(0)
        if not by_tenant[tenant]:
            del by_tenant[tenant]
        found.append(id_)
        num_videos, total_bytes = num_videos - 1, total_bytes - nbytes
    return found
