"""Small files beside weights, read without torch: the control plane asks of them what the engines will."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deployments.engines.records.protocol import EngineError
from weights.formats.folder import read_json
from weights.records.errors import FormatError


def read_config(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises EngineError naming the file."""
    try:
        return read_json(path)
    except FormatError as error:
        raise EngineError(str(error)) from None
