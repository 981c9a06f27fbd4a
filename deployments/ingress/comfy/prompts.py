"""Prompts as jobs: the queue is a key's unfinished ones, the history those that have ended, with their results."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fastapi import Request
from pydantic_core import from_json, to_json

from cluster.jobs.records import Job, JobFilter, Status
from deployments.ingress.comfy.bodies import PromptBody
from deployments.ingress.jobs.desk import JobDesk
from deployments.ingress.messages.terms import PRIORITY, current_terms
from deployments.records.errors import Conflict

PATH: Final = "/prompt"  # the endpoint of such jobs
MAX_LISTED: Final = 200  # prompts of one answer
_MAX_BYTES: Final = 2**26  # of the results that one answer has
_MOST_URGENT: Final = 1


class Prompts:
    """The prompts of the current task's key. Methods raise as those of `JobDesk` do."""

    def __init__(self, desk: JobDesk) -> None:
        self.desk = desk

    async def add(self, request: Request, body: PromptBody, targets: Sequence[str]) -> Job:
        """Keep a prompt, to run its `targets`. Raises Conflict, QueueFull."""
        id_ = body.prompt_id or str(uuid.uuid4())
        kept = body.model_copy(update={"prompt_id": id_, "partial_execution_targets": list(targets)})
        headers = {"content-type": "application/json"}
        if body.front:
            headers[PRIORITY] = str(_MOST_URGENT)
            current_terms.set(replace(current_terms.get(), priority=_MOST_URGENT))  # or what the key may have
        facts = {"prompt_id": id_, "client_id": body.client_id or None, "outputs": list(targets)}
        content = await asyncio.to_thread(to_json, kept)
        try:
            return await self.desk.add(
                request, PATH, content, headers=headers, idempotency_key=id_, facts=facts, prefix="prompt"
            )
        except Conflict:
            raise Conflict(f"prompt_id: {id_!r} is that of another prompt", "prompt_id") from None

    async def find(self, prompt_id: str) -> Job | None:
        """Return a prompt; None where there is none."""
        found = await self.desk.page(JobFilter(None, PATH, prompt_id), None, 1, "desc")
        if found:
            return found[0]
        job = await self.desk.find(prompt_id)  # of one that came as a job
        return job if job is not None and job.endpoint == PATH else None

    async def of(self, status: Status) -> list[Job]:
        """Return the prompts of that state, the oldest first."""
        return await self.desk.page(JobFilter(status, PATH), None, MAX_LISTED, "asc") or []

    async def queued(self, status: Status) -> list[list[Any]]:
        """Return the prompts of that state as the queue lists them, the oldest first."""
        found, left = list[list[Any]](), _MAX_BYTES
        for job in await self.of(status):
            left -= job.num_bytes
            body = await self.desk.body(job.id) if left >= 0 else None
            found.append(queue_item(job, await asyncio.to_thread(from_json, body) if body else {}))
        return found

    async def newest(self) -> list[Job]:
        """Return the newest prompts of any state, the newest first."""
        return await self.desk.page(JobFilter(None, PATH), None, MAX_LISTED, "desc") or []

    async def ended(self, max_items: int, offset: int) -> list[Job]:
        """Return prompts that have ended, the oldest first: from `offset` on, the newest ones if that is below 0."""
        wanted = JobFilter(None, PATH)
        if offset < 0:
            found = await self.desk.page(wanted, None, 2 * MAX_LISTED, "desc") or []
            return [job for job in found if job.has_ended][:max_items][::-1]
        found = await self.desk.page(wanted, None, offset + 2 * MAX_LISTED, "asc") or []
        return [job for job in found if job.has_ended][offset : offset + max_items]

    async def entries(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """Return the history of prompts that have ended, by their ids: of the newest, where it has too many bytes."""
        found, left = list[tuple[str, dict[str, Any]]](), _MAX_BYTES
        for job in reversed(jobs):
            left -= job.num_bytes
            if left < 0 and found:
                break
            found.append((prompt_id_of(job), await self.entry(job)))
        return dict(reversed(found))

    async def entry(self, job: Job) -> dict[str, Any]:
        """Return the history of a prompt that has ended."""
        content: Any = {}
        pieces = await self.desk.result(job, range(job.num_bytes)) if job.answer is not None else None
        if pieces is not None:
            content = await asyncio.to_thread(from_json, b"".join([piece async for piece in pieces]))
        return entry_of(job, content)


def prompt_id_of(job: Job) -> str:
    """Return a prompt's id, which its client may have chosen."""
    return str(job.facts.get("prompt_id") or job.id)


def queue_item(job: Job, content: Mapping[str, Any]) -> list[Any]:
    """Return a prompt as the queue and the history list it."""
    extra = {**content.get("extra_data", {}), "create_time": int(job.created_s * 1000)}
    if client := job.facts.get("client_id"):
        extra["client_id"] = client
    outputs = list(job.facts.get("outputs") or ())
    return [job.number, prompt_id_of(job), content.get("prompt", {}), extra, outputs]


def entry_of(job: Job, content: Any) -> dict[str, Any]:
    """Return the history of a prompt that has ended with this result, which may be the error that ended it."""
    if not isinstance(content, Mapping) or "outputs" not in content:
        content = {"outputs": {}, "status": _status_without_result(job), "meta": {}}
    kept = {name: content[name] for name in ("outputs", "status", "meta")}
    return {"prompt": queue_item(job, content), **kept}


def _status_without_result(job: Job) -> dict[str, Any]:
    said = {"prompt_id": prompt_id_of(job), "timestamp": int((job.ended_s or time.time()) * 1000)}
    if job.status == "cancelled":
        messages = [["execution_interrupted", {**said, "node_id": "", "node_type": "", "executed": []}]]
    else:
        message, code = (job.error.message, job.error.code) if job.error else ("the prompt has no result", "internal")
        messages = [["execution_error", {**said, **error_facts(message, code)}]]
    return {"status_str": "error", "completed": False, "messages": messages}


def error_facts(
    message: str, type_: str, node: str = "", kind: str = "", executed: Sequence[str] = ()
) -> dict[str, Any]:
    """Return an error of a run as ComfyUI's clients read it. Nothing of the inside is in it."""
    return {
        "node_id": node,
        "node_type": kind,
        "executed": list(executed),
        "exception_message": message,
        "exception_type": type_,
        "traceback": [],
        "current_inputs": {},
        "current_outputs": list(executed),
    }
