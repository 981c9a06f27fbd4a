"""Pictures of what the benches of `atelier bench` measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from deployments.plots.svg import Bar, Bars, Curves, ms, size, svg_of

_LEGS: Final = {
    "switch_ms": "Atelier",
    "touched_ms": "Atelier, every byte read",
    "diffusers_ms": "diffusers, loaded",
    "diffusers_touched_ms": "diffusers, every byte read",
    "moved_ms": "diffusers, copied",
    "lookup_ms": "diffusers, kept",
}


def load_plot(found: Mapping[str, Any]) -> str:
    """Draw `bench load`: each loader cold and warm, and where the time of ours goes, by stage."""
    panels: list[Bars | Curves] = []
    for title, part in (("cold", found), ("warm", found["warm"])):
        named = {"raw O_DIRECT": part["raw_gbps"], "ours": part["ours_gbps"], **part["peers"]}
        ranges = part["range_gbps"]
        rows = []
        for name, gbps in named.items():
            low, high = ranges.get(name, (None, None))
            rows.append(Bar(name, {"": gbps}, low, high, is_peer=name != "ours"))
        panels.append(Bars(f"Loads, {title}", rows, lambda value: f"{value:.2f} GB/s"))
    stages = {name: seconds * 1e3 for name, seconds in _stage_seconds(found["report"]).items()}
    panels.append(Bars("Ours, cold: busy time by stage; stages overlap", _rows(stages), ms))
    return svg_of(f"{size(found['bytes'])} in {found['num_tensors']} tensors", panels, "Medians and ranges of rounds")


def _stage_seconds(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds that threads were busy in the stages of a load's report, by stage."""
    return {stage: found["busy_s"] for stage, found in report["stages"].items()}


def switch_plot(found: Mapping[str, Any]) -> str:
    """Draw `bench switch`: attaches, and a switch back to a model, ours and the peer's."""
    attaches = {name.replace("_", " "): times for name, times in found["attach_ms"].items()}
    panels = [Bars("Attach of a resident pipeline", _ranged(attaches), ms)]
    for title, legs in (("", found), (", demo models", found["demo"])):
        named = {text: legs[name] for name, text in _LEGS.items()}
        panels.append(Bars(f"flux -> sdxl -> flux, third leg{title}", _ranged(named), ms))
    return svg_of("Switches among models on one node", panels, "Medians and ranges")


def serve_plot(found: Mapping[str, Any]) -> str:
    """Draw `bench serve`: each request, ours and the peer's."""
    panels = [
        Bars(
            line["what"],
            [Bar("Atelier", {"": line["ours_ms"]}), Bar("stock", {"": line["stock_ms"]}, is_peer=True)],
            ms,
        )
        for line in found["figures"]
    ]
    return svg_of("The demo cluster beside stock diffusers and transformers", panels, "Medians")


def llm_plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw `bench llm`: tokens a second by test; of the serving mode and openings, the latencies instead."""
    panels: list[Bars | Curves] = []
    tests: dict[str, list[Bar]] = {}
    for row in rows:
        if "avg_ts" not in row:
            panels += _latencies(row)
            continue
        low, high = min(row["samples_ts"]), max(row["samples_ts"])
        tests.setdefault(_test_of(row), []).append(Bar(row["build_commit"], {"": row["avg_ts"]}, low, high))
    panels += [Bars(test, bars, lambda value: f"{value:.1f} tokens/s") for test, bars in tests.items()]
    return svg_of("Language models", panels, "Means and ranges")


def _test_of(row: Mapping[str, Any]) -> str:
    parts = [f"{row[name]} tokens {what}" for name, what in (("n_prompt", "read"), ("n_gen", "written")) if row[name]]
    depth = f" behind {row['n_depth']}" if row["n_depth"] else ""
    return " + ".join(parts) + depth + (f", {row['n_parallel']} streams" if row.get("n_parallel", 1) > 1 else "")


def _latencies(row: Mapping[str, Any]) -> list[Bars | Curves]:
    """Return percentiles as curves where a row has them, else its times as bars."""
    names = [name.removesuffix("_p50") for name in row if name.endswith("_p50")]
    if names:
        curves = {name: [(float(part), row[f"{name}_p{part}"]) for part in (50, 90, 99)] for name in names}
        return [Curves(f"Latency at {row.get('rate_per_s', '?')} requests a second", "percentile", "ms", curves)]
    times = {name: value for name, value in row.items() if name.endswith("_ms") and isinstance(value, int | float)}
    times |= {name: 1e3 * row[name] for name in row if name.endswith("_s") and isinstance(row[name], int | float)}
    return [Bars("Times", _rows(times), ms)] if times else []


def _rows(values: Mapping[str, float]) -> list[Bar]:
    return [Bar(name, {"": value}) for name, value in values.items()]


def _ranged(found: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    """Return the rows of switches: those of diffusers are the peer's."""
    return [
        Bar(name, {"": times["p50"]}, times["low"], times["high"], is_peer=name.startswith("diffusers"))
        for name, times in found.items()
    ]


PLOTS: Final[Mapping[str, Callable[[Any], str]]] = {
    "load": load_plot,
    "switch": switch_plot,
    "serve": serve_plot,
    "llm": llm_plot,
}
