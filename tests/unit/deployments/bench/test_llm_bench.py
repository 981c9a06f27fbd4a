"""`atelier bench llm` on a tiny model: llama-bench's names and forms, and the opening mode."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from fuzz.model_parsers import bpe_metadata, valid_gguf_model
from typer.testing import CliRunner

from infra.bench.command import peers
from infra.bench.command.app import app
from infra.bench.command.llm import BenchSettings, Case, _open_model, formatted, measure_llm

# `test::get_fields` of llama-bench.cpp, and `use_mmap`, which compare-llama-bench.py asks for.
LLAMA_BENCH = [
    "build_commit",
    "build_number",
    "cpu_info",
    "gpu_info",
    "backends",
    "model_filename",
    "model_type",
    "model_size",
    "model_n_params",
    "n_batch",
    "n_ubatch",
    "n_threads",
    "cpu_mask",
    "cpu_strict",
    "poll",
    "type_k",
    "type_v",
    "n_gpu_layers",
    "n_cpu_moe",
    "split_mode",
    "main_gpu",
    "no_kv_offload",
    "flash_attn",
    "devices",
    "tensor_split",
    "tensor_buft_overrides",
    "load_mode",
    "use_mmap",
    "embeddings",
    "no_op_offload",
    "no_host",
    "fit_target",
    "fit_min_ctx",
    "n_prompt",
    "n_gen",
    "n_depth",
    "test_time",
    "avg_ns",
    "stddev_ns",
    "avg_ts",
    "stddev_ts",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    vocabulary = bpe_metadata()
    missing = [f"x{number}" for number in range(120)]  # prompts are drawn of 93 tokens
    vocabulary |= {"tokens": vocabulary["tokens"] + missing, "token_type": vocabulary["token_type"] + [1] * 120}
    valid_gguf_model(file, "llama", vocabulary)
    return file


@pytest.fixture(scope="module")
def rows(model: Path) -> list[dict[str, Any]]:
    cases = (Case(8, 0), Case(0, 4), Case(6, 3), Case(0, 2, depth=5, num_parallel=3))
    return measure_llm(model, BenchSettings(cases, 1, 1, repetitions=2), peer=False)


def test_rows_have_llama_benchs_names_in_its_forms(rows: list[dict[str, Any]], model: Path) -> None:
    assert [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows] == [
        (8, 0, 0),
        (0, 4, 0),
        (6, 3, 0),
        (0, 2, 5),
    ]
    as_json = json.loads(formatted(rows, "json"))
    assert [list(row)[: len(LLAMA_BENCH)] for row in as_json] == [LLAMA_BENCH] * 4
    assert [json.loads(line) for line in formatted(rows, "jsonl").splitlines()] == as_json
    lines = formatted(rows, "csv").splitlines()
    assert lines[0] == ",".join(LLAMA_BENCH)
    for row, found in zip(rows, csv.DictReader(lines), strict=True):
        for name in LLAMA_BENCH:
            assert found[name] == str(int(row[name]) if isinstance(row[name], bool) else row[name])
    table = formatted(rows, "md").splitlines()
    assert table[0] == "| model | size | params | backend | threads | test | t/s |"
    size, params = rows[0]["model_size"] / 2**20, rows[0]["model_n_params"] / 1e6
    assert table[2].split(" | ")[1:4] == [f"{size:.2f} MiB", f"{params:.2f} M", "atelier"]
    large = formatted([rows[0] | {"model_size": 3 * 2**29, "model_n_params": 1_100_000_000}], "md").splitlines()[2]
    assert large.split(" | ")[1:3] == ["1.50 GiB", "1.10 B"]
    assert [line.split(" | ")[5] for line in table[2:]] == ["pp8", "tg4", "pp6+tg3", "tg2 @ d5 x 3"]


def test_speeds_follow_from_the_samples(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        tokens = (row["n_prompt"] + row["n_gen"]) * row["n_parallel"]
        assert len(row["samples_ns"]) == 2
        assert row["samples_ts"] == [1e9 * tokens / ns for ns in row["samples_ns"]]
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
        assert row["stddev_ns"] == pytest.approx(abs(row["samples_ns"][0] - row["samples_ns"][1]) / 2**0.5, abs=1)


def test_opening_counts_the_file_and_a_cache_of_one_answer(model: Path) -> None:
    figures = _open_model(model, 10, 4)
    assert figures["file_mb"] == pytest.approx(model.stat().st_size / 1e6, rel=0.7)
    slots = 16 + 1  # one block of 16 tokens holds all 15, and there is a slot for padding
    assert figures["kv_mb"] == pytest.approx(2 * slots * 16 * 2 / 1e6)
    assert 0 < figures["open_s"] < figures["open_to_first_token_s"]


def test_the_peer_of_a_file_is_llama_cpp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATELIER_LLAMA_CPP_PYTHON", str(tmp_path / "python"))
    assert peers.llama_cpp_python() is None
    (tmp_path / "python").touch()
    assert peers.llama_cpp_python() == tmp_path / "python"


def test_the_command_takes_numbers_as_llama_bench_does(model: Path) -> None:
    options = ["-m", str(model), "-p", "4,6", "-n", "0", "-pg", "4,2", "-d", "0,3", "-r", "1", "-t", "1", "--no-peer"]
    done = CliRunner().invoke(app, ["llm", *options, "-o", "jsonl"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    sizes = [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows]
    assert sizes == [(4, 0, 0), (6, 0, 0), (4, 2, 0), (4, 0, 3), (6, 0, 3), (4, 2, 3)]


@pytest.mark.parametrize(
    "wrong", [["-p", "many"], ["-p", "512,"], ["-d", "-1"], ["-pg", "512"], ["-npl", "0"], ["-p", "0", "-n", "0"]]
)
def test_the_command_refuses_what_is_no_number(model: Path, wrong: list[str]) -> None:
    done = CliRunner().invoke(app, ["llm", "-m", str(model), *wrong])
    assert done.exit_code == 2
    assert wrong[0] in done.output
