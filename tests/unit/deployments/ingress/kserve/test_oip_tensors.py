"""Tensor data to arrays and back. References: numpy itself, and the framing of BYTES as a plain formula."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from deployments.ingress.kserve import tensors
from deployments.pipelines.records import NUMPY_DTYPES, Datatype
from deployments.records.errors import InvalidRequest

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
NUMBERS = [datatype for datatype in get_args(Datatype) if datatype != "BYTES"]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


def random_array(datatype: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Every bit pattern of the type may come, save for BOOL."""
    generator = np.random.default_rng(seed)
    if datatype == "BOOL":
        return generator.integers(0, 2, shape).astype(np.bool_)
    raw = generator.bytes(math.prod(shape) * NUMPY_DTYPES[datatype].itemsize)
    return np.frombuffer(raw, NUMPY_DTYPES[datatype]).reshape(shape)


def framed(elements: list[bytes]) -> bytes:
    return b"".join(len(element).to_bytes(4, "little") + element for element in elements)


@pytest.mark.parametrize("datatype", NUMBERS)
@settings(max_examples=12, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_raw_bytes_are_numpys_and_come_back(datatype: Datatype, shape: tuple[int, ...], seed: int) -> None:
    array = random_array(datatype, shape, seed)
    value = tensors.from_bytes("x", datatype, shape, array.tobytes())
    assert (value.name, value.datatype, value.shape) == ("x", datatype, shape)
    assert value.data.dtype == NUMPY_DTYPES[datatype]
    assert value.data.tobytes() == array.tobytes() == tensors.to_bytes(value)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("datatype", [name for name in NUMBERS if name not in tensors.BINARY_ONLY])
@settings(max_examples=12, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_json_is_numpys_and_comes_back_flat_or_nested(datatype: Datatype, shape: tuple[int, ...], seed: int) -> None:
    array = random_array(datatype, shape, seed)
    array = np.nan_to_num(array) if array.dtype.kind == "f" else array
    flat, nested = json.loads(json.dumps([array.reshape(-1).tolist(), array.tolist()]))
    for data in [flat, nested] if shape else [flat]:
        value = tensors.from_json("x", datatype, shape, data)
        assert value.data.dtype == NUMPY_DTYPES[datatype]
        np.testing.assert_array_equal(value.data, array)
        assert tensors.to_json(value) == flat


@settings(max_examples=25, deadline=None)
@given(data=st.data(), shape=SHAPES)
def test_bytes_are_framed_by_their_lengths(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    elements = data.draw(st.lists(st.binary(max_size=6), min_size=size, max_size=size))
    value = tensors.from_bytes("x", "BYTES", shape, framed(elements))
    assert value.shape == shape
    assert value.data.reshape(-1).tolist() == elements
    assert tensors.to_bytes(value) == framed(elements)
    texts = data.draw(st.lists(st.text(max_size=4), min_size=size, max_size=size))
    value = tensors.from_json("x", "BYTES", shape, texts)
    assert value.data.reshape(-1).tolist() == [text.encode() for text in texts]
    assert tensors.to_json(value) == texts == tensors.texts(value)


@settings(max_examples=40, deadline=None)
@given(
    datatype=JSON_VALUES | st.sampled_from(get_args(Datatype)),
    shape=st.lists(JSON_VALUES, max_size=3) | st.lists(st.integers(-1, 2**70) | st.integers(0, 3), max_size=40),
    data=st.lists(JSON_VALUES, max_size=6),
    raw=st.binary(max_size=40),
)
def test_garbage_is_an_invalid_request_and_nothing_else(datatype: Any, shape: Any, data: Any, raw: bytes) -> None:
    for read, content in ((tensors.from_json, data), (tensors.from_bytes, raw)):
        try:
            checked = tensors.checked_datatype("x", datatype), tensors.checked_shape("x", shape)
            value = read("x", *checked, content)  # type: ignore[operator]
        except InvalidRequest:
            continue
        assert value.shape == tuple(shape)


@settings(max_examples=40, deadline=None)
@given(array=np_st.arrays(np.int64, np_st.array_shapes(min_dims=2, max_dims=3, max_side=3)), cut=st.integers(0, 100))
def test_ragged_data_is_refused(array: np.ndarray[Any, Any], cut: int) -> None:
    nested = array.tolist()
    row = nested[cut % len(nested)]
    row.pop()
    with pytest.raises(InvalidRequest):
        tensors.from_json("x", "INT64", array.shape, nested)


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "reason"),
    [
        ("INT8", (1,), [128], "out of range of INT8"),
        ("INT8", (1,), [-129], "out of range"),
        ("UINT64", (1,), [2**64], "out of range"),
        ("UINT8", (1,), [-1], "out of range"),
        ("INT64", (1,), [10**5000], "a number of 16610 bits is out of range"),
        ("INT32", (1,), [1.0], "whole numbers, got 1.0"),
        ("INT32", (1,), [True], "whole numbers, got True"),
        ("INT32", (1,), ["1"], "whole numbers, got '1'"),
        ("BOOL", (1,), [1], "true or false, got 1"),
        ("FP32", (1,), [True], "numbers, got True"),
        ("FP32", (1,), [1e39], "out of range of FP32"),
        ("FP64", (1,), [math.inf], "out of range of FP64"),
        ("FP64", (1,), [math.nan], "out of range"),
        ("FP64", (1,), [10**400], "out of range"),
        ("FP16", (1,), [1.0], "binary data"),
        ("BF16", (1,), [1.0], "binary data"),
        ("BYTES", (1,), [5], "takes text, got 5"),
        ("BYTES", (1,), ["\ud800"], "surrogate"),
        ("BYTES", (1,), [None], "takes text, got None"),
        ("INT32", (2,), [1, 2, 3], r"3 elements, but shape \[2\] has 2"),
        ("INT32", (2, 2), [[1, 2], 3], "nested unlike shape"),
        ("INT32", (2,), [[1], [2]], "whole numbers, got a list of 1"),
        ("INT32", (), [[1]], "got a list of 1"),
    ],
)
def test_json_that_does_not_fit_says_why(datatype: Datatype, shape: Any, data: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        tensors.from_json("x", datatype, shape, data)


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "reason"),
    [
        ("INT32", (2,), b"1234567", r"7 bytes, but INT32 of shape \[2\] has 8"),
        ("BOOL", (2,), b"\x01\x02", "byte of 0 or 1"),
        ("BYTES", (1,), b"\x05\x00\x00\x00abc", "reaches beyond"),
        ("BYTES", (1,), b"\xff\xff\xff\xffabc", "reaches beyond"),
        ("BYTES", (2,), framed([b"abcdefgh"]), "reaches beyond"),
        ("BYTES", (1,), framed([b"a", b"b"]), "5 bytes are left"),
        ("BYTES", (2**30,), b"abc", "too few"),
    ],
)
def test_raw_bytes_that_do_not_fit_say_why(datatype: Datatype, shape: Any, raw: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        tensors.from_bytes("x", datatype, shape, raw)


@pytest.mark.parametrize("shape", [[-1], [2**31], [2**16, 2**16], [0, 2**40], [1] * 33, [True], [1.0], ["1"], [None]])
def test_shapes_that_are_none(shape: Any) -> None:
    with pytest.raises(InvalidRequest):
        tensors.checked_shape("x", shape)


def test_unknown_datatypes_name_the_known_ones() -> None:
    for datatype in ("FP8", "bool", None, ["BOOL"], {}):
        with pytest.raises(InvalidRequest, match="known: BOOL, UINT8"):
            tensors.checked_datatype("x", datatype)


def test_what_json_cannot_say_is_refused_on_the_way_out() -> None:
    values = [
        tensors.from_bytes("x", "FP32", (1,), np.float32(np.nan).tobytes()),
        tensors.from_bytes("x", "FP64", (1,), np.float64(-np.inf).tobytes()),
        tensors.from_bytes("x", "BYTES", (1,), framed([b"\xff"])),
        tensors.from_bytes("x", "FP16", (1,), np.float16(1).tobytes()),
        tensors.from_bytes("x", "BF16", (1,), ml_dtypes.bfloat16(1).tobytes()),
        tensors.from_bytes("x", "BOOL", (2**22 + 1,), bytes(2**22 + 1)),
    ]
    for value in values:
        with pytest.raises(InvalidRequest, match="as binary data"):
            tensors.to_json(value)
