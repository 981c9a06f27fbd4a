"""The page /docs: every field of the API with a form to try it, from files of this package.

`swagger_ui/` has swagger-ui-dist 5.35.0 of npm as it is (Apache-2.0; its licences lie beside it). Nothing of the page
comes from another server, so that it works where there is no internet, and tells nobody who reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import FileResponse, HTMLResponse

FOLDER: Final = Path(__file__).parent / "swagger_ui"
SCRIPT_PATH: Final = "/docs/swagger-ui-bundle.js"
STYLE_PATH: Final = "/docs/swagger-ui.css"
_CACHED: Final = {"cache-control": "public, max-age=86400"}


def create_docs_router(title: str) -> APIRouter:
    """Return the routes of the page and its two files."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        # The validator would send the address of this server to another one.
        settings = {"validatorUrl": None}
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title=title,
            swagger_js_url=SCRIPT_PATH,
            swagger_css_url=STYLE_PATH,
            swagger_favicon_url="data:,",
            swagger_ui_parameters=settings,
        )

    @router.get(SCRIPT_PATH)
    async def script() -> FileResponse:
        return FileResponse(FOLDER / Path(SCRIPT_PATH).name, media_type="text/javascript", headers=_CACHED)

    @router.get(STYLE_PATH)
    async def style() -> FileResponse:
        return FileResponse(FOLDER / Path(STYLE_PATH).name, media_type="text/css", headers=_CACHED)

    return router
