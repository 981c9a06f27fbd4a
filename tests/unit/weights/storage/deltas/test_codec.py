"""The codec of deltas: exact for every type, against a decoder written from its description; safe on anything else."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
import zstandard
from kit.seeding import seeded_rng

from weights.memory.host_pool import ByteArray
from weights.reading.delta_codec import (
    CHUNK_BYTES,
    ByteSource,
    ChunkDecoder,
    DeltaDamaged,
    Segment,
    chunk_sizes,
    encode_chunk,
    encode_header,
    read_header,
)
from weights.records.dtypes import BLOCK_SIZES, ITEM_BYTES

NO_BASE = 2**32 - 1
SIZES = sorted({*ITEM_BYTES.values(), *(nbytes for _, nbytes in BLOCK_SIZES.values())})


def encode(target: ByteArray, segments: Sequence[Segment], bases: Sequence[ByteArray]) -> bytes:
    parts, position = [encode_header(segments)], 0
    for segment in segments:
        offset = segment.offset
        for nbytes in chunk_sizes(segment):
            base = None if segment.base is None else bases[segment.base][offset : offset + nbytes]
            parts.append(encode_chunk(target[position : position + nbytes], segment.item_bytes, base))
            position, offset = position + nbytes, offset + nbytes
    return b"".join(parts)


def decode(data: bytes, nbytes: int, bases: Sequence[ByteArray], block_bytes: int = 1 << 30) -> bytes:
    source = ByteSource(memoryview(data)[start : start + block_bytes] for start in range(0, len(data), block_bytes))
    decoder, out = ChunkDecoder(), bytearray()
    for segment in read_header(source, nbytes, len(data), [base.nbytes for base in bases]):
        offset = segment.offset
        for size in chunk_sizes(segment):
            is_difference, frames, planes = decoder.frames(source, size, segment.item_bytes)
            if is_difference and segment.base is None:
                raise DeltaDamaged("no base")
            base = bases[segment.base or 0][offset : offset + size] if is_difference else None
            out += decoder.decode(size, segment.item_bytes, frames, planes, base)
            offset += size
    source.end()
    return bytes(out)


def reference_decode(data: bytes, bases: Sequence[ByteArray]) -> bytes:
    """By the description alone, a byte at a time."""
    magic, _, num_segments = struct.unpack_from("<8sQI", data)
    assert magic == b"ATDELTA1"
    position, out = 20 + 24 * num_segments, b""
    for number in range(num_segments):
        size, item, base, offset = struct.unpack_from("<QIIQ", data, 20 + 24 * number)
        done = 0
        while done < size:
            chunk = min(CHUNK_BYTES // item * item, size - done)
            num_frames = item if item <= 8 else 1
            flags, *words = struct.unpack_from(f"<B{num_frames}I", data, position)
            position += 1 + 4 * num_frames
            planes = b""
            for word in words:
                frame = data[position : position + word % 2**31]
                planes += frame if word >= 2**31 else zstandard.ZstdDecompressor().decompress(frame)
                position += len(frame)
            plain = np.frombuffer(planes, np.uint8).reshape(item, -1).T.ravel()
            out += bytes(plain ^ bases[base][offset + done : offset + done + chunk] if flags else plain)
            done += chunk
    assert position == len(data)
    return out


def siblings(nbytes: int, share: float, rng: np.random.Generator) -> tuple[ByteArray, ByteArray]:
    base = rng.integers(0, 256, nbytes, dtype=np.uint8)
    noise = rng.integers(0, 256, nbytes, dtype=np.uint8)
    return base, np.where(rng.random(nbytes) < share, noise, base)


@pytest.mark.parametrize("item_bytes", SIZES)
def test_every_size_of_item_comes_back_in_blocks_of_any_size(item_bytes: int) -> None:
    rng = seeded_rng()
    nbytes = item_bytes * int(rng.integers(1, 2000))
    base, target = siblings(nbytes + 7, 0.2, rng)
    segments = [Segment(nbytes, item_bytes, 0, 3), Segment(7, 1)]
    target = np.concatenate([target[3 : nbytes + 3], target[:7]])
    data = encode(target, segments, [base])
    assert reference_decode(data, [base]) == target.tobytes()
    for block_bytes in (1, 13, len(data)):
        assert decode(data, target.nbytes, [base], block_bytes) == target.tobytes()


def test_chunks_and_several_bases() -> None:
    rng = seeded_rng()
    first, target = siblings(2 * CHUNK_BYTES + 600, 0.01, rng)
    second = rng.integers(0, 256, 4096, dtype=np.uint8)
    whole = np.concatenate([target, second])
    segments = [Segment(target.nbytes, 4, 0), Segment(4096, 2, 1)]
    data = encode(whole, segments, [first, second])
    assert len(data) < 0.3 * whole.nbytes
    assert reference_decode(data, [first, second]) == decode(data, whole.nbytes, [first, second]) == whole.tobytes()


def test_a_chunk_that_the_base_only_makes_noisier_is_kept_as_it_is() -> None:
    rng = seeded_rng()
    base, zeros = rng.integers(0, 256, 10_000, dtype=np.uint8), np.zeros(10_000, np.uint8)
    data = encode_chunk(zeros, 2, base)
    assert data[0] == 0
    assert len(data) < 100
    noise = encode_chunk(base, 2, None)
    assert len(noise) <= base.nbytes + 9


def test_what_is_cut_short_or_goes_on_is_refused() -> None:
    rng = seeded_rng()
    base, target = siblings(3000, 0.3, rng)
    data = encode(target, [Segment(3000, 2, 0)], [base])
    for length in [*range(60), *map(int, rng.integers(60, len(data), 40)), len(data) - 1]:
        with pytest.raises(DeltaDamaged, match=r"too early|declares"):
            decode(data[:length], 3000, [base])
    with pytest.raises(DeltaDamaged, match="follow its last chunk"):
        decode(data + b"\0", 3000, [base])


def test_flipped_bits_are_refused_or_give_as_many_bytes() -> None:
    """The checksum of the extent tells wrong bytes from right ones."""
    rng = seeded_rng()
    base, target = siblings(3000, 0.3, rng)
    data = bytearray(encode(target, [Segment(1000, 2, 0), Segment(2000, 4, 0, 1000)], [base]))
    num_refused = 0
    for position in [*range(120), *map(int, rng.integers(120, len(data), 200))]:
        bit = 1 << int(rng.integers(8))
        data[position] ^= bit
        try:
            assert len(decode(bytes(data), 3000, [base])) == 3000
        except DeltaDamaged:
            num_refused += 1
        data[position] ^= bit
    assert num_refused > 60


def bomb(declares_size: bool) -> bytes:
    """A frame of a few KB that is 64 MiB of zeros."""
    return zstandard.ZstdCompressor(level=3, write_content_size=declares_size).compress(bytes(64 * 2**20))


@pytest.mark.parametrize("declares_size", [True, False])
def test_a_frame_that_would_become_larger_than_its_plane_is_refused_before_memory_is_taken(
    declares_size: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = bomb(declares_size)
    data = encode_header([Segment(2**16, 1)]) + struct.pack("<BI", 0, len(frame)) + frame
    with monkeypatch.context() as patch:
        patch.setattr(zstandard, "ZstdDecompressor", lambda **_: None)  # nobody asks it to decompress anything
        with pytest.raises(DeltaDamaged, match=r"a frame declares \d+ bytes|for a plane of 65536"):
            decode(data, 2**16, [])


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (struct.pack("<8sQI", b"ATDELTA2", 8, 0), "begins with"),
        (struct.pack("<8sQI", b"ATDELTA1", 2**60, 1) + struct.pack("<QIIQ", 2**60, 1, NO_BASE, 0), "declares 11529"),
        (struct.pack("<8sQI", b"ATDELTA1", 8, 2**31), "declares 2147483648 segments"),
        (encode_header([Segment(4, 1)]).replace(struct.pack("<Q", 4), struct.pack("<Q", 8), 1), "segments have 4"),
        (encode_header([Segment(8, 3)]), "has items of 3"),
        (encode_header([Segment(8, 0)]), "has items of 0"),
        (encode_header([Segment(0, 1), Segment(8, 1)]), "segment of 0 bytes"),
        (encode_header([Segment(8, 1, 1)]), "against base 1, it has 1"),
        (encode_header([Segment(8, 1, 0, 2**63)]), "which has 8"),
        (encode_header([Segment(8, 1, 0, 1)]), "ends at byte 9 of base 0"),
    ],
)
def test_a_header_that_declares_what_cannot_be_is_refused(header: bytes, problem: str) -> None:
    with pytest.raises(DeltaDamaged, match=problem):
        decode(header + bytes(100), 8, [np.zeros(8, np.uint8)])
