"""`atelier inspect graph`: a forward told without weights, its plan checked, and refusals that say what is known."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from kit.command_line import run_atelier
from kit.hosting import demo_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspected") / "store"
    demo_store(path, "digits-sdxl", "digits-flux", "texts-bert")
    return path


@pytest.fixture
def run(store: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`run("digits-sdxl")` -> what it printed, on either stream; the exit code must be `code`."""

    def call(*words: str | Path, code: int = 0) -> str:
        ended = run_atelier("inspect", "graph", *words, "--store", store)
        captured = capsys.readouterr()
        assert ended == code, captured.err
        return captured.err if code else captured.out

    return call


def test_a_forward_and_its_plan(run: Callable[..., str], tmp_path: Path) -> None:
    plot = tmp_path / "arena.svg"
    record = json.loads(run("digits-sdxl", "--width", "32", "--rows", "2", "--plot", plot, "--json"))
    assert (record["height"], record["width"], record["rows"], record["tokens"]) == (32, 32, 2, 77)
    assert record["num_nodes"] == len(record["nodes"]) > 300
    assert record["live_bytes"] <= record["plan_bytes"] <= 1.01 * record["live_bytes"]
    assert record["plan_bytes"] <= 0.9 * record["eager_bytes"]
    made = [(node["node"], one) for node in record["nodes"] for one in node["makes"]]
    assert len(made) == record["num_buffers"]
    for (at, one), (other_at, other) in itertools.combinations(made, 2):
        if at <= other["until"] and other_at <= one["until"]:  # alive together: apart
            ends = one["offset"] + one["bytes"], other["offset"] + other["bytes"]
            assert ends[0] <= other["offset"] or ends[1] <= one["offset"] or 0 in (one["bytes"], other["bytes"])
    assert any(node["layer"].startswith("unet.mid_block") for node in record["nodes"])
    titles = [one for one in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}rect") if len(one)]
    assert len(titles) == record["num_buffers"]


def test_a_table_of_the_largest(run: Callable[..., str]) -> None:
    text = run("digits-sdxl", "--part", "vae", "--width", "32")
    assert "vae.decoder" in text
    assert "as it runs" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_device_that_lacks_an_operation_gets_splits_and_copies(run: Callable[..., str]) -> None:
    """Each norm of the transformer's blocks goes to the host and back."""
    whole = json.loads(run("digits-flux", "--width", "32", "--json"))
    found = json.loads(run("digits-flux", "--width", "32", "--lacks", "native_layer_norm", "--json"))["splits"]
    norms = [node for node in whole["nodes"] if node["op"].startswith("aten.native_layer_norm.")]
    assert "splits" not in whole
    assert found["num_splits"] >= len(norms) / 2  # those in a row share a split
    assert found["copied_bytes"] >= sum(node["makes"][0]["bytes"] for node in norms)
    text = run("digits-flux", "--width", "32", "--lacks", "native_layer_norm")
    assert f"{found['num_splits']} splits, {found['num_copies']} copies" in " ".join(text.split())


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["nope"], 1, "no model 'nope'"),
        (["texts-bert"], 2, "unknown pipeline class 'BertModel'"),
        (["digits-sdxl", "--width", "33"], 2, "expected a multiple of 8"),
        (["digits-sdxl", "--plot", "a.png"], 2, "ends in .svg"),
        (["digits-flux", "--width", "32", "--lacks", "nope"], 2, "the forward has no such operation; it has"),
    ],
)
def test_refusals(run: Callable[..., str], words: list[str], code: int, reason: str) -> None:
    assert reason in " ".join(run(*words, code=code).split())
