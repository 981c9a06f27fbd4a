"""Errors and warnings of a stage, with its name on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from deployments.errors import GenerationFailed, ServiceError, as_service_errors

_PREFIX = "stages."


@contextlib.contextmanager
def named_failures(pipeline: str, stage: str) -> Iterator[None]:
    """Turn what `stage` raises into a ServiceError of the same class whose message begins with pipeline and stage.

    One that has a stage's name already keeps it: `param` shows that, also on the way out of another process.
    """
    try:
        with as_service_errors():
            yield
    except ServiceError as error:
        class_ = _service_class(error)
        if (error.param or "").startswith(_PREFIX):
            raise class_(error.message, error.param) from error
        where = f"{_PREFIX}{stage}.{error.param}" if error.param else f"{_PREFIX}{stage}"
        raise class_(f"pipeline {pipeline!r}, stage {stage!r}: {error.message}", where) from error
    except Exception as error:
        text = f"pipeline {pipeline!r}, stage {stage!r} failed: {type(error).__name__}: {error}"
        raise GenerationFailed(text, f"{_PREFIX}{stage}") from error


def stage_warnings(stage: str, warnings: Iterable[str]) -> list[str]:
    """Return the warnings with the name of their stage."""
    return [f"stage {stage!r}: {warning}" for warning in warnings]


def _service_class(error: ServiceError) -> type[ServiceError]:
    """Ray raises a class of its own that inherits from the one that was raised; that one is wanted."""
    return next(class_ for class_ in type(error).__mro__ if class_.__module__ == ServiceError.__module__)
