"""Errors of the configuration.

ConfigError
└── ConfigFileError    one file could not be used; carries every problem found, each with its line
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_MAX_SHOWN: Final = 400  # characters


def shown(value: Any) -> str:
    """Return a value for a message, in a few words however much it holds: aliases of YAML can multiply."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = _MAX_SHOWN // 2
    text = brief.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class ConfigError(Exception):
    """A configuration that cannot be used."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in a file: where (`line` counts from 1, `key` is the dotted path) and what."""

    line: int | None
    key: str
    text: str


class ConfigFileError(ConfigError):
    """A YAML file that does not describe a cluster. `str()` gives one line per problem: file:line: key: text."""

    def __init__(self, path: Path, problems: Sequence[Problem]) -> None:
        super().__init__(path, problems)
        self.path = path
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(self._line(problem) for problem in self.problems)

    def _line(self, problem: Problem) -> str:
        where = f"{self.path}:{problem.line}" if problem.line else str(self.path)
        return f"{where}: {problem.key}: {problem.text}" if problem.key else f"{where}: {problem.text}"
