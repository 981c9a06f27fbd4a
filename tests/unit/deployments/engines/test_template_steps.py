"""The price of each operation of a chat template, in steps of 32 characters, and the operations that have none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2.utils import Namespace

from deployments.engines.libraries.template_steps import MAX_BITS, StepBudget, TooManySteps

ENOUGH = 10**9
TEXT = "x" * 320  # ten steps


def price(pay: Callable[[StepBudget], Any]) -> int:
    """Return the steps that an operation takes, which are just enough for it."""
    budget = StepBudget(ENOUGH)
    pay(budget)
    taken = ENOUGH - budget.left
    exact = StepBudget(taken)
    pay(exact)
    assert exact.left == 0
    if taken:
        with pytest.raises(TooManySteps):
            pay(StepBudget(taken - 1))
    return taken


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        ("", 1),
        ("x" * 31, 1),
        (TEXT, 11),
        (b"x" * 320, 11),
        (7, 1),
        (None, 1),
        ([], 1),
        ([1, 2, 3], 1 + 3 + 3),
        ((TEXT, TEXT), 1 + 2 + 2 * 11),
        ({"a": 1, "b": [2]}, 1 + 2 + 2 + 1 + (1 + 1 + 1)),
        ({1, 2}, 1 + 2 + 2),
        ({"a": TEXT}.values(), 1 + 1 + 11),
        (range(50), 1 + 50),
        (Namespace(a=TEXT), 1 + (1 + 1 + 1 + 11)),
    ],
)
def test_a_look_at_a_value_costs_all_that_is_in_it(value: Any, steps: int) -> None:
    assert price(lambda budget: budget.pay_for(value)) == steps
    assert StepBudget(ENOUGH).pay_for(value) == 32 * steps


def test_what_holds_another_twice_costs_it_twice() -> None:
    value: Any = []
    for _ in range(12):
        value = [value, value]
    with pytest.raises(TooManySteps):
        StepBudget(4096).pay_for(value)


@pytest.mark.parametrize(("value", "steps"), [("", 1), (TEXT, 11), ([0] * 320, 81), ([], 1), (3, 0)])
def test_a_copy_costs_its_size(value: Any, steps: int) -> None:
    assert price(lambda budget: budget.pay_for_copy(value)) == steps
    assert StepBudget(ENOUGH).pay_for_copy(value) is value


@pytest.mark.parametrize(
    ("operator", "left", "right", "steps"),
    [
        ("+", TEXT, TEXT, 1 + 20),
        ("+", "a", "b", 1),
        ("+", 1, 2, 1),
        ("+", [0] * 319, [0] * 31, 1 + 10 + 1),
        ("*", TEXT, 100, 1 + 321 * 100 // 32),
        ("*", 100, TEXT, 1 + 321 * 100 // 32),
        ("*", TEXT, -5, 1 + 321 // 32),
        ("-", 1, 2, 1),
        ("/", TEXT, 1, 1),
        ("%", "%s", 5, 1 + 1 + 1 + 3 * (1 + 2) // 32),
        ("%", "%s %s", (TEXT, TEXT), 1 + 1 + 2 * 11 + 6 * (1 + 2 * 321) // 32),
    ],
)
def test_an_operator_costs_its_result(operator: str, left: Any, right: Any, steps: int) -> None:
    assert price(lambda budget: budget.pay_for_operator(operator, left, right)) == steps


@pytest.mark.parametrize(
    ("operator", "left", "right", "is_small"),
    [
        ("**", 2, MAX_BITS // 2, True),
        ("**", 2, MAX_BITS // 2 + 1, False),
        ("**", 3, -MAX_BITS // 2, True),
        ("**", 3, -MAX_BITS, False),
        ("*", 1 << (MAX_BITS - 2), 1, True),
        ("*", 1 << (MAX_BITS - 1), 1, False),
        ("%", "%9999d", 1, True),
        ("%", "%10000d", 1, False),
        ("%", "%*d", (1, 2), False),
        ("%", "100%% %s", 1, True),
    ],
)
def test_numbers_and_widths_are_bounded(operator: str, left: Any, right: Any, is_small: bool) -> None:
    budget = StepBudget(ENOUGH)
    if is_small:
        budget.pay_for_operator(operator, left, right)
    else:
        with pytest.raises(TooManySteps):
            budget.pay_for_operator(operator, left, right)


@pytest.mark.parametrize(
    ("function", "arguments", "steps"),
    [
        (len, ([0, 0],), 2 + (1 + 2 + 2)),
        (TEXT.upper, (), 2 + 11),
        (TEXT.split, ("x",), 2 + 11 + 1),
        (TEXT.replace, ("x", TEXT), 2 + 11 + 1 + 11 + 321 * (1 + 2 + 321) // 32),
        ({"a": TEXT}.items, (), 2),
        ({"a": 1}.get, ("a",), 2 + 1),
        ([1, 2].index, (2,), 2 + (1 + 2 + 2) + 160 * (1 + 2) // 32),
        (SimpleNamespace(filled_text="{}"), (TEXT,), 2 + 1 + 11 + 3 * (1 + 321) // 32),
    ],
)
def test_a_call_costs_by_its_owner(function: Any, arguments: Any, steps: int) -> None:
    assert price(lambda budget: budget.pay_for_call(function, arguments)) == steps


@pytest.mark.parametrize(
    ("name", "value", "arguments", "steps"),
    [
        ("length", TEXT, (), 1),
        ("upper", TEXT, (), 1 + 11),
        ("truncate", TEXT, (5,), 1 + 11 + 1),
        ("sort", [3, 1], (), 1 + 5 + 8 * 160 // 32),
        ("sum", [1, 2], (), 1 + 5 + 2 * 160 // 32),
        ("sum", 3, (), 1 + 1),
        ("format", "%s", (TEXT,), 1 + 1 + 11 + 3 * (1 + 321) // 32),
        ("batch", [1, 2], (-7, "x"), 1 + 7),
        ("join", [1, 2], (TEXT,), 1 + 5 + 11 + 160 * (1 + 321) // 32),
        ("indent", TEXT, (4,), 1 + 11 + 321 * 5 // 32),
    ],
)
def test_a_filter_costs_by_its_kind(name: str, value: Any, arguments: Any, steps: int) -> None:
    assert price(lambda budget: budget.pay_for_filter(name, value, arguments)) == steps


def test_what_can_be_read_only_once_pays_as_it_is_read() -> None:
    budget = StepBudget(3)
    values = budget.pay_for_filter("map", iter([5, 6, 7]), ())
    assert [next(values), next(values), budget.left] == [5, 6, 0]
    with pytest.raises(TooManySteps):
        next(values)
    kept = StepBudget(ENOUGH).pay_for_filter("sort", iter([2, 1]), ())
    assert kept == [2, 1]
    assert StepBudget(ENOUGH).pay_for_filter("map", 3, ()) == 3
    assert list(StepBudget(6).counted("abc", 2)) == ["a", "b", "c"]
