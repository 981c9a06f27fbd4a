"""`atelier trace` against a server that answers as a cluster does."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from kit.command_line import run_atelier

from infra.simulator.scenario import read_trace

ENDED = {
    "pool": "worker", "model": "m", "tenant": "default", "priority": 2, "work": 8.0, "share": 0.5, "replica": "r",
    "switch_s": 0.0, "is_answered": True,
}  # fmt: skip


class Cluster(BaseHTTPRequestHandler):
    """Tells of one request more at every question."""

    num_asked = 0

    def do_GET(self) -> None:
        if self.path.startswith("/admin/requests"):
            number = Cluster.num_asked
            times = {"arrived_s": 50.0 + number, "started_s": 50.5 + number, "ended_s": 51.0 + number}
            requests = [ENDED | times] if "after" in self.path else []
            Cluster.num_asked += len(requests)
            answer = {"requests": requests, "next_number": Cluster.num_asked, "now_s": 50.0}
        else:
            loads = [{"pool": "worker", "model": "m", "service_s": 0.25}]
            answer = {"cluster": "c", "admission": {"models": loads}, "workers": [{"budget_bytes": 9}]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_the_file_has_the_requests_with_models_and_workers(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("infra.simulator.recording.POLL_S", 0.05)
    server = HTTPServer(("127.0.0.1", 0), Cluster)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert run_atelier("trace", str(tmp_path / "t.jsonl"), "--seconds", "0.2", "--url", url) == 0
    finally:
        server.shutdown()
    found, problems = read_trace((tmp_path / "t.jsonl").read_text().splitlines())
    assert problems == []
    assert [request.at_s for request in found.requests] == [float(number) for number in range(Cluster.num_asked)]
    assert Cluster.num_asked >= 1
    assert [model.service_s for model in found.models] == [0.5]  # so long they ran, one at a time
    assert [(worker.budget_bytes, worker.slots) for worker in found.workers] == [(9, 2)]


def test_what_cannot_be_done_is_one_line(tmp_path: Path, capsys) -> None:
    assert run_atelier("trace", str(tmp_path / "no/t.jsonl"), "--url", "http://127.0.0.1:9") == 2
    assert run_atelier("trace", str(tmp_path / "t.jsonl"), "--url", "http://127.0.0.1:9") == 1
    err = capsys.readouterr().err
    assert "no/t.jsonl" in err
    assert "no answer from" in err
    assert "Traceback" not in err
