"""The pictures of what `atelier bench` and `atelier inspect` tell: each takes the object that `--json` prints. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

WIDTH: Final = 840
MAX_ROWS: Final = 60
MAX_BOXES: Final = 4000
_LEFT, _RIGHT, _ROW, _GAP = 230, 110, 22, 6
_PLOT: Final = WIDTH - _LEFT - _RIGHT
_HIGH: Final = 220  # of curves
_TALL: Final = 420  # of boxes
_PEER: Final = "#b9b7b0"
_COLORS: Final = ("#3349b4", "#b4552d", "#0f8a76", "#9055a2", "#8a6d00", "#00779e", "#b04050", "#557a2a", "#6b6b6b")
_UNFIT: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML 1.0 has no place for
_STYLE: Final = (
    "<style>text{font:12px system-ui,sans-serif;fill:#1b1b1a}.t{font-weight:600;font-size:15px}.m{fill:#5f5d58}"
    ".e{text-anchor:end}.g{stroke:#e0dfdb}</style>"
)


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of bars: parts one behind another, by name. `low` and `high` are the range that was measured.

    What `is_peer`, a measure beside which ours stands, is gray.
    """

    label: str
    parts: Mapping[str, float]
    low: float | None = None
    high: float | None = None
    is_peer: bool = False

    @property
    def total(self) -> float:
        """The length of all parts."""
        return math.fsum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Bars:
    """Rows of bars with one scale. `shown` writes a value."""

    title: str
    rows: Sequence[Bar]
    shown: Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves by name over one axis: points (x, y), both finite."""

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes over two axes, as (x, width, y, height, what it is); those of one thing have one color."""

    title: str
    x_label: str
    y_label: str
    boxes: Sequence[tuple[float, float, float, float, str]]
    shown: Callable[[float], str]  # of y


def svg_of(title: str, panels: Sequence[Bars | Curves | Boxes], note: str = "") -> str:
    """Return the picture of panels below each other. Raises ValueError for values that are no finite numbers from 0."""
    body, y = [f'<text class="t" x="16" y="28">{_text(title)}</text>'], 48.0
    if note:
        body.append(f'<text class="m" x="16" y="{y}">{_text(note)}</text>')
        y += 12
    for panel in panels:
        draw: Any = {Bars: _bars, Curves: _curves, Boxes: _boxes}[type(panel)]
        parts, y = draw(panel, y + 20)
        body += parts
    size = f'width="{WIDTH}" height="{y + 12:.0f}" viewBox="0 0 {WIDTH} {y + 12:.0f}"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}><title>{_text(title)}</title>{_STYLE}{ground}'
    return head + "".join(body) + "</svg>\n"


def _text(text: str) -> str:
    return escape(_UNFIT.sub("�", text))


def _checked(value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"a picture shows finite numbers from 0 on, got {value}")
    return value


def _bars(panel: Bars, y: float) -> tuple[list[str], float]:
    rows = panel.rows[:MAX_ROWS]
    scale = _PLOT / (max((_checked(max(row.total, row.high or 0)) for row in rows), default=0) or 1)
    names = list(dict.fromkeys(name for row in rows for name in row.parts))
    colors = {name: _COLORS[number % len(_COLORS)] for number, name in enumerate(names)}
    body = [f'<text class="t" x="16" y="{y}">{_text(panel.title)}</text>']
    if len(names) > 1:
        legend, y = _legend(colors, y + 22)
        body += legend
    y += 12
    for row in rows:
        body += _row(row, y, scale, colors, panel.shown)
        y += _ROW + _GAP
    if len(panel.rows) > MAX_ROWS:
        body.append(f'<text class="m" x="{_LEFT}" y="{y + 12}">and {len(panel.rows) - MAX_ROWS} more</text>')
        y += _ROW
    return body, y


def _boxes(panel: Boxes, y: float) -> tuple[list[str], float]:
    """Draw the largest boxes; y grows upwards."""
    boxes = sorted(panel.boxes, key=lambda box: -box[1] * box[3])[:MAX_BOXES]
    most_x = max((_checked(x) + _checked(wide) for x, wide, *_ in boxes), default=0) or 1.0
    most_y = max((_checked(low) + _checked(high) for _, _, low, high, _ in boxes), default=0) or 1.0
    left, room, top = 90.0, WIDTH - 90.0 - 30, y + 30
    body = [f'<text class="t" x="16" y="{y}">{_text(panel.title)}</text>']
    body.append(f'<text class="m" x="16" y="{top - 8}">{_text(panel.y_label)}</text>')
    for part in range(5):
        line, x = top + _TALL * (1 - part / 4), left + room * part / 4
        body.append(f'<line class="g" x1="{left}" x2="{left + room}" y1="{line}" y2="{line}"/>')
        body.append(f'<text class="m e" x="{left - 6}" y="{line + 4}">{_text(panel.shown(most_y * part / 4))}</text>')
        body.append(
            f'<text class="m" text-anchor="middle" x="{x}" y="{top + _TALL + 18}">{most_x * part / 4:.0f}</text>'
        )
    body.append(f'<text class="m e" x="{left + room}" y="{top + _TALL + 36}">{_text(panel.x_label)}</text>')
    colors = {
        name: _COLORS[number % len(_COLORS)] for number, name in enumerate(dict.fromkeys(box[4] for box in boxes))
    }
    for x, wide, low, high, what in boxes:
        place = f'x="{left + x / most_x * room:.2f}" y="{top + _TALL * (1 - (low + high) / most_y):.2f}"'
        size = f'width="{wide / most_x * room:.2f}" height="{high / most_y * _TALL:.2f}"'
        tip = _text(f"{what}: {panel.shown(high)} at {panel.shown(low)}, {x:.0f} to {x + wide:.0f}")
        body.append(
            f'<rect {place} {size} fill="{colors[what]}" stroke="#fff" stroke-width=".4"><title>{tip}</title></rect>'
        )
    return body, top + _TALL + 40


def _row(row: Bar, y: float, scale: float, colors: Mapping[str, str], shown: Callable[[float], str]) -> Iterator[str]:
    middle = y + _ROW / 2 + 4
    label = row.label if len(row.label) <= 34 else f"{row.label[:33]}…"
    yield f'<text class="e" x="{_LEFT - 8}" y="{middle}"><title>{_text(row.label)}</title>{_text(label)}</text>'
    x: float = _LEFT
    for name, value in row.parts.items():
        wide = _checked(value) * scale
        tip = _text(f"{row.label}, {name}: {shown(value)}" if name else f"{row.label}: {shown(value)}")
        box = f'x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW}"'
        yield f'<rect {box} fill="{_PEER if row.is_peer else colors[name]}"><title>{tip}</title></rect>'
        x += wide
    if row.low is not None and row.high is not None:
        start, end = _LEFT + _checked(row.low) * scale, _LEFT + row.high * scale
        path = f"M{start:.2f} {y + 6}v10M{end:.2f} {y + 6}v10M{start:.2f} {y + 11}H{end:.2f}"
        yield f'<path d="{path}" stroke="#fff" stroke-width="3.5" fill="none"/>'
        yield f'<path d="{path}" stroke="#1b1b1a" fill="none"/>'
        x = max(x, end)
    yield f'<text x="{x + 6:.2f}" y="{middle}">{_text(shown(row.total))}</text>'


def _legend(colors: Mapping[str, str], y: float) -> tuple[list[str], float]:
    """Return the names beside their colors, in as many lines as they need, and where the last one is."""
    body, x = [], 16.0
    for name, color in colors.items():
        shown = name if len(name) <= 28 else f"{name[:27]}…"
        wide = 24 + 7 * len(shown)
        if x > 16 and x + wide > WIDTH - 16:
            x, y = 16.0, y + 18
        body.append(f'<rect x="{x:.0f}" y="{y - 10}" width="11" height="11" fill="{color}"/>')
        body.append(f'<text x="{x + 16:.0f}" y="{y}">{_text(shown)}</text>')
        x += wide
    return body, y


def _curves(panel: Curves, y: float) -> tuple[list[str], float]:
    points = [(_checked(x), _checked(value)) for curve in panel.curves.values() for x, value in curve]
    most_x = max((x for x, _ in points), default=0) or 1.0
    most_y = max((value for _, value in points), default=0) or 1.0
    colors = {name: _COLORS[number % len(_COLORS)] for number, name in enumerate(panel.curves)}
    body = [f'<text class="t" x="16" y="{y}">{_text(panel.title)}</text>']
    legend, y = _legend(colors, y + 22)
    body += legend
    left, wide, top = 70.0, WIDTH - 70.0 - 30, y + 26
    body.append(f'<text class="m" x="16" y="{top - 8}">{_text(panel.y_label)}</text>')
    for part in range(5):
        x, high = left + wide * part / 4, top + _HIGH * (1 - part / 4)
        body.append(f'<line class="g" x1="{left}" x2="{left + wide}" y1="{high}" y2="{high}"/>')
        body.append(f'<text class="m e" x="{left - 6}" y="{high + 4}">{most_y * part / 4:.3g}</text>')
        body.append(
            f'<text class="m" text-anchor="middle" x="{x}" y="{top + _HIGH + 18}">{most_x * part / 4:.3g}</text>'
        )
    body.append(f'<text class="m e" x="{left + wide}" y="{top + _HIGH + 36}">{_text(panel.x_label)}</text>')
    for name, curve in panel.curves.items():
        places = [(left + x / most_x * wide, top + _HIGH * (1 - value / most_y), x, value) for x, value in curve]
        line = " ".join(f"{x:.1f},{at:.1f}" for x, at, _, _ in places)
        body.append(f'<polyline points="{line}" fill="none" stroke="{colors[name]}" stroke-width="2"/>')
        for x, at, given, value in places:
            tip = _text(f"{name}: {value:.4g} at {given:.4g}")
            body.append(f'<circle cx="{x:.1f}" cy="{at:.1f}" r="3" fill="{colors[name]}"><title>{tip}</title></circle>')
    return body, top + _HIGH + 40


def ms(value: float) -> str:
    """Write milliseconds, as seconds where there are many."""
    if value >= 10_000:
        return f"{value / 1e3:.2f} s"
    return f"{value:.{0 if value >= 10 else 2 if value >= 0.1 else 3}f} ms"


def size(value: float) -> str:
    """Write bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def store_plot(records: Mapping[str, Mapping[str, int]], note: str) -> str:
    """Draw what models have in a store: bytes by model and component."""
    rows = [Bar(model, parts) for model, parts in records.items()]
    return svg_of("Models of the store", [Bars("Bytes by component", rows, size)], note)
