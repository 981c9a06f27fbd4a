"""Tokenizers from GGUF metadata against the stock tokenizers that the metadata was made of."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from deployments.engines.llm.models.gguf_tokenizer import check_gguf_tokenizer, gguf_tokenizer
from deployments.engines.records.protocol import EngineError
from infra.offline.gguf_vocabulary import vocabulary_metadata
from weights.records.errors import FormatError

HARD = [
    "",
    " ",
    "   three spaces and a tab\t\tand\n\n\nlines\r\n  ",
    "naïve café, Zürich, Ελληνικά, русский, 日本語テキスト, العربية, 한국어, हिन्दी",
    "👩‍👩‍👧 family, 🏳️‍🌈 flag, e\u0301 combining, \u200bzero width, \ufeffbom",
    "I'm, you'RE, they'Ll; 3.14159, 1234567890, ½, ٣٤٥, x²",
    "def f(x):\n    return {'a': x**2}  # comment\n\tif x<=3: pass",
    "<s>[INST] hi [/INST]</s><s> <unk> <0x0A> ▁▁ <|im_start|>user\nhi<|im_end|>",
    "aaaaaaaaaaaaaaaaaaaaaaaa   !!!!????....",
    "word" * 50,
]
CORPUS = [
    *HARD,
    "the quick brown fox jumps over the lazy dog and the other dogs",
    "0123 4567 89",
    "lower Lowest lowering",
]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def random_texts(count: int) -> list[str]:
    alphabet = [*"abcde ABC 012 \n\t'.,!?(){}éß中文👍", "  ", "ing", "'s", "<s>", "<|im_end|>", "▁"]
    return ["".join(random.choices(alphabet, k=random.randint(1, 60))) for _ in range(count)]


def byte_level(pattern: str | None) -> Tokenizer:
    core = Tokenizer(models.BPE())
    if pattern is None:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    core.train_from_iterator(CORPUS * 3, trainer)
    return core


def metadata_of(core: Tokenizer, **more: Any) -> dict[str, Any]:
    model = json.loads(core.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    tokens = tuple(sorted(vocabulary, key=lambda token: vocabulary[token]))
    special = {token.content for token in core.get_added_tokens_decoder().values()}
    kinds = np.array([3 if token in special else 1 for token in tokens], np.int32)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": tuple(" ".join(pair) for pair in model["merges"]),
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        "tokenizer.ggml.add_bos_token": False,
    } | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


@pytest.mark.parametrize(("pre", "pattern"), [("gpt-2", None), ("qwen2", QWEN), ("llama-bpe", LLAMA3)])
def test_byte_level_bpe_has_the_stock_ids(pre: str, pattern: str | None) -> None:
    core = byte_level(pattern)
    ours = gguf_tokenizer(metadata_of(core, pre=pre))
    for text in HARD + random_texts(300):
        expected = core.encode(text, add_special_tokens=False).ids
        assert ours(text, add_special_tokens=False)["input_ids"] == expected, text
        assert ours.decode(expected) == core.decode(expected, skip_special_tokens=False)


def sentencepiece() -> tuple[Tokenizer, dict[str, Any]]:
    """As LlamaConverter makes it of a sentencepiece model: bytes, then merges by score."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    trained.train_from_iterator(CORPUS * 3, trainer)
    learned = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    learned = [token for token in learned if not token.startswith("<")]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *[token for token in learned if len(token) > 1]]
    tokens += [token for token in learned if len(token) == 1]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [
        (token[:i], token[i:])
        for token in tokens[259:]
        for i in range(1, len(token))
        if token[:i] in vocabulary and token[i:] in vocabulary
    ]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return core, metadata


def test_sentencepiece_has_the_stock_ids_and_its_first_token() -> None:
    core, metadata = sentencepiece()
    ours = gguf_tokenizer(metadata)
    for text in HARD + random_texts(300):
        expected = core.encode(text, add_special_tokens=False).ids
        assert ours(text, add_special_tokens=False)["input_ids"] == expected, text
        assert ours(text)["input_ids"] == [1, *expected]
    without_kinds = {name: value for name, value in metadata.items() if name != "tokenizer.ggml.token_type"}
    text = "lower, lowest\tthe dogs"
    assert gguf_tokenizer(without_kinds)(text)["input_ids"] == ours(text)["input_ids"], "all tokens are plain ones"
    plain = "héllo  wörld 👍\n x"
    assert ours.decode(ours(plain)["input_ids"], skip_special_tokens=True) == plain


def merged(text: str, merges: list[tuple[str, str]]) -> list[str]:
    """BPE as it is defined: of the pairs of neighbours the earliest learned one, the first of these, until none is."""
    parts = list(text)
    while True:
        known = [(merges.index(pair), at) for at, pair in enumerate(itertools.pairwise(parts)) if pair in merges]
        if not known:
            return parts
        at = min(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_gemma_4_merges_characters_of_one_line() -> None:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    trained.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"] if not {"\n", "é"} & {*left, *right}]
    learned = sorted({*"".join(CORPUS).replace(" ", "▁"), *map("".join, merges)} - {"\n", "é"})
    special, lines = ["<pad>", "<eos>", "<bos>"], ["\n", "\n\n", "\n\n\n"]
    tokens = [*special, *(f"<0x{value:02X}>" for value in range(256)), *lines, *learned]
    ours = gguf_tokenizer(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": tuple(tokens),
            "tokenizer.ggml.token_type": np.array([3] * 3 + [6] * 256 + [1] * (len(lines) + len(learned)), np.int32),
            "tokenizer.ggml.merges": tuple(" ".join(pair) for pair in merges),
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
        }
    )
    for text in HARD + random_texts(300):
        expected: list[str] = []
        for piece in re.findall(r"\n+|[^\n]+", text.replace(" ", "▁")):
            parts = [piece] if piece in lines else merged(piece, merges)
            for part in parts:
                expected += [part] if part in tokens else [f"<0x{byte:02X}>" for byte in part.encode()]
        ids = ours(text, add_special_tokens=False)["input_ids"]
        assert [tokens[number] for number in ids] == expected, repr(text)
        assert ours(text)["input_ids"] == [2, *ids]
        assert ours.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize("pattern", [None, QWEN, LLAMA3, "sentencepiece"])
def test_what_is_written_of_a_tokenizer_json_gives_its_ids(pattern: str | None, tmp_path: Path) -> None:
    core = sentencepiece()[0] if pattern == "sentencepiece" else byte_level(pattern)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    if pattern == LLAMA3:
        core.model.ignore_merges = True
    core.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token_id": core.token_to_id("<s>"), "eos_token_id": [core.token_to_id("</s>"), 7]}
    num_rows = core.get_vocab_size() + 5
    metadata = vocabulary_metadata(tmp_path, config, num_rows)
    ours = gguf_tokenizer(metadata)
    for text in HARD + random_texts(100):
        assert ours(text)["input_ids"] == core.encode(text).ids, text
    assert len(metadata["tokenizer.ggml.tokens"]) == num_rows  # type: ignore[arg-type]
    assert (ours.eos_token_id, metadata["tokenizer.ggml.eot_token_id"]) == (core.token_to_id("</s>"), 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "Unigram"}}, "a Unigram model; GGUF files are written for BPE"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer .*Whitespace.* cannot be expressed"),
        ({"pre_tokenizer": {"type": "Digits", "individual_digits": True}}, "for which GGUF has no name"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 10**6}, "merges": []}},
            "token id 1000000, but the embedding has 500",
        ),
        ({"model": {"type": "BPE", "vocab": {"a": 1, "b": 1}, "merges": []}, "added_tokens": []}, "the same id"),
        ({"model": {"type": "BPE"}}, "not a tokenizer of the tokenizers library"),
    ],
)
def test_tokenizers_that_gguf_cannot_express_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    content = json.loads(byte_level(None).to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | change))
    with pytest.raises(FormatError, match=message):
        vocabulary_metadata(tmp_path, {}, 500)


def test_merges_that_scores_cannot_express_are_refused(tmp_path: Path) -> None:
    content = json.loads(sentencepiece()[0].to_str())
    longest = max(content["model"]["merges"], key=lambda pair: len("".join(pair)))
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if pair != longest]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, match="which scores cannot express"):
        vocabulary_metadata(tmp_path, {}, 10**5)


def test_chat_template_and_ends_come_along() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    metadata = metadata_of(byte_level(QWEN), pre="qwen2", add_bos_token=True, add_eos_token=True)
    ours = gguf_tokenizer(metadata | {"tokenizer.chat_template": template})
    text = ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>hi<|im_end|>"
    ids = ours(text)["input_ids"]
    assert (ids[0], ids[-1]) == (ours.bos_token_id, ours.eos_token_id)
    assert ours.decode(ids, skip_special_tokens=True) == "hi"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, r"model 'bert' is not supported; supported are gpt2 \(BPE\), llama \(SPM\), gemma4"),
        ({"pre": "novel"}, r"pre 'novel' is not supported; supported are .*qwen2"),
        ({"tokens": ()}, "tokens is .*expected an array of texts"),
        ({"tokens": ("a", "a")}, "a token twice|expected"),
        ({"token_type": np.zeros(3, np.int32)}, "token_type is .*expected"),
        ({"merges": np.zeros(2)}, "merges is .*expected an array of texts"),
        ({"scores": np.zeros(3, np.float32)}, "scores is .*expected"),
    ],
)
def test_damaged_or_unknown_vocabularies_are_refused(change: dict[str, Any], message: str) -> None:
    metadata = metadata_of(byte_level(QWEN), pre="qwen2")
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    with pytest.raises(EngineError, match=message):
        gguf_tokenizer(metadata)
    with pytest.raises(EngineError, match=message):
        check_gguf_tokenizer(metadata)


@pytest.mark.parametrize("name", ["bos", "eos", "padding", "unknown"])
@pytest.mark.parametrize("index", [-1, 10**6, 2**32 - 1, 0.5, "1"])
def test_a_special_token_that_is_none_of_the_vocabulary_is_left_out(name: str, index: Any) -> None:
    metadata = metadata_of(byte_level(QWEN), pre="qwen2") | {f"tokenizer.ggml.{name}_token_id": index}
    tokenizer = gguf_tokenizer(metadata)
    attribute = {"padding": "pad_token", "unknown": "unk_token"}.get(name, f"{name}_token")
    assert getattr(tokenizer, attribute) is None
    assert tokenizer("hi")["input_ids"]
