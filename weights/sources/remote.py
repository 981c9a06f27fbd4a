"""Files that lie elsewhere: what a bucket and a hub say of theirs, and how they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, Protocol

from pydantic import TypeAdapter, ValidationError

from weights.records.manifest import InsidePath

MAX_OBJECTS: Final = 10_000  # a checkpoint has hundreds at most; more is a whole bucket given by mistake
_NAME: TypeAdapter[str] = TypeAdapter(InsidePath)


class ObjectChanged(Exception):
    """An object, which it names, is no longer the one that was listed: list again."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object; `name` is its key below the URL's prefix, `etag` identifies its contents.

    `digest`, where one is known, is ("md5" | "sha256" | "git", hexadecimal digits) of the contents; "git" hashes them
    as git hashes a blob.
    """

    key: str
    name: str
    nbytes: int
    etag: str
    digest: tuple[str, str] | None = None


class RemoteFolder(Protocol):
    """The objects below one URL. `prefix` is the key that the URL names, of an object or of what lies below it."""

    url: str
    prefix: str

    def objects(self) -> list[RemoteObject]:
        """List the objects. Raises StoreError."""

    def read_range(self, remote: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes `start` to `stop` of an object. Raises ObjectChanged and StoreError."""


def is_inside(name: str) -> bool:
    """Return whether a name is a path, in its shortest form, below the folder that it is relative to."""
    try:
        return PurePosixPath(_NAME.validate_python(name)).as_posix() == name != "."
    except ValidationError:
        return False
