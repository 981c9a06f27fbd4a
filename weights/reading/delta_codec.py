"""The codec of a delta: bits that differ from a base, in byte planes, each through zstd.

    header     magic, u64 bytes of the extent, u32 number of segments, then per segment u64 bytes, u32 bytes of an item,
               u32 base (NO_BASE: none), u64 offset in that base; little-endian
    chunks     of each segment in order, at most CHUNK_BYTES of the extent each, whole items: u8 flags, a u32 size per
               frame (STORED: the plane as it is, not through zstd), the frames

Trained weights and their fine-tune agree in sign, exponent and the first bits of the mantissa. So XOR leaves zeros
there, and planes keep these apart from the noise of the last bits. Nothing here trusts what it reads: every size is
checked against what is expected before memory is taken for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from weights.memory.host_pool import ByteArray

CODEC: Final = "xor-planes-zstd-1"
CHUNK_BYTES: Final = 512 * 1024  # of the extent: its planes stay in a core's cache between the steps
MAX_ITEM_BYTES: Final = 4096
MAX_SEGMENTS: Final = 1_000_000
NO_BASE: Final = 2**32 - 1
_MAGIC: Final = b"ATDELTA1"
_HEADER: Final = struct.Struct("<8sQI")
_SEGMENT: Final = struct.Struct("<QIIQ")
_XORED: Final = 1
_STORED: Final = 2**31
_MAX_PLANES: Final = 8  # blocks of more bytes are sorted by byte position, and go into one frame
# Almost only the entropy coder: repetitions in weights are chance, and looking for them costs both ratio and time.
_ZSTD: Final = zstandard.ZstdCompressionParameters(
    window_log=18,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
    write_content_size=True,
)
# A difference that halves its chunk need not be compared with the chunk alone, which zstd hardly ever halves.
_GOOD_SHARE: Final = 0.5
# A plane of noise: decoding a frame takes twenty times as long as copying as many bytes.
_NOISE_SHARE: Final = 0.9


class DeltaDamaged(Exception):
    """Bytes that are no delta, or not one of this extent. The reader says of which file and extent."""


class Segment(NamedTuple):
    """A run of an extent: items of one size, and where in which base its counterpart begins; `base` None: nowhere."""

    nbytes: int
    item_bytes: int
    base: int | None = None
    offset: int = 0


class ByteSource:
    """Bytes in the order asked for, from blocks that are gone when the next one comes."""

    def __init__(self, blocks: Iterable[memoryview]) -> None:
        self._blocks = iter(blocks)
        self._left = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Return the next bytes, valid until the next call. Raises DeltaDamaged when there are not as many.

        HAZARD: at most CHUNK_BYTES and a little, or what a header was checked to have: they may be copied.
        """
        if len(self._left) < nbytes:
            parts = bytearray()
            while len(parts) < nbytes:
                if not self._left:
                    block = next(self._blocks, None)
                    if block is None:
                        raise DeltaDamaged(f"it ends {nbytes - len(parts)} bytes too early")
                    self._left = block
                piece = self._left[: nbytes - len(parts)]
                parts += piece
                self._left = self._left[len(piece) :]
            return memoryview(parts)
        piece, self._left = self._left[:nbytes], self._left[nbytes:]
        return piece

    def end(self) -> None:
        """Raise DeltaDamaged when there are bytes left."""
        if self._left or next(self._blocks, None) is not None:
            raise DeltaDamaged("bytes follow its last chunk")


def encode_header(segments: Sequence[Segment]) -> bytes:
    """Return the first bytes of a delta."""
    rows = [
        _SEGMENT.pack(part.nbytes, part.item_bytes, NO_BASE if part.base is None else part.base, part.offset)
        for part in segments
    ]
    return _HEADER.pack(_MAGIC, sum(part.nbytes for part in segments), len(segments)) + b"".join(rows)


def read_header(source: ByteSource, nbytes: int, stored_bytes: int, bases: Sequence[int]) -> list[Segment]:
    """Return the segments of a delta of `stored_bytes` for an extent of `nbytes`, against bases of so many bytes.

    Raises DeltaDamaged when they are not its size, reach beyond a base or cannot be in so few bytes.
    """
    magic, declared, num_segments = _HEADER.unpack(source.take(_HEADER.size))
    if magic != _MAGIC:
        raise DeltaDamaged(f"it begins with {bytes(magic)!r}, expected {_MAGIC!r}")
    if declared != nbytes:
        raise DeltaDamaged(f"it declares {declared} bytes, the extent has {nbytes}")
    if num_segments > MAX_SEGMENTS or num_segments * _SEGMENT.size > stored_bytes:
        raise DeltaDamaged(f"it declares {num_segments} segments in {stored_bytes} bytes")
    segments = []
    for _ in range(num_segments):
        size, item_bytes, number, offset = _SEGMENT.unpack(source.take(_SEGMENT.size))
        segment = Segment(size, item_bytes, None if number == NO_BASE else number, offset)
        _check_segment(segment, bases)
        segments.append(segment)
    if sum(segment.nbytes for segment in segments) != nbytes:
        raise DeltaDamaged(f"its segments have {sum(part.nbytes for part in segments)} bytes, the extent has {nbytes}")
    return segments


def _check_segment(segment: Segment, bases: Sequence[int]) -> None:
    if not 1 <= segment.item_bytes <= MAX_ITEM_BYTES or segment.nbytes % segment.item_bytes or not segment.nbytes:
        raise DeltaDamaged(f"a segment of {segment.nbytes} bytes has items of {segment.item_bytes}")
    if segment.base is None:
        return
    if segment.base >= len(bases):
        raise DeltaDamaged(f"a segment is against base {segment.base}, it has {len(bases)}")
    if segment.offset + segment.nbytes > bases[segment.base]:
        raise DeltaDamaged(
            f"a segment ends at byte {segment.offset + segment.nbytes} of base {segment.base}, which has "
            f"{bases[segment.base]}"
        )


def chunk_sizes(segment: Segment) -> Iterator[int]:
    """Yield the bytes of each chunk of a segment: whole items."""
    whole = CHUNK_BYTES // segment.item_bytes * segment.item_bytes
    for start in range(0, segment.nbytes, whole):
        yield min(whole, segment.nbytes - start)


def encode_chunk(chunk: ByteArray, item_bytes: int, base: ByteArray | None) -> bytes:
    """Return a chunk as its difference from `base`, or as it is, whichever is smaller."""
    if base is None:
        return _encode_planes(chunk, item_bytes, 0)
    differing = _encode_planes(chunk ^ base, item_bytes, _XORED)
    if len(differing) <= _GOOD_SHARE * chunk.nbytes:
        return differing
    alone = _encode_planes(chunk, item_bytes, 0)
    return min(differing, alone, key=len)


class ChunkDecoder:
    """Decodes chunks, one after the other. Not for several threads at once."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor(max_window_size=2 * CHUNK_BYTES)
        self._out = np.empty(CHUNK_BYTES, np.uint8)

    def frames(
        self, source: ByteSource, nbytes: int, item_bytes: int
    ) -> tuple[bool, list[tuple[bool, int]], memoryview]:
        """Take a chunk of `nbytes` from `source`: whether it is a difference, its frames' forms, and their bytes.

        Raises DeltaDamaged when a frame is larger than its plane.
        """
        num_frames = _num_frames(item_bytes)
        flags, *words = struct.unpack(f"<B{num_frames}I", source.take(1 + 4 * num_frames))
        if flags & ~_XORED:
            raise DeltaDamaged(f"a chunk has flags {flags}")
        frames = [(bool(word & _STORED), word & ~_STORED) for word in words]
        plane_bytes = nbytes // num_frames
        for is_stored, size in frames:
            if size > plane_bytes or (is_stored and size != plane_bytes):
                raise DeltaDamaged(f"a frame of {size} bytes is for a plane of {plane_bytes}")
        return bool(flags & _XORED), frames, source.take(sum(size for _, size in frames))

    def decode(
        self,
        nbytes: int,
        item_bytes: int,
        frames: Sequence[tuple[bool, int]],
        data: memoryview,
        base: ByteArray | None,
    ) -> memoryview:
        """Return the chunk's bytes, valid until the next call. `base`: what it is a difference from.

        Raises DeltaDamaged.
        """
        out, position, planes = self._out[:nbytes], 0, []
        for is_stored, size in frames:
            frame = data[position : position + size]
            planes.append(np.frombuffer(frame if is_stored else self._inflate(frame, nbytes // len(frames)), np.uint8))
            position += size
        _join_planes(planes, item_bytes, out)
        if base is not None:
            np.bitwise_xor(out, base, out=out)
        return out.data

    def _inflate(self, frame: memoryview, nbytes: int) -> bytes:
        try:
            # Before zstd takes the memory that the frame asks for.
            declared = zstandard.get_frame_parameters(frame).content_size
            if declared != nbytes:
                raise DeltaDamaged(f"a frame declares {declared} bytes for a plane of {nbytes}")
            return self._zstd.decompress(frame, read_across_frames=False, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DeltaDamaged(f"zstd: {error}") from None


def _encode_planes(chunk: ByteArray, item_bytes: int, flags: int) -> bytes:
    compressor = zstandard.ZstdCompressor(compression_params=_ZSTD)
    num_frames = _num_frames(item_bytes)
    planes = np.ascontiguousarray(chunk.reshape(-1, item_bytes).T).reshape(num_frames, -1)
    words, frames = [], []
    for plane in planes:
        frame = compressor.compress(plane.data)
        is_stored = len(frame) >= _NOISE_SHARE * plane.nbytes
        frames.append(plane.tobytes() if is_stored else frame)
        words.append(len(frames[-1]) | (_STORED if is_stored else 0))
    return struct.pack(f"<B{num_frames}I", flags, *words) + b"".join(frames)


def _join_planes(planes: Sequence[ByteArray], item_bytes: int, out: ByteArray) -> None:
    """Put the bytes of items together again; of two and four by arithmetic, which is faster than by strides."""
    if item_bytes == 1:
        out[:] = planes[0]
    elif item_bytes == 2:
        _join_halves(planes[0], planes[1], out.view("<u2"))
    elif item_bytes == 4:
        low, high = np.empty((2, len(planes[0])), "<u2")
        _join_halves(planes[0], planes[1], low)
        _join_halves(planes[2], planes[3], high)
        _join_halves(low, high, out.view("<u4"))
    elif len(planes) == 1:
        out.reshape(-1, item_bytes)[:] = planes[0].reshape(item_bytes, -1).T
    else:
        for number, plane in enumerate(planes):
            out[number::item_bytes] = plane


def _join_halves(low: npt.NDArray[Any], high: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Make integers of their lower and upper halves. Multiplied, which numpy does faster than it shifts."""
    np.multiply(high, 2 ** (8 * low.itemsize), out=out, dtype=out.dtype)
    np.add(out, low, out=out)


def _num_frames(item_bytes: int) -> int:
    return item_bytes if item_bytes <= _MAX_PLANES else 1
