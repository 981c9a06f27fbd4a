"""Observations of NVIDIA's client of stored programs, over HTTP and over gRPC."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from observing import error_text, place, write
from triton_clients import Grpc, Http, texts

WHERE = place()
ASKED = WHERE.asked["programs"]
NAMES = ("input_ids", "attention_mask")
BATCHING = "/admin/text-encoders/batching"
Client = Http | Grpc
Observation = tuple[str, Callable[[], Any]]


def of(client: Client) -> Iterator[Observation]:
    as_json = {"as_json": True} if client.name == "grpc" else {}
    yield "ready", lambda: client.client.is_model_ready("program-bert")
    yield "metadata", lambda: client.client.get_model_metadata("program-bert", **as_json)
    yield "config", lambda: client.client.get_model_config("program-bert", **as_json)
    yield "rows", lambda: _kept(client, "rows", _ran(client, _inputs(ASKED["batches"][0])))
    yield "without_mask", lambda: _kept(client, "plain", _ran(client, {"input_ids": _ids(ASKED["even"])}))
    yield "tuned", lambda: _kept(client, "tuned", _ran(client, _inputs(ASKED["batches"][0]), "program-tuned"))
    yield "onnx", lambda: _kept(client, "onnx", _ran(client, _inputs(ASKED["batches"][0]), "program-onnx"))
    yield "clients", lambda: _clients(client)
    yield "pipeline", lambda: _pipeline(client, "program-kinds")
    yield "onnx_pipeline", lambda: _pipeline(client, "onnx-kinds")
    yield "too_long", lambda: error_text(lambda: _ran(client, {"input_ids": np.ones((1, 49), np.int64)}))
    yield "too_long_for_onnx", lambda: error_text(lambda: _ran(client, _inputs([[1] * 49]), "program-onnx"))
    yield "too_many", lambda: error_text(lambda: _ran(client, {"input_ids": np.ones((9, 3), np.int64)}))
    yield "beyond_the_table", lambda: error_text(lambda: _ran(client, {"input_ids": np.full((1, 3), 6000)}))
    yield "too_long_in_a_pipeline", lambda: error_text(lambda: _labelled(client, ["word " * 60]))


def _ids(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, np.int64)


def _inputs(batch: list[list[int]]) -> dict[str, np.ndarray]:
    """Rows padded by the client itself, and their mask."""
    longest = max(map(len, batch))
    ids = np.array([row + [0] * (longest - len(row)) for row in batch], np.int64)
    mask = np.array([[1] * len(row) + [0] * (longest - len(row)) for row in batch], np.int64)
    return dict(zip(NAMES, (ids, mask), strict=True))


def _ran(client: Client, inputs: dict[str, np.ndarray], model: str = "program-bert") -> np.ndarray:
    return client.infer(model, inputs, ["pooler_output"]).as_numpy("pooler_output")


def _kept(client: Client, name: str, array: np.ndarray) -> list[int]:
    return WHERE.keep(f"{client.name}_{name}", array)


def _clients(client: Client) -> dict[str, Any]:
    """Twenty clients of 1, 4 or 8 rows, all at once; what the text encoder counted meanwhile is of them alone.

    A batch waits for others half a second, so that they meet however slowly this machine lets them begin.
    """
    before, batches = _counts(), ASKED["batches"]
    clients = [type(client)(WHERE) for _ in batches]
    with _patient_batches(), ThreadPoolExecutor(len(batches)) as pool:
        found = list(pool.map(lambda one: _ran(one[0], _inputs(one[1])), zip(clients, batches, strict=True)))
    counted = {name: number - before[name] for name, number in _counts().items()}
    return {"shape": _kept(client, "clients", np.concatenate(found))} | counted


@contextmanager
def _patient_batches() -> Iterator[None]:
    given = _asked(BATCHING)["batching"]
    _asked(BATCHING, {"strategy": "prefer_batch", "max_queue_delay_us": 500_000})
    try:
        yield
    finally:
        _asked(BATCHING, given)


def _asked(path: str, body: Any = None) -> Any:
    """Read an address of the cluster's, or put `body` there."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(WHERE.url + path, data, headers, method="GET" if body is None else "PUT")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _counts() -> dict[str, int]:
    (encoder,) = _asked("/admin/cluster")["text_encoders"]
    return {name: encoder["batching"][name] for name in ("requests", "items", "batches")}


def _labelled(client: Client, given: list[str], pipeline: str = "program-kinds") -> np.ndarray:
    return client.infer(pipeline, {"text": texts(*given)}, ["logits"]).as_numpy("logits")


def _pipeline(client: Client, pipeline: str) -> list[int]:
    return _kept(client, pipeline, _labelled(client, ASKED["texts"], pipeline))


def main() -> None:
    clients = Http(WHERE), Grpc(WHERE)
    write(WHERE, [(f"{client.name}.{name}", look) for client in clients for name, look in of(client)])


if __name__ == "__main__":
    main()
