"""Runs that are over, in a real browser: a trace in the page Cluster, and a simulated run as a file of its own."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from kit.browser import OpenPage, axe_violations, needs_axe
from kit.waiting import wait_until

from cluster.placement.state import Components
from deployments.cli.main import main
from deployments.ingress.web_pages import create_web_router
from infra.simulator.scenario import Scenario, SimModel, SimRequest, SimWorker, trace_lines

pytestmark = pytest.mark.long

HOSTILE = "<img src=x onerror=\"document.title='pwned'\"></script><script>document.title='pwned'</script>"
GB = 10**9


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The pages alone: a trace needs no cluster."""
    app = FastAPI()
    app.include_router(create_web_router())
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    wait_until(lambda: server.started, "the server listens")
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two workers with room for one model each: w0 switches from a to the hostile one at 20 s, w1 stays."""
    models = tuple(SimModel(name, Components({f"own-{name[:4]}": 8 * GB})) for name in ("a", HOSTILE))
    workers = tuple(SimWorker(f"w{number}", "n0", 10 * GB) for number in range(2))
    requests = [
        SimRequest(float(at), "a", started_s=at + 0.5, ended_s=at + 3.0, worker="w1") for at in range(0, 100, 5)
    ]
    requests += [SimRequest(float(at), "a", started_s=at + 0.0, ended_s=at + 2.0, worker="w0") for at in (0, 10)]
    requests += [SimRequest(20.0, HOSTILE, started_s=20.0, ended_s=26.0, worker="w0", switch_s=2.0)]
    file = tmp_path / "day.jsonl"
    file.write_text("".join(trace_lines(Scenario(models, workers, tuple(requests)))))
    return file


def open_trace(page: Any, file: Path) -> None:
    page.get_by_label("Open a trace").set_input_files(file)


def at(page: Any, second: float) -> None:
    page.get_by_label("Moment").fill(str(second))


def bar(page: Any, worker: str) -> str:
    return str(
        page.locator(".holder").filter(has_text=f"Worker {worker}").locator("canvas").get_attribute("aria-label")
    )


def test_a_trace_is_scrubbed_by_time_with_hostile_names_as_text(url: str, trace: Path, open_page: OpenPage) -> None:
    page = open_page(f"{url}/cluster")
    open_trace(page, trace)
    page.get_by_role("heading", name="Trace day.jsonl").wait_for()
    at(page, 15)
    assert "(a) 7.5 GiB" in bar(page, "w0")
    at(page, 24)
    wait_until(lambda: HOSTILE in bar(page, "w0"), "the bar of the model that it switched to")
    assert "(a) 7.5 GiB" in bar(page, "w1")
    assert page.locator(".decisions").inner_text().count(HOSTILE) == 1
    tiles = dict(
        zip(page.locator(".tiles dt").all_inner_texts(), page.locator(".tiles dd").all_inner_texts(), strict=True)
    )
    assert (tiles["Running"], tiles["Waiting"]) == ("1", "0")
    assert page.get_by_role("button", name="Prefetch").count() == 0
    page.get_by_label("Moment").press("Home")
    page.get_by_text("No model was switched").wait_for()
    page.get_by_role("button", name="Back to live").click()
    page.get_by_role("button", name="Pause").wait_for()
    assert "pwned" not in page.title()
    assert page.locator("img[src=x]").count() == 0


def test_a_dropped_trace_opens_and_plays_to_its_end(url: str, trace: Path, open_page: OpenPage) -> None:
    page = open_page(f"{url}/cluster")
    page.get_by_label("Open a trace").wait_for()
    drop = """text => { const files = new DataTransfer(); files.items.add(new File([text], "dropped.jsonl"));
        document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: files, bubbles: true, cancelable: true})); }"""
    page.evaluate(drop, trace.read_text())
    page.get_by_role("heading", name="Trace dropped.jsonl").wait_for()
    at(page, 97.5)
    page.get_by_role("button", name="Play").click()
    wait_until(lambda: page.get_by_label("Moment").input_value() == "98", "the end of the run")
    page.get_by_role("button", name="Play").wait_for()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x89PNG\r\n" + b"\xff\x00" * 400, "is no trace"),
        (b"", "is no trace"),
        (b"[" * 100_000, "is no trace"),
        (json.dumps({"kind": "request", "at_s": -1, "model": "a"}).encode(), "is no trace"),
        (b'{"kind": "request", "at_s": 1, "model": "a"}\nnot JSON\n', "Line 2 could not be used"),
        (b'{"kind": "request", "at_s": 1, "model": "a"}\n' * 100_001, "at most 100000 are shown"),
        (b"\n" * (33 << 20), "is too large"),
    ],
    ids=["an image", "nothing", "deep", "no time", "a broken line", "too many", "huge"],
)
def test_a_file_that_is_no_trace_is_told_in_a_sentence(
    url: str, content: bytes, says: str, tmp_path: Path, open_page: OpenPage
) -> None:
    page = open_page(f"{url}/cluster")
    (tmp_path / "some.jsonl").write_bytes(content)
    open_trace(page, tmp_path / "some.jsonl")
    page.get_by_text(says).first.wait_for()


def test_a_trace_without_workers_has_a_lane_for_each_model(url: str, tmp_path: Path, open_page: OpenPage) -> None:
    file = tmp_path / "plain.jsonl"
    file.write_text("".join(json.dumps({"kind": "request", "at_s": n, "model": f"m{n % 3}"}) + "\n" for n in range(9)))
    page = open_page(f"{url}/cluster")
    open_trace(page, file)
    page.get_by_text("The trace names no workers").wait_for()
    assert page.locator(".holder.worker h3").all_inner_texts() == [f"Worker m{n}" for n in range(3)]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, trace: Path, tmp_path: Path) -> Path:
    """The page that `atelier simulate` writes of the trace."""
    file = tmp_path / "run.html"
    monkeypatch.setattr(sys, "argv", ["atelier", "simulate", str(trace), "--html", str(file)])
    with pytest.raises(SystemExit, match="0"):
        main()
    return file


def test_a_simulated_run_is_one_file_beside_the_peer(simulated: Path, open_page: OpenPage) -> None:
    asked: list[str] = []
    page = open_page("about:blank")
    page.on("request", lambda request: asked.append(request.url))
    page.goto(simulated.as_uri())
    page.get_by_role("heading", name="serve.multiplexed").wait_for()
    assert page.locator(".runs h2:text-matches('first|multiplexed')").all_inner_texts() == [
        "latency-first",
        "serve.multiplexed",
    ]
    at(page, 24)
    assert page.locator("canvas.time-line").count() == 2
    wait_until(lambda: HOSTILE in page.locator(".decisions").first.inner_text(), "the switch with its model's name")
    assert [address for address in asked if not address.startswith("data:")] == [simulated.as_uri()]
    assert "pwned" not in page.title()


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_a_run_that_is_over(
    url: str, trace: Path, simulated: Path, scheme: str, open_page: OpenPage
) -> None:
    opened = open_page(f"{url}/cluster", color_scheme=scheme, bypass_csp=True)
    open_trace(opened, trace)
    opened.get_by_role("heading", name="Trace day.jsonl").wait_for()
    file = open_page(simulated.as_uri(), color_scheme=scheme, bypass_csp=True)
    file.get_by_role("heading", name="serve.multiplexed").wait_for()
    for page in (opened, file):
        at(page, 24)
        page.locator(".decisions").first.get_by_text("onerror").wait_for()  # the switch to the hostile one
        assert axe_violations(page) == []
