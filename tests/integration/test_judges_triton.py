"""The cluster as NVIDIA's tritonclient sees it. Each test holds one property, of both transports where both have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from integration.harness import Cluster, pixels
from integration.judging import Observed, digit_judge, held_out_texts, judge

TRANSPORTS = ("http", "grpc")


@pytest.fixture(scope="module")
def observed(cluster: Cluster, asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder: Path = tmp_path_factory.mktemp("triton")
    return judge("triton_models", "protocol", cluster.url, cluster.grpc, folder, asked)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def chat_answers(cluster: Cluster, asked: dict[str, Any]) -> list[str]:
    """Return the answers of the OpenAI route to the same questions."""

    def answer(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        return str(cluster.openai.chat.completions.create(model="adder", messages=messages).choices[0].message.content)

    return [answer(prompt) for prompt in asked["sums"]]


@pytest.fixture(scope="module")
def embeddings(cluster: Cluster, asked: dict[str, Any]) -> np.ndarray:
    """(8, D) of the OpenAI route."""
    answer = cluster.openai.embeddings.create(model="minilm", input=asked["texts"], encoding_format="float")
    return np.array([item.embedding for item in answer.data], np.float32)


def test_server_is_live_and_ready(observed: Observed, transport: str) -> None:
    assert observed[f"{transport}.live"] is True
    assert observed[f"{transport}.ready"] is True


def test_models_and_pipelines_are_ready(observed: Observed, transport: str) -> None:
    assert all(observed[f"{transport}.models_ready"].values())
    assert observed[f"{transport}.version_ready"] is True


def test_an_unknown_model_is_not_ready(observed: Observed) -> None:
    assert observed["http.unknown_ready"] is False  # tritonclient tells a 404 as not ready
    assert "NOT_FOUND" in observed["grpc.unknown_ready"]
    assert "'nobody' (known: " in observed["grpc.unknown_ready"]


def test_transports_tell_the_same_of_the_server(observed: Observed) -> None:
    http, grpc = (observed[f"{transport}.server_metadata"] for transport in TRANSPORTS)
    assert http == grpc
    assert http["name"] == "atelier"
    assert {"binary_tensor_data", "classification", "model_repository", "statistics"} <= set(http["extensions"])


def test_metadata_names_inputs_and_outputs(observed: Observed, transport: str) -> None:
    def tensors(model: str, side: str) -> dict[str, tuple[str, list[int]]]:
        found = observed[f"{transport}.metadata"][model][side]
        return {spec["name"]: (spec["datatype"], [int(size) for size in spec["shape"]]) for spec in found}

    assert tensors("adder", "inputs")["text_input"] == ("BYTES", [-1])
    assert tensors("adder", "outputs")["text_output"] == ("BYTES", [-1])
    assert tensors("minilm", "inputs")["input_ids"] == ("INT64", [-1, -1])
    assert tensors("digits-flux", "outputs")["images"] == ("UINT8", [-1, -1, -1, 3])
    assert tensors("sum-to-digit", "inputs") == {"prompt": ("BYTES", [-1]), "seed": ("INT64", [-1])}
    assert tensors("text-classifier", "outputs") == {"label": ("BYTES", [-1]), "scores": ("FP32", [-1, -1])}


def test_config_is_tritons(observed: Observed) -> None:
    for model, http in observed["http.config"].items():
        grpc = observed["grpc.config"][model]["config"]
        assert http["name"] == grpc["name"] == model
        assert http["max_batch_size"] == grpc["max_batch_size"] > 0
        assert [spec["name"] for spec in http["input"]] == [spec["name"] for spec in grpc["input"]]
        assert all(spec["data_type"].startswith("TYPE_") for spec in http["input"] + http["output"])


def test_index_has_every_model_and_its_state(observed: Observed, transport: str) -> None:
    index = observed[f"{transport}.index"]
    assert {"adder", "minilm", "digits-flux", "sum-to-digit", "text-classifier"} <= set(index)
    assert index["adder"]["state"] == "READY"
    assert index["truncated"]["state"] == "UNAVAILABLE"
    assert "model.safetensors" in index["truncated"]["reason"]
    assert "bold" not in index  # an adapter comes with requests


def test_adder_adds(observed: Observed, transport: str) -> None:
    assert observed[f"{transport}.chat"] == ["19."]
    assert observed[f"{transport}.chat_by_parameter"] == ["19."]
    assert observed[f"{transport}.chat_counts"] == [4]


def test_chats_in_one_request_equal_the_openai_route(
    observed: Observed, transport: str, chat_answers: list[str]
) -> None:
    assert observed[f"{transport}.chats"] == chat_answers


def test_chats_at_once_equal_the_openai_route(observed: Observed, transport: str, chat_answers: list[str]) -> None:
    assert observed[f"{transport}.many_at_once"] == chat_answers


def test_stream_gives_the_same_texts_in_pieces(observed: Observed, chat_answers: list[str]) -> None:
    assert observed["grpc.stream"]["texts"] == chat_answers[:2]
    assert observed["grpc.stream"]["num_pieces"] > 1


def test_stream_takes_every_kind_of_model(observed: Observed) -> None:
    assert observed["grpc.stream_of_all_kinds"] == ["minilm", "text-classifier"]


def test_stream_goes_on_after_an_error(observed: Observed) -> None:
    first, error, last = observed["grpc.stream_with_an_error"]
    assert (first, last) == ("0", "2")
    assert "empty text" in error


def test_a_language_models_embeddings_equal_the_openai_route(
    observed: Observed, transport: str, cluster: Cluster, asked: dict[str, Any]
) -> None:
    ours = observed.array(f"{transport}.llm_embeddings", f"{transport}_llm")
    answer = cluster.openai.embeddings.create(model="adder", input=asked["sums"], encoding_format="float")
    np.testing.assert_allclose(ours, np.array([one.embedding for one in answer.data]), atol=1e-5)


def test_embeddings_equal_the_openai_route(observed: Observed, transport: str, embeddings: np.ndarray) -> None:
    ours = observed.array(f"{transport}.embeddings", f"{transport}_batch")
    np.testing.assert_allclose(ours, embeddings, atol=1e-5)


def test_a_batch_equals_its_texts_one_by_one(observed: Observed, transport: str) -> None:
    batch = observed.array(f"{transport}.embeddings", f"{transport}_batch")
    singly = observed.array(f"{transport}.embeddings_singly", f"{transport}_singly")
    np.testing.assert_allclose(batch, singly, atol=1e-5)


def test_json_and_binary_outputs_are_the_same_numbers(observed: Observed) -> None:
    binary, json = (observed.array("http.embeddings", name) for name in ("http_batch", "http_json"))
    np.testing.assert_array_equal(binary, json)
    assert observed["http.json_embeddings"] == list(json.shape)


def test_compressed_bodies_say_the_same(observed: Observed, transport: str) -> None:
    plain = observed.array(f"{transport}.embeddings", f"{transport}_batch")
    for coding in ("gzip", "deflate"):
        compressed = observed.array(f"{transport}.compressed_{coding}", f"{transport}_{coding}")
        np.testing.assert_array_equal(compressed, plain)


def test_an_image_equals_that_of_the_openai_route(
    observed: Observed, transport: str, cluster: Cluster, asked: dict[str, Any]
) -> None:
    body = {"model": "digits-flux", **asked["image"]}
    theirs = pixels(httpx.post(f"{cluster.url}/v1/images/generations", json=body, timeout=60))
    ours = observed.array(f"{transport}.image", f"{transport}_image")
    assert ours.dtype == np.uint8
    np.testing.assert_array_equal(ours[0], theirs)


def test_an_image_as_json_is_the_same(observed: Observed) -> None:
    binary, json = (observed.array("http.image", name) for name in ("http_image", "http_json_image"))
    np.testing.assert_array_equal(binary, json)


def test_sum_to_digit_draws_the_sum_the_same_over_both_transports(observed: Observed, asked: dict[str, Any]) -> None:
    answers, some = (observed[f"{transport}.pipeline_images"]["answers"] for transport in TRANSPORTS)
    assert answers == [f"{digit}." for digit in asked["digits"]]
    images, same = (observed.array(f"{transport}.pipeline_images", f"{transport}_digits") for transport in TRANSPORTS)
    read = digit_judge().read(list(images))
    assert (read == np.array(asked["digits"])).mean() >= 0.95, read
    assert (len(some), some) == (10, answers[:10])
    np.testing.assert_array_equal(same, images[:10])


def test_text_classifier_tells_the_kinds_of_texts(observed: Observed, transport: str) -> None:
    labels = observed[f"{transport}.labels"]["labels"]
    right = [label == kind for label, kind in zip(labels, held_out_texts(15)[1], strict=True)]
    assert sum(right) / len(right) >= 0.85
    np.testing.assert_allclose(np.sum(observed[f"{transport}.labels"]["scores"], axis=1), 1, atol=1e-5)


def test_a_pipeline_is_the_sum_of_its_parts(observed: Observed, transport: str) -> None:
    logits = np.array(observed[f"{transport}.by_hand"]["scores"])
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    by_hand = exponentials / exponentials.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(observed[f"{transport}.labels"]["scores"][:8], by_hand, atol=1e-5)


def test_transports_label_alike(observed: Observed) -> None:
    http, grpc = (observed[f"{transport}.labels"] for transport in TRANSPORTS)
    assert http["labels"] == grpc["labels"]
    np.testing.assert_allclose(http["scores"], grpc["scores"], atol=1e-5)


def test_classification_gives_the_highest_scores_with_their_places(observed: Observed, transport: str) -> None:
    found = observed[f"{transport}.classification"]
    scores = np.array(found["scores"], np.float32)
    best = np.argsort(-scores, axis=1)[:, :2]
    cells = [cell.split(":") for cell in found["cells"]]
    assert found["shape"] == [3, 2]
    assert [label for _, _, label in cells[::2]] == found["labels"]  # what the pipeline itself calls the best
    assert [int(index) for _, index, _ in cells] == best.reshape(-1).tolist()
    expected = np.take_along_axis(scores, best, axis=1).reshape(-1)
    np.testing.assert_allclose([float(value) for value, _, _ in cells], expected, atol=1e-5)


def test_tensors_go_through_shared_memory(observed: Observed, transport: str) -> None:
    """Over REST the client's connection ends at HAProxy, which tells the replica whose it was."""
    found = observed[f"{transport}.shared_memory"]
    np.testing.assert_array_equal(found["scores"], found["by_wire"])
    assert "both" in found["regions"]
    assert "no region 'both'" in found["after"]


def test_request_id_comes_back(observed: Observed, transport: str) -> None:
    assert observed[f"{transport}.request_id"] == "asked-17"


def test_priority_and_timeout_are_taken(observed: Observed, transport: str) -> None:
    assert observed[f"{transport}.priority"] == ["19."]
    assert observed[f"{transport}.roomy_timeout"] == ["19."]


def test_statistics_move_by_what_was_asked(observed: Observed, transport: str) -> None:
    assert observed[f"{transport}.statistics"] == {
        "success": 2,
        "fail": 1,
        "queue": 2,
        "compute_infer": 2,
        "inference_count": 4,  # texts
        "execution_count": 2,
    }
    assert {"adder", "text-classifier"} <= set(observed[f"{transport}.statistics_of_all"])


def test_an_unloaded_model_is_not_ready(observed: Observed, transport: str) -> None:
    unloaded = observed[f"{transport}.unloading"]["unloaded"]
    assert unloaded["ready"] is False
    assert (unloaded["index"]["state"], unloaded["index"]["reason"]) == ("UNAVAILABLE", "unloaded")


def test_a_request_or_load_brings_it_back(observed: Observed, transport: str) -> None:
    seen = observed[f"{transport}.unloading"]
    assert seen["loaded"] is seen["ready_by_request"] is seen["ready_by_load"] is True
    assert seen["same_answer"]


def test_loading_leaves_models_of_every_kind_ready(observed: Observed, transport: str) -> None:
    """Each service is told to load only what it runs: a text encoder that tried would call an LLM unusable."""
    assert all(observed[f"{transport}.loading"].values())


def test_loading_and_unloading_tell_what_is_wrong(observed: Observed, transport: str) -> None:
    seen = observed[f"{transport}.unloading"]
    assert all("no model 'nobody' (known: " in text for text in seen["unknown"].values())
    assert "has no weights of its own" in seen["pipeline"]


def test_unloading_is_refused_while_requests_run(observed: Observed, transport: str) -> None:
    seen = observed[f"{transport}.unload_in_use"]
    # The second while the request's replica is still loading: its views are leased, and nothing runs on them yet.
    assert "running requests or pins hold" in seen["refusal"] or "its weights are held by" in seen["refusal"]
    assert seen["shape"] == [4, 32, 32, 3]  # the request was answered all the same
