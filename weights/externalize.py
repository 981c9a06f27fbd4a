"""A checkpoint -> a model of the store, in one of three layouts; equal tensors are stored once.

Reading and hashing happen without the store's lock, so that any number of processes do it at once; what the store
lacks is written under it, and only then (weights/storage/publishing.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from weights.dtypes import cast_target
from weights.errors import FormatError, StoreVersionError, WeightsError
from weights.formats.checkpoint import Checkpoint, SourceComponent, read_checkpoint
from weights.formats.encoder_files import has_parts, parts_hash
from weights.formats.gguf_model import gguf_set
from weights.manifest import Component, Layout, Manifest
from weights.storage.hashing import HashedTensor, Progress, hash_tensors
from weights.storage.publishing import Draft, DraftComponent, publish
from weights.storage.stock import as_safetensors
from weights.store import WeightStore, check_model_name


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
    progress: Progress | None = None,
) -> Manifest:
    """Bring the checkpoint at `source` into the store as `model`, or return what is there when it is unchanged.

    `layout` says where tensors go that the store does not have yet; what it has stays where it is. `inline` keeps
    the model's own files: nothing in them is shared on disk. Packs are written in `weight_dir` before they move into
    the store. `progress` hears of the bytes that are read and hashed. Raises FormatError (names file and tensor) and
    StoreError, and leaves the store as it was.
    """
    check_model_name(model)
    if not source.exists():
        raise FormatError(f"{source}: no such folder or file")
    settings = {"component": component, "dtype": dtype}
    mark = fingerprint(source, settings)

    def known() -> Manifest | None:
        try:
            manifest = store.manifest(model)
        except StoreVersionError:
            raise
        except WeightsError:  # not there, or damaged: to be written
            return None
        is_current = (manifest.fingerprint, manifest.layout) == (mark, layout)
        is_whole = store.has_packs(manifest) and store.skeleton(manifest).is_dir()
        return manifest if is_current and is_whole else None

    def recheck() -> Manifest | None:
        if fingerprint(source, settings) != mark:
            raise FormatError(f"{source}: a file of it changed while it was read")
        return known()

    manifest = known()
    if manifest:
        return manifest
    checkpoint = read_checkpoint(source, component=component, allow_torch=allow_torch)
    hashed = hash_tensors({part.name: part.tensors for part in checkpoint.components}, dtype, progress)
    root = source if source.is_dir() else source.parent
    try:
        components = [_draft(checkpoint, root, part, hashed[part.name], dtype) for part in checkpoint.components]
        draft = Draft(
            model=model,
            kind=checkpoint.kind,
            class_name=checkpoint.class_name,
            source=str(checkpoint.path),
            fingerprint=mark,
            skeleton=f"{model}/skeleton-{mark}",
            components=components,
            write_skeleton=lambda target: _copy_skeleton(checkpoint, target),
            recheck=recheck,
        )
        return publish(store, draft, layout, weight_dir)
    except ValidationError as error:  # names or shapes that a manifest cannot have
        first = error.errors()[0]
        raise FormatError(f"{source}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def fingerprint(source: Path, settings: Mapping[str, str | None]) -> str:
    """Changes when a file of the checkpoint does (names, sizes, modification times) or the settings do."""
    root = source if source.is_dir() else source.parent
    try:
        files = {
            str(file.relative_to(root)): (file.stat().st_size, file.stat().st_mtime_ns)
            for file in (sorted(source.rglob("*")) if source.is_dir() else gguf_set(source))
            if file.is_file()
        }
    except OSError as error:
        raise FormatError(f"{error.filename or source}: {error.strerror or error}") from error
    return hashlib.sha256(json.dumps([files, settings]).encode()).hexdigest()[:16]


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
    """Identity of what GGUF and Kuiper files say of the model beside its tensors; "" for other formats."""
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
