"""Where packs are written before they move into the store, and what becomes of that folder.

The rule: `--weight-dir`, else `$ATELIER_WORK_PATH/tmp_weight_<pid>_<session>`, else `./tmp_weight_<pid>_<session>`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from weights.errors import StoreError
from weights.storage.durable import disk_errors, make_folder
from weights.storage.staging import claimed_folder, sweep
from weights.store import STAGED

WORK_PATH: Final = "ATELIER_WORK_PATH"
TEMPORARY: Final = "tmp_weight_*"
_SESSION: Final = re.compile(r"[A-Za-z0-9-]{1,64}")


def resolve_weight_dir(weight_dir: Path | None, environ: Mapping[str, str], cwd: Path, pid: int, session: str) -> Path:
    """The folder by the rule above, absolute if `cwd` is. Raises StoreError for a session that is no plain name."""
    if weight_dir is not None:
        return cwd / weight_dir
    if not _SESSION.fullmatch(session):
        raise StoreError(f"session {session!r}: expected letters, digits and '-', 64 at most")
    return cwd / environ.get(WORK_PATH, "") / TEMPORARY.replace("*", f"{pid}_{session}")


@contextlib.contextmanager
def opened_weight_dir(
    weight_dir: Path | None, environ: Mapping[str, str], cwd: Path, pid: int, session: str
) -> Iterator[Path]:
    """Create the folder that `resolve_weight_dir` names, to be given to `externalize`.

    A temporary one is removed at the end, and those beside it whose process died are removed at the start. A given
    one stays: only what dead writers staged in it is removed. Raises StoreError when it cannot be created.
    """
    path = resolve_weight_dir(weight_dir, environ, cwd, pid, session)
    if weight_dir is not None:
        with disk_errors(path, 0):
            make_folder(path)
            sweep(path, STAGED)
        yield path
        return
    with disk_errors(path, 0):
        sweep(path.parent, TEMPORARY)
    with contextlib.ExitStack() as stack:
        with disk_errors(path, 0):
            stack.enter_context(claimed_folder(path))
        yield path
