"""The files of a checkpoint's folder, found within bounds and inside the allowed roots.

Symlinks are followed, as model hubs' caches consist of them: `snapshots/<revision>/model.safetensors` leads to
`blobs/<hash>` beside `snapshots`. Hidden files and folders belong to nobody's checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from weights.errors import FormatError, SourceRefused

MAX_DEPTH: Final = 6  # a pipeline has two levels
MAX_ENTRIES: Final = 20_000  # the largest checkpoints have some hundred files
_MAX_SHOWN_ROOTS: Final = 8

Roots = Sequence[Path] | None


def check_inside(path: Path, roots: Roots) -> None:
    """Raise SourceRefused, naming the roots, unless `path` with symlinks resolved lies in one; None: anywhere.

    HAZARD: who may change the folder meanwhile may put something else there; what is read is told from what was
    checked by its mark (`weights/source_mark.py`).
    """
    if roots is None:
        return
    try:
        real = Path(os.path.realpath(path, strict=True))
    except (OSError, ValueError) as error:  # not there, a circle of symlinks, no permission, no path at all
        real, reason = None, getattr(error, "strerror", None) or str(error)
    if real is not None and any(real.is_relative_to(root) for root in roots):
        return
    # Nothing is said of what is outside of the roots, not even whether it is there.
    if real is None and any(Path(os.path.normpath(path)).is_relative_to(root) for root in roots):
        raise FormatError(f"{path}: {reason}")
    shown = ", ".join(map(str, roots[:_MAX_SHOWN_ROOTS])) + (", …" if len(roots) > _MAX_SHOWN_ROOTS else "")
    raise SourceRefused(f"{path}: outside of the folders that models may come from (model_roots: {shown or 'none'})")


def files_below(folder: Path, roots: Roots = None) -> list[Path]:
    """List the files of a folder, relative to it and sorted, each inside of `roots`.

    Raises SourceRefused for one that is not, FormatError for a folder that is too deep or too large to be a checkpoint.
    """
    return sorted(_walk(folder, roots))


def _walk(folder: Path, roots: Roots) -> Iterator[Path]:
    waiting = [(folder, 0)]
    num_entries = 0
    while waiting:
        current, depth = waiting.pop()
        check_inside(current, roots)
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    num_entries += 1
                    if num_entries > MAX_ENTRIES:
                        raise FormatError(f"{folder}: more than {MAX_ENTRIES} files, expected those of one checkpoint")
                    if entry.name.startswith("."):
                        continue
                    path = Path(entry.path)
                    if entry.is_dir():
                        if depth == MAX_DEPTH:
                            raise FormatError(f"{path}: more than {MAX_DEPTH} folders deep, expected one checkpoint")
                        waiting.append((path, depth + 1))
                    elif entry.is_file():
                        if entry.is_symlink():
                            check_inside(path, roots)
                        yield path.relative_to(folder)
        except OSError as error:
            raise FormatError(f"{error.filename or current}: {error.strerror or error}") from error
