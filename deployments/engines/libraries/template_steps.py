"""The steps of a chat template: what an operation may cost is known, and paid, before it is done. No torch.

A template is a program of the model's author, and a single operation of one can take minutes in C code that nothing
interrupts: `'x' * 10**9`, or the text of a list that holds another twice, which holds another twice. So sizes are
looked at first.
A step is about a microsecond.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, Final

from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace

CHARACTERS_PER_STEP: Final = 32
MAX_BITS: Final = 10_000  # of an integer, which Python would not print either
_CALL: Final = 2
_ORDERING: Final = 8  # comparisons of each element that is sorted
_VALUES: Final = (str, bytes, list, tuple, dict, range, int, float)
# Methods of text whose work and result are no larger than the text.
_LINEAR_METHODS: Final = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "index", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
    "strip", "swapcase", "title", "upper",
})  # fmt: skip
_FREE_FILTERS: Final = frozenset({
    "abs", "attr", "count", "d", "default", "first", "items", "last", "length", "safe",
})  # fmt: skip
_STEPWISE_FILTERS: Final = frozenset({
    "batch", "list", "map", "reject", "rejectattr", "select", "selectattr", "slice",
})  # fmt: skip
_LINEAR_FILTERS: Final = frozenset({
    "capitalize", "float", "lower", "random", "reverse", "string", "title", "trim", "truncate", "upper", "urlencode",
    "wordcount",
})  # fmt: skip
_ORDERING_FILTERS: Final = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
# The width of a field: taken from an argument, or huge.
_WIDTH: Final = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{|[:%][^a-zA-Z%{}]*[0-9]{5}")


class TooManySteps(Exception):  # what it says is not an error's name but the reason
    """A template wants to do more than it may."""


class StepBudget:
    """The steps that one rendering has left. Every method raises TooManySteps when they do not suffice."""

    def __init__(self, number: int) -> None:
        self.left = number

    def spend(self, number: int) -> None:
        """Take steps."""
        self.left -= number
        if self.left < 0:
            raise TooManySteps

    def counted(self, values: Iterable[Any], each: int = 1) -> Iterator[Any]:
        """Iterate, and pay for each value."""
        for value in values:
            self.spend(each)
            yield value

    def pay_for(self, value: Any) -> int:
        """Pay for one look at a value and all that is in it, as often as it is in there. Return its size."""
        if type(value) is str:  # most are
            self.spend(steps := 1 + len(value) // CHARACTERS_PER_STEP)
            return steps * CHARACTERS_PER_STEP
        left, stack = self.left, [value]
        while stack:
            item = stack.pop()
            self.spend(1)
            if isinstance(item, str | bytes):
                self.spend(len(item) // CHARACTERS_PER_STEP)
            elif isinstance(item, Mapping):
                self.spend(len(item))
                stack += item.keys()
                stack += item.values()
            elif isinstance(item, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
                self.spend(len(item))
                stack += item
            elif isinstance(item, range):
                self.spend(len(item))
            elif isinstance(item, Namespace):
                stack.append(object.__getattribute__(item, "_Namespace__attrs"))  # its text has theirs
        return (left - self.left) * CHARACTERS_PER_STEP

    def pay_for_copy(self, value: Any) -> Any:
        """Pay for a copy of a text or of a list, whose elements are shared. Return the value."""
        if hasattr(value, "__len__"):
            self.spend(1 + len(value) // (CHARACTERS_PER_STEP if isinstance(value, str) else 4))
        return value

    def _pay_for_product(self, value: Any, arguments: Iterable[Any]) -> None:
        """Pay for an operation whose result may be as large as the value times all its arguments."""
        factor = 1
        size = _size(value, self)
        for argument in arguments:
            factor += abs(argument) if isinstance(argument, int) else _size(argument, self)
        self.spend(size * factor // CHARACTERS_PER_STEP)

    def _pay_for_format(self, text: Any, arguments: Iterable[Any]) -> None:
        """Pay for a text that is filled in. Integers are written, and are no widths."""
        if isinstance(text, str) and _WIDTH.search(text.replace("{{", "").replace("%%", "")):
            raise TooManySteps
        self._pay_for_product(text, [str(one)[:99] if isinstance(one, int) else one for one in arguments])

    def pay_for_operator(self, operator: str, left: Any, right: Any) -> None:
        """Pay for an arithmetic operator."""
        if type(left) is str and type(right) is str and operator == "+":  # most are
            self.spend(1 + (len(left) + len(right)) // CHARACTERS_PER_STEP)
            return
        self.spend(1)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TooManySteps
        elif operator == "%" and isinstance(left, str | bytes):
            self._pay_for_format(left, right if isinstance(right, tuple) else [right])
        elif operator in "+*":
            copies = [one for one in (left, right) if isinstance(one, int)] if operator == "*" else []
            for one in (left, right):
                if isinstance(one, Sequence):
                    self.spend((1 + len(one)) * max([1, *copies]) // CHARACTERS_PER_STEP)

    def pay_for_call(self, function: Any, arguments: Iterable[Any]) -> None:
        """Pay for a call of what is not a macro, whose body pays for itself."""
        self.spend(_CALL)
        if isinstance(function, Macro):
            return
        if (text := getattr(function, "filled_text", None)) is not None:
            self._pay_for_format(text, arguments)
            return
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str) and name in _LINEAR_METHODS:
            self.pay_for_copy(owner)
        elif isinstance(owner, dict) and name in ("get", "items", "keys", "values"):
            pass
        elif isinstance(owner, _VALUES):
            self._pay_for_product(owner, arguments)
            return
        for argument in arguments:
            self.pay_for(argument)

    def pay_for_filter(self, name: str, value: Any, arguments: Iterable[Any]) -> Any:
        """Pay for a filter. Return the value that it is to get: one that can be read only once pays as it is read."""
        self.spend(1)
        if name in _FREE_FILTERS:
            return value
        if name in _STEPWISE_FILTERS:
            self.spend(sum(abs(one) for one in arguments if isinstance(one, int)))
            is_iterable = hasattr(type(value), "__iter__") and not isinstance(value, Undefined)
            return self.counted(value) if is_iterable else value
        if hasattr(type(value), "__next__") and name != "string":
            value = list(self.counted(value))
        if name in _LINEAR_FILTERS:
            self.pay_for(value)
            for argument in arguments:
                self.pay_for(argument)
        elif name in _ORDERING_FILTERS:
            self.spend(_ORDERING * self.pay_for(value) // CHARACTERS_PER_STEP)
        elif name == "format":
            self._pay_for_format(value, arguments)
        elif name == "sum":
            self.spend(len(value) * self.pay_for(value) // CHARACTERS_PER_STEP if hasattr(value, "__len__") else 1)
        else:
            self._pay_for_product(value, arguments)
        return value


def _size(value: Any, steps: StepBudget) -> int:
    """Return the characters of a text, about those of the text of something else."""
    if isinstance(value, str | bytes):
        steps.spend(1 + len(value) // CHARACTERS_PER_STEP)
        return 1 + len(value)
    return steps.pay_for(value)
