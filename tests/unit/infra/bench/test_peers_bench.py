"""The bench of peers: each side gives the same, and prompts that begin alike compute their beginning once."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from infra.bench import peers
from infra.bench.__main__ import app
from infra.bench.peers import OURS, PARTS, PeersSettings, measure_peers, print_part

SMALL = PeersSettings(
    rounds=2,
    encoder_width=64,
    encoder_layers=1,
    lengths=((1, 5), (2, 7)),
    half_lengths=((2, 7),),
    decoder_width=64,
    decoder_layers=1,
    num_prompt=32,
    num_shared=64,
    num_own=16,
    num_requests=3,
)


@pytest.mark.slow
def test_each_part_has_rows_of_all_sides(capsys: pytest.CaptureFixture[str]) -> None:
    found = dict(measure_peers(SMALL, seed=0))
    assert found.keys() == PARTS.keys()
    for name, rows in found.items():
        print_part(name, rows)
        assert all(row["cpu_ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert {row["side"] for row in found["embedding"]} >= {OURS, "transformers", "onnxruntime"}
    assert {row["side"] for row in found["half"]} >= {OURS, "transformers", "ours in float32"}
    assert [row["side"] for row in found["bfloat16"]] == [OURS, "transformers"] * 2
    alike, otherwise = (int(row["beside"].split()[0]) for row in found["prefix"])
    assert (alike, otherwise) == (64 + 3 * 16, 3 * (64 + 16))
    assert "onnxruntime" in capsys.readouterr().out


def test_parts_are_named_and_printed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"case": "a case", "side": OURS, "cpu_ms": 1.5, "ratio": None, "beside": ""}]
    monkeypatch.setattr(peers, "measure_peers", lambda settings, seed, parts: ((name, rows) for name in parts))
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
