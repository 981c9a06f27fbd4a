"""GGUF headers, against gguf-py on fresh random files; writing gives the source's bytes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from kit.seeding import seeded_rng

from weights.formats.gguf import GGML_TYPES, read_gguf, write_gguf
from weights.records.dtypes import BLOCK_SIZES, ITEM_BYTES
from weights.records.errors import FormatError

# gguf-py's size of Q8_1 is not that of ggml, and no file has it.
SIZES = {kind.name: sizes for kind, sizes in GGML_QUANT_SIZES.items() if kind.name != "Q8_1"}


def test_the_types_are_those_of_gguf_py() -> None:
    assert {kind.value: kind.name for kind in GGMLQuantizationType if kind.name != "Q8_1"} == GGML_TYPES
    assert {name: sizes for name, sizes in SIZES.items() if name not in ITEM_BYTES} == BLOCK_SIZES
    assert all(ITEM_BYTES[name] == nbytes for name, (block, nbytes) in SIZES.items() if block == 1)


def write_file(file: Path, metadata: dict[str, Any], kinds: list[str], alignment: int | None = None) -> None:
    """A file of random bytes: per kind a tensor of 1 to 3 random dimensions in whole blocks."""
    writer = gguf.GGUFWriter(file, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        if isinstance(value, tuple):
            writer.add_key_value(key, value[1], value[0])
        else:
            writer.add_array(key, value)
    for number, kind in enumerate(kinds):
        _, nbytes = SIZES[kind]
        rows = tuple(seeded_rng().integers(1, 4, size=int(seeded_rng().integers(0, 3))))
        shape = (*rows, int(seeded_rng().integers(1, 4)) * nbytes)
        writer.add_tensor(
            f"t{number}.{kind}",
            seeded_rng().integers(0, 256, shape, np.uint8),
            raw_dtype=gguf.GGMLQuantizationType[kind],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


T = gguf.GGUFValueType
METADATA: dict[str, Any] = {
    "u8": (T.UINT8, 255),
    "i8": (T.INT8, -128),
    "u16": (T.UINT16, 65535),
    "i16": (T.INT16, -5),
    "u32": (T.UINT32, 2**32 - 1),
    "i32": (T.INT32, -(2**31)),
    "u64": (T.UINT64, 2**64 - 1),
    "i64": (T.INT64, -(2**63)),
    "f32": (T.FLOAT32, 0.5),
    "f64": (T.FLOAT64, 1e300),
    "yes": (T.BOOL, True),
    "no": (T.BOOL, False),
    "text": (T.STRING, "ünïcode \n"),
    "empty": (T.STRING, ""),
    "words": ["", "a", "é" * 40, "\0"],
    "floats": [0.5, -1.5],
    "ints": [1, -2, 3],
    "flags": [True, False],
}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("alignment", [None, 8, 4096])
def test_a_file_reads_as_gguf_py_reads_it(tmp_path: Path, alignment: int | None) -> None:
    file = tmp_path / "x.gguf"
    write_file(file, METADATA, [*SIZES, "Q8_0"], alignment)
    header, reader = read_gguf(file), gguf.GGUFReader(file)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert {key: plain(value) for key, value in header.metadata.items()} == theirs
    assert (header.version, header.alignment) == (3, alignment or 32)
    data = file.read_bytes()
    assert data.startswith(header.raw)
    assert [(name, found.dtype, found.shape, found.offset, found.nbytes) for name, found in header.tensors.items()] == [
        (t.name, t.tensor_type.name, tuple(int(x) for x in reversed(t.shape)), t.data_offset, t.n_bytes)
        for t in reader.tensors
    ]
    for theirs_tensor, found in zip(reader.tensors, header.tensors.values(), strict=True):
        assert found.read() == theirs_tensor.data.tobytes()


@pytest.mark.parametrize("alignment", [None, 8, 4096])
@pytest.mark.parametrize("kinds", [[], ["F32"], ["Q8_0", "F16", "Q4_K", "I8"]])
def test_a_written_file_has_the_bytes_of_its_source(tmp_path: Path, kinds: list[str], alignment: int | None) -> None:
    source, target = tmp_path / "x.gguf", tmp_path / "y.gguf"
    write_file(source, METADATA, kinds, alignment)
    header = read_gguf(source)
    write_gguf(target, header.raw, [(tensor.nbytes, tensor.read) for tensor in header.tensors.values()])
    assert target.read_bytes() == source.read_bytes()


def test_the_writer_refuses_tensors_that_its_header_does_not_declare(tmp_path: Path) -> None:
    source, target = tmp_path / "x.gguf", tmp_path / "y.gguf"
    write_file(source, {}, ["F32", "F16"])
    header = read_gguf(source)
    tensors = [(tensor.nbytes, tensor.read) for tensor in header.tensors.values()]
    with pytest.raises(FormatError, match="declares 2 tensors, 1 came"):
        write_gguf(target, header.raw, tensors[:1])
    with pytest.raises(FormatError, match=r"'t0\.F32' takes"):
        write_gguf(target, header.raw, [(tensors[0][0], lambda: b"short"), tensors[1]])
    with pytest.raises(FormatError, match="ends at byte"):
        write_gguf(target, header.raw + b"more", tensors)
    with pytest.raises(FormatError, match=r"y\.gguf"):
        write_gguf(target, header.raw[:40], tensors)


def test_numbers_cannot_be_changed(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    write_file(file, {"ints": [1, 2]}, [])
    array = read_gguf(file).metadata["ints"]
    assert isinstance(array, np.ndarray)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 3


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def info(name: str | bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(
    keys: list[bytes],
    infos: list[bytes],
    body: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    counts = (len(infos) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(infos)
    return header + bytes(-len(header) % 32) + body


U32 = key("a", 4, bytes(4))
TENSOR = info("w", [3])
ALIGN = "general.alignment"
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "magic"),
    "not GGUF": (build([], [], magic=b"GGML"), "not a GGUF file"),
    "version 1": (build([], [], version=1), "version 1 .known: 2, 3"),
    "version 4": (build([], [], version=4), "version 4"),
    "big-endian": (build([], [], version=3 << 24), "big-endian"),
    "endless tensors": (build([], [], num_tensors=2**63 - 1), "tensor count"),
    "negative tensors": (build([], [], num_tensors=2**64 - 1), "tensor count"),
    "endless keys": (build([], [], num_keys=2**40), "key count"),
    "more keys than there are": (build([U32], [], num_keys=2), "key"),
    "more tensors than any model": (
        build([], [], bytes(24 * 2**17 + 24), num_tensors=2**17 + 1),
        "more than any model",
    ),
    "empty key": (build([key("", 4, bytes(4))], []), "key '' is empty"),
    "duplicate key": (build([U32, U32], []), "'a' appears twice"),
    "key not UTF-8": (build([key(b"\xff", 4, bytes(4))], []), "key is not UTF-8"),
    "key too long": (build([key("k" * 65536, 4, bytes(4))], []), "at most 65535"),
    "value not UTF-8": (build([key("a", 8, text(b"\xff"))], []), "value of 'a' is not UTF-8"),
    "element not UTF-8": (build([key("a", 9, array(8, 2, text("b") + text(b"\xff")))], []), "'a', element 1, is not"),
    "endless string": (build([key("a", 8, struct.pack("<Q", 2**62))], []), "value of 'a'"),
    "endless string in an array": (build([key("a", 9, array(8, 1, struct.pack("<Q", 2**62)))], []), "array 'a'"),
    "endless array of strings": (build([key("a", 9, array(8, 2**60, b""))], []), "array 'a'"),
    "endless array of numbers": (build([key("a", 9, array(4, 2**60, b""))], []), "array 'a'"),
    "array of arrays": (build([key("a", 9, array(9, 1, array(4, 0, b"")))], []), "array of arrays"),
    "array of unknown type": (build([key("a", 9, array(13, 0, b""))], []), "unknown type 13"),
    "unknown type": (build([key("a", 13, bytes(8))], []), "'a' has the unknown type 13"),
    "bool of 2": (build([key("a", 7, b"\2")], []), "bool of 2"),
    "array with a bool of 3": (build([key("a", 9, array(7, 2, b"\1\3"))], []), "bool of 3"),
    "alignment 0": (build([key(ALIGN, 4, bytes(4))], []), "power of two"),
    "alignment 24": (build([key(ALIGN, 4, struct.pack("<I", 24))], []), "alignment is 24"),
    "alignment is text": (build([key(ALIGN, 8, text("32"))], []), "alignment is '32'"),
    "alignment is true": (build([key(ALIGN, 7, b"\1")], []), "alignment is True"),
    "duplicate tensor": (build([], [TENSOR, info("w", [3], 0, 32)], bytes(64)), "tensor 'w' appears twice"),
    "name of 128 bytes": (build([], [info("w" * 128, [3])], bytes(32)), "at most 127"),
    "name not UTF-8": (build([], [info(b"\xff", [3])], bytes(32)), "tensor name is not UTF-8"),
    "five dimensions": (build([], [info("w", [1] * 5)], bytes(32)), "5 dimensions"),
    "endless dimensions": (build([], [text("w") + b"\xff" * 4], bytes(32)), "4294967295 dimensions"),
    "a dimension of 0": (build([], [info("w", [3, 0])]), r"dimensions \[3, 0\], expected positive"),
    "a negative dimension": (build([], [info("w", [2**64 - 3])], bytes(32)), "product below"),
    "overflow to something small": (build([], [info("w", [2**32, 2**32])], bytes(32)), "product below"),
    "unknown ggml type": (build([], [info("w", [32], 4)], bytes(32)), "'w' has the unknown ggml type 4 .known: F32"),
    "half a block": (build([], [info("w", [33], 8)], bytes(64)), "'w': Q8_0 takes blocks of 32"),
    "a scalar of blocks": (build([], [info("w", [], 8)], bytes(64)), "'w': Q8_0 takes blocks of 32"),
    "not aligned": (build([], [TENSOR, info("v", [3], 0, 12)], bytes(64)), "'v' is at offset 12, expected 32"),
    "hole": (build([], [TENSOR, info("v", [3], 0, 64)], bytes(96)), "'v' is at offset 64, expected 32"),
    "hole at the start": (build([], [info("w", [3], 0, 32)], bytes(64)), "'w' is at offset 32, expected 0"),
    "overlap": (build([], [info("w", [9]), info("v", [3], 0, 32)], bytes(96)), "'v' is at offset 32, expected 64"),
    "other order": (build([], [info("w", [3], 0, 32), info("v", [3])], bytes(64)), "'w' is at offset 32"),
    "body cut off": (build([], [TENSOR], bytes(11)), "truncated: tensor 'w'"),
    "more than padding": (build([], [TENSOR], bytes(33)), "21 bytes after the last tensor"),
    "more than a header": (build([], [], bytes(1)), "1 bytes after the last tensor|belong to no tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_header_is_refused_by_name(tmp_path: Path, case: str) -> None:
    data, words = BAD[case]
    file = tmp_path / "bad.gguf"
    file.write_bytes(data)
    with pytest.raises(FormatError, match=rf"bad\.gguf.*({words})"):
        read_gguf(file)


def test_the_same_builder_makes_good_files(tmp_path: Path) -> None:
    file = tmp_path / "good.gguf"
    for version in (2, 3):
        file.write_bytes(build([U32], [TENSOR, info("v", [], 0, 32)], bytes(64), version=version))
        header = read_gguf(file)
        assert (header.version, header.metadata) == (version, {"a": 0})
        assert {name: tensor.shape for name, tensor in header.tensors.items()} == {"w": (3,), "v": ()}
    file.write_bytes(build([], [TENSOR], bytes(12)))
    assert read_gguf(file).tensors["w"].nbytes == 12, "the padding after the last tensor may be missing"
    file.write_bytes(build([key("e", 9, array(8, 0, b"")), key("n", 9, array(4, 0, b""))], []))
    assert [len(value) for value in read_gguf(file).metadata.values()] == [0, 0]


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = build([U32, key("b", 9, array(8, 2, text("x") + text("yy")))], [TENSOR, info("v", [3], 0, 32)], bytes(44))
    file = tmp_path / "cut.gguf"
    file.write_bytes(data)
    read_gguf(file)
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(FormatError):
            read_gguf(file)


def test_a_vocabulary_larger_than_the_read_buffer(tmp_path: Path) -> None:
    words = [f"token {number} " + "x" * int(seeded_rng().integers(0, 60)) for number in range(30_000)]
    file = tmp_path / "x.gguf"
    write_file(file, {"words": words, "ranks": list(range(30_000))}, ["F32"])
    metadata = read_gguf(file).metadata
    assert metadata["words"] == tuple(words)
    assert plain(metadata["ranks"]) == list(range(30_000))


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone.gguf"):
        with pytest.raises(FormatError, match=str(path)):
            read_gguf(path)
