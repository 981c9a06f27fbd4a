"""A checkpoint that has been recognized: its components, its skeleton, and the pipeline that a single file is like."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from weights.formats.folder import files_below, read_json
from weights.formats.tensors import SourceTensor
from weights.records.manifest import ModelKind, WeightFormat


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """A model that an adapter is for: components by name, of its manifest or of its checkpoint, with their tensors.

    `folder` has its configs. `fingerprint` is its version in the store, "" for one that is not there. `dtype` is what
    `denoiser_dtype` tells.
    """

    model: str
    kind: ModelKind
    class_name: str | None
    folder: Path
    components: Mapping[str, Any]
    fingerprint: str = ""
    dtype: str = ""


CONFIG_FILE = "config.json"


SKELETON_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".md", ".tiktoken", ".spm", ".codes"})


_MAX_SKELETON_FILE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class SourceComponent:
    """A module of a checkpoint, with its tensors; `folder` is relative to the checkpoint, `files` to `folder`."""

    name: str
    library: str
    class_name: str | None
    folder: str
    tensors: dict[str, SourceTensor]
    metadata: dict[str, str]
    files: tuple[str, ...]
    format: WeightFormat = "safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A recognised folder or file. `class_name` is the pipeline class, or the architecture of a single model.

    `headers` are files that the skeleton gets beside those of the folder: what a weight file holds besides tensors
    and what it takes to write the file again, or a config.json in the place of the folder's own. `skeleton` is the
    folder of a single file's configs and tokenizers: those of the pipeline that it is like. `draft` is a language
    model's draft model, a component of that name.
    """

    path: Path
    kind: ModelKind
    class_name: str | None
    components: tuple[SourceComponent, ...]
    headers: Mapping[str, bytes] = field(default_factory=dict)
    skeleton: Path | None = None
    draft: Checkpoint | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of a folder, as the skeleton has it. Raises FormatError."""
        return self.config_of(".")

    def config_of(self, folder: str) -> dict[str, Any]:
        """Return the config.json in a folder, relative to the root, as the skeleton has it. Raises FormatError."""
        changed = self.headers.get((PurePosixPath(folder) / CONFIG_FILE).as_posix())
        found: dict[str, Any] = read_json(self.root / folder / CONFIG_FILE) if changed is None else json.loads(changed)
        return found

    @property
    def root(self) -> Path:
        """Folder of the configs and tokenizers: `skeleton`, or the checkpoint's own."""
        return self.skeleton or (self.path if self.path.is_dir() else self.path.parent)

    def skeleton_files(self) -> Iterator[Path]:
        """Yield all files needed beside the weights: configs, tokenizers, templates. Relative paths."""
        return skeleton_files(self.skeleton or self.path)


def skeleton_files(folder: Path) -> Iterator[Path]:
    """Yield the skeleton files of a folder, relative to it; none of a file. Raises FormatError."""
    if not folder.is_dir():
        return
    for file in files_below(folder):
        if file.suffix in SKELETON_SUFFIXES and (folder / file).stat().st_size <= _MAX_SKELETON_FILE_BYTES:
            yield file


@dataclass(frozen=True, slots=True)
class BasePipeline:
    """A pipeline of the store, or a folder of diffusers' layout, which may have configs and no weights at all.

    `mark` changes with what it gives. `components` are those that have weights.
    """

    name: str
    folder: Path
    mark: str
    components: Mapping[str, SourceComponent]

    @property
    def model_or_folder(self) -> str:
        """The model's name, or the whole path of the folder."""
        return str(self.folder.absolute()) if self.name == str(self.folder) else self.name
