"""The start of a private Ray's processes: as copies of templates, or the way Ray has, which takes longer.

The only importer of the package `templates`, which is optional: with `ray.templates: false`, on another system, with
another Ray, or in a tree without that folder, nothing changes but seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cluster.ray_seam.template_records import Template, TemplateStats, say_ordinary


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
