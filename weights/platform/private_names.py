"""The check that a library still has the private names that a seam uses: it reads the library, and calls nothing of it.

A seam is the one module that uses private names of a library: `cluster/ray_seam` those of Ray,
`weights/platform/torch_seam.py` those of torch, `deployments/engines/libraries/library_seam.py` those of the libraries
that engines run. Each lists its names as shims, and `atelier doctor` prints what is missing.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Shim:
    """The names of a library that one purpose needs. A name is `module:attribute` or `module:Class.attribute`.

    `changed` are names that we assign or override, each with the module whose functions must read it: one that nothing
    reads can be assigned without an error, and without an effect. `used` are private names that we read. `public` are
    names of the library's documented interface, with the module that must read them. `sources` are functions that we
    have code in place of, with the digest of their source (`source_digest`). `otherwise` says what happens where the
    library lacks something; with `is_needed`, nothing is served.
    """

    purpose: str
    otherwise: str
    changed: Mapping[str, str] = field(default_factory=dict)
    used: tuple[str, ...] = ()
    public: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    is_needed: bool = True

    @property
    def private(self) -> tuple[str, ...]:
        """The private names, which a release may take away without a word."""
        return *self.changed, *self.used


def problems(shim: Shim) -> list[str]:
    """Return the shim's names that the installed library lacks, and the sources that have changed."""
    read = {**shim.changed, **shim.public}
    names = (*read, *shim.used, *shim.sources)
    missing = [name for name in names if not _exists(name)]
    unread = [
        f"{name} has no effect: {reader} does not read it"
        for name, reader in read.items()
        if name not in missing and name.rpartition(":")[2].rpartition(".")[2] not in _names_read_by(reader)
    ]
    other = [
        f"{name} is not the one that was replaced: its source has the digest {found}"
        for name, known in shim.sources.items()
        if name not in missing and (found := source_digest(_find_object(name))) != known
    ]
    return [f"{name} is missing" for name in missing] + unread + other


def source_digest(function: Any) -> str:
    """Return 16 hex digits that change with every letter of a function's or a class's source, "" when there is none."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


def _find_object(name: str) -> Any:
    """Return the object or module of a name; None if there is none."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in filter(None, path.split(".")):
        found = getattr(found, part, None)
    return found


def _exists(name: str) -> bool:
    """Return whether the module has the attribute, or its class has one that only instances have."""
    module, _, path = name.partition(":")
    parents, _, attribute = path.rpartition(".")
    owner = _find_object(f"{module}:{parents}")
    if owner is None or hasattr(owner, attribute):
        return owner is not None
    return isinstance(owner, type) and any(attribute in _names_in(vars(base).values()) for base in owner.__mro__)


@cache
def _names_read_by(module: str) -> frozenset[str]:
    """Return the globals and attributes that the functions and methods of a module read."""
    values = vars(_find_object(module) or object).values()
    return frozenset(_names_in(value for value in values if getattr(_unwrapped(value), "__module__", None) == module))


def _unwrapped(value: Any) -> Any:
    """Return the class of a Ray actor, the function of a remote one, else the value."""
    metadata = getattr(value, "__ray_metadata__", None)
    return getattr(metadata, "modified_class", value)


def _names_in(values: Iterable[Any]) -> Iterator[str]:
    for value in map(_unwrapped, values):
        if isinstance(value, type):
            yield from _names_in(vars(value).values())
        for part in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "__wrapped__"))):
            if isinstance(code := getattr(part, "__code__", None), types.CodeType):
                yield from _names_of(code)


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)
