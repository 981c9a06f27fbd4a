"""The bench of all-in-one files: both sides run, and equal tensors cost nothing."""

from __future__ import annotations

import json

import pytest

from infra.bench.single_file import Sizes, measure_single_file, print_single_file_figures

pytestmark = [pytest.mark.slow, pytest.mark.long]  # imports diffusers


def test_all_ways_have_figures(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = Sizes(unet=(32, 64), vae=(32, 64), text=64, text_layers=1)
    figures = measure_single_file(sizes, seed=0, rounds=1)
    assert all(row["wall_s"] > 0 and row["processor_s"] > 0 for row in figures["ways"])
    assert [row["way"] for row in figures["ways"]][-1] == "from_single_file"
    assert figures["added_bytes"] <= figures["file_bytes"] / 100
    print_single_file_figures(figures, as_json=False)
    assert "bytes that it adds to a store with the folder form" in capsys.readouterr().out
    print_single_file_figures(figures, as_json=True)
    assert json.loads(capsys.readouterr().out) == figures
