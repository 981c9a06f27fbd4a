from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deployments.engines.llm.tokenizer import IncrementalDecoder, StopMatcher

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁Hello", "▁world", "▁", "lo", "▁▁", ",", "wor", "▁é", "…"]


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """The decoder of Llama 2: spaces are letters of words, unknown characters are bytes."""
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *BYTES, *WORDS])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġhello", "Ã©", "ĠâĤ", "ðŁ"]  # the last two end within a character
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet, *words])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


SENTENCEPIECE, BYTE_LEVEL = sentencepiece_tokenizer(), byte_level_tokenizer()


def words(*names: str) -> list[int]:
    return SENTENCEPIECE.convert_tokens_to_ids(list(names))


def pieces(tokenizer, prompt, completion) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, prompt)
    return [*(decoder.feed(token) for token in completion), decoder.flush()]


def added_text(tokenizer, prompt, completion) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    return tokenizer.decode([*prompt, *completion], skip_special_tokens=True)[len(before) :]


def test_the_space_before_a_word_is_kept_behind_text_and_dropped_at_the_beginning():
    assert pieces(SENTENCEPIECE, words("▁Hello"), words("▁world", "lo")) == [" world", "lo", ""]
    assert pieces(SENTENCEPIECE, words("<s>"), words("▁world", "lo")) == ["world", "lo", ""]
    assert pieces(SENTENCEPIECE, words("▁Hello"), words("</s>", "▁world")) == ["", " world", ""]


def test_characters_of_several_tokens_come_whole():
    emoji = BYTE_LEVEL("🙂", add_special_tokens=False)["input_ids"]
    assert len(emoji) == 4
    assert pieces(BYTE_LEVEL, BYTE_LEVEL("a")["input_ids"], emoji) == ["", "", "", "🙂", ""]
    parts = words("<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "▁world")
    assert pieces(SENTENCEPIECE, words("▁Hello"), parts) == ["", "", "", "🙂", " world", ""]


def test_an_unfinished_character_is_flushed_at_the_end():
    emoji = BYTE_LEVEL("🙂", add_special_tokens=False)["input_ids"]
    assert pieces(BYTE_LEVEL, BYTE_LEVEL("a")["input_ids"], emoji[:3]) == ["", "", "", "�"]


@settings(max_examples=100, deadline=None)
@given(st.text("a é🙂", max_size=6), st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=20))
def test_byte_level_pieces_join_to_the_whole(prompt, completion):
    prompt_ids = BYTE_LEVEL(prompt)["input_ids"]
    assert "".join(pieces(BYTE_LEVEL, prompt_ids, completion)) == added_text(BYTE_LEVEL, prompt_ids, completion)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(words(*WORDS)), max_size=4),
    st.lists(
        st.one_of(
            st.sampled_from([[token] for token in words(*WORDS, "</s>")]),
            st.characters(codec="utf-8").map(lambda char: words(*(BYTES[byte] for byte in char.encode()))),
        ),
        max_size=10,
    ),
)
def test_sentencepiece_pieces_join_to_the_whole(prompt, parts):
    completion = [token for part in parts for token in part]
    joined = "".join(pieces(SENTENCEPIECE, prompt, completion))
    assert joined == added_text(SENTENCEPIECE, prompt, completion)


class DecodesAll(IncrementalDecoder):
    """Looks at all tokens since the last text, each time."""

    def feed(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._decode()
        if text.endswith("\ufffd") or len(text) <= len(self._shown):
            return ""
        piece = text[len(self._shown) :]
        del self._token_ids[: self._num_shown]
        self._num_shown = len(self._token_ids)
        self._shown = self._decode()
        return piece


RUNS = st.lists(st.tuples(st.sampled_from(["bytes", "special", "words", "any"]), st.integers(1, 40)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([SENTENCEPIECE, BYTE_LEVEL]), RUNS, st.randoms(use_true_random=False))
def test_long_runs_that_give_no_text_change_no_piece(tokenizer, runs, chance):
    def draw(kind):
        if kind == "special":
            return tokenizer.convert_tokens_to_ids(chance.choice(["<s>", "</s>"]))
        if tokenizer is SENTENCEPIECE:
            return chance.choice(words(*(WORDS if kind == "words" else BYTES if kind == "any" else BYTES[0x80:])))
        return chance.randrange(len(BYTE_LEVEL))

    completion = [draw(kind) for kind, count in runs for _ in range(count)]
    expected = DecodesAll(tokenizer, words("▁Hello"))
    found = [*(expected.feed(token) for token in completion), expected.flush()]
    assert pieces(tokenizer, words("▁Hello"), completion) == found


@pytest.mark.parametrize("token", ["</s>", "<0x80>"])
def test_what_a_token_takes_does_not_grow_with_those_that_gave_no_text(monkeypatch, token):
    sizes, decode = [], SENTENCEPIECE.decode
    monkeypatch.setattr(
        SENTENCEPIECE, "decode", lambda ids, **options: sizes.append(len(ids)) or decode(ids, **options)
    )
    assert pieces(SENTENCEPIECE, words("▁Hello"), words(*[token] * 500, "▁world"))[-2].endswith(" world")
    assert sum(sorted(sizes)[:-3]) < 500 * 20  # all of them are looked at where their text is shown, and at the end


def shown(stop, parts) -> tuple[str, bool]:
    matcher = StopMatcher(stop)
    text = "".join(matcher.feed(part) for part in parts)
    assert matcher.stopped == (matcher.found in stop)
    return text + matcher.flush(), matcher.stopped


@pytest.mark.parametrize(
    ("stop", "parts", "text", "stopped"),
    [
        (("\n\n",), ["a\n", "b\n", "\nc"], "a\nb", True),
        (("END",), ["no E", "N", "d"], "no ENd", False),
        (("END",), ["E", "N"], "EN", False),
        (("aab",), ["aa", "ab"], "a", True),
        (("abc", "b"), ["abc"], "a", True),
        (("xab", "b"), ["xa", "b!"], "", True),
        ((), ["a", "b"], "ab", False),
    ],
)
def test_stop_strings(stop, parts, text, stopped):
    assert shown(stop, parts) == (text, stopped)


def test_only_a_possible_beginning_is_held_back():
    matcher = StopMatcher(["<end>"])
    assert [matcher.feed(part) for part in ("ab<", "en", "x", "y<e")] == ["ab", "", "<enx", "y"]
    assert matcher.flush() == "<e"


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab", max_size=4), max_size=6),
)
def test_the_result_does_not_depend_on_the_pieces(stop, parts):
    text, stopped = shown(stop, parts)
    assert (text, stopped) == shown(stop, list("".join(parts)))
    assert stopped == any(s in "".join(parts) for s in stop)
    assert not any(s in text for s in stop)
