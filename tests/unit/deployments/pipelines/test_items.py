"""One item of a pipeline: its plain values are the tensors that a caller of `/v2` would write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kit.seeding import seeded_rng

from deployments.pipelines.edge_types import FLOAT, IMAGE, INT, TEXT, TOKENS, VECTOR
from deployments.pipelines.items import request_of
from deployments.pipelines.records import PipelineRequest, Signature, TensorValue, bytes_data
from deployments.records.errors import InvalidRequest, UnknownModel

TYPES = {"text": TEXT, "number": INT, "share": FLOAT, "ids": TOKENS, "vector": VECTOR, "image": IMAGE}
SIGNATURE = Signature(tuple(type_.spec(name, optional=True) for name, type_ in TYPES.items()), ())


def signature(pipeline: str) -> Signature:
    if pipeline != "all":
        raise UnknownModel(f"no pipeline {pipeline!r}", "model")
    return SIGNATURE


def test_plain_values_are_tensors_of_one_item() -> None:
    image = seeded_rng().integers(0, 256, (4, 6, 3), dtype=np.uint8)
    vector = seeded_rng().normal(size=5).astype(np.float32)
    made = TensorValue("text", "BYTES", bytes_data(["\u00e9".encode()]))
    given = {
        "text": "\u00e9",
        "number": 2**40,
        "share": 1,
        "ids": [3, 4],
        "vector": vector,
        "image": image,
        "none": None,
    }
    found = request_of({"pipeline": "all", "inputs": given, "priority": 2, "timeout_s": 3, "tenant": "t"}, signature)
    assert (found.pipeline, found.priority, found.timeout_s, found.tenant) == ("all", 2, 3.0, "t")
    expected: dict[str, tuple[str, Any]] = {
        "text": ("BYTES", made.data),
        "number": ("INT64", np.array([2**40])),
        "share": ("FP32", np.array([1], np.float32)),
        "ids": ("INT64", np.array([[3, 4]])),
        "vector": ("FP32", vector[None]),
        "image": ("UINT8", image[None]),
    }
    assert found.inputs.keys() == expected.keys()
    for name, (datatype, data) in expected.items():
        assert (found.inputs[name].name, found.inputs[name].datatype) == (name, datatype)
        assert found.inputs[name].data.dtype == data.dtype
        assert np.array_equal(found.inputs[name].data, data)


def test_a_whole_request_and_tensors_stay_as_they_are() -> None:
    two = TensorValue("number", "INT64", np.array([1, 2]))
    request = PipelineRequest("all", {"number": two})
    assert request_of(request, signature) is request
    assert request_of({"pipeline": "all", "inputs": {"number": two}}, signature).inputs["number"] is two


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"pipeline": "all", "input": {}}, r"input: unknown field \(fields: pipeline, inputs, "),
        ({"inputs": {}}, "pipeline: Field required"),
        ("all", "PipelineItem: "),
        ({"pipeline": "all", "inputs": dict.fromkeys(map(str, range(65)))}, "inputs: .* at most 64"),
        ({"pipeline": "all", "inputs": {"number": "many"}}, "number: not a INT64: "),
        ({"pipeline": "all", "inputs": {"number": 1.5}}, "number: not a INT64: it has a fraction"),
        ({"pipeline": "all", "inputs": {"number": float("nan")}}, "number: not a INT64: "),
        ({"pipeline": "all", "inputs": {"number": 2**63}}, "number: not a INT64: "),
        ({"pipeline": "all", "inputs": {"image": np.full((2, 2, 3), 0.5)}}, "image: not a UINT8: it has a fraction"),
        ({"pipeline": "all", "inputs": {"image": [[[256]]]}}, "image: not a UINT8: "),
        ({"pipeline": "all", "inputs": {"vector": [[1], [2, 3]]}}, "vector: not a FP32: "),
    ],
)
def test_what_is_no_item_is_refused(request_: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        request_of(request_, signature)


def test_an_unknown_pipeline_is_named() -> None:
    with pytest.raises(UnknownModel, match="no pipeline 'other'"):
        request_of({"pipeline": "other"}, signature)
