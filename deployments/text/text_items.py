"""Texts of one request -> what their encoders run: cut, refused or in chunks, as the model says. Ray-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.model import LongText, TextPadding
from deployments.engines.protocol import ClipLayer, EngineError
from deployments.engines.text.chunks import level_chunks
from deployments.engines.text.tokens import TokenizedText
from deployments.text.keyed_encoders import KeyedEncoder

Text = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextItem:
    """One text, or the token ids of one, for one encoder. `name` is what warnings and errors call it.

    `max_length` None is the encoder's limit. `keep` asks the cache not to let it go.
    """

    keyed: KeyedEncoder
    text: Text
    name: str
    max_length: int | None = None
    padding: TextPadding = "stock"
    long_text: LongText = "truncate"
    as_embedding: bool = False
    keep: bool = False
    layer: ClipLayer = "penultimate"


def embedding_items(
    keyed: KeyedEncoder, texts: Sequence[Text], long_text: LongText = "truncate", first: int = 0
) -> list[TextItem]:
    """Texts of which one vector each is wanted; `first` is the number of the first one in its request.

    Raises EngineError for "chunk".
    """
    if long_text == "chunk":
        raise EngineError("long_text 'chunk' makes longer sequences, and an embedding is one vector: use truncate")
    return [
        TextItem(keyed, text, f"input {number}", long_text=long_text, as_embedding=True, keep=text == "")
        for number, text in enumerate(texts, first)
    ]


def tokenize_items(items: Sequence[TextItem]) -> list[tuple[TokenizedText, ...]]:
    """Each item's text, as the one or more texts that are encoded for it. Raises EngineError by `long_text`."""
    found: list[tuple[TokenizedText, ...]] = [()] * len(items)
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, item in enumerate(items):
        encoder = item.keyed.encoder
        if not isinstance(item.text, str):
            found[number] = (encoder.accept_ids(item.text),)
        elif item.long_text == "chunk":
            found[number] = tuple(encoder.tokenize_chunks(item.text, item.max_length))
        else:
            alike.setdefault((encoder, item.max_length, item.padding, item.as_embedding, item.layer), []).append(number)
    for numbers in alike.values():
        first = items[numbers[0]]
        texts = first.keyed.encoder.tokenize(
            [str(items[number].text) for number in numbers],
            first.max_length,
            padding=first.padding,
            as_embedding=first.as_embedding,
            layer=first.layer,
        )
        for number, text in zip(numbers, texts, strict=True):
            _check_whole(items[number], text)
            found[number] = (text,)
    return _level(items, found)


def cut_warnings(items: Sequence[TextItem], chunked: Sequence[Sequence[TokenizedText]]) -> tuple[str, ...]:
    """What was ignored of which text, in words."""
    return tuple(
        f"{item.name} was cut to {len(text.token_ids)} tokens; {text.num_ignored} more were ignored"
        for item, texts in zip(items, chunked, strict=True)
        for text in texts
        if text.num_ignored
    )


def _level(items: Sequence[TextItem], chunked: Sequence[tuple[TokenizedText, ...]]) -> list[tuple[TokenizedText, ...]]:
    in_chunks = [number for number, item in enumerate(items) if item.long_text == "chunk"]
    if not in_chunks:
        return list(chunked)

    def empty(place: int) -> TokenizedText:
        item = items[in_chunks[place]]
        return item.keyed.encoder.tokenize_chunks("", item.max_length)[0]

    levelled = level_chunks([chunked[number] for number in in_chunks], empty)
    by_number = dict(zip(in_chunks, levelled, strict=True))
    return [by_number.get(number, texts) for number, texts in enumerate(chunked)]


def _check_whole(item: TextItem, text: TokenizedText) -> None:
    if text.num_ignored and item.long_text == "error":
        limit = len(text.token_ids)
        raise EngineError(f"{item.name} has {limit + text.num_ignored} tokens, and at most {limit} can be encoded")
