"""Clips as files: frames -> MP4 or WebM, samples -> WAV. Blocks: called in threads.

HAZARD: PyAV's wheels bring encoders under the GPL (x264, x265). Only libvpx is used here, which is under a BSD licence
and makes VP9, which browsers play.
"""

from __future__ import annotations

import io
import wave
from fractions import Fraction
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

VideoFormat = Literal["mp4", "webm"]

MEDIA_TYPES: Final[dict[VideoFormat, str]] = {"mp4": "video/mp4", "webm": "video/webm"}
WAV: Final = "audio/wav"
_ENCODER: Final = "libvpx-vp9"
# Constant quality, nearly that of the frames; at this speed a video takes less time than one of its steps.
_OPTIONS: Final = {"b": "0", "cpu-used": "4", "row-mt": "1"}
_QUALITY: Final = 18
_MAX_DENOMINATOR: Final = 1001
_INT16: Final = 32_767


def encode_video(frames: npt.NDArray[np.uint8], fps: float, format_: VideoFormat, quality: float = _QUALITY) -> bytes:
    """Return frames, uint8 (number, height, width, 3), as a file of VP9. Raises av.FFmpegError.

    `quality` is a constant rate factor: from 0, the best, to 63.
    """
    import av  # an extra, not needed for images

    file = io.BytesIO()
    with av.open(file, "w", format=format_) as container:
        rate = Fraction(fps).limit_denominator(_MAX_DENOMINATOR)
        stream = container.add_stream(_ENCODER, rate=rate, options={**_OPTIONS, "crf": f"{quality:g}"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def encode_audio(samples: npt.NDArray[np.float32], rate: int) -> bytes:
    """Return samples, float32 (channels, number) from -1 to 1, as a WAV file of 16 bits. Louder ones are cut off."""
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setnchannels(len(samples))
        target.setsampwidth(2)
        target.setframerate(rate)
        whole = (np.clip(samples.T, -1.0, 1.0) * _INT16).round().astype("<i2")
        target.writeframes(whole.tobytes())
    return file.getvalue()
