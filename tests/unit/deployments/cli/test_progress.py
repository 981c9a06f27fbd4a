"""Progress of a start: everything on a terminal, every change once in a log."""

from __future__ import annotations

import io
import itertools

import pytest
from kit.seeding import seeded_random
from rich.console import Console

from deployments.console.progress import (
    MAX_MODELS,
    StartDisplay,
    StartState,
    _model_line,
    _progress_lines,
    _progress_news,
    usable_line,
)

NOTHING = StartState()
HALF = StartState(
    {"ingress": (1, 1), "worker": (1, 2)},
    {"flux": "ready", "adder": "registering", "broken": "unavailable"},
    {"broken": "no config.json in /models/broken\nTraceback ..."},
)


def test_a_terminal_shows_replicas_and_the_models_that_are_not_there() -> None:
    assert _progress_lines(NOTHING) == []
    assert _progress_lines(HALF) == [
        "ingress: running",
        "worker: 1 of 2 replicas running",
        "models: 1 of 3 in the store",
        "model adder: entering the store",
        "model broken: unavailable: no config.json in /models/broken",
    ]


@pytest.mark.parametrize("num_models", [MAX_MODELS, MAX_MODELS + 1, 500])
def test_a_terminal_has_room_for_any_number_of_models(num_models: int) -> None:
    lines = _progress_lines(StartState({}, {f"m{number}": "registering" for number in range(num_models)}))
    assert len(lines) == 1 + MAX_MODELS
    named = sum(line.startswith("model ") for line in lines)
    hidden = sum(int(line.split()[2]) for line in lines if line.startswith("…"))
    assert named + hidden == num_models


def test_a_log_has_every_change_once() -> None:
    """In any order, replaying the news of each step gives the last line of everything."""
    rng = seeded_random()
    states = [NOTHING]
    for _ in range(30):
        known = rng.randrange(4)
        states.append(
            StartState(
                {name: (rng.randrange(3), 3) for name in ("ingress", "worker")[: known % 3]},
                {f"m{number}": rng.choice(["registering", "ready", "unavailable"]) for number in range(known)},
            )
        )
    for before, after in itertools.pairwise(states):
        news = _progress_news(before, after)
        assert len(news) == sum(before.replicas.get(name) != count for name, count in after.replicas.items()) + sum(
            before.models.get(model) != found for model, found in after.models.items()
        )
        assert _progress_news(after, after) == []


def test_a_log_has_plain_lines_with_the_time() -> None:
    out, now = io.StringIO(), iter([10.0, 13.25, 13.25, 13.25, 13.25, 13.25, 20.0])
    with StartDisplay("starting cluster 'one'", Console(file=out, width=40), lambda: next(now)) as display:
        display.show(HALF)
        display.show(HALF)
    assert out.getvalue().splitlines() == [
        "   3.2 s  ingress: running",
        "   3.2 s  worker: 1 of 2 replicas running",
        "   3.2 s  model flux: in the store",
        "   3.2 s  model adder: entering the store",
        "   3.2 s  model broken: unavailable: no config.json in /models/broken",
    ]


def test_a_terminal_is_left_as_it_was() -> None:
    """Names with brackets are no markup, and the display is gone when it is closed."""
    out = io.StringIO()
    display = StartDisplay("starting cluster '[bold]'", Console(file=out, width=80, force_terminal=True))
    with display:
        display.show(StartState({"worker": (0, 1)}, {"[red]": "registering"}))
        display.close()
        shown = out.getvalue()
    assert "[bold]" in shown
    assert out.getvalue() == shown


def test_models_that_cannot_be_asked_are_counted_and_named_with_the_reason() -> None:
    models = {"a": "ready", "b": "unloaded", "c": "updating"}
    assert usable_line(StartState(models=models)) == ""
    models |= {"big": "does_not_fit", "torn": "unavailable", "late": "registering"}
    problems = {"big": "needs 3 GiB", "torn": "disk full: 9 bytes were needed\nmore"}
    assert usable_line(StartState(models=models, problems=problems)) == (
        "3 of 6 models usable; not big: does not fit: needs 3 GiB; torn: unavailable: disk full: 9 bytes were needed; "
        "late: entering the store"
    )
    many = {f"m{number}": "unavailable" for number in range(20)}
    assert usable_line(StartState(models=many)).endswith("; m7: unavailable; and 12 more")


def test_a_step_is_said_before_there_is_anything_to_count() -> None:
    begun = StartState(step="Ray starts")
    assert _progress_news(NOTHING, begun) == ["Ray starts"]
    assert _progress_news(begun, begun) == []
    assert _progress_news(begun, HALF) == _progress_news(NOTHING, HALF)
    assert _progress_lines(begun) == ["Ray starts"]


@pytest.mark.parametrize(
    ("done", "rate", "expected"),
    [
        (0, 0.0, "╌" * 20 + " 0 bytes of 2.0 kB"),
        (500, 0.0, "━" * 5 + "╌" * 15 + " 500 bytes of 2.0 kB"),
        (500, 100.0, "━" * 5 + "╌" * 15 + " 500 bytes of 2.0 kB, 15 s left"),
        (2000, 100.0, "━" * 20 + " 2.0 kB of 2.0 kB"),
        (3000, 100.0, "━" * 20 + " 3.0 kB of 2.0 kB"),
    ],
)
def test_an_import_has_a_bar_and_the_time_that_is_left(done: int, rate: float, expected: str) -> None:
    state = StartState({}, {"m": "registering"}, imports={"m": (done, 2000)})
    assert _model_line(state, "m", rate) == f"model m: entering the store: {expected}"


def test_the_rate_is_that_since_an_import_was_first_seen() -> None:
    now_s = iter([10.0, 10.0, 14.0, 16.0])
    display = StartDisplay("", Console(file=io.StringIO()), lambda: next(now_s))
    found = [display._rate(StartState(imports={"m": (done, 900)})) for done in (100, 300, 700)]
    assert found == [0.0, 50.0, 100.0]
