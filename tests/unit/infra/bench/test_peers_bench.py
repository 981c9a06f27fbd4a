"""The bench of peers: each side gives the same, and prompts that begin alike compute their beginning once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit.seeding import seeded_random
from safetensors.torch import load_file
from typer.testing import CliRunner

from infra.bench.__main__ import app
from infra.bench.command.peers import script_command
from infra.bench.door_load import Outcome
from infra.bench.llm_files import write_model
from infra.bench.peers import parts
from infra.bench.peers.decoders import write_w8a8
from infra.bench.peers.drafts import draft_sides, write_deeper
from infra.bench.peers.lookups import compare_answers, lookup_sides
from infra.bench.peers.parts import PARTS, measure_peers, print_part
from infra.bench.peers.served import MODEL, cluster_config, served_figures
from infra.bench.peers.settings import OURS, PeersSettings, Took, rows_of
from infra.bench.peers.texts import OurTexts, StockTexts, Texts, genai_texts, vllm_texts

TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
SMALL = PeersSettings(
    rounds=2,
    judges=Path("none"),
    encoder_width=64,
    encoder_layers=1,
    lengths=((1, 5), (2, 7)),
    half_lengths=((2, 7),),
    decoder=TINY,
    num_prompt=32,
    num_new=4,
    num_shared=64,
    num_own=16,
    num_requests=3,
    streams=(3, 8, 4),
    denoiser={"block_out_channels": (32,) * 4, "norm_num_groups": 8, "cross_attention_dim": 32, "layers_per_block": 1},
    text_encoder={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    vae={"block_out_channels": (32,) * 4, "layers_per_block": 1},
    sides_px=(64,),
)
QUICK = (
    "embedding",
    "half",
    "bfloat16",
    "int8",
    "prefix",
    "streams",
    "unet",
    "image",
    "steps",
)  # of what is installed anyway


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("name", QUICK)
def test_a_part_has_rows_of_all_sides(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATELIER_LLAMA_CPP_PYTHON", "none")
    found = dict(measure_peers(SMALL, seed=0, parts=(name, "lookup", "draft")))
    assert found.pop("lookup") == found.pop("draft") == [], "their model is not installed"
    assert [*found] == [name]
    rows = found[name]
    print_part(name, rows)
    whole = [row for row in rows if row["case"] != "a token"]  # which is a difference: noise of a tiny model
    assert all(row["cpu_ms"] > 0 and row["wall_ms"] > 0 and row["ratio"] > 0 for row in whole)
    sides, printed = [row["side"] for row in rows], capsys.readouterr().out
    assert all(side in printed for side in sides)
    match name:
        case "embedding":
            assert {*sides} >= {OURS, "transformers", "onnxruntime"}
        case "half":
            assert {*sides} >= {OURS, "transformers", "ours in float32"}
        case "bfloat16":
            assert sides == [OURS, "transformers"] * 2
        case "prefix":
            alike, otherwise = (int(row["beside"].split()[0]) for row in rows)
            assert (alike, otherwise) == (64 + 3 * 16, 3 * (64 + 16))
        case "unet":
            assert {*sides} == {OURS, "diffusers"}
            assert all(float(row["beside"].split()[-1]) < 1e-3 for row in rows)
        case "image":
            assert {*sides} == {OURS, "diffusers"}
            assert all(float(row["beside"].split()[0]) > 30 for row in rows)
        case "steps":
            assert {*sides} == {OURS, "diffusers"}
            psnr = [float(row["beside"].split()[-2]) for row in rows if row["beside"]]
            # diffusers extrapolates over numbers of steps, ours over levels
            assert psnr[0] == pytest.approx(psnr[1], abs=6)


def test_a_tiny_decoder_is_the_same_on_all_sides(tmp_path: Path) -> None:
    write_model(tmp_path / "plain", **TINY)
    prompts = [[seeded_random().randrange(2, 320) for _ in range(20)] for _ in range(2)]
    ours, stock = OurTexts(tmp_path / "plain"), StockTexts(tmp_path / "plain", torch.float32)
    found, expected = ours.write(prompts, 3, scores=True), stock.write(prompts, 3, scores=True)
    assert [len(ids) for ids in found.ids] == [len(ids) for ids in expected.ids] == [3, 3]
    assert found.num_computed == 40
    for prompt, ids, own, best in zip(prompts, found.ids, found.logprobs, expected.logprobs, strict=True):
        assert own == pytest.approx(float(stock.logprobs_of(prompt)[ids[0]]), abs=0.02)
        assert own == pytest.approx(best, abs=0.04)
    assert ours.write(prompts, 1).num_computed < 40, "the prompts are in the cache now"


GENAI = """
import types
import openvino

__version__ = "a stand-in"
SchedulerConfig = GenerationConfig = types.SimpleNamespace

class ContinuousBatchingPipeline:
    def __init__(self, model, *settings):
        self.model = model

    def generate(self, prompts, wishes):
        ids = [int(prompt.values[0, -1]) + 1 for prompt in prompts]
        return [types.SimpleNamespace(m_generation_ids=[[one] * wish.max_new_tokens], m_scores=[-one])
                for one, wish in zip(ids, wishes)]
"""
VLLM = """
import types

__version__ = "a stand-in"
SamplingParams = types.SimpleNamespace

class LLM:
    def __init__(self, model, **settings):
        pass

    def generate(self, prompts, sampling, use_tqdm):
        def said(one):
            return types.SimpleNamespace(
                token_ids=[one] * sampling.max_tokens, logprobs=[{one: types.SimpleNamespace(logprob=-one)}]
            )
        return [types.SimpleNamespace(outputs=[said(one["prompt_token_ids"][-1] + 1)]) for one in prompts]
"""


@pytest.mark.parametrize("name", ["openvino", "vllm"])
def test_a_peers_process_imports_the_peer_and_no_file_beside_its_script(name: str, tmp_path: Path) -> None:
    files = {
        "openvino/openvino/__init__.py": "import types\nTensor = lambda values: types.SimpleNamespace(values=values)\n",
        "openvino/openvino_genai/__init__.py": GENAI,
        "vllm/lib/vllm.py": VLLM,
        "vllm/bin/python": f'#!/bin/sh\nPYTHONPATH={tmp_path}/vllm/lib exec {sys.executable} "$@"\n',
    }
    for place, content in files.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(content)
    (tmp_path / "vllm/bin/python").chmod(0o700)
    model = partial(Path, "model")
    with genai_texts(tmp_path, model, "f32") if name == "openvino" else vllm_texts(tmp_path, model, 512) as side:
        assert side is not None
        found = side.write([[5, 6], [7]], 2, scores=True)
    assert [list(ids) for ids in found.ids] == [[7, 7], [8, 8]]
    assert list(found.logprobs) == [-7, -8]


def test_a_script_that_another_interpreter_runs_is_beside_no_module(tmp_path: Path) -> None:
    for name in ("json", "script"):
        (tmp_path / f"{name}.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    ran = subprocess.run(script_command(sys.executable, tmp_path / "script.py", 5), capture_output=True, check=True)
    assert json.loads(ran.stdout) == ["5"]


def _said(token: int, prompts: object, count: int) -> Texts:
    return Texts(Took(1, 1), [[1, token]])


@pytest.mark.parametrize("way", ["lookup", "draft"])
def test_proposals_change_no_token_and_are_rated_by_their_own_side(way: str, tmp_path: Path) -> None:
    write_model(tmp_path / "plain", **TINY)
    prompt = [seeded_random().randrange(2, 300) for _ in range(12)] * 3
    if way == "draft":
        write_model(tmp_path / "plain" / "draft", **TINY)
        write_deeper(tmp_path / "plain")
    sides = (lookup_sides if way == "lookup" else draft_sides)(tmp_path / "plain")
    rows = compare_answers("repeat", prompt, sides, replace(SMALL, num_answer=12))
    assert (
        [row["side"] for row in rows] == list(sides) == [OURS, f"{OURS}, {way}", "transformers", f"transformers, {way}"]
    )
    for plain, looked_up in (rows[:2], rows[2:]):
        assert plain["beside"] == ""
        speed, of, side = looked_up["beside"].split()[:3]
        assert float(speed) == pytest.approx(plain["cpu_ms"] / looked_up["cpu_ms"], abs=0.01)
        assert (of, side) == ("of", f"{plain['side']}'s")
    assert rows[1]["beside"].endswith("same tokens")
    said = {name: SimpleNamespace(write=partial(_said, len(name))) for name in sides}
    with pytest.raises(RuntimeError, match="repeat: the tokens are others with proposals"):
        compare_answers("repeat", prompt, said, SMALL)


def test_int8_by_rows_is_off_by_half_a_scale_and_leaves_the_head(tmp_path: Path) -> None:
    write_model(tmp_path / "plain", **TINY)
    write_w8a8(tmp_path / "plain", tmp_path / "int8")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "int8"))
    packed = {name for name, tensor in after.items() if tensor.dtype == torch.int8}
    assert packed == {name for name in before if "_proj." in name}
    for name in packed:
        scales = after[f"{name}_scale"].float()
        assert scales.shape == (len(before[name]), 1)
        off = (after[name].float() * scales - before[name].float()).abs()
        assert bool((off <= 0.51 * scales + 0.004 * before[name].float().abs()).all())  # the scales are bfloat16
        del after[f"{name}_scale"]
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - packed)
    config = json.loads((tmp_path / "int8/config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]


def test_rows_are_medians_by_ours_and_by_parts() -> None:
    times = {OURS: [Took(3, 9), Took(1, 8), Took(2, 7)], "peer": [Took(4, 1), Took(4, 1)]}
    ours, peer = rows_of("a case", times, {"peer": "off"}, parts=2)
    assert (ours["cpu_ms"], ours["wall_ms"], ours["ratio"], ours["beside"]) == (1000, 4000, 1, "")
    assert (peer["cpu_ms"], peer["ratio"], peer["beside"]) == (2000, 2, "off")


def test_figures_of_streams_and_their_failures(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [Outcome("completion", 200, 1.0 + place, 1.5 + 2 * place, 4.0 + place) for place in range(4)]
    figures = served_figures(outcomes, num_new=12)
    print_part("served", [{"streams": 4, "side": OURS, "cpu_s": 1.25, **figures}])
    assert "1500, 3500" in capsys.readouterr().out
    assert figures == {"tokens_per_s": 4 * 12 / 6, "first_p50_ms": 1500, "first_p95_ms": 3500}
    with pytest.raises(RuntimeError, match="1 of 2 streams failed: 500 broken"):
        served_figures([outcomes[0], Outcome("completion", 500, 0, 0, 0, problem="broken")], num_new=12)


def test_our_server_has_the_model_and_all_cores(tmp_path: Path) -> None:
    config = cluster_config(tmp_path / "model", tmp_path / "store")
    assert [(model.id, model.path) for model in config.models] == [(MODEL, tmp_path / "model")]
    assert config.worker.num_cpus == os.cpu_count()


def test_parts_are_named_and_printed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"case": "a case", "side": OURS, "cpu_ms": 1.5, "wall_ms": 1.6, "ratio": 1.0, "beside": ""}]
    monkeypatch.setattr(parts, "measure_peers", lambda settings, seed, parts: ((name, rows) for name in parts))
    run = CliRunner().invoke
    assert json.loads(run(app, ["peers", "--json"]).stdout) == dict.fromkeys(PARTS, rows)
    assert json.loads(run(app, ["peers", "--part", "prefix", "--json"]).stdout) == {"prefix": rows}
    table = run(app, ["peers", "--part", "prefix"]).stdout
    assert "a case" in table
    assert not table.startswith("{")
    for command in ("peers", "programs", "denoise", "schedule"):
        refused = run(app, [command, "--part", "none"], env={"COLUMNS": "200"})
        assert refused.exit_code == 2, command
        assert "'none'; expected one of" in refused.output
