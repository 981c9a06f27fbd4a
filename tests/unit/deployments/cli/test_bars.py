"""The progress of commands, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from kit.clock import Clock
from kit.waiting import wait_until
from rich.console import Console

from deployments.console import progress
from deployments.console.progress import LINE_EVERY_S, Unit, followed, progress_bar


def console(*, is_terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=is_terminal, width=100), out


def test_a_log_has_a_line_now_and_then_with_an_estimate() -> None:
    clock, (screen, out) = Clock(), console(is_terminal=False)
    with progress_bar("verify [bold]", console=screen, clock=clock) as progress:
        for second in range(41):
            progress(second * 10**6, 40 * 10**6)
            clock.now_s += 1.0
    lines = out.getvalue().splitlines()
    assert len(lines) == int(40 / LINE_EVERY_S)
    assert lines[0].strip() == "10.0 s  verify [bold]: 25%, 10.0 MB of 40.0 MB, about 30 s left"
    assert lines[-1].strip() == "40.0 s  verify [bold]: 100%, 40.0 MB of 40.0 MB"


def test_of_what_has_hardly_begun_there_is_no_estimate() -> None:
    clock, (screen, out) = Clock(), console(is_terminal=False)
    with progress_bar("repair", console=screen, clock=clock) as progress:
        for done in (999, 1000):
            clock.now_s += LINE_EVERY_S
            progress(done, 100_000)
    assert ["left" in line for line in out.getvalue().splitlines()] == [False, True]


def test_what_is_done_soon_or_is_quiet_says_nothing_in_a_log() -> None:
    for quiet, seconds in ((False, LINE_EVERY_S - 1), (True, 100.0)):
        clock, (screen, out) = Clock(), console(is_terminal=False)
        with progress_bar("verify", quiet=quiet, console=screen, clock=clock) as progress:
            progress(0, 0)
            clock.now_s += seconds
            progress(1, 2)
        assert out.getvalue() == ""


def test_work_that_is_done_elsewhere_is_asked_for_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOOK_EVERY_S", 0.001)
    looks = iter([None, (1, 4), None, (3, 4), *[None] * 10**6])
    told: list[tuple[int, int]] = []
    with followed(lambda: next(looks), lambda done, total: told.append((done, total))):
        wait_until(lambda: len(told) == 2, "both reports")
    assert told == [(1, 4), (3, 4)]


@pytest.mark.parametrize(("unit", "shown"), [("bytes", "1.0/2.0 MB"), ("steps", "1000000/2000000"), ("share", "50 %")])
def test_a_terminal_has_a_bar(unit: Unit, shown: str) -> None:
    screen, out = console(is_terminal=True)
    with progress_bar("[b]quantize", unit, console=screen) as progress:
        progress(10**6, 2 * 10**6)
    assert "[b]quantize" in out.getvalue()
    assert shown in out.getvalue()
