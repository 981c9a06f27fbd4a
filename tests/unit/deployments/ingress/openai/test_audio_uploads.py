"""WAV files that come with a request: read as their writers wrote them, and bounded before that."""

from __future__ import annotations

import base64
import io
import struct
import wave
from typing import Any

import numpy as np
import pytest
from kit.seeding import seeded_rng

from configs.cluster import LimitsConfig
from deployments.engines.records.clip_files import encode_audio
from deployments.ingress.openai.uploads import AudioFile, decode_audio, split_extra
from deployments.records.errors import InvalidRequest

LIMITS = LimitsConfig(max_audio_s=2.0)
RATE = 8000


def written(values: np.ndarray, width: int, rate: int = RATE) -> bytes:
    """A file of the standard library: whole numbers (samples, channels) of so many bytes."""
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setnchannels(values.shape[1])
        target.setsampwidth(width)
        target.setframerate(rate)
        wide = values.astype("<i8")[..., None].view(np.uint8)
        target.writeframes(np.ascontiguousarray(wide[..., :width]).tobytes())
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def form(kind: int, channels: int, rate: int, bits: int, more: bytes = b"") -> bytes:
    frame = channels * bits // 8
    fields = struct.pack("<HHIIHH", kind, channels, rate, min(rate * frame, 2**32 - 1), frame % 2**16, bits)
    return chunk(b"fmt ", fields + more)


def riff(*chunks: bytes) -> bytes:
    return chunk(b"RIFF", b"WAVE" + b"".join(chunks))


def silence(channels: int = 1, rate: int = RATE, number: int = 8) -> bytes:
    return riff(form(1, channels, rate, 16), chunk(b"data", bytes(2 * channels * number)))


def read(data: str | bytes, limits: LimitsConfig = LIMITS) -> Any:
    return decode_audio({"audio": AudioFile("audio.audio", data)}, limits)["audio"]


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_whole_numbers_of_any_width_are_parts_of_the_loudest(width: int, channels: int) -> None:
    half = 2 ** (8 * width - 1)
    values = seeded_rng().integers(-half, half, (50, channels))
    values[:2] = [[-half] * channels, [half - 1] * channels]
    found = read(written(values + (half if width == 1 else 0), width))  # 8 bits have no sign
    np.testing.assert_allclose(found.samples, values.T / half, rtol=1e-6)
    assert (found.rate, found.samples.dtype, found.seconds) == (RATE, np.float32, 50 / RATE)


@pytest.mark.parametrize("kind", ["<f4", "<f8"])
@pytest.mark.parametrize("more_bytes", [None, 14, 0])  # of an extensible form behind its format's number
def test_floats_are_read_as_they_are(kind: str, more_bytes: int | None) -> None:
    values = seeded_rng().normal(size=(20, 2)).astype(kind)
    bits = 8 * values.dtype.itemsize
    guid = struct.pack("<HHIH", 22, bits, 3, 3) + bytes(more_bytes or 0)
    head = form(3, 2, RATE, bits) if more_bytes is None else form(0xFFFE, 2, RATE, bits, guid)
    found = read(riff(chunk(b"LIST", b"odd"), head, chunk(b"fact", bytes(4)), chunk(b"data", values.tobytes())))
    np.testing.assert_array_equal(found.samples, values.T.astype(np.float32))


@pytest.mark.parametrize("prefix", ["", "data:audio/wav;base64,", "data:audio/x-wav;base64,"])
def test_what_we_write_is_read_again_from_text(prefix: str) -> None:
    samples = seeded_rng().uniform(-1, 1, (2, 2 * 2**17)).astype(np.float32)  # base64 of more than one piece
    text = prefix + base64.b64encode(encode_audio(samples, 2**17)).decode()
    np.testing.assert_allclose(read(text).samples, samples, atol=1.6 / 32768)  # written in 32767 parts, read in 32768


@pytest.mark.parametrize("width", [76, 7])
def test_lines_of_base64_may_be_broken_anywhere(width: int) -> None:
    samples = seeded_rng().uniform(-1, 1, (1, 2**18)).astype(np.float32)
    text = base64.b64encode(encode_audio(samples, 2**17)).decode()
    lines = "\r\n".join(text[place : place + width] for place in range(0, len(text), width))
    np.testing.assert_array_equal(read(lines + "\n").samples, read(text).samples)


def test_a_file_whose_writer_could_not_go_back_has_all_that_follows() -> None:
    file = bytearray(silence(number=9))
    place = file.index(b"data") + 4
    for size in (0, 0xFFFFFFFF):
        file[place : place + 4] = struct.pack("<I", size)
        assert read(bytes(file)).samples.shape == (1, 9)


def with_size(name: bytes, size: int) -> bytes:
    file = bytearray(silence())
    place = file.index(name) + 4
    file[place : place + 4] = struct.pack("<I", size)
    return bytes(file)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes that are no WAV file"),
        (b"ID3\x04" + bytes(40), "44 bytes that are no WAV file"),
        ("https://elsewhere/a.wav", "an address, which is not fetched"),
        ("data:audio/wav;base64,U*", "expected a WAV file in base64"),
        ("r\u00e4t", "expected a WAV file in base64"),
        (base64.b64encode(b"no file").decode(), "7 bytes that are no WAV file"),
        (riff(), "does not say its form, or has no samples"),
        (riff(chunk(b"data", bytes(8))), "does not say its form"),
        (riff(form(1, 1, RATE, 16)), "has no samples"),
        (riff(chunk(b"fmt ", bytes(4)), chunk(b"data", bytes(8))), "does not say its form"),
        (riff(form(85, 1, RATE, 16), chunk(b"data", bytes(8))), "16 bits in format 85, expected PCM of 8 to 32 bits"),
        (riff(form(3, 1, RATE, 16), chunk(b"data", bytes(8))), "16 bits in format 3"),
        (riff(form(1, 0, RATE, 16), chunk(b"data", bytes(8))), "0 channels, expected 1 or 2"),
        (silence(channels=6), "6 channels, expected 1 or 2"),
        (silence(rate=0), "0 samples a second, expected 1 to 192000"),
        (silence(rate=192_001), "192001 samples a second"),
        (silence(number=0), "no sample is in it"),
        (silence(number=2 * RATE + 8), "2.001 seconds of audio, at most 2 of all files are allowed"),
        (silence(rate=1, number=3), "3 seconds of audio"),
        (silence()[:-4], "ends after 12 of 16 bytes of a chunk"),
        (with_size(b"fmt ", 2**31), "ends after 40 of 2147483648 bytes"),
        (riff(*[chunk(b"LIST", b"")] * 1025, form(1, 1, RATE, 16)), "more than 1024 chunks"),
    ],
)  # fmt: skip
def test_what_is_no_such_file_or_too_much_is_refused(data: str | bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^audio.audio: .*{words}") as caught:
        read(data)
    assert caught.value.param == "audio.audio"


def test_all_files_together_are_bounded() -> None:
    files = {name: AudioFile(name, silence(number=RATE)) for name in ("src_audio", "reference_audio")}
    assert [sound.seconds for sound in decode_audio(files, LIMITS).values()] == [1.0, 1.0]
    files["audio"] = AudioFile("audio", silence(number=1))
    with pytest.raises(InvalidRequest, match=r"audio: .* at most 2 of all files"):
        decode_audio(files, LIMITS)


def test_data_urls_of_audio_are_taken_out_of_extra() -> None:
    url = "data:audio/wav;base64,UklGRg=="
    rest, found = split_extra({"src_audio": url, "lyrics": "data: none", "audio": [url], "bpm": 90})
    assert rest == {"lyrics": "data: none", "audio": [url], "bpm": 90}
    assert found == {"src_audio": AudioFile("extra.src_audio", url)}
