"""Video files and lists of images that come with a request: decoded as PyAV does, and bounded before that."""

from __future__ import annotations

import base64
import io
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from configs.cluster import LimitsConfig
from deployments.engines.records.clip_files import encode_video
from deployments.ingress.openai.uploads import decode_image, decode_named
from deployments.records.errors import InvalidRequest

HEIGHT, WIDTH = 16, 24
PIXELS = HEIGHT * WIDTH
LIMITS = LimitsConfig(max_frames=6, max_pixels=PIXELS, max_video_pixels=5 * PIXELS)


def film(count: int, format_: Any = "mp4", height: int = HEIGHT) -> bytes:
    """So many frames, of one grey each that tells them apart."""
    frames = np.arange(count, dtype=np.uint8)[:, None, None, None] * 30 + np.zeros((height, WIDTH, 3), np.uint8)
    return encode_video(frames, 8, format_)


def turned(data: bytes) -> bytes:
    """The same MP4 as a phone writes it that was held upright: with a matrix that turns it by a quarter."""
    place = data.index(b"tkhd") + 4 + 40
    quarter = np.array([0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000], ">i4").tobytes()
    return data[:place] + quarter + data[place + 36 :]


def url(data: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()


def png(value: int = 7) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT), (value, 30, 30)).save(buffer, "png")
    return buffer.getvalue()


def by_av(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


@pytest.mark.parametrize("format_", ["mp4", "webm"])
@pytest.mark.parametrize("as_text", [True, False])
def test_frames_are_those_that_av_decodes(format_: Any, as_text: bool) -> None:
    data = film(4, format_)
    found = decode_named({"images.video": url(data) if as_text else data}, LIMITS)["images.video"]
    assert isinstance(found, tuple)
    np.testing.assert_array_equal(np.stack(found), by_av(data))
    np.testing.assert_allclose([frame.mean() for frame in found], [0, 30, 60, 90], atol=3)


def test_a_film_of_a_phone_is_turned_upright() -> None:
    data = turned(film(2))
    frame = next(av.open(io.BytesIO(data)).decode(video=0))
    assert frame.rotation in (90, -90, 270)
    (first, _) = decode_named({"video": data}, LIMITS)["video"]
    assert first.shape == (WIDTH, HEIGHT, 3)
    np.testing.assert_array_equal(first, np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90))


def test_one_image_several_and_a_video_keep_their_places() -> None:
    given = {"image": png(1), "images.faces": [url(png(2), "image/png"), url(png(3), "image/png")], "video": film(1)}
    found = decode_named(given, LIMITS)
    assert found["image"][0, 0, 0] == 1
    assert [face[0, 0, 0] for face in found["images.faces"]] == [2, 3]
    assert [frame.shape for frame in found["video"]] == [(HEIGHT, WIDTH, 3)]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (lambda: film(7), "a video of more than 5 frames, at most 1920 pixels in all frames are allowed"),
        (lambda: film(2, height=32), "frames of 24x32 pixels, at most 384 are allowed"),
        (lambda: film(2)[:60], "the image cannot be read"),
        (lambda: b"\x1aE\xdf\xa3" + bytes(200), "the image cannot be read"),
        (lambda: [film(1), film(1)], "a video among 2 files, expected it alone"),
        (lambda: [png(), film(1)], "a video among 2 files"),
        (lambda: "https://elsewhere/cat.mp4", "an address, which is not fetched"),
        (lambda: [png()] * 11, "11 files, at most 10 are allowed"),
    ],
)  # fmt: skip
def test_what_is_too_large_or_damaged_is_refused(files: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        decode_named({"images.video": files()}, LIMITS)


def test_all_videos_together_are_bounded() -> None:
    decode_named({"video": film(3), "mask": film(2)}, LIMITS)
    with pytest.raises(InvalidRequest, match=r"^mask: .* at most 768 pixels in all frames"):
        decode_named({"video": film(3), "mask": film(3)}, LIMITS)


def test_the_number_of_frames_is_bounded_whatever_their_size() -> None:
    few = LIMITS.model_copy(update={"max_frames": 2})
    with pytest.raises(InvalidRequest, match="more than 2 frames, at most 2 frames are allowed"):
        decode_named({"video": film(3)}, few)


def test_where_an_image_is_expected_a_video_is_none() -> None:
    with pytest.raises(InvalidRequest, match=r"^image: \d+ bytes that are no PNG, JPEG or WebP image"):
        decode_image(film(1), "image", PIXELS)
