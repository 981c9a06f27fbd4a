"""Outputs of pipelines, in any form in which they return them: images, the frames of a video, samples of audio."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import PIL.Image

_RATES: Final = ("sampling_rate", "sample_rate")
_CHANNELS: Final = ("audio_channels",)
_TOLD_FIRST: Final = ("vocoder", "vae")  # the order among parts with a rate


def as_pixels(images: Any) -> np.ndarray:
    """Return a pipeline's images: uint8 (n, height, width, 3), or 4 where all have transparency, rounded as diffusers
    does for PIL.

    Raises ArithmeticError if one is not finite, ValueError for outputs that are no images.
    """
    found = [pixels for one in _flat(images) for pixels in _rows(one)]
    if not found:
        raise ValueError("no images")
    channels = min(pixels.shape[-1] for pixels in found)
    return np.stack([pixels[..., :channels] for pixels in found])


def _flat(images: Any) -> list[Any]:
    if isinstance(images, list | tuple):
        return [one for image in images for one in _flat(image)]
    return [images]


def _rows(image: Any) -> list[np.ndarray]:
    """Return the images in a PIL image, or in an array of one or more."""
    if isinstance(image, PIL.Image.Image):
        return [np.asarray(image.convert("RGBA" if "A" in image.getbands() else "RGB"))]
    array = np.asarray(image)
    if array.ndim not in (3, 4) or array.shape[-1] not in (1, 3, 4):
        raise ValueError(f"no image: {type(image).__name__} of shape {array.shape}")
    if array.dtype != np.uint8:
        if not np.isfinite(array).all():
            raise ArithmeticError("the image that it made is not finite")
        array = (array * 255).round().astype(np.uint8)
    array = np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array
    return list(array if array.ndim == 4 else array[None])


def as_frames(videos: Any) -> np.ndarray:
    """Return a pipeline's first video: uint8 (frames, height, width, 3). Raises as `as_pixels` does."""
    is_batch = isinstance(videos, np.ndarray) and videos.ndim == 5
    if isinstance(videos, list | tuple) and videos:
        is_batch = isinstance(videos[0], list | tuple) or np.ndim(videos[0]) == 4
    return as_pixels(videos[0] if is_batch else videos)[..., :3]


def as_samples(audios: Any) -> np.ndarray:
    """Return a pipeline's first audio: float32 (channels, samples).

    Raises ArithmeticError if a sample is not finite, ValueError for outputs that are no audio.
    """
    first = audios[0] if isinstance(audios, list | tuple | np.ndarray) and len(audios) else None
    samples = np.asarray(getattr(first, "float", lambda: first)(), np.float32)
    samples = samples[None] if samples.ndim == 1 else samples
    if samples.ndim != 2 or not samples.size:
        raise ValueError(f"no audio: {type(audios).__name__} of shape {np.shape(audios)}")
    if not np.isfinite(samples).all():
        raise ArithmeticError("the audio that it made is not finite")
    return samples


def sample_rate(pipeline: Any) -> int:
    """Return the sample rate of a pipeline's audio, by its parts' configs. Raises ValueError."""
    if (rate := _find_count(pipeline, _RATES)) is None:
        raise ValueError("no part of the pipeline has a sample rate")
    return rate


def audio_channels(pipeline: Any) -> int | None:
    """Return the channels of a pipeline's audio; None if no part's config has them."""
    return _find_count(pipeline, _CHANNELS)


def _find_count(pipeline: Any, keys: Collection[str]) -> int | None:
    """Return the first count by one of these names in the configs of a pipeline's parts."""
    parts = pipeline.components
    for name in dict.fromkeys((*_TOLD_FIRST, *parts)):
        config = getattr(parts.get(name), "config", None)
        for key in keys:
            value = getattr(config, key, None)
            if isinstance(value, int) and value > 0:
                return value
    return None
