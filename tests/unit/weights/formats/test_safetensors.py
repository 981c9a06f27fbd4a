"""safetensors headers, against the safetensors library on fresh random files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from weights.formats.safetensors import read_header, write_safetensors
from weights.formats.untrusted import num_elements
from weights.platform.torch_dtypes import TORCH_DTYPES
from weights.records.dtypes import ITEM_BYTES
from weights.records.errors import FormatError

SHAPES: list[tuple[int, ...]] = [(), (0,), (3,), (2, 0, 4), (2, 3), (1, 2, 3, 4)]


def raw(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def as_library_reads(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = safetensors.deserialize(data)
    return {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in found}


def as_we_read(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    data = file.read_bytes()
    tensors = read_header(file).tensors
    assert all(found.file == file for found in tensors.values())
    return {
        name: (found.dtype, found.shape, data[found.offset : found.offset + found.nbytes])
        for name, found in tensors.items()
    }


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_and_shape_reads_as_the_library_does(tmp_path: Path, name: str) -> None:
    dtype = TORCH_DTYPES[name]
    tensors = {}
    for shape in SHAPES:
        data = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
        tensors[f"t{shape}"] = data.view(dtype).reshape(shape)
    file = tmp_path / "x.safetensors"
    save_file(tensors, file, metadata={"format": "pt", "é": "ü"})
    found = as_we_read(file)
    assert found == as_library_reads(file.read_bytes())
    assert {entry[0] for entry in found.values()} == {name}
    assert read_header(file).metadata == {"format": "pt", "é": "ü"}


def test_a_file_without_tensors(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({}, file)
    assert read_header(file).tensors == {}


F32 = entry("F32", [2], 0, 8)
BODY = bytes(8)
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "seven bytes": (bytes(7), "too short"),
    "header cut off": (raw({"a": F32}, BODY)[:20], "does not fit"),
    "huge length": (raw({"a": F32}, BODY, length=2**63), "does not fit"),
    "length over the limit": (raw({}, length=100_000_001), "limit"),
    "no header": (bytes(8), "not UTF-8 JSON"),
    "not JSON": (raw(b"{'a': 1}"), "not UTF-8 JSON"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "not UTF-8 JSON"),
    "nested too deep": (raw(b'{"a":' + b"[" * 100_000), "not UTF-8 JSON"),
    "number too long": (raw(b'{"a":' + b"9" * 5000 + b"}"), "expected dtype"),
    "size of 4,300 digits": (raw(b'{"a":{"dtype":"U8","shape":[%b],"data_offsets":[0,0]}}' % (b"9" * 4300)), "2\\^63"),
    "size of 2^63": (raw({"a": entry("U8", [2**63], 0, 0)}), "integers below 2\\^63"),
    "product of 2^64": (raw({"a": entry("U8", [2**32, 2**32], 0, 0)}), "takes 2\\^64 or more bytes"),
    "product of 2^64, then nothing": (raw({"a": entry("U8", [2**32, 2**32, 0], 0, 0)}), "takes 2\\^64 or more bytes"),
    "rank of 65": (raw({"a": entry("U8", [1] * 65, 0, 1)}, b"x"), "64 sizes at most"),
    "shape is a text": (raw({"a": entry("U8", "", 0, 1)}, b"x"), "'a': shape"),
    "a list": (raw([1]), "expected an object"),
    "duplicate tensor": (raw(b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2), BODY), "'a' appears twice"),
    "duplicate field": (raw(b'{"a":{"dtype":"U8","dtype":"U8"}}'), "'dtype' appears twice"),
    "overlap": (raw({"a": F32, "b": entry("F32", [2], 4, 12)}, bytes(12)), "'b'.* overlaps"),
    "hole": (raw({"a": F32, "b": entry("F32", [1], 12, 16)}, bytes(16)), "'b'.* hole"),
    "hole at the start": (raw({"a": entry("F32", [2], 4, 12)}, bytes(12)), "'a'.* hole"),
    "trailing bytes": (raw({"a": F32}, bytes(9)), "1 bytes after the last tensor"),
    "body cut off": (raw({"a": F32}, bytes(7)), "truncated: tensor 'a'"),
    "unknown dtype": (raw({"a": entry("F31", [2], 0, 8)}, BODY), "'a': unknown dtype 'F31'"),
    "dtype is a list": (raw({"a": entry(["F32"], [2], 0, 8)}, BODY), "'a'"),
    "wrong size": (raw({"a": entry("F32", [3], 0, 8)}, BODY), "takes 12 bytes, its offsets give 8"),
    "end before begin": (raw({"a": entry("F32", [2], 8, 0)}, BODY), "'a'"),
    "negative dimension": (raw({"a": entry("F32", [-2], 0, 8)}, BODY), "negative"),
    "negative offset": (raw({"a": entry("F32", [2], -8, 0)}, BODY), "negative"),
    "two negative dimensions": (raw({"a": entry("F32", [-1, -2], 0, 8)}, BODY), "negative"),
    "boolean dimension": (raw({"a": entry("F32", [True, 2], 0, 8)}, BODY), "non-negative integers"),
    "fraction": (raw({"a": entry("F32", [2.0], 0, 8)}, BODY), "non-negative integers"),
    "shape is no list": (raw({"a": entry("F32", 2, 0, 8)}, BODY), "integers below"),
    "three offsets": (raw({"a": {**F32, "data_offsets": [0, 4, 8]}}, BODY), "expected dtype"),
    "no dtype": (raw({"a": {"shape": [2], "data_offsets": [0, 8]}}, BODY), "expected dtype"),
    "tensor is null": (raw({"a": None}), "expected dtype"),
    "metadata is a list": (raw({"__metadata__": []}), "__metadata__"),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata has half a character": (raw(b'{"__metadata__":{"a":"\\ud800"}}'), "half a character"),
    "name is half a character": (raw(b'{"\\ud800":%b}' % json.dumps(F32).encode(), BODY), "UTF-8"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_header_is_refused_by_name(tmp_path: Path, case: str) -> None:
    data, words = BAD[case]
    file = tmp_path / "bad.safetensors"
    file.write_bytes(data)
    with pytest.raises(FormatError, match=rf"bad\.safetensors.*{words}"):
        read_header(file)


@pytest.mark.parametrize("where", ["name", "shape", "dtype", "twice", "value", "hole"])
def test_a_message_is_a_short_line(tmp_path: Path, where: str) -> None:
    name = "a\n" * 100_000
    numbers = [9] * 100_000
    header: Any = {
        "name": {name: entry("U8", [2], 0, 1)},
        "shape": {"a": entry("U8", numbers, 0, 1)},
        "dtype": {"a": entry(name, [1], 0, 1)},
        "value": {"a": {"": name, name: numbers}},
        "hole": {name: entry("U8", [1], 1, 2)},
    }.get(where)
    twice = b"{%b:1,%b:1}" % ((json.dumps(name).encode(),) * 2)
    file = tmp_path / "long.safetensors"
    file.write_bytes(raw(header if header else twice, b"xx"))
    with pytest.raises(FormatError) as caught:
        read_header(file)
    message = str(caught.value).removeprefix(str(file))
    assert "\n" not in message
    assert len(message) <= 500


def test_no_long_number_is_multiplied_or_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.8 MB of them stalled all threads for a second: one product of 4,300-digit numbers is one call into C."""
    sizes = b",".join([b"9" * 4300] * 190)
    file = tmp_path / "digits.safetensors"
    file.write_bytes(raw(b'{"a":{"dtype":"U8","shape":[%b],"data_offsets":[0,1]}}' % sizes, b"x"))
    longest = 0

    def count(shape: Any) -> int | None:
        nonlocal longest
        longest = max(longest, *(len(str(size)) for size in shape))
        return num_elements(shape)

    monkeypatch.setattr("weights.formats.safetensors.num_elements", count)
    with pytest.raises(FormatError, match="integers below"):
        read_header(file)
    assert longest == 0
    file.write_bytes(raw({"a": entry("U8", [2**62] * 64, 0, 1)}, b"x"))
    with pytest.raises(FormatError, match=r"2\^64 or more"):
        read_header(file)
    assert longest == 19  # digits


def test_a_name_that_comes_twice_is_found_in_one_pass(tmp_path: Path) -> None:
    """Looking for each name in all of them took minutes for these 3 MB, and hours for what the format allows."""
    names = [f"t{number}" for number in range(200_000)]
    file = tmp_path / "twice.safetensors"
    file.write_bytes(raw(("{" + ",".join(f'"{name}":0' for name in [*names, names[-1]]) + "}").encode()))
    with pytest.raises(FormatError, match="'t199999' appears twice"):
        read_header(file)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = save({"a": torch.rand(3, 2), "b": torch.rand(4)})
    file = tmp_path / "cut.safetensors"
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(FormatError):
            read_header(file)


DTYPES = [np.float32, np.int64, np.uint8, np.float16, np.bool_]
ARRAYS = st.dictionaries(
    st.text("abc.é", max_size=4),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)).map(lambda x: np.zeros(x[1], x[0])),
    max_size=3,
)
PIECES = st.sampled_from([*b'0123456789-[]{},:"eE.\\ ', 0xFF, 0x00]).map(lambda byte: bytes([byte]))
CHANGES = st.lists(
    st.tuples(st.integers(0, 10_000), st.sampled_from([0, 1]), st.one_of(PIECES, st.just(b""))), min_size=1, max_size=3
)


@settings(max_examples=100, deadline=None)
@given(arrays=ARRAYS, changes=CHANGES, keep_length=st.booleans(), extra=st.binary(max_size=2))
def test_a_mutated_file_reads_as_the_library_reads_it_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, arrays: Any, changes: Any, keep_length: bool, extra: bytes
) -> None:
    data = safetensors.numpy.save(arrays)
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    for place, removed, inserted in changes:
        place %= len(header) + 1
        header = header[:place] + inserted + header[place + removed :]
    file = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    file.write_bytes(raw(header, body + extra, length if keep_length else None))
    try:
        found = as_we_read(file)
    except FormatError:
        return
    assert found == as_library_reads(file.read_bytes())


SIZES = st.one_of(st.integers(0, 3), st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1]))
ODD_VALUES = st.sampled_from([None, True, -1, 1.0, "", "1", [], {}, [1], {"a": 1}, 2**70, -(2**63), "F32"])
PERTURBED = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "I64", "BOOL"]),
        "shape": st.lists(SIZES, max_size=5),
        "shift": st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1]),
        "odd": st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "more"]), ODD_VALUES, max_size=1),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    entries=st.dictionaries(st.text("ab.é\n", max_size=3), PERTURBED, max_size=3),
    metadata=st.one_of(st.none(), st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2), ODD_VALUES),
    is_there=st.booleans(),
)
def test_what_the_library_accepts_is_accepted_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, entries: Any, metadata: Any, is_there: bool
) -> None:
    header: dict[str, Any] = {"__metadata__": metadata} if is_there else {}
    position = 0
    for name, changed in entries.items():
        nbytes = math.prod(changed["shape"]) * ITEM_BYTES[changed["dtype"]]
        end = position + (nbytes if nbytes < 2**20 else 1) + changed["shift"]
        header[name] = entry(changed["dtype"], changed["shape"], position, end) | changed["odd"]
        position = max(0, end)
    file = tmp_path_factory.getbasetemp() / "perturbed.safetensors"
    file.write_bytes(raw(header, bytes(position)))
    try:
        theirs = as_library_reads(file.read_bytes())
    except safetensors.SafetensorError:
        theirs = None
    try:
        ours = as_we_read(file)
    except FormatError:
        ours = None
    assert ours == theirs


@settings(max_examples=50, deadline=None)
@given(arrays=ARRAYS)
def test_a_valid_file_is_read(tmp_path_factory: pytest.TempPathFactory, arrays: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "valid.safetensors"
    file.write_bytes(safetensors.numpy.save(arrays))
    assert as_we_read(file) == as_library_reads(file.read_bytes())


NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def sources(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: (NAMES[tensor.dtype], tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes)
        for name, tensor in tensors.items()
    }


def test_a_written_file_has_the_bytes_of_the_stock_writer(tmp_path: Path) -> None:
    tensors = {}
    for number, dtype in enumerate(TORCH_DTYPES.values()):
        for shape in SHAPES:
            data = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
            tensors[f"{number * 7 % 17}é{shape}"] = data.view(dtype).reshape(shape)
    file = tmp_path / "x.safetensors"
    for chosen, metadata in [(tensors, {"format": "pt"}), ({}, {}), (tensors, {}), ({}, {"ü": '"'})]:
        write_safetensors(file, sources(chosen), metadata)
        assert file.read_bytes() == save(chosen, metadata=metadata or None)


def test_one_tensor_at_a_time_is_read_while_writing(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    seen: list[int] = []

    def read() -> bytes:
        seen.append(file.stat().st_size)
        return bytes(2**16)

    write_safetensors(file, dict.fromkeys("abc", ("U8", (2**16,), read)), {})
    assert all(size >= number * 2**16 for number, size in enumerate(seen))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("a", ("Q8_0", (32,), lambda: bytes(34)), "'a': safetensors has no Q8_0"),
        ("a", ("F32", (2,), lambda: bytes(7)), "'a' takes 8 bytes, 7 came"),
        ("a", ("F32", (2,), lambda: memoryview(bytes(12)).cast("I")), "'a' takes 8 bytes, 12 came"),
        ("__metadata__", ("U8", (1,), lambda: b"x"), "no tensor can be called '__metadata__'"),
        ("\ud800", ("U8", (1,), lambda: b"x"), "not text"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, name: str, tensor: Any, words: str) -> None:
    with pytest.raises(FormatError, match=rf"x\.safetensors.*{words}"):
        write_safetensors(tmp_path / "x.safetensors", {name: tensor}, {})


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone.safetensors"):
        with pytest.raises(FormatError, match=str(path)):
            read_header(path)
