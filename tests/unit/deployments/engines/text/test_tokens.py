"""Truncation as the tokenizer itself does it, what it cost, and chunks by a plain formula."""

from __future__ import annotations

import random

import pytest

from deployments.engines.records.protocol import EngineError
from deployments.engines.text.tokens import MAX_CHUNKS, TokenizedText, level_chunks


def random_text(length):
    return "".join(random.choices("abcdef 123,ß汉", k=length))


@pytest.mark.parametrize("name", ["clip", "t5"])
def test_tokens_are_the_tokenizers_own_and_losses_are_counted(request, name):
    encoder = request.getfixturevalue(name)
    for length in (3, 4, 7, 10):
        texts = [random_text(count) for count in (0, 1, 5, 9, 10, 40)]
        stock = encoder.tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        whole = encoder.tokenizer(texts)["input_ids"]
        for text, cut, full in zip(encoder.ours.tokenize(texts, length), stock, whole, strict=True):
            assert text == TokenizedText(tuple(cut), padded_length=length)
            assert text.num_ignored == len(full) - len(cut)
            assert text.run_length == length
        for text, cut in zip(encoder.ours.tokenize(texts, length, padding="trimmed"), stock, strict=True):
            assert text == TokenizedText(tuple(cut))


def test_lengths_without_room_for_text(clip, t5):
    for length in (1, 2):
        assert all(text.run_length == length for text in t5.ours.tokenize(["abc", ""], length))
    assert len(clip.ours.tokenize([""], 2)[0].token_ids) == 2
    with pytest.raises(EngineError, match="max_length 1: this tokenizer cannot cut a text to fewer than 2 tokens"):
        clip.ours.tokenize(["abc"], 1)


def test_chunks_hold_the_whole_text(clip):
    for count in (0, 1, 7, 8, 9, 16, 17, 100):
        text = "".join(random.choices("abcdef", k=count))
        begin, *content, end = clip.tokenizer(text)["input_ids"]
        pieces = [content[start : start + 8] for start in range(0, len(content), 8)] or [[]]
        chunks = clip.ours.tokenize_chunks(text)
        assert chunks == [TokenizedText((begin, *piece, end), padded_length=10) for piece in pieces]
    assert clip.ours.tokenize_chunks("abc") == clip.ours.tokenize(["abc"])
    assert len(clip.ours.tokenize_chunks("a" * 8 * MAX_CHUNKS)) == MAX_CHUNKS
    with pytest.raises(EngineError, match="a text of 129 tokens: at most 128 can be encoded in chunks of 10"):
        clip.ours.tokenize_chunks("a" * 8 * MAX_CHUNKS + "a")
    with pytest.raises(EngineError, match="at most 0 can be encoded in chunks of 2"):
        clip.ours.tokenize_chunks("a", max_length=2)


def test_all_texts_get_as_many_chunks():
    assert level_chunks([["a", "b", "c"], [], ["d"]], lambda index: f"empty {index}") == [
        ("a", "b", "c"),
        ("empty 1",) * 3,
        ("d", "empty 2", "empty 2"),
    ]
