"""Arithmetic that a workflow brings as a text: read by Python's grammar, computed here, with bounds on sizes.

Names are values, and the functions below; there are no attributes, no texts, no indexing of anything but `values`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

MAX_LENGTH: Final = 2_000  # characters
MAX_PARTS: Final = 500
_MAX_BITS: Final = 4_096  # of a whole number on the way
_MAX_EXPONENT: Final = 4_000
_MAX_DEPTH: Final = 100


class BadExpression(ValueError):
    """A text that is no small arithmetic, or whose result is no finite number."""


_BINARY: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: Final[Mapping[type[ast.unaryop], Callable[[Any], Any]]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
_COMPARE: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _sum(*values: Any) -> Any:
    return sum(values[0] if len(values) == 1 and isinstance(values[0], list) else values)


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > _MAX_EXPONENT:
        raise ValueError(f"an exponent of {exponent}: at most {_MAX_EXPONENT}")
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * max(exponent, 1) > _MAX_BITS:
        raise ValueError("a power that is too large")
    return base**exponent


def _shifted(value: Any, places: Any) -> Any:
    if not 0 <= places <= _MAX_BITS:
        raise ValueError(f"a shift by {places} bits")
    return value << places


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "sum": _sum,
    "min": min,
    "max": max,
    "abs": abs,
    "round": round,
    "pow": _power,
    "sqrt": math.sqrt,
    "ceil": math.ceil,
    "floor": math.floor,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "int": int,
    "float": float,
}


def computed(expression: str, values: Mapping[str, Any]) -> int | float | bool:
    """Return the number that an expression is, with `values` as names, and all of them as the list `values`.

    Raises BadExpression.
    """
    if not expression.strip():
        raise BadExpression("the expression is empty")
    if len(expression) > MAX_LENGTH:
        raise BadExpression(f"an expression of {len(expression)} characters: at most {MAX_LENGTH}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise BadExpression(f"not an expression: {expression[:200]!r} ({error})") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_PARTS:
        raise BadExpression(f"an expression of more than {MAX_PARTS} parts")
    try:
        result = _value(tree.body, {**values, "values": list(values.values())}, 0)
        if not isinstance(result, int | float) or not math.isfinite(float(result)):
            raise ValueError("not a finite number")
    except (ArithmeticError, TypeError, ValueError) as error:
        raise BadExpression(f"{expression[:200]!r}: {error}") from None
    return result


def _value(node: ast.expr, names: Mapping[str, Any], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    result = _part(node, names, depth + 1)
    if isinstance(result, int) and result.bit_length() > _MAX_BITS:
        raise ValueError("a number that is too large")
    if isinstance(result, complex):
        raise ValueError("a root of a negative number")
    return result


def _part(node: ast.expr, names: Mapping[str, Any], depth: int) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name):
            if name not in names:
                known = ", ".join(sorted({*names, *_FUNCTIONS}))
                raise ValueError(f"no value {name[:50]!r}; known are {known}")
            return names[name]
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _value(left, names, depth), _value(right, names, depth)
            if isinstance(op, ast.Pow):
                return _power(one, other)
            if isinstance(op, ast.LShift):
                return _shifted(one, other)
            if isinstance(op, ast.RShift):
                return one >> other
            if type(op) in _BINARY and not isinstance(one, list) and not isinstance(other, list):
                return _BINARY[type(op)](one, other)
        case ast.UnaryOp(op=sign, operand=operand):
            return _UNARY[type(sign)](_value(operand, names, depth))
        case ast.BoolOp(op=joined, values=parts):
            return _joined(isinstance(joined, ast.And), (_value(part, names, depth) for part in parts))
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_value(one, names, depth) for one in (left, *others)]
            if all(type(op) in _COMPARE for op in ops):
                return all(_COMPARE[type(op)](a, b) for op, a, b in zip(ops, values, values[1:], strict=False))
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return _value(body if _value(test, names, depth) else otherwise, names, depth)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(one, names, depth) for one in arguments))
        case ast.Subscript(value=ast.Name(id="values"), slice=place):
            at = _value(place, names, depth)
            if not isinstance(at, int) or not -len(names["values"]) <= at < len(names["values"]):
                raise ValueError(f"values[{at}]: there are {len(names['values'])}")
            return names["values"][at]
    raise ValueError(f"{ast.unparse(node)[:80]!r} is not computed here")


def _joined(is_and: bool, values: Iterable[Any]) -> Any:
    result: Any = is_and
    for result in values:
        if bool(result) != is_and:
            break
    return result
