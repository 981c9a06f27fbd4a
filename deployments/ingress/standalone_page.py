"""A page as one file that asks nobody: its modules, style and data are in it, for whoever has no server at hand."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from deployments.ingress.web_pages import FOLDER, imports_of

_NAME: Final = "atelier/"  # modules of a page without an address find each other by names of their own
_RELATIVE: Final = re.compile(r'(^(?:import|export) (?:[^;]*? from )?)"\./', re.MULTILINE)
# Modules are addresses of data, so what is written into the file is all that runs; nothing is fetched.
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
<script type="importmap">{imports}</script>
</head>
<body class="cluster-page">
<main id="main" tabindex="-1"></main>
<script type="application/json" id="runs">{data}</script>
<script type="module">import "{entry}";</script>
</body>
</html>
"""


def simulated_page(title: str, recordings: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML of runs of the simulator beside each other, those of `recording_of`."""
    entry = "simulated.js"
    sources = {str(path.relative_to(FOLDER)): path.read_bytes() for path in FOLDER.rglob("*.js")}
    imports = {f"{_NAME}{name}": _address_of(sources[name].decode()) for name in imports_of(entry, sources)}
    return _PAGE.format(
        policy=_POLICY,
        title=html.escape(title),
        style=(FOLDER / "style.css").read_text(encoding="utf-8"),
        imports=_json_in_html({"imports": imports}),
        data=_json_in_html(recordings),
        entry=f"{_NAME}{entry}",
    )


def _address_of(source: str) -> str:
    script = _RELATIVE.sub(rf'\1"{_NAME}', source).encode()
    return f"data:text/javascript;base64,{base64.b64encode(script).decode()}"


def _json_in_html(value: Any) -> str:
    """Return JSON that ends no element, whatever names are in it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
