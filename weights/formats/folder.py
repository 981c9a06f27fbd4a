"""The files of a checkpoint's folder, found within bounds and inside the allowed roots; those with weights by the names
that diffusers and transformers give them.

Symlinks are followed, as model hubs' caches consist of them: `snapshots/<revision>/model.safetensors` leads to
`blobs/<hash>` beside `snapshots`. Hidden files and folders belong to nobody's checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from weights.formats.untrusted import load_json, shown
from weights.records.errors import FormatError, SourceRefused

MAX_DEPTH: Final = 6  # a pipeline has two levels
MAX_ENTRIES: Final = 20_000  # the largest checkpoints have some hundred files
_MAX_SHOWN_ROOTS: Final = 8

Roots = Sequence[Path] | None
LORA_FILE = "pytorch_lora_weights.safetensors"
MAX_JSON_BYTES = 64 * 2**20  # an index of 100,000 tensors has 10 MiB; a damaged file must not fill memory

# One component's weights, by precedence: diffusers' and transformers' names, whole before sharded.
_SAFE_STEMS = ("diffusion_pytorch_model", "model")
_TORCH_STEMS = ("diffusion_pytorch_model", "pytorch_model")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\b")


def check_inside(path: Path, roots: Roots) -> None:
    """Raise SourceRefused, naming the roots, unless `path` with symlinks resolved lies in one; None: anywhere.

    HAZARD: who may change the folder meanwhile may put something else there; what is read is told from what was
    checked by its mark (`weights/operations/source_mark.py`).
    """
    if roots is None:
        return
    try:
        real = Path(os.path.realpath(path, strict=True))
    except (OSError, ValueError) as error:  # not there, a circle of symlinks, no permission, no path at all
        real, reason = None, getattr(error, "strerror", None) or str(error)
    if real is not None and any(real.is_relative_to(root) for root in roots):
        return
    # Nothing is said of what is outside of the roots, not even whether it is there.
    if real is None and any(Path(os.path.normpath(path)).is_relative_to(root) for root in roots):
        raise FormatError(f"{path}: {reason}")
    shown = ", ".join(map(str, roots[:_MAX_SHOWN_ROOTS])) + (", …" if len(roots) > _MAX_SHOWN_ROOTS else "")
    raise SourceRefused(f"{path}: outside of the folders that models may come from (model_roots: {shown or 'none'})")


def files_below(folder: Path, roots: Roots = None) -> list[Path]:
    """List the files of a folder, relative to it and sorted, each inside of `roots`.

    Raises SourceRefused for one that is not, FormatError for a folder that is too deep or too large to be a checkpoint.
    """
    return sorted(_walk(folder, roots))


def _walk(folder: Path, roots: Roots) -> Iterator[Path]:
    waiting = [(folder, 0)]
    num_entries = 0
    while waiting:
        current, depth = waiting.pop()
        check_inside(current, roots)
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    num_entries += 1
                    if num_entries > MAX_ENTRIES:
                        raise FormatError(f"{folder}: more than {MAX_ENTRIES} files, expected those of one checkpoint")
                    if entry.name.startswith("."):
                        continue
                    path = Path(entry.path)
                    if entry.is_dir():
                        if depth == MAX_DEPTH:
                            raise FormatError(f"{path}: more than {MAX_DEPTH} folders deep, expected one checkpoint")
                        waiting.append((path, depth + 1))
                    elif entry.is_file():
                        if entry.is_symlink():
                            check_inside(path, roots)
                        yield path.relative_to(folder)
        except OSError as error:
            raise FormatError(f"{error.filename or current}: {error.strerror or error}") from error


def safetensors_files(folder: Path) -> list[Path]:
    """Return the file or the shards; without them those of the only variant (`model.fp16.safetensors`).

    Raises FormatError for an index whose shards are not files beside it, and when there are several variants.
    """
    return _files(folder, _safetensors(folder))


def torch_files(folder: Path) -> list[Path]:
    """Return torch's own files: `pytorch_model.bin` or its shards."""
    return _files(folder, _torch(folder))


def check_index(folder: Path, tensors: Collection[str]) -> None:
    """Raise FormatError when the weights of `folder` have an index that names more than these `tensors` of theirs."""
    index = _safetensors(folder) or _torch(folder)
    if index is None or index.suffix != ".json":
        return
    if missing := [name for name in read_json(index)["weight_map"] if name not in tensors]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FormatError(f"{index}: tensor {shown(missing[0])}{more} is in none of the shards that the index names")


def _safetensors(folder: Path) -> Path | None:
    """Return the weight file, or the index of the shards."""
    if found := _plain(folder, _SAFE_STEMS, "safetensors"):
        return found
    for stem in _SAFE_STEMS:
        singles = [file for file in folder.glob(f"{stem}.*.safetensors") if not _SHARD.search(file.name)]
        variants = sorted([*singles, *folder.glob(f"{stem}.safetensors.index.*.json")])
        if len(variants) > 1:
            names = ", ".join(file.name for file in variants)
            raise FormatError(f"{folder}: several variants of the weights ({names}); keep one, or name a file")
        if variants:
            return variants[0]
    return None


def _torch(folder: Path) -> Path | None:
    return _plain(folder, _TORCH_STEMS, "bin")


def _plain(folder: Path, stems: Sequence[str], suffix: str) -> Path | None:
    names = (name for stem in stems for name in (f"{stem}.{suffix}", f"{stem}.{suffix}.index.json"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _files(folder: Path, found: Path | None) -> list[Path]:
    if found is None:
        return []
    return _shards(folder, found) if found.suffix == ".json" else [found]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises FormatError naming the file."""
    value = read_any_json(path)
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_any_json(path: Path) -> Any:
    """Read JSON of at most `MAX_JSON_BYTES`. Raises FormatError naming the file."""
    try:
        with path.open("rb") as file:
            # Python allocates what is asked for, whatever the file has.
            raw = file.read(min(os.fstat(file.fileno()).st_size, MAX_JSON_BYTES) + 1)
        if len(raw) > MAX_JSON_BYTES:
            raise FormatError(f"{path}: more than {MAX_JSON_BYTES} bytes")
        return load_json(raw.decode("utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read as JSON: {error}") from None


def is_plain_name(name: str) -> bool:
    """Return True when it can name something in a folder, not hidden, and nothing outside of it."""
    try:
        is_visible = name != "" and not name.startswith(".")
        return is_visible and Path(name).name == name and "\0" not in name and len(name.encode()) <= 255
    except UnicodeEncodeError:
        return False


def _shards(folder: Path, index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index}: no weight_map")
    names: set[str] = set()
    for name in weight_map.values():
        # A shard name is a plain file name; anything else could point out of the checkpoint.
        if not isinstance(name, str) or not is_plain_name(name) or not (name in names or (folder / name).is_file()):
            raise FormatError(f"{index}: shard {shown(name)} is not a file beside it")
        names.add(name)
    return [folder / name for name in sorted(names)]
