"""The speeds of switches: what they took themselves, without the wait for others."""

from __future__ import annotations

import pytest

from deployments.modules.switches import SwitchLog, SwitchSpeeds
from deployments.records import SwitchReport


def test_speeds_are_what_switches_took_without_the_wait_for_room() -> None:
    speeds = SwitchSpeeds()
    warm = SwitchReport("m", 2000.0, 100.0, 50.0, 10, ("unet",), ())  # 1.8 s of it others ended
    cold = SwitchReport("m", 700.0, 600.0, 50.0, 10, ("unet",), (), storage_bytes=10)
    speeds.learn(1000, cold, 0.65)
    assert speeds.load_bytes_per_s == pytest.approx(1000 / 0.6, rel=1e-3)
    speeds.learn(1000, warm, 0.2)  # the first of its kind: nothing of the guess before it stays
    assert speeds.attach_bytes_per_s == pytest.approx(10_000)
    assert speeds.fixed_s == pytest.approx(0.05 + 0.3 * 0.05)  # 50 ms more than the report says: others had the cores
    before = SwitchSpeeds(*(getattr(speeds, name) for name in SwitchSpeeds.__slots__))
    speeds.learn(10, SwitchReport("m", 1.0, 0.0, 0.0, 0, (), ("unet",)), 0.0)
    speeds.learn(0, cold, 0.65)
    assert speeds == before


def test_what_takes_nothing_of_the_budget_has_its_time_all_the_same() -> None:
    speeds = SwitchSpeeds()
    speeds.learn(0, SwitchReport("m", 4.0, 3.0, 1.0, 10, ("unet",), ()), 0.0)
    assert (speeds.fixed_s, speeds.attach_bytes_per_s) == (pytest.approx(0.004), 10e9)


def test_the_log_keeps_the_last_reports() -> None:
    log = SwitchLog()
    for name in "abcdefga":
        log.note(name, 1, SwitchReport(name, 1.0, 1.0, 1.0, 1, ("unet",), ()), 0.002)
    found = log.describe()
    assert (found["num_switches"], list(found["last_switches"])) == (8, list("defga"))
