"""Step costs of earlier runs, by what they were measured on: a new worker chooses batch sizes well from its first step.

One small file beside the other measurements that are remembered. It saves time only: whatever is wrong, it is empty.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from deployments.engines.step_costs import StepCosts
from weights.private_folder import cache_folder, recall, remember

MAX_SUBJECTS: Final = 32  # newest last
MAX_SUBJECT_BYTES: Final = 2**14
VERSION: Final = 1


class RememberedCosts:
    """The file of one user, whose processes all write it; of two that write at once, one may be lost. Thread-safe."""

    def __init__(self, folder: Callable[[], Path] = cache_folder) -> None:
        self._file = folder() / "step_costs.json"
        self._lock = threading.Lock()

    def recall_costs(self, subject: str) -> StepCosts:
        """Return the costs that are remembered of a subject: a pipeline's structure on a kind of device."""
        costs = StepCosts()
        costs.begin_with(self._read().get(subject))
        return costs

    def keep_figures(self, subject: str, figures: dict[str, dict[str, float]]) -> None:
        """Remember figures in place of the earlier ones: the newest kinds, as many as there is room for."""
        kept: dict[str, dict[str, float]] = {}
        room_bytes = MAX_SUBJECT_BYTES
        for kind, sizes in reversed(figures.items()):
            room_bytes -= len(json.dumps({kind: sizes}))
            if room_bytes < 0:
                break
            kept = {kind: sizes} | kept
        with self._lock:
            subjects = self._read()
            subjects.pop(subject, None)
            subjects[subject] = kept
            newest = dict(list(subjects.items())[-MAX_SUBJECTS:])
            remember(self._file, json.dumps({"version": VERSION, "subjects": newest}).encode())

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(recall(self._file))
        except ValueError:  # JSON's and Unicode's
            return {}
        if not isinstance(content, dict) or content.get("version") != VERSION:
            return {}
        subjects = content.get("subjects")
        return subjects if isinstance(subjects, dict) else {}
