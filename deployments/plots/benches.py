"""The pictures of what `atelier bench` and `atelier inspect` tell: each takes the object that `--json` prints. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from deployments.plots.svg import Bar, Bars, Boxes, Curves, svg_of

_LEGS: Final = {
    "switch_ms": "Atelier",
    "touched_ms": "Atelier, every byte read",
    "diffusers_ms": "diffusers, loaded",
    "diffusers_touched_ms": "diffusers, every byte read",
    "moved_ms": "diffusers, copied",
    "lookup_ms": "diffusers, kept",
}


def ms(value: float) -> str:
    """Write milliseconds, as seconds where there are many."""
    return f"{value / 1e3:.2f} s" if value >= 10_000 else f"{value:.0f} ms" if value >= 10 else f"{value:.2f} ms"


def size(value: float) -> str:
    """Write bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def load_plot(found: Mapping[str, Any]) -> str:
    """Draw `bench load`: each loader cold and warm, and where the time of ours goes, by stage."""
    panels: list[Bars | Curves] = []
    for title, part in (("cold", found), ("warm", found["warm"])):
        named = {"raw O_DIRECT": part["raw_gbps"], "ours": part["ours_gbps"], **part["peers"]}
        ranges = part["range_gbps"]
        rows = [Bar(name, {"": gbps}, *ranges.get(name, (None, None))) for name, gbps in named.items()]
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
        Bars(line["what"], [Bar("Atelier", {"": line["ours_ms"]}), Bar("stock", {"": line["stock_ms"]})], ms)
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


def store_plot(records: Mapping[str, Mapping[str, int]], note: str) -> str:
    """Draw what models have in a store: bytes by model and component."""
    rows = [Bar(model, parts) for model, parts in records.items()]
    return svg_of("Models of the store", [Bars("Bytes by component", rows, size)], note)


def arena_plot(record: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Draw `atelier inspect graph`: where each buffer lies in the planned memory, and from which operation to which."""
    boxes = [
        (
            float(node["node"]),
            float(made["until"] - node["node"] + 1),
            float(made["offset"]),
            float(made["bytes"]),
            layer,
        )
        for node in nodes
        for made in node["makes"]
        for layer in [node["layer"] or record["part"]]
    ]
    what = f"{record['model']}, {record['part']}: {record['rows']} rows of {record['width']}x{record['height']} pixels"
    note = f"planned {size(record['plan_bytes'])}, as it runs {size(record['eager_bytes'])}"
    panel = Boxes("Buffers in their memory, by layer", "operation", "place", boxes, size)
    return svg_of(what, [panel], f"{note}; weights {size(record['weights_bytes'])} beside")


def _rows(values: Mapping[str, float]) -> list[Bar]:
    return [Bar(name, {"": value}) for name, value in values.items()]


def _ranged(found: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    return [Bar(name, {"": times["p50"]}, times["low"], times["high"]) for name, times in found.items()]


PLOTS: Final[Mapping[str, Callable[[Any], str]]] = {
    "load": load_plot,
    "switch": switch_plot,
    "serve": serve_plot,
    "llm": llm_plot,
}
