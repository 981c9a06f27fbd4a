"""The tests that run a line: its contexts under `coverage run`. That of a wider fixture is the file or folder.

A pytest plugin. What imports and other processes run has no context.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator

import pytest
from kit.wide_fixtures import around_wide_fixtures


@contextlib.contextmanager
def _context(name: str) -> Iterator[None]:
    measuring = (coverage := sys.modules.get("coverage")) and coverage.Coverage.current()
    if not measuring:
        yield
        return
    before, _Current.name = _Current.name, name
    measuring.switch_context(name)
    try:
        yield
    finally:
        _Current.name = before
        measuring.switch_context(before)


class _Current:
    name = ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with _context(item.nodeid):
        return (yield)


pytest_fixture_setup = around_wide_fixtures(lambda _, request: _context(request.node.nodeid))
