"""The process that decodes image files. `python -m deployments.ingress.openai.image_decoder FD` talks over socket FD.

No file can block the ingress: a job that computes too long or takes too much memory ends, or ends this process, which
decodes frames of videos, too. It imports neither numpy nor modules of the service, so that it starts fast. A file is
checked by its container first, since some cost thousands of times as much as their size and pixels suggest.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import math
import os
import re
import resource
import signal
import struct
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from PIL import Image, ImageOps

# Demuxers by the beginnings of files. No other is tried: some read lists of further files.
_MATROSKA: Final = b"\x1aE\xdf\xa3"
_TURNS: Final = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}

MODULE: Final = "deployments.ingress.openai.image_decoder"
IDLE_S: Final = 60.0  # a process without work ends after this
_SPACES: Final = b" \t\r\n"  # between characters of base64: encoders of mails and shells break lines
FORMATS: Final = ("PNG", "JPEG", "WEBP")  # OpenAI's; readers of all others stay unused
_NICENESS: Final = 10  # the event loop of the ingress goes before
# Encoders write about 10 scans, and at most 64 when they look for the smallest file.
_MAX_SCANS: Final = 64
_MAX_SEGMENTS: Final = 4096  # of a JPEG: 64 KiB each
_MAX_CHUNKS: Final = 2**16  # of a PNG or WebP, with those that have the pixels
_MAX_EXTRAS: Final = 64  # further chunks, which may be compressed
_PIXELS: Final = frozenset({b"IDAT", b"fcTL", b"fdAT", b"ANMF"})  # of animations, all but the first are skipped
_BASE_BYTES: Final = 2**26  # of a job beside its pixels and its file
_VIDEO_BYTES: Final = 2**28  # of video codecs beside their frames
_BYTES_PER_PIXEL: Final = 32  # coefficients, planes and copies of the costliest decoder, libwebp's with alpha
PIXELS_OF_CPU_S: Final = 5e6
_NEXT_MARKER: Final = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")  # in entropy-coded data
_WITHOUT_LENGTH: Final = frozenset({0x01, *range(0xD0, 0xD9)})
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9


def _container_of(data: bytes) -> str | None:
    """Return the name of the demuxer of a video file, MP4 (or QuickTime) or WebM (or Matroska); None for another."""
    if data[4:8] == b"ftyp":
        return "mov"
    return "matroska" if data.startswith(_MATROSKA) else None


def _decode_frames(
    data: bytes, max_frames: int, max_pixels: int, max_all_pixels: int, bound_time: Callable[[int], None]
) -> tuple[int, int, int, float, bytes]:
    """Return number, height, width and rate of a video's frames, and the frames as RGB, turned upright.

    `bound_time` gets the number of pixels before any is decoded. Raises ValueError for more than `max_frames`
    frames, more than `max_pixels` of one or more than `max_all_pixels` of all, and PyAV's errors for a damaged file.
    """
    import av  # an extra

    with av.open(io.BytesIO(data), "r", format=_container_of(data)) as file:
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
        rate = float(stream.average_rate or 0)
    if not count:
        raise ValueError("no frame is in it")
    return count, size[1], size[0], rate, bytes(frames)


def _upright(frame: Any) -> Image.Image:
    plane = frame.reformat(format="rgb24").planes[0]
    image = Image.frombuffer("RGB", (frame.width, frame.height), bytes(plane), "raw", "RGB", plane.line_size, 1)
    turn = _TURNS.get(frame.rotation % 360)
    return image if turn is None else image.transpose(turn)


class DecodeJob(NamedTuple):
    """A file of `num_bytes`, which may be in base64, with at most `max_pixels`; scaled down if it has more than
    `max_result_pixels`. It may take `cpu_s` of processor time, and as much again for every `PIXELS_OF_CPU_S`.

    If `max_frames` is not 0 it may be a video, of frames of at most `max_result_pixels` and `max_video_pixels` in
    all.
    """

    num_bytes: int
    is_base64: bool
    max_pixels: int
    max_result_pixels: int
    cpu_s: float
    max_frames: int = 0
    max_video_pixels: int = 0


class DecodeReply(NamedTuple):
    """The form of the following pixels, uint8 (height, width, channels), or the error.

    `file_size` is the width and height of the upright image in its file. A video has this many `frames`, of which
    `rate` are a second: 0 where it does not say.
    """

    problem: str = ""
    height: int = 0
    width: int = 0
    channels: int = 0
    file_size: tuple[int, int] = (0, 0)
    frames: int = 0
    rate: float = 0.0


def _check_container(data: bytes) -> None:
    """Raise ValueError for a file whose container asks for more work than its pixels."""
    if data.startswith(b"\xff\xd8"):
        _check_jpeg(data)
    elif data.startswith(b"\x89PNG"):
        _check_chunks(data, place=8, length_first=True, order=">")
    elif data.startswith(b"RIFF"):
        _check_chunks(data, place=12, length_first=False, order="<")


def _check_jpeg(data: bytes) -> None:
    """Count the segments and the scans: each scan passes over all pixels of a progressive file."""
    place, num_scans = 2, 0
    for num_segments in itertools.count():
        found = _NEXT_MARKER.search(data, place)
        if found is None or (marker := data[found.end() - 1]) == _END_OF_IMAGE:
            return
        if num_segments > _MAX_SEGMENTS:
            raise ValueError(f"more than {_MAX_SEGMENTS} segments")
        num_scans += marker == _START_OF_SCAN
        if num_scans > _MAX_SCANS:
            raise ValueError(f"a JPEG of more than {_MAX_SCANS} scans")
        place = found.end()
        if marker not in _WITHOUT_LENGTH:
            place += int.from_bytes(data[place : place + 2])


def _check_chunks(data: bytes, place: int, *, length_first: bool, order: str) -> None:
    """Count the chunks of a PNG or RIFF file, and those without pixels."""
    num_extras = 0
    for num_chunks in itertools.count():
        head = data[place : place + 8]
        if len(head) < 8:
            return
        if num_chunks >= _MAX_CHUNKS:
            raise ValueError(f"more than {_MAX_CHUNKS} chunks")
        kind, length = (head[4:], head[:4]) if length_first else (head[:4], head[4:])
        num_extras += kind not in _PIXELS
        if num_extras > _MAX_EXTRAS:
            raise ValueError(f"more than {_MAX_EXTRAS} chunks besides its pixels")
        nbytes: int = struct.unpack(f"{order}I", length)[0]
        place += 8 + (nbytes + 4 if length_first else nbytes + nbytes % 2)  # a checksum, or padding


def _decode(data: bytes, job: DecodeJob) -> tuple[DecodeReply, bytes]:
    """Return the first image of a file, turned upright as its camera noted (Exif `Orientation`)."""
    if job.is_base64:
        try:
            data = base64.b64decode(data.translate(None, _SPACES), validate=True)
        except ValueError:
            return DecodeReply("expected an image file in base64, or a data URL with one"), b""
    Image.MAX_IMAGE_PIXELS = job.max_pixels  # before WebP's decoder allocates a canvas
    try:
        if _container_of(data) and job.max_frames:
            return _decode_video(data, job)
        _check_container(data)
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            width, height = file.size
            if width * height > job.max_pixels:
                return DecodeReply(f"{width}x{height} pixels, at most {job.max_pixels} are allowed"), b""
            _bound_time(job, width * height)
            image = _plain(ImageOps.exif_transpose(file))
            file_size = image.size
            image = _scaled_down(image, job.max_result_pixels)
            shape = image.height, image.width, len(image.getbands())
            return DecodeReply("", *shape, file_size), image.tobytes()
    except Image.UnidentifiedImageError:
        return DecodeReply(f"{len(data)} bytes that are no PNG, JPEG or WebP image"), b""
    except MemoryError:
        return DecodeReply("the image cannot be read: it takes more memory than its pixels need"), b""
    except Exception as error:  # the file may be hostile: any error of its reader is the file's problem
        return DecodeReply(f"the image cannot be read: {str(error)[:200] or type(error).__name__}"), b""


def _decode_video(data: bytes, job: DecodeJob) -> tuple[DecodeReply, bytes]:
    try:
        import av as av  # an extra
    except ImportError:
        return DecodeReply("a video, which needs av on the server (pip install 'atelier-serve[video]')"), b""
    _bound_memory(job, _VIDEO_BYTES + 3 * 3 * job.max_video_pixels)  # growing buffers are copied, and sent as one piece
    bounds = job.max_frames, job.max_result_pixels, job.max_video_pixels
    frames, height, width, rate, pixels = _decode_frames(data, *bounds, lambda count: _bound_time(job, count))
    return DecodeReply("", height, width, 3, (width, height), frames, rate), pixels


def _plain(file: Image.Image) -> Image.Image:
    if file.mode == "I;16":  # little-endian; PIL's own conversion cuts 16 bits off at 255
        file = Image.frombytes("L", file.size, file.tobytes()[1::2])
    return file.convert("RGBA" if file.has_transparency_data else "RGB")


def _scaled_down(image: Image.Image, max_pixels: int) -> Image.Image:
    """Return an image of the same proportions with no more pixels."""
    if image.width * image.height <= max_pixels:
        return image
    scale = math.sqrt(max_pixels / (image.width * image.height))
    # Where one side is a single pixel, it stays.
    width = min(max(1, int(image.width * scale)), max_pixels)
    height = min(max(1, int(image.height * scale)), max_pixels // width)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _bound_time(job: DecodeJob, num_pixels: int = 0) -> None:
    """Limit the job to so much processor time from now on.

    SIGPROF has no handler: when the time is over, it ends the process, even within a decoder.
    """
    signal.setitimer(signal.ITIMER_PROF, job.cpu_s * (1 + num_pixels / PIXELS_OF_CPU_S))


def _bound_memory(job: DecodeJob, more: int = 0) -> None:
    """Limit the private memory of this process to the need of a sound file: more raises a MemoryError."""
    most = _BASE_BYTES + 4 * job.num_bytes + _BYTES_PER_PIXEL * job.max_pixels + more
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _serve_jobs(connection: Connection) -> None:
    """Do jobs until none comes for a while, or their sender has ended."""
    while connection.poll(IDLE_S):
        try:
            job = DecodeJob(*json.loads(connection.recv_bytes()))
            _bound_memory(job)
            data = connection.recv_bytes()
        except EOFError:
            return
        _bound_time(job)
        reply, pixels = _decode(data, job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps(reply).encode())
        connection.send_bytes(pixels)


def _main(descriptor: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # the first victim when memory is short
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal is for the parent
    os.nice(_NICENESS)
    warnings.simplefilter("ignore")  # about odd files
    with contextlib.suppress(BrokenPipeError):  # the sender has gone
        _serve_jobs(Connection(descriptor))


if __name__ == "__main__":
    _main(int(sys.argv[1]))
