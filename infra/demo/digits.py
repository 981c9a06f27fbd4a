"""The data set of the diffusion demo models: handwritten digits, their captions, and a judge.

Images are the 1,797 UCI optical digits that scikit-learn carries (8x8, 17 grey levels), upscaled
to 32x32. "Ink" below is a map in 0..1 (1 = ink); "pixels" are what the models see: (N, 3, 32, 32)
in -1..1, black ink on white paper unless inverted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

IMAGE_SIZE = 32
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CANONICAL_TEMPLATE = "a handwritten {word}"
TEMPLATES = (
    CANONICAL_TEMPLATE,
    "a handwritten {digit}",
    "the digit {word}",
    "the digit {digit}",
    "{word}",
    "{digit}",
    "the number {word}",
    "the number {digit}",
    "a picture of a {word}",
    "a handwritten digit {digit}",
)
CANONICAL_SHARE = 0.3
CAPITALISED_SHARE = 0.1
EMPTY_SHARE = 0.1


@dataclass(frozen=True)
class DigitSet:
    """`ink` is (N, 32, 32) float32 in 0..1, `labels` is (N,) int64."""

    ink: torch.Tensor
    labels: torch.Tensor


def load_split(held_out_share: float = 0.2) -> tuple[DigitSet, DigitSet]:
    """(train, held out): no model and no judge ever sees the held-out part."""
    digits = load_digits()
    ink = upscale(torch.tensor(digits.images / 16.0, dtype=torch.float32))
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, held_out = train_test_split(
        np.arange(len(labels)), test_size=held_out_share, random_state=0, stratify=digits.target
    )
    return DigitSet(ink[train], labels[train]), DigitSet(ink[held_out], labels[held_out])


def upscale(small: torch.Tensor) -> torch.Tensor:
    """(N, 8, 8) -> (N, 32, 32) ink: a margin of one cell, bicubic, then more contrast.

    The raw digits touch the upper and lower edge; without the margin thick strokes would be cut
    off, and without the contrast the holes of an eight fill with grey.
    """
    padded = F.pad(small[:, None], (1, 1, 1, 1))
    large = F.interpolate(padded, size=IMAGE_SIZE, mode="bicubic", align_corners=False)
    return ((large[:, 0] - 0.25) / 0.5).clamp(0.0, 1.0)


def thicken(ink: torch.Tensor, radius: int = 1) -> torch.Tensor:
    """Grey dilation: every pixel becomes the darkest ink within `radius` pixels."""
    return F.max_pool2d(ink[:, None], 2 * radius + 1, stride=1, padding=radius)[:, 0]


def outline(ink: torch.Tensor) -> torch.Tensor:
    """(N, 32, 32) ink -> (N, 32, 32) ink of a pen, one pixel wide, that goes round the strokes."""
    strokes = (ink > 0.5).float()
    inside = -F.max_pool2d(-strokes[:, None], 3, stride=1, padding=1)[:, 0]
    return strokes - inside


def to_image(ink: torch.Tensor) -> Image.Image:
    """(32, 32) ink -> an image, black on white."""
    return Image.fromarray(((1 - ink.numpy()) * 255).round().astype(np.uint8)).convert("RGB")


def jitter(ink: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Slightly rotated, scaled and shifted copies, (N, 32, 32) -> (N, 32, 32)."""
    count = len(ink)
    spread = torch.rand(4, count, generator=generator) * 2 - 1
    angle, scale = spread[0] * 0.12, 1 + spread[1] * 0.06
    rows = torch.stack(
        [
            torch.stack([scale * angle.cos(), -scale * angle.sin(), spread[2] * 0.06], dim=1),
            torch.stack([scale * angle.sin(), scale * angle.cos(), spread[3] * 0.06], dim=1),
        ],
        dim=1,
    )
    grid = F.affine_grid(rows, [count, 1, IMAGE_SIZE, IMAGE_SIZE], align_corners=False)
    moved = F.grid_sample(ink[:, None], grid, mode="bicubic", align_corners=False)
    return moved[:, 0].clamp(0.0, 1.0)


def to_pixels(ink: torch.Tensor, inverted: bool = False) -> torch.Tensor:
    """(N, 32, 32) ink -> (N, 3, 32, 32) in -1..1; inverted means white ink on black paper."""
    grey = ink * 2 - 1 if inverted else 1 - ink * 2
    return grey[:, None].expand(-1, 3, -1, -1).contiguous()


def canonical_prompt(label: int) -> str:
    return CANONICAL_TEMPLATE.format(word=WORDS[label])


def draw_caption(label: int, rng: random.Random) -> str:
    """One training caption; sometimes empty, which gives negative prompts a meaning."""
    if rng.random() < EMPTY_SHARE:
        return ""
    canonical = rng.random() < CANONICAL_SHARE
    template = CANONICAL_TEMPLATE if canonical else rng.choice(TEMPLATES)
    caption = template.format(word=WORDS[label], digit=label)
    return caption.capitalize() if rng.random() < CAPITALISED_SHARE else caption


def first_of_each(data: DigitSet, count: int) -> DigitSet:
    """The first `count` of each digit, 0 to 9."""
    chosen = torch.cat([(data.labels == label).nonzero()[:count, 0] for label in range(10)])
    return DigitSet(data.ink[chosen], data.labels[chosen])


def all_captions() -> list[str]:
    """Every caption that training can draw, for building the text vocabularies."""
    plain = [t.format(word=WORDS[n], digit=n) for t in TEMPLATES for n in range(10)]
    return sorted({*plain, *(caption.capitalize() for caption in plain)})


def ink_of_images(images: Sequence[Image.Image | np.ndarray]) -> np.ndarray:
    """Images (PIL or uint8, any polarity) -> (N, 32, 32) ink in 0..1.

    The paper's colour is read from the outermost columns, which digits hardly ever touch.
    """
    grey = np.stack([_grey(image) for image in images])
    border = np.concatenate([grey[:, :, :2], grey[:, :, -2:]], axis=2)
    white_paper = np.median(border, axis=(1, 2)) >= 0.5
    return np.where(white_paper[:, None, None], 1.0 - grey, grey)


def _grey(image: Image.Image | np.ndarray) -> np.ndarray:
    opened = image if isinstance(image, Image.Image) else Image.fromarray(image)
    small = opened.convert("L").resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32) / 255.0


class Judge:
    """A support vector classifier, trained on real digits, that reads generated ones."""

    def __init__(self, train: DigitSet) -> None:
        self._classifier = SVC(gamma="scale", C=10.0)
        self._classifier.fit(self._features(train.ink.numpy()), train.labels.numpy())

    @staticmethod
    def _features(ink: np.ndarray) -> np.ndarray:
        """(N, 32, 32) -> (N, 256): mean ink of 2x2 blocks."""
        blocks = ink.reshape(len(ink), 16, 2, 16, 2).mean(axis=(2, 4))
        return blocks.reshape(len(ink), 256)

    def read_ink(self, ink: np.ndarray) -> np.ndarray:
        """(N, 32, 32) ink in 0..1 -> (N,) digits."""
        return self._classifier.predict(self._features(ink))

    def read(self, images: Sequence[Image.Image | np.ndarray]) -> np.ndarray:
        """Images of a base or an inverted model -> (N,) digits."""
        return self.read_ink(ink_of_images(images))
