"""A waiting caller is told of a panic, which is no Exception, and what ends a thread or a task still ends it."""

from __future__ import annotations

import asyncio

import pytest
from kit.panics import Panic

from weights.platform.panics import Panicked, as_error, panics_as_errors, telling


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), asyncio.CancelledError()])
def test_the_end_of_a_thread_or_task_is_told_and_goes_on(ending: BaseException) -> None:
    told: list[Exception] = []
    with pytest.raises(type(ending)) as raised, telling(told.append):
        raise ending
    assert raised.value is ending
    assert [type(error) for error in told] == [Panicked]
    with pytest.raises(type(ending)) as raised, panics_as_errors():
        raise ending
    assert raised.value is ending


def test_other_errors_are_told_as_they_are_and_panics_with_their_first_line() -> None:
    told: list[Exception] = []
    mistake = ValueError("a mistake")
    for error in (mistake, Panic("no entry\nat line 3"), Panic(), StopIteration(5)):
        with telling(told.append):
            raise error
    assert told[0] is mistake
    assert [str(error) for error in told[1:]] == ["Panic: no entry", "Panic", "StopIteration: 5"]
    assert as_error(mistake) is mistake
    with pytest.raises(ValueError, match="a mistake"), panics_as_errors():
        raise mistake
    with pytest.raises(Panicked, match=r"^Panic: no entry$") as raised, panics_as_errors():
        raise Panic("no entry")
    assert isinstance(raised.value.__cause__, Panic)
    with pytest.raises(Panicked, match="StopIteration"), panics_as_errors():
        next(iter(()))


def test_what_raises_nothing_is_left_alone() -> None:
    told: list[Exception] = []
    with telling(told.append), panics_as_errors():
        pass
    assert told == []
