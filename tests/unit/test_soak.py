"""A soak is drawn by its seed alone, its verdict tells figures that grew from those that hold, and its clock steps."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from kit.clock import Clock
from kit.seeding import seeded_random
from soak.deaths import Deaths
from soak.schedule import (
    CALM_SHARE,
    DISTURBANCES,
    NUM_SIXTHS,
    REQUESTS,
    Event,
    drawn_requests,
    drawn_sixths,
    sixth_s,
)
from soak.verdicts import Figure, Verdict, middle, percentile, verdicts

ROOT = Path(__file__).parents[2]
WALL_CLOCK = ROOT / "tests/nodes/wall_clock.c"


def drawn(seed: int, minutes: float = 60.0) -> list[Event]:
    return [event for sixth in drawn_sixths(seed, minutes) for event in sixth]


def test_a_seed_draws_the_same_each_time_and_in_each_process() -> None:
    seed = seeded_random().getrandbits(31)
    assert drawn(seed) == drawn(seed)
    assert drawn(seed) != drawn(seed + 1)
    first = [*itertools.islice(drawn_requests(seed, 1), 50)]
    assert first == [*itertools.islice(drawn_requests(seed, 1), 50)]
    assert first != [*itertools.islice(drawn_requests(seed, 2), 50)]
    code = f"from soak.schedule import drawn_sixths; print(drawn_sixths({seed}, 60.0))"
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert elsewhere.stdout.strip() == str(drawn_sixths(seed, 60.0))


def test_each_disturbance_comes_as_often_as_the_others_and_none_in_the_calm() -> None:
    minutes = seeded_random().uniform(6, 60)
    sixths = drawn_sixths(seeded_random().getrandbits(31), minutes)
    counts = Counter(event.what for sixth in sixths for event in sixth)
    assert len(sixths) == NUM_SIXTHS
    assert counts.keys() == {*DISTURBANCES}
    assert max(counts.values()) - min(counts.values()) <= 1
    assert all(0 < event.at_s < (1 - CALM_SHARE) * sixth_s(minutes) for sixth in sixths for event in sixth)
    assert all(one.at_s < other.at_s for sixth in sixths for one, other in itertools.pairwise(sixth))


def test_all_kinds_of_requests_are_drawn() -> None:
    number = seeded_random().getrandbits(31)
    counts = Counter(kind for kind, _ in itertools.islice(drawn_requests(number, 0), 5000))
    assert counts.keys() == REQUESTS.keys()
    for kind, weight in REQUESTS.items():
        assert counts[kind] == pytest.approx(5000 * weight / sum(REQUESTS.values()), rel=0.5)


@pytest.mark.parametrize(
    ("early", "late", "unit", "word"),
    [
        (1000, 1050, "threads", "holds"),
        (1000, 1053, "threads", "GREW"),
        (10, 12, "threads", "holds"),  # what is one object of whoever counts is no growth
        (100 * 2**20, 104 * 2**20, "bytes", "holds"),
        (100 * 2**20, 107 * 2**20, "bytes", "GREW"),
        (100 * 2**20, 50 * 2**20, "bytes", "holds"),
        (0, 3, "files", "GREW"),
    ],
)
def test_what_is_more_by_a_twentieth_grew(early: float, late: float, unit: str, word: str) -> None:
    assert Verdict("a figure", unit, early, late, is_judged=True).word == word
    assert Verdict("a figure", unit, early, late, is_judged=False).word == {"GREW": "more"}.get(word, word)


def test_the_first_figures_are_compared_with_the_last_ones() -> None:
    taken = [{"files": Figure(number, "files")} for number in (100, 900, 120)]
    new = {"other": Figure(7, "files")}
    assert [(one.name, one.early, one.late, one.word) for one in verdicts([taken[0], taken[1], taken[2] | new])] == [
        ("files", 100, 120, "GREW"),
        ("other", 0, 7, "GREW"),
    ]


@pytest.mark.parametrize(
    ("machine", "answers", "word"),
    [
        ((10.0, 10.0), (100.0, 105.5), "holds"),
        ((10.0, 10.0), (100.0, 106.5), "GREW"),
        ((10.0, 11.0), (100.0, 116.0), "holds"),  # 1.1 x 1.05 x 100 + 1
        ((10.0, 11.0), (100.0, 117.0), "GREW"),
        ((11.0, 10.0), (100.0, 105.5), "holds"),  # a quicker machine is held to the same bound
    ],
)
def test_a_machine_that_became_slower_is_no_growth(
    machine: tuple[float, float], answers: tuple[float, float], word: str
) -> None:
    """The factor is that of the same percentile."""
    taken = [
        {
            "machine p50": Figure(10.0, "ms", False),
            "machine p95": Figure(machine[number], "ms", False),
            "chat p95": Figure(answers[number], "ms"),
        }
        for number in (0, 1)
    ]
    assert {one.name: one.word for one in verdicts(taken)}["chat p95"] == word


def test_figures_of_a_short_run_are_compared_from_its_middle_on() -> None:
    taken = [{"files": Figure(number, "files")} for number in (1, 10, 100, 101, 102, 103)]
    assert [one.early for one in verdicts(taken, 6)] == [100]
    assert [one.early for one in verdicts(taken, 30)] == [1]
    assert [one.early for one in verdicts(taken[:1], 6)] == [1]
    assert verdicts([], 6) == []


@pytest.mark.parametrize(
    ("name", "unit", "early", "late", "words"),
    [
        ("private memory, all", "bytes", 400 * 2**20, 490 * 2**20, ("GREW", "holds")),
        ("private memory, all", "bytes", 400 * 2**20, 510 * 2**20, ("GREW", "GREW")),
        ("/dev/shm", "bytes", 400 * 2**20, 440 * 2**20, ("GREW", "GREW")),
        ("temporary, files", "files", 36, 56, ("GREW", "holds")),
        ("temporary, files", "files", 36, 60, ("GREW", "GREW")),
        ("store, files", "files", 36, 44, ("GREW", "GREW")),
        ("log per request", "B", 5, 900, ("GREW", "holds")),
        ("log per request", "B", 5, 2000, ("GREW", "GREW")),
    ],
)
def test_a_short_run_allows_for_processes_that_do_something_for_the_first_time(
    name: str, unit: str, early: float, late: float, words: tuple[str, str]
) -> None:
    taken = [{name: Figure(early, unit)}, {name: Figure(late, unit)}]
    assert tuple(verdicts(taken, minutes)[0].word for minutes in (60, 6)) == words


def test_a_figure_is_the_median_of_its_samples() -> None:
    samples = [{"files": Figure(number, "files")} for number in (5, 900, 7)] + [{"new": Figure(1, "ms", False)}]
    assert middle(samples) == {"files": Figure(7, "files"), "new": Figure(1, "ms", False)}
    assert percentile([*range(100)], 0.5) == 50
    assert percentile([*range(100)], 0.95) == 95
    assert percentile([3.0], 0.95) == 3.0


def test_who_asked_before_all_was_whole_again_is_told_of_a_death() -> None:
    clock = Clock()
    deaths = Deaths(clock)
    assert not deaths.explain("answer", clock())
    deaths.begin("worker")
    assert deaths.explain("stream", clock())
    assert not deaths.explain("answer", clock())  # another worker answers
    deaths.end()
    asked_s = clock()
    clock.now_s += 100.0
    assert deaths.explain("stream", asked_s)
    assert not deaths.explain("stream", clock())


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "infra/demo")
    return importlib.import_module("soak.asking")


class Server:
    """Answers in turn, in the place of a cluster."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]

    def ask(self, _: object) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def asked_once(asking: Any, kind: str, deaths: Deaths, *answers: Any) -> Any:
    question = asking.Question(kind, "/", {"model": "adder"}, 0, bool)
    load = asking.Load("http://127.0.0.1:1", 0, [question], {0: np.array([1, 9])}, deaths, pause_s=0.0)
    load.ask(Server(*answers), kind, 0)
    return load.outcome


def test_an_answer_counts_as_right_only_where_it_is_the_first_one(asking: Any) -> None:
    right, wrong, short = np.array([1, 9]), np.array([1, 8]), np.array([1])
    assert asked_once(asking, "chat", Deaths(), right).right == {"chat": 1}
    for one in (wrong, short):
        outcome = asked_once(asking, "chat", Deaths(), one)
        assert not outcome.right
        assert "WRONG" in outcome.problems[0]
    assert "503 busy" in asked_once(asking, "chat", Deaths(), asking.Lost("503 busy")).problems[0]
    assert asked_once(asking, "left chat stream", Deaths(), None).right == {"left chat stream": 1}


def test_who_lost_a_connection_asks_again_only_after_a_death_that_explains_it(asking: Any) -> None:
    deaths, right = Deaths(), np.array([1, 9])
    deaths.begin("worker")
    broken = asking.Broken("a stream ended")
    outcome = asked_once(asking, "chat stream", deaths, broken, broken, right)
    assert (outcome.right, outcome.again, outcome.problems) == ({"chat stream": 1}, {"chat stream": 2}, [])
    assert asked_once(asking, "chat", deaths, httpx.ReadError("closed"), right).problems  # another worker has it
    assert asked_once(asking, "chat stream", Deaths(), broken, right).problems
    outcome = asked_once(asking, "chat stream", deaths, *[broken] * 9)
    assert "no answer in" in outcome.problems[0]


@pytest.mark.skipif(not shutil.which("cc") or sys.platform != "linux", reason="needs a C compiler")
def test_a_wall_clock_steps_while_its_process_runs(tmp_path: Path) -> None:
    library, clock = tmp_path / "wall_clock.so", tmp_path / "clock"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, WALL_CLOCK], check=True)
    clock.write_bytes(bytes(8))
    code = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"LD_PRELOAD": str(library), "WALL_CLOCK": str(clock)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for off_s in (0, 7200, -10_000, 0):
            with clock.open("r+b") as file:
                file.write(struct.pack("q", off_s))
            before = time.time(), time.monotonic()
            process.stdin.write("\n")
            process.stdin.flush()
            wall_s, steady_s = map(float, process.stdout.readline().split())
            assert before[0] <= wall_s - off_s <= time.time()
            assert before[1] <= steady_s <= time.monotonic()
        process.stdin.close()
