"""Every byte of an extent is verified; what is wrong names the pack."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from weights.errors import ExtentCorrupt
from weights.manifest import ExtentRef
from weights.provider import LocalExtents
from weights.reading.extents import read_extent

DATA = os.urandom(10_000)
PACK = "m_weight_combined"


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    (tmp_path / PACK).write_bytes(bytes(4096) + DATA + b"after")
    return tmp_path


def extent(offset: int = 0, nbytes: int = len(DATA), id_: str = "e1") -> ExtentRef:
    part = DATA[offset : offset + nbytes]
    return ExtentRef(id=id_, pack=PACK, offset=4096 + offset, nbytes=nbytes, checksum=xxhash.xxh3_128_hexdigest(part))


@pytest.mark.parametrize("chunk_bytes", [1, 4096, 10_000, 2**20])
def test_the_bytes_of_the_extent(packs: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr("weights.reading.extents.CHUNK_BYTES", chunk_bytes)
    part = extent(17, 600)
    assert read_extent(packs, part).tobytes() == DATA[17:617]


def test_an_empty_extent(packs: Path) -> None:
    assert read_extent(packs, extent(0, 0)).nbytes == 0


@pytest.mark.parametrize("place", [0, 1, 4999, 9999])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_found(packs: Path, place: int, bit: int) -> None:
    file = packs / PACK
    damaged = bytearray(file.read_bytes())
    damaged[4096 + place] ^= 1 << bit
    file.write_bytes(damaged)
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: bytes 4096\.\.14096 \(extent e1\) have checksum"):
        read_extent(packs, extent())


def test_bytes_outside_the_extent_do_not_matter(packs: Path) -> None:
    (packs / PACK).write_bytes(os.urandom(4096) + DATA)
    assert read_extent(packs, extent()).tobytes() == DATA


@pytest.mark.parametrize("length", [0, 4096, 4097, 14_095])
def test_a_truncated_pack_is_named(packs: Path, length: int) -> None:
    os.truncate(packs / PACK, length)
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: ends at byte .*extent e1 needs bytes up to 14096"):
        read_extent(packs, extent())


def test_a_missing_or_unreadable_pack_is_named(packs: Path) -> None:
    (packs / PACK).unlink()
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: missing; extent e1 was in it"):
        read_extent(packs, extent())
    (packs / PACK).mkdir()
    with pytest.raises(ExtentCorrupt, match=rf"{PACK}: reading extent e1 failed"):
        read_extent(packs, extent())


def test_a_local_provider_gives_read_only_buffers(packs: Path) -> None:
    parts = [extent(i * 100, 100, f"e{i}") for i in range(20)]
    buffers = LocalExtents(packs, num_threads=3).fetch(parts)
    assert {id_: array.tobytes() for id_, array in buffers.items()} == {
        part.id: DATA[i * 100 : i * 100 + 100] for i, part in enumerate(parts)
    }
    with pytest.raises(ValueError, match="read-only"):
        buffers["e0"][0] = 1
    damaged = parts[3].model_copy(update={"checksum": "0" * 32})
    with pytest.raises(ExtentCorrupt, match="extent e3"):
        LocalExtents(packs).fetch([*parts[:3], damaged])
