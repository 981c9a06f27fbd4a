"""What a template of processes is, and what is said where there is none."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

_logger = logging.getLogger("atelier")


BASE: Final = "ray"  # the template of processes that name none


@dataclass(frozen=True, slots=True)
class Template:
    """A template: its name, imports, extra environment, and child templates.

    An import `module:name` takes that name from the module as well. A template without a name makes no workers.
    """

    name: str
    imports: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    further: Sequence[Template] = ()

    def names(self) -> list[str]:
        """Return the names of this one and of all that build on it."""
        return [self.name] * bool(self.name) + [name for one in self.further for name in one.names()]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return what `dataclasses.asdict` was given."""
        further = [cls.of(one) for one in values["further"]]
        return cls(values["name"], values["imports"], values["environment"], further)


@dataclass(frozen=True, slots=True)
class TemplateStats:
    """A template and its copies that run. It `is_ready` when it has done its imports and can be copied."""

    name: str
    is_ready: bool
    num_copies: int


def say_ordinary(reason: str) -> None:
    """Warn that there are no templates, and why."""
    _logger.warning(
        f"each of Ray's processes imports everything itself, which is slower than from a template: {reason}"
    )
