"""The text-encoder client: a worker's calls of a service that may be slow, or down without a sign."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from ray.exceptions import RayActorError
from ray.serve.exceptions import ReplicaUnavailableError

from cluster.records.text_routes import route_of
from deployments.records.errors import CannotLoad, ModelUnavailable, NoReplica, ReplicaLost
from deployments.records.tasks import Deadline
from deployments.replicas.replica_calls import ReplicaCalls
from deployments.text.requests import Conditioning, ConditioningRequest

MAX_TRIES: Final = 2  # another replica may have outlived the one that was asked
MAX_MISSED: Final = 4  # so often no replica is reached before the service counts as down
PAUSE_S: Final = 0.1  # the router learns a moment later who is out of reach
BELIEVED_DOWN_S: Final = 5.0  # nobody waits for it again sooner


class EncoderDown(Exception):
    """No replica of the text-encoder service answers. The message has the evidence."""


class TextEncoderClient:
    """A worker's side of the text-encoder service. Waits for nothing longer than `timeout_s`. One event loop."""

    def __init__(
        self,
        calls: ReplicaCalls,
        timeout_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = calls
        self._timeout_s = timeout_s
        self._clock = clock
        self._down_until_s = 0.0

    @property
    def is_believed_down(self) -> bool:
        """Return whether the service failed lately, so that it gets no calls for a while."""
        return self._clock() < self._down_until_s

    async def condition(self, request: ConditioningRequest) -> Conditioning:
        """Return the conditioning of a prompt.

        Raises EncoderDown, a replica's own error, or ReplicaLost after two replicas died: the prompt may have killed
        them, and the worker should not be the third.
        """
        if self.is_believed_down:
            raise EncoderDown("the text encoder service did not answer a moment ago")
        deadline, route = Deadline(self._timeout_s), route_of([request.prompt])
        num_died = num_missed = 0
        while True:
            try:
                answer: Conditioning = await self._calls.call("condition", request, deadline=deadline, route=route)
                return answer
            except NoReplica as error:
                self._down_until_s = self._clock() + BELIEVED_DOWN_S
                raise EncoderDown(str(error)) from None
            except CannotLoad as error:  # not the worker's failure, which another worker would mend
                raise ModelUnavailable(error.message, error.param) from None
            except ReplicaUnavailableError as error:  # which says nothing of the prompt
                num_missed += 1
                if num_missed == MAX_MISSED:
                    self._down_until_s = self._clock() + BELIEVED_DOWN_S
                    raise EncoderDown(f"no text encoder could be reached ({error})") from None
                async with deadline.bounding():
                    await asyncio.sleep(PAUSE_S)
            except RayActorError as error:
                num_died += 1
                if num_died == MAX_TRIES:
                    text = f"{MAX_TRIES} text encoders died while they worked on this prompt; try again"
                    raise ReplicaLost(text) from error
