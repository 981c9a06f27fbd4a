"""Stored programs as NVIDIA's tritonclient sees them, beside transformers on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from integration.harness import DEMO_MODELS, Cluster
from integration.judging import Observed, judge
from kit.programs import MAX_LENGTH, MAX_ROWS, Classifier
from kit.seeding import seeded_rng
from transformers import AutoTokenizer, BertModel

TRANSPORTS = ("http", "grpc")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TEXTS = ["a short one", "a text that is a little longer than the first one", "the third"]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def questions() -> dict[str, Any]:
    """Rows of ids: batches of 1, 4 and 8 for twenty clients, and some of one length."""
    rng = seeded_rng()

    def rows(lengths: Any) -> list[list[int]]:
        return [rng.integers(1, 6000, length).tolist() for length in lengths]

    batches = [rows(rng.integers(8, 12, (1, 4, 8)[number % 3])) for number in range(20)]
    return {"batches": batches, "even": rows([6, 6]), "texts": TEXTS}


def encoder(cluster: Cluster) -> dict[str, Any]:
    """Return the text encoder's description of itself."""
    (found,) = httpx.get(f"{cluster.url}/admin/cluster", timeout=30).json()["text_encoders"]
    return dict(found)


@pytest.fixture(scope="module")
def observed(cluster: Cluster, questions: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder: Path = tmp_path_factory.mktemp("programs")
    return judge("triton_programs", "protocol", cluster.url, cluster.grpc, folder, {"programs": questions})


def pooled(cluster: Cluster, model: str, rows: list[list[int]]) -> np.ndarray:
    """Return the outputs of transformers for each row alone."""
    bert = BertModel.from_pretrained(cluster.broken / model).eval()
    with torch.no_grad():
        return np.concatenate([bert(torch.tensor([row])).pooler_output.numpy() for row in rows])


def test_metadata_and_configuration_tell_names_types_and_ranges(observed: Observed, transport: str) -> None:
    assert observed[f"{transport}.ready"] is True
    metadata = observed[f"{transport}.metadata"]
    shapes = {spec["name"]: [int(size) for size in spec["shape"]] for spec in metadata["inputs"] + metadata["outputs"]}
    assert shapes == {
        "input_ids": [-1, -1],
        "attention_mask": [-1, -1],
        "last_hidden_state": [-1, -1, 16],
        "pooler_output": [-1, 16],
    }
    config = observed[f"{transport}.config"]
    config = config.get("config", config)
    assert config["max_batch_size"] == MAX_ROWS
    assert [spec["data_type"] for spec in config["input"]] == ["TYPE_INT64", "TYPE_INT64"]


@pytest.mark.parametrize(
    ("name", "model"), [("rows", "program-bert"), ("tuned", "program-tuned"), ("onnx", "program-onnx")]
)
def test_rows_are_those_of_transformers(
    observed: Observed, transport: str, cluster: Cluster, questions: dict[str, Any], name: str, model: str
) -> None:
    ours = observed.array(f"{transport}.{name}", f"{transport}_{name}")
    np.testing.assert_allclose(ours, pooled(cluster, model, questions["batches"][0]), **CLOSE)


def test_a_mask_may_be_left_out(
    observed: Observed, transport: str, cluster: Cluster, questions: dict[str, Any]
) -> None:
    ours = observed.array(f"{transport}.without_mask", f"{transport}_plain")
    np.testing.assert_allclose(ours, pooled(cluster, "program-bert", questions["even"]), **CLOSE)


def test_twenty_clients_at_once_get_what_each_would_alone(
    observed: Observed, transport: str, cluster: Cluster, questions: dict[str, Any]
) -> None:
    rows = [row for batch in questions["batches"] for row in batch]
    ours = observed.array(f"{transport}.clients", f"{transport}_clients")
    np.testing.assert_allclose(ours, pooled(cluster, "program-bert", rows), **CLOSE)


def test_their_requests_share_batches(observed: Observed, transport: str, questions: dict[str, Any]) -> None:
    counted = observed[f"{transport}.clients"]
    assert (counted["requests"], counted["items"]) == (20, sum(map(len, questions["batches"])))
    assert counted["batches"] < 20


@pytest.mark.parametrize(
    ("name", "pipeline", "bert"),
    [("pipeline", "program-kinds", "program-bert"), ("onnx_pipeline", "onnx-kinds", "program-onnx")],
)
def test_a_pipeline_of_programs_is_stock(
    observed: Observed, transport: str, cluster: Cluster, name: str, pipeline: str, bert: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODELS / "texts-bert")
    features = pooled(cluster, bert, [tokenizer(text)["input_ids"] for text in TEXTS])
    classifier = Classifier()
    classifier.load_state_dict(torch.load(cluster.broken / "classifier.pt", weights_only=True))
    with torch.no_grad():
        expected = classifier.dense(torch.from_numpy(features)).numpy()
    ours = observed.array(f"{transport}.{name}", f"{transport}_{pipeline}")
    np.testing.assert_allclose(ours, expected, **CLOSE)


def test_fine_tunes_share_one_graph(observed: Observed, cluster: Cluster) -> None:
    assert observed["http.tuned"]
    # BERT's and the classifier's, of three programs; the ONNX model has a session.
    assert encoder(cluster)["programs"]["graphs"] == 2


def test_what_is_beyond_the_range_is_refused_with_it(observed: Observed, transport: str) -> None:
    ranges = f"size 49 in dimension 1, the program takes 1 to {MAX_LENGTH} (input_ids.1)"
    assert ranges in observed[f"{transport}.too_long"]
    assert f"input_ids: 9 items, from 1 to {MAX_ROWS} are allowed" in observed[f"{transport}.too_many"]
    assert "'input_ids' has 6000, the program looks up 0 to 5999" in observed[f"{transport}.beyond_the_table"]
    assert "stage 'bert': item 0: input 'input_ids' has size" in observed[f"{transport}.too_long_in_a_pipeline"]
    status = "400" if transport == "http" else "StatusCode.INVALID_ARGUMENT"
    for name in ("too_long", "too_many", "beyond_the_table", "too_long_in_a_pipeline"):
        assert status in observed[f"{transport}.{name}"]


def test_an_onnx_model_refuses_what_is_beyond_its_range(observed: Observed, transport: str) -> None:
    ranges = f"size 49 in dimension 1, the program takes 1 to {MAX_LENGTH} (input_ids.1)"
    assert ranges in observed[f"{transport}.too_long_for_onnx"]


def test_a_program_cannot_be_registered_by_its_path_alone(cluster: Cluster) -> None:
    body = {"id": "stranger", "path": str(cluster.broken / "program-bert.pt2")}
    answer = httpx.post(f"{cluster.url}/admin/models", json=body, timeout=60)
    assert answer.status_code == 422, answer.text
    assert "only the store's owner brings it in" in answer.text
