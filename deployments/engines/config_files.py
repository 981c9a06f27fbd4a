"""Small files beside weights, read without torch: the control plane asks of them what the engines will."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deployments.engines.protocol import EngineError


def read_config(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises EngineError naming the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise EngineError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value
