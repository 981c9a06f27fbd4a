"""A checkpoint's source -> a local path: paths as they are, URLs through a mirror on local disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from weights.sources.bucket import split_url
from weights.sources.object_storage import OnProgress, mirror


def localize(
    source: str | Path,
    cache: Path,
    *,
    options: Mapping[str, str] = MappingProxyType({}),
    progress: OnProgress | None = None,
) -> Path:
    """The folder or file that holds `source`. URLs are mirrored into `cache`/<bucket>/<prefix>, see `mirror`.

    Any number of processes may ask for one URL at once: one downloads, the others find everything done.
    Raises StoreError or FormatError.
    """
    if isinstance(source, Path) or "://" not in source:
        return Path(source)
    bucket, prefix = split_url(source)
    # One folder per prefix, never one in another: s3://b/a and s3://b/a/x are two mirrors with two locks.
    target = cache / bucket / (quote(prefix, safe="") or "@")
    return mirror(source, target, options=options, progress=progress).path
