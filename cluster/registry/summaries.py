"""What the directory keeps of a model that is in the store, so that nobody opens its manifest until it is used.

A manifest of 1,000 tensors takes 50 ms to read, and a store may have ten thousand models. So a summary is kept on disk
beside the store, too: <store>/summaries/<id>.json. It counts only for the very manifest file that it was made of.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from configs.model import StrictModel
from weights.feature_sizes import FeatureSizes, feature_sizes
from weights.manifest import Manifest, ModelKind
from weights.store import WeightStore

FOLDER: Final = "summaries"  # in the store


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One version of a model: `extents` are the ids of all that its bytes are in; `class_name` "" where none is."""

    kind: ModelKind
    nbytes: int
    fingerprint: str
    extents: tuple[str, ...]
    features: FeatureSizes
    class_name: str


def summarize(manifest: Manifest, skeleton: Path) -> ModelSummary:
    return ModelSummary(
        manifest.kind,
        manifest.nbytes,
        manifest.fingerprint,
        tuple(manifest.extents),
        feature_sizes(manifest, skeleton),
        manifest.class_name or "",
    )


class _SummaryFile(StrictModel):
    """`source_mark` says how the checkpoint looked, see `weights/source_mark.py`. `manifest` identifies the file:
    modification time (ns), size, inode. `packs`: the bytes needed of each."""

    source_mark: str
    manifest: tuple[int, int, int]
    packs: dict[str, int]
    skeleton: str
    summary: ModelSummary


class SummaryFiles:
    """The files of one store. They save time only: whatever is wrong with one, it is not there."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._folder = store.path / FOLDER

    def find(self, model: str, source_mark: str) -> ModelSummary | None:
        """Of a checkpoint that looks so, when the store still has all of it. Looks at few files, reads a small one."""
        try:
            found = _SummaryFile.model_validate_json(self._file(model).read_bytes())
            is_current = (found.source_mark, found.manifest) == (source_mark, self._manifest_mark(model))
            is_whole = (self._store.models / found.skeleton).is_dir() and all(
                (self._store.packs / pack).stat().st_size >= nbytes for pack, nbytes in found.packs.items()
            )
        except (OSError, ValidationError):
            return None
        return found.summary if is_current and is_whole else None

    def save(self, model: str, manifest: Manifest, summary: ModelSummary) -> None:
        """Call it when `manifest` is what the store has now. A full disk is no error."""
        packs: dict[str, int] = {}
        for extent in manifest.extents.values():
            packs[extent.pack] = max(packs.get(extent.pack, 0), extent.offset + extent.nbytes)
        staged = self._file(model).with_name(f".{model}.{os.getpid()}")
        with contextlib.suppress(OSError):
            mark = self._manifest_mark(model)
            self._folder.mkdir(exist_ok=True)
            file = _SummaryFile(
                source_mark=manifest.source_mark,
                manifest=mark,
                packs=packs,
                skeleton=manifest.skeleton,
                summary=summary,
            )
            staged.write_text(file.model_dump_json(), encoding="utf-8")
            staged.replace(self._file(model))

    def remove(self, model: str) -> None:
        """Without one, nothing happens."""
        with contextlib.suppress(OSError):
            self._file(model).unlink()

    def _manifest_mark(self, model: str) -> tuple[int, int, int]:
        found = (self._store.models / model / "manifest.json").stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _file(self, model: str) -> Path:
        return self._folder / f"{model}.json"
