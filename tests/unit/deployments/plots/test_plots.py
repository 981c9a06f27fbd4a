"""Pictures of figures: what an XML parser reads of them is what the figures say."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from kit.command_line import run_atelier
from typer.testing import CliRunner
from unit.deployments.bench.test_switch_bench import figures as switch_figures

from deployments.plots.svg import MAX_BOXES, MAX_ROWS, Bar, Bars, Boxes, Curves, ms, size, store_plot, svg_of
from infra.bench.command.plots import PLOTS, llm_plot, load_plot, serve_plot, switch_plot
from infra.plots import app

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</text><script>alert(1)</script>\x00\x1b"&'


def texts(svg: str) -> list[str]:
    """Every text of a picture that has no script."""
    root = ElementTree.fromstring(svg)
    assert {element.tag for element in root.iter()} & {f"{SVG}script", f"{SVG}foreignObject", f"{SVG}image"} == set()
    return ["".join(element.itertext()) for element in root.iter() if element.tag in (f"{SVG}text", f"{SVG}title")]


def widths(svg: str) -> dict[str, float]:
    """The width of each bar by what it says."""
    bars = [one for one in ElementTree.fromstring(svg).iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    return {str(one.findtext(f"{SVG}title")): float(one.attrib["width"]) for one in bars}


def load_figures() -> dict[str, Any]:
    part = {"raw_gbps": 2.0, "ours_gbps": 1.5, "peers": {"other": 0.5}, "range_gbps": {"ours": [1.0, 1.75]}}
    report = {"stages": {"read": {"busy_s": 2.0}, "verify": {"busy_s": 0.5}}}
    return part | {"warm": part, "report": report, "bytes": 3 * 10**9, "num_tensors": 7}


def llm_figures() -> list[dict[str, Any]]:
    sizes = {"n_prompt": 512, "n_gen": 0, "n_depth": 64}
    speeds = [("atelier", 40.0), ("llama.cpp", 20.0)]
    rows = [{**sizes, "build_commit": name, "avg_ts": ts, "samples_ts": [ts - 1, ts + 1]} for name, ts in speeds]
    return [*rows, {"rate_per_s": 2.0, "ttft_ms_p50": 10.0, "ttft_ms_p90": 20.0, "ttft_ms_p99": 80.0}]


SERVE = {"figures": [{"what": "warm request: chat", "ours_ms": 12.0, "stock_ms": 24.0}]}
FIGURES: dict[str, Any] = {"load": load_figures(), "switch": switch_figures(), "serve": SERVE, "llm": llm_figures()}


def test_bars_are_as_long_as_their_values_and_hostile_names_are_text() -> None:
    rows = [Bar(HOSTILE, {"a": 30.0, "b": 10.0}), Bar("half", {"a": 20.0}, 10.0, 40.0), Bar("none", {"a": 0.0})]
    svg = svg_of(HOSTILE, [Bars("title", rows, ms)], note="<b>")
    found = widths(svg)
    clean = '</text><script>alert(1)</script>��"&'
    assert found[f"{clean}, a: 30 ms"] == pytest.approx(3 * found[f"{clean}, b: 10 ms"], abs=0.02)
    assert found["half, a: 20 ms"] == pytest.approx(2 * found[f"{clean}, b: 10 ms"], abs=0.02)
    assert found["none, a: 0.000 ms"] == 0
    assert {clean, "<b>", "40 ms", "20 ms"} <= set(texts(svg))


def test_curves_have_their_points_in_place() -> None:
    svg = svg_of("t", [Curves("c", "x", "y", {"one": [(0.0, 0.0), (50.0, 5.0), (100.0, 10.0)]})])
    circles = list(ElementTree.fromstring(svg).iter(f"{SVG}circle"))
    (x0, y0), (x1, y1), (x2, y2) = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in circles]
    assert (x0 + x2) / 2 == pytest.approx(x1)
    assert (y0 + y2) / 2 == pytest.approx(y1)
    assert x0 < x2
    assert y0 > y2
    assert "one: 5 at 50" in texts(svg)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_no_finite_number_from_0_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite numbers from 0"):
        svg_of("t", [Bars("b", [Bar("a", {"": value})], ms)])
    with pytest.raises(ValueError, match="finite numbers from 0"):
        svg_of("t", [Curves("c", "x", "y", {"one": [(0.0, value)]})])


def test_nothing_and_very_much_are_pictures_too() -> None:
    assert "none" in texts(svg_of("none", [Bars("b", [], ms), Curves("c", "x", "y", {})]))
    many = [Bar(f"row {number}", {"": 1.0}) for number in range(MAX_ROWS + 5)]
    assert "and 5 more" in texts(svg_of("t", [Bars("b", many, ms)]))


def test_pictures_of_benches_hold_their_values() -> None:
    assert {"ours: 1.50 GB/s", "other: 0.50 GB/s", "read: 2000 ms"} <= widths(load_plot(load_figures())).keys()
    assert {"new replica: 523 ms", "diffusers, kept: 523 ms"} <= widths(switch_plot(switch_figures())).keys()
    assert {"Atelier: 12 ms", "stock: 24 ms"} <= widths(serve_plot(SERVE)).keys()
    bars = [one for one in ElementTree.fromstring(serve_plot(SERVE)).iter(f"{SVG}rect") if len(one)]
    fills = {str(one.findtext(f"{SVG}title")).split(":")[0]: one.attrib["fill"] for one in bars}
    assert fills["Atelier"] != fills["stock"]
    assert [ms(value) for value in (0.005, 0.32, 2.164, 33.2, 12_000)] == [
        "0.005 ms",
        "0.32 ms",
        "2.16 ms",
        "33 ms",
        "12.00 s",
    ]
    said = texts(llm_plot(llm_figures()))
    assert {"512 tokens read behind 64", "atelier: 40.0 tokens/s", "ttft_ms: 80 at 99"} <= set(said)
    stored = store_plot({"flux": {"vae": 2 * 10**6, "transformer": 3 * 10**9}}, "note")
    assert {"flux, vae: 2.0 MB", "flux, transformer: 3.00 GB", "note"} <= set(texts(stored))
    assert (size(12.0), ms(12_000)) == ("12 B", "12.00 s")


def test_one_command_makes_every_picture_that_there_are_results_for(tmp_path: Path) -> None:
    for name in PLOTS.keys() - {"serve"}:
        (tmp_path / f"{name}.json").write_text(json.dumps(FIGURES[name]))
    told = CliRunner().invoke(app, [str(tmp_path), str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    assert "serve.json is not there" in told.output
    made = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert made == ["llm.svg", "load.svg", "switch.svg", "timeline.svg"]
    assert (tmp_path / "out/load.svg").read_text() == load_plot(load_figures())
    assert "w3" in texts((tmp_path / "out/timeline.svg").read_text())
    (tmp_path / "llm.json").write_text("{")
    assert CliRunner().invoke(app, [str(tmp_path), str(tmp_path / "out")]).exit_code == 2


def test_a_picture_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path, says in ((tmp_path / "a.png", "ends in .svg"), (tmp_path / "file/a.svg", "--plot")):
        for command in ("load", "switch", "serve"):
            assert run_atelier("bench", command, "--plot", path) in (1, 2)
            assert says in capsys.readouterr().err


def test_boxes_lie_where_their_numbers_say() -> None:
    boxes = [(0.0, 2.0, 0.0, 100.0, HOSTILE), (1.0, 3.0, 100.0, 300.0, "b"), (3.0, 1.0, 0.0, 100.0, HOSTILE)]
    svg = svg_of("t", [Boxes("memory", "operation", "place", boxes, size)])
    rects = [one for one in ElementTree.fromstring(svg).iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    found = {str(one.findtext(f"{SVG}title")): one.attrib for one in rects}
    clean = '</text><script>alert(1)</script>��"&'
    wide, narrow, high = (
        found[f"{clean}: 100 B at 0 B, 0 to 2"],
        found[f"{clean}: 100 B at 0 B, 3 to 4"],
        found["b: 300 B at 100 B, 1 to 4"],
    )
    assert float(wide["width"]) == pytest.approx(2 * float(narrow["width"]), abs=0.02)
    assert float(high["height"]) == pytest.approx(3 * float(wide["height"]), abs=0.02)
    assert float(high["y"]) + float(high["height"]) == pytest.approx(float(wide["y"]), abs=0.02)
    assert wide["fill"] == narrow["fill"] != high["fill"]
    many = svg_of("t", [Boxes("m", "x", "y", [(0.0, 1.0, float(n), 1.0, "") for n in range(MAX_BOXES + 9)], size)])
    assert many.count("<rect") == MAX_BOXES + 1
    with pytest.raises(ValueError, match="finite"):
        svg_of("t", [Boxes("m", "x", "y", [(0.0, math.nan, 0.0, 1.0, "")], size)])
