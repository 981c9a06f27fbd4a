"""Types of edges: which fit, and values between tensors and what models take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.pipeline import NAMED_TYPES
from deployments.pipelines.edge_types import (
    FLOAT,
    IMAGE,
    INT,
    TEXT,
    TOKENS,
    VECTOR,
    EdgeType,
    batch_of,
    edge_type,
    items_of,
    stacked,
    tensor_of,
)
from deployments.pipelines.records import TensorValue
from deployments.records.errors import InvalidRequest


def test_every_type_of_the_config_is_known_here() -> None:
    for name in NAMED_TYPES:
        assert str(edge_type(name)) == name
    assert edge_type("FP32[-1,7]") == EdgeType("FP32", (-1, 7))
    assert str(edge_type("FP32[-1, 7]")) == "FP32[-1,7]"


@pytest.mark.parametrize(
    ("wanted", "given_", "fits"),
    [
        (TEXT, TEXT, True),
        (TEXT, INT, False),
        (FLOAT, INT, False),
        (VECTOR, EdgeType("FP32", (-1, 8)), True),
        (EdgeType("FP32", (-1, 8)), VECTOR, True),
        (EdgeType("FP32", (-1, 8)), EdgeType("FP32", (-1, 9)), False),
        (VECTOR, EdgeType("FP16", (-1, 8)), False),
        (VECTOR, FLOAT, False),
        (TOKENS, EdgeType("INT64", (-1, 8)), False),
        (IMAGE, EdgeType("UINT8", (-1, 32, 32, 3)), True),
    ],
)
def test_what_fits(wanted: EdgeType, given_: EdgeType, fits: bool) -> None:
    assert wanted.accepts(given_) is fits


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(), min_size=1, max_size=5))
def test_texts_come_back(texts: list[str]) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    assert batch_of(tensor_of("t", texts, TEXT), TEXT) == texts


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**40), min_size=1, max_size=6).map(tuple), min_size=1, max_size=5))
def test_tokens_come_back(rows: list[tuple[int, ...]]) -> None:
    tensor = tensor_of("t", rows, TOKENS)
    assert tensor.shape == (len(rows), max(map(len, rows)))
    assert batch_of(tensor, TOKENS) == rows


def test_a_text_that_is_not_utf8_is_refused() -> None:
    data = np.array([b"fine", b"\xff"], dtype=object)
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        batch_of(TensorValue("t", "BYTES", data), TEXT)


@pytest.mark.parametrize("row", [[-1, -1], [3, -2], [1, -1, 2]])
def test_token_rows_end_with_their_padding(row: list[int]) -> None:
    tensor = TensorValue("t", "INT64", np.array([row]))
    if row == [1, -1, 2]:
        # What follows the first padding is padding.
        assert batch_of(tensor, TOKENS) == [(1,)]
        return
    with pytest.raises(InvalidRequest, match="token ids"):
        batch_of(tensor, TOKENS)


@pytest.mark.parametrize(
    "tensor",
    [
        TensorValue("t", "FP32", np.zeros((2, 4), np.float32)),
        TensorValue("t", "FP32", np.zeros((2, 3, 1), np.float32)),
        TensorValue("t", "FP64", np.zeros((2, 3))),
    ],
)
def test_a_tensor_of_another_type_is_refused(tensor: TensorValue) -> None:
    with pytest.raises(InvalidRequest, match=r"expected FP32\[-1, 3\], got"):
        batch_of(tensor, EdgeType("FP32", (-1, 3)))


def test_items_are_what_functions_take() -> None:
    numbers = items_of(np.array([1, 2]))
    assert numbers == [1, 2]
    assert all(type(number) is int for number in numbers)
    rows = items_of(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert [row.tolist() for row in rows] == [[0, 1, 2], [3, 4, 5]]


def test_items_of_different_shapes_make_no_tensor() -> None:
    with pytest.raises(ValueError, match="different shapes"):
        stacked([np.zeros((2, 2, 3)), np.zeros((2, 3, 3))], IMAGE)
