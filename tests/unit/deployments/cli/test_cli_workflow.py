"""`atelier workflow`: a file is checked without a cluster, and run by the routes of ComfyUI."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deployments.console import workflows

PROMPT = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "old.png"}, "_meta": {"title": "photo"}},
    "2": {
        "class_type": "ImageScaleBy",
        "inputs": {"image": ["1", 0], "upscale_method": "area", "scale_by": 2.0},
        "_meta": {"title": "size"},
    },
    "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "x"}},
}
SAVED = {"filename": "x_00001_.png", "subfolder": "", "type": "output"}
SHOWN = {"filename": "y_00001_.png", "subfolder": "", "type": "temp"}
ESCAPING = {"filename": "../../evil.png", "subfolder": "..", "type": "output"}
Run = Callable[..., tuple[int, str, str]]


class Comfy(BaseHTTPRequestHandler):
    """A server that keeps what it was asked, and answers from `server.answers` by path."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        server: Any = self.server
        path = self.path.partition("?")[0]
        server.asked.append((self.command, self.path, body))
        status, answer = server.answers[self.command, path]
        answer = answer() if callable(answer) else answer
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(workflows, "_PAUSE_S", 0.001)
    entry = {"outputs": {"3": {"images": [SAVED]}}, "status": {"status_str": "success"}}
    looks = iter([{}, {}, {"p1": entry}])
    with ThreadingHTTPServer(("127.0.0.1", 0), Comfy) as server:
        server.asked = []  # type: ignore[attr-defined]
        server.answers = {  # type: ignore[attr-defined]
            ("POST", "/prompt"): (200, {"prompt_id": "p1", "number": 1, "node_errors": {}}),
            ("GET", "/history/p1"): (200, lambda: next(looks)),
            ("GET", "/view"): (200, b"the image"),
            ("POST", "/upload/image"): (200, {"name": "new (1).png", "subfolder": "", "type": "input"}),
        }
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "flow.json"
    path.write_text(json.dumps(PROMPT))
    return path


def test_check_tells_faults_without_a_cluster(run: Run, file: Path) -> None:
    assert run("workflow", "check", str(file)) == (0, "3 nodes; outputs that can run: 3\n", "")
    broken = json.loads(json.dumps(PROMPT))
    broken["2"]["inputs"]["scale_by"] = 99
    broken["2"]["class_type"], broken["9"] = "ImageScaleBy", {"class_type": "Evil", "inputs": {}}
    broken["8"] = {"class_type": "PreviewImage", "inputs": {"images": ["9", 0]}}
    file.write_text(json.dumps(broken))
    code, out, _ = run("workflow", "check", str(file))
    assert code == 1
    assert "node 2, size (ImageScaleBy), input 'scale_by': Value 99.0 bigger than max of 8" in out
    assert "node 9, Evil: no node 'Evil' is known here" in out
    code, out, _ = run("workflow", "check", str(file), "--json")
    assert (code, json.loads(out)["outputs"], len(json.loads(out)["errors"])) == (1, [], 2)


@pytest.mark.parametrize("content", ["[1]", "{", '{"nodes": [5]}', '{"1": {"class_type": "Evil"}}'])
def test_what_is_no_workflow_is_one_line(run: Run, file: Path, content: str) -> None:
    file.write_text(content)
    code, out, err = run("workflow", "check", str(file))
    assert code in (1, 2)
    assert "Traceback" not in out + err
    assert out + err


def test_run_sets_uploads_waits_and_fetches(run: Run, file: Path, server: Any, tmp_path: Path) -> None:
    photo, out = tmp_path / "new.png", tmp_path / "made"
    photo.write_bytes(b"a photo")
    url = f"http://127.0.0.1:{server.server_port}"
    options = ("--set", "size.scale_by=3", "--set", "2.upscale_method=bilinear", "--image", f"photo={photo}")
    code, told, err = run("workflow", "run", str(file), "-o", str(out), "--url", url, *options)
    assert (code, err) == (0, "")
    assert told == f"wrote {out}/x_00001_.png\n"
    assert (out / "x_00001_.png").read_bytes() == b"the image"
    upload, prompt, *looks, view = server.asked
    assert b"a photo" in upload[2]
    sent = json.loads(prompt[2])
    assert sent["prompt"]["2"]["inputs"] == {"image": ["1", 0], "upscale_method": "bilinear", "scale_by": 3}
    assert sent["prompt"]["1"]["inputs"]["image"] == "new (1).png"
    assert sent["extra_data"]["extra_pnginfo"]["workflow"] == PROMPT
    assert len(looks) == 3
    assert view[1] == "/view?filename=x_00001_.png&subfolder=&type=output"


@pytest.mark.parametrize("has_saved", [True, False])
def test_what_is_only_shown_is_fetched_if_nothing_is_saved(
    run: Run, file: Path, server: Any, tmp_path: Path, *, has_saved: bool
) -> None:
    outputs = {"4": {"images": [SHOWN]}} | ({"3": {"images": [SAVED]}} if has_saved else {})
    entry = {"outputs": outputs, "status": {"status_str": "success"}}
    server.answers["GET", "/history/p1"] = (200, {"p1": entry})
    url = f"http://127.0.0.1:{server.server_port}"
    name = (SAVED if has_saved else SHOWN)["filename"]
    assert run("workflow", "run", str(file), "-o", str(tmp_path), "--url", url)[1] == f"wrote {tmp_path}/{name}\n"


def test_what_is_interrupted_here_ends_there(
    run: Run, file: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workflows.WorkflowClient, "ended", interrupted)
    server.answers["POST", "/interrupt"] = (200, {})
    assert run("workflow", "run", str(file), "--url", f"http://127.0.0.1:{server.server_port}")[0] == 130
    method, path, body = server.asked[-1]
    assert (method, path, json.loads(body)) == ("POST", "/interrupt", {"prompt_id": "p1"})


def test_names_of_files_are_no_paths(run: Run, file: Path, server: Any, tmp_path: Path) -> None:
    entry = {"outputs": {"3": {"images": [ESCAPING]}}, "status": {"status_str": "success"}}
    server.answers["GET", "/history/p1"] = (200, {"p1": entry})
    out = tmp_path / "a" / "b"
    assert run("workflow", "run", str(file), "-o", str(out), "--url", f"http://127.0.0.1:{server.server_port}")[0] == 0
    assert [path.name for path in tmp_path.rglob("*.png")] == ["evil.png"]
    assert (out / "evil.png").exists()


def test_refusals_and_failures_name_the_node(run: Run, file: Path, server: Any) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    fault = {"type": "value_not_in_list", "message": "Value not in list", "details": "image: 'old.png'"}
    refused = {
        "error": {"message": "Prompt outputs failed validation"},
        "node_errors": {"1": {"errors": [fault], "class_type": "LoadImage", "dependent_outputs": ["3"]}},
    }
    server.answers["POST", "/prompt"] = (400, refused)
    code, _, err = run("workflow", "run", str(file), "--url", url)
    assert code == 1
    assert "node 1, photo (LoadImage): Value not in list: image: 'old.png'" in err
    server.answers["POST", "/prompt"] = (200, {"prompt_id": "p1", "node_errors": {}})
    data = {"node_id": "1", "node_type": "LoadImage", "exception_message": "no such file"}
    failed = {"outputs": {}, "status": {"status_str": "error", "messages": [["execution_error", data]]}}
    server.answers["GET", "/history/p1"] = (200, {"p1": failed})
    code, _, err = run("workflow", "run", str(file), "--url", url)
    assert code == 1
    assert "node 1, LoadImage: no such file" in err
    code, _, err = run("workflow", "run", str(file), "--url", url, "--set", "nobody.x=1")
    assert code == 2
    assert "no nodes have that name; there are 1 (photo), 2 (size), 3 (SaveImage)" in err
