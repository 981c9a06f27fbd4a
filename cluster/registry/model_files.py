"""The files of a model that are no weights (configs, tokenizers, templates), for nodes without the store's folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cluster.records.errors import WeightsUnavailable
from weights.records.manifest import Manifest

MAX_BYTES: Final = 2**28  # of one model: the largest tokenizers have 35 MB


def read_files(models: Path, manifest: Manifest) -> dict[str, bytes]:
    """Return the files by their paths within the model's folder. `models` is the store's folder of them.

    Raises WeightsUnavailable when the folder is not there, or too large to send.
    """
    folder = models / manifest.skeleton
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    if not found:
        raise WeightsUnavailable(f"model {manifest.model!r} has lost its configs: {folder} is not there")
    nbytes = sum(path.stat().st_size for path in found)
    if nbytes > MAX_BYTES:
        raise WeightsUnavailable(
            f"{folder} has {nbytes} bytes, more than the {MAX_BYTES} that are sent to nodes without it"
        )
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def write_files(models: Path, manifest: Manifest, files: Mapping[str, bytes]) -> None:
    """Put the files where a node with the store has them, all or none. Others may do the same at that time.

    Raises OSError, and ValueError for a path that leads out of the folder.
    """
    target = models / manifest.skeleton
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=".files-", dir=target.parent))
    try:
        for name, data in files.items():
            path = staged / name
            if not path.resolve().is_relative_to(staged.resolve()):
                raise ValueError(f"{name!r} is no path within the files of model {manifest.model!r}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        staged.chmod(0o755)
        try:
            staged.rename(target)
        except OSError:
            if not target.is_dir():  # no other process was first
                raise
    finally:
        shutil.rmtree(staged, ignore_errors=True)
