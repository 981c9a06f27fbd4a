"""A Hugging Face tokenizer.json as GGUF metadata: byte-level BPE, or the BPE that comes from SentencePiece.

GGUF has no tokenizer.json: it names how text is split (`tokenizer.ggml.pre`) and keeps tokens, kinds, merges or scores.
What it cannot say is refused, because a wrong guess gives no error, only other ids. Keys: ggml/docs/gguf.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from weights.formats.folder import read_json
from weights.formats.gguf import GgufValue
from weights.formats.gguf_names import BYTE, CONTROL, NORMAL, TEXT_SPLITS, UNKNOWN, UNUSED, USER_DEFINED
from weights.formats.untrusted import shown
from weights.records.errors import FormatError

# llama.cpp wants merges, and GGUF writers no empty array: a vocabulary without any gets one that leads to no token.
_NO_MERGES: Final = ("\u0100 \u0101",)
_LOWEST_SCORE: Final = -1e9
_SPACE: Final = "\u2581"


def vocabulary_metadata(folder: Path, config: Mapping[str, Any], num_rows: int) -> dict[str, GgufValue]:
    """Return the `tokenizer.*` keys for the tokenizer of `folder`; `num_rows` is the embedding's number of rows.

    Raises FormatError for a tokenizer that GGUF cannot express.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FormatError(f"{folder}: no tokenizer.json, which a GGUF file's tokenizer is made of")
    content = read_json(file)
    try:
        return _Vocabulary(file, content, num_rows).metadata() | _named_tokens(folder, config, content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(f"{file}: not a tokenizer of the tokenizers library: {error!r}") from None


class _Vocabulary:
    """The tokens of one tokenizer.json, and how it goes from text to them."""

    def __init__(self, file: Path, content: dict[str, Any], num_rows: int) -> None:
        self._file = file
        self._content = content
        self._model = content["model"]
        if self._model["type"] != "BPE":
            raise self._error(f"a {self._model['type']} model; GGUF files are written for BPE")
        ids: dict[str, int] = dict(self._model["vocab"])
        self._added = {token["content"]: token for token in content.get("added_tokens") or []}
        ids |= {text: token["id"] for text, token in self._added.items()}
        if max(ids.values()) >= num_rows:
            raise self._error(f"token id {max(ids.values())}, but the embedding has {num_rows} rows")
        texts = {number: text for text, number in ids.items()}
        if len(texts) != len(ids):
            raise self._error("two tokens have the same id")
        # As convert_hf_to_gguf.py has it, rows that no token belongs to get a name.
        self._tokens = tuple(texts.get(number, f"[PAD{number}]") for number in range(num_rows))
        self._kinds = [self._kind(texts.get(number)) for number in range(num_rows)]
        self._merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in self._model["merges"]]

    def metadata(self) -> dict[str, GgufValue]:
        """Return the keys of the vocabulary."""
        is_sentencepiece = bool(self._model.get("byte_fallback"))
        found = self._sentencepiece() if is_sentencepiece else self._byte_level()
        kinds = np.array(self._kinds, np.int32)
        found |= {"tokenizer.ggml.tokens": self._tokens, "tokenizer.ggml.token_type": kinds}
        before, after = self._ends()
        found |= {"tokenizer.ggml.add_bos_token": before, "tokenizer.ggml.add_eos_token": after}
        if (unknown := self._model.get("unk_token")) is not None:
            found["tokenizer.ggml.unknown_token_id"] = self._tokens.index(unknown)
        return found

    def _kind(self, text: str | None) -> int:
        if text is None:
            return UNUSED
        if self._model.get("byte_fallback"):
            if text == self._model.get("unk_token"):
                return UNKNOWN
            if re.fullmatch("<0x[0-9A-F]{2}>", text):
                return BYTE
        added = self._added.get(text)
        return NORMAL if added is None else CONTROL if added["special"] else USER_DEFINED

    def _byte_level(self) -> dict[str, GgufValue]:
        ignores_merges = bool(self._model.get("ignore_merges"))
        patterns = tuple(self._patterns())
        for name, known in TEXT_SPLITS.items():
            if known == (patterns, ignores_merges):
                merges = tuple(f"{left} {right}" for left, right in self._merges)
                return {
                    "tokenizer.ggml.model": "gpt2",
                    "tokenizer.ggml.pre": name,
                    "tokenizer.ggml.merges": merges or _NO_MERGES,
                }
        raise self._error(
            f"splits text by {shown(' and '.join(patterns))} (ignore_merges {ignores_merges}), for which GGUF has no "
            f"name that is known here; known are the ways of {', '.join(TEXT_SPLITS)}"
        )

    def _patterns(self) -> Iterator[str]:
        """Yield the expressions that text is split by, one after the other."""
        (gpt2,) = TEXT_SPLITS["gpt-2"][0]
        before = self._content.get("pre_tokenizer") or {"type": "none"}
        parts = before["pretokenizers"] if before["type"] == "Sequence" else [before]
        for part in parts:
            if part["type"] == "Split" and part["behavior"] == "Isolated" and not part.get("invert"):
                yield part["pattern"]["Regex"]
            elif part["type"] == "Digits" and part["individual_digits"]:
                yield r"\p{N}"
            elif part["type"] == "ByteLevel" and not part["add_prefix_space"]:
                if part.get("use_regex", True):
                    yield gpt2
            else:
                raise self._error(f"pre_tokenizer {shown(part)} cannot be expressed in GGUF")

    def _sentencepiece(self) -> dict[str, GgufValue]:
        """Return scores that merge in the same order: SentencePiece merges what has the greatest score first."""
        ids = {text: number for number, text in enumerate(self._tokens)}
        ranks: dict[str, int] = {}
        for rank, (left, right) in enumerate(self._merges):
            ranks.setdefault(left + right, rank)
        self._check_merges()
        scores = np.full(len(self._tokens), _LOWEST_SCORE, np.float32)
        for text, rank in ranks.items():
            scores[ids[text]] = -float(rank)
        for number, kind in enumerate(self._kinds):
            if kind in (CONTROL, UNKNOWN, BYTE):
                scores[number] = 0
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.add_space_prefix": self._adds_prefix(),
        }

    def _check_merges(self) -> None:
        """Raise FormatError unless every way to cut a token is a merge: a score says nothing of single ways."""
        given = set(self._merges)
        plain = {text for text, kind in zip(self._tokens, self._kinds, strict=True) if kind == NORMAL}
        for text in plain:
            cuts = ((text[:at], text[at:]) for at in range(1, len(text)))
            missing = [cut for cut in cuts if cut[0] in plain and cut[1] in plain and cut not in given]
            if missing:
                raise self._error(f"{shown(text)} is not merged from {shown(missing[0])}, which scores cannot express")

    def _adds_prefix(self) -> bool:
        """Return whether a space is put before the text. Raises FormatError where spaces are not written as usual."""
        normalizer, before = self._content.get("normalizer"), self._content.get("pre_tokenizer")
        steps: list[Any] = [normalizer] if normalizer else []
        if normalizer and normalizer["type"] == "Sequence":
            steps = normalizer["normalizers"]
        if before is not None and before["type"] == "Metaspace" and not steps and not before.get("split", True):
            return bool(before["prepend_scheme"] != "never")
        kinds = [step["type"] for step in steps]
        replaces = kinds[-1:] == ["Replace"] and steps[-1]["content"] == _SPACE
        if before is None and replaces and kinds in (["Replace"], ["Prepend", "Replace"]):
            return len(kinds) == 2
        raise self._error("neither SentencePiece's way to write spaces nor byte-level BPE, the two that GGUF knows")

    def _ends(self) -> tuple[bool, bool]:
        """Return whether special tokens are written before and behind every text."""
        processor = self._content.get("post_processor") or {}
        parts = processor["processors"] if processor.get("type") == "Sequence" else [processor]
        single: list[dict[str, Any]] = next(
            (part["single"] for part in parts if part.get("type") == "TemplateProcessing"), []
        )
        return (bool(single) and "SpecialToken" in single[0]), (bool(single) and "SpecialToken" in single[-1])

    def _error(self, what: str) -> FormatError:
        return FormatError(f"{self._file}: {what}")


def _named_tokens(folder: Path, config: Mapping[str, Any], content: dict[str, Any]) -> dict[str, GgufValue]:
    """Return the ids of the tokens with a role, and the chat template."""
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    ids: dict[str, int] = dict(content["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    found: dict[str, GgufValue] = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        text = settings.get(f"{key}_token")
        text = text.get("content") if isinstance(text, dict) else text
        from_config = config.get(f"{key}_token_id")
        from_config = from_config[0] if isinstance(from_config, list) and from_config else from_config
        number = ids.get(text, from_config) if isinstance(text, str) else from_config
        if type(number) is int:
            found[f"tokenizer.ggml.{role}_token_id"] = number
    ends = [number for number in _all_ends(folder, config) if number != found.get("tokenizer.ggml.eos_token_id")]
    for role, number in zip(("eot", "eom"), ends, strict=False):  # GGUF has a place for two more ends of a text
        found[f"tokenizer.ggml.{role}_token_id"] = number
    if (folder / "chat_template.jinja").is_file():
        found["tokenizer.chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    elif isinstance(template := settings.get("chat_template"), str):
        found["tokenizer.chat_template"] = template
    elif isinstance(template, list):
        named = {one["name"]: one["template"] for one in template}
        found |= {f"tokenizer.chat_template.{name}": text for name, text in named.items() if name != "default"}
        if "default" in named:
            found["tokenizer.chat_template"] = named["default"]
    return found


def _all_ends(folder: Path, config: Mapping[str, Any]) -> list[int]:
    path = folder / "generation_config.json"
    given = (read_json(path).get("eos_token_id") if path.is_file() else None) or config.get("eos_token_id")
    return [number for number in (given if isinstance(given, list) else [given]) if type(number) is int]
