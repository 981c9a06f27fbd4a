"""Text and tokens: the tokenizer of a model folder, its chat template and end tokens, and incremental decoding."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deployments.engines.libraries.chat_rendering import prepare_chat_template
from deployments.engines.libraries.config_files import read_config
from deployments.engines.libraries.tokenizer_files import check_tokenizer, check_tokenizer_files
from deployments.engines.llm.models.gguf_config import gguf_headers
from deployments.engines.llm.models.gguf_tokenizer import gguf_tokenizer
from deployments.engines.records.protocol import EngineError
from weights.platform.panics import panics_as_errors

logger = logging.getLogger(__name__)

_FOLDER_SAMPLING: Final = {  # transformers' names -> those of SamplingParams
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
} | {"max_new_tokens": "max_tokens"}
_GGUF_SAMPLING: Final = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


_LEAST_TOP_P: Final = 1e-9
_RANGES: Final[Mapping[str, Callable[[float], bool]]] = {
    "temperature": lambda value: 0 <= value < math.inf,
    "top_p": lambda value: 0 < value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "typical_p": lambda value: 0 < value <= 1,
    "repetition_penalty": lambda value: 0 < value < math.inf,
    "max_tokens": lambda value: value >= 1 and value == int(value),
}


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer of the folder: stock files, or a GGUF model's. Raises EngineError when none can be read."""
    if headers := gguf_headers(folder):
        tokenizer = gguf_tokenizer(headers[0].metadata)
    else:
        check_tokenizer_files(folder)
        try:
            with panics_as_errors():
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds; all mean that the files are not a tokenizer
            check_tokenizer(folder)
            raise EngineError(f"no tokenizer could be read from {folder}: {error}") from error
    found = tokenizer.chat_template or ""
    for source in found.values() if isinstance(found, dict) else [found]:
        prepare_chat_template(source)
    return tokenizer


def load_eos_token_ids(folder: Path, config: PretrainedConfig) -> frozenset[int]:
    """Read the end tokens of generation_config.json or, when it names none, of the config. May be empty."""
    path = folder / "generation_config.json"
    eos = read_config(path).get("eos_token_id") if path.exists() else None
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:  # for a model of several parts, its decoder's
        eos = getattr(config.get_text_config(), "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int | None = None) -> tuple[int, ...]:
    """Return the token ids of a plain prompt, with the special tokens that the tokenizer adds by itself.

    A prompt of more than `max_tokens` is cut; special tokens stay. Raises EngineError for a text that is no Unicode.
    """
    cut = {"truncation": True, "max_length": max_tokens} if max_tokens is not None else {}
    return tuple(tokenizer(checked_characters(text), **cut)["input_ids"])


def checked_characters(text: str) -> str:
    """Return the text. Raises EngineError for an unpaired surrogate, which JSON allows and no tokenizer knows."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            near = text[max(0, error.start - 20) : error.end]
            raise EngineError(f"the text contains an unpaired surrogate at {near!r}") from None
    return text


def chat_template(tokenizer: PreTrainedTokenizerBase, *, has_tools: bool) -> str:
    """Return the template of chats, or that of chats with tools if it differs. Raises EngineError without one."""
    if not tokenizer.chat_template:
        raise EngineError("the model's tokenizer has no chat template; send a plain prompt instead")
    try:
        return str(tokenizer.get_chat_template(tools=[{}] if has_tools else None))
    except ValueError as error:  # several templates, none of them the default
        raise EngineError(f"the model's tokenizer has no chat template for this: {error}") from error


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the special tokens, which texts of answers leave out, by their names."""
    return {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}


def load_generation_defaults(folder: Path) -> dict[str, float | int]:
    """Return the sampling defaults of generation_config.json or a GGUF file, under the names of `SamplingParams`.

    `do_sample: false` is temperature 0. Values that are no numbers, or switched off by null, are left out.
    """
    headers = gguf_headers(folder)
    metadata = headers[0].metadata if headers else {}
    found = _numbers(metadata, _GGUF_SAMPLING)
    others = [key for key in metadata if key.startswith("general.sampling.") and key not in _GGUF_SAMPLING]
    if others:
        logger.warning("%s: no sampler here knows %s; texts are drawn without", folder, ", ".join(sorted(others)))
    path = folder / "generation_config.json"
    given = read_config(path) if path.exists() else {}
    found |= _numbers(given, _FOLDER_SAMPLING)
    if given.get("do_sample") is False:
        found["temperature"] = 0.0
    if found.get("top_k", 0) < 0:  # a common form of "off"
        found["top_k"] = 0
    if found.get("top_p") == 0:  # the likeliest token alone
        found["top_p"] = _LEAST_TOP_P
    for name in [name for name, fits in _RANGES.items() if name in found and not fits(found[name])]:
        logger.warning("%s: %s %s is out of its range, and left out", folder, name, found.pop(name))
    return found


def _numbers(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float | int]:
    return {
        ours: given[theirs]
        for theirs, ours in names.items()
        if isinstance(given.get(theirs), int | float) and not isinstance(given[theirs], bool)
    }


_SPACE: Final = "\u2581"  # of sentencepiece's tokens


def token_text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> tuple[str, bytes]:
    """Return a token alone, special ones too: as text, and as the bytes that it adds, maybe a part of a character."""
    text = str(tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    piece = str(tokenizer.convert_ids_to_tokens(token_id))
    if UNFINISHED not in text:
        if piece.startswith(_SPACE) and not text.startswith(" "):  # decoders drop the space of a first word
            text = f" {text}"
        return text, text.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):  # byte fallback of sentencepiece
        return text, bytes([int(piece[3:5], 16)])
    table = {character: byte for byte, character in bytes_to_unicode().items()}  # byte-level BPE
    if all(character in table for character in piece):
        return text, bytes(table[character] for character in piece)
    return text, text.encode()


NUM_CONTEXT_TOKENS = 8  # of the prompt: enough for the decoder not to treat the completion as a beginning
UNFINISHED = "\ufffd"  # decoders write it for bytes that are no character, or not yet
_MAX_HELD = 16  # tokens that may form one character: no character has more bytes
_LAST = 8  # of more held tokens: they tell whether all end within a character


class IncrementalDecoder:
    """Decodes a completion token by token; the pieces join to its text after the prompt.

    A token is decoded together with its predecessors, because decoders drop the space before a first word,
    and spread characters over tokens. Text that ends in an unfinished character is held back. Special tokens
    give no text. The time of a token does not grow with earlier ones that gave none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        hidden: frozenset[int] | None = None,
    ) -> None:
        """`hidden` are the tokens without a text, if these are not all special ones."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        # The tokens that still matter; the first `_num_shown` of them have been returned as `_shown`.
        self._token_ids = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._num_shown = len(self._token_ids)
        self._shown = self._decode()

    def feed(self, token_id: int) -> str:
        """Return the text that has become certain with this token."""
        self._token_ids.append(token_id)
        if len(self._token_ids) - self._num_shown > _MAX_HELD and self._decode(_LAST).endswith(UNFINISHED):
            return ""
        text = self._decode()
        if text.endswith(UNFINISHED) or len(text) <= len(self._shown):
            if token_id in self._skipped_ids:
                self._token_ids.pop()
            return ""
        piece = text[len(self._shown) :]
        # The tokens of this piece are the context of the next one. They start and end with whole characters.
        del self._token_ids[: self._num_shown]
        self._num_shown = len(self._token_ids)
        self._shown = self._decode()
        return piece

    def flush(self) -> str:
        """Return the text held back, as it is. Call it once, at the end."""
        return self._decode()[len(self._shown) :]

    def _decode(self, count: int = 0) -> str:
        """Return the text of the last `count` tokens, 0: of all."""
        ids = self._token_ids[-count:]
        if self._hidden is not None:
            ids = [token_id for token_id in ids if token_id not in self._hidden]
        skips = self._hidden is None
        return str(self._tokenizer.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False))

    @functools.cached_property
    def _skipped_ids(self) -> frozenset[int]:
        """The tokens that are left out before a text is looked at."""
        if self._hidden is not None:
            return self._hidden
        if not self._tokenizer.is_fast:
            return frozenset(self._tokenizer.all_special_ids)
        return frozenset(one for one, added in self._tokenizer.added_tokens_decoder.items() if added.special)


class StopMatcher:
    """Lets text through up to the first stop string, holding back what may be the beginning of one.

    The first is the one that is complete first (of several that end together, the longest), so the result
    does not depend on how the text is cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None  # the stop string that came

    @property
    def stopped(self) -> bool:
        """Return whether a stop string has come."""
        return self.found is not None

    def feed(self, piece: str) -> str:
        """Return the text that can be shown now; after the stop string, none."""
        if self.stopped:
            return ""
        self._held += piece
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.found = min(found)
            return self._held[:at]
        keep = self._num_possible()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """Return the text held back, once no stop string can follow."""
        return "" if self.stopped else self._held

    def _num_possible(self) -> int:
        """The length of the longest end of the held text that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
