"""Cases that are drawn: `make test` runs a few cases of a long table, `make test-long` those that were not drawn.

A pytest plugin. `@pytest.mark.drawn` on a parametrized test draws one of its cases, `drawn(3)` three,
`drawn(by="kind")` one for each value of the parameter `kind`, and `drawn(over="size")` one size for each value of all
other parameters. `pytestmark = pytest.mark.drawn(3, of="file")` draws three of a file's tests, each of which takes
another feature the same long way. The others get the marker `long`. The seed of the tests
draws, so that a run can be repeated and each change of a Python file draws anew; the case's id says which it was.
Whoever names a test to pytest and does not exclude `long` runs all cases.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from kit import seeding


def seeds(count: int) -> Callable[[Any], Any]:
    """Give a property test the parameter `seed`, one of `count` in `make test`."""

    def mark(function: Any) -> Any:
        return pytest.mark.drawn(over="seed")(pytest.mark.parametrize("seed", range(count))(function))

    return mark


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "drawn(count=1, by=None, over=None, of=None): `make test` draws so many cases (kit/drawing.py)"
    )


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in _not_drawn(items):
        item.add_marker(pytest.mark.long)


def _not_drawn(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases that others of their table are run for."""
    tables: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if (mark := item.get_closest_marker("drawn")) and not item.get_closest_marker("long"):
            end = "::" if mark.kwargs.get("of") == "file" else "["
            tables[item.nodeid.partition(end)[0]][_value(item, *mark.args, **mark.kwargs)].append(item)
    left = []
    for test, parts in tables.items():
        draws = random.Random(f"{seeding.SEED} {test}")
        for cases in parts.values():
            mark = cases[0].get_closest_marker("drawn")
            assert mark is not None
            count = mark.args[0] if mark.args else mark.kwargs.get("count", 1)
            drawn = draws.sample(range(len(cases)), min(count, len(cases)))
            left += [case for number, case in enumerate(cases) if number not in drawn]
    return left


def _value(
    item: pytest.Item, count: int = 1, by: str | None = None, over: str | None = None, of: str | None = None
) -> str:
    """Return the case's values of the parameters for whose every value cases are drawn."""
    if by is None and over is None:
        return ""
    assert isinstance(item, pytest.Function)
    params = item.callspec.params
    if (name := by or over) not in params:
        raise pytest.UsageError(f"{item.nodeid}: drawn() names {name!r}, which is none of {sorted(params)}")
    return repr(params[by] if by else [value for key, value in params.items() if key != over])
