"""`atelier run`: from the name of a model to a config that the checks pass, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray  # noqa: F401  # a start loads it, which changes sys.path and logging for good
import yaml
from unit.weights.sources.hub_server import Files, Hub, serving

from configs.cluster import ClusterConfig
from deployments.cli import cluster
from deployments.cli import run as running

MODELS = Path(__file__).parents[4] / "infra" / "demo" / "models"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files: Files = {file.name: file.read_bytes() for file in (MODELS / "adder").iterdir() if file.is_file()}
    with serving(Hub({"some-org/Adder": {"main": files}})) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


def printed(text: str) -> dict[str, Any]:
    found = yaml.safe_load(text)
    ClusterConfig.model_validate(found)
    assert isinstance(found, dict)
    return found


def test_folders_and_a_lora_become_a_config(run: Command) -> None:
    lora = f"digits-flux={MODELS / 'bold'}"
    code, out, _ = run("run", str(MODELS / "adder"), str(MODELS / "digits-flux"), "--lora", lora, "--print-config")
    assert code == 0
    config = printed(out)
    assert config["models"] == [
        {"id": "adder", "path": str(MODELS / "adder")},
        {"id": "digits-flux", "path": str(MODELS / "digits-flux")},
    ]
    assert config["adapters"] == [{"id": "bold", "path": str(MODELS / "bold"), "base": ["digits-flux"]}]


def test_a_model_of_a_hub_is_fetched_once_and_keeps_its_name(run: Command, hub: Hub, home: Path) -> None:
    arguments = ("run", "hf://some-org/Adder", "--store", str(home / "store"), "--print-config")
    code, out, _ = run(*arguments)
    assert (code, printed(out)["models"]) == (0, [{"id": "adder", "path": "hf://some-org/Adder"}])
    assert printed(out)["store"] == {"path": str(home / "store")}
    num_ranges = len(hub.ranges)
    assert num_ranges > 0
    assert run(*arguments)[0] == 0
    assert len(hub.ranges) == num_ranges


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Qwen/Qwen3-0.6B"], "no such folder or file; a model of the hub is hf://Qwen/Qwen3-0.6B"),
        (
            ["https://hf.co/a/b/blob/main/c.gguf"],
            "expected a path, hf:// or s3://; a model of the hub is hf://a/b/c.gguf",
        ),
        (["ftp://a/b"], "expected a path, hf:// or s3://"),
        ([str(MODELS / "adder"), str(MODELS / "texts-bert"), "--lora", "x"], "models: adder, texts-bert"),
        ([str(MODELS / "adder"), "--lora", str(MODELS / "bold")], "a LoRA of diffusion pipelines"),
        ([str(MODELS / "adder"), "--lora", "other=x"], "say for which model, as --lora MODEL=SOURCE (models: adder)"),
        ([str(MODELS)], f"error: {MODELS}: unknown layout"),
        ([str(MODELS / "bold")], f"error: {MODELS / 'bold'}: a LoRA, no model"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(run: Command, arguments: list[str], said: str) -> None:
    code, _, err = run("run", *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


def test_the_cluster_starts_with_the_config_and_its_page_opens(
    run: Command, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(running, "start_attached", lambda *given: started.append(given))
    assert run("run", str(MODELS / "adder"), "--port", "8123")[0] == 0
    ((path, port, insecure, timeout_s, show_page),) = started
    assert (port, insecure, timeout_s, show_page) == (8123, False, None, None)  # no terminal, no display: nothing opens
    assert cluster.load_for_start(path, port, insecure).http.port == 8123
    assert path.parent == home / "state" / "atelier"
