"""Errors and warnings of a step, with its name on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from deployments.errors import GenerationFailed, ServiceError, as_service_errors

_PREFIX = "steps."


@contextlib.contextmanager
def named_failures(pipeline: str, step: str) -> Iterator[None]:
    """What `step` raises becomes a ServiceError of the same class whose message begins with pipeline and step.

    One that has a step's name already keeps it: `param` shows that, also on the way out of another process.
    """
    try:
        with as_service_errors():
            yield
    except ServiceError as error:
        class_ = _service_class(error)
        if (error.param or "").startswith(_PREFIX):
            raise class_(error.message, error.param) from error
        where = f"{_PREFIX}{step}.{error.param}" if error.param else f"{_PREFIX}{step}"
        raise class_(f"pipeline {pipeline!r}, step {step!r}: {error.message}", where) from error
    except Exception as error:
        text = f"pipeline {pipeline!r}, step {step!r} failed: {type(error).__name__}: {error}"
        raise GenerationFailed(text, f"{_PREFIX}{step}") from error


def step_warnings(step: str, warnings: Iterable[str]) -> list[str]:
    return [f"step {step!r}: {warning}" for warning in warnings]


def _service_class(error: ServiceError) -> type[ServiceError]:
    """Ray raises a class of its own that inherits from the one that was raised; that one is wanted."""
    return next(class_ for class_ in type(error).__mro__ if class_.__module__ == ServiceError.__module__)
