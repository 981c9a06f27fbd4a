"""The start of a private Ray's processes: as copies of templates, or the way Ray has, which takes longer.

The only importer of the package `templates`, which is optional: with `ray.templates: false`, on another system, with
another Ray, or in a tree without that folder, nothing changes but seconds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

_logger = logging.getLogger("atelier")

BASE: Final = "ray"  # the template of processes that name none


@dataclass(frozen=True, slots=True)
class Template:
    """A template: its name, the modules that it imports, what it adds to the environment, and those that build on it.

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


@contextlib.contextmanager
def quick_starts(template: Template) -> Iterator[None]:
    """Let a Ray that starts in the block start its processes as copies of a template and of those that build on it.

    They begin to import at once. Where they cannot run, a line says why.
    """
    try:
        from cluster.ray_seam.templates.starting import workers_by_templates
    except ImportError as error:
        say_ordinary(str(error))
        yield
        return
    with workers_by_templates(template):
        yield


def template_environment(name: str) -> dict[str, str]:
    """Return the environment of actors that are to be copies of that template; empty when none runs."""
    with contextlib.suppress(ImportError):
        from cluster.ray_seam.templates import starting

        return starting.template_environment(name)
    return {}


def template_stats() -> tuple[list[TemplateStats], list[str]] | None:
    """Return the templates of this process's node, by name, and why processes are no copies, each reason once.

    None where there are no templates.
    """
    with contextlib.suppress(ImportError):
        from cluster.ray_seam.templates.process_files import count_copies, template_problems

        if (found := count_copies()) is not None:
            return found, template_problems()
    return None


def say_ordinary(reason: str) -> None:
    """Warn that there are no templates, and why."""
    _logger.warning(
        f"each of Ray's processes imports everything itself, which is slower than from a template: {reason}"
    )
