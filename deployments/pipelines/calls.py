"""How a pipeline asks models: what the ingress implements, over handles or in one process."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from deployments.pipelines.plans import SegmentCall, SegmentResult
from deployments.records import ChatRequest, CompletionRequest, ImageRequest, ImageResult, TextResult


class SegmentReply(Protocol):
    """The result of a segment, wherever it is. Awaiting brings it here; handing it on to another segment does not.

    A response of Ray Serve that is passed to a handle call as an argument of its own (not inside a list) goes from
    replica to replica: the router waits for presence only (Ray 2.60, `resolve_deployment_response`), and the error of
    the first call comes out of the second.
    """

    @property
    def response(self) -> Any:
        """What stands for the result among the arguments of the next call."""

    def __await__(self) -> Generator[Any, None, SegmentResult]: ...

    def cancel(self) -> object:
        """Nobody waits for it any more; nothing happens if it is there already."""


class ModelCalls(Protocol):
    """The methods of the ingress `Service`, and one more. All raise ServiceErrors."""

    async def generate(self, request: ImageRequest, /) -> ImageResult: ...

    async def chat(self, request: ChatRequest, /) -> TextResult: ...

    async def complete(self, request: CompletionRequest, /) -> TextResult: ...

    def run_segment(self, call: SegmentCall, upstream: tuple[SegmentReply, ...], /) -> SegmentReply:
        """Returns at once. `upstream` are results that hold inputs of the segment, and may not be there yet."""
