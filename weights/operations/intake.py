"""The entry for everything that can be brought into a store, and for writing it back.

Programs need torch or onnx, so those rooms are opened only when a program comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from weights.formats.folder import check_inside
from weights.formats.source import BasePipeline
from weights.operations.externalize import Origin, externalize
from weights.operations.layouts import write_inline
from weights.records.errors import StoreError, WeightsError
from weights.records.manifest import Layout, Manifest
from weights.sources.mirrors import SOURCES_FOLDER
from weights.sources.object_storage import LocalSource, OnProgress, localized
from weights.storage.store import WeightStore

PROGRAM_SUFFIXES: Final = (".pt2", ".onnx")


def import_model(
    store: WeightStore,
    model: str,
    source: str | Path | LocalSource,
    *,
    component: str | None = None,
    dtype: str = "auto",
    layout: Layout = "combined",
    weight_dir: Path | None = None,
    allow_torch: bool = False,
    like: BasePipeline | None = None,
    parts: Mapping[str, Path] = MappingProxyType({}),
    options: Mapping[str, str] = MappingProxyType({}),
    roots: Sequence[Path] | None = None,
    progress: OnProgress | None = None,
) -> Manifest:
    """Import a checkpoint, a program (.pt2, .onnx) or a URL of either as `model`.

    Parameters are those of `externalize`; `options` are for downloads (see `localized`, which may have been called
    before). `roots`: the folders that a local source must lie in, with all that it leads to; None trusts it. `progress`
    gets the bytes of the download, then, from zero again, of reading and hashing. Raises FormatError and StoreError,
    SourceRefused, and WeightsError for options that a program does not have.
    """
    with localized(source, store.path / SOURCES_FOLDER, options=options, progress=progress) as local:
        origin = origin_of(local, roots)
        if local.path.suffix in PROGRAM_SUFFIXES:
            if component is not None or dtype != "auto" or like is not None or parts:
                raise WeightsError(
                    f"{local.path}: a program has no components to choose, no dtype to cast to, and is like no pipeline"
                )
            check_inside(local.path, origin.roots)
            return _import_program(store, model, local.path, layout, allow_torch)
        return externalize(
            store,
            model,
            local.path,
            component=component,
            dtype=dtype,
            layout=layout,
            weight_dir=weight_dir,
            allow_torch=allow_torch,
            like=like,
            parts=parts,
            origin=origin,
            progress=progress,
        )


def origin_of(local: LocalSource, roots: Sequence[Path] | None) -> Origin:
    """Return the origin of a local source. A mirror lies in no root: its files came by name, as plain files."""
    return Origin(None if local.url or roots is None else tuple(roots), local.url, local.etags)


def _import_program(store: WeightStore, model: str, path: Path, layout: Layout, allow_torch: bool) -> Manifest:
    if path.suffix == ".onnx":
        from weights.programs.onnx_models import externalize_onnx

        return externalize_onnx(store, model, path, layout=layout)
    from weights.programs.exported import externalize_program

    return externalize_program(store, model, path, layout=layout, allow_torch=allow_torch)


def write_back(
    store: WeightStore, model: str, target: Path, *, external: bool = False, progress: OnProgress | None = None
) -> None:
    """Write `model` as stock libraries read it: a checkpoint folder, or for a program the file `target`.

    `external` leaves an ONNX model's weights in a file beside it. `progress` gets the bytes of a checkpoint
    that are written. Raises StoreError when `target` exists already.
    """
    manifest = store.manifest(model)
    formats = {component.format for component in manifest.components.values()}
    if manifest.kind != "program":
        if external:
            raise WeightsError(f"{model}: only an ONNX model is written with external data, this is {manifest.kind!r}")
        write_inline(store, model, target, progress)
        return
    if target.exists():
        raise StoreError(f"{target}: exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    if "onnx" in formats:
        from weights.programs.onnx_models import write_onnx

        write_onnx(store, model, target, external=external)
        return
    from weights.programs.exported import load_program, self_contained

    self_contained(load_program(store, model), target)
