"""Expressions of nodes are Python's where they are small arithmetic, and refused where they are not."""

from __future__ import annotations

import math

import pytest
from kit.seeding import seeded_random

from deployments.workflows.expressions import BadExpression, computed

NAMES = {"a": 7, "b": 2.5, "c": -3, "values": [7, 2.5, -3]}
FUNCTIONS = {"sqrt": math.sqrt, "ceil": math.ceil, "floor": math.floor, "log2": math.log2, "pow": pow}
EXPRESSIONS = [
    *("a + b", "a * b + 1", "a & -8", "a & ~1", "(a // 2) * 2", "a / 2", "a % b if b > 0 else 0", "-c ** 2"),
    *("max(5, round(a * 24)) + (5 - (max(5, round(a * 24)) % 17)) % 17", "floor(a/32)*32", "min(abs(c), 16) * a"),
    *("ceil(1.5 * log2(max(a, 3))) + 2", "(a % 4 == 1) and ((a - 1) % 4 == 0)", "1 < a < 9", "not a", "a or 0"),
    *(
        "sum(values)",
        "values[0] + values[-1]",
        "pow(2, 10)",
        "2 ** 10",
        "1 << 4",
        "int(b) + float(c)",
        "sqrt(a)",
        "True",
    ),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_are_pythons(expression: str) -> None:
    values = {name: NAMES[name] for name in "abc"}
    assert computed(expression, values) == eval(expression, dict(FUNCTIONS), NAMES)


def test_drawn_expressions_are_pythons() -> None:
    draws = seeded_random()
    for _ in range(200):
        expression = "a"
        for _ in range(draws.randrange(1, 8)):
            sign, other = draws.choice("+-*%") + "", draws.choice(("b", "c", "2", "(a + 3)", "abs(c)"))
            expression = f"({expression} {sign} {other})" if draws.random() < 0.7 else f"min({expression}, {other})"
        try:
            expected = eval(expression, {}, dict(NAMES))
        except ZeroDivisionError:
            with pytest.raises(BadExpression):
                computed(expression, {name: NAMES[name] for name in "abc"})
        else:
            assert computed(expression, {name: NAMES[name] for name in "abc"}) == expected


HOSTILE = [
    *("", "   ", "a b", "__import__('os')", "a.__class__", "[1][0]", "'x' * 9", "lambda: 1", "open", "(1).real"),
    *("9**9**9", "pow(9, 9**9)", "10**4000 * 10**4000", "2 << 10**9", "1/0", "(-1) ** 0.5", "1e308 * 10", "sqrt(-1)"),
    *("a" * 3000, "(" * 500 + "1" + ")" * 500, "+".join(["1"] * 600), "-" * 300 + "1", "values", "values[9]", "d"),
    *("[x for x in values]", "values * 1000000", "f'{a}'", "print(1)", "max()", "int('5')", "abs(values)"),
]


@pytest.mark.parametrize("expression", HOSTILE)
def test_what_is_no_small_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(BadExpression):
        computed(expression, {"a": 7, "b": 2})


def test_a_sum_is_of_a_list_or_of_all_that_is_named() -> None:
    values = {name: NAMES[name] for name in "abc"}
    assert computed("sum(a, b, c)", values) == 7 + 2.5 - 3
    assert computed("sum(a)", values) == 7
