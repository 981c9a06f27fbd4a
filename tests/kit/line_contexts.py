"""The tests that run a line: its contexts under `coverage run`. That of a wider fixture is the file or folder.

A pytest plugin. What imports and other processes run has no context.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator

import pytest


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


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    if fixturedef.scope == "function":
        return (yield)
    with _context(request.node.nodeid):
        return (yield)
