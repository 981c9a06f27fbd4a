"""The pipeline that a single file is like: it gives configs, tokenizers, and the components that the file lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weights.formats.checkpoint import read_pipeline_parts
from weights.formats.folder import check_inside
from weights.formats.source import BasePipeline, SourceComponent
from weights.operations.source_mark import source_mark
from weights.records.errors import FormatError
from weights.storage.store import WeightStore, stored_tensors


def open_base(like: Path | str, store: WeightStore | None, roots: Sequence[Path] | None = None) -> BasePipeline:
    """Return the pipeline that a config's `like` names: a folder, which must lie in `roots`, or a model of the store.

    Raises FormatError for what is no pipeline, SourceRefused, and StoreError for a model that the store does not have.
    """
    if isinstance(like, Path):
        check_inside(like, roots)
        if not (like / "model_index.json").is_file():
            raise FormatError(f"like: {like} is no pipeline's folder (no model_index.json)")
        return BasePipeline(str(like), like, source_mark(like, {}, roots=roots), read_pipeline_parts(like))
    if store is None:
        raise FormatError(f"like: {like!r} is a model's name, and there is no store to find it in; name its folder")
    manifest = store.manifest(like)
    if manifest.kind != "diffusion":
        raise FormatError(f"like: {like!r} is of kind {manifest.kind!r}, expected a diffusion pipeline")
    components = {
        part.name: SourceComponent(
            part.name,
            part.library,
            part.class_name,
            part.folder,
            dict(stored_tensors(store, manifest, part)),
            dict(part.metadata),
            part.files,
            part.format,
        )
        for part in manifest.components.values()
    }
    return BasePipeline(like, store.skeleton(manifest), manifest.fingerprint, components)
