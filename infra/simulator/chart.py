"""A run as an SVG chart: workers over time coloured by model, switches hatched, and curves of queue and latency."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from html import escape
from typing import Final

from infra.simulator.world import World

WIDTH: Final = 1200
LEFT: Final = 90
PLOT: Final = WIDTH - LEFT - 20
MAX_ROWS: Final = 64  # workers that are drawn, the first ones
CURVE_HEIGHT: Final = 90
NUM_POINTS: Final = 240
_STYLE: Final = (
    "<style>text{font:11px sans-serif;fill:#333}.t{font-weight:bold;font-size:13px}"
    ".s{fill:url(#hatch);stroke:#222;stroke-width:.4}.g{stroke:#ddd}</style>"
    '<defs><pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="4" height="4" fill="#fff" fill-opacity=".55"/><line y2="4" stroke="#111" stroke-width="1.6"/>'
    "</pattern></defs>"
)


def chart_of(world: World, title: str) -> str:
    """Return the SVG text of a run that has ended."""
    end_s = max(world.now_s, 1e-9)
    names = [model.id for model in world.scenario.models]
    colours = {name: _colour(index, len(names)) for index, name in enumerate(names)}
    rows = list(world.workers)[:MAX_ROWS]
    height = max(6, min(20, 480 // max(len(rows), 1)))
    body = [f'<text class="t" x="10" y="18">{escape(title)}</text>', *_legend(names, colours)]
    top = 54
    places = {worker: top + index * (height + 2) for index, worker in enumerate(rows)}
    if height >= 10:
        body += [f'<text x="10" y="{y + height - 3}">{escape(worker[:12])}</text>' for worker, y in places.items()]
    shared: dict[str, list[float]] = {}
    for span in sorted(world.spans, key=lambda span: span.is_switch):
        if span.worker in places:
            x, width = LEFT + span.start_s / end_s * PLOT, max((span.end_s - span.start_s) / end_s * PLOT, 0.4)
            # Models that are there at the same time lie under each other, thinner ones on top.
            others = shared.setdefault(span.worker, [])
            depth = 0 if span.is_switch else sum(end > span.start_s + 1e-9 for end in others)
            if not span.is_switch:
                others.append(span.end_s)
            y, thick = places[span.worker] + 2 * min(depth, 3), max(height - 2 * min(depth, 3), 2)
            what = "switches to" if span.is_switch else "has"
            tip = f"{span.worker} {what} {span.model}, {span.start_s:.1f} to {span.end_s:.1f} s"
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{thick}"'
            body.append(f'<rect {box} fill="{colours[span.model]}"><title>{escape(tip)}</title></rect>')
            if span.is_switch:
                body.append(f'<rect class="s" {box}/>')
    y = top + len(rows) * (height + 2) + 30
    step_s = end_s / NUM_POINTS
    starts, ends = [request.at_s for request in world.scenario.requests], [each.started_s for each in world.served]
    waiting = [float(came - begun) for came, begun in zip(_counts(starts, step_s), _counts(ends, step_s), strict=True)]
    body += _curve(y, "requests that wait", waiting, "#b03030")
    y += CURVE_HEIGHT + 36
    body += _curve(y, "latency of requests that end, s (mean)", _latency(world, step_s), "#3050b0")
    y += CURVE_HEIGHT + 18
    for part in range(6):
        x = LEFT + part * PLOT / 5
        body.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{end_s * part / 5:.0f} s</text>')
    size = f'width="{WIDTH}" height="{y + 12}" viewBox="0 0 {WIDTH} {y + 12}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{_STYLE}{"".join(body)}</svg>\n'


def _legend(names: Sequence[str], colours: dict[str, str]) -> list[str]:
    parts = []
    for index, name in enumerate(names[:16]):
        x = LEFT + index * 68
        parts.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{colours[name]}"/>')
        parts.append(f'<text x="{x + 13}" y="37">{escape(name[:8])}</text>')
    return parts


def _curve(y: float, title: str, values: Sequence[float], colour: str) -> list[str]:
    most = max(values, default=0.0) or 1.0
    points = " ".join(
        f"{LEFT + index * PLOT / max(len(values) - 1, 1):.1f},{y + CURVE_HEIGHT * (1 - value / most):.1f}"
        for index, value in enumerate(values)
    )
    return [
        f'<text x="{LEFT}" y="{y - 6}">{escape(title)}</text>',
        f'<line class="g" x1="{LEFT}" x2="{LEFT + PLOT}" y1="{y + CURVE_HEIGHT}" y2="{y + CURVE_HEIGHT}"/>',
        f'<text x="{LEFT - 6}" y="{y + 10}" text-anchor="end">{most:.4g}</text>',
        f'<text x="{LEFT - 6}" y="{y + CURVE_HEIGHT}" text-anchor="end">0</text>',
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
    ]


def _counts(times: Sequence[float], step_s: float) -> list[int]:
    """Return how many of the times are past at the end of each step."""
    counts = [0] * NUM_POINTS
    for at_s in times:
        counts[min(int(at_s / step_s), NUM_POINTS - 1)] += 1
    for index in range(1, NUM_POINTS):
        counts[index] += counts[index - 1]
    return counts


def _latency(world: World, step_s: float) -> list[float]:
    sums, counts = [0.0] * NUM_POINTS, [0] * NUM_POINTS
    for served in world.served:
        index = min(int(served.ended_s / step_s), NUM_POINTS - 1)
        sums[index] += served.latency_s
        counts[index] += 1
    return [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]


def _colour(index: int, count: int) -> str:
    """Return colours that lie apart: the hue goes round by the golden ratio, lightness in three steps."""
    red, green, blue = colorsys.hls_to_rgb((index * 0.618034) % 1.0, (0.5, 0.68, 0.36)[index % 3], 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
