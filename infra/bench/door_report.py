"""The tables of `infra.bench door`: its figures beside their targets."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console

from deployments.console.output import Column, print_line, print_table
from infra.bench.door_figures import Target

DOORS: Final = {"haproxy": "atelier", "serve": "Serve's proxy"}
STOCK, INFINITY = "stock", "infinity-emb"
MIB: Final = 2**20
MAX_GROWTH_BYTES: Final = 128 * MIB  # of the ingress under overload
MAX_MORE_FILES: Final = 8
_LATENCY_COLUMNS: Final = (
    Column("request", "text"),
    Column("callers", align="right"),
    Column("side", "text"),
    *(Column(header, align="right") for header in ("requests/s", "p50 ms", "p99 ms")),
)
_LOAD_COLUMNS: Final = (
    Column("load", "text"),
    *(
        Column(header, align="right")
        for header in ("sent", "in time", "429", "of peak", "of admitted", "p50 ms", "Retry-After")
    ),
)
_TARGET_COLUMNS: Final = (Column("target", "text"), Column("figure", align="right"), Column("bound"), Column(""))


def find_targets(found: Mapping[str, Any]) -> list[Target]:
    """Return the targets of the issue beside the figures: where there are several, the worst one."""
    own, kinds, targets = DOORS["haproxy"], found["doors"]["haproxy"], list[Target]()
    for kind in ("chat", "image"):
        ratio = _ratio(kinds[kind], "1", own, STOCK, "p50_ms")
        targets.append(Target(f"{kind}, one caller: p50 / stock's", ratio, 1.15))
    for num_callers, floor in (("1", 1.0), ("8", 1.0), ("64", 1.5)):
        ratio = _ratio(kinds["new embedding"], num_callers, own, INFINITY, "requests_per_s")
        targets.append(Target(f"new embeddings/s / infinity-emb's, {num_callers} callers", ratio, floor, is_floor=True))
    loads, health = found["overload"]["loads"], found["overload"]["health"]
    for name, load in loads.items():
        targets.append(Target(f"{name}: goodput / peak", load["goodput_share"], 0.9, is_floor=True))
        targets.append(Target(f"{name}: admitted in time", load["in_time_share"], 0.95, is_floor=True))
        targets.append(Target(f"{name}: error of Retry-After, median", load["retry_after"]["median_error"], 0.25))
        unsaid = load["without_retry_after"] if load["num_refused"] else None
        targets.append(Target(f"{name}: refused without Retry-After", unsaid, 0))
    targets.append(Target("/healthz under overload, p99", health["p99_ms"], 100, unit="ms"))
    targets.append(Target("/healthz under overload, failed", health["failed"], 0))
    memory, cancels, step = found["overload"]["ingress_bytes"], found["cancels"], found["cancelled_step"]
    growth = memory["most"] - memory["before"]
    targets.append(
        Target("ingress under overload: growth at the most", growth / MIB, MAX_GROWTH_BYTES / MIB, unit="MiB")
    )
    limit_ms = step["step_ms"] + step["poll_ms"]
    targets.append(Target("cancelled work runs on, at most a step and a poll", step["gone_ms"], limit_ms, unit="ms"))
    left = sum(cancels["after"][name] for name in ("denoising", "num_waiting", "leased_bytes"))
    targets.append(Target(f"{cancels['cancelled']} cancels: requests and leases left", left, 0))
    files = cancels["after"]["open_files"] - cancels["before"]["open_files"]
    targets.append(Target(f"{cancels['cancelled']} cancels: more open files", files, MAX_MORE_FILES))
    targets.append(Target("one of two ingress replicas killed: requests lost", found["kill"]["num_lost"], 0))
    return targets


def _ratio(figures: Mapping[str, Any], num_callers: str, one: str, other: str, name: str) -> float | None:
    sides = figures.get(num_callers, {})
    return sides[one][name] / sides[other][name] if one in sides and other in sides else None


def say(text: str) -> None:
    """Tell on stderr how far the measurement is."""
    Console(stderr=True).print(f"[{time.strftime('%H:%M:%S')}] {text}", markup=False)


def print_door_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print tables, or the figures as one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    for kinds in figures["doors"].values():
        print_latencies(kinds)
    print_loads(figures["overload"]["loads"])
    _print_targets(figures["targets"])
    for line in _show_lines(figures):
        print_line(line)


def print_overload_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print the figures of an overload alone as a table, or as one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    print_loads(figures["overload"]["loads"])
    health, peak = figures["overload"]["health"], figures["overload"]["peak"]
    print_line(f"capacity of the mix: {peak['requests_per_s']:.1f} requests/s")
    print_line(f"/healthz: p50 {health['p50_ms']:.1f} ms, p99 {health['p99_ms']:.1f} ms, {health['failed']} failed")
    if "kill" in figures:
        print_line(
            f"one ingress replica killed: {figures['kill']['num_lost']} of {figures['kill']['num_requests']} lost"
        )


def print_latencies(kinds: Mapping[str, Any], *, is_error: bool = False) -> None:
    """Print figures by kind, number of callers and side as a table, `is_error` on stderr."""
    rows = []
    for kind, by_callers in kinds.items():
        for num_callers, sides in by_callers.items():
            for side, one in sides.items():
                rate = f"{one['requests_per_s']:.1f}"
                rows.append([kind, num_callers, side, rate, _shown(one["p50_ms"]), _shown(one["p99_ms"])])
                if one["gap_p50_ms"] is not None:
                    rows.append([f"{kind}: first token", "", "", "", _shown(one["first_p50_ms"]), ""])
                    rows.append([f"{kind}: gap", "", "", "", _shown(one["gap_p50_ms"]), ""])
    print_table(_LATENCY_COLUMNS, rows, title="latency", is_error=is_error)


def print_loads(loads: Mapping[str, Any], *, is_error: bool = False) -> None:
    """Print the figures of loads by name as a table, `is_error` on stderr."""
    rows = []
    for name, load in loads.items():
        counts = [str(load[key]) for key in ("num_requests", "num_good", "num_refused")]
        shares = [_shown(load["goodput_share"], "{:.0%}"), _shown(load["in_time_share"], "{:.0%}")]
        retry = _shown(load["retry_after"]["median_error"], "{:.0%} off")
        rows.append([name, *counts, *shares, _shown(load["p50_ms"]), retry])
    print_table(_LOAD_COLUMNS, rows, title="overload", is_error=is_error)


def _print_targets(targets: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for one in targets:
        sign, bound = (">=", one["at_least"]) if "at_least" in one else ("<=", one["at_most"])
        limit = f"{sign} {bound:.4g} {one['unit']}"
        rows.append([one["what"], _shown(one["figure"], "{:.2f}"), limit, one["verdict"]])
    print_table(_TARGET_COLUMNS, rows, title="targets")


def _show_lines(figures: Mapping[str, Any]) -> list[str]:
    peak, cancels, kill = figures["overload"]["peak"], figures["cancels"], figures["kill"]
    costs = ", ".join(f"{kind} {cost_s * 1e3:.1f} ms" for kind, cost_s in peak["costs_s"].items())
    memory = {name: nbytes / MIB for name, nbytes in figures["overload"]["ingress_bytes"].items()}
    return [
        f"capacity of the mix: {peak['requests_per_s']:.1f} requests/s; one request costs: {costs}",
        f"ingress: {memory['before']:.0f} MiB before, {memory['most']:.0f} at the most, {memory['after']:.0f} after",
        f"{cancels['cancelled']} cancelled in {cancels['wall_s']:.0f} s; {cancels['answered']} were answered before, "
        f"{cancels['refused']} refused, {cancels['other']} ended otherwise",
        f"took {figures['took_s']:.0f} s; load average {figures['load_average'][0][0]:.1f} before, "
        f"{figures['load_average'][1][0]:.1f} after",
        f"one of {kill['num_ingresses']} ingress replicas killed: {kill['num_lost']} of {kill['num_requests']} "
        f"requests lost {kill['problems'] or ''}",
    ]


def _shown(figure: float | None, form: str = "{:.1f}") -> str:
    return "" if figure is None else form.format(figure)
