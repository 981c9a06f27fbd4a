"""Weights of words in prompts: what is read of them, and what becomes of the encoder's vectors."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
import transformers
from kit.seeding import seeded_random
from kit.tiny.parts import CLIP_TOKENS, clip, clip_tokenizer

from deployments.engines.records.protocol import EngineError
from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.prompt_weights import (
    MAX_DEPTH,
    WeightedText,
    from_compel,
    has_weights,
    parse_comfyui,
    parse_weights,
    without_weights,
)
from deployments.engines.text.tokens import MAX_CHUNKS, join_chunks, weighted

ROOM = CLIP_TOKENS - 2


def pieces(prompt: str) -> list[tuple[str, float]]:
    (chunk,) = parse_weights(prompt)
    return [(piece.text, round(piece.weight, 4)) for piece in chunk]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a cat", [("a cat", 1.0)]),
        ("a (cat) [dog] BREAK", [("a ", 1.0), ("cat", 1.1), (" [dog] BREAK", 1.0)]),
        ("(a (b:1.5) c:0.5)", [("a ", 0.5), ("b", 1.5), (" c", 0.5)]),  # a number is the weight itself
        ("((a)) (b)(c)", [("a", 1.21), (" ", 1.0), ("b", 1.1), ("c", 1.1)]),
        (r"\(a\) b", [("(a) b", 1.0)]),
        ("a (b (c) d", [("a ", 1.0), ("(b (c) d", 1.0)]),  # not closed: one piece
        ("((a)", [("(a", 1.1)]),
        ("a) (b)", [("a) (b)", 1.0)]),
        ("(a:b) () (:2)", [("a:b", 1.1), (" ", 1.0), (" ", 1.0), (":2", 1.1)]),
        ("(a: -0.5)", [("a", -0.5)]),
        ("(a:9e9 (b:1):2)", [("a:9e9 ", 2.0), ("b", 1.0)]),
    ],
)
def test_comfyui_reads_brackets(prompt: str, expected: list[tuple[str, float]]) -> None:
    assert [(piece.text, round(piece.weight, 4)) for piece in parse_comfyui(prompt)] == expected


def test_comfyui_brackets_are_bounded() -> None:
    deep = "(" * MAX_DEPTH + "a" + ")" * MAX_DEPTH
    for prompt, shown in [(f"(({deep}))", "brackets"), ("(a:11)", "weight 11"), ("(a:nan)", "weight nan")]:
        with pytest.raises(EngineError, match=shown):
            parse_comfyui(prompt)
    begun = time.process_time()
    for prompt in ("()" * 16_000, "(" * 32_000, ")" * 32_000, "(a:1)" * 6_000):
        with contextlib.suppress(EngineError):
            parse_comfyui(prompt)
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a cat", [("a cat", 1.0)]),
        ("a (cat) [dog]", [("a ", 1.0), ("cat", 1.1), (" ", 1.0), ("dog", 0.9091)]),
        ("(a (b:1.5) c:0.5)", [("a ", 0.5), ("b", 0.75), (" c", 0.5)]),
        ("((a)) [[b]]", [("a", 1.21), (" ", 1.0), ("b", 0.8264)]),
        (r"\(a\) \[b\] c\\d", [("(a) [b] c\\d", 1.0)]),
        ("(a [b", [("a ", 1.1), ("b", 1.0)]),
        (") a ]", [(") a ]", 1.0)]),
        ("[a:1.5]", [("a:1.5", 0.9091)]),
        ("(a: 1.5 ) b:c", [("a", 1.5), (" b:c", 1.0)]),
        ("(a:b) ()", [("a:b", 1.1), (" ", 1.0)]),
        ("(a:-0.5)", [("a", -0.5)]),
    ],
)
def test_brackets(prompt: str, expected: list[tuple[str, float]]) -> None:
    assert pieces(prompt) == expected
    assert without_weights(prompt) == "".join(text for text, _ in expected).strip()
    assert has_weights(prompt) == any(weight != 1.0 for _, weight in expected)


def test_break_begins_a_chunk_and_keeps_weights() -> None:
    assert parse_weights("a BREAK (b\nBREAK c:2) BREAKFAST") == [
        [WeightedText("a", 1.0)],
        [WeightedText("b", 2.0)],
        [WeightedText("c", 2.0), WeightedText(" BREAKFAST", 1.0)],
    ]
    assert without_weights("a BREAK b") == "a b"
    assert has_weights("a BREAK b")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a tall+ man++.", [("a ", 1), ("tall", 1.1), (" ", 1), ("man", 1.1**2), (".", 1)]),
        ("(a b)-- c-", [("a b", 0.9**2), (" ", 1), ("c", 0.9)]),
        ("(some (figs)1.3 here)+ (now)", [("some ", 1.1), ("figs", 1.3 * 1.1), (" here", 1.1), (" now", 1)]),
        ("((a)++ b)--, c", [("a", 1.1**2 * 0.9**2), (" b", 0.9**2), (", c", 1)]),
        ("well-known - C++", [("well-known - ", 1), ("C", 1.1**2)]),
        (r"C\+\+ \(a\) [b] (c", [("C++ (a) [b] (c", 1)]),
        ("a)+ b:5) (16:9)+", [("a)+ b:5) ", 1), ("16:9", 1.1)]),
        ("(a)2nd +-", [("a2nd +-", 1)]),
    ],
)
def test_weights_as_compel_has_them(prompt: str, expected: list[tuple[str, float]]) -> None:
    assert pieces(from_compel(prompt)) == [(text, pytest.approx(weight, abs=1e-4)) for text, weight in expected]


def test_marks_multiply_by_their_number() -> None:
    rng = seeded_random()
    for _ in range(20):
        up, down = rng.randint(1, 24), rng.randint(1, 24)
        (piece,) = parse_weights(from_compel(f"(a{'+' * up}){'-' * down}"))[0]
        assert piece.weight == pytest.approx(1.1**up * 0.9**down, rel=1e-4)


def test_calls_of_compel_are_refused() -> None:
    for call in ("blend", "and", "swap"):
        with pytest.raises(EngineError, match=rf"\.{call}\(\) of Compel is not supported; supported are its weights"):
            from_compel(f'("a", "b").{call}(0.5, 0.5)')


@pytest.mark.parametrize("prompt", ["(a:11)", "(a:-10.5)", "(" * 30 + "a" + ")" * 30, "(" * 9000 + "a"])
def test_weights_are_bounded(prompt: str) -> None:
    with pytest.raises(EngineError, match=r"has weight .*, expected -10 to 10"):
        parse_weights(prompt)


@pytest.mark.parametrize("prompt", ["(a)11", "a" + "+" * 25, "a" + "+" * 9000, "(a)99999"])
def test_weights_of_compel_are_bounded(prompt: str) -> None:
    with pytest.raises(EngineError, match=r"has weight .*, expected -10 to 10"):
        parse_weights(from_compel(prompt))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "unit", ["(", ")", "[a", "[", "(a)", "(:1.1)", "(a:1.1", ":", "\\", "1.1)", "BREAK ", "a b", "a+", "(a)-", "+"]
)
def test_hostile_prompts_take_linear_time(unit: str) -> None:
    def seconds(number: int) -> float:
        start = time.process_time()
        with contextlib.suppress(EngineError):
            parse_weights(unit * number)
            parse_weights(from_compel(unit * number))
        return time.process_time() - start

    assert any(seconds(16_000) < 12 * seconds(4_000) + 0.02 for _ in range(5))  # another process may disturb some


@pytest.fixture
def encoder() -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder(clip().eval(), clip_tokenizer())


def reference(encoder: TextEncoder, ids: list[int], factors: list[float]) -> torch.Tensor:
    """The WebUI's formula, over stock's own module: pad with end tokens, encode, multiply, bring back the mean."""
    tokenizer = clip_tokenizer()
    padding = CLIP_TOKENS - 1 - len(ids)
    row = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id, *[tokenizer.pad_token_id] * (padding - 1)]
    with torch.no_grad():
        z = encoder.module(torch.tensor([row]), output_hidden_states=True).hidden_states[-2][0]
    m = torch.tensor([1.0, *factors, *[1.0] * padding])
    scaled = z * m[:, None]
    return scaled * (z.mean() / scaled.mean())


def test_vectors_are_those_of_the_formula(encoder: TextEncoder) -> None:
    assert isinstance(encoder.module, transformers.CLIPTextModel)
    rng = seeded_random()
    words = ["cat", "dog", "bird", "red", "old"]
    for _ in range(5):
        chosen = [(rng.choice(words), round(rng.uniform(0.3, 1.9), 2)) for _ in range(rng.randint(2, 9))]
        prompt = " ".join(f"({word}:{weight})" for word, weight in chosen)
        tokenizer, ids, factors = clip_tokenizer(), [], []
        for number, (word, weight) in enumerate(chosen):
            # Blanks between brackets are pieces of their own, and no tokens to a CLIP.
            assert tokenizer(" " if number else "", add_special_tokens=False)["input_ids"] == []
            own = tokenizer(word, add_special_tokens=False)["input_ids"]
            ids, factors = ids + own, factors + [weight] * len(own)
        texts = encoder.tokenize_chunks(prompt, syntax="weighted")
        assert len(texts) == -(-len(ids) // ROOM)
        found = [weighted(encoding, text) for encoding, text in zip(encoder.encode(texts), texts, strict=True)]
        joined = join_chunks(found)["penultimate"]
        expected = [
            reference(encoder, ids[start : start + ROOM], factors[start : start + ROOM])
            for start in range(0, len(ids), ROOM)
        ]
        torch.testing.assert_close(joined, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_a_prompt_without_weights_is_the_plain_prompt(encoder: TextEncoder) -> None:
    texts = encoder.tokenize_chunks("a cat, (old)")
    plain = encoder.tokenize_chunks("a cat", syntax="weighted")
    assert plain == encoder.tokenize_chunks("a cat")
    assert all(not text.weights for text in (*texts, *plain))
    (encoding,) = encoder.encode(plain)
    assert weighted(encoding, plain[0]) is encoding


def test_encodings_are_shared_by_prompts_that_differ_in_weights_alone(encoder: TextEncoder) -> None:
    (low,), (high,) = (encoder.tokenize_chunks(f"a (cat:{weight})", syntax="weighted") for weight in (0.5, 1.5))
    assert low == high
    assert low.weights != high.weights


def test_too_many_chunks_are_refused(encoder: TextEncoder) -> None:
    with pytest.raises(EngineError, match="can be encoded in chunks"):
        encoder.tokenize_chunks("a BREAK " * (MAX_CHUNKS + 1), syntax="weighted")
