"""`atelier quantize` on the demo adder: what it prints, what it leaves, how it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from weights.formats.gguf import read_gguf
from weights.storage.store import WeightStore

ADDER = Path(__file__).resolve().parents[4] / "infra/demo/models/adder"
Run = Callable[..., tuple[int, str, str]]


def test_a_report_in_json_with_the_change_of_perplexity(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("What is 1 + 1? " * 4)
    (tmp_path / "other.gguf").write_text("not of this model")
    target = tmp_path / "adder.gguf"
    options = ("--to", "gguf-q4_0", "--text", str(tmp_path / "text"), "--json")
    code, out, _ = run("quantize", str(ADDER), str(target), *options)
    assert code == 0
    record = json.loads(out)
    assert record["nbytes"] == target.stat().st_size
    assert len(record["tensors"]) == len(read_gguf(target).tensors) == 39
    assert 4.5 < record["bits_per_weight"] < 4.7
    found = record["perplexity"]
    assert found["change"] == pytest.approx(found["after"] / found["before"] - 1)
    assert found["before"] != found["after"]


def test_a_table_and_a_model_of_the_store(run: Run, tmp_path: Path) -> None:
    store = tmp_path / "store"
    options = ("--to", "int8-group", "--model", "adder-int8", "--store", str(store))
    code, out, _ = run("quantize", str(ADDER), str(tmp_path / "int8"), *options)
    assert code == 0
    assert "8.68 bits per weight" in out
    assert "looked up by rows" in out
    manifest = WeightStore(store).manifest("adder-int8")
    assert manifest.kind == "llm"
    assert (WeightStore(store).skeleton(manifest) / "tokenizer.json").is_file()


def test_a_pipeline_in_float8(run: Run, tmp_path: Path) -> None:
    store, target = tmp_path / "store", tmp_path / "fp8"
    images = ("--prompt", "a handwritten five", "--prompt", "a handwritten two", "--size", "16", "--steps", "2")
    options = ("--to", "fp8-row", "--model", "small", "--store", str(store), "--json", *images)
    code, out, _ = run("quantize", str(ADDER.with_name("digits-flux")), str(target), *options)
    assert code == 0
    record = json.loads(out)
    assert record["nbytes"] == sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    small = [row for row in record["tensors"] if row["kind"] == "F8_E4M3"]
    assert len(small) > 20
    assert all(0.01 < row["rms_error"] < 0.04 for row in small)
    assert WeightStore(store).manifest("small").kind == "diffusion"
    found = record["images"]
    assert found["num_images"] == 2
    assert 0 < found["mean_difference"] < 8 < found["psnr_db"]
    assert found["mean_difference"] <= found["max_difference"] <= 255
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8", "store"]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ("{adder}", "{here}/target", "--to", "gguf-q8_0", "--text", "{here}/none"),
            2,
            "--text: .*none cannot be read",
        ),
        (("{adder}", "{here}/target", "--to", "gguf-q8_0", "--text", "{here}/one"), 2, "--text: the text has 1 tokens"),
        (("{adder}", "{here}/one", "--to", "gguf-q8_0"), 1, "one: exists already"),
        (("{adder}", "{here}/target", "--to", "gguf-q8_0", "--prompt", "x"), 2, "--prompt: gguf-q8_0 is for language"),
        (("{here}", "{here}/target", "--to", "kuiper-int8"), 1, "no Hugging Face folder"),
        (("{adder}", "{here}/target", "--to", "q5"), 2, "kuiper-int8"),
        (("{adder}", "{here}/target", "--to", "fp8-row"), 1, "model_index.json"),
        (("{adder}", "{here}/target", "--to", "fp8-row", "--text", "{here}/one"), 2, "fp8-row is for pipelines"),
    ],
)
def test_mistakes_are_named(run: Run, tmp_path: Path, words: tuple[str, ...], code: int, message: str) -> None:
    (tmp_path / "one").write_text("1")
    found, _, err = run("quantize", *(word.format(adder=ADDER, here=tmp_path) for word in words))
    assert found == code
    assert re.search(message, " ".join(err.split())), err
    assert not (tmp_path / "target").exists()
