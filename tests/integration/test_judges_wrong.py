"""Refusals that tritonclient hears when it asks for what cannot be: the right code and a helpful sentence, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.harness import Cluster
from integration.judging import Observed, judge

# By observation: HTTP status, gRPC code, and what the sentence names.
REFUSED = {
    "unknown_model": (404, "NOT_FOUND", "no model 'nobody' (known: "),
    "unknown_version": (404, "NOT_FOUND", "no version '7' (known: 1)"),
    "wrong_rank": (400, "INVALID_ARGUMENT", "'text' is BYTES [1, 1], expected BYTES [-1]"),
    "wrong_size": (400, "INVALID_ARGUMENT", "UINT8 [1, 2, 2, 4], expected UINT8 [-1, -1, -1, 3]"),
    "wrong_datatype": (400, "INVALID_ARGUMENT", "'text' is FP32 [3], expected BYTES [-1]"),
    "missing_input": (400, "INVALID_ARGUMENT", "missing input 'text_input'"),
    "no_input": (400, "INVALID_ARGUMENT", "either text or input_ids"),
    "unknown_input": (400, "INVALID_ARGUMENT", "unknown input 'colour'"),
    "input_twice": (400, "INVALID_ARGUMENT", "'text' is given twice"),
    "unknown_output": (400, "INVALID_ARGUMENT", "unknown output 'colour'; model 'minilm' gives embedding"),
    "no_items": (400, "INVALID_ARGUMENT", "0 items"),
    "too_many_items": (400, "INVALID_ARGUMENT", "2049 items"),
    "too_many_images": (400, "INVALID_ARGUMENT", "11 items, from 1 to 10"),
    "unequal_items": (400, "INVALID_ARGUMENT", "prompt 2, seed 3"),
    "no_sum": (400, "INVALID_ARGUMENT", "expected a sum of two whole numbers"),
    "empty_text": (400, "INVALID_ARGUMENT", "empty text"),
    "not_utf8": (400, "INVALID_ARGUMENT", "not UTF-8"),
    "not_utf8_prompt": (400, "INVALID_ARGUMENT", "not UTF-8"),
    "not_utf8_pipeline": (400, "INVALID_ARGUMENT", "not UTF-8"),
    "too_long_for_the_encoder": (400, "INVALID_ARGUMENT", "600 tokens"),
    "unknown_token": (400, "INVALID_ARGUMENT", "1000000000"),
    "negative_token": (400, "INVALID_ARGUMENT", "-5"),
    "priority_out_of_range": (400, "INVALID_ARGUMENT", "priority"),
    "sequence": (400, "INVALID_ARGUMENT", "sequence_id"),
    "timeout_over": (504, "DEADLINE_EXCEEDED", "timeout of 0.001 s"),
    "not_finite": (400, "INVALID_ARGUMENT", "temperature"),
    "unavailable_model": (503, "UNAVAILABLE", "model.safetensors"),
    "steps_out_of_range": (400, "INVALID_ARGUMENT", "num_inference_steps"),
}
# Bodies that no client writes, all for the model minilm: what the sentence names.
BODIES = {
    "negative_dimension": "-1 in the shape",
    "huge_dimension": "more than 2147483647 elements",
    "huge_dimensions": "more than 2147483647 elements",
    "huge_number": "not valid JSON",
    "zero_beside_huge": "more than 2147483647 elements",
    "raw_too_short": "31 bytes, but INT64 of shape [1, 4] has 32",
    "raw_too_long": "33 bytes, but INT64 of shape [1, 4] has 32",
    "raw_text_too_short": "element 0 reaches beyond the 7 bytes",
    "raw_text_huge_length": "element 0 reaches beyond the 7 bytes",
    "raw_size_beyond_body": "binary_data_size is 1000000000000",
    "raw_size_negative": "binary_data_size is -1",
    "header_beyond_body": "Inference-Header-Content-Length",
    "header_no_number": "Inference-Header-Content-Length",
    "nan_timeout": "NaN is not a JSON number",
    "negative_timeout": "timeout: expected a whole number",
    "text_timeout": "timeout: expected a whole number",
    "priority_no_number": "priority: expected a whole number",
    "not_json": "not valid JSON",
    "nested_deeply": "nested deeper than",
    "empty_body": "not valid JSON",
    "wrong_coding": "known: gzip, deflate, identity",
    "not_gzip": "not gzip",
    "shared_memory": "shared_memory_region takes a name",
    "fp16_as_json": "send it as binary data",
    "unknown_datatype": "unknown datatype 'FP8'",
    "count_unlike_shape": "1 elements, but shape [3] has 3",
}
MESSAGES = {
    "negative_dimension": "-1 in the shape",
    "huge_dimensions": "more than 2147483647 elements",
    "raw_too_short": "31 bytes, but INT64 of shape [1, 4] has 32",
    "raw_too_long": "33 bytes, but INT64 of shape [1, 4] has 32",
    "more_raw_than_inputs": "2 raw_input_contents for 1 inputs",
    "no_data": "0 elements, but shape [1, 4] has 4",
    "nan_timeout": "timeout: expected a whole number",
    "negative_timeout": "timeout: expected a whole number",
}
# Where nothing is computed or allocated, an answer takes milliseconds; the rest is for a machine with much to do.
QUICK_S = 5.0


@pytest.fixture(scope="module")
def observed(cluster: Cluster, asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder: Path = tmp_path_factory.mktemp("wrong")
    return judge("triton_wrong", "protocol", cluster.url, cluster.grpc, folder, asked)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_refusals_have_the_right_code_and_say_what_is_wrong(observed: Observed, transport: str, name: str) -> None:
    status, code, text = REFUSED[name]
    told = observed[f"{transport}.{name}"]
    if name == "timeout_over" and "longer than its time" in told:  # refused before it was tried: the queue knew
        status, code, text = 429, "RESOURCE_EXHAUSTED", "try again"
    assert told.startswith(f"[{status}]" if transport == "http" else f"[StatusCode.{code}]")
    assert text in told


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_no_client_writes_are_a_400(observed: Observed, name: str) -> None:
    answer = observed[f"body.{name}"]
    assert answer["status"] == 400
    assert BODIES[name] in answer["error"]


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_that_no_client_writes_are_invalid_arguments(observed: Observed, name: str) -> None:
    told = observed[f"message.{name}"]
    assert "INVALID_ARGUMENT" in told
    assert MESSAGES[name] in told


def test_what_is_too_large_is_refused_by_its_size(observed: Observed) -> None:
    assert observed["body.too_large"]["status"] == 413
    assert "RESOURCE_EXHAUSTED" in observed["message.too_large"]  # gRPC's own answer


def test_every_refusal_comes_quickly(observed: Observed) -> None:
    works = ("cancelled", "waited_for")
    slow = {name: observed.seconds(name) for name in observed.seen if not any(work in name for work in works)}
    assert max(slow.values()) < QUICK_S, sorted(slow.items(), key=lambda item: -item[1])[:3]


@pytest.mark.parametrize("name", ["http.cancelled", "grpc.cancelled", "grpc.stream_cancelled"])
def test_a_client_that_goes_away_leaves_the_server_as_it_was(observed: Observed, name: str) -> None:
    assert observed[name]["shape"] == [1, 32, 32, 3]
    assert observed[name]["sum"] == ["19."]


@pytest.mark.parametrize("name", ["http.cancelled", "grpc.cancelled", "grpc.stream_cancelled"])
def test_a_client_that_goes_away_ends_the_work(observed: Observed, name: str) -> None:
    """The rest of eight images is not made."""
    assert observed["waited_for"] == [8, 32, 32, 3]
    assert observed[name]["ended_s"] < observed.seconds("waited_for") / 3


def test_the_cluster_is_healthy_after_all_of_it(observed: Observed, cluster: Cluster) -> None:
    assert observed.seen
    assert httpx.get(f"{cluster.url}/v2/health/ready", timeout=10).status_code == 200
