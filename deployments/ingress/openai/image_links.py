"""Links to images, for `response_format: url`: files in a folder, under names that nobody can guess, for a while.

Whoever has a link can open it until it ends, without a key, as with any signed link. All ingress replicas that share
the folder serve every link; on several nodes it has to be a shared one.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from configs.cluster import ImageLinksConfig
from deployments.errors import Overloaded
from deployments.ingress.errors import Failure, documented, failure_response
from deployments.ingress.openai.image_files import ImageFormat
from weights.private_folder import private_folder, temporary_folder

PATH: Final = "/files/images/"
_NAME: Final = re.compile(r"[0-9a-f]{32}\.(png|jpeg|webp)")  # 128 random bits
_SWEEP_EVERY_S: Final = 1.0


class ImageLinks:
    """A folder of image files that end by age, and by the folder's size, the oldest first. Called in threads."""

    def __init__(self, config: ImageLinksConfig, cluster: str, clock: Callable[[], float] = time.time) -> None:
        self._folder = config.folder or temporary_folder() / f"images-{cluster}"
        self._config = config
        self._clock = clock
        self._next_sweep = 0.0

    def keep_file(self, data: bytes, format_: ImageFormat, server_url: str) -> str:
        """Keep a file, and return its link, below the config's `base_url` or else `server_url`, as the client knows it.

        Raises Overloaded when the file cannot be written.
        """
        name = f"{secrets.token_hex(16)}.{format_}"
        try:
            if self._config.folder is None:
                private_folder(self._folder.parent)
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            staged = self._folder / f"{name}.part"
            staged.write_bytes(data)
            staged.rename(self._folder / name)
            self._sweep()
        except OSError as error:
            raise Overloaded(
                f"links to images cannot be made now: {error.strerror or error}; ask for b64_json"
            ) from None
        return (self._config.base_url or server_url).rstrip("/") + PATH + name

    def find(self, name: str) -> tuple[Path, float] | None:
        """Return a file and the seconds that its link still lasts; None when it has ended or never was."""
        if not _NAME.fullmatch(name):
            return None
        path = self._folder / name
        try:
            left_s = path.stat().st_mtime + self._config.ttl_s - self._clock()
        except OSError:
            return None
        return (path, left_s) if left_s > 0 else None

    def _sweep(self) -> None:
        """Remove what has ended. HAZARD: other ingress replicas sweep the same folder."""
        now = self._clock()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_EVERY_S
        found = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        left_bytes = sum(nbytes for _, nbytes, _ in found)
        for written, nbytes, path in sorted(found):
            if left_bytes <= self._config.max_bytes and written + self._config.ttl_s > now:
                break
            path.unlink(missing_ok=True)
            left_bytes -= nbytes


def create_links_router(links: ImageLinks) -> APIRouter:
    """Return the route that serves the files."""
    router = APIRouter(tags=["images"])

    @router.get(
        PATH + "{name}", response_class=FileResponse, responses=documented(_404="no such link, or it has ended")
    )
    async def image(name: str, request: Request) -> Response:
        """An image of an answer with `response_format: url`."""
        found = await run_in_threadpool(links.find, name)
        if found is None:
            message = f"{request.url.path[:200]}: no image is here; the links of answers end after a while"
            return failure_response(Failure(404, message, "invalid_request_error", "unknown_url"))
        path, left_s = found
        headers = {"Cache-Control": f"private, max-age={int(left_s)}, immutable", "X-Content-Type-Options": "nosniff"}
        return FileResponse(path, media_type=f"image/{path.suffix[1:]}", headers=headers)

    return router
