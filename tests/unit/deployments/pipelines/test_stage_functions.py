"""Functions as stages: their signatures, the errors of using them, and the shipped ones."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from kit.seeding import seeded_rng

from deployments.pipelines import functions
from deployments.pipelines.edge_types import FLOAT, IMAGE, INT, TEXT, TOKENS, VECTOR
from deployments.pipelines.stage_functions import FunctionUnusable, StageFunction, find_function
from deployments.records.errors import GenerationFailed, InvalidRequest

HERE = __name__


class Pair(NamedTuple):
    count: int
    tokens: list[int]


def count(text: str, tokens: list[int], stage: int | float = 1) -> Pair:
    return Pair(len(text) * int(stage), [*tokens, 7])


def invert(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    image[:] = 255 - image
    return image


def double(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return vector.astype(np.float64)  # type: ignore[return-value]  # the mistake under test


def grow(number: int) -> npt.NDArray[np.float32]:
    return np.zeros(number, np.float32)


def wrong_answer(text: str) -> int:
    return text  # type: ignore[return-value]  # the mistake under test


def huge(text: str) -> int:
    return 2**64


def breaks(text: str) -> str:
    return {}[text]


def refuses(text: str) -> str:
    raise ValueError(f"no {text}")


async def asynchronous(text: str) -> str:
    return text


def unannotated(text):  # type: ignore[no-untyped-def]
    return text


def positional(text: str, /) -> str:
    return text


def strange(text: dict[str, str]) -> str:
    return ""


def unknown_return(text: str) -> "Missing":  # type: ignore[name-defined]  # noqa: F821, UP037
    return text


def function(name: str) -> StageFunction:
    return find_function(f"{HERE}:{name}")


def test_annotations_are_the_signature() -> None:
    ports = function("count").ports
    assert {name: parameter.types for name, parameter in ports.parameters.items()} == {
        "text": (TEXT,),
        "tokens": (TOKENS,),
        "stage": (INT, FLOAT),
    }
    assert [name for name, parameter in ports.parameters.items() if parameter.required] == ["text", "tokens"]
    assert ports.outputs == {"count": INT, "tokens": TOKENS}
    assert function("invert").ports.outputs == {"output": IMAGE}
    assert find_function("classify").ports.outputs == {"label": TEXT, "scores": VECTOR}


def test_items_are_called_one_by_one() -> None:
    outputs = function("count")({"text": ["a", "bcd"], "tokens": [(1,), (2, 3)]}, {"stage": 2}, 2)
    assert list(outputs["count"]) == [2, 6]
    assert outputs["tokens"] == [(1, 7), (2, 3, 7)]


def test_arguments_are_the_functions_own() -> None:
    images = seeded_rng().integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)
    before = images.copy()
    outputs = function("invert")({"image": images}, {}, 2)
    np.testing.assert_array_equal(outputs["output"], 255 - before)
    np.testing.assert_array_equal(images, before)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "parts"),
    [
        ("refuses", {"text": ["cake"]}, InvalidRequest, ["refuses", "no cake"]),
        ("breaks", {"text": ["x"]}, GenerationFailed, ["breaks failed", "KeyError"]),
        ("wrong_answer", {"text": ["x"]}, GenerationFailed, ["output should be one item of int", "'x'"]),
        ("huge", {"text": ["x"]}, GenerationFailed, ["one item of int"]),
        ("double", {"vector": np.ones((1, 2), np.float32)}, GenerationFailed, ["float64[2]"]),
        ("grow", {"number": np.array([1, 2])}, GenerationFailed, ["different shapes"]),
    ],
)
def test_failures_say_which_function(name: str, arguments: Any, error: type[Exception], parts: list[str]) -> None:
    num_items = len(next(iter(arguments.values())))
    with pytest.raises(error) as caught:
        function(name)(arguments, {}, num_items)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("softmx", "did you mean 'softmax'"),
        ("no_such_module_here:f", "cannot be imported: ModuleNotFoundError"),
        ("math:nothing", "cannot be imported: AttributeError"),
        ("math:pi", "not a plain function"),
        (f"{HERE}:asynchronous", "not a plain function"),
        (f"{HERE}:unannotated", "no annotation"),
        (f"{HERE}:positional", "cannot be given by name"),
        (f"{HERE}:strange", "annotated dict[str, str]; expected one of"),
        (f"{HERE}:unknown_return", "annotations cannot be read"),
    ],
)
def test_what_cannot_be_a_stage_says_why(name: str, part: str) -> None:
    with pytest.raises(FunctionUnusable) as caught:
        find_function(name)
    assert part in str(caught.value)


def test_every_shipped_function_is_usable() -> None:
    for name in functions.SHIPPED:
        assert find_function(name).ports.outputs


@pytest.mark.parametrize("text", ["3 + 4", "3+4", "What is 3 + 4?", "what's 3 plus 4", " 03 + 4 = ?", "3 + 4."])
def test_a_sum_is_found(text: str) -> None:
    assert functions.sum_question(text) == "What is 3 + 4?"


@pytest.mark.parametrize(
    "text", ["", "seven", "3 - 4", "3 + 4 + 5", "-3 + 4", "3.5 + 4", "3 + 4.5", "100 + 1", "1 + 100"]
)
def test_anything_else_is_no_sum(text: str) -> None:
    with pytest.raises(ValueError, match="expected a sum"):
        functions.sum_question(text)


def test_numbers_in_texts() -> None:
    assert functions.whole_number("It is 12.") == 12
    assert functions.single_digit("7.") == 7
    for text in ("none", "1 and 2"):
        with pytest.raises(ValueError, match="one whole number"):
            functions.whole_number(text)
    with pytest.raises(ValueError, match=f"^expected a text with one whole number, got '{'x' * 80}'$"):
        functions.whole_number("x" * 100_000)
    for text in ("11.", "-3"):
        with pytest.raises(ValueError, match="from 0 to 9"):
            functions.single_digit(text)


def test_number_words() -> None:
    words = [functions.number_word(number) for number in range(100)]
    assert len(set(words)) == 100
    assert [words[number] for number in (0, 7, 13, 20, 42, 99)] == [
        "zero",
        "seven",
        "thirteen",
        "twenty",
        "forty-two",
        "ninety-nine",
    ]
    with pytest.raises(ValueError, match="0 to 99"):
        functions.number_word(100)


def test_templates_read_nothing_but_names() -> None:
    assert functions.fill_template("a {size} house, {n}", size="big", n=3) == "a big house, 3"
    assert functions.fill_template("{x.__class__} {0} {}", x="y") == "{x.__class__} {0} {}"
    with pytest.raises(ValueError, match=r"'size' \(given: n\)"):
        functions.fill_template("a {size}", n=1)


def test_classification_is_softmax_and_its_label() -> None:
    logits = seeded_rng().normal(size=4).astype(np.float32) * 30
    label, scores = functions.classify(logits, ("a", "b", "c", "d"))
    total = sum(math.exp(float(value) - float(logits.max())) for value in logits)
    expected = [math.exp(float(value) - float(logits.max())) / total for value in logits]
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-30)  # float32 has few bits left below that
    assert label == "abcd"[int(np.argmax(logits))]
    with pytest.raises(RuntimeError, match="4 scores, but the config has 3"):
        functions.classify(logits, ("a", "b", "c"))
