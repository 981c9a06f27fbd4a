"""Logs of a cluster: JSON with the ids of requests, and no prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from integration.harness import Cluster
from kit.waiting import wait_until

MARKER = "xylophone quokka"
PARTS = MARKER.split()
TOO_LONG = 5  # of those that are asked


@pytest.fixture
def folder(cluster: Cluster) -> Path:
    """Return where Ray of the connected cluster has its logs."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())


def asked() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield requests with the marker that are answered, refused, and that fail in a replica."""
    chat = {"model": "adder", "messages": [{"role": "user", "content": MARKER}], "max_tokens": 4}
    long = [{"role": "user", "content": f"{MARKER} " * 800}]
    yield "/v1/images/generations", {"model": "digits-flux", "prompt": MARKER, "num_inference_steps": 2}
    yield "/v1/images/generations", {"model": "digits-flux", "prompt": MARKER, "size": MARKER}
    yield "/v1/images/generations", {"model": MARKER, "prompt": MARKER}
    yield "/v1/chat/completions", chat
    yield "/v1/chat/completions", chat | {"stream": True}
    yield "/v1/chat/completions", chat | {"messages": long}  # more tokens than the model takes
    yield "/v1/chat/completions", chat | {"temperature": MARKER}
    yield "/v1/completions", {"model": "adder", "prompt": MARKER, "max_tokens": 2, "stop": [MARKER]}
    yield "/v1/embeddings", {"model": "minilm", "input": MARKER}
    yield "/v1/embeddings", {"model": "minilm", "input": [MARKER], "input_type": MARKER}
    yield "/v1/rerank", {"model": "ranker", "query": MARKER, "documents": [MARKER]}
    yield "/v2/models/minilm/infer", {"inputs": [{"name": MARKER}]}


def test_no_line_has_a_prompt_and_lines_have_the_id_of_their_request(cluster: Cluster, folder: Path) -> None:
    statuses = [ask(cluster, path, body, f"job-{number}") for number, (path, body) in enumerate(asked())]
    assert {status // 100 for status in statuses} == {2, 4}

    def of_the_worker() -> list[dict[str, Any]]:
        """Return the lines of a request that it refused; Serve writes them when there is an error, of the next one."""
        assert ask(cluster, *list(asked())[TOO_LONG], "too-long") == 400
        found = [line for line in lines(folder) if line.get("request_id") == "too-long"]
        return found if "INFO" in {line["levelname"] for line in found} else []

    found = {line["levelname"]: line for line in wait_until(of_the_worker, "the lines of the refused request")}
    assert found["ERROR"]["deployment"] == "integration_worker"
    assert "ContextExceeded: prompt is too long" in found["ERROR"]["exc_text"]
    assert found["INFO"]["message"].startswith("CALL write_text ERROR")
    for file in folder.rglob("*"):
        if file.is_file():
            text = file.read_text(errors="replace")
            assert [part for part in PARTS if part in text] == [], file


def ask(cluster: Cluster, path: str, body: dict[str, Any], id_: str) -> int:
    """Return the status of a request's answer, which has its id."""
    answer = httpx.post(f"{cluster.url}{path}", json=body, headers={"x-request-id": id_}, timeout=120)
    assert answer.headers.get_list("x-request-id") == [id_]
    return answer.status_code


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all replicas; each is JSON."""
    files = (folder / "serve").glob("replica_*.log")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
