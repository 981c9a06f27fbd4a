"""Observations of NVIDIA's client of the cluster's models, over HTTP and over gRPC."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tritonclient.utils.shared_memory as shm
from observing import error_text, place, until_denoising, write
from triton_clients import Grpc, Http, decoded, texts
from tritonclient.utils import InferenceServerException

WHERE = place()
ASKED = WHERE.asked
CHAT = np.array([True])
MODELS = ("adder", "minilm", "digits-flux", "sum-to-digit", "text-classifier")
Client = Http | Grpc
Observation = tuple[str, Callable[[], Any]]


def of_both(client: Client) -> Iterator[Observation]:
    """The same questions for both transports."""
    raw = client.client
    as_json = {"as_json": True} if client.name == "grpc" else {}
    yield "live", raw.is_server_live
    yield "ready", raw.is_server_ready
    yield "models_ready", lambda: {model: raw.is_model_ready(model) for model in MODELS}
    yield "version_ready", lambda: raw.is_model_ready("adder", "1")
    yield "unknown_ready", lambda: _ready_or_refused(raw, "nobody")
    yield "server_metadata", lambda: raw.get_server_metadata(**as_json)
    yield "metadata", lambda: {model: raw.get_model_metadata(model, **as_json) for model in MODELS}
    yield "config", lambda: {model: raw.get_model_config(model, **as_json) for model in MODELS}
    yield "index", lambda: _index(raw, as_json)
    yield "chat", lambda: decoded(_chat(client, [ASKED["sum"]]).as_numpy("text_output"))
    yield "chat_by_parameter", lambda: _chat_by_parameter(client)
    yield "chats", lambda: decoded(_chat(client, ASKED["sums"]).as_numpy("text_output"))
    yield "chat_counts", lambda: _chat(client, [ASKED["sum"]]).as_numpy("num_output_tokens")
    yield "many_at_once", lambda: _many_at_once(client)
    yield "embeddings", lambda: WHERE.keep(f"{client.name}_batch", _embedded(client, ASKED["texts"]))
    yield "llm_embeddings", lambda: WHERE.keep(f"{client.name}_llm", _embedded_by_llm(client))
    yield "embeddings_singly", lambda: WHERE.keep(f"{client.name}_singly", _embedded_singly(client))
    yield "image", lambda: WHERE.keep(f"{client.name}_image", _image(client))
    yield "pipeline_images", lambda: _pipeline_images(client)
    yield "labels", lambda: _labels(client)
    yield "by_hand", lambda: _by_hand(client)
    yield "classification", lambda: _classification(client)
    yield "shared_memory", lambda: _shared_memory(client)
    yield "request_id", lambda: _request_id(client)
    yield "priority", lambda: decoded(_chat(client, [ASKED["sum"]], priority=1).as_numpy("text_output"))
    yield "roomy_timeout", lambda: decoded(_chat(client, [ASKED["sum"]], timeout=60_000_000).as_numpy("text_output"))
    yield "statistics", lambda: _statistics(client, as_json)
    yield "statistics_of_all", lambda: [entry["name"] for entry in _stats_of(raw, "", as_json)]
    yield "unloading", lambda: _unloading(client, as_json)
    yield "loading", lambda: _loading(client)
    yield "unload_in_use", lambda: _unload_in_use(client)


def of_http(client: Http) -> Iterator[Observation]:
    yield "json_embeddings", lambda: WHERE.keep("http_json", _embedded(client, ASKED["texts"], binary=False))
    yield "json_image", lambda: WHERE.keep("http_json_image", _image(client, binary=False))
    for coding in ("gzip", "deflate"):
        options = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
        yield f"compressed_{coding}", lambda coding=coding, options=options: _compressed(client, coding, options)


def of_grpc(client: Grpc) -> Iterator[Observation]:
    for coding in ("gzip", "deflate"):
        options = {"compression_algorithm": coding}
        yield f"compressed_{coding}", lambda coding=coding, options=options: _compressed(client, coding, options)
    yield "stream", lambda: _stream(client)
    yield "stream_of_all_kinds", lambda: _stream_of_all_kinds(client)
    yield "stream_with_an_error", lambda: _stream_with_an_error(client)


def _ready_or_refused(raw: Any, model: str) -> bool | str:
    try:
        return bool(raw.is_model_ready(model))
    except InferenceServerException as error:
        return str(error)


def _index(raw: Any, as_json: dict[str, bool]) -> dict[str, dict[str, str]]:
    found = raw.get_model_repository_index(**as_json)
    entries = found.get("models", []) if isinstance(found, dict) else found
    return {entry["name"]: entry for entry in entries}


def _chat(client: Client, prompts: list[str], **options: Any) -> Any:
    return client.infer("adder", {"text_input": texts(*prompts), "chat": CHAT}, **options)


def _chat_by_parameter(client: Client) -> list[str]:
    answer = client.infer("adder", {"text_input": texts(ASKED["sum"])}, parameters={"chat": True, "max_tokens": 16})
    return decoded(answer.as_numpy("text_output"))


def _many_at_once(client: Client) -> list[str]:
    requests = [{"text_input": texts(prompt), "chat": CHAT} for prompt in ASKED["sums"]]
    return [decoded(answer.as_numpy("text_output"))[0] for answer in client.together("adder", requests)]


def _embedded(client: Client, inputs: list[str], **options: Any) -> np.ndarray:
    return client.infer("minilm", {"text": texts(*inputs)}, ["embedding"], **options).as_numpy("embedding")


def _embedded_by_llm(client: Client) -> np.ndarray:
    inputs = {"text_input": texts(*ASKED["sums"])}
    return client.infer("adder", inputs, ["embedding"]).as_numpy("embedding")


def _embedded_singly(client: Client) -> np.ndarray:
    return np.concatenate([_embedded(client, [text]) for text in ASKED["texts"]])


def _image(client: Client, **options: Any) -> np.ndarray:
    inputs = {
        "prompt": texts(ASKED["image"]["prompt"]),
        "seed": np.array([ASKED["image"]["seed"]], np.int64),
        "num_inference_steps": np.array([ASKED["image"]["num_inference_steps"]], np.int32),
    }
    return client.infer("digits-flux", inputs, ["images"], **options).as_numpy("images")


def _pipeline_images(client: Client) -> dict[str, Any]:
    """Ask for all digits over HTTP, and again for the first ten, as many as a request may have, over gRPC."""
    images, answers = [], []
    for start in range(0, len(ASKED["digit_sums"]) if client.name == "http" else 10, 10):
        sums = ASKED["digit_sums"][start : start + 10]
        seeds = np.array(ASKED["digit_seeds"][start : start + 10], np.int64)
        answer = client.infer("sum-to-digit", {"prompt": texts(*sums), "seed": seeds})
        images.append(answer.as_numpy("image"))
        answers += decoded(answer.as_numpy("answer"))
    return {"shape": WHERE.keep(f"{client.name}_digits", np.concatenate(images)), "answers": answers}


def _labels(client: Client) -> dict[str, Any]:
    answer = client.infer("text-classifier", {"text": texts(*ASKED["kinds"])})
    return {"labels": decoded(answer.as_numpy("label")), "scores": answer.as_numpy("scores")}


def _by_hand(client: Client) -> dict[str, Any]:
    """Ask the two models of the text classifier one after the other."""
    inputs = texts(*ASKED["kinds"][:8])
    embedding = client.infer("texts-bert", {"text": inputs}).as_numpy("embedding")
    scores = client.infer("texts-head", {"features": embedding}, ["scores"]).as_numpy("scores")
    return {"size": embedding.shape[1], "scores": scores}


def _classification(client: Client) -> dict[str, Any]:
    inputs = {"text": texts(*ASKED["kinds"][:3])}
    answer = client.infer("text-classifier", inputs, wishes=[client.wish("scores", classes=2), client.wish("label")])
    scores = client.infer("text-classifier", inputs, ["scores"]).as_numpy("scores")
    found = answer.as_numpy("scores")
    labels = decoded(answer.as_numpy("label"))
    return {"cells": decoded(found), "shape": list(found.shape), "scores": scores, "labels": labels}


def _shared_memory(client: Client) -> dict[str, Any]:
    """Ask a head with features in one region and its scores in another, beside the same by the wire."""
    features = client.infer("texts-bert", {"text": texts(*ASKED["kinds"][:8])}).as_numpy("embedding")
    by_wire = client.infer("texts-head", {"features": features}, ["scores"]).as_numpy("scores")
    raw, key = client.client, f"atelier_{client.name}_{os.getpid()}"
    region = shm.create_shared_memory_region("both", f"/{key}", features.nbytes + by_wire.nbytes)
    try:
        shm.set_shared_memory_region(region, [features])
        raw.register_system_shared_memory("both", f"/{key}", features.nbytes + by_wire.nbytes)
        tensor = client.tensor("features", features)
        tensor.set_shared_memory("both", features.nbytes)
        wish = client.wish("scores")
        wish.set_shared_memory("both", by_wire.nbytes, features.nbytes)
        raw.infer("texts-head", [tensor], outputs=[wish])
        scores = shm.get_contents_as_numpy(region, np.float32, by_wire.shape, features.nbytes)
        found = {"scores": scores.copy(), "by_wire": by_wire, "regions": str(raw.get_system_shared_memory_status())}
        raw.unregister_system_shared_memory("both")
        return found | {"after": error_text(lambda: raw.infer("texts-head", [tensor], outputs=[wish]))}
    finally:
        shm.destroy_shared_memory_region(region)


def _request_id(client: Client) -> str:
    response = client.infer("minilm", {"text": texts("x")}, request_id="asked-17").get_response()
    return str(response["id"] if isinstance(response, dict) else response.id)


def _statistics(client: Client, as_json: dict[str, bool]) -> dict[str, int]:
    """Return how far two requests, of one text and of three, and one that is refused move the model's counters."""
    before = _counters(client.client, as_json)
    _embedded(client, ["one"])
    _embedded(client, ["one", "two", "three"])
    error_text(lambda: _embedded(client, [""]))
    after = _counters(client.client, as_json)
    return {name: after[name] - before[name] for name in before}


def _stats_of(raw: Any, model: str, as_json: dict[str, bool]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = raw.get_inference_statistics(model, **as_json)["model_stats"]
    return found


def _counters(raw: Any, as_json: dict[str, bool]) -> dict[str, int]:
    (entry,) = _stats_of(raw, "minilm", as_json)
    stats = entry.get("inference_stats", {})
    # Protobuf's JSON leaves zeros out, and writes 64-bit numbers as text.
    counts = {name: int(stats.get(name, {}).get("count", 0)) for name in ("success", "fail", "queue", "compute_infer")}
    totals = {name: int(entry.get(name, 0)) for name in ("inference_count", "execution_count")}
    return counts | totals


def _unloading(client: Client, as_json: dict[str, bool]) -> dict[str, Any]:
    """Gone, back by a request; gone, back by load."""
    raw, seen = client.client, {}
    raw.load_model("minilm")
    seen["loaded"] = raw.is_model_ready("minilm")
    before = _embedded(client, ["the same text"])
    raw.unload_model("minilm")
    seen["unloaded"] = {"ready": _ready_or_refused(raw, "minilm"), "index": _index(raw, as_json)["minilm"]}
    seen["same_answer"] = bool(np.array_equal(before, _embedded(client, ["the same text"])))
    seen["ready_by_request"] = raw.is_model_ready("minilm")
    raw.unload_model("minilm")
    raw.load_model("minilm")
    seen["ready_by_load"] = raw.is_model_ready("minilm")
    seen["unknown"] = {
        action.__name__: error_text(lambda action=action: action("nobody"))
        for action in (raw.load_model, raw.unload_model)
    }
    seen["pipeline"] = error_text(lambda: raw.unload_model("sum-to-digit"))
    return seen


def _loading(client: Client) -> dict[str, bool]:
    """Say of one model of each kind whether it can be asked after it was loaded."""
    models = ("adder", "digits-flux", "minilm", "texts-head")
    for model in models:
        client.client.load_model(model)
    return {model: client.client.is_model_ready(model) for model in models}


def _unload_in_use(client: Client) -> dict[str, Any]:
    """While a long request runs, unloading is refused; the request is answered all the same."""
    inputs = {
        "prompt": texts(*[ASKED["image"]["prompt"]] * 4),
        "num_inference_steps": np.array([120], np.int32),
    }
    running = Running(client, "digits-flux-inverted", inputs)
    until_denoising(WHERE, lambda number: number > 0)
    refusal = _refusal(lambda: client.client.unload_model("digits-flux-inverted"))
    return {"refusal": refusal, "shape": list(running.result().as_numpy("images").shape)}


def _refusal(call: Callable[[], Any]) -> str:
    """Empty when there is none."""
    try:
        call()
    except InferenceServerException as error:
        return str(error)
    return ""


class Running:
    """One request that runs meanwhile."""

    def __init__(self, client: Client, model: str, inputs: dict[str, np.ndarray]) -> None:
        other = type(client)(WHERE)  # a connection of its own, in a thread of its own
        self._future = ThreadPoolExecutor(1).submit(other.infer, model, inputs)

    def result(self) -> Any:
        return self._future.result()


def _compressed(client: Client, coding: str, options: dict[str, str]) -> list[int]:
    return WHERE.keep(f"{client.name}_{coding}", _embedded(client, ASKED["texts"], **options))


def _stream(client: Grpc) -> dict[str, Any]:
    """Pieces of two chats at once on one stream, by request."""
    requests = [("adder", {"text_input": texts(prompt), "chat": CHAT}) for prompt in ASKED["sums"][:2]]
    found = client.stream(requests)
    assert all(error is None for _, error in found), found
    pieces: dict[str, list[str]] = {}
    for result, _ in found:
        pieces.setdefault(result.get_response().id, []).append(decoded(result.as_numpy("text_output"))[0])
    return {"texts": ["".join(pieces[str(number)]) for number in range(2)], "num_pieces": len(pieces["0"])}


def _stream_of_all_kinds(client: Grpc) -> list[str]:
    requests = [("minilm", {"text": texts("a")}), ("text-classifier", {"text": texts("b")})]
    return [result.get_response().model_name for result, error in client.stream(requests) if error is None]


def _stream_with_an_error(client: Grpc) -> list[str]:
    """The second of three is refused, and the stream goes on."""
    requests = [("minilm", {"text": texts(text)}) for text in ("a", "", "c")]
    return [str(error) if error else result.get_response().id for result, error in client.stream(requests)]


def main() -> None:
    http, grpc = Http(WHERE), Grpc(WHERE)
    observations: list[Observation] = []
    for client, more in ((http, of_http(http)), (grpc, of_grpc(grpc))):
        observations += [(f"{client.name}.{name}", look) for name, look in (*of_both(client), *more)]
    write(WHERE, observations)


if __name__ == "__main__":
    main()
