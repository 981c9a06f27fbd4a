"""The names of a pipeline's solvers, without torch; `solvers.py` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.engines.libraries.library_classes import has_part_class
from deployments.engines.records.protocol import EngineError


def check_solver(folder: Path, model_index: Mapping[str, Any]) -> str:
    """Return the class of the solver that a pipeline's model_index.json names. Raises EngineError unless it can run."""
    named = model_index.get("scheduler")
    library, class_name = map(str, named[:2]) if isinstance(named, list) and len(named) > 1 else (None, None)
    is_solver = library == "diffusers" and str(class_name).endswith("Scheduler")
    if class_name is None or not is_solver or not has_part_class("diffusers", class_name):
        raise EngineError(f"{folder}: model_index.json names solver {library}.{class_name}; expected one of diffusers")
    return class_name
