"""Webhooks: a client's own server is told that its job has ended, signed as Standard Webhooks says.

The owner of jobs keeps them, so that each is told at least once, whatever dies meanwhile: a repeated one has the same
id. Hosts are those that the config names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

import httpx
from pydantic_core import to_json

from cluster.jobs.files import Clocks
from cluster.jobs.records import BATCHES, DueHook, Job
from cluster.registry.actor import WeightRegistry
from deployments.ingress.jobs.asking import growing_pauses
from deployments.ingress.jobs.desk import JobDesk
from deployments.ingress.jobs.signing import signed_headers
from deployments.records.errors import InvalidRequest

TELL_S: Final = 15.0  # for one answer
_AT_ONCE: Final = 8
_TAKE_S: Final = 10.0
_GONE: Final = 410
_STATUSES: Final[Mapping[str, str]] = {"done": "completed", "failed": "failed", "cancelled": "cancelled"}

logger = logging.getLogger("atelier.ingress")


def event_of(job: Job) -> bytes:
    """Return the news of a job: an event in OpenAI's form, `batch.completed` say, with the job's id."""
    status = _STATUSES[job.status]
    if job.endpoint == BATCHES and job.error is not None and job.error.code == "batch_expired":
        status = "expired"
    kind = job.id.partition("_")[0].replace("resp", "response")
    return to_json(
        {
            "id": f"evt_{job.id}",
            "object": "event",
            "type": f"{kind}.{status}",
            "created_at": int(job.ended_s or 0),
            "data": {"id": job.id, "endpoint": job.endpoint, "status": job.status},
        }
    )


class Teller:
    """Tells webhooks while it runs: a few at a time."""

    def __init__(self, desk: JobDesk, clocks: Clocks | None = None) -> None:
        self._desk = desk
        self._clocks = clocks or Clocks()

    async def tell_on(self) -> None:
        """Tell each receiver when it is due, for ever."""
        pauses = growing_pauses()
        while True:
            try:
                due = await self._desk.call(WeightRegistry.take_hooks, _AT_ONCE, _TAKE_S)
                await asyncio.gather(*map(self._tell, due))
            except Exception as error:
                logger.warning("no webhooks can be told now: %s", str(error).partition("\n")[0])
                await asyncio.sleep(next(pauses))
            else:
                pauses = growing_pauses()

    async def _tell(self, due: DueHook) -> None:
        is_over = await self._is_told(due)
        await self._desk.call(WeightRegistry.end_hook, due.job.id, due.num_tries, is_over)

    async def _is_told(self, due: DueHook) -> bool:
        """Return whether a webhook has heard, or wants to hear no more."""
        payload = event_of(due.job)
        headers = signed_headers(due.webhook, f"msg_{due.job.id}", int(self._clocks.unix_s()), payload)
        try:
            parts = self._desk.webhook_hosts.checked(due.webhook.url, "webhook")  # the config may say less by now
            async with (
                asyncio.timeout(TELL_S),
                self._desk.webhook_hosts.opened("POST", parts, "webhook", headers, TELL_S, payload) as answer,
            ):
                if not answer.is_success:
                    logger.warning("the webhook of job %s answered %d", due.job.id, answer.status_code)
                return answer.is_success or answer.status_code == _GONE
        except (InvalidRequest, TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            why = str(error)[:200] or type(error).__name__
            logger.warning("the webhook of job %s could not be told: %s", due.job.id, why)
            return False
