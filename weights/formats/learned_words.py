"""Textual inversions: vectors that a text encoder reads in the place of a word, by the encoder that they are for.

`emb_params` (N, D) of the Stable Diffusion WebUI, `clip_l` and `clip_g` of the same for SDXL, and diffusers'
`learned_embeds.safetensors`, whose one tensor, (D,) or (N, D), is named as the word. Source: diffusers 0.42,
`loaders/textual_inversion.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from weights.formats.source import AdapterBase
from weights.formats.untrusted import shown
from weights.records.errors import AdapterError

WORDS_CLASS: Final = "TextualInversion"
WORDS_FILE: Final = "learned_embeds.safetensors"
MAX_VECTORS: Final = 75  # what a CLIP reads at once
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ENCODERS: Final = {"emb_params": "text_encoder", "clip_l": "text_encoder", "clip_g": "text_encoder_2"}


def is_words_file(path: Path, names: Collection[str]) -> bool:
    """Return whether a file with tensors of these names is a textual inversion."""
    is_one = len(names) == 1 and (path.name == WORDS_FILE or next(iter(names)).startswith("<"))
    return bool(names) and (is_one or set(names) <= _ENCODERS.keys())


def is_words(names: Collection[str]) -> bool:
    """Return whether an adapter's tensors of these names are words: those of LoRAs name modules, with dots."""
    return bool(names) and not any("." in name for name in names)


def check_words(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the text encoder of each tensor, by name. Raises AdapterError for what are no vectors."""
    for name, shape in shapes.items():
        if len(shape) not in (1, 2) or 0 in shape or (len(shape) == 2 and shape[0] > MAX_VECTORS):
            raise AdapterError(
                f"{file}: tensor {shown(name)} has shape {list(shape)}, expected 1 to {MAX_VECTORS} vectors of a word"
            )
    return {name: _ENCODERS.get(name, "text_encoder") for name in shapes}


def check_words_base(file: Path, shapes: Mapping[str, tuple[int, ...]], base: AdapterBase) -> None:
    """Check that a pipeline's text encoders read vectors of these lengths. Raises AdapterError."""
    for name, encoder in check_words(file, shapes).items():
        tensors = base.components[encoder].tensors if encoder in base.components else {}
        table = next((tensors[key] for key in tensors if key.endswith("token_embedding.weight")), None)
        if table is not None and table.shape[-1] != shapes[name][-1]:
            raise AdapterError(
                f"{file}: tensor {shown(name)} has vectors of {shapes[name][-1]} numbers, and the {encoder} of "
                f"{base.model!r} reads {table.shape[-1]}"
            )


def candidates_in(text: str) -> set[str]:
    """Return all of a text that may be the name of an adapter, in lower case."""
    return {found.rstrip(".-").lower() for found in _NAME.findall(text)}


def words_in(text: str, words: Iterable[str]) -> list[str]:
    """Return those of `words` that a text has, as words of their own, in whatever case. Of several that differ by case
    alone, that which stands there.
    """
    found: dict[str, str] = {}
    lower = text.lower()
    for word in words:
        if word.lower() in lower and pattern_of([word]).search(text) and (word in text or word.lower() not in found):
            found[word.lower()] = word
    return list(found.values())


def pattern_of(words: Collection[str], *, ignores_case: bool = True) -> re.Pattern[str]:
    """Return the pattern of any of the words in a text, the longest first."""
    longest, flags = sorted(words, key=len, reverse=True), re.IGNORECASE if ignores_case else 0
    return re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, longest))})(?![\w-]|\.\w)", flags)
