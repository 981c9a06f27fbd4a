"""Errors of other libraries that are no `Exception`, as those that somebody waits for and can be told.

HAZARD: a panic of Rust (of tokenizers or safetensors, by pyo3) is raised as a PanicException, which is a BaseException:
`except Exception` lets it pass, and whoever waits for the outcome of that work waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

# These end a thread, a task or a generator: they are nobody's outcome, and go on.
_ENDINGS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


class Panicked(RuntimeError):
    """Another library gave up what it did, in its own language."""


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise Panicked for what the block raises that is neither an `Exception` nor the end of its thread or task."""
    try:
        yield
    except (Exception, *_ENDINGS):
        raise
    except BaseException as error:
        raise as_error(error) from error


@contextlib.contextmanager
def telling(tell: Callable[[Exception], object]) -> Iterator[None]:
    """Tell whoever waits for the block what it raises, whatever that is. The end of a thread or task goes on then."""
    try:
        yield
    except BaseException as error:
        tell(as_error(error))
        if isinstance(error, _ENDINGS):
            raise


def as_error(error: BaseException) -> Exception:
    """Return the error itself where it is an `Exception`, otherwise Panicked with its class and its first line."""
    if isinstance(error, Exception):
        return error
    text = str(error).partition("\n")[0]
    return Panicked(f"{type(error).__name__}: {text}" if text else type(error).__name__)
