"""Copies of the process that has collected all tests: `--forks 3` has three, and they run them.

A pytest plugin. Libraries are imported and tests collected once. A copy that has nothing to do takes the next file, of
those that `tests/times.md` knows the longest first, so that all copies end at once. The first process tells of all
tests, one that was not run because its copy ended included.

HAZARD: a copy has no thread but the one that forked. A run whose collecting has begun one is refused. A library's own
are not seen: onnxruntime has one, without which it computes all the same, but for which it waits when it is unloaded.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import selectors
import signal
import sys
import threading
from typing import Any, Final

import pytest
from kit.times import PAGE, stored_seconds

_NUMBER_BYTES: Final = 4
_LOOK_EVERY_S: Final = 0.2  # at copies that have ended: what a test has forked may keep their pipes open


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run tests in N copies of this process")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("--forks")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    if threading.active_count() > 1:
        raise pytest.UsageError(f"--forks: collecting, or a plugin, has begun threads: {threading.enumerate()}")
    files = _longest_first(session.items)
    queue = _numbers(len(files))
    copies: dict[int, int] = {}
    for stream in (session.config.get_terminal_writer(), sys.stdout, sys.stderr):
        stream.flush()  # or each copy writes it once more
    for _ in range(count):
        pipe, end = os.pipe()
        if not (process_id := os.fork()):
            _become_copy(session.config, end)
            _run_files(session, files, queue)
            return True
        os.close(end)
        copies[pipe] = process_id
    os.close(queue)
    _Told(session).listen(copies)
    return True


def _longest_first(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the tests by file."""
    took_s = stored_seconds(PAGE)
    files = [list(tests) for _, tests in itertools.groupby(items, _file_of)]
    return sorted(files, key=lambda tests: -took_s.get(_file_of(tests[0]), 0.0))


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _numbers(count: int) -> int:
    """Return a pipe that has the numbers up to `count`: each is read by one copy, and then there is an end."""
    queue, end = os.pipe()
    os.write(end, b"".join(number.to_bytes(_NUMBER_BYTES) for number in range(count)))
    os.close(end)
    return queue


# In a copy


def _become_copy(config: Any, pipe: int) -> None:
    """Write nothing where the first process writes, and tell it of tests instead."""
    config.workerinput = {}  # as in a process of pytest-xdist: other plugins leave files to the first one
    config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process
    capturing = config.pluginmanager.getplugin("capturemanager")
    capturing.stop_global_capturing()  # into files that all copies would share
    capturing.start_global_capturing()
    capturing.suspend_global_capture()
    config.pluginmanager.register(_Telling(config, pipe))


def _run_files(session: Any, files: list[list[pytest.Item]], queue: int) -> None:
    """Run files until none is left. What is as wide as the session stays from one to the next."""
    while number := os.read(queue, _NUMBER_BYTES):
        for item, following in itertools.pairwise([*files[int.from_bytes(number)], session]):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


class _Telling:
    """Tells the first process of tests that begin, by their names, and of what came of them."""

    def __init__(self, config: pytest.Config, pipe: int) -> None:
        self._config = config
        self._file = os.fdopen(pipe, "wb")
        self._status = 0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._status = exitstatus

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """End the copy without unloading libraries, whose threads are not here to be waited for."""
        atexit._run_exitfuncs()
        os._exit(self._status)

    def _write(self, told: object) -> None:
        data = pickle.dumps(told)
        self._file.write(len(data).to_bytes(_NUMBER_BYTES) + data)
        self._file.flush()


# In the first process


class _Told:
    """The tests that copies have told of."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._ended: set[str] = set()
        self._running: dict[int, str] = {}  # by the pipe of a copy
        self._rests: dict[int, bytes] = {}
        self._deaths: list[str] = []

    def listen(self, copies: dict[int, int]) -> None:
        """Return when all copies (process ids, by their pipes) have ended. None of them outlives this call."""
        try:
            with selectors.DefaultSelector() as selector:
                for pipe in copies:
                    os.set_blocking(pipe, False)
                    selector.register(pipe, selectors.EVENT_READ)
                while copies:
                    for key, _ in selector.select(_LOOK_EVERY_S):
                        if not self._read(key.fd):
                            selector.unregister(key.fd)
                    for pipe in [pipe for pipe, process_id in copies.items() if self._has_ended(pipe, process_id)]:
                        if pipe in selector.get_map():
                            selector.unregister(pipe)
                        os.close(pipe)
                        del copies[pipe]
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):  # which a terminal sends to all of them
                # They end what their tests have begun; where SIGINT is ignored, as in the background, they cannot.
                stop = signal.SIGKILL if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT
                for process_id in copies.values():
                    os.kill(process_id, stop)
            for process_id in copies.values():
                os.waitpid(process_id, 0)
            raise
        self._report_lost()

    def _read(self, pipe: int) -> bool:
        """Take in what a copy has told by now. Returns whether it may tell more."""
        try:
            while data := os.read(pipe, 2**16):
                self._rests[pipe] = self._rests.get(pipe, b"") + data
                self._take_in(pipe)
        except BlockingIOError:
            return True
        return False

    def _take_in(self, pipe: int) -> None:
        """Take in what has come whole of a copy."""
        while len(rest := self._rests[pipe]) >= (end := _NUMBER_BYTES + int.from_bytes(rest[:_NUMBER_BYTES])):
            self._rests[pipe] = rest[end:]
            told = pickle.loads(rest[_NUMBER_BYTES:end])
            if isinstance(told, str):
                self._running[pipe] = told
            else:
                self._report(told)

    def _report(self, told: dict[str, Any]) -> None:
        session = self._session
        report = session.config.hook.pytest_report_from_serializable(config=session.config, data=told)
        if report.when == "teardown":
            self._ended.add(report.nodeid)
        session.config.hook.pytest_runtest_logreport(report=report)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _has_ended(self, pipe: int, process_id: int) -> bool:
        """Return whether a copy has ended, and take in its last words."""
        ended, status = os.waitpid(process_id, os.WNOHANG)
        if not ended:
            return False
        self._read(pipe)
        code = os.waitstatus_to_exitcode(status)
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._deaths.append(f"{process_id} ended with {code} behind the beginning of {self._running.get(pipe)}")
        return True

    def _report_lost(self) -> None:
        """Report the tests of which no copy has told, or else one that ended in no test, as failed."""
        lost = [item for item in self._session.items if item.nodeid not in self._ended]
        running = [item for item in self._session.items if item.nodeid in self._running.values()]
        for item in lost or (running[:1] if self._deaths else []):
            text = f"copies of this process ended: {'; '.join(self._deaths)}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)
