"""The external weight store from the command line: what it prints, what it leaves on disk, how it refuses."""

from __future__ import annotations

import hashlib
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.command_line import run_atelier
from safetensors.torch import load_file, save_file

Run = Callable[..., Any]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    shared = torch.randn(32, 8)
    tensors = {"embed": shared, "head": shared.clone(), "norm": torch.randn(8)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("verify")` -> the JSON on stdout, or the text with `as_json=False`; the exit code must be `code`."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str | Path, code: int = 0, as_json: bool = True) -> Any:
        options = ["--json"] if as_json else []
        ended = run_atelier("weights", *words, *options, "--store", tmp_path / "store")
        captured = capsys.readouterr()
        assert ended == code, captured.err
        if code and as_json and not captured.out:
            return " ".join(captured.err.split())
        return json.loads(captured.out) if as_json else captured.out + captured.err

    return call


def test_a_model_comes_in_is_looked_at_and_goes_back(run: Run, source: Path, tmp_path: Path) -> None:
    record = run("externalize", source)
    assert (record["model"], record["kind"], record["layout"]) == ("tiny", "llm", "combined")
    assert record["given_bytes"] == 2 * 32 * 8 * 4 + 32
    weights = {weight["name"]: weight for weight in run("inspect", "tiny")["weights"]}
    expected = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        data = expected[name].numpy().tobytes()
        stored = (tmp_path / "store" / weight["path"]).read_bytes()[weight["offset"] :][: weight["nbytes"]]
        assert stored == data
        assert weight["id"] == hashlib.sha256(data).hexdigest()
    assert weights["embed"]["offset"] == weights["head"]["offset"]
    run("inline", "tiny", tmp_path / "back", as_json=False)
    assert (tmp_path / "back/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert not list(tmp_path.glob("tmp_weight_*"))


@pytest.mark.drawn
@pytest.mark.parametrize("layout", ["inline", "separate", "combined"])
def test_every_layout_by_name(run: Run, source: Path, tmp_path: Path, layout: str) -> None:
    assert run("externalize", source, "--layout", layout)["layout"] == layout
    assert run("verify", "--deep")["damages"] == []
    other = "combined" if layout != "combined" else "separate"
    assert run("convert", "tiny", "--layout", other)["layout"] == other
    report = run("gc", "--dry-run")
    assert report["removed"]
    assert run("gc")["removed"] == report["removed"]
    assert run("load", "tiny")["verified"]
    assert {"open", "read", "verify", "attach"} <= run("load", "tiny")["stages"].keys()


def test_the_store_at_a_glance(run: Run, source: Path, tmp_path: Path) -> None:
    run("externalize", source, "-m", "one")
    run("externalize", source, "-m", "two")
    whole = run("inspect")
    assert [model["model"] for model in whole["models"]] == ["one", "two"]
    assert whole["stored_bytes"] < 0.6 * whole["given_bytes"]
    assert "given" in run("inspect", as_json=False)


def test_what_each_rank_of_a_language_model_reads(run: Run) -> None:
    """Both together read the model, and twice what each needs whole."""
    run("externalize", Path(__file__).parents[4] / "infra/demo/models/adder")
    record = run("inspect", "adder", "--ranks", "2")
    whole = sum(one["nbytes"] for one in record["weights"] if "norm" in one["name"] or "embed" in one["name"])
    assert len(set(record["rank_bytes"])) == 1
    assert sum(record["rank_bytes"]) == sum(one["nbytes"] for one in record["weights"]) + whole
    assert "rank_bytes" not in run("inspect", "adder")
    assert "weights of 2 ranks (tensor 2)" in run("inspect", "adder", "--ranks", "2", as_json=False)
    assert "heads cannot be divided among 3 ranks" in run("inspect", "adder", "--ranks", "3", code=2)
    assert "name the model that ranks divide" in run("inspect", "--ranks", "2", code=2)


def test_the_store_is_drawn(run: Run, source: Path, tmp_path: Path) -> None:
    run("externalize", source)
    nbytes = run("inspect", "--plot", tmp_path / "a/store.svg")["given_bytes"]
    bars = [one for one in ElementTree.parse(tmp_path / "a/store.svg").iter() if one.tag.endswith("rect") and len(one)]
    assert [bar[0].text for bar in bars] == [f"tiny, model: {nbytes / 1000:.1f} kB"]
    assert "ends in .svg" in run("inspect", "--plot", tmp_path / "store.png", code=2)


def test_damage_is_reported_with_exit_code_1(run: Run, source: Path, tmp_path: Path) -> None:
    run("externalize", source)
    pack = tmp_path / "store/packs/tiny_weight_combined"
    data = bytearray(pack.read_bytes())
    data[5] ^= 1
    pack.write_bytes(data)
    (damage,) = run("verify", code=1)["damages"]
    assert damage["model"] == "tiny"
    assert "tiny_weight_combined" in damage["file"]
    assert damage["tensors"]


def test_damage_is_repaired_from_the_source_while_there_is_one(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("externalize", source.relative_to(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for is_source_there in (True, False):
        if not is_source_there:
            source.rename(tmp_path / "renamed")
        for pack in (tmp_path / "store/packs").iterdir():
            data = bytearray(pack.read_bytes())
            data[5] ^= 1
            pack.write_bytes(data)
        report = run("repair", "tiny", code=int(not is_source_there))
        assert len(report["repaired"]) == int(is_source_there)
        assert len(report["damages"]) == int(not is_source_there)
        run("verify", "--deep", code=int(not is_source_there))
        if is_source_there:
            run("gc")
    assert str(source) in report["damages"][0]["problem"]
    text = run("repair", code=1, as_json=False)
    assert "0 damages repaired, 1 left" in text
    assert "no model 'nope'" in run("repair", "tiny", "nope", code=1)
    assert not list(tmp_path.glob("tmp_weight_*"))


def test_the_index_is_written_for_other_programs(run: Run, source: Path, tmp_path: Path) -> None:
    run("externalize", source)
    meta = tmp_path / "store/meta.json"
    assert not meta.exists()
    (tmp_path / "store/index.sqlite").unlink()
    record = run("index")
    assert (record["num_tensors"], record["meta"]) == (2, str(meta))
    places = {
        sha256: (extent["pack"], extent["offset"] + offset)
        for extent in json.loads(meta.read_text())["extents"].values()
        for sha256, offset in extent["tensors"].items()
    }
    for weight in run("inspect", "tiny")["weights"]:
        pack, offset = places[weight["id"]]
        assert (f"packs/{pack}", offset) == (weight["path"], weight["offset"])


def test_a_removed_model_frees_its_bytes_with_gc(run: Run, source: Path, tmp_path: Path) -> None:
    run("externalize", source)
    run("remove", "tiny", as_json=False)
    assert run("gc")["freed_bytes"] > 0
    assert not list((tmp_path / "store/packs").iterdir())
    assert "stored: none" in run("inspect", "tiny", code=1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["inspect", "nope"], "no model 'nope'"),
        (["externalize", "nowhere"], "no such folder or file"),
        (["externalize", "weights.pt"], "allow"),
        (["externalize", "s3:/bucket"], "no such folder or file"),
        (["convert", "nope", "--layout", "inline"], "no model 'nope'"),
        (["load", "../nope"], "nope"),
    ],
)
def test_mistakes_are_one_line(run: Run, tmp_path: Path, words: list[str], expected: str) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "weights.pt")
    assert expected in run(*words, code=1)


def test_inspect_reads_well_at_80_columns(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "transformer_blocks.18.attn.processor.add_k_proj.lora_A.default_0.weight"
    save_file({name: torch.randn(4, 8), "short": torch.randn(16)}, source / "model.safetensors")
    run("externalize", source, "-m", "handwritten-digits-flux-inverted")
    weights = {weight["name"]: weight for weight in run("inspect", "handwritten-digits-flux-inverted")["weights"]}
    text = run("inspect", "handwritten-digits-flux-inverted", as_json=False)
    assert max(map(len, text.splitlines())) <= 80
    told = text.split()
    for word in ("handwritten-digits-flux-inverted", "short", weights[name]["dtype"], weights[name]["id"][:8], "128"):
        assert word in told, f"{word} is broken or missing"
    assert any(word.startswith("transformer_") and word.endswith("default_0.weight") for word in told)
    wide = run("inspect", "handwritten-digits-flux-inverted", "--wide", as_json=False).split()
    for word in (name, weights[name]["id"], weights[name]["path"], str(weights[name]["offset"])):
        assert word in wide
    assert max(map(len, run("inspect", as_json=False).splitlines())) <= 80


def test_fine_tunes_become_deltas_and_plain_again(run: Run, tmp_path: Path) -> None:
    base = torch.randn(128, 96).to(torch.bfloat16)
    for name, strength in (("a", 0.0), ("b", 2e-3), ("c", 4e-3)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
        tuned = (base.float() * (1 + strength * torch.randn(128, 96))).to(torch.bfloat16)
        save_file({"w": tuned}, folder / "model.safetensors")
        run("externalize", folder)
    planned = run("compact", "--dry-run")
    assert planned["after_bytes"] < planned["before_bytes"]
    shown = run("compact", "--dry-run", as_json=False)
    assert "BF16 matrix" in shown
    assert "would become" in shown
    assert not any(weight["is_delta"] for weight in run("inspect", "b")["weights"])
    assert run("compact") == planned
    num_deltas = {name: sum(weight["is_delta"] for weight in run("inspect", name)["weights"]) for name in "abc"}
    assert sorted(num_deltas.values()) == [0, 1, 1]
    run("gc")
    assert run("verify", "--deep")["damages"] == []
    assert run("inspect")["stored_bytes"] == planned["after_bytes"]
    assert run("compact")["models"] == []
    assert "--all" in run("expand", code=2)
    assert "--all" in run("expand", "a", "--all", code=2)
    assert "no model 'd'" in run("expand", "d", code=1)
    expanded = run("expand", "--all")["expanded"]
    assert expanded == [name for name, num in num_deltas.items() if num]
    run("gc")
    assert run("inspect")["stored_bytes"] == planned["before_bytes"]
    assert run("verify", "--deep")["damages"] == []
