"""Texts of a request for its encoders, as token ids: in chunks where they are long and the model says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.model import LongText, TextPadding
from configs.options import PromptSyntax
from deployments.engines.records.prompt_images import PromptImage
from deployments.engines.records.protocol import PENULTIMATE, ClipLayer, EngineError, PromptForm
from deployments.engines.text.tokens import LearnedWords, TextPair, TokenizedText, level_chunks
from deployments.modules.encoders import EncoderLora, KeyedEncoder

Text = str | TextPair | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextItem:
    """One text or pair, or the token ids of one, for one encoder. Warnings and errors call it `name`.

    `max_length` None is the encoder's limit, and `max_second` bounds the second text of a pair. `keep` asks the cache
    not to evict the encoding. `images` are seen in it. One `alone` shares no forward, and its encoding is another to
    the cache.
    """

    keyed: KeyedEncoder
    text: Text
    name: str
    max_length: int | None = None
    max_second: int | None = None
    padding: TextPadding = "stock"
    long_text: LongText = "truncate"
    as_embedding: bool = False
    keep: bool = False
    layer: ClipLayer = PENULTIMATE
    form: PromptForm | None = None
    images: tuple[PromptImage, ...] = ()
    syntax: PromptSyntax = "plain"
    loras: tuple[EncoderLora, ...] = ()
    words: LearnedWords | None = None
    alone: bool = False


def embedding_items(
    keyed: KeyedEncoder,
    texts: Sequence[Text],
    long_text: LongText = "truncate",
    first: int = 0,
    max_second: int | None = None,
    before: str = "",
) -> list[TextItem]:
    """Return items that give one vector each; `first` is the number of the first one in its request.

    `before` stands before every text.

    Raises EngineError for "chunk".
    """
    if long_text == "chunk":
        raise EngineError("long_text 'chunk' makes longer sequences, and an embedding is one vector: use truncate")
    rules: dict[str, Any] = {"long_text": long_text, "as_embedding": True, "max_second": max_second}
    named = (
        (f"{'document' if isinstance(text, TextPair) else 'input'} {at}", text) for at, text in enumerate(texts, first)
    )
    return [
        TextItem(keyed, before + text if isinstance(text, str) else text, name, keep=text == "", **rules)
        for name, text in named
    ]


def tokenize_items(items: Sequence[TextItem]) -> list[tuple[TokenizedText, ...]]:
    """Return for each item its text, or the chunks of its text.

    Raises EngineError for a text that its `long_text` rule refuses.
    """
    found: list[tuple[TokenizedText, ...]] = [()] * len(items)
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, item in enumerate(items):
        encoder = item.keyed.encoder
        if not isinstance(item.text, str | TextPair):
            found[number] = (encoder.accept_ids(item.text),)
        elif item.long_text == "chunk":
            rules: dict[str, Any] = {"layer": item.layer, "syntax": item.syntax, "words": item.words}
            found[number] = tuple(encoder.tokenize_chunks(str(item.text), item.max_length, **rules))
        elif item.words and item.words.pattern.search(str(item.text)):
            text = encoder.tokenize_words(str(item.text), item.max_length, item.words, layer=item.layer)
            _check_whole(item, text)
            found[number] = (text,)
        else:
            how = (
                *(type(item.text), item.max_length, item.max_second, item.padding),
                *(item.as_embedding, item.layer, item.form, item.images),
            )
            alike.setdefault((encoder, *how), []).append(number)
    for numbers in alike.values():
        first = items[numbers[0]]
        texts = first.keyed.encoder.tokenize(
            [items[number].text for number in numbers],  # type: ignore[misc]  # no token ids
            first.max_length,
            padding=first.padding,
            as_embedding=first.as_embedding,
            layer=first.layer,
            form=first.form,
            images=first.images,
            max_second=first.max_second,
        )
        for number, text in zip(numbers, texts, strict=True):
            _check_whole(items[number], text)
            found[number] = (text,)
    return _level(items, found)


def cut_warnings(items: Sequence[TextItem], chunked: Sequence[Sequence[TokenizedText]]) -> tuple[str, ...]:
    """Return a warning for each text that was truncated."""
    return tuple(
        f"{item.name} was cut to {len(text.token_ids)} tokens; {text.num_ignored} more were ignored"
        for item, texts in zip(items, chunked, strict=True)
        for text in texts
        if text.num_ignored
    )


def _level(items: Sequence[TextItem], chunked: Sequence[tuple[TokenizedText, ...]]) -> list[tuple[TokenizedText, ...]]:
    # ComfyUI's prompts of several lengths stay so: each is read in a forward of its own.
    in_chunks = [number for number, item in enumerate(items) if item.long_text == "chunk" and item.syntax != "comfyui"]
    if not in_chunks:
        return list(chunked)

    def empty(place: int) -> TokenizedText:
        item = items[in_chunks[place]]
        return item.keyed.encoder.tokenize_chunks("", item.max_length, layer=item.layer)[0]

    levelled = level_chunks([chunked[number] for number in in_chunks], empty)
    by_number = dict(zip(in_chunks, levelled, strict=True))
    return [by_number.get(number, texts) for number, texts in enumerate(chunked)]


def _check_whole(item: TextItem, text: TokenizedText) -> None:
    if text.num_ignored and item.long_text == "error":
        limit = len(text.token_ids)
        raise EngineError(f"{item.name} has {limit + text.num_ignored} tokens, and at most {limit} can be encoded")


def num_characters(item: TextItem) -> int:
    """Return the characters of an item's text, or the number of its token ids."""
    return sum(map(len, item.text)) if isinstance(item.text, TextPair) else len(item.text)


def words_in(item: TextItem, text: TokenizedText) -> LearnedWords | None:
    """Return the learned words that this text of an item contains."""
    if item.words is None:
        return None
    return item.words if max(text.token_ids) >= min(ids[0] for ids in item.words.ids.values()) else None
