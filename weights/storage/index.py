"""The store's index, index.sqlite: asked for what a writer needs, so that no publish costs more in a larger store.

A hint, never the truth: it is made again from the manifests when it is lost or damaged, and whoever takes a place from
it checks the bytes there.

It is in WAL mode with an exclusive lock, which needs no memory that is shared between processes: the nodes that share
a store over a network have none (sqlite.org/wal.html, "Use of WAL Without Shared-Memory"). HAZARD: so a connection
excludes all others until it is closed; it is never held while packs are written or read.

The record of extents, their places and their tensors is written as meta.json for other programs: derived from the
manifests as well.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from weights.platform.durable import remove_path
from weights.records.errors import DiskFull, StoreError, StoreVersionError
from weights.records.manifest import ExtentRef, Hex128, Hex256, InsidePath, Manifest, Size

STORE_VERSION: Final = 2

ExtentId = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]


class StoredExtent(BaseModel):
    """An extent and the offset of each of its tensors, by sha256."""

    model_config = ConfigDict(extra="forbid")
    pack: InsidePath
    offset: Size
    nbytes: Size
    checksum: Hex128
    tensors: dict[Hex256, Size]


class StoreMeta(BaseModel):
    """Contents of meta.json. A tensor may be in several extents: what is too small a part of one is written again.

    Tensors are listed under their extent because that is compact: of 1,000,000 tensors the file has 77 MB and is read
    and written in 3 s; one record per tensor took 148 MB and 10 s.
    """

    model_config = ConfigDict(extra="forbid")
    version: Literal[2] = STORE_VERSION
    extents: dict[ExtentId, StoredExtent] = {}
    _extents_of: dict[str, list[str]] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        self._extents_of = {}
        for id_, extent in self.extents.items():
            for sha256 in extent.tensors:
                self._extents_of.setdefault(sha256, []).append(id_)

    @property
    def tensors(self) -> Mapping[str, list[str]]:
        """Extent ids by tensor sha256."""
        return self._extents_of

    def extent(self, id_: str) -> ExtentRef:
        """Return the extent as manifests name it."""
        stored = self.extents[id_]
        return ExtentRef(id=id_, pack=stored.pack, offset=stored.offset, nbytes=stored.nbytes, checksum=stored.checksum)

    def add_extent(self, extent: ExtentRef, tensors: Mapping[str, int]) -> None:
        """Enter tensors (offset by sha256) that lie in `extent`. Equal ids are equal bytes: the latest place counts."""
        known = self.extents.get(extent.id)
        before = known.tensors if known else {}
        self.extents[extent.id] = StoredExtent(
            **extent.model_dump(exclude={"id", "delta"}), tensors=before | dict(tensors)
        )
        for sha256 in tensors.keys() - before.keys():
            self._extents_of.setdefault(sha256, []).append(extent.id)

    def forget_extents(self, ids: Iterable[str]) -> None:
        """Take extents out, with their tensors. Their bytes stay until `gc`."""
        for id_ in ids:
            for sha256 in self.extents.pop(id_).tensors:
                self._extents_of[sha256].remove(id_)
                if not self._extents_of[sha256]:
                    del self._extents_of[sha256]


def meta_of(manifests: Iterable[Manifest], before: StoreMeta | None = None) -> StoreMeta:
    """Build what meta.json says when these are all models. Tensors of `inline` models are private to them, and what is
    stored as a delta alone has no place.

    Where models name several places for one extent, it is the one that `before` has, if any: a copy that was
    written because another was damaged stays the one that is shared.
    """
    meta = StoreMeta()
    for manifest in manifests:
        if manifest.layout == "inline":
            continue
        tensors: dict[str, dict[str, int]] = {id_: {} for id_ in manifest.extents}
        for component in manifest.components.values():
            for ref in component.tensors.values():
                tensors[ref.extent][ref.sha256] = ref.offset
        for id_, extent in manifest.plain_extents.items():
            offsets = tensors[id_]
            is_preferred = before is not None and id_ in before.extents and before.extent(id_) == extent
            meta.add_extent(extent if id_ not in meta.extents or is_preferred else meta.extent(id_), offsets)
    return meta


INDEX_VERSION: Final = 3  # versions 1 and 2 of the store had only a meta.json
MAX_PLACES: Final = 4  # of one tensor that are looked at: a vector of zeros may be in every model
WHOLE_END: Final = 2**63 - 1  # of a path that is unneeded as a whole
_TIMEOUT_S: Final = 60.0
# What the disk or other processes refuse. Whatever else SQLite says, of statements that are right, is damage.
_REFUSALS: Final = (
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOLFS),
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOMEM),
)
_FULL: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)  # the latter when a user's share is used up
_UNREADABLE: Final = (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS)
_SCHEMA: Final = """
CREATE TABLE extents (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, pack TEXT NOT NULL, offset INTEGER NOT NULL,
                      nbytes INTEGER NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE tensors (extent INTEGER NOT NULL, sha256 BLOB NOT NULL, offset INTEGER NOT NULL,
                      PRIMARY KEY (extent, sha256)) WITHOUT ROWID;
CREATE INDEX tensors_by_sha256 ON tensors (sha256, extent);
CREATE TABLE users (model TEXT NOT NULL, extent INTEGER NOT NULL, PRIMARY KEY (model, extent)) WITHOUT ROWID;
CREATE INDEX users_by_extent ON users (extent, model);
CREATE TABLE unneeded (path TEXT NOT NULL, begin INTEGER NOT NULL, end INTEGER NOT NULL, since_s REAL NOT NULL,
                       PRIMARY KEY (path, begin)) WITHOUT ROWID
"""


class IndexDamaged(StoreError):
    """The index is lost, cut short or not an index. Nothing is lost with it."""


class Unneeded(NamedTuple):
    """Bytes `begin` to `end` of a path of the store that no manifest has named since `since_s`, in Unix time."""

    path: str
    begin: int
    end: int
    since_s: float


class StoreIndex:
    """A connection to the index, to be closed soon. Every change is one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, manifests: Callable[[], Iterable[Manifest]] | None = None) -> Iterator[Self]:
        """Open the index at `path`; a missing one is made from `manifests`, or an error when that is None.

        Raises IndexDamaged, also later, StoreVersionError, and StoreError when the disk refuses.
        """
        if manifests is None and not path.exists():
            raise IndexDamaged(f"{path}: missing")
        with _readable_errors(path), contextlib.closing(_connect(path)) as connection:
            index = cls(connection)
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (said_again,) = connection.execute("PRAGMA application_id").fetchone()
            if version > INDEX_VERSION:
                if said_again != version:  # one flipped bit must not shut a store for ever
                    raise IndexDamaged(f"{path}: damaged: version {version} here and {said_again} there")
                raise StoreVersionError(
                    f"{path}: store version {version}, this library reads version {INDEX_VERSION} and before"
                )
            if version != INDEX_VERSION:
                if manifests is None:
                    raise IndexDamaged(f"{path}: damaged: it was never finished")
                index._create(list(manifests()))
            yield index

    def find(self, hashes: Iterable[str]) -> StoreMeta:
        """Return the extents that have some of these tensors, with no other tensors than these."""
        keys = {bytes.fromhex(sha256) for sha256 in hashes}
        numbers: set[int] = set()
        for key in keys:
            newest = "SELECT extent FROM tensors WHERE sha256 = ? ORDER BY extent DESC LIMIT ?"
            numbers.update(number for (number,) in self._connection.execute(newest, (key, MAX_PLACES)))
        return self._meta(numbers, keys)

    def everything(self) -> StoreMeta:
        """Return all extents and tensors. Takes memory and time that grow with the store."""
        rows = self._connection.execute("SELECT number FROM extents ORDER BY number")
        return self._meta([number for (number,) in rows.fetchall()])

    def num_tensors(self) -> int:
        """Count the different tensors."""
        (number,) = self._connection.execute("SELECT COUNT(DISTINCT sha256) FROM tensors").fetchone()
        return int(number)

    def used_by_others(self, ids: Iterable[str], model: str) -> set[str]:
        """Return those of `ids` that other models than `model` name; removed models do until `gc`."""
        query = "SELECT 1 FROM users JOIN extents ON extent = number WHERE id = ? AND model != ? LIMIT 1"
        return {id_ for id_ in ids if self._connection.execute(query, (id_, model)).fetchone()}

    def enter(
        self,
        model: str,
        extents: Mapping[str, StoredExtent],
        used: Iterable[str],
        *,
        forgotten: Iterable[str] = (),
        needed_paths: Iterable[str] = (),
    ) -> None:
        """Forget some extents, add others, and say which of all `model` uses; `needed_paths` lose their clocks."""
        with self._transaction():
            self._forget(forgotten)
            self._add(extents)
            self._connection.execute("DELETE FROM users WHERE model = ?", (model,))
            self._add_users(model, used)
            unneeded = ((path, WHOLE_END) for path in needed_paths)
            self._connection.executemany("DELETE FROM unneeded WHERE path = ? AND end = ?", unneeded)

    def forget_extents(self, extents: Iterable[ExtentRef]) -> None:
        """Take out these extents, unless the index has them in other places. Raises IndexDamaged, whatever is."""
        self.check()
        query = "SELECT pack, offset FROM extents WHERE id = ?"
        with self._transaction():
            for extent in extents:
                if self._connection.execute(query, (extent.id,)).fetchone() == (extent.pack, extent.offset):
                    self._forget([extent.id])

    def follow(self, manifests: Iterable[Manifest]) -> int:
        """Make the index say what all manifests say; returns how many tensors it has no more. Raises IndexDamaged."""
        self.check()
        manifests = list(manifests)
        before = self.everything()
        needed = meta_of(manifests, before)
        query = "SELECT model, id FROM users JOIN extents ON extent = number"
        users = set(self._connection.execute(query))
        if before.extents != needed.extents or users != _users(manifests):
            with self._transaction():
                for statement in ("DELETE FROM extents", "DELETE FROM tensors", "DELETE FROM users"):
                    self._connection.execute(statement)
                self._fill(manifests, needed)
        return len(before.tensors.keys() - needed.tensors.keys())

    def unneeded(self) -> set[Unneeded]:
        """Return the files and ranges that the last look found unneeded."""
        found = set(map(Unneeded._make, self._connection.execute("SELECT path, begin, end, since_s FROM unneeded")))
        for clock in found:
            if tuple(map(type, clock)) != (str, int, int, float):
                raise sqlite3.DatabaseError(f"{clock} cannot be")
        return found

    def note_unneeded(self, ranges: Iterable[Unneeded]) -> None:
        """Replace what is unneeded. Nothing is written when that is known already: the disk may be full."""
        if (ranges := set(ranges)) == self.unneeded():
            return
        with self._transaction():
            self._connection.execute("DELETE FROM unneeded")
            self._connection.executemany("INSERT INTO unneeded VALUES (?, ?, ?, ?)", ranges)

    def check(self) -> None:
        """Read all of it. Raises IndexDamaged."""
        (problem,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)

    def _create(self, manifests: list[Manifest]) -> None:
        with self._transaction():
            for statement in _SCHEMA.split(";"):
                self._connection.execute(statement)
            self._fill(manifests, meta_of(manifests))
            # HAZARD: both, in every version to come. Another application_id makes it a damaged index of this one.
            for pragma in ("user_version", "application_id"):
                self._connection.execute(f"PRAGMA {pragma} = {INDEX_VERSION}")

    def _fill(self, manifests: Iterable[Manifest], meta: StoreMeta) -> None:
        self._add(meta.extents)
        for model, id_ in sorted(_users(manifests)):
            self._add_users(model, [id_])

    def _meta(self, numbers: Iterable[int], keys: set[bytes] | None = None) -> StoreMeta:
        try:
            return StoreMeta(extents=dict(self._extent(number, keys) for number in sorted(numbers)))
        except (ValidationError, TypeError) as error:  # numbers that are none: a changed schema reads others' columns
            raise sqlite3.DatabaseError(f"an extent cannot be: {error}") from None

    def _extent(self, number: int, keys: set[bytes] | None = None) -> tuple[str, StoredExtent]:
        query = "SELECT id, pack, offset, nbytes, checksum FROM extents WHERE number = ?"
        row = self._connection.execute(query, (number,)).fetchone()
        rows = self._connection.execute("SELECT sha256, offset FROM tensors WHERE extent = ?", (number,))
        try:
            id_, pack, offset, nbytes, checksum = row
            tensors = {key.hex(): begin for key, begin in rows if keys is None or key in keys}
            return id_, StoredExtent(pack=pack, offset=offset, nbytes=nbytes, checksum=checksum.hex(), tensors=tensors)
        except (TypeError, ValueError, AttributeError) as error:  # no such row, or other values than were written
            raise sqlite3.DatabaseError(f"extent {number} cannot be: {error}") from None

    def _add(self, extents: Mapping[str, StoredExtent]) -> None:
        upsert = """
            INSERT INTO extents (id, pack, offset, nbytes, checksum) VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE
            SET pack = excluded.pack, offset = excluded.offset, nbytes = excluded.nbytes, checksum = excluded.checksum
        """
        for id_, extent in extents.items():
            place = (extent.pack, extent.offset, extent.nbytes, bytes.fromhex(extent.checksum))
            self._connection.execute(upsert, (id_, *place))
            entered = self._connection.execute("SELECT number FROM extents WHERE id = ?", (id_,)).fetchone()
            if entered is None:
                raise sqlite3.DatabaseError(f"extent {id_} was entered and is not found")
            (number,) = entered
            rows = ((number, bytes.fromhex(sha256), offset) for sha256, offset in extent.tensors.items())
            self._connection.executemany("INSERT OR REPLACE INTO tensors VALUES (?, ?, ?)", rows)

    def _add_users(self, model: str, ids: Iterable[str]) -> None:
        insert = "INSERT OR IGNORE INTO users SELECT ?, number FROM extents WHERE id = ?"
        self._connection.executemany(insert, ((model, id_) for id_ in ids))

    def _forget(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            row = self._connection.execute("SELECT number FROM extents WHERE id = ?", (id_,)).fetchone()
            if row:
                self._connection.execute("DELETE FROM tensors WHERE extent = ?", row)
                self._connection.execute("DELETE FROM users WHERE extent = ?", row)
                self._connection.execute("DELETE FROM extents WHERE number = ?", row)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # it may have been rolled back already
                self._connection.execute("ROLLBACK")
            raise


def remove_index(path: Path) -> None:
    """Delete a damaged index. HAZARD: the file first; a log without its file is ignored, but would go into another."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        remove_path(path.with_name(path.name + suffix))


def _users(manifests: Iterable[Manifest]) -> set[tuple[str, str]]:
    return {
        (manifest.model, id_) for manifest in manifests if manifest.layout != "inline" for id_ in manifest.plain_extents
    }


def _connect(path: Path) -> sqlite3.Connection:
    # Where nothing can be written there is no log to read and no lock to take.
    mode = "" if os.access(path.parent, os.W_OK) else "?immutable=1"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}{mode}", uri=True, timeout=_TIMEOUT_S, isolation_level=None
    )
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # before the first access
        if not mode:
            connection.execute("PRAGMA journal_mode = WAL")
            # A commit that a power failure takes back is a tensor that is stored twice.
            connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _readable_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:  # a text in it, perhaps one that SQLite wanted to say
        raise IndexDamaged(f"{path}: damaged: {error}") from None
    except sqlite3.Error as error:
        if _is_damage(path, getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)):
            raise IndexDamaged(f"{path}: damaged: {error}") from None
        raise (DiskFull if error.sqlite_errorcode in _FULL else StoreError)(f"{path}: {error}") from None


def _is_damage(path: Path, code: int) -> bool:
    match code & 0xFF:
        case sqlite3.SQLITE_IOERR:
            return code in _UNREADABLE
        case sqlite3.SQLITE_READONLY:  # its own header may say that
            return all(os.access(writable, os.W_OK) for writable in (path, path.parent))
        case primary:
            return primary not in _REFUSALS
