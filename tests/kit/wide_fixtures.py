"""The hook by which plugins surround the setup of fixtures that are wider than a test."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager

import pytest

Fixture = pytest.FixtureDef[object]
Surroundings = Callable[[Fixture, pytest.FixtureRequest], AbstractContextManager[None]]
SetupHook = Callable[[Fixture, pytest.FixtureRequest], Generator[None, object, object]]


def around_wide_fixtures(surroundings: Surroundings) -> SetupHook:
    """Return a plugin's `pytest_fixture_setup`: wider fixtures than a test's are set up in `surroundings`."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(fixturedef: Fixture, request: pytest.FixtureRequest) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        with surroundings(fixturedef, request):
            return (yield)

    return pytest_fixture_setup
