"""Bring a checkpoint into the store as a model, in one of three layouts; equal tensors are stored once.

Reading and hashing happen without the store's lock, so that any number of processes do it at once; what the store
lacks is written under it, and only then (weights/storage/publishing.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from weights.dtypes import cast_target
from weights.errors import FormatError, StoreVersionError, WeightsError
from weights.formats.checkpoint import Checkpoint, SourceComponent, read_checkpoint, recognise
from weights.formats.encoder_files import has_parts, parts_hash
from weights.formats.folder import check_inside
from weights.manifest import Component, Layout, Manifest
from weights.source_mark import source_mark
from weights.storage.hashing import HashedTensor, Progress, hash_tensors
from weights.storage.publishing import Draft, DraftComponent, publish_draft
from weights.storage.stock import as_safetensors
from weights.store import WeightStore, check_model_name

__all__ = ["Origin", "externalize"]


def externalize(
    store: WeightStore,
    model: str,
    source: Path,
    *,
    component: str | None = None,
    dtype: str = "auto",
    layout: Layout = "combined",
    weight_dir: Path | None = None,
    allow_torch: bool = False,
    origin: Origin | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Bring the checkpoint at `source` into the store as `model`, or return what is there when it is unchanged.

    `layout` says where tensors go that the store does not have yet; what it has stays where it is. `inline` keeps
    the model's own files: nothing in them is shared on disk. Packs are written in `weight_dir` before they move into
    the store. `progress` hears of the bytes that are read and hashed. A source that looks changed is read again; if its
    bytes are those of before, nothing but the manifest is written and the version stays. Raises FormatError (names file
    and tensor), SourceRefused, AdapterError and StoreError, and leaves the store as it was.
    """
    check_model_name(model)
    origin = origin or Origin()
    check_inside(source, origin.roots)
    recognise(source)
    settings = {"component": component, "dtype": dtype}

    def look() -> str:
        return source_mark(source, settings, roots=origin.roots, etags=origin.etags)

    def recheck() -> Manifest | None:
        if look() != mark:
            raise FormatError(f"{source}: a file of it changed while it was read")
        return _find_current(store, model, mark, layout)

    mark = look()
    if manifest := _find_current(store, model, mark, layout):
        return manifest
    checkpoint = read_checkpoint(source, component=component, allow_torch=allow_torch)
    hashed = hash_tensors({part.name: part.tensors for part in checkpoint.components}, dtype, progress)
    root = source if source.is_dir() else source.parent
    try:
        components = [_draft(checkpoint, root, part, hashed[part.name], dtype) for part in checkpoint.components]
        version = _version(checkpoint, components)
        draft = Draft(
            model=model,
            kind=checkpoint.kind,
            class_name=checkpoint.class_name,
            source=origin.url or str(checkpoint.path),
            fingerprint=version,
            source_mark=mark,
            skeleton=f"{model}/skeleton-{version}",
            components=components,
            write_skeleton=lambda target: _copy_skeleton(checkpoint, target),
            recheck=recheck,
        )
        return publish_draft(store, draft, layout, weight_dir)
    except ValidationError as error:  # names or shapes that a manifest cannot have
        first = error.errors()[0]
        raise FormatError(f"{source}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _find_current(store: WeightStore, model: str, mark: str, layout: Layout) -> Manifest | None:
    """Return the manifest of a model that is whole in the store and whose source looked so.

    Raises StoreVersionError.
    """
    try:
        manifest = store.manifest(model)
    except StoreVersionError:
        raise
    except WeightsError:  # not there, or damaged: to be written
        return None
    is_current = (manifest.source_mark, manifest.layout) == (mark, layout)
    is_whole = store.has_packs(manifest) and store.skeleton(manifest).is_dir()
    return manifest if is_current and is_whole else None


@dataclass(frozen=True, slots=True)
class Origin:
    """The place a source comes from. `roots`: folders its files must lie in, after symlinks; None trusts them all.

    `url` and `etags` (by file name): of object storage, where it is a mirror of that.
    """

    roots: tuple[Path, ...] | None = None
    url: str = ""
    etags: Mapping[str, str] | None = None


def _version(checkpoint: Checkpoint, components: Sequence[DraftComponent]) -> str:
    """Return the identity of a manifest and its skeleton: equal contents are one version, whatever their dates."""
    skeleton = {str(file): _hash_file(checkpoint.path / file) for file in checkpoint.skeleton_files()}
    skeleton |= {name: hashlib.sha256(data).hexdigest() for name, data in checkpoint.headers.items()}
    parts = [
        (
            component.record.model_dump(mode="json", exclude={"tensors"}),
            [(name, tensor.dtype, tensor.shape, tensor.sha256) for name, tensor in component.tensors.items()],
        )
        for component in components
    ]
    facts = (checkpoint.kind, checkpoint.class_name, skeleton, parts)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _draft(
    checkpoint: Checkpoint, root: Path, part: SourceComponent, tensors: dict[str, HashedTensor], dtype: str
) -> DraftComponent:
    is_encoder = has_parts(checkpoint.kind, part.library)
    record = Component(
        name=part.name,
        library=part.library,
        class_name=part.class_name,
        folder=part.folder,
        tensors={},
        config_hash=_hash_headers(checkpoint.headers) or _hash_file(root / part.folder / "config.json"),
        parts_hash=parts_hash(root, part.folder, checkpoint.skeleton_files()) if is_encoder else "",
        metadata=part.metadata,
        format=part.format,
        files=part.files,
    )
    is_cast = any(cast_target(tensor.dtype, dtype) != tensor.dtype for tensor in part.tensors.values())
    if is_cast and record.format != "safetensors":  # the header of such a file would contradict its tensors
        record = as_safetensors(record)
    return DraftComponent(record, tensors, root)


def _hash_headers(headers: Mapping[str, bytes]) -> str:
    """Hash what GGUF and Kuiper files say of the model beside its tensors; "" for other formats."""
    return hashlib.sha256(b"".join(headers.values())).hexdigest() if headers else ""


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _copy_skeleton(checkpoint: Checkpoint, target: Path) -> None:
    target.mkdir()
    for file in checkpoint.skeleton_files():
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.path / file, target / file)
    for name, data in checkpoint.headers.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)
