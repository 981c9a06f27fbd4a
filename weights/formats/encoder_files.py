"""Files that a text model is built from beside config.json and weights: tokenizer, chat template, pooling.

Two models with equal weights and other tokenizers, templates, end tokens or poolings are not the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from weights.formats.folder import is_plain_name, read_any_json
from weights.formats.untrusted import shown
from weights.records.errors import FormatError
from weights.records.manifest import ModelKind

LIBRARY: Final = "transformers"
STAGES_FILE: Final = "modules.json"
_MAX_STAGES: Final = 64
_STAGES_LIBRARY: Final = "sentence_transformers."
_SENTENCE_FILES: Final = (STAGES_FILE, "sentence_bert_config.json")
# What nobody reads here. The config has a hash of its own, an index only says which file a tensor was in.
_UNREAD: Final = ("config.json",)
_INDEX: Final = ".index."


def tokenizer_folder(folder: str) -> str:
    """Return the tokenizer's folder: `text_encoder_2` has `tokenizer_2`; a single model has its own."""
    return folder.replace("text_encoder", "tokenizer")


def parts_hash(root: Path, folder: str, files: Iterable[Path]) -> str:
    """Hash those of `files` (relative to `root`) that the encoder in `folder` is built from; "" for none.

    By their names and bytes, wherever the folders are: pipelines number theirs differently. Raises FormatError.
    """
    names = {PurePosixPath(file) for file in files}
    digests = []
    for file in sorted(_parts(PurePosixPath(folder), names)):
        try:
            digest = hashlib.sha256((root / file).read_bytes()).hexdigest()
        except OSError as error:
            raise FormatError(f"{root / file}: {error.strerror or error}") from None
        digests.append(f"{_inner(file, folder)}\0{digest}")
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest() if digests else ""


def has_parts(kind: ModelKind, library: str) -> bool:
    """Return True when a component of `library` reads text in a model of that kind."""
    return library == LIBRARY and kind in ("diffusion", "embedding", "reranker", "classifier", "llm")


def _parts(folder: PurePosixPath, files: set[PurePosixPath]) -> Iterator[PurePosixPath]:
    beside = PurePosixPath(tokenizer_folder(str(folder)))
    is_sentence_encoder = folder / STAGES_FILE in files
    for file in files:
        is_tokenizer_file = not (file.name in _UNREAD or file.suffix == ".md" or _INDEX in file.name)
        is_stage = is_sentence_encoder and file.name == "config.json" and file.parent.parent == folder != file.parent
        is_sentence_file = file.parent == folder and file.name in _SENTENCE_FILES
        if (file.parent == beside and is_tokenizer_file) or is_sentence_file or is_stage:
            yield file


def _inner(file: PurePosixPath, folder: str) -> PurePosixPath:
    return file.relative_to(folder) if file.is_relative_to(folder) else PurePosixPath(file.name)


class SentenceStage(NamedTuple):
    """A stage: the name of its class, and its folder, "" for the model's own.

    A class of sentence-transformers is named without its module; the whole name is that of code of the model's own.
    """

    name: str
    folder: str


def read_stages(folder: Path) -> tuple[SentenceStage, ...] | None:
    """Return the stages of a model's folder; None where it has no list of them. Raises FormatError naming the file.

    Format: a list of objects with `type`, the dotted name of a class, and `path`, the folder of its files beside it, ""
    for the folder itself. Source: sentence-transformers 6.2, `base/model.py`.
    """
    path = folder / STAGES_FILE
    if not path.is_file():
        return None
    found = read_any_json(path)
    if not isinstance(found, list) or len(found) > _MAX_STAGES or not all(map(_is_stage, found)):
        raise FormatError(f"{path}: expected a list of at most {_MAX_STAGES} objects with 'type' and 'path'")
    stages = tuple(SentenceStage(_name(stage["type"]), stage["path"].rstrip("/")) for stage in found)
    for stage in stages:
        if stage.folder and not is_plain_name(stage.folder):
            raise FormatError(f"{path}: {shown(stage.folder)} is not a folder beside it")
    return stages


def _name(dotted: str) -> str:
    return dotted.rsplit(".", 1)[-1] if dotted.startswith(_STAGES_LIBRARY) else dotted


def _is_stage(stage: object) -> bool:
    return isinstance(stage, dict) and isinstance(stage.get("type"), str) and isinstance(stage.get("path"), str)
