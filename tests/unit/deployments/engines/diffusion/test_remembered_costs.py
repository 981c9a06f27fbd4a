"""Measured step costs outlive their process, in a file that may be anything."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from kit.seeding import seeded_random

from deployments.engines.costs.step_costs import MAX_SUBJECTS, RememberedCosts, StepCosts


def measured(chance: random.Random, num_kinds: int = 3) -> StepCosts:
    costs = StepCosts()
    for kind in range(num_kinds):
        for rows in (1, 2, 5, 16):
            costs.note_call(f"kind {kind}", rows, chance.uniform(0.01, 0.0101) * rows**0.4)
    return costs


def test_another_process_knows_the_same_costs(tmp_path: Path) -> None:
    costs = {f"subject {number}": measured(seeded_random()) for number in range(3)}
    for subject, one in costs.items():
        RememberedCosts(tmp_path).keep_figures(subject, one.figures())
    for subject, one in costs.items():
        recalled = RememberedCosts(tmp_path).recall_costs(subject)
        for kind in ("kind 0", "kind 2", "unknown"):
            for rows in (1, 3, 16, 20):
                assert recalled.seconds(kind, rows) == pytest.approx(one.seconds(kind, rows))
            assert recalled.max_rows_to_try(kind) == one.max_rows_to_try(kind)
    assert [file.name for file in tmp_path.iterdir()] == ["step_costs.json"], "nothing half-written"


def test_the_file_is_bounded_and_the_newest_stay(tmp_path: Path) -> None:
    remembered = RememberedCosts(tmp_path)
    costs = measured(seeded_random(), num_kinds=500)
    for number in range(MAX_SUBJECTS + 5):
        remembered.keep_figures(str(number), costs.figures())
    assert (tmp_path / "step_costs.json").stat().st_size < 2**20
    assert not remembered.recall_costs("4").figures()
    newest = remembered.recall_costs(str(MAX_SUBJECTS + 4))
    assert newest.seconds("kind 499", 5) == costs.seconds("kind 499", 5)
    assert newest.seconds("kind 0", 5) == 0, "the oldest kinds had no room"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[1]",
        b"{",
        json.dumps({"version": 2, "subjects": {"a": {"k": {"1": 1.0}}}}).encode(),
        json.dumps({"version": 1, "subjects": {"a": {"k": {"-1": 1.0, "x": 2, "2": "y", "3": -1}, "l": 7}}}).encode(),
        json.dumps({"version": 1, "subjects": [1]}).encode(),
    ],
)
def test_what_is_no_such_file_is_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step_costs.json").write_bytes(content)
    remembered = RememberedCosts(tmp_path)
    assert not any(remembered.recall_costs("a").figures().values())
    remembered.keep_figures("a", {"k": {"1": 0.5}})
    assert remembered.recall_costs("a").seconds("k", 1) == 0.5
