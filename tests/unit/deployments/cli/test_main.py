"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).parents[4]
MODELS = {
    "data": [
        {
            "id": "m",
            "kind": "llm",
            "state": "ready",
            "bytes": 2048,
            "base": [],
            "description": "[/b] adds",
            "error": "",
        },
        {
            "id": "l",
            "kind": None,
            "state": "unavailable",
            "bytes": 0,
            "base": ["m"],
            "description": "",
            "error": "torn",
        },
    ]
}
IMAGES = {
    "data": [{"b64_json": base64.b64encode(b"PNG").decode()}],
    "seed": 7,
    "timings_ms": {"total": 9},
    "warnings": [],
}
EVENT = 'data: {{"choices": [{{"delta": {{"content": "{}"}}}}]}}\n\n'
EVENTS = EVENT.format(1) + EVENT.format(9) + "data: [DONE]\n\n"
Run = Callable[..., tuple[int, str, str]]


class Cluster(BaseHTTPRequestHandler):
    """A handler that answers as a cluster does. Bodies that arrived are in `server.bodies`."""

    answers: ClassVar[dict[str, tuple[int, Any]]] = {
        "/v1/models": (200, MODELS),
        "/v1/images/generations": (200, IMAGES),
        "/v1/chat/completions": (200, EVENTS),
        "/html/v1/models": (200, "<html>"),
        "/list/v1/models": (200, [1]),
        "/other/v1/models": (200, {}),
        "/broken/v1/models": (500, {"error": {"message": "it [/red] broke"}}),
        "/teapot/v1/models": (418, "short and stout"),
    }

    def do_GET(self) -> None:
        status, answer = self.answers.get(self.path, (404, {}))
        self.send_response(status)
        self.end_headers()
        self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(json.loads(body))  # type: ignore[attr-defined]
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Cluster) as server:
        server.bodies = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def nowhere() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def bad_config(tmp_path: Path) -> Path:
    file = tmp_path / "bad.yaml"
    file.write_text("models:\n  - id: m\n    path: m\nwroker: {}\nhttp: {port: '[/red]'}\n")
    return file


@pytest.mark.parametrize(
    "command", [["up"], ["up", "--detach"], ["render"], ["generate", "x", "--local", "--config"]], ids=" ".join
)
def test_each_mistake_of_a_config_is_one_line(run: Run, bad_config: Path, command: list[str]) -> None:
    code, out, err = run(*command, str(bad_config))
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert f"{bad_config}:5: http.port:" in first + second
    assert "got '[/red]'" in first + second
    assert f"{bad_config}:4: wroker: unknown key; did you mean 'worker'?" in first + second


def test_the_installed_command_says_the_same(bad_config: Path) -> None:
    command = [sys.executable, "-m", "deployments.cli.main", "render", str(bad_config)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 2)


def test_a_config_that_is_not_there(run: Run, tmp_path: Path) -> None:
    code, _, err = run("render", str(tmp_path / "[gone].yaml"))
    assert code == 2
    assert "[gone].yaml: no such file" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("port", ["0", "70000", "x"])
def test_a_port_that_is_none(run: Run, port: str) -> None:
    code, out, err = run("up", str(ROOT / "configs/clusters/demo.yaml"), "--port", port)
    assert (code, out) == (2, "")
    assert "--port" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "command", [["models"], ["status"], ["generate", "x"], ["chat", "x"], ["models", "--json"]], ids=" ".join
)
def test_without_a_cluster_there_is_a_hint(run: Run, nowhere: str, command: list[str]) -> None:
    code, out, err = run(*command, "--url", nowhere)
    assert (code, out.strip()) == (1, "")
    assert nowhere in err
    assert "Is the cluster up?" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("given", ["localhost", "http://[1", "ftp://x", "http://", ""])
def test_a_url_that_is_none(run: Run, given: str) -> None:
    code, out, err = run("models", "--url", given)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1


def test_json_is_one_object_and_nothing_else(run: Run, url: str) -> None:
    code, out, err = run("models", "--json", "--url", url + "/")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert json.loads(out) == {"models": MODELS["data"]}


def test_the_table_of_models_shows_what_they_are(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = run("models", "--url", url)
    assert code == 0
    for word in ("m", "2.0 KiB", "[/b] adds", "unavailable", "torn"):
        assert word in out


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/broken", "it [/red] broke"),
        ("/teapot", "answered 418: short and stout"),
        ("/html", "/html"),
        ("/list", "/list"),
        ("/other", "/other"),
        ("/gone", "answered 404"),
    ],
)
def test_an_answer_that_is_none_is_one_line(run: Run, url: str, path: str, words: str) -> None:
    code, out, err = run("models", "--url", url + path)
    assert (code, out) == (1, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_generate_writes_the_file(run: Run, url: str, server: Any, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "a.png"
    code, out, _ = run(
        "generate", "a seven", "-o", str(file), "--lora", "bold:0.5", "--lora", "x", "--json", "--url", url
    )
    assert (code, file.read_bytes()) == (0, b"PNG")
    assert json.loads(out) == {"seed": 7, "timings_ms": {"total": 9}, "warnings": [], "files": [str(file)]}
    (body,) = server.bodies
    assert body["lora"] == [{"name": "bold", "scale": 0.5}, {"name": "x", "scale": 1.0}]
    assert "seed" not in body


@pytest.mark.parametrize("lora", ["bold:", "bold"])
def test_a_lora_without_a_scale_has_full_strength(run: Run, url: str, server: Any, tmp_path: Path, lora: str) -> None:
    run("generate", "x", "-o", str(tmp_path / "a.png"), "--lora", lora, "--url", url)
    assert server.bodies[0]["lora"] == [{"name": "bold", "scale": 1.0}]


@pytest.mark.parametrize("lora", ["bold:strong", "bold:1:2", "bold:nan", "bold:inf", ":1", "", "bold:[/red]"])
def test_a_lora_that_is_none_is_a_mistake_of_the_caller(run: Run, url: str, server: Any, lora: str) -> None:
    code, out, err = run("generate", "x", "--lora", lora, "--url", url)
    assert (code, out, server.bodies) == (2, "", [])
    assert f"--lora {lora!r}: expected NAME or NAME:SCALE" in err


def test_images_are_sent_with_a_request(run: Run, url: str, server: Any, tmp_path: Path) -> None:
    (tmp_path / "in.png").write_bytes(b"in")
    (tmp_path / "a:b").write_bytes(b"colon")
    image, odd = str(tmp_path / "in.png"), str(tmp_path / "a:b")
    options = ["--image", image, "--mask", image, "--strength", "0.5", "--url", url, "-o", str(tmp_path / "out.png")]
    run("generate", "x", "--control", f"strokes:{image}:0.5", "--control", f"edges:{odd}", *options)
    (body,) = server.bodies
    data = base64.b64encode(b"in").decode()
    assert (body["init_image"], body["mask_image"], body["strength"]) == (data, data, 0.5)
    assert body["control"] == [
        {"name": "strokes", "image": data, "scale": 0.5},
        {"name": "edges", "image": base64.b64encode(b"colon").decode(), "scale": 1.0},
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--image", "nothing.png"], "--image nothing.png: No such file"),
        (["--control", "strokes"], "--control 'strokes': expected NAME:FILE"),
        (["--control", "strokes:nothing.png:0.5"], "--control nothing.png: No such file"),
    ],
)
def test_an_image_that_is_none_is_a_mistake_of_the_caller(
    run: Run, url: str, server: Any, options: list[str], text: str
) -> None:
    code, out, err = run("generate", "x", *options, "--url", url)
    assert (code, out, server.bodies) == (2, "", [])
    assert text in err


def test_a_number_that_json_has_not_is_one_line(run: Run, url: str) -> None:
    code, out, err = run("generate", "x", "--guidance", "nan", "--url", url)
    assert (code, out.strip(), len(err.splitlines())) == (1, "", 1)


def test_a_file_that_cannot_be_written_is_named(run: Run, url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = run("generate", "x", "-o", str(tmp_path / "file" / "a.png"), "--url", url)
    assert code == 1
    assert "cannot write" in err


def test_chat_prints_the_answer(run: Run, url: str, server: Any) -> None:
    code, out, _ = run("chat", "What is 12 + 7?", "--url", url)
    assert (code, out) == (0, "19\n")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "What is 12 + 7?"}]


def test_down_without_a_cluster_is_no_error(run: Run) -> None:
    assert run("down") == (0, "no cluster is up\n", "")
    assert run("down", "x")[:2] == (0, "no cluster 'x' is up\n")
