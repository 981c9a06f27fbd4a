"""/admin/uploads: models and LoRAs in one file, sent in parts, which are registered by their path on the server.

They are files as those of /v1/files, in the same folder, with a room of their own. An upload that no model is
registered from ends an hour after its last part; a registered one stays as long as its model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from cluster.jobs.disk import files_folder
from cluster.jobs.file_book import MODEL_PURPOSE, SILENT_S, new_file_id
from cluster.registry.actor import WeightRegistry
from configs.cluster import ClusterConfig
from deployments.ingress.access.callers import current_key
from deployments.ingress.jobs.desk import PIECE_BYTES, JobDesk
from deployments.ingress.messages.bodies import ClientPart, JsonRoute
from deployments.ingress.messages.responses import Answer, Failure, documented, failure_response, json_response
from deployments.records.errors import InvalidRequest, RequestTooLarge

PATH: Final = "/admin/uploads"
SUFFIXES: Final = (".safetensors", ".gguf")
_MAX_NAME_CHARS: Final = 255
_MOST: Final = 2**53
_GONE: Final = {"_404": "no such upload: it was deleted, has ended, or is another key's", "_503": "no file is kept now"}
_PART: Final = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


class UploadBody(ClientPart):
    """A file that is to be uploaded."""

    name: str = Field(max_length=_MAX_NAME_CHARS, description="its name, which ends with .safetensors or .gguf")
    bytes: int = Field(ge=1, le=_MOST, description="its size")


class UploadAnswer(Answer):
    """An upload. `bytes` are on the disk: the next part begins there. `path` is for POST /admin/models, once whole."""

    id: str
    bytes: int
    is_whole: bool
    path: str


class UploadDeleted(Answer):
    """The deletion of an upload."""

    id: str
    deleted: bool


def create_uploads_router(desk: JobDesk, config: ClusterConfig) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["operations"], route_class=JsonRoute)
    folder = files_folder(config.store.path, config.name)

    def answer(id_: str, num_bytes: int, *, is_whole: bool = False, status: int = 200) -> Response:
        return json_response(
            UploadAnswer(id=id_, bytes=num_bytes, is_whole=is_whole, path=str(folder / id_)),
            status,
        )

    @router.post(PATH, status_code=201, response_model=UploadAnswer, responses=documented(400, 413, 429, **_GONE))
    async def begin(body: UploadBody) -> Response:
        """Begin to upload a model or LoRA in one file, for which there is room."""
        suffix = Path(body.name).suffix.lower()
        if suffix not in SUFFIXES:
            raise InvalidRequest(
                f"name: {body.name[:80]!r}, expected one that ends with {' or '.join(SUFFIXES)}", "name"
            )
        if body.bytes > (most := desk.config.max_models_bytes):
            raise RequestTooLarge(f"bytes: {body.bytes}, at most {most} are allowed (jobs.max_models_bytes)", "bytes")
        begun = await desk.call(WeightRegistry.begin_model, current_key(), new_file_id(suffix), body.bytes)
        return answer(begun.id, 0, status=201)

    @router.get(PATH + "/{upload_id}", response_model=UploadAnswer, responses=documented(**_GONE))
    async def look(upload_id: str) -> Response:
        """The bytes of an upload that are there, to go on with it."""
        found = await _found(desk, upload_id)
        return _not_found(upload_id) if found is None else answer(upload_id, found[0], is_whole=found[1])

    @router.put(
        PATH + "/{upload_id}",
        response_model=UploadAnswer,
        responses=documented(400, 408, 413, 429, **_GONE),
        openapi_extra=_PART,
    )
    async def add(upload_id: str, offset: Annotated[int, Query(ge=0, le=_MOST)], request: Request) -> Response:
        """Add the part that begins at `offset`, up to `jobs.max_file_bytes`.

        What does not begin at the upload's end changes nothing: the answer says where that is. Of a part that broke
        off, the beginning may be kept.
        """
        size: int | None = offset
        piece = bytearray()
        async for content in request.stream():
            piece += content
            while len(piece) >= PIECE_BYTES and size is not None:
                wanted = size + PIECE_BYTES
                size = await _appended(desk, upload_id, size, bytes(piece[:PIECE_BYTES]))
                del piece[:PIECE_BYTES]
                if size != wanted:
                    return _not_found(upload_id) if size is None else answer(upload_id, size)
        size = await _appended(desk, upload_id, size or 0, bytes(piece))
        return _not_found(upload_id) if size is None else answer(upload_id, size)

    @router.post(
        PATH + "/{upload_id}",
        response_model=UploadAnswer,
        responses=documented(400, _409="the upload has another size", **_GONE),
    )
    async def end(upload_id: str, num_bytes: Annotated[int, Query(alias="bytes", ge=1, le=_MOST)]) -> Response:
        """End an upload that has all its bytes: nothing can be added to it any more, and it can be registered."""
        key = current_key()
        size = await desk.call(WeightRegistry.append_file, key, upload_id, 0, b"")
        if size is not None and size != num_bytes:
            message = f"the upload has {size} of {num_bytes} bytes"
            return failure_response(Failure(409, message, "invalid_request_error", "upload_not_whole", "bytes"))
        file = await desk.call(WeightRegistry.end_file, key, upload_id, upload_id, MODEL_PURPOSE, SILENT_S)
        return _not_found(upload_id) if file is None else answer(upload_id, file.num_bytes, is_whole=True)

    @router.delete(
        PATH + "/{upload_id}",
        response_model=UploadDeleted,
        responses=documented(_409="a model is registered from it", **_GONE),
    )
    async def delete(upload_id: str) -> Response:
        """Delete an upload that no model is registered from."""
        if await _found(desk, upload_id) is None:
            return _not_found(upload_id)
        await desk.call(WeightRegistry.forget_file, current_key(), upload_id)
        return json_response(UploadDeleted(id=upload_id, deleted=True))

    return router


async def _appended(desk: JobDesk, upload_id: str, offset: int, piece: bytes) -> int | None:
    return await desk.call(WeightRegistry.append_file, current_key(), upload_id, offset, piece)


async def _found(desk: JobDesk, upload_id: str) -> tuple[int, bool] | None:
    """Return how many bytes of an upload are there, and whether it is whole; None for an unknown one."""
    if (size := await _appended(desk, upload_id, 0, b"")) is not None:
        return size, False
    file = await desk.call(WeightRegistry.find_file, current_key(), upload_id)
    return None if file is None else (file.num_bytes, True)


def _not_found(upload_id: str) -> Response:
    message = f"no upload {upload_id[:80]!r} is kept here for this key: they end an hour after their last part"
    return failure_response(Failure(404, message, "invalid_request_error", "upload_not_found", "upload_id"))
