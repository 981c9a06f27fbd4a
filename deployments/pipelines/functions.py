"""The functions that pipelines may name without a module. Each works on one item; its annotations are its signature."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "SHIPPED",
    "Classification",
    "classify",
    "enlarge_image",
    "fill_template",
    "join_texts",
    "missing_fields",
    "number_word",
    "resize_image",
    "single_digit",
    "softmax",
    "sum_question",
    "whole_number",
]

Vector = npt.NDArray[np.float32]
Image = npt.NDArray[np.uint8]  # (height, width, RGB)
_MAX_SIDE = 4096  # pixels of an enlarged image
_SIDE_MULTIPLE = 8  # what pipelines of diffusers take
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SUM = re.compile(
    r"[^0-9]*?(?<![-.,0-9])([0-9]{1,2})\s*(?:\+|plus)\s*([0-9]{1,2})(?![.,]?[0-9])[^0-9+]*", re.IGNORECASE
)
_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_-]*)\}")


class Classification(NamedTuple):
    """The likeliest label, and how likely each one is."""

    label: str
    scores: Vector


def sum_question(text: str) -> str:
    """Return the sum in a text as a question: "3+4" -> "What is 3 + 4?"."""
    match = _SUM.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a sum of two whole numbers below 100 such as 3 + 4, got {text[:80]!r}")
    return f"What is {int(match[1])} + {int(match[2])}?"


def whole_number(text: str) -> int:
    """Return the only whole number in a text: "It is 12." -> 12."""
    found = re.findall(r"-?[0-9]+", text)
    if len(found) != 1 or len(found[0]) > 18:
        raise ValueError(f"expected a text with one whole number, got {text[:80]!r}")
    return int(found[0])


def single_digit(text: str) -> int:
    """Return the only whole number in a text, which must be from 0 to 9."""
    number = whole_number(text)
    if not 0 <= number <= 9:
        raise ValueError(f"expected a number from 0 to 9, got {number}")
    return number


def number_word(number: int) -> str:
    """Spell a number: 7 -> "seven", 42 -> "forty-two"."""
    if not 0 <= number < 100:
        raise ValueError(f"expected a number from 0 to 99, got {number}")
    if number < len(_ONES):
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return f"{_TENS[tens]}-{_ONES[ones]}" if ones else _TENS[tens]


def fill_template(template: str, **values: str | int | float) -> str:
    """Fill in a template: "a {size} house" with size=big -> "a big house". Only names are read in the braces."""
    if missing := missing_fields(template, values):
        raise ValueError(f"the template wants {missing[0]!r} (given: {', '.join(values) or 'nothing'})")
    return _FIELD.sub(lambda match: str(values[match[1]]), template)


def missing_fields(template: str, given: Collection[str]) -> list[str]:
    """Return a template's names without a value, in their order."""
    return [name for name in dict.fromkeys(_FIELD.findall(template)) if name not in given]


def join_texts(first: str, second: str, separator: str = " ") -> str:
    """Join two texts."""
    return f"{first}{separator}{second}"


def enlarge_image(image: Image, factor: float = 2.0) -> Image:
    """Enlarge an image by Lanczos' filter; its sides are rounded down to what pipelines take."""
    from deployments.engines.records.input_images import resize_pixels  # only who enlarges needs it

    if not 1 <= factor <= 4:
        raise ValueError(f"factor {factor:g}: expected 1 to 4")
    height, width = (int(side * factor) // _SIDE_MULTIPLE * _SIDE_MULTIPLE for side in image.shape[:2])
    if not 0 < min(height, width) <= max(height, width) <= _MAX_SIDE:
        raise ValueError(f"an image of {width}x{height} pixels: expected sides of {_SIDE_MULTIPLE} to {_MAX_SIDE}")
    return resize_pixels(image, (width, height))


def resize_image(image: Image, width: int, height: int) -> Image:
    """Resize an image by Lanczos' filter: an upscaler's, say, to the size of the next stage."""
    from deployments.engines.records.input_images import resize_pixels  # only who resizes needs it

    if not 0 < min(height, width) <= max(height, width) <= _MAX_SIDE:
        raise ValueError(f"{width}x{height} pixels: expected sides of 1 to {_MAX_SIDE}")
    return resize_pixels(image, (width, height))


def softmax(scores: Vector) -> Vector:
    """Return the softmax of scores."""
    exponentials = np.exp(scores.astype(np.float64) - scores.max())
    probabilities: Vector = (exponentials / exponentials.sum()).astype(np.float32)
    return probabilities


def classify(logits: Vector, labels: tuple[str, ...]) -> Classification:
    """Return the label of the highest score, and the softmax of all."""
    if len(logits) != len(labels):
        # Not the fault of who asks: a mistake in the config that only the model's answer shows.
        raise RuntimeError(f"the model gives {len(logits)} scores, but the config has {len(labels)} labels")
    scores = softmax(logits)
    return Classification(labels[int(scores.argmax())], scores)


SHIPPED = {
    function.__name__: function
    for function in (
        *(sum_question, whole_number, single_digit, number_word),
        *(fill_template, join_texts, softmax, classify, enlarge_image, resize_image),
    )
}
