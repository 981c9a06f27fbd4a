"""The commands and snippets of the README and of docs/, run as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from integration.harness import ROOT, Cluster
from kit.waiting import wait_until

TEXT = "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
PROTOCOL_PYTHON = ROOT / ".judges/protocol/bin/python"


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return [block for found, block in fenced if found == language]


def snippet(word: str) -> str:
    """Return the one in Python that has it."""
    (found,) = [block for block in blocks("python") if word in block]
    return found


def run(code: str) -> dict[str, Any]:
    """The names that it leaves."""
    scope: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), scope)
    return scope


def test_the_openai_snippet_runs(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(snippet("import OpenAI").replace("http://127.0.0.1:8000", cluster.url))
    assert (tmp_path / "five.png").read_bytes().startswith(b"\x89PNG")


def test_the_images_snippet_runs(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first = snippet("import OpenAI").replace("http://127.0.0.1:8000", cluster.url)
    edited = run(first + snippet("images.edit"))["edited"]
    assert edited.data[0].b64_json
    events = capsys.readouterr().out.split("\n")[1:]
    assert events == ["image_generation.partial_image"] * 2 + ["image_generation.completed", ""]


def test_the_batch_snippet_runs(cluster: Cluster) -> None:
    found = run(snippet("client.batches").replace("http://127.0.0.1:8000", cluster.url))
    done = wait_until(lambda: _ended(found["client"].batches.retrieve(found["batch"].id)), "the end of a batch", 60)
    assert (done.request_counts.total, done.request_counts.completed) == (1, 1)


def _ended(batch: Any) -> Any:
    return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None


def test_the_ranking_snippet_runs(cluster: Cluster) -> None:
    ranked = run(snippet("import cohere").replace("http://127.0.0.1:8000", cluster.url))["ranked"]
    assert len(ranked.results) == 1


def test_the_handle_snippet_runs(cluster: Cluster) -> None:
    """In a process that Ray has started, and in one that nothing connects but the snippet."""
    code = snippet("get_app_handle").replace('"demo"', repr(cluster.config.name))
    found = run(code)
    assert found["result"].images[0].shape == (32, 32, 3)
    assert found["summed"].outputs["image"].shape == (1, 32, 32, 3)
    code += "\nprint(result.images[0].shape)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[-2] == "(32, 32, 3)", done.stderr


def test_the_triton_snippet_runs(cluster: Cluster) -> None:
    code = snippet("tritonclient").replace("127.0.0.1:8000", cluster.url.removeprefix("http://"))
    code += "\nimage = result.as_numpy('image')\nprint(image.shape, image.dtype)"
    done = subprocess.run([PROTOCOL_PYTHON, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[0] == "(1, 32, 32, 3) uint8", done.stderr


def test_the_weights_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "infra").symlink_to(ROOT / "infra")
    monkeypatch.chdir(tmp_path)
    scope = run(snippet("load_model"))
    assert scope["tensors"]["transformer"]["proj_out.weight"].ndim == 2
    assert scope["extents"].last_report.verified


def test_the_curl_command_runs(cluster: Cluster) -> None:
    (command,) = [block for block in blocks("") if re.match("curl .*/v1/images/generations", block)]
    command = command.replace("http://127.0.0.1:8000", cluster.url)
    result = subprocess.run(["bash", "-c", f"{command.strip()} --silent"], capture_output=True, text=True, timeout=60)
    assert json.loads(result.stdout)["data"][0]["b64_json"]
