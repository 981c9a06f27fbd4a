"""Texts -> token ids: padding as an attribute instead of ids, truncation that counts its losses, chunks."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch

from deployments.engines.libraries.chat_rendering import render_chat_template
from deployments.engines.records.prompt_images import PromptImage
from deployments.engines.records.protocol import PENULTIMATE, ClipLayer, EngineError, PromptForm
from deployments.engines.text.prompt_weights import WeightedText, parse_comfyui, parse_weights
from weights.formats.learned_words import pattern_of

TokenIds = tuple[int, ...]
# The limit of tokenizers without their own: the length to which the stock Flux pipeline pads T5.
DEFAULT_MAX_TOKENS = 512
_WHOLE_GROUP = 8  # tokens of a bracket's words, from which ComfyUI cuts them between two chunks
MAX_CHUNKS = 16  # of one text: 1,200 CLIP tokens. Each one lengthens every denoise step.


class TextPair(NamedTuple):
    """Two texts read together by a classifier: a query and a document, say."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A tokenized text: the input of an encoder, and the key of a cache.

    `token_ids` have the special tokens and no padding. `padded_length`: the length to which stock pipelines pad them,
    with attended padding that is part of the output; None runs the tokens alone.
    `as_embedding` asks for one vector instead of one per token; `layer` is the CLIP layer that gives token vectors.
    `form` names the layers and tokens of a language model that give vectors; `images` are those that it sees in
    the text.
    `type_ids` tell the tokens of a pair's second text from those of the first, () if the model does not take them.
    `num_ignored` tokens were cut off. `weights` are factors of the tokens' vectors: the model's vectors are cached
    without them, and no two texts differ in them alone.
    """

    token_ids: TokenIds
    padded_length: int | None = None
    as_embedding: bool = False
    layer: ClipLayer = PENULTIMATE
    form: PromptForm | None = None
    images: tuple[PromptImage, ...] = ()
    type_ids: TokenIds = ()
    num_ignored: int = field(default=0, compare=False)
    weights: tuple[float, ...] = field(default=(), compare=False)

    @property
    def run_length(self) -> int:
        """Return the number of positions in a forward of this text alone."""
        return max(len(self.token_ids), self.padded_length or 0)

    @property
    def num_dropped(self) -> int:
        """Return the number of first tokens without vectors."""
        return self.form.num_dropped if self.form else 0


@dataclass(frozen=True, slots=True, eq=False)
class LearnedWords:
    """Words with learned vectors of a text encoder: their ids, after those of its vocabulary, and the vectors.

    `vectors` (N, D) are in the order of the ids. `identity` is unique. `ignores_case` if the
    tokenizer does.
    """

    ids: Mapping[str, Sequence[int]]
    vectors: torch.Tensor
    identity: str
    ignores_case: bool = False

    @property
    def pattern(self) -> re.Pattern[str]:
        """Return the pattern that finds a word in a text."""
        return pattern_of(self.ids, ignores_case=self.ignores_case)

    def ids_of(self, text: str) -> Sequence[int] | None:
        """Return the ids of a text that is one of the words, None for any other."""
        if text in self.ids or not self.ignores_case:
            return self.ids.get(text)
        return next((ids for word, ids in self.ids.items() if word.lower() == text.lower()), None)


class TextTokenizer:
    """A Hugging Face tokenizer and the longest text of its model. Thread-safe."""

    def __init__(
        self, tokenizer: Any, max_tokens: int | None, position_limit: int | None, *, has_types: bool = False
    ) -> None:
        """`max_tokens` is the default limit of texts; `position_limit` limits all.

        `has_types`: the model takes the number of a token's text in a pair, if the tokenizer gives it.
        """
        self._tokenizer = tokenizer
        self._has_types = has_types
        # HAZARD: a fast tokenizer is reconfigured by each call (padding, truncation), so calls must not overlap.
        self._lock = threading.Lock()
        self._position_limit = position_limit
        own = min(tokenizer.model_max_length, position_limit or tokenizer.model_max_length)
        # transformers writes "no limit" as 10**30.
        self.max_tokens = min(max_tokens or sys.maxsize, own if own < 10**9 else DEFAULT_MAX_TOKENS)
        self.pad_id: int = tokenizer.pad_token_id or 0
        self.pads_left = tokenizer.padding_side == "left"

    def tokenize(
        self, texts: Sequence[str | TextPair], max_length: int | None, max_second: int | None = None
    ) -> list[TokenizedText]:
        """Tokenize, cut to `max_length` (None: the model's limit), without padding. Of a pair, the longer one is cut.

        Texts or pairs, not both at once. Of the second text of a pair only `max_second` tokens are read: the rest
        is not wanted, so it does not count as ignored.
        """
        length = self.check_length(max_length)
        if max_second is not None:
            texts = [self._with_short_second(text, max_second) for text in texts]
        whole = self._tokens(texts)
        long = [index for index, text in enumerate(whole) if text.run_length > length]
        # The tokenizer itself truncates: it places the special tokens.
        cut = dict(zip(long, self._tokens([texts[index] for index in long], length), strict=True))
        if any(text.run_length > length for text in cut.values()):  # the special tokens alone are more
            least = self._tokens([TextPair("", "") if isinstance(texts[long[0]], TextPair) else ""])[0].run_length
            raise EngineError(f"max_length {length}: this tokenizer cannot cut a text to fewer than {least} tokens")
        kept = [cut.get(index, text) for index, text in enumerate(whole)]
        return [
            replace(text, num_ignored=all_.run_length - text.run_length) for text, all_ in zip(kept, whole, strict=True)
        ]

    @property
    def ignores_case(self) -> bool:
        """True if texts that differ by case alone have the same tokens, as for CLIP."""
        normalizer = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None)
        return normalizer is not None and normalizer.normalize_str("A") == "a"

    def tokenize_words(self, text: str, max_length: int | None, words: LearnedWords) -> TokenizedText:
        """Tokenize a text with learned words, as `tokenize`: each becomes ids after those of the vocabulary."""
        room = self.check_length(max_length) - 2
        begin, end = self._tokens([""])[0].token_ids
        ids = [id_ for id_, _ in self._weighted_ids([WeightedText(text, 1.0)], words)]
        return TokenizedText((begin, *ids[: max(room, 0)], end), num_ignored=max(0, len(ids) - max(room, 0)))

    def chunk(self, text: str, max_length: int | None, words: LearnedWords | None = None) -> list[TokenizedText]:
        """Cut the whole text into pieces of at most `max_length` tokens, each between a begin and an end of its own.

        All pieces but the last are full, so a change at the end leaves earlier ones unchanged. A text that fits
        is one piece, as from `tokenize`. Raises EngineError beyond MAX_CHUNKS pieces.
        """
        return self._chunks([[WeightedText(text, 1.0)]], max_length, words)

    def chunk_weighted(
        self, prompt: str, max_length: int | None, words: LearnedWords | None = None
    ) -> list[TokenizedText]:
        """Cut a prompt with weights into pieces, as `chunk`, and at each BREAK. Raises EngineError."""
        return self._chunks(parse_weights(prompt), max_length, words)

    def chunk_comfyui(self, prompt: str, max_length: int | None) -> list[TokenizedText]:
        """Cut a prompt in ComfyUI's syntax into pieces, as `chunk`: where a bracket begins or ends, a few words that do
        not fit begin the next one. No learned words are read. Raises EngineError.
        """
        room = self.check_length(max_length) - 2
        groups = [self._weighted_ids([piece], None) for piece in parse_comfyui(prompt)]
        self._check_chunks(sum(map(len, groups)), 0, room)
        chunks: list[list[tuple[int, float]]] = [[]]
        for group in groups:
            left, may_split = group, len(group) >= _WHOLE_GROUP or len(group) > room
            while left:
                free = room - len(chunks[-1])
                taken = left if len(left) <= free else left[: free * may_split]
                chunks[-1] += taken
                if left := left[len(taken) :]:
                    chunks.append([])
        return [self._chunk(chunk) for chunk in chunks]

    def _weighted_ids(self, pieces: Sequence[WeightedText], words: LearnedWords | None) -> list[tuple[int, float]]:
        """Return the ids of pieces of text without begin and end, with their weights."""
        split: list[tuple[str, float]] = []
        for piece in pieces:
            texts = words.pattern.split(piece.text) if words else [piece.text]
            split += [(text, piece.weight) for text in texts if text]
        known = [words.ids_of(text) if words else None for text, _ in split]
        plain = iter(self._tokens([text for (text, _), ids in zip(split, known, strict=True) if ids is None]))
        return [
            (id_, weight)
            for (_, weight), ids in zip(split, known, strict=True)
            for id_ in (next(plain).token_ids[1:-1] if ids is None else ids)
        ]

    def _chunks(
        self, parts: Sequence[Sequence[WeightedText]], max_length: int | None, words: LearnedWords | None = None
    ) -> list[TokenizedText]:
        room = self.check_length(max_length) - 2
        chunks: list[TokenizedText] = []
        for pieces in parts:
            tokens = self._weighted_ids(pieces, words)
            self._check_chunks(len(tokens), len(chunks), room)
            chunks += [self._chunk(tokens[start : start + room]) for start in range(0, max(len(tokens), 1), room)]
        return chunks

    def _check_chunks(self, num_tokens: int, num_chunks: int, room: int) -> None:
        """Raise EngineError for more tokens than fit beside so many chunks."""
        if room < 1 or num_chunks + num_tokens / room > MAX_CHUNKS:
            most = MAX_CHUNKS * max(room, 0)
            raise EngineError(f"a text of {num_tokens} tokens: at most {most} can be encoded in chunks of {room + 2}")

    def _chunk(self, tokens: Sequence[tuple[int, float]]) -> TokenizedText:
        begin, end = self._tokens([""])[0].token_ids
        factors = (1.0, *(weight for _, weight in tokens)) if any(weight != 1.0 for _, weight in tokens) else ()
        return TokenizedText((begin, *(id_ for id_, _ in tokens), end), weights=factors)

    def fill_form(self, prompt: str, form: PromptForm, images: Sequence[PromptImage] = ()) -> str:
        """Return the text that a language model reads for a prompt, in a form with places for images, if there are any.

        Raises EngineError.
        """
        if form.template:
            shown = [form.image.format(number=number, image=image.text) for number, image in enumerate(images, 1)]
            return form.template.replace("{}", "".join(shown) + prompt, 1)
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise EngineError("the tokenizer of this text encoder has no chat template, which its pipeline asks for")
        variables = {**self._tokenizer.special_tokens_map, **dict(form.variables)}
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        if form.system:
            texts = {"system": form.system, "user": prompt.replace(form.removed, "") if form.removed else prompt}
            messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts.items()]
        text = render_chat_template(template, "default", messages, [], variables)
        begin = self._tokenizer.bos_token  # as transformers, which has only one where template and tokenizer add it
        adds_begin = begin and self._tokens([""])[0].token_ids[:1] == (self._tokenizer.bos_token_id,)
        return text.removeprefix(begin) if adds_begin else text

    def pad(self, text: TokenizedText) -> TokenIds:
        """Return the ids with a stock pipeline's padding."""
        padding = (self.pad_id,) * (text.run_length - len(text.token_ids))
        return padding + text.token_ids if self.pads_left else text.token_ids + padding

    def attended(self, text: TokenizedText, length: int) -> list[int]:
        """Return 1 for each attended token, 0 up to `length`. CLIP and T5 attend to their padding."""
        num_padding = text.run_length - len(text.token_ids)
        if text.form is None or not num_padding:
            return [1] * text.run_length + [0] * (length - text.run_length)
        own, padding = [1] * len(text.token_ids), [0] * num_padding
        found = padding + own if self.pads_left else own + padding
        return found + [0] * (length - text.run_length)

    def check_length(self, max_length: int | None) -> int:
        """Return the limit in tokens. Raises EngineError for one that the model has no positions for."""
        if max_length is None:
            return self.max_tokens
        limit = self._position_limit
        if max_length < 1 or (limit is not None and max_length > limit):
            raise EngineError(f"max_length {max_length}: expected 1 to {limit or 'any number of'} tokens")
        return max_length

    def _with_short_second(self, text: str | TextPair, num_tokens: int) -> str | TextPair:
        if not isinstance(text, TextPair):
            return text
        if not self._tokenizer.is_fast:
            raise EngineError("this model's tokenizer does not say which characters a token is of")
        with self._lock:
            options = {"padding": False, "truncation": False, "add_special_tokens": False, "verbose": False}
            ends = [
                end for _, end in self._tokenizer(text.second, return_offsets_mapping=True, **options).offset_mapping
            ]
        return text if len(ends) <= num_tokens else text._replace(second=text.second[: ends[num_tokens - 1]])

    def _tokens(self, texts: Sequence[str | TextPair], max_length: int | None = None) -> list[TokenizedText]:
        are_pairs = bool(texts) and all(isinstance(text, TextPair) for text in texts)
        columns: list[Any] = list(zip(*texts, strict=True)) if are_pairs else [texts]
        if isinstance(texts, str) or not all(isinstance(text, str) for column in columns for text in column):
            raise EngineError(f"texts to tokenize must be a sequence of strings, got {texts!r:.100}")
        for text in (text for column in columns for text in column):
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise EngineError(f"text {text!r:.100} contains an unpaired surrogate")
        if not texts:
            return []
        options = {"padding": False, "truncation": max_length is not None, "max_length": max_length}
        with self._lock:
            rows = self._tokenizer(*map(list, columns), verbose=False, **options)
        ids = [tuple(row) for row in rows["input_ids"]]
        types = rows.get("token_type_ids") if self._has_types else None
        if types is None:
            return [TokenizedText(row) for row in ids]
        # Without types a model assumes that all tokens are of the first type.
        given_types = [tuple(row) if any(row) else () for row in types]
        return [TokenizedText(row, type_ids=row_types) for row, row_types in zip(ids, given_types, strict=True)]


T = TypeVar("T")


def level_chunks(chunked: Sequence[Sequence[T]], empty: Callable[[int], T]) -> list[tuple[T, ...]]:
    """Bring all texts to the number of chunks of the longest: `empty(index)` is a chunk without text for text `index`.

    Classifier-free guidance runs prompt and negative prompt as rows of one batch, and SDXL joins two encoders' rows
    side by side: all four need one length.
    """
    most = max(len(chunks) for chunks in chunked)
    return [
        (*chunks, *[empty(index)] * (most - len(chunks))) if len(chunks) < most else tuple(chunks)
        for index, chunks in enumerate(chunked)
    ]


def join_chunks(encodings: Sequence[Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
    """Return one encoding: a layer's (L, D) of all chunks concatenated; "pooled" is the first one's."""
    if len(encodings) == 1:
        return encodings[0]
    names = encodings[0].keys() - {"pooled"}
    joined = {name: torch.cat([encoding[name] for encoding in encodings]) for name in names}
    return {"pooled": encodings[0]["pooled"], **joined}


def weighted_from(
    encoding: Mapping[str, torch.Tensor], text: TokenizedText, empty: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return a CLIP's encoding with its token vectors so many times as far from those of an empty text, as ComfyUI has
    it. The pooled vector stays.
    """
    if not text.weights:
        return encoding
    found = dict(encoding)
    for name in encoding.keys() - {"pooled"}:
        vectors_LD, empty_LD = encoding[name].float(), empty[name].float()
        factors_L1 = torch.ones(len(vectors_LD), 1)
        factors_L1[: len(text.weights), 0] = torch.tensor(text.weights)
        found[name] = (empty_LD + (vectors_LD - empty_LD) * factors_L1).to(encoding[name].dtype)
    return found


def weighted(encoding: Mapping[str, torch.Tensor], text: TokenizedText) -> Mapping[str, torch.Tensor]:
    """Return a CLIP's encoding with its token vectors times their weights, scaled so that their mean stays.

    The Stable Diffusion WebUI does the same. Raises EngineError if no scale keeps the mean.
    """
    if not text.weights:
        return encoding
    found = dict(encoding)
    for name in encoding.keys() - {"pooled"}:
        vectors_LD = encoding[name].float()
        factors_L1 = torch.ones(len(vectors_LD), 1)
        factors_L1[: len(text.weights), 0] = torch.tensor(text.weights)
        scaled_LD = vectors_LD * factors_L1
        scaled_LD = scaled_LD * (vectors_LD.mean() / scaled_LD.mean())
        if not scaled_LD.isfinite().all():
            raise EngineError("prompt: with these weights its tokens cancel each other; use smaller ones")
        found[name] = scaled_LD.to(encoding[name].dtype)
    return found
