"""Bring a checkpoint into the store as a model, in one of three layouts; equal tensors are stored once.

Reading and hashing happen without the store's lock, so that any number of processes do it at once; what the store
lacks is written under it, and only then (weights/storage/publishing.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final

from pydantic import ValidationError

from weights.formats.checkpoint import read_checkpoint, recognise
from weights.formats.encoder_files import has_parts, parts_hash
from weights.formats.folder import check_inside
from weights.formats.language_models import CLASS_NAMES
from weights.formats.published_quantization import ComputedTensor
from weights.formats.source import BasePipeline, Checkpoint, SourceComponent
from weights.operations.source_mark import source_mark
from weights.records.dtypes import auto_without, cast_target, config_name, types_without
from weights.records.errors import FormatError
from weights.records.manifest import Component, Layout, Manifest, ModelKind
from weights.storage.hashing import HashedTensor, Progress, hash_tensors
from weights.storage.publishing import Draft, DraftComponent, publish_draft
from weights.storage.stock import as_safetensors
from weights.storage.store import WeightStore, check_model_name

__all__ = ["Origin", "cast_types", "externalize", "mark_settings", "unpacked_bytes", "unpacked_types"]

_UNPACKED: Final = "unpacked"  # in the place of a type: of quantized weights that are stored as plain ones


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
    like: BasePipeline | None = None,
    parts: Mapping[str, Path] = MappingProxyType({}),
    origin: Origin | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Bring the checkpoint at `source` into the store as `model`, or return what is there when it is unchanged.

    `dtype` is a name of the config's, or one of `auto_without`. `layout` says where tensors go that the store does not
    have yet; what it has stays where it is. `inline` keeps the model's own files: nothing in them is shared on disk.
    `like` is the pipeline that a single file is of, `parts` what it gets beside or in the place of its own. Packs
    are written in `weight_dir` before they move into the store.
    `progress` gets the bytes that are read and hashed. A source that looks changed is read again; if its bytes are
    those of before, nothing but the manifest is written and the version stays. Raises FormatError (names file and
    tensor), SourceRefused, AdapterError and StoreError, and leaves the store as it was.
    """
    check_model_name(model)
    origin = origin or Origin()
    check_inside(source, origin.roots)
    recognise(source)
    settings = mark_settings(component, dtype, like, parts, origin.roots)

    def look() -> str:
        return source_mark(source, settings, roots=origin.roots, etags=origin.etags)

    def recheck() -> Manifest | None:
        if look() != mark:
            raise FormatError(f"{source}: a file of it changed while it was read")
        return _find_current(store, model, mark, layout)

    mark = look()
    if manifest := _find_current(store, model, mark, layout):
        return manifest
    checkpoint = read_checkpoint(source, component=component, allow_torch=allow_torch, like=like, parts=parts)
    dtypes = stored_dtypes(checkpoint, dtype)
    hashed = hash_tensors({part.name: part.tensors for part in checkpoint.components}, dtypes, progress)
    try:
        components = [_draft(checkpoint, part, hashed[part.name], dtypes[part.name]) for part in checkpoint.components]
        version = _version(checkpoint, components)
        draft = Draft(
            model=model,
            kind=checkpoint.kind,
            class_name=checkpoint.class_name,
            source=origin.url or str(checkpoint.path),
            fingerprint=version,
            source_mark=mark,
            base=like.model_or_folder if like is not None and checkpoint.kind == "controlnet" else "",
            skeleton=f"{model}/skeleton-{version}",
            components=components,
            write_skeleton=lambda target: _copy_skeleton(checkpoint, target),
            recheck=recheck,
        )
        return publish_draft(store, draft, layout, weight_dir)
    except ValidationError as error:  # names or shapes that a manifest cannot have
        first = error.errors()[0]
        raise FormatError(f"{source}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def mark_settings(
    component: str | None,
    dtype: str,
    like: BasePipeline | None,
    parts: Mapping[str, Path] = MappingProxyType({}),
    roots: Sequence[Path] | None = None,
) -> dict[str, str | None]:
    """Return the settings that the mark of a source counts in. Raises as `source_mark` does, of a part."""
    settings: dict[str, str | None] = {"component": component, "dtype": dtype}
    settings |= {"like": like.mark} if like else {}
    return settings | {name: source_mark(path, {}, roots=roots) for name, path in parts.items()}


def stored_dtypes(checkpoint: Checkpoint, wanted: str) -> dict[str, str]:
    """Return `wanted` as it holds for each component of a checkpoint.

    An `auto_without` leaves packed files and adapters as they are, and bfloat16 to language models, which have kernels
    of their own for it. Int8 matrices have scales in float32, so nothing of such a model is cast. What is not packed of
    a packed denoiser has one type, bfloat16 where the processor has it: its file has several.
    """
    packed = [part for part in checkpoint.components if _is_packed_denoiser(part)]
    others = [part for part in checkpoint.components if part not in packed]
    dtypes = dict.fromkeys((part.name for part in others), _dtype_of(checkpoint.kind, others, wanted))
    if wanted == "auto" or types_without(wanted):
        wanted = "float32" if "BF16" in types_without(wanted) else "bfloat16"
    return dtypes | dict.fromkeys((part.name for part in packed), wanted)


def _dtype_of(kind: ModelKind, parts: Sequence[SourceComponent], wanted: str) -> str:
    if _has(parts, "I8"):
        return "auto"
    types = types_without(wanted)
    # A pipeline in double precision would draw its noise so, and make another image. Stock loads it in single.
    if (wanted == "auto" or types) and kind in ("diffusion", "controlnet") and _has(parts, "F64"):
        types |= {"F64"}
    if (wanted == "auto" or types) and kind == "llm" and (named := _dtype_of_mixed(parts)):
        return "float32" if cast_target("F32", named) in types - {"BF16"} else named
    if not types:
        return wanted
    if kind in ("adapter", "tensors") or any(part.format not in ("safetensors", "torch") for part in parts):
        return "auto"
    return auto_without(types - {"BF16"} if kind == "llm" else types)


def _dtype_of_mixed(parts: Sequence[SourceComponent]) -> str:
    """Return the type of most of a decoder's bytes where its tensors have several, which it computes with as one; ""
    for any other model."""
    sizes: Counter[str] = Counter()
    for part in parts:
        if part.format in ("safetensors", "torch") and part.class_name in CLASS_NAMES.values():
            for tensor in part.tensors.values():
                sizes[config_name(tensor.dtype)] += tensor.nbytes
    del sizes[""]
    return sizes.most_common(1)[0][0] if len(sizes) > 1 else ""


def _has(parts: Sequence[SourceComponent], dtype: str) -> bool:
    return any(tensor.dtype == dtype for part in parts for tensor in part.tensors.values())


def _is_packed_denoiser(part: SourceComponent | Component) -> bool:
    return part.format == "gguf" and part.library == "diffusers"


def cast_types(checkpoint: Checkpoint, wanted: str) -> tuple[str, ...]:
    """Return the types of a checkpoint's tensors that are others in the store, but for a packed denoiser's."""
    dtypes = stored_dtypes(checkpoint, wanted)
    types = {
        (tensor.dtype, dtypes[part.name])
        for part in checkpoint.components
        if not _is_packed_denoiser(part)
        for tensor in part.tensors.values()
    }
    return tuple(sorted({name for name, dtype in types if cast_target(name, dtype) != name}))


def unpacked_types(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return A word and the bytes that come of them, where quantized tensors have no packed form here; else ()."""
    nbytes = sum(
        tensor.nbytes
        for part in checkpoint.components
        for name, tensor in part.tensors.items()
        if isinstance(tensor, ComputedTensor)
        and (_is_packed_denoiser(part) or (tensor.dtype != "I8" and name.endswith(".weight")))
    )
    return (f"{_UNPACKED} {nbytes}",) if nbytes else ()


def unpacked_bytes(widened: Sequence[str]) -> int:
    """Return the bytes that `unpacked_types` tells among others."""
    return sum(int(one.removeprefix(_UNPACKED)) for one in widened if one.startswith(_UNPACKED))


def _find_current(store: WeightStore, model: str, mark: str, layout: Layout) -> Manifest | None:
    """Return the manifest of a model that is whole in the store and whose source looked so.

    Raises StoreVersionError.
    """
    manifest = store.find_sound_manifest(model)  # a damaged one is to be written
    if manifest is None:
        return None
    is_current = (manifest.source_mark, manifest.layout) == (mark, layout)
    is_whole = store.pack_files.has_all(manifest) and store.skeleton(manifest).is_dir()
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
    skeleton = {str(file): _hash_file(checkpoint.root / file) for file in checkpoint.skeleton_files()}
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
    checkpoint: Checkpoint, part: SourceComponent, tensors: dict[str, HashedTensor], dtype: str
) -> DraftComponent:
    root = checkpoint.root
    is_encoder = has_parts(checkpoint.kind, part.library)
    record = Component(
        name=part.name,
        library=part.library,
        class_name=part.class_name,
        folder=part.folder,
        tensors={},
        config_hash=_hash_headers(checkpoint.headers, part.folder) or _hash_file(root / part.folder / "config.json"),
        parts_hash=parts_hash(root, part.folder, checkpoint.skeleton_files()) if is_encoder else "",
        metadata=part.metadata,
        format=part.format,
        files=part.files,
    )
    is_cast = any(cast_target(tensor.dtype, dtype) != tensor.dtype for tensor in part.tensors.values())
    # The header of such a file would contradict its tensors; a packed denoiser's is made of them.
    if is_cast and record.format != "safetensors" and not _is_packed_denoiser(part):
        record = as_safetensors(record)
    return DraftComponent(record, tensors, root)


def _hash_headers(headers: Mapping[str, bytes], folder: str) -> str:
    """Hash what GGUF and Kuiper files say of a component beside its tensors, or a config in place of its folder's own.

    "" where there is none.
    """
    own = [data for name, data in headers.items() if PurePosixPath(name).parent == PurePosixPath(folder)]
    return hashlib.sha256(b"".join(own)).hexdigest() if own else ""


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _copy_skeleton(checkpoint: Checkpoint, target: Path) -> None:
    target.mkdir()
    for file in checkpoint.skeleton_files():
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.root / file, target / file)
    for name, data in checkpoint.headers.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)
