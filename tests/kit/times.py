"""The times of tests: `--times FILE` writes a line for each, the processor's seconds first.

A pytest plugin. A busy machine changes the seconds that pass more than those of the processor, which are those of the
test's process and of its children that have ended. A wider fixture counts for the first test that wants it.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

_PROPERTY = "processor_s"
_ROW: Final = re.compile(r"^\| [\d.]+ \| ([\d.]+) \| \d+ \| (\S+\.py) \|$", re.MULTILINE)
PAGE: Final = Path(__file__).parents[1] / "times.md"  # of `make test`
LONG_PAGE: Final = PAGE.with_name("times-long.md")


def stored_seconds(page: Path) -> dict[str, float]:
    """Return the seconds that passed in the files that a page names (infra/times_report.py)."""
    return {file: float(seconds) for seconds, file in _ROW.findall(page.read_text())}


class Times:
    """The lines of one run, in the process that hears of all tests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed_s: dict[str, float] = {}
        self._processor_s: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed_s[report.nodeid] = self._passed_s.get(report.nodeid, 0.0) + report.duration
        for name, seconds in report.user_properties:
            if name == _PROPERTY:
                assert isinstance(seconds, float)
                self._processor_s[report.nodeid] = seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        ordered = sorted(self._processor_s.items(), key=lambda one: -one[1])
        lines = [f"{seconds:.3f}\t{self._passed_s[test]:.3f}\t{test}\n" for test, seconds in ordered]
        self._path.write_text("".join(lines))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, help="write what each test takes to this file")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--times")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times(path), "times of tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_BEGUN] = _processor_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append((_PROPERTY, _processor_s() - item.stash[_BEGUN]))
    return report


_BEGUN = pytest.StashKey[float]()


def _processor_s() -> float:
    """Return the processor's seconds of this process and its ended children."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime
