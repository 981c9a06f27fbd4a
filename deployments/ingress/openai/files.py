"""/v1/files: files of a key, for batches. They are written where jobs are kept, as they come."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from cluster.jobs.file_book import new_file_id
from cluster.jobs.records import ClientFile, Order
from cluster.registry.actor import WeightRegistry
from deployments.ingress.access.callers import current_key
from deployments.ingress.jobs.desk import PIECE_BYTES, JobDesk
from deployments.ingress.messages.file_form import FileForm
from deployments.ingress.messages.responses import Answer, Failure, documented, failure_response, json_response
from deployments.records.errors import InvalidRequest, Overloaded, RequestTooLarge

PATH: Final = "/v1/files"
BATCH: Final = "batch"
_PURPOSES: Final = (BATCH,)
_GONE: Final = {"_404": "no such file: it was deleted, has ended, or is another key's", "_503": "no file is kept now"}
_KEEP_S: Final = (3600, 2_592_000)  # as OpenAI's `expires_after`
_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(_PURPOSES)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": _KEEP_S[0], "maximum": _KEEP_S[1]},
                    },
                }
            }
        },
    }
}


class FileAnswer(Answer):
    """A file in OpenAI's form."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class FilesAnswer(Answer):
    """A page of files."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Answer):
    """The deletion of a file."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


def create_files_router(desk: JobDesk) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["batches"])

    @router.post(
        PATH, response_model=FileAnswer, responses=documented(400, 408, 413, 429, **_GONE), openapi_extra=_BODY
    )
    async def upload(request: Request) -> Response:
        """Keep a file. A batch's is JSON lines: `custom_id`, `method`, `url` and `body` of a request in each."""
        file = await _uploaded(desk, request)
        return json_response(_answer_of(file))

    @router.get(PATH, response_model=FilesAnswer, responses=documented(400, **_GONE))
    async def page(
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
        order: Order = "desc",
    ) -> Response:
        """The files of this key, the newest first."""
        found = await desk.call(WeightRegistry.list_files, current_key(), purpose, after, limit + 1, order)
        if found is None:
            return _not_found(after or "", "after")
        files = [_answer_of(file) for file in found[:limit]]
        ends = (files[0].id, files[-1].id) if files else (None, None)
        has_more = len(found) > limit
        answer = FilesAnswer(object="list", data=files, first_id=ends[0], last_id=ends[1], has_more=has_more)
        return json_response(answer)

    @router.get(PATH + "/{file_id}", response_model=FileAnswer, responses=documented(**_GONE))
    async def retrieve(file_id: str) -> Response:
        """A file, without its bytes."""
        file = await desk.call(WeightRegistry.find_file, current_key(), file_id)
        return _not_found(file_id) if file is None else json_response(_answer_of(file))

    @router.get(
        PATH + "/{file_id}/content",
        response_class=Response,
        responses=documented(**_GONE) | {200: {"content": {"application/octet-stream": {}}}},
    )
    async def content(file_id: str) -> Response:
        """The bytes of a file."""
        key = current_key()
        file = await desk.call(WeightRegistry.find_file, key, file_id)
        if file is None:
            return _not_found(file_id)
        headers = {
            "Content-Length": str(file.num_bytes),
            "Content-Disposition": f'attachment; filename="{file.id}"',
            "Cache-Control": "private",
            "X-Content-Type-Options": "nosniff",
        }
        return StreamingResponse(_pieces(desk, file), 200, headers, "application/octet-stream")

    @router.delete(
        PATH + "/{file_id}",
        response_model=FileDeleted,
        responses=documented(_409="a batch that has not ended reads it", **_GONE),
    )
    async def delete(file_id: str) -> Response:
        """Delete a file, unless a batch reads it."""
        key = current_key()
        if await desk.call(WeightRegistry.find_file, key, file_id) is None:
            return _not_found(file_id)
        await desk.call(WeightRegistry.forget_file, key, file_id)
        return json_response(FileDeleted(id=file_id, object="file", deleted=True))

    return router


async def _uploaded(desk: JobDesk, request: Request) -> ClientFile:
    """Return the file of a form. Raises InvalidRequest, RequestTooLarge, QueueFull without room, Overloaded."""
    key, offset = current_key(), 0
    begun = await desk.call(WeightRegistry.begin_file, key, new_file_id())

    async def take(piece: bytes) -> None:
        nonlocal offset
        if offset + len(piece) > desk.config.max_file_bytes:
            most = desk.config.max_file_bytes
            raise RequestTooLarge(f"file: more than {most} bytes, at most {most} are allowed", "file")
        size = await desk.call(WeightRegistry.append_file, key, begun.id, offset, piece)
        offset += len(piece)
        if size != offset:
            raise Overloaded("the file could not be kept; try again")

    is_kept = False
    try:
        form = FileForm(PIECE_BYTES)
        await form.read(request, take)
        purpose = form.fields.get("purpose")
        if purpose not in _PURPOSES:
            known = ", ".join(map(repr, _PURPOSES))
            raise InvalidRequest(f"purpose: {str(purpose)[:80]!r} is not known, expected {known}", "purpose")
        keep_s, name = _keep_s(form.fields), form.file_name or ""
        file = await desk.call(WeightRegistry.end_file, key, begun.id, name, purpose, keep_s)
        if file is None:
            raise Overloaded("the file could not be kept; try again")
        is_kept = True
        return file
    finally:
        if not is_kept:
            with contextlib.suppress(Exception):  # it is given up after a while as well
                await desk.call(WeightRegistry.forget_file, key, begun.id)


def _keep_s(fields: dict[str, str]) -> float | None:
    """Return the time for which a client wants its file kept, None for the server's. Raises InvalidRequest."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest("expires_after: expected the anchor 'created_at'", "expires_after")
    if not (seconds and seconds.isascii() and seconds.isdigit() and len(seconds) < 9) or not (
        _KEEP_S[0] <= int(seconds) <= _KEEP_S[1]
    ):
        raise InvalidRequest(f"expires_after: expected {_KEEP_S[0]} to {_KEEP_S[1]} seconds", "expires_after")
    return float(seconds)


async def _pieces(desk: JobDesk, file: ClientFile) -> AsyncIterator[bytes]:
    offset = 0
    while offset < file.num_bytes:
        piece = await desk.call(WeightRegistry.read_file, file.key, file.id, offset, PIECE_BYTES)
        if not piece:
            return
        yield piece
        offset += len(piece)


def _answer_of(file: ClientFile) -> FileAnswer:
    return FileAnswer(
        id=file.id,
        object="file",
        bytes=file.num_bytes,
        created_at=int(file.created_s),
        expires_at=None if file.expires_s is None else int(file.expires_s),
        filename=file.name,
        purpose=file.purpose,
        status="processed",
    )


def _not_found(file_id: str, param: str = "file_id") -> Response:
    message = f"no file {file_id[:80]!r} is kept here for this key: they end some time after they were made"
    return failure_response(Failure(404, message, "invalid_request_error", "file_not_found", param))
