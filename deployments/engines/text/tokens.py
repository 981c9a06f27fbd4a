"""Texts -> token ids: padding as an attribute instead of as ids, truncation that says what it ignored, chunks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from deployments.engines.protocol import ClipLayer, EngineError

TokenIds = tuple[int, ...]
# What tokenizers without a limit of their own get: the length that the stock Flux pipeline pads T5 to.
DEFAULT_MAX_TOKENS = 512
MAX_CHUNKS = 16  # of one text: 1,200 CLIP tokens. Each one lengthens every denoise step.


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A tokenized text: the input of an encoder, and the key of a cache.

    `token_ids` have the special tokens and no padding. `padded_length`: the length to which stock pipelines pad them,
    with padding that the model attends to and that is part of the output; None runs the tokens alone.
    `as_embedding` asks for one vector instead of one per token; `layer` says whose token vectors a CLIP gives.
    `num_ignored` tokens were cut off.
    """

    token_ids: TokenIds
    padded_length: int | None = None
    as_embedding: bool = False
    layer: ClipLayer = "penultimate"
    num_ignored: int = field(default=0, compare=False)

    @property
    def run_length(self) -> int:
        """Return the tokens that a forward works on for this text alone."""
        return max(len(self.token_ids), self.padded_length or 0)


class TextTokenizer:
    """A Hugging Face tokenizer and the longest text of its model. Thread-safe."""

    def __init__(self, tokenizer: Any, max_tokens: int | None, position_limit: int | None) -> None:
        """`max_tokens` limits texts of which nobody says how long they may be; `position_limit` limits all."""
        self._tokenizer = tokenizer
        # HAZARD: a fast tokenizer is reconfigured by each call (padding, truncation), so calls must not overlap.
        self._lock = threading.Lock()
        self._position_limit = position_limit
        own = min(tokenizer.model_max_length, position_limit or tokenizer.model_max_length)
        # transformers writes "no limit" as 10**30.
        self.max_tokens = min(max_tokens or sys.maxsize, own if own < 10**9 else DEFAULT_MAX_TOKENS)
        self.pad_id: int = tokenizer.pad_token_id or 0
        self.pads_left = tokenizer.padding_side == "left"

    def tokenize(self, texts: Sequence[str], max_length: int | None) -> list[TokenizedText]:
        """Tokenize, cut to `max_length` (None: the model's limit), without padding."""
        length = self.check_length(max_length)
        whole = self._ids(texts)
        long = [index for index, ids in enumerate(whole) if len(ids) > length]
        # The tokenizer itself truncates: where special tokens stay is its business.
        cut = dict(zip(long, self._ids([texts[index] for index in long], length), strict=True))
        if any(len(ids) > length for ids in cut.values()):  # the special tokens alone are more: it does nothing then
            least = len(self._ids([""])[0])
            raise EngineError(f"max_length {length}: this tokenizer cannot cut a text to fewer than {least} tokens")
        kept = [cut.get(index, ids) for index, ids in enumerate(whole)]
        return [TokenizedText(ids, num_ignored=len(all_) - len(ids)) for ids, all_ in zip(kept, whole, strict=True)]

    def chunk(self, text: str, max_length: int | None) -> list[TokenizedText]:
        """Cut the whole text into pieces of at most `max_length` tokens, each between a begin and an end of its own.

        Pieces are full but for the last, so a change at the end leaves those before it as they are. A text that fits
        is the one piece that `tokenize` gives. Raises EngineError beyond MAX_CHUNKS pieces.
        """
        length = self.check_length(max_length)
        [(begin, *content, end)] = self._ids([text])
        room = length - 2
        if room < 1 or len(content) > MAX_CHUNKS * room:
            most = MAX_CHUNKS * max(room, 0)
            raise EngineError(f"a text of {len(content)} tokens: at most {most} can be encoded in chunks of {length}")
        starts = range(0, max(len(content), 1), room)
        return [TokenizedText((begin, *content[start : start + room], end)) for start in starts]

    def pad(self, text: TokenizedText) -> TokenIds:
        """Return the ids as a stock pipeline's tokenizer gives them."""
        padding = (self.pad_id,) * (text.run_length - len(text.token_ids))
        return padding + text.token_ids if self.pads_left else text.token_ids + padding

    def check_length(self, max_length: int | None) -> int:
        """Return the limit in tokens. Raises EngineError for one that the model has no positions for."""
        if max_length is None:
            return self.max_tokens
        limit = self._position_limit
        if max_length < 1 or (limit is not None and max_length > limit):
            raise EngineError(f"max_length {max_length}: expected 1 to {limit or 'any number of'} tokens")
        return max_length

    def _ids(self, texts: Sequence[str], max_length: int | None = None) -> list[TokenIds]:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise EngineError(f"texts to tokenize must be a sequence of strings, got {texts!r:.100}")
        for text in texts:
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise EngineError(f"text {text!r:.100} has half of a surrogate pair, which is no character")
        if not texts:
            return []
        options = {"padding": False, "truncation": max_length is not None, "max_length": max_length}
        with self._lock:
            rows = self._tokenizer(list(texts), verbose=False, **options)["input_ids"]
        return [tuple(ids) for ids in rows]


T = TypeVar("T")


def level_chunks(chunked: Sequence[Sequence[T]], empty: Callable[[int], T]) -> list[tuple[T, ...]]:
    """Bring all texts to as many chunks as the longest has: `empty(index)` is one without text for text `index`.

    Classifier-free guidance runs prompt and negative prompt as rows of one batch, and SDXL joins two encoders' rows
    side by side: all four need one length.
    """
    most = max(len(chunks) for chunks in chunked)
    return [
        (*chunks, *[empty(index)] * (most - len(chunks))) if len(chunks) < most else tuple(chunks)
        for index, chunks in enumerate(chunked)
    ]


def join_chunks(encodings: Sequence[Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
    """Return one encoding: "penultimate" (L, D) of all chunks behind each other; "pooled" is the first one's."""
    if len(encodings) == 1:
        return encodings[0]
    joined = torch.cat([encoding["penultimate"] for encoding in encodings])
    return {"pooled": encodings[0]["pooled"], "penultimate": joined}
