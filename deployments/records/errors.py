"""Errors that a user of the service meets, the same over HTTP and over handles.

    ServiceError
    ├── InvalidRequest       400  a value of the request is out of range, or a combination is not supported
    │   ├── ContextExceeded  400  the prompt has more tokens than the model reads
    │   └── UnknownFile      404  no such file of a workflow; the message has the known names
    ├── NotAuthenticated     401  no API key, or an invalid one
    ├── NotAllowed           403  this key, or the web page that asks, may not do that
    ├── UnknownModel         404  no such model or adapter; the message has the known names
    ├── RequestTooSlow       408  the body of the request did not come in time
    ├── RequestTooLarge      413  the body is larger than the cluster allows
    ├── Overloaded           503  running work takes the memory that this model needs
    ├── RateLimited          429  the API key has used up its rate, or has as much in progress as it may
    ├── QueueFull            429  the request cannot wait: a queue is full, or it would not be done in time
    ├── DeadlineExceeded     504  the request's time was over before its work was done
    ├── ModelUnavailable     503  the model's weights cannot be used
    │   └── CannotLoad       503  this replica cannot load them; another one may
    ├── NoReplica            503  no replica runs that could work on it; says why
    ├── ReplicaLost          503  the replica that worked on it died, and so did the next ones or the stream had begun
    ├── Conflict             409  a model that is registered already forbids it
    ├── Unprocessable        422  the checkpoint cannot be brought into the store
    └── GenerationFailed     500  the model failed on this request; says how

`deployments/ingress/messages/responses.py` has the one table from these to protocols.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from cluster.records import errors as cluster_errors
from cluster.records.errors import ModelUnknown
from deployments.engines.costs.memory_limits import is_out_of_memory
from deployments.engines.records.protocol import ComputationFailed, EngineError, PromptTooLong
from weights.platform.panics import Panicked, panics_as_errors
from weights.records.errors import AdapterError, BudgetExceeded, WeightsError

_PREFIX = "stages."


class ServiceError(Exception):
    """An error for the person who asked: `message` is for them, `param` names the request's field when there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        # Both go to args: that is what survives pickling on the way out of a replica.
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class InvalidRequest(ServiceError):
    """A value of the request is out of range, or a combination of them is not supported."""


class ContextExceeded(InvalidRequest):
    """The prompt has more tokens than the model reads. Agents shorten their history when they are told so."""


class UnknownFile(InvalidRequest):
    """No file of that name is kept for the API key."""


class NotAuthenticated(ServiceError):
    """The request has no API key, or an invalid one."""


class NotAllowed(ServiceError):
    """The API key, or the web page that asks, may not do that."""


class UnknownModel(ServiceError):
    """No model or adapter of that name is served."""


class RequestTooLarge(ServiceError):
    """The body or prompt is larger than the cluster's limits."""


class RequestTooSlow(ServiceError):
    """The body did not come in the time that any client may take."""


class Overloaded(ServiceError):
    """The needs of the request do not fit beside the work that is running."""


class RateLimited(ServiceError):
    """The API key has used up its rate, or has as many requests in progress as it may.

    `retry_after_s` is when the rate allows one more; None when nobody knows.
    """

    def __init__(self, message: str, param: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, param)
        self.retry_after_s = retry_after_s


class QueueFull(ServiceError):
    """A queue has no room for the request, or would not serve it in time; `retry_after_s` is when it could."""

    def __init__(self, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param)
        self.args = (message, param, retry_after_s)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(ServiceError):
    """The time that the request gave itself, or that its priority gives it, was over before its work was done."""


class ModelUnavailable(ServiceError):
    """The model is known, but its weights cannot be used."""


class CannotLoad(ModelUnavailable):
    """The replica that was asked could not load the model. Another one may: it has another node, disk and device."""


class NoReplica(ServiceError):
    """No replica of the deployment that the request needs is running, and none is about to; says why."""


class ReplicaLost(ServiceError):
    """The replica that worked on the request died, and another one could not answer instead."""


class Conflict(ServiceError):
    """A model that is registered already forbids the change."""


class Unprocessable(ServiceError):
    """The request is well-formed, but its checkpoint cannot be brought into the store; says why."""


class GenerationFailed(ServiceError):
    """The model failed on this request: numbers that are not finite, a kernel that failed."""


@contextlib.contextmanager
def as_service_errors() -> Iterator[None]:
    """Turn errors of the lower layers into ServiceErrors, around the methods of a replica."""
    try:
        with panics_as_errors():
            yield
    except PromptTooLong as error:
        raise ContextExceeded(str(error)) from error
    except EngineError as error:
        raise InvalidRequest(str(error)) from error
    except (ComputationFailed, Panicked) as error:
        raise GenerationFailed(str(error)) from error
    except ModelUnknown as error:
        raise UnknownModel(str(error), "model") from error
    except BudgetExceeded as error:
        raise Overloaded(str(error)) from error
    except (cluster_errors.WeightsUnavailable, AdapterError) as error:
        raise ModelUnavailable(str(error), "model") from error
    except (cluster_errors.KeeperFailed, WeightsError) as error:
        raise CannotLoad(str(error), "model") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise Overloaded("the replica has not enough memory for this request, even alone; ask for less") from error


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
