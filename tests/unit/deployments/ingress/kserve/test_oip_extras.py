"""Heads and their labels, warnings, and what metadata and configuration tell, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from kit.seeding import seeded_rng
from unit.deployments.ingress.http_fakes import client_over

from configs.batching import BatchingConfig
from configs.cluster import LimitsConfig
from deployments.ingress.error_forms import install_error_handlers
from deployments.ingress.kserve.grpc.protos import open_inference as messages
from deployments.ingress.kserve.grpc.server import start_grpc_server
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository, Statistics
from deployments.ingress.kserve.rest.routes import create_inference_router, create_server_router
from deployments.ingress.kserve.tensors import InferRequest, OutputWish, classify_output
from deployments.ingress.service.catalog import ModelCard
from deployments.pipelines.records import TensorValue, text_tensor
from deployments.records import TextChunk
from deployments.records.errors import InvalidRequest

FEATURES = seeded_rng().normal(size=(3, 2)).astype(np.float32)
SCORES = np.stack([FEATURES[:, 0] + FEATURES[:, 1], FEATURES[:, 0] - FEATURES[:, 1]], axis=1)
EMBED = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}


@pytest.fixture(autouse=True)
def _head(service: Any) -> None:
    service.cards["head"] = ModelCard("head", "head", "ready", labels=("sum", "difference"))


@pytest.fixture
async def client(inference: Inference, limits: LimitsConfig) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(create_server_router(inference))
    app.include_router(create_inference_router(inference, limits))
    async with client_over(app, "http://localhost") as client:
        yield client


def request(features: np.ndarray[Any, Any] = FEATURES, **fields: Any) -> InferRequest:
    return InferRequest("head", (TensorValue("features", "FP32", features),), **fields)


async def test_a_head_scores_features(inference: Inference) -> None:
    (scores,) = (await inference.infer(request())).outputs
    assert (scores.name, scores.datatype) == ("scores", "FP32")
    np.testing.assert_allclose(scores.data, SCORES, rtol=1e-6)


async def test_classes_of_a_head_have_their_labels(inference: Inference) -> None:
    (classes,) = (await inference.infer(request(outputs=(OutputWish("scores", num_classes=2),)))).outputs
    for row, cells in zip(SCORES, classes.data, strict=True):
        order = [0, 1] if row[0] >= row[1] else [1, 0]
        parts = [cell.decode().split(":") for cell in cells]
        assert [(int(index), label) for _, index, label in parts] == [(o, ("sum", "difference")[o]) for o in order]
        np.testing.assert_allclose([float(value) for value, _, _ in parts], row[order], rtol=1e-6)


async def test_classes_of_a_pipeline_have_the_labels_of_its_outputs(inference: Inference) -> None:
    x = np.array([[1, 3, 2]], np.float32)
    wishes = (OutputWish("y", num_classes=2), OutputWish("half", num_classes=1))
    asked = InferRequest("scale", (TensorValue("x", "FP32", x),), outputs=wishes)
    y, half = (await inference.infer(asked)).outputs
    assert y.data.tolist() == [[b"6.0:1:green", b"4.0:2:blue"]]
    assert half.data.tolist() == [[b"6.0:1"]]


def test_labels_that_do_not_fit_are_left_out() -> None:
    value = TensorValue("scores", "FP32", np.array([[1.0, 2.0]], np.float32))
    assert classify_output(value, 1, ("only one",)).data.tolist() == [[b"2.0:1"]]
    assert classify_output(value, 1, ("a", "b")).data.tolist() == [[b"2.0:1:b"]]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (np.zeros((1, 3), np.float32), r"expected floating vectors \(B, 2\)"),
        (np.zeros((0, 2), np.float32), "features: 0 items, from 1 to 7"),
        (np.zeros((8, 2), np.float32), "features: 8 items, from 1 to 7"),
        (np.zeros(2, np.float32), r"FP32 \[2\], expected FP32 \[-1, -1\]"),
    ],
)
async def test_features_that_do_not_fit_are_refused(
    inference: Inference, features: np.ndarray[Any, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await inference.infer(request(features))


async def test_metadata_has_the_fingerprint_where_there_is_one(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v2/models/minilm")).json()["parameters"]["fingerprint"] == "9f"
    assert "fingerprint" not in (await client.get("/v2/models/scale")).json()["parameters"]
    head = (await client.get("/v2/models/head")).json()
    assert (head["platform"], head["outputs"][0]["name"]) == ("atelier_head", "scores")


async def test_the_configuration_says_how_requests_are_batched(client: httpx.AsyncClient, service: Any) -> None:
    async def batching(model: str) -> Any:
        config = (await client.get(f"/v2/models/{model}/config")).json()
        assert config["model_transaction_policy"] == {"decoupled": model == "adder"}
        return config.get("dynamic_batching")

    expected = {"preferred_batch_size": [4], "priority_levels": 2, "default_priority_level": 1}
    assert await batching("minilm") == expected
    service.batching_config = BatchingConfig(max_queue_delay_us=70)
    expected = {"preferred_batch_size": [], "priority_levels": 1, "default_priority_level": 1}
    assert await batching("minilm") == expected | {"max_queue_delay_microseconds": 70}
    assert [await batching(model) for model in ("flux", "adder", "head", "scale")] == [{}, {}, None, None]


async def test_warnings_come_as_a_parameter(client: httpx.AsyncClient, service: Any) -> None:
    assert "parameters" not in (await client.post("/v2/models/minilm/infer", json=EMBED)).json()
    service.warnings = ("input 0 was cut", "and more")
    told = (await client.post("/v2/models/minilm/infer", json=EMBED)).json()["parameters"]
    assert told == {"warnings": "input 0 was cut; and more"}
    prompts = {"inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}]}
    service.warnings = ("cut",)
    told = (await client.post("/v2/models/flux/infer", json=prompts)).json()["parameters"]
    assert told == {"warnings": "item 0: cut; item 1: cut"}


async def test_pieces_carry_their_warnings(inference: Inference, service: Any) -> None:
    async def write_text(_: Any, on_chunk: Callable[[TextChunk], Awaitable[None]]) -> None:
        await on_chunk(TextChunk("a", 1, 1))
        await on_chunk(TextChunk("", 1, 1, "stop", {"total": 1.0}, warnings=("cut",)))

    service.write_text, service.warnings = write_text, ("short",)
    asked = InferRequest("adder", (text_tensor("text_input", ["x"]),))
    pieces = [dict(piece.parameters) async for piece in inference.infer_stream(asked)]
    assert pieces == [{"triton_final_response": False}, {"triton_final_response": True, "warnings": "cut"}]
    asked = InferRequest("minilm", (text_tensor("text", ["x"]),))
    pieces = [dict(piece.parameters) async for piece in inference.infer_stream(asked)]
    assert pieces == [{"triton_final_response": True, "warnings": "short"}]


async def test_warnings_and_configuration_over_grpc(inference: Inference, service: Any) -> None:
    service.warnings, service.operations = ("input 0 was cut",), None
    statistics = Statistics()
    where: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "max_message_bytes": 10_000}
    server = await start_grpc_server(inference, Repository(service), statistics, **where)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:

            async def ask(method: str, message: Any, answer: Any) -> Any:
                path = f"/inference.GRPCInferenceService/{method}"
                return await channel.unary_unary(path, type(message).SerializeToString, answer.FromString)(message)

            text = {"name": "text", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"a"]}}
            asked = messages.ModelInferRequest(model_name="minilm", inputs=[text])
            answer = await ask("ModelInfer", asked, messages.ModelInferResponse)
            assert answer.parameters["warnings"].string_param == "input 0 was cut"
            named = messages.ModelConfigRequest(name="minilm")
            config = (await ask("ModelConfig", named, messages.ModelConfigResponse)).config
            assert list(config.dynamic_batching.preferred_batch_size) == [4]
            assert config.parameters["fingerprint"].string_value == "9f"
    finally:
        await server.stop(0)
