"""Every header parser: random valid files are read as they were written, damaged ones are refused cheaply."""

from __future__ import annotations

import contextlib
import datetime
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from fuzz.header_parsers import PARSERS, valid_inputs, valid_manifest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kit.seeding import seeded_rng

from weights.formats.gguf import read_gguf
from weights.formats.kuiper import read_kuiper
from weights.records.errors import FormatError, WeightsError
from weights.records.manifest import read_manifest

pytestmark = pytest.mark.slow

MAX_EXTRA_BYTES = 4 * 2**20
MAX_TIME = datetime.timedelta(seconds=10)  # far beyond what any of them takes on a busy machine
property_test = settings(deadline=MAX_TIME, suppress_health_check=[HealthCheck.function_scoped_fixture])

Change = tuple[str, float, float, int]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["flip", "set", "cut", "splice", "repeat", "remove", "number", "digits", "deep"]),
        st.floats(0, 1),
        st.floats(0, 1),
        st.one_of(st.integers(0, 255), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1])),
    ),
    min_size=1,
    max_size=4,
)


def mutated(data: bytes, changes: list[Change], other: bytes) -> bytes:
    """Each change is an operation at a relative place, with another place and a number to use."""
    for operation, where, to, value in changes:
        begin, end = sorted((int(where * len(data)), int(to * len(data))))
        match operation:
            case "flip":
                middle = bytes(byte ^ (1 << value % 8) for byte in data[begin : begin + 1])
                data = data[:begin] + middle + data[begin + 1 :]
            case "set":
                data = data[:begin] + bytes([value % 256]) + data[begin + 1 :]
            case "number":
                data = data[:begin] + struct.pack("<Q", value) + data[begin + 8 :]
            case "digits":
                data = data[:begin] + b"9" * (value % 5000) + data[begin:]
            case "deep":
                data = data[:begin] + b"[" * (value % 3000) + data[begin:]
            case "cut":
                data = data[:end]
            case "splice":
                data = data[:begin] + other[int(to * len(other)) :][:64] + data[end:]
            case "repeat":
                data = data[:end] + data[begin:end] * (value % 8) + data[end:]
            case "remove":
                data = data[:begin] + data[end:]
    return data


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return valid_inputs(tmp_path_factory.mktemp("seeds"))


@pytest.mark.parametrize("name", PARSERS)
def test_the_seeds_are_valid(tmp_path: Path, inputs: dict[str, bytes], name: str) -> None:
    PARSERS[name](tmp_path, inputs[name])


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", PARSERS)
@settings(property_test, max_examples=50)
@given(changes=CHANGES, other=st.sampled_from(list(PARSERS)))
def test_a_damaged_file_is_refused_as_one_or_read_within_its_bounds(
    tmp_path: Path, inputs: dict[str, bytes], name: str, changes: list[Change], other: str
) -> None:
    data = mutated(inputs[name], changes, inputs[other])
    tracemalloc.start()
    try:
        with contextlib.suppress(WeightsError):
            PARSERS[name](tmp_path, data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= len(data) + MAX_EXTRA_BYTES


T = gguf.GGUFValueType
KEYS = st.text("abc._é", min_size=1, max_size=8).filter(lambda key: not key.startswith("general"))
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda value: (T.UINT32, value)),
    st.integers(-(2**63), 2**63 - 1).map(lambda value: (T.INT64, value)),
    st.floats(allow_nan=False).map(lambda value: (T.FLOAT64, value)),
    st.booleans().map(lambda value: (T.BOOL, value)),
    WORDS.map(lambda value: (T.STRING, value)),
    st.lists(WORDS, min_size=1, max_size=5).map(lambda value: (T.ARRAY, value)),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5).map(lambda value: (T.ARRAY, value)),
    st.lists(st.booleans(), min_size=1, max_size=5).map(lambda value: (T.ARRAY, value)),
)
ARRAYS = st.dictionaries(
    st.text("wxyzé.", min_size=1, max_size=8),
    st.tuples(
        st.sampled_from([np.float32, np.float16, np.int8, np.int64]),
        st.lists(st.integers(1, 4), min_size=1, max_size=4),
    ),
    max_size=5,
)


@settings(property_test, max_examples=50)
@given(metadata=st.dictionaries(KEYS, VALUES, max_size=6), arrays=ARRAYS, alignment=st.sampled_from([8, 32, 64]))
def test_a_random_gguf_file_reads_as_gguf_py_reads_it(
    tmp_path: Path, metadata: dict[str, Any], arrays: dict[str, Any], alignment: int
) -> None:
    file = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_custom_alignment(alignment)
    for key, (kind, value) in metadata.items():
        writer.add_key_value(key, value, kind)
    for name, (dtype, shape) in arrays.items():
        writer.add_tensor(name, seeded_rng().integers(0, 100, shape).astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header, reader = read_gguf(file), gguf.GGUFReader(file)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert {
        key: value if isinstance(value, str | int | float) else list(value) for key, value in header.metadata.items()
    } == theirs
    assert [(name, found.shape, found.read()) for name, found in header.tensors.items()] == [
        (found.name, tuple(int(n) for n in reversed(found.shape)), found.data.tobytes()) for found in reader.tensors
    ]


@settings(property_test, max_examples=50)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3)]),
    pairs=st.integers(1, 4),
    hidden=st.integers(1, 20),
    layers=st.integers(1, 4),
    vocab=st.integers(1, 30),
    positions=st.integers(1, 9),
    shared=st.booleans(),
    group=st.sampled_from([None, 1, 2, 4]),
)
def test_a_random_kuiper_file_has_the_published_size(
    tmp_path: Path,
    heads: tuple[int, int],
    pairs: int,
    hidden: int,
    layers: int,
    vocab: int,
    positions: int,
    shared: bool,
    group: int | None,
) -> None:
    dim = heads[0] * pairs * 2
    kv_dim = dim * heads[1] // heads[0]
    matrices = layers * (2 * dim * dim + 2 * kv_dim * dim + 3 * hidden * dim)
    if group is not None:
        assume(all(numel % group == 0 for numel in (dim * dim, kv_dim * dim, hidden * dim, vocab * dim)))
    plain = vocab * dim + (2 * layers + 1) * dim
    classifier = 0 if shared else vocab * dim
    numbers = [dim, hidden, layers, *heads, vocab if shared else -vocab, positions]
    if group is None:
        body = 4 * (matrices + plain + classifier + positions * dim // heads[0])
    else:
        numbers.append(group)
        body = (matrices + classifier) + 4 * (matrices + classifier) // group + 4 * plain
    file = tmp_path / "x.bin"
    raw = struct.pack(f"<{len(numbers)}i", *numbers)
    file.write_bytes(raw + bytes(body))
    header = read_kuiper(file)
    assert (header.raw, header.group_size, header.shared_classifier) == (raw, group, shared)
    tensors = sorted(header.tensors.values(), key=lambda tensor: tensor.offset)
    assert tensors[-1].offset + tensors[-1].nbytes == len(raw) + body
    for length in (body - 1, body + 1):
        file.write_bytes(raw + bytes(length))
        with pytest.raises(FormatError):
            read_kuiper(file)


def test_a_manifest_reads_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    file.write_text(valid_manifest().model_dump_json())
    assert read_manifest(file) == valid_manifest()


VALUES_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(property_test, max_examples=100)
@given(path=st.lists(st.integers(0, 20), min_size=1, max_size=6), value=VALUES_JSON, removes=st.booleans())
def test_a_manifest_with_another_value_somewhere_is_valid_or_refused(
    tmp_path: Path, path: list[int], value: Any, removes: bool
) -> None:
    manifest = json.loads(valid_manifest().model_dump_json())
    place, keys = manifest, list(manifest)
    for step in path[:-1]:
        inner = place[keys[step % len(keys)]] if keys else None
        if not isinstance(inner, dict) or not inner:
            break
        place, keys = inner, list(inner)
    key = keys[path[-1] % len(keys)]
    if removes:
        del place[key]
    else:
        place[key] = value
    with contextlib.suppress(WeightsError):
        PARSERS["manifest"](tmp_path, json.dumps(manifest).encode())


@settings(property_test, max_examples=50)
@given(value=VALUES_JSON, name=st.sampled_from(["shard_index", "config", "model_index"]), key=st.integers(0, 3))
def test_an_index_of_any_json_is_read_or_refused(tmp_path: Path, value: Any, name: str, key: int) -> None:
    keys = ["weight_map", "architectures", "_class_name", "vae"]
    for data in (value, {keys[key]: value}, {"weight_map": {"a": value}}, {"vae": [value, value]}):
        with contextlib.suppress(WeightsError):
            PARSERS[name](tmp_path, json.dumps(data).encode())
