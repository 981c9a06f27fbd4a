"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest
import torch
from kit.tiny.pipelines import make
from PIL import Image
from safetensors.numpy import save_file

from cluster.records.errors import SessionError
from cluster.start.session_records import SessionFile, SessionRecord, note_applied, record_folder
from configs.errors import ConfigFileError
from deployments import preflight
from deployments.cli.cluster import _wait_for_record, load_for_start, start_attached
from deployments.cli.generate import _first_local_model
from deployments.console.client import ClientError

ROOT = Path(__file__).parents[4]
HEAD = ROOT / "infra" / "demo" / "models" / "texts-head"
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
        *(
            {"id": id_, "kind": "diffusion", "state": state, "bytes": 0, "base": [], "description": "", "error": ""}
            for id_, state in (("broken-flux", "unavailable"), ("flux", "ready"))
        ),
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
        "/texts/v1/models": (
            200,
            {"data": [{"id": "torn-flux", "kind": "diffusion", "state": "unavailable", "error": "it is torn"}]},
        ),
        "/html/v1/models": (200, "<html>"),
        "/list/v1/models": (200, [1]),
        "/other/v1/models": (200, {}),
        "/broken/v1/models": (500, {"error": {"message": "it [/red] broke"}}),
        "/teapot/v1/models": (418, "short and stout"),
    }

    def do_GET(self) -> None:
        status, answer = self.answers.get(self.path.partition("?")[0], (404, {}))
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
def nowhere() -> Iterator[str]:
    with socket.socket() as probe:  # bound, but nobody listens
        probe.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def bad_config(tmp_path: Path) -> Path:
    file = tmp_path / "bad.yaml"
    file.write_text(f"models:\n  - id: m\n    path: {HEAD}\nwroker: {{}}\nhttp: {{port: '[/red]'}}\n")
    return file


@pytest.mark.parametrize(
    "command",
    [["up"], ["up", "--detach"], ["check"], ["render"], ["generate", "x", "--local", "--config"]],
    ids=" ".join,
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
    assert "`atelier up CONFIG` starts a cluster here" in err
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


@pytest.mark.drawn(2)
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
    options = ["--lora", "bold:0.5", "--lora", "x", "--scheduler", "DDIMScheduler", "--json"]
    code, out, _ = run("generate", "a seven", "-o", str(file), *options, "--url", url)
    assert (code, file.read_bytes()) == (0, b"PNG")
    assert json.loads(out) == {"seed": 7, "timings_ms": {"total": 9}, "warnings": [], "files": [str(file)]}
    (body,) = server.bodies
    assert body["lora"] == [{"name": "bold", "scale": 0.5}, {"name": "x", "scale": 1.0}]
    assert body["scheduler"] == "DDIMScheduler"
    assert body["model"] == "flux"  # the first that makes images and can be asked
    assert "seed" not in body


def test_generate_needs_no_cluster(run: Run, tmp_path: Path) -> None:
    """In this process; that it does so as a command, tests/e2e/test_lifecycle.py says."""
    models = ROOT / "infra/demo/models"
    config = {
        "store": {"path": str(tmp_path / "store")},
        "models": [
            {"id": "adder", "path": str(models / "adder")},
            {"id": "digits", "path": str(models / "digits-flux"), "defaults": {"width": 32, "height": 32}},
        ],
    }
    (tmp_path / "own.yaml").write_text(json.dumps(config))
    options = ["--local", "--config", str(tmp_path / "own.yaml"), "--steps", "2", "--seed", "3", "-n", "2", "--json"]
    code, out, err = run("generate", "a handwritten seven", *options, "-o", str(tmp_path / "seven.png"))
    assert code == 0, err
    told = json.loads(out)
    assert (told["model"], told["seed"], told["num_inference_steps"]) == ("digits", 3, 2)
    assert told["files"] == [str(tmp_path / f"seven-{number}.png") for number in (1, 2)]
    facts = [json.loads(Image.open(file).text["Description"]) for file in told["files"]]
    assert [(one["model"], one["seed"], one["index"]) for one in facts] == [("digits", 3, 0), ("digits", 3, 1)]


@pytest.mark.parametrize("lora", ["bold:", "bold"])
def test_a_lora_without_a_scale_has_full_strength(run: Run, url: str, server: Any, tmp_path: Path, lora: str) -> None:
    run("generate", "x", "-o", str(tmp_path / "a.png"), "--lora", lora, "--url", url)
    assert server.bodies[0]["lora"] == [{"name": "bold", "scale": 1.0}]


@pytest.mark.drawn(2)
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
    run(
        "generate",
        "x",
        "--control",
        f"strokes:{image}:0.5",
        "--control",
        f"edges:{odd}",
        "--control",
        f"all:{image}:0.5:3",
        "--ip-adapter",
        f"look:{image}:0.7",
        *options,
    )
    (body,) = server.bodies
    data = base64.b64encode(b"in").decode()
    assert (body["init_image"], body["mask_image"], body["strength"]) == (data, data, 0.5)
    assert body["control"] == [
        {"name": "strokes", "image": data, "scale": 0.5},
        {"name": "edges", "image": base64.b64encode(b"colon").decode(), "scale": 1.0},
        {"name": "all", "image": data, "scale": 0.5, "mode": 3},
    ]
    assert body["ip_adapter"] == [{"name": "look", "image": data, "scale": 0.7}]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--image", "nothing.png"], "--image nothing.png: No such file"),
        (["--control", "strokes"], "--control 'strokes': expected NAME:FILE"),
        (["--ip-adapter", "look"], "--ip-adapter 'look': expected NAME:FILE"),
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


def test_down_without_a_cluster_is_no_error_unless_one_was_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def no_ray(address: str) -> None:
        asked.append(address)
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    monkeypatch.setattr("cluster.start.session.join_ray", no_ray)
    assert run("down") == (0, "no cluster is up\n", "")
    for words, told in ((["x"], "no cluster 'x' is up"), (["--address", "h:1"], "no cluster of `atelier up` here")):
        code, out, err = run("down", *words)
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {told}: no Ray answers at {words[-1] if len(words) > 1 else 'auto'} (Could not")
    assert asked == ["auto", "auto", "h:1"]


@pytest.mark.parametrize(
    ("words", "ended", "told"),
    [
        (["one"], ["one"], "cluster 'one' is down\n"),
        (["two", "--address", "h:1"], ["two"], "cluster 'two' is down\n"),
        ([], [], "no cluster of `atelier up` here: there are 'one', 'two'; `atelier down NAME` ends one"),
        (["--address", "h:1"], [], "no cluster of `atelier up` here: there are 'one', 'two'; `atelier down NAME`"),
        (["three"], [], "no cluster 'three' is up: there are 'one', 'two'; `atelier down NAME` ends one"),
    ],
)
def test_down_ends_a_deployed_cluster_by_its_name_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str], ended: list[str], told: str
) -> None:
    found: list[str] = []
    monkeypatch.setattr("cluster.start.session.join_ray", lambda address: None)
    monkeypatch.setattr("deployments.console.applications.clusters_here", lambda: ["one", "two"])
    monkeypatch.setattr("deployments.console.applications.end_cluster", found.append)
    code, out, err = run("down", *words)
    assert (code, found) == (0 if ended else 1, ended)
    assert told in (out if ended else err)


def test_down_ends_the_only_cluster_at_an_address(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr("cluster.start.session.join_ray", lambda address: None)
    monkeypatch.setattr("deployments.console.applications.clusters_here", lambda: ["one"])
    monkeypatch.setattr("deployments.console.applications.end_cluster", found.append)
    assert run("down", "--address", "h:1")[:2] == (0, "cluster 'one' is down\n")
    assert run("down")[0] == 1  # somebody else's, perhaps: it has to be named
    assert found == ["one"]


def test_generate_says_that_nothing_makes_images(run: Run, url: str) -> None:
    code, out, err = run("generate", "x", "--url", f"{url}/texts")
    assert (code, out) == (1, "")
    assert "the cluster serves no model that makes images (torn-flux: it is torn)" in err


def test_without_a_cluster_generate_takes_the_first_pipeline_of_the_config(tmp_path: Path) -> None:
    models = [{"id": name, "path": str(ROOT / "infra/demo/models" / name)} for name in ("adder", "digits-sdxl")]
    (tmp_path / "c.yaml").write_text(json.dumps({"models": models}))
    assert _first_local_model(tmp_path / "c.yaml") == "digits-sdxl"
    (tmp_path / "c.yaml").write_text(json.dumps({"models": models[:1]}))
    with pytest.raises(ClientError, match="names no model that makes images"):
        _first_local_model(tmp_path / "c.yaml")


def test_the_version_and_completion_are_there(run: Run) -> None:
    code, out, _ = run("--version")
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (code, out) in ((0, f"atelier {number}\n"), (0, "atelier from a checkout that is not installed\n"))
    assert "--install-completion" in run("--help")[1]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nowhere.gguf", "no such folder or file"),
        (str(HEAD), "a model of kind 'head', expected a language model"),
        (str(HEAD.with_name("digits-flux")), "a model of kind 'diffusion', expected a language model"),
        ("awq", "awq/config.json: quantization_config {'quant_method': 'awq'} is not supported; supported is AWQ"),
    ],
)
def test_a_benchmark_of_no_language_model_is_one_line(run: Run, tmp_path: Path, model: str, words: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "awq").mkdir()
    (tmp_path / "awq" / "config.json").write_text(json.dumps(config))
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "awq" / "model.safetensors")
    code, out, err = run("bench", "llm", "-m", model)
    assert code in (1, 2)
    assert words in err
    assert (out, len(err.splitlines())) == ("", 1)


def test_a_detached_start_tells_its_progress_without_a_terminal(tmp_path: Path, capsys: Any) -> None:
    log, ends = tmp_path / "log", tmp_path / "ends"
    text = "import pathlib, time; print('  0.1 s  ingress: starting', flush=True); print('error: no room', flush=True)"
    wait = f"; p = pathlib.Path({str(ends)!r})\nwhile not p.exists(): time.sleep(0.01)"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", text + wait], stdout=file, stderr=file)
    told: list[str] = []

    def show(news: list[str]) -> None:
        told.extend(news)
        if told == ["  0.1 s  ingress: starting", "no room"]:
            ends.touch()

    with pytest.raises(SessionError, match=r"the cluster did not start:\n.*ingress: starting\nno room$"):
        _wait_for_record("none", process, log, show)
    assert told == ["  0.1 s  ingress: starting", "no room"]  # each line once


def test_what_up_would_refuse_check_finds_with_the_same_options(run: Run, tmp_path: Path) -> None:
    model = {"id": "adder", "path": str(ROOT / "infra/demo/models/adder")}
    config = {"http": {"host": "0.0.0.0"}, "grpc": {"port": 8001}, "store": {"path": "store"}, "models": [model]}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    code, _, err = run("check", "c.yaml")
    assert code == 2
    assert "other machines reach 0.0.0.0, and nobody needs a key" in err
    assert run("check", "c.yaml", "--insecure")[0] == 0
    code, _, err = run("check", "c.yaml", "--insecure", "--port", "8001")
    assert code == 2
    assert "grpc.port: 8001 is http.port already" in err
    assert run("up", "c.yaml", "--insecure", "--port", "8001")[::2] == (code, err)
    (tmp_path / "c.yaml").write_text(json.dumps(config | {"access": {"keys_file": "none"}}))
    code, _, err = run("check", "c.yaml")
    assert code == 2
    assert "`atelier keys add NAME --admin` makes a key" in err


def test_what_check_says_is_one_line_whatever_the_path(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "[b]" / ("x" * 90)
    folder.mkdir(parents=True)
    model = {"id": "adder", "path": str(ROOT / "infra/demo/models/adder")}
    (folder / "c.yaml").write_text(json.dumps({"store": {"path": "store"}, "models": [model]}))
    code, out, _ = run("check", str(folder / "c.yaml"))
    assert code == 0
    assert re.fullmatch(
        re.escape(f"{folder}/c.yaml: 1 models and adapters, 0 pipelines, ") + r"[^\n]*: nothing wrong\n", out
    )


def test_check_counts_the_processes_of_workers_of_several_ranks(run: Run, tmp_path: Path) -> None:
    model = {"id": "adder", "path": str(ROOT / "infra/demo/models/adder")}
    config = {"ray": {"num_cpus": 9}, "store": {"path": "store"}, "models": [model]}
    (tmp_path / "c.yaml").write_text(json.dumps(config | {"worker": {"num_cpus": 1, "ranks": {"tensor": 2}}}))
    code, out, _ = run("check", "c.yaml")
    assert code == 0
    assert "workers: 1, each of 2 ranks (tensor 2): 2 processes with 2 CPUs\n" in out
    assert re.search(r"weights of each rank: adder [\d.]+ .iB of [\d.]+ .iB\n", out)
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    assert "ranks" not in run("check", "c.yaml")[1]


def test_check_names_what_one_rank_computes_alone(run: Run, tmp_path: Path) -> None:
    names = ("digits-sdxl", "digits-flux", "adder")
    models = [{"id": name, "path": str(ROOT / "infra/demo/models" / name)} for name in names]
    for name in ("CogView4Pipeline", "DDPMPipeline"):  # which diffusers runs
        make(name, tmp_path / name)
        models.append({"id": name.lower(), "path": str(tmp_path / name)})
    config = {"ray": {"num_cpus": 9}, "store": {"path": "store"}, "models": models}
    for ranks, expected in (
        (
            {"sequence": 2},
            "digits-sdxl (no plan divides the tokens of a UNet2DConditionModel), "
            "cogview4pipeline (no plan divides the tokens of a CogView4Transformer2DModel), "
            "ddpmpipeline (no plan divides the tokens of a UNet2DModel)",
        ),
        ({"cfg": 2}, "ddpmpipeline (no plan divides the calls of a UNet2DModel)"),
    ):
        (tmp_path / "c.yaml").write_text(json.dumps(config | {"worker": {"num_cpus": 1, "ranks": ranks}}))
        code, out, _ = run("check", "c.yaml")
        assert code == 0
        said = [line.partition("alone: ")[2] for line in out.splitlines() if line.startswith("computed by rank 0")]
        assert said == [expected]


def test_a_detached_start_with_unusable_models_says_so_last_and_in_its_exit_code(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"id": "adder", "path": str(ROOT / "infra/demo/models/adder")}
    (tmp_path / "c.yaml").write_text(json.dumps({"name": "one", "store": {"path": "store"}, "models": [model]}))
    lacking = "0 of 1 models usable; not adder: unavailable: disk full"
    found = SessionRecord("one", 7, 0.0, "http://127.0.0.1:8000", "c.yaml", ready=True, lacking=lacking)
    monkeypatch.setattr("deployments.cli.cluster._wait_for_record", lambda *_: found)
    started: list[dict[str, str]] = []
    monkeypatch.setattr("subprocess.Popen", lambda *_, env, **__: started.append(env))
    code, out, _ = run("up", "c.yaml", "--detach")
    assert (code, out.splitlines()[-1]) == (3, lacking)
    assert started[0]["ATELIER_CHECKED_CONFIG"] == hashlib.sha256((tmp_path / "c.yaml").read_bytes()).hexdigest()
    monkeypatch.setattr("deployments.cli.cluster._wait_for_record", lambda *_: replace(found, lacking=""))
    assert run("up", "c.yaml", "--detach")[0] == 0


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_a_cluster_that_is_up_with_this_config_is_told_and_nothing_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, detach: list[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model = {"id": "adder", "path": str(ROOT / "infra/demo/models/adder")}
    (tmp_path / "c.yaml").write_text(json.dumps({"name": "one", "store": {"path": "store"}, "models": [model]}))
    started: list[Any] = []

    def start(*given: Any, **_: Any) -> NoReturn:
        started.append(given)
        raise SessionError("it would start")

    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.setattr("deployments.console.running.cluster_up", start)
    monkeypatch.setattr("deployments.console.running.stop_on_signals", lambda *_, **__: None)
    card = {"id": "adder", "kind": "llm", "state": "ready", "bytes": 1, "base": [], "description": "", "error": ""}
    monkeypatch.setattr("deployments.cli.cluster.Client.models", lambda _: [card])
    config = load_for_start(tmp_path / "c.yaml", None, insecure=False)
    with SessionFile(config, "http://127.0.0.1:8000", "c.yaml", record_folder()) as session:
        assert run("up", "c.yaml", *detach)[0] == 1, "it is not ready"
        session.mark_ready()
        started.clear()
        code, out, _ = run("up", "c.yaml", *detach)
        assert (code, started) == (0, [])
        first, *rest = out.splitlines()
        assert (
            first
            == f"cluster 'one' is already up at http://127.0.0.1:8000 (process {os.getpid()}); stop: `atelier down`"
        )
        assert any(line.startswith("adder ") for line in rest)
        for change in (["--port", "8009"], ["--insecure"]):
            assert run("up", "c.yaml", *change, *detach)[0] == 1
        assert len(started) == 2, "another config is another start, which says what is in its way"
        applied = config.model_copy(update={"models": ()})
        note_applied(record_folder(), applied, config)
        note_applied(record_folder(), config, applied)
        assert run("up", "c.yaml", *detach)[0] == 1, "it runs with what was applied"
        note_applied(record_folder(), applied, config)
        assert run("up", "c.yaml", *detach)[0] == 0


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_config_is_checked_once_on_its_way_into_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    model = {"id": "adder", "path": str(ROOT / "infra/demo/models/adder")}
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"name": "one", "store": {"path": "store"}, "models": [model]}))
    monkeypatch.setenv("ATELIER_CHECKED_CONFIG", hashlib.sha256(path.read_bytes()).hexdigest())
    if is_changed:
        path.write_text(path.read_text().replace('"one"', '"two"'))
    checked: list[Path] = []
    check = preflight.check_config
    monkeypatch.setattr(preflight, "check_config", lambda path: (checked.append(path), check(path))[1])
    config = load_for_start(path, 8005, insecure=False)
    assert (config.name, config.http.port) == (("two" if is_changed else "one"), 8005)
    assert checked == [path] * is_changed
    assert "ATELIER_CHECKED_CONFIG" not in os.environ, "other processes inherit it not"
    path.write_text(path.read_text().replace('"models"', '"model"'))
    monkeypatch.setenv("ATELIER_CHECKED_CONFIG", hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(ConfigFileError, match="model"):
        load_for_start(path, None, insecure=False)


def test_a_start_whose_check_has_imported_torch_begins_anew_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"store": {"path": "store"}}))

    def load(*given: object) -> object:
        sys.modules["torch"] = torch
        return given

    def begin(program: str, command: list[str], environment: dict[str, str]) -> NoReturn:
        begun.append((program, command, environment["ATELIER_CHECKED_CONFIG"]))
        raise SystemExit(7)

    begun: list[object] = []
    monkeypatch.setattr("deployments.cli.cluster.load_for_start", load)
    monkeypatch.setattr("os.execve", begin)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(SystemExit):
        start_attached(path, 8005, True, 9.0)
    command = [sys.executable, "-m", "deployments.cli.entry", "up", str(path), "--port", "8005", "--insecure"]
    command += ["--timeout", "9.0"]
    assert begun == [(sys.executable, command, hashlib.sha256(path.read_bytes()).hexdigest())]
