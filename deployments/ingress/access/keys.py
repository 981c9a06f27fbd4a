"""API keys: how they are made, and the store that knows them by their hashes.

A key is 256 random bits, so its plain SHA-256 is all that a thief of the file gets: guessing a key takes 2^255 tries
whatever one try costs. A slow hash such as scrypt defends words that people choose; here it would only cost every
request tens of milliseconds.

A store is a text with one JSON object per line; lines that are empty or begin with # are skipped. One broken line is a
problem of its own, and the others hold.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from configs.access import MaxConcurrent, MaxPriority, RequestRate
from configs.errors import Problem
from configs.model import ModelId

_PREFIX: Final = "atl_"  # so that a leaked key is found by programs that look for secrets
_KEY_BYTES: Final = 32
_MAX_KEY_CHARS: Final = 256  # of what a caller shows: longer is no key, and is not hashed

Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")]


class KeyEntry(BaseModel):
    """A line of the keys file. None is for the limits of the cluster's config."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ModelId
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    admin: bool = False
    tenant: Tenant | None = Field(None, description="whose share its requests take; default: its own, by its name")
    requests_per_s: RequestRate | None = None
    max_concurrent: MaxConcurrent | None = None
    max_priority: MaxPriority | None = Field(None, description="the most urgent one that its requests may have")
    created: str | None = Field(None, description="for people; nothing depends on it")

    @property
    def share(self) -> str:
        """The tenant whose share of the cluster the key's requests take."""
        return self.tenant or self.name


@dataclass(frozen=True, slots=True)
class KeyStore:
    """The keys that hold, by hash, and what is wrong with the other lines."""

    entries: dict[str, KeyEntry]
    problems: tuple[Problem, ...] = ()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a store. No problem quotes its line: somebody may have written a key where its hash belongs."""
        entries: dict[str, KeyEntry] = {}
        lines_by_name: dict[str, int] = {}
        problems = []
        for number, line in enumerate(data.split(b"\n"), start=1):
            text = line.strip()
            if not text or text.startswith(b"#"):
                continue
            try:
                entry = KeyEntry.model_validate_json(text)
            except ValidationError as error:
                first = error.errors(include_input=False)[0]
                problems.append(Problem(number, ".".join(map(str, first["loc"])), first["msg"]))
                continue
            twice = entries.get(entry.sha256)
            if entry.name in lines_by_name:
                problems.append(
                    Problem(number, "name", f"{entry.name!r} is on line {lines_by_name[entry.name]} already")
                )
            elif twice:
                problems.append(Problem(number, "sha256", f"the same key as {twice.name!r}"))
            else:
                entries[entry.sha256] = entry
                lines_by_name[entry.name] = number
        return cls(entries, tuple(problems))

    def find(self, key: str) -> KeyEntry | None:
        """Return the entry of a key, None for one that does not hold.

        Takes the same time however near a wrong key is: it meets the store only as its hash, which a caller can neither
        choose nor approach, and the table is searched by a hash with a seed of this process (SipHash of Python).
        """
        if len(key) > _MAX_KEY_CHARS:
            return None
        return self.entries.get(hash_of(key))


def new_key() -> str:
    """Return a new random key."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_of(key: str) -> str:
    """Return what the file keeps of a key: its SHA-256 in hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
