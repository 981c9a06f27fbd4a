"""Files that a text model is built from beside config.json and weights: tokenizer, chat template, pooling.

Two models with equal weights and other tokenizers, templates, end tokens or poolings are not the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from weights.errors import FormatError
from weights.formats.sentence_stages import STAGES_FILE
from weights.manifest import ModelKind

LIBRARY: Final = "transformers"
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
