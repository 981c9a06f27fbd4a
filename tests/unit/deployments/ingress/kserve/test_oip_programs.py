"""Stored programs by the Open Inference Protocol: what is told of them, asked of them, and refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from configs.cluster import LimitsConfig
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.tensors import InferRequest
from deployments.ingress.service.catalog import ModelCard
from deployments.pipelines.records import TensorValue
from deployments.records import ProgramRequest, ProgramResult
from deployments.records.errors import InvalidRequest
from deployments.requests.limits import check_program
from weights.programs.signature import ProgramSignature, ProgramTensor

IDS = ProgramTensor("input_ids", "I64", ("batch", "input_ids.1"), below=50)
MASK = ProgramTensor("attention_mask", "I64", ("batch", "input_ids.1"))
RANGES = {"batch": (1, 5), "input_ids.1": (1, 9)}
ROWS = ProgramSignature((IDS, MASK), (ProgramTensor("sum", "F32", ("batch", 2)),), RANGES)
FIXED = ProgramSignature((ProgramTensor("x", "F16", (2, 3)),), (ProgramTensor("y", "BOOL", (3,)),), {})
LIMITS = LimitsConfig(max_head_rows=4)


@pytest.fixture
def programs(service: Any) -> Any:
    """A service with two programs: sums of rows, and one without rows."""
    service.cards["rows"] = ModelCard("rows", "program", "ready", program=ROWS)
    service.cards["fixed"] = ModelCard("fixed", "program", "ready", program=FIXED)

    async def run_program(request: ProgramRequest) -> ProgramResult:
        signature = service.cards[request.model].program
        check_program(request, signature, LIMITS)
        service.requests.append(request)
        if request.model == "fixed":
            return ProgramResult({"y": request.inputs["x"].any(0)}, {"total": 1.0})
        sums = request.inputs["input_ids"].sum(1, keepdims=True).astype(np.float32)
        return ProgramResult({"sum": np.concatenate([sums, -sums], 1)}, {"total": 1.0})

    service.run_program = run_program
    return service


@pytest.fixture
def asking(programs: Any) -> Inference:
    return Inference(programs, LIMITS)


def request(model: str, arrays: Mapping[str, tuple[str, Any]], **more: Any) -> InferRequest:
    inputs = tuple(TensorValue(name, datatype, array) for name, (datatype, array) in arrays.items())
    return InferRequest(model, inputs, **more)


async def test_metadata_names_tensors_and_ranges(asking: Inference) -> None:
    found = await asking.metadata("rows")
    assert [(one.name, one.datatype, one.shape, one.optional) for one in found.inputs] == [
        ("input_ids", "INT64", (-1, -1), False),
        ("attention_mask", "INT64", (-1, -1), True),
    ]
    assert [(one.name, one.datatype, one.shape) for one in found.outputs] == [("sum", "FP32", (-1, 2))]
    assert found.platform == "atelier_program"
    assert found.parameters["ranges"] == "batch 1 to 5, input_ids.1 1 to 9"


async def test_configuration_is_that_of_a_batched_model_or_of_none(asking: Inference) -> None:
    rows, fixed = await asking.configuration("rows"), await asking.configuration("fixed")
    assert rows["max_batch_size"] == 4  # what one request may have, as of the limits and the range
    assert rows["input"][0]["dims"] == [-1]
    assert rows["dynamic_batching"]["priority_levels"] == 2
    assert (fixed["max_batch_size"], fixed["input"][0]["dims"]) == (0, [2, 3])
    assert "dynamic_batching" not in fixed


async def test_named_tensors_come_and_go(asking: Inference, programs: Any) -> None:
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    answer = await asking.infer(request("rows", {"input_ids": ("INT64", ids)}, parameters={"priority": 2}))
    np.testing.assert_array_equal(answer.outputs[0].data, [[6, -6], [15, -15]])
    assert (answer.outputs[0].name, answer.outputs[0].datatype) == ("sum", "FP32")
    assert programs.requests[-1].priority == 2
    answer = await asking.infer(request("fixed", {"x": ("FP16", np.eye(2, 3, dtype=np.float16))}))
    np.testing.assert_array_equal(answer.outputs[0].data, [True, True, False])


@pytest.mark.parametrize(
    ("model", "arrays", "reason"),
    [
        ("rows", {"input_ids": ("INT64", np.ones((2, 10), np.int64))}, r"'input_ids' has size 10 .* takes 1 to 9"),
        ("rows", {"input_ids": ("INT64", np.ones((6, 2), np.int64))}, "input_ids: 6 items, from 1 to 4 are allowed"),
        ("rows", {"input_ids": ("INT64", np.ones((0, 2), np.int64))}, "input_ids: 0 items, from 1 to 4 are allowed"),
        ("rows", {"input_ids": ("INT32", np.ones((2, 2), np.int32))}, r"is INT32 \[2, 2\], expected INT64 \[-1, -1\]"),
        ("rows", {"attention_mask": ("INT64", np.ones((2, 2), np.int64))}, "missing input 'input_ids'; model 'rows'"),
        ("rows", {"ids": ("INT64", np.ones((2, 2), np.int64))}, "unknown input 'ids'; model 'rows' takes input_ids"),
        ("fixed", {"x": ("FP16", np.ones((3, 3), np.float16))}, r"is FP16 \[3, 3\], expected FP16 \[2, 3\]"),
        ("fixed", {}, "missing input 'x'"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name(
    asking: Inference, programs: Any, model: str, arrays: Mapping[str, tuple[str, Any]], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await asking.infer(request(model, arrays))
    assert programs.requests == []


async def test_a_program_is_ready_as_other_models(asking: Inference) -> None:
    assert await asking.ready("rows")
