"""How figures are shown."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table


def print_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    table = Table("what", "Atelier ms", "stock ms", "stock / Atelier")
    for line in figures["figures"]:
        stock, ratio = line["stock_ms"], line["ratio"]
        table.add_row(
            line["what"], f"{line['ours_ms']:.1f}", f"{stock:.1f}" if stock else "", f"{ratio:.2f}" if ratio else ""
        )
    console = Console()
    console.print(table)
    overhead = "  ".join(f"{kind} {ms:.1f} ms" for kind, ms in figures["http_overhead_ms"].items())
    console.print(f"HTTP over the handle call: {overhead}   (medians of {figures['rounds']} rounds or more)")
