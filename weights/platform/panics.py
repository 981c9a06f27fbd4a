"""Errors of other libraries that are no `Exception`, as those that somebody waits for and can be told.

HAZARD: a panic of Rust (of tokenizers or safetensors, by pyo3) is raised as a PanicException, which is a BaseException:
`except Exception` lets it pass, and whoever waits for the outcome of that work waits for ever. So does a StopIteration
that leaves its function, by a `next` too many: no future of asyncio takes one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

# These end a thread, a task or a generator: they are nobody's outcome, and go on.
_ENDINGS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


class Panicked(Exception):
    """Another library gave up what it did.

    HAZARD: no RuntimeError, which contextlib takes for what a generator makes of a StopIteration, and raises that.
    """


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise Panicked for what the block raises that is neither an `Exception` nor the end of its thread or task."""
    try:
        yield
    except _ENDINGS:
        raise
    except BaseException as error:
        if (translated := as_error(error)) is error:
            raise
        raise translated from error


def telling(tell: Callable[[Exception], object]) -> contextlib.AbstractContextManager[None, bool]:
    """Call `tell` with any error that the block raises. Only errors that end a thread or task are raised again."""
    return _Telling(tell)


class _Telling(contextlib.AbstractContextManager[None, bool]):
    def __init__(self, tell: Callable[[Exception], object]) -> None:
        self._tell = tell

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> bool:
        if error is None:
            return False
        self._tell(as_error(error))
        return not isinstance(error, _ENDINGS)


def as_error(error: BaseException) -> Exception:
    """Return the error itself where it is an `Exception`, otherwise Panicked with its class and its first line."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    text = str(error).partition("\n")[0]
    return Panicked(f"{type(error).__name__}: {text}" if text else type(error).__name__)
