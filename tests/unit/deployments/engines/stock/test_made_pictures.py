"""Pictures, videos and sounds as pipelines give them: lists, batches, floats and bytes."""

from __future__ import annotations

import numpy as np
import pytest
from kit.seeding import seeded_rng
from PIL import Image

from deployments.engines.stock.outputs import as_frames, as_pixels


def drawn(*shape: int) -> np.ndarray:
    return seeded_rng().integers(0, 256, shape, dtype=np.uint8)


def test_images_are_bytes_of_the_channels_that_all_have() -> None:
    colors, clear, gray = drawn(4, 6, 3), drawn(4, 6, 4), drawn(4, 6, 1)
    np.testing.assert_array_equal(as_pixels([Image.fromarray(clear)])[0], clear)
    np.testing.assert_array_equal(as_pixels([Image.fromarray(colors)])[0], colors)
    np.testing.assert_array_equal(as_pixels(gray)[0], np.repeat(gray, 3, -1))
    mixed = as_pixels([[Image.fromarray(colors)], clear.astype(np.float32) / 255])
    np.testing.assert_array_equal(mixed, np.stack([colors, clear[..., :3]]))
    for wrong in (np.zeros((4, 6)), np.zeros((4, 6, 2)), np.zeros((1, 1, 4, 6, 3))):
        with pytest.raises(ValueError, match=r"no image: ndarray of shape \("):
            as_pixels(wrong)
    with pytest.raises(ArithmeticError, match="is not finite"):
        as_pixels(np.full((2, 2, 3), np.nan))


def test_the_first_video_of_a_batch_is_taken() -> None:
    videos = drawn(2, 5, 4, 6, 3)
    for given in (videos, [videos[0], videos[1]], [list(videos[0]), list(videos[1])], videos[0], list(videos[0])):
        np.testing.assert_array_equal(as_frames(given), videos[0])
    clear = drawn(5, 4, 6, 4)
    np.testing.assert_array_equal(as_frames([clear]), clear[..., :3])
