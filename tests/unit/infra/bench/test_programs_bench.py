"""The bench of programs: requests share forwards, and each part is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.bench.programs import CLIENTS, PARTS, Programs, _memory_of_two, measure_programs, print_part
from weights.records.errors import StoreError

pytestmark = pytest.mark.long  # exports, and imports diffusers


def test_the_clients_rows_share_forwards() -> None:
    ((name, (row,)),) = measure_programs(0.1, 0, ["merging"])
    assert name == "merging"
    assert row["requests"] == CLIENTS
    assert 1 <= row["forwards"] < CLIENTS


def test_each_part_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    unet = {"program": "UNet", "calls": 9, "ms": {"module": 4.0, "program": 3.0, "compiled": 1.5}, "compile_s": 60.0}
    bert = unet | {"ms": unet["ms"] | {"ONNX": 3.3, "onnxruntime": 3.0}}
    figures = {
        "merging": ({"requests": 20, "rows": 87, "forwards": 3}, "87"),
        "bert": (bert, "1.10"),
        "rebind": ({"exported": 0.25, "compiled": 0.26, "ONNX": 9.0}, "0.260"),
        "unet": (unet, "0.38"),
        "shared": ({"program": 1.01, "compiled": 1.02}, "1.020"),
    }
    assert figures.keys() == PARTS.keys()
    for name, (row, shown) in figures.items():
        print_part(name, [row])
        printed = capsys.readouterr().out
        assert shown in printed
        assert PARTS[name] in printed


def test_a_process_that_fails_ends_the_part(tmp_path: Path) -> None:
    Programs(tmp_path)  # whose store has no table
    with pytest.raises(StoreError, match="table"):
        _memory_of_two(tmp_path, 2**28, is_compiled=False)
