"""Requests that must be refused, and requests whose client goes away, over HTTP and over gRPC."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tritonclient.grpc.service_pb2 as messages
from observing import SLOW_S, error_text, place, until_denoising, write
from triton_clients import Grpc, Http, decoded, texts

WHERE = place()
TEXT = texts("a text")
NUM_STEPS = 120  # of images that take seconds
Client = Http | Grpc
Observation = tuple[str, Callable[[], Any]]


def refused_by_both(client: Client) -> Iterator[Observation]:
    """Wrong in a way that both transports can say."""

    def infer(model: str, **inputs: np.ndarray) -> Callable[[], Any]:
        return lambda: client.infer(model, inputs)

    def embed(**options: Any) -> Callable[[], Any]:
        return lambda: client.infer("minilm", {"text": TEXT}, **options)

    wrong: dict[str, Callable[[], Any]] = {
        "unknown_model": infer("nobody", text=TEXT),
        "unknown_version": embed(model_version="7"),
        "wrong_rank": infer("minilm", text=TEXT.reshape(1, 1)),
        "wrong_size": infer("echo-image", value=np.zeros((1, 2, 2, 4), np.uint8)),
        "wrong_datatype": infer("minilm", text=np.zeros(3, np.float32)),
        "missing_input": infer("adder", max_tokens=np.array([3], np.int32)),
        "no_input": infer("minilm"),
        "unknown_input": infer("adder", text_input=TEXT, colour=TEXT),
        "input_twice": lambda: client.client.infer("minilm", [client.tensor("text", TEXT)] * 2),
        "unknown_output": embed(outputs=["colour"]),
        "no_items": infer("minilm", text=texts()),
        "too_many_items": infer("minilm", text=texts(*["a"] * 2049)),
        "too_many_images": infer("digits-flux", prompt=texts(*["a"] * 11)),
        "unequal_items": infer("sum-to-digit", prompt=texts("1 + 1", "2 + 2"), seed=np.arange(3)),
        "no_sum": infer("sum-to-digit", prompt=texts("a poem")),
        "empty_text": infer("minilm", text=texts("")),
        "not_utf8": infer("minilm", text=texts(b"\xff\xfe\x00")),
        "not_utf8_prompt": infer("digits-flux", prompt=texts(b"\xc3\x28")),
        "not_utf8_pipeline": infer("echo-text", value=texts(b"\xc3\x28")),
        "too_long_for_the_encoder": infer("minilm", input_ids=np.full((1, 600), 7)),
        "unknown_token": infer("minilm", input_ids=np.full((1, 4), 10**9)),
        "negative_token": infer("minilm", input_ids=np.full((1, 4), -5)),
        "priority_out_of_range": embed(priority=10**6),
        "sequence": embed(sequence_id=5, sequence_start=True),
        "timeout_over": lambda: client.infer(
            "digits-sdxl", {"prompt": TEXT, "num_inference_steps": np.array([NUM_STEPS], np.int32)}, timeout=1000
        ),
        "not_finite": infer("adder", text_input=TEXT, temperature=np.array([np.nan], np.float32)),
        "unavailable_model": infer("truncated", text_input=TEXT),
        "steps_out_of_range": infer("digits-flux", prompt=TEXT, num_inference_steps=np.array([-3], np.int32)),
    }
    for name, call in wrong.items():
        yield name, lambda call=call: error_text(call)


def refused_over_http() -> Iterator[Observation]:
    """Bodies that no client would write."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1]}
    ids = {"name": "input_ids", "datatype": "INT64"}

    def body(**input_: Any) -> bytes:
        return json.dumps({"inputs": [tensor | input_]}).encode()

    def binary(shape: list[int], raw: bytes, size: int | None = None, **form: Any) -> tuple[bytes, dict[str, str]]:
        parameters = {"binary_data_size": len(raw) if size is None else size}
        head = json.dumps({"inputs": [tensor | form | {"shape": shape, "parameters": parameters}]}).encode()
        return head + raw, {"Inference-Header-Content-Length": str(len(head))}

    good = body(data=["a"])
    wrong: dict[str, tuple[bytes, dict[str, str]]] = {
        "negative_dimension": (body(shape=[-1], data=["a"]), {}),
        "huge_dimension": (body(shape=[2**40], data=["a"]), {}),
        "huge_dimensions": binary([2**31, 2**31], b"", **ids),
        "huge_number": (b'{"inputs": [{"name": "text", "shape": [1' + b"0" * 5000 + b"]}]}", {}),
        "zero_beside_huge": (body(shape=[0, 2**62], data=[]), {}),
        "raw_too_short": binary([1, 4], b"\0" * 31, **ids),
        "raw_too_long": binary([1, 4], b"\0" * 33, **ids),
        "raw_text_too_short": binary([1], b"\x10\0\0\0abc"),
        "raw_text_huge_length": binary([1], b"\xff\xff\xff\xffabc"),
        "raw_size_beyond_body": binary([1], b"\x01\0\0\0a", size=10**12),
        "raw_size_negative": binary([1], b"\x01\0\0\0a", size=-1),
        "header_beyond_body": (good, {"Inference-Header-Content-Length": "1000000"}),
        "header_no_number": (good, {"Inference-Header-Content-Length": "ten"}),
        "nan_timeout": (good[:-1] + b', "parameters": {"timeout": NaN}}', {}),
        "negative_timeout": (good[:-1] + b', "parameters": {"timeout": -1}}', {}),
        "text_timeout": (good[:-1] + b', "parameters": {"timeout": "1"}}', {}),
        "priority_no_number": (good[:-1] + b', "parameters": {"priority": 1.5}}', {}),
        "not_json": (b"{inputs", {}),
        "nested_deeply": (b'{"inputs": ' + b"[" * 50_000, {}),
        "empty_body": (b"", {}),
        "wrong_coding": (good, {"Content-Encoding": "br"}),
        "not_gzip": (good, {"Content-Encoding": "gzip"}),
        "shared_memory": (body(parameters={"shared_memory_region": "here"}), {}),
        "fp16_as_json": (body(datatype="FP16", data=[1.0]), {}),
        "unknown_datatype": (body(datatype="FP8", data=[1.0]), {}),
        "count_unlike_shape": (body(shape=[3], data=["a"]), {}),
        "too_large": (b" " * (2**21 + 1), {}),
    }
    for name, (data, headers) in wrong.items():
        yield name, lambda data=data, headers=headers: _posted(data, headers)


def refused_over_grpc(client: Grpc) -> Iterator[Observation]:
    def asked(shape: list[int], raw: list[bytes], **form: Any) -> Callable[[], str]:
        request = messages.ModelInferRequest(model_name="minilm", raw_input_contents=raw)
        request.inputs.add(name="input_ids", datatype="INT64", shape=shape)
        for name, value in form.items():
            setattr(request.parameters[name], f"{'double' if isinstance(value, float) else 'int64'}_param", value)
        return lambda: _called(client, request)

    yield "negative_dimension", asked([-1, 4], [b"\0" * 32])
    yield "huge_dimensions", asked([2**31, 2**31], [b""])
    yield "raw_too_short", asked([1, 4], [b"\0" * 31])
    yield "raw_too_long", asked([1, 4], [b"\0" * 33])
    yield "more_raw_than_inputs", asked([1, 4], [b"\0" * 32] * 2)
    yield "no_data", asked([1, 4], [])
    yield "nan_timeout", asked([1, 1], [b"\x07" + b"\0" * 7], timeout=float("nan"))
    yield "negative_timeout", asked([1, 1], [b"\x07" + b"\0" * 7], timeout=-1)
    yield "too_large", asked([1, 2**19], [b"\0" * 2**22])


def gone_away(http_client: Http, grpc_client: Grpc) -> Iterator[Observation]:
    """Time images that are waited for. Then let clients go: see how long the server still works on theirs, and
    a request that must be answered as ever.
    """
    yield "waited_for", lambda: list(http_client.infer("digits-flux", _long_images()).as_numpy("images").shape)
    yield "http.cancelled", lambda: (_hang_up(), _is_fine(http_client))[1]
    yield "grpc.cancelled", lambda: (_cancel(grpc_client), _is_fine(grpc_client))[1]
    yield "grpc.stream_cancelled", lambda: (_cancel_stream(grpc_client), _is_fine(grpc_client))[1]


def _posted(body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(WHERE.host, timeout=SLOW_S)
    try:
        connection.request("POST", "/v2/models/minilm/infer", body, headers)
        answer = connection.getresponse()
        return {"status": answer.status, "error": json.loads(answer.read())["error"]}
    finally:
        connection.close()


def _called(client: Grpc, request: Any) -> str:
    return error_text(lambda: client.client._client_stub.ModelInfer(request, timeout=SLOW_S))


def _long_images() -> dict[str, np.ndarray]:
    return {"prompt": texts(*["a handwritten two"] * 8), "num_inference_steps": np.array([NUM_STEPS], np.int32)}


def _hang_up() -> None:
    """The connection is closed while the images are being made."""
    inputs = [
        {"name": "prompt", "datatype": "BYTES", "shape": [8], "data": ["a handwritten two"] * 8},
        {"name": "num_inference_steps", "datatype": "INT32", "shape": [1], "data": [NUM_STEPS]},
    ]
    body = json.dumps({"inputs": inputs}).encode()
    head = f"POST /v2/models/digits-flux/infer HTTP/1.1\r\nHost: {WHERE.host}\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = WHERE.host.split(":")
    with socket.create_connection((host, int(port)), timeout=SLOW_S) as connection:
        connection.sendall(head.encode() + body)
        until_denoising(WHERE, lambda number: number > 0)


def _cancel(client: Grpc) -> None:
    tensors = [client.tensor(name, array) for name, array in _long_images().items()]
    call = client.client.async_infer("digits-flux", tensors, lambda result, error: None)
    until_denoising(WHERE, lambda number: number > 0)
    call.cancel()


def _cancel_stream(client: Grpc) -> None:
    client.client.start_stream(lambda result, error: None)
    tensors = [client.tensor(name, array) for name, array in _long_images().items()]
    client.client.async_stream_infer("digits-flux", tensors)
    until_denoising(WHERE, lambda number: number > 0)
    client.client.stop_stream(cancel_requests=True)


def _is_fine(client: Client) -> dict[str, Any]:
    """Abandoned work is not worked on any more, and a small request is answered."""
    ended_s = until_denoising(WHERE, lambda number: number == 0)
    few = {"prompt": texts("a handwritten two"), "num_inference_steps": np.array([2], np.int32)}
    shape = client.infer("digits-flux", few).as_numpy("images").shape
    answer = client.infer("adder", {"text_input": texts("What is 12 + 7?"), "chat": np.array([True])})
    return {"shape": list(shape), "sum": decoded(answer.as_numpy("text_output")), "ended_s": ended_s}


def main() -> None:
    http_client, grpc_client = Http(WHERE), Grpc(WHERE)
    observations: list[Observation] = []
    for client in (http_client, grpc_client):
        observations += [(f"{client.name}.{name}", look) for name, look in refused_by_both(client)]
    observations += [(f"body.{name}", look) for name, look in refused_over_http()]
    observations += [(f"message.{name}", look) for name, look in refused_over_grpc(grpc_client)]
    observations += list(gone_away(http_client, grpc_client))
    write(WHERE, observations)


if __name__ == "__main__":
    main()
