"""The OpenAPI page: what it says of errors and answers."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from pydantic import ValidationError
from starlette.responses import JSONResponse
from unit.deployments.ingress.http_fakes import client_over

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.messages.responses import Answer, documented
from deployments.ingress.service.service import Service
from deployments.ingress.web_pages import SCRIPT_PATH, STYLE_PATH

CONFIG = ClusterConfig.model_validate({"models": [{"id": "flux", "path": "/f"}]})
INFERENCE = ("/v1/images/generations", "/v1/embeddings", "/v1/chat/completions", "/v1/completions", "/v1/responses")
INFERENCE += ("/v1/rerank", "/v2/rerank", "/v1/classify")
IN_BACKGROUND = ("/v1/images/generations", "/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def app() -> FastAPI:
    replicas: Any = object()  # nobody asks them
    watch = RegistrySnapshot(NamedActor(lambda: replicas))
    return create_http_app(Service(CONFIG, watch, replicas, replicas), CONFIG)


@pytest.fixture(scope="module")
def page(app: FastAPI) -> dict[str, Any]:
    return app.openapi()


async def test_the_docs_page_needs_no_other_server(app: FastAPI, page: dict[str, Any]) -> None:
    async with client_over(app, "http://localhost") as client:
        shown = (await client.get("/docs")).text
        wanted = re.findall(r"(?:src|href)=\"([^\"]*)\"", shown)
        assert set(wanted) == {SCRIPT_PATH, STYLE_PATH, "data:,"}
        assert "//" not in re.sub(r"<!--.*?-->", "", shown, flags=re.DOTALL).replace("// ", "")
        assert '"validatorUrl": null' in shown
        for path, media_type, sha256 in (
            (SCRIPT_PATH, "text/javascript", "e6a898692f2d768e807c3ba4626068a69a2c5dd960dd6c76f3e4d3a3de180af2"),
            (STYLE_PATH, "text/css", "5ed08757e53da3e026d6cbecc61fe5d43585c9560b302d534ad56692519a273d"),
        ):
            file = await client.get(path)
            assert file.headers["content-type"].startswith(media_type)
            assert hashlib.sha256(file.content).hexdigest() == sha256  # as npm has it
    assert {path for path in page["paths"] if path.startswith("/docs")} == set()


def responses(page: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method, path): operation["responses"]
        for path, operations in page["paths"].items()
        for method, operation in operations.items()
    }


def test_no_route_claims_fastapis_own_422(page: dict[str, Any]) -> None:
    with_422 = [where for where, known in responses(page).items() if "422" in known]
    assert with_422 == [("post", "/admin/models")]  # where it means a checkpoint that cannot be used
    assert "HTTPValidationError" not in json.dumps(page)


def test_references_lead_somewhere(page: dict[str, Any]) -> None:
    names = {part.split('"')[0] for part in json.dumps(page).split('"#/components/schemas/')[1:]}
    assert names
    assert names <= page["components"]["schemas"].keys()


def test_inference_routes_document_their_errors_and_answers(page: dict[str, Any]) -> None:
    known = responses(page)
    for path in INFERENCE:
        answers = known["post", path]
        resumed = {"204"} if "/images/" in path else set()
        begun = {"202", "409"} if "202" in answers else set()
        assert {"200", "400", "404", "408", "413", "429", "500", "503", "504"} | resumed | begun == answers.keys()
        assert bool(begun) == (path in IN_BACKGROUND)
        assert "$ref" in answers["200"]["content"]["application/json"]["schema"]
        assert answers["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer")


def test_streams_are_documented_as_such(page: dict[str, Any]) -> None:
    assert "text/event-stream" in responses(page)["post", "/v1/chat/completions"]["200"]["content"]


def test_the_page_is_made_once(app: FastAPI, page: dict[str, Any]) -> None:
    assert app.openapi() is page


def test_operations_are_documented(page: dict[str, Any]) -> None:
    register = page["paths"]["/admin/models"]["post"]
    assert (register["tags"], set(register["responses"])) == (
        ["operations"],
        {"200", "201", "202", "400", "409", "422", "503"},
    )
    batching = page["paths"]["/admin/text-encoders/batching"]["put"]
    assert {"200", "400", "503"} <= batching["responses"].keys()
    for path, methods in page["paths"].items():
        for operation in methods.values():
            assert path.startswith("/admin") <= (operation["tags"] == ["operations"] and bool(operation["description"]))


def test_a_status_can_mean_something_else_on_a_route() -> None:
    found = documented(404, _409="a reason of its own")
    assert list(found) == [404, 409]
    assert found[404]["description"] == "no such model"
    assert found[409]["description"] == "a reason of its own"


def test_a_status_without_a_reason_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        documented(418)


class Numbers(Answer):
    first: int
    second: int = 0


@pytest.mark.parametrize(
    ("path", "problem"), [("/right", None), ("/more", "third"), ("/less", "first"), ("/other", "does not document")]
)
async def test_an_answer_that_is_not_as_described_is_noticed(as_described: Any, path: str, problem: str | None) -> None:
    answers = {"/right": {"first": 1}, "/more": {"first": 1, "third": 3}, "/less": {}, "/other": {"first": 1}}
    router = APIRouter()

    @router.get(path, response_model=Numbers)
    async def answer() -> JSONResponse:
        return JSONResponse(answers[path], 404 if path == "/other" else 200)

    app = FastAPI()
    app.include_router(router)
    async with client_over(app, "http://localhost", event_hooks=as_described(app)) as client:
        if problem is None:
            await client.get(path)
        else:
            with pytest.raises((ValidationError, AssertionError), match=problem):
                await client.get(path)


def bounds_of(schema: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the default, the least and the most of a whole number."""
    own = next((one for one in schema.get("anyOf", ()) if one["type"] == "integer"), schema)
    return schema.get("default"), own.get("minimum"), own.get("maximum")


def test_numbers_in_addresses_have_their_bounds(page: dict[str, Any]) -> None:
    """Pages are as long as OpenAI's; further ones are bounded so that no answer is without end."""
    found = {
        (path, parameter["name"]): bounds_of(parameter["schema"])
        for path, methods in page["paths"].items()
        for method in methods.values()
        for parameter in method.get("parameters", ())
        if parameter["in"] == "query" and "integer" in json.dumps(parameter["schema"])
    }
    listed = dict.fromkeys(("/v1/jobs", "/v1/batches", "/v1/videos"), (20, 1, 100)) | {"/v1/files": (100, 1, 10_000)}
    assert found == {
        **{(path, "limit"): bounds for path, bounds in listed.items()},
        ("/v1/responses/{response_id}", "starting_after"): (-1, -1, None),
        ("/history", "max_items"): (200, 1, None),
        ("/history", "offset"): (-1, -1, 10**6),
        **{("/admin/cluster", name): (0, 0, 2**31) for name in ("model_offset", "node_offset")},
        ("/admin/cluster", "max_models"): (1000, 0, 1000),
        ("/admin/cluster", "max_nodes"): (100, 0, 100),
        ("/admin/requests", "after"): (None, 0, 2**53),
        ("/admin/uploads/{upload_id}", "offset"): (None, 0, 2**53),
        ("/admin/uploads/{upload_id}", "bytes"): (None, 1, 2**53),
        ("/admin/decisions", "max_decisions"): (50, 0, 500),
    }
