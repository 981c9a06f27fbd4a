"""The frames of video files, in the process that decodes images: it has bounded the memory and the processor's time."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final

from PIL import Image

# Demuxers by how files begin. No other is tried: some read lists of further files.
_MATROSKA: Final = b"\x1aE\xdf\xa3"
_TURNS: Final = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


def container_of(data: bytes) -> str | None:
    """Return the name of the demuxer of a video file, MP4 (or QuickTime) or WebM (or Matroska); None for another."""
    if data[4:8] == b"ftyp":
        return "mov"
    return "matroska" if data.startswith(_MATROSKA) else None


def decode_video(
    data: bytes, max_frames: int, max_pixels: int, max_all_pixels: int, bound_time: Callable[[int], None]
) -> tuple[int, int, int, bytes]:
    """Return number, height and width of a video's frames, and the frames as RGB, turned upright.

    `bound_time` is told how many pixels may be decoded before any is. Raises ValueError for more than `max_frames`
    frames, more than `max_pixels` of one or more than `max_all_pixels` of all, and what PyAV raises for a damaged file.
    """
    import av  # an extra

    with av.open(io.BytesIO(data), "r", format=container_of(data)) as file:
        if not file.streams.video:
            raise ValueError("no video is in it")
        stream = file.streams.video[0]
        stream.codec_context.thread_count = 1  # stacks of threads count as memory
        num_pixels = stream.width * stream.height
        if not 0 < num_pixels <= max_pixels:
            raise ValueError(f"frames of {stream.width}x{stream.height} pixels, at most {max_pixels} are allowed")
        most = min(max_frames, max_all_pixels // num_pixels)
        bound_time(num_pixels * (most + 1))
        frames, size = bytearray(), (0, 0)
        count = 0
        for frame in file.decode(stream):
            if count == most:
                bound = f"{max_frames} frames" if most == max_frames else f"{max_all_pixels} pixels in all frames"
                raise ValueError(f"a video of more than {count} frames, at most {bound} are allowed")
            if frame.width * frame.height > num_pixels:
                raise ValueError("frames grow in the middle of it")
            image = _upright(frame)
            if count and image.size != size:
                raise ValueError("frames of different sizes")
            size = image.size
            frames += image.tobytes()
            count += 1
    if not count:
        raise ValueError("no frame is in it")
    return count, size[1], size[0], bytes(frames)


def _upright(frame: Any) -> Image.Image:
    plane = frame.reformat(format="rgb24").planes[0]
    image = Image.frombuffer("RGB", (frame.width, frame.height), bytes(plane), "raw", "RGB", plane.line_size, 1)
    turn = _TURNS.get(frame.rotation % 360)
    return image if turn is None else image.transpose(turn)
