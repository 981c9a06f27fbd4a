"""A checkpoint's source -> a local path: paths as they are, URLs through a mirror on local disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from weights.sources.mirrors import mirror_folder
from weights.sources.object_storage import OnProgress, mirrored


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A folder or file on local disk. Of a mirror: the URL, and by name which objects its files are."""

    path: Path
    url: str = ""
    etags: Mapping[str, str] | None = None


def is_url(source: str | Path) -> bool:
    return isinstance(source, str) and "://" in source


@contextlib.contextmanager
def localized(
    source: str | Path | LocalSource,
    sources: Path,
    *,
    options: Mapping[str, str] = MappingProxyType({}),
    progress: OnProgress | None = None,
) -> Iterator[LocalSource]:
    """Have `source` on local disk within the block. URLs are mirrored into `sources`/<bucket>/<prefix>, see `mirrored`.

    Any number of processes may ask for one URL at once: one downloads, the others find everything done. What is local
    already stays as it is. Raises StoreError or FormatError.
    """
    if isinstance(source, LocalSource):
        yield source
        return
    if not is_url(source):
        yield LocalSource(Path(source))
        return
    url = str(source)
    with mirrored(url, mirror_folder(sources, url), options=options, progress=progress) as report:
        yield LocalSource(report.path, url, report.etags)
