"""Counts requests by the model, the kind of work, and the HTTP status of the outcome."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, TypeVar, cast

from deployments.ingress.messages.responses import status_of
from deployments.records import TextChunk, TextResult

CLIENT_LEFT: Final = 499  # as HAProxy and nginx say
MethodT = TypeVar("MethodT", bound=Callable[..., Coroutine[Any, Any, Any]])


class Meter(Protocol):
    """Counts requests and tokens, as `cluster.process.telemetry.EdgeMetrics` does."""

    def count_request(self, kind: str, model: str, status: int) -> None:
        """Count a request that has ended."""

    def count_text(
        self, model: str, num_prompt_tokens: int, num_completion_tokens: int, timings_ms: Mapping[str, float], n: int
    ) -> None:
        """Count the tokens of an answer."""


class NoMeter:
    """Counts nothing, as in one process without Ray."""

    def count_request(self, kind: str, model: str, status: int) -> None:
        """Do nothing."""

    def count_text(self, *_: Any) -> None:
        """Do nothing."""


class Known(Protocol):
    """Knows the names of models: clients choose the other names."""

    def is_known(self, model: str) -> bool:
        """Return whether there is such a model or pipeline now."""


class _Counting(Protocol):
    """Has methods that are counted."""

    meter: Meter

    @property
    def listing(self) -> Known:
        """The listing of models."""


def counted(kind: str, field: str = "model") -> Callable[[MethodT], MethodT]:
    """Count the calls of a method of a `_Counting`, whose first argument is a record with the name in `field`."""

    def decorate(method: MethodT) -> MethodT:
        @functools.wraps(method)
        async def call(self: _Counting, request: Any, *args: Any, **kwargs: Any) -> Any:
            status = 200
            try:
                return await method(self, request, *args, **kwargs)
            except asyncio.CancelledError:
                status = CLIENT_LEFT
                raise
            except Exception as error:
                status = status_of(error)
                raise
            finally:
                name = getattr(request, field)
                self.meter.count_request(kind, name if self.listing.is_known(name) else "", status)

        return cast("MethodT", call)

    return decorate


def count_text(meter: Meter, model: str, answer: TextResult | TextChunk, num_choices: int) -> None:
    """Count the tokens of a whole text, or of a stream by its last piece."""
    meter.count_text(model, answer.num_prompt_tokens, answer.num_completion_tokens, answer.timings_ms, num_choices)
