"""Marks of how a checkpoint looked when it was read, so that it need not be read again while it looks the same.

Names, sizes and modification times do not tell: images are built with SOURCE_DATE_EPOCH and archives with `--mtime`,
and then a retrained model has those of the one before. So a mark has where each file is, its inode and change time, and
a hash of its header and of samples of its data: a bounded number of bytes, however large the file is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weights.formats.folder import Roots, check_inside, files_below
from weights.formats.gguf import gguf_set
from weights.formats.source import SKELETON_SUFFIXES
from weights.records.errors import FormatError

HEAD_BYTES: Final = 256 * 2**10  # the header of a weight file, or all of a config
NUM_SAMPLES: Final = 8
SAMPLE_BYTES: Final = 4096
_WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".gguf", ".bin", ".pt", ".pth"})

Etags = Mapping[str, str] | None


def source_mark(source: Path, settings: Mapping[str, str | None], *, roots: Roots = None, etags: Etags = None) -> str:
    """Return a mark that changes with any file of the checkpoint at `source` and with the settings.

    Of a mirror of object storage, `etags` (by name) say which objects its files are: a copy that was fetched again has
    another inode and other times, and is the same. Raises FormatError for what cannot be read, SourceRefused for what
    lies outside of `roots`.
    """
    root = source if source.is_dir() else source.parent
    files = [root / file for file in files_below(source, roots)] if source.is_dir() else gguf_set(source)
    facts: dict[str, Any] = {}
    for file in files:
        if source.is_dir() and file.suffix not in SKELETON_SUFFIXES | _WEIGHT_SUFFIXES:
            continue
        check_inside(file, roots)
        name = file.relative_to(root).as_posix()
        facts[name] = _look(file, None if etags is None else etags.get(name, ""))
    return hashlib.sha256(json.dumps([facts, settings], sort_keys=True).encode()).hexdigest()[:32]


def _look(file: Path, etag: str | None) -> list[Any]:
    try:
        with file.open("rb", buffering=0) as opened:
            status = os.fstat(opened.fileno())
            sampled = _sampled(opened.fileno(), status.st_size)
        if etag is not None:
            return [etag, status.st_size, sampled]
        times = [status.st_mtime_ns, status.st_ctime_ns]
        return [os.path.realpath(file), status.st_dev, status.st_ino, status.st_size, *times, sampled]
    except OSError as error:
        raise FormatError(f"{file}: {error.strerror or error}") from error


def _sampled(descriptor: int, nbytes: int) -> str:
    """Hash the head and samples at even distances, the last one at the end."""
    digest = hashlib.sha256(os.pread(descriptor, HEAD_BYTES, 0))
    rest = nbytes - HEAD_BYTES
    for number in range(1, NUM_SAMPLES + 1 if rest > 0 else 1):
        place = HEAD_BYTES + max(0, rest - SAMPLE_BYTES) * number // NUM_SAMPLES
        digest.update(os.pread(descriptor, SAMPLE_BYTES, place))
    return digest.hexdigest()
