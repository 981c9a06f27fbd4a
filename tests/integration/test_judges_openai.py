"""The cluster as OpenAI's client for JavaScript and litellm see it: images on their way, edits, chats, errors."""

from __future__ import annotations

import base64
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from integration.harness import Cluster
from integration.judging import Observed, demo_module, digit_judge, judge, node_judge
from integration.text_bodies import BODIES, essence
from PIL import Image

pytestmark = [pytest.mark.ray, pytest.mark.long]

EDITED, OUTLINED = 2, 5  # digits that come with requests; another one is asked for


@pytest.fixture(scope="module")
def questions(asked: dict[str, Any]) -> dict[str, Any]:
    """Return those of all judges, and images: a digit that no model has seen, and the outline of another one.

    The seed is fixed, because a classifier reads what it gives.
    """
    demo = demo_module("digits")
    ink = demo.first_of_each(demo.load_split()[1], 1).ink
    digit, outline = demo.to_image(ink[EDITED]), demo.to_image(demo.outline(ink)[OUTLINED])
    image = asked["image"] | {"seed": 11}
    return asked | {"image": image, "digit": file_of(digit), "outline": file_of(outline), "bodies": BODIES}


@pytest.fixture(scope="module")
def node(cluster: Cluster, questions: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder: Path = tmp_path_factory.mktemp("node")
    return node_judge("openai_node", "openai_node", cluster.url, cluster.grpc, folder, questions)


@pytest.fixture(scope="module")
def litellm(cluster: Cluster, questions: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder: Path = tmp_path_factory.mktemp("litellm")
    return judge("litellm_client", "litellm", cluster.url, cluster.grpc, folder, questions)


def file_of(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def image_of(b64_json: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64_json))).convert("RGB")).astype(int)


def generated(cluster: Cluster, body: dict[str, Any]) -> np.ndarray:
    """Return the image that a plain HTTP request gets."""
    answer = httpx.post(f"{cluster.url}/v1/images/generations", json={"model": "digits-flux", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return image_of(answer.json()["data"][0]["b64_json"])


def check_partials(events: list[dict[str, Any]], task: str) -> np.ndarray:
    """Two partial images, the second nearer to the final one, which is returned."""
    assert [event["type"] for event in events] == [f"{task}.partial_image"] * 2 + [f"{task}.completed"]
    assert [event["partial_image_index"] for event in events[:2]] == [0, 1]
    first, second, final = (image_of(event["b64_json"]) for event in events)
    assert 0 < np.abs(second - final).mean() < np.abs(first - final).mean()
    return final


def test_node_sees_partial_images_while_the_image_is_made(node: Observed) -> None:
    events = node["image.stream"]
    final = check_partials(events, "image_generation")
    assert all(event["seen"] >= 1 for event in events[:2])  # what the server said was running
    assert np.array_equal(final, image_of(node["image"]))


def test_node_edits_images(node: Observed, cluster: Cluster, questions: dict[str, Any]) -> None:
    body = questions["image"] | {"init_image": questions["digit"], "strength": 0.8}
    expected = generated(cluster, body)
    assert np.array_equal(image_of(node["image.edit"]), expected)
    assert np.array_equal(check_partials(node["image.edit_stream"], "image_edit"), expected)


def test_node_uses_a_controlnet(node: Observed) -> None:
    assert digit_judge().read([image_of(node["image.control"]).astype(np.uint8)]) == [OUTLINED]


def test_node_chats(node: Observed) -> None:
    whole = node["chat"]
    assert whole["choices"][0]["message"]["content"] == "19."
    chunks = node["chat.stream"]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == "19."
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert [choice["text"][:1] for choice in node["completion"]["choices"]] != ["", ""]


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Return the answers that OpenAI's client for Python gets, whose options `test_openai_options.py` judges."""
    calls = {
        "chats": cluster.openai.chat.completions.create,
        "completions": cluster.openai.completions.create,
        "embeddings": partial(cluster.openai.embeddings.create, encoding_format="float"),
    }
    return {
        kind: {name: essence(calls[kind](**body).to_dict()) for name, body in bodies.items()}  # type: ignore[operator]
        for kind, bodies in BODIES.items()
    }


@pytest.mark.parametrize("kind", BODIES)
def test_node_passes_every_option(node: Observed, expected: dict[str, dict[str, Any]], kind: str) -> None:
    assert {name: essence(answer) for name, answer in node[f"options.{kind}"].items()} == expected[kind]


@pytest.mark.parametrize("kind", BODIES)
def test_litellm_passes_every_option(litellm: Observed, expected: dict[str, dict[str, Any]], kind: str) -> None:
    assert {name: essence(answer) for name, answer in litellm[f"options_{kind}"].items()} == expected[kind]


def test_node_calls_tools(node: Observed) -> None:
    choice = node["chat.tools"]
    assert choice["finish_reason"] == "tool_calls"
    for message in (choice["message"], node["chat.tools_stream"]):
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "add"
        assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}


def test_node_gets_json_of_a_schema(node: Observed) -> None:
    choice = node["chat.schema"]["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert 0 <= json.loads(choice["message"]["content"])["total"] <= 198


def test_node_gets_responses(node: Observed) -> None:
    assert node["response"]["output_text"] == "19."
    events = node["response.stream"]
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "19."
    assert events[-1]["type"] == "response.completed"


def test_the_ai_sdk_means_earlier_answers_by_their_ids(node: Observed) -> None:
    seen = node["ai_sdk.turns"]
    assert seen["referred"] == seen["whole"]
    assert seen["whole"][0] == "19."


def test_node_follows_on_a_response_and_forgets_it(node: Observed) -> None:
    seen = node["response.kept"]
    assert (seen["text"], seen["again"]) == (node["ai_sdk.turns"]["whole"][1], "19.")
    assert (seen["gone"]["type"], seen["gone"]["status"]) == ("NotFoundError", 404)


def test_node_gets_embeddings(node: Observed, cluster: Cluster, asked: dict[str, Any]) -> None:
    answer = cluster.openai.embeddings.create(model="minilm", input=asked["texts"], encoding_format="float")
    ours = np.array([item.embedding for item in answer.data])
    np.testing.assert_allclose([item["embedding"] for item in node["embeddings"]], ours, atol=1e-5)


def test_node_knows_every_model(node: Observed, cluster: Cluster) -> None:
    assert node["models"] == [*cluster.config.entries, *(pipeline.id for pipeline in cluster.config.pipelines)]


@pytest.mark.parametrize(
    ("name", "kind", "status", "text"),
    [
        ("bad_request", "BadRequestError", 400, "temperature"),
        ("not_found", "NotFoundError", 404, "no model 'gpt-9'"),
        ("not_an_image", "BadRequestError", 400, "image"),
        ("busy", "RateLimitError", 429, "try again in"),
    ],
)
def test_node_hears_what_is_wrong(node: Observed, name: str, kind: str, status: int, text: str) -> None:
    found = node[f"error.{name}"]
    assert (found["type"], found["status"]) == (kind, status)
    assert text in found["message"]
    if status == 429:
        assert int(found["retry_after"]) >= 1


def test_node_comes_back_when_it_was_told_to(node: Observed) -> None:
    found = node["error.retried"]
    assert found["statuses"][0] == 429
    assert found["statuses"][-1] == 200
    assert found["content"] == "19."


def test_litellm_chats(litellm: Observed) -> None:
    whole = litellm["chat"]
    assert whole["choices"][0]["message"]["content"] == "19."
    stream = litellm["chat_stream"]
    assert "".join(piece or "" for piece in stream["pieces"]) == "19."
    assert stream["usage"] == whole["usage"]["completion_tokens"]
    assert litellm["response"] == "19."
    assert 0 <= json.loads(litellm["schema"])["total"] <= 198


def test_litellm_calls_tools(litellm: Observed) -> None:
    choice = litellm["tools"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert litellm["tools_stream"] == {"name": "add", "arguments": call["function"]["arguments"]}
    assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}


def test_litellm_gets_embeddings_and_images(litellm: Observed, cluster: Cluster, questions: dict[str, Any]) -> None:
    answer = cluster.openai.embeddings.create(model="minilm", input=questions["texts"], encoding_format="float")
    ours = np.array([item.embedding for item in answer.data], np.float32)
    np.testing.assert_allclose(litellm.array("embeddings", "litellm"), ours, atol=1e-5)
    assert np.array_equal(image_of(litellm["image"]), generated(cluster, questions["image"]))


def test_litellm_hears_what_is_wrong(litellm: Observed) -> None:
    bad, unknown = litellm["bad_request"], litellm["not_found"]
    assert (bad["type"], bad["status"]) == ("BadRequestError", 400)
    assert "temperature" in bad["message"]
    assert (unknown["type"], unknown["status"]) == ("NotFoundError", 404)
    assert "no model 'gpt-9'" in unknown["message"]
