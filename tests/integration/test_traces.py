"""One trace for a request, through ingress, queue, text encoder, worker and steps."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.harness import Cluster
from integration.span_files import FOLDER
from kit.waiting import until


def spans_of(trace: str) -> list[dict[str, Any]]:
    lines = [line for file in Path(os.environ[FOLDER]).glob("*.jsonl") for line in file.read_text().splitlines()]
    return [found for found in map(json.loads, lines) if found["context"]["trace_id"] == f"0x{trace}"]


def is_below(span: dict[str, Any], ancestor: str, spans: dict[str, dict[str, Any]]) -> bool:
    while span["parent_id"] is not None:
        if span["parent_id"] == ancestor:
            return True
        span = spans[span["parent_id"]]
    return False


@pytest.mark.parametrize(
    ("path", "body", "kind", "calls"),
    [
        ("/v1/images/generations", {"model": "digits-flux", "n": 1}, "image", ("stream_images", "condition")),
        ("/v1/completions", {"model": "adder", "max_tokens": 16, "ignore_eos": True}, "text", ("write_text",)),
    ],
)
async def test_a_request_is_one_trace_and_batch_mates_are_linked(
    cluster: Cluster, path: str, body: dict[str, Any], kind: str, calls: tuple[str, ...]
) -> None:
    traces, caller = [uuid.uuid4().hex for _ in range(6)], "00f067aa0ba902b7"
    prompt = f"marker-{uuid.uuid4().hex}"
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as http:
        headers = [{"traceparent": f"00-{trace}-{caller}-01"} for trace in traces]
        answers = await asyncio.gather(
            *(http.post(path, json=body | {"prompt": prompt}, headers=one) for one in headers)
        )
    assert {answer.status_code for answer in answers} == {200}

    def steps() -> list[dict[str, Any]]:
        found = [span for trace in traces for span in spans_of(trace) if span["name"] == f"steps {kind}"]
        return found if len(found) == len(traces) else []

    await until(steps, "spans of steps")
    ids = {span["context"]["span_id"] for span in steps()}
    links = [link["context"]["span_id"] for span in steps() for link in span["links"]]
    assert links
    assert set(links) <= ids
    spans = {span["context"]["span_id"]: span for span in spans_of(traces[0])}
    (own,) = [span for span in spans.values() if span["name"] == f"steps {kind}"]
    assert is_below(own, f"0x{caller}", spans | {f"0x{caller}": {"parent_id": None}})
    assert own["attributes"]["atelier.outputs"] > 0
    assert "queue" in {span["name"] for span in spans.values()}
    for call in calls:
        assert any(call in json.dumps([span["name"], span["attributes"]]) for span in spans.values()), call
    assert prompt not in json.dumps(list(spans.values()))


async def test_a_request_that_nobody_traces_is_not_traced(cluster: Cluster) -> None:
    trace = uuid.uuid4().hex
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as http:
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-00"}
        body = {"model": "adder", "prompt": "x", "max_tokens": 1}
        assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert spans_of(trace) == []
