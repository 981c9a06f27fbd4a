"""One door for everything that can be brought into a store, and one for writing it back.

Programs need torch or onnx, so those rooms are opened only when a program comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from weights.errors import StoreError, WeightsError
from weights.externalize import externalize
from weights.layouts import write_inline
from weights.manifest import Layout, Manifest
from weights.sources.localize import localize
from weights.sources.object_storage import OnProgress
from weights.store import WeightStore

SOURCES_FOLDER = "sources"  # in the store: mirrors of object storage


def bring_in(
    store: WeightStore,
    model: str,
    source: str | Path,
    *,
    component: str | None = None,
    dtype: str = "auto",
    layout: Layout = "combined",
    weight_dir: Path | None = None,
    allow_torch: bool = False,
    options: Mapping[str, str] = MappingProxyType({}),
    progress: OnProgress | None = None,
) -> Manifest:
    """A checkpoint, a program (.pt2, .onnx) or a URL of either -> a model of the store.

    Parameters are those of `externalize`; `options` are for downloads (see `localize`). `progress` hears of the
    download, then, from zero again, of reading and hashing. Raises FormatError and StoreError, and WeightsError for
    options that a program does not have.
    """
    path = localize(source, store.path / SOURCES_FOLDER, options=options, progress=progress)
    if path.suffix not in (".pt2", ".onnx"):
        return externalize(
            store,
            model,
            path,
            component=component,
            dtype=dtype,
            layout=layout,
            weight_dir=weight_dir,
            allow_torch=allow_torch,
            progress=progress,
        )
    if component is not None or dtype != "auto":
        raise WeightsError(f"{path}: a program has no components to choose and no dtype to cast to")
    if path.suffix == ".onnx":
        from weights.programs.onnx_models import externalize_onnx

        return externalize_onnx(store, model, path, layout=layout)
    from weights.programs.exported import externalize_program

    return externalize_program(store, model, path, layout=layout, allow_torch=allow_torch)


def write_back(store: WeightStore, model: str, target: Path, *, external: bool = False) -> None:
    """Write `model` as stock libraries read it: a checkpoint folder, or for a program the file `target`.

    `external` leaves an ONNX model's weights in a file beside it. Raises StoreError when `target` exists already.
    """
    manifest = store.manifest(model)
    formats = {component.format for component in manifest.components.values()}
    if manifest.kind != "program":
        if external:
            raise WeightsError(f"{model}: only an ONNX model is written with external data, this is {manifest.kind!r}")
        write_inline(store, model, target)
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
