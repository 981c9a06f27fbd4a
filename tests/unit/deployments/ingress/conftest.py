"""The HTTP edge over fake replicas. Its answers are compared with the OpenAPI page in all tests over HTTP."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import fastapi.routing
import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from pydantic.warnings import UnsupportedFieldAttributeWarning
from starlette.routing import Match
from unit.deployments.ingress.http_fakes import CONFIG, Replicas, client_over
from unit.deployments.ingress.jobs.job_fakes import owner_in
from unit.deployments.ingress.page_server import PageServer, page_server_over
from unit.deployments.serve_fakes import FakeHandle

from cluster.jobs.owner import JobOwner
from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import StoredResponsesConfig
from deployments.ingress.comfy.bodies import ComfyError
from deployments.ingress.compat.a1111_bodies import WebuiError
from deployments.ingress.compat.anthropic import MessageError
from deployments.ingress.compat.ollama_answers import OllamaError
from deployments.ingress.http import create_http_app
from deployments.ingress.jobs import asking, runner
from deployments.ingress.kserve.rest.messages import ProtocolError
from deployments.ingress.messages.responses import ErrorAnswer, error_content
from deployments.ingress.service.service import Service

ERRORS = (ErrorAnswer, ProtocolError, MessageError, OllamaError, WebuiError, ComfyError)
Check = Callable[[httpx.Response], Awaitable[None]]
GENERATORS = {"_is_gen_callable": inspect.CO_GENERATOR, "_is_async_gen_callable": inspect.CO_ASYNC_GENERATOR}

compiled_path = functools.cache(fastapi.routing.compile_path)  # nobody writes into its convertors


@pytest.fixture(scope="session")
def as_described() -> Callable[[FastAPI], dict[str, list[Check]]]:
    """Return event hooks for a client of an app: they fail the test when an answer is not as its route describes it."""

    def hooks(app: FastAPI) -> dict[str, list[Check]]:
        async def check(response: httpx.Response) -> None:
            if response.headers.get("content-type") != "application/json":
                return
            described = _described(app, response.request.method, response.request.url.path, response.status_code)
            if described is not None:
                TypeAdapter(described).validate_json(await response.aread(), strict=True)

        return {"response": [check]}

    return hooks


class LazyAdapter:
    """A validator that is built when it is first used: FastAPI has 179 in an application, of which a test uses few."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._make = functools.partial(TypeAdapter, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if "_made" not in vars(self):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)  # as FastAPI does
                self._made = self._make()
        return getattr(self._made, name)


class Dependants:
    """The dependants that FastAPI reads of signatures, kept for endpoints that another application makes of equal code.

    Those that depend on something, or are told of otherwise than by annotations, are read each time.
    """

    def __init__(self, read: Callable[..., Any]) -> None:
        self._read = read
        self._known: dict[Any, Any] = {}

    def __call__(self, *, path: str, call: Callable[..., Any], **options: Any) -> Any:
        is_plain = isinstance(call, types.FunctionType) and not vars(call)
        if not is_plain or not all(isinstance(one, str) for one in call.__annotations__.values()):
            return self._read(path=path, call=call, **options)
        defaults = repr(call.__defaults__), repr(call.__kwdefaults__)
        key = (path, call.__code__, *defaults, *options.items())
        if (known := self._known.get(key)) is None:
            known = self._read(path=path, call=call, **options)
            if known.dependencies:
                return known
            self._known[key] = known
        return dataclasses.replace(known, call=call, dependencies=[])


class Annotations:
    """The annotations of answers that FastAPI reads, kept for endpoints that others make of equal code."""

    def __init__(self, read: Callable[..., Any]) -> None:
        self._read = read
        self._known: dict[types.CodeType, Any] = {}

    def __call__(self, call: Callable[..., Any]) -> Any:
        if not isinstance(call, types.FunctionType) or not isinstance(call.__annotations__.get("return", ""), str):
            return self._read(call)
        if call.__code__ not in self._known:
            self._known[call.__code__] = self._read(call)
        return self._known[call.__code__]


class Fields:
    """The fields of answers that FastAPI makes of their classes, kept for other applications."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = functools.cache(make)

    def __call__(self, **options: Any) -> Any:
        """Make a field; its class may be one that cannot be a key."""
        try:
            return self._make(**options)
        except TypeError:
            return self._make.__wrapped__(**options)


def is_generator(is_one: Callable[[Any], bool], flag: int) -> Callable[[Any], bool]:
    """Return FastAPI's question whether an endpoint is a generator, which a plain function answers by a flag."""

    def is_generator_(call: Any) -> bool:
        is_plain = isinstance(call, types.FunctionType) and not vars(call)
        return bool(call.__code__.co_flags & flag) if is_plain else is_one(call)

    return is_generator_


@pytest.fixture(autouse=True, scope="module")
def quick_applications(dependants: Dependants, answers: Annotations, answer_fields: Fields) -> Iterator[None]:
    """An application, which nearly every test has of its own, is made in less than half the time."""
    plain = BaseModel.model_json_schema.__func__  # type: ignore[attr-defined]
    schema_of = functools.cache(lambda class_, options: plain(class_, **dict(options)))

    def copied(class_: type[BaseModel], **options: Any) -> Any:
        return copy.deepcopy(schema_of(class_, tuple(options.items())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastapi._compat.v2.TypeAdapter", LazyAdapter)
        patch.setattr("fastapi.routing.get_dependant", dependants)
        patch.setattr("fastapi.routing.get_typed_return_annotation", answers)
        patch.setattr("fastapi.routing.create_model_field", answer_fields)
        patch.setattr("fastapi.routing.compile_path", compiled_path)
        for name, flag in (
            ("_is_gen_callable", inspect.CO_GENERATOR),
            ("_is_async_gen_callable", inspect.CO_ASYNC_GENERATOR),
        ):
            patch.setattr(f"fastapi.routing.{name}", is_generator(getattr(fastapi.routing, name), flag))
        patch.setattr(BaseModel, "model_json_schema", classmethod(copied))
        yield


@pytest.fixture(scope="session")
def dependants() -> Dependants:
    return Dependants(fastapi.routing.get_dependant)


@pytest.fixture(scope="session")
def answers() -> Annotations:
    return Annotations(fastapi.routing.get_typed_return_annotation)


@pytest.fixture(scope="session")
def answer_fields() -> Fields:
    return Fields(fastapi.routing.create_model_field)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.service.retries.PAUSE_S", 0.0)


@pytest.fixture
def quick_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs tell of their progress at once, and look for work and for room without pauses."""
    monkeypatch.setattr(runner, "PROGRESS_S", 0.001)
    monkeypatch.setattr(asking, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(asking, "LONGEST_PAUSE_S", 0.002)


@pytest.fixture
def owner(tmp_path: Path, quick_jobs: None) -> Iterator[JobOwner]:
    owner = owner_in(tmp_path)
    yield owner
    owner.close()


@pytest.fixture(scope="module")
def page_server() -> Iterator[PageServer]:
    with page_server_over(Replicas()) as found:
        yield found


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


@pytest.fixture(scope="session")
def open_http(
    as_described: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Replicas], AbstractAsyncContextManager[httpx.AsyncClient]]:
    """Return a function that makes a client of its own application over the replicas, with changes of `ingress`."""
    stored = StoredResponsesConfig(folder=tmp_path_factory.mktemp("responses"))

    @asynccontextmanager
    async def opened(replicas: Replicas, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
        ingress = CONFIG.ingress.model_copy(update={"stored_responses": stored, **changes})
        config = CONFIG.model_copy(update={"ingress": ingress})
        watch = RegistrySnapshot(NamedActor(lambda: replicas))
        handle = FakeHandle(replicas)
        app = create_http_app(Service(config, watch, handle, handle), config)
        hooks = as_described(app)
        async with client_over(app, event_hooks=hooks) as client:
            yield client
        watch.close()

    return opened


@pytest.fixture
async def http(replicas: Replicas, open_http: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with open_http(replicas) as client:
        yield client


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)


def _described(app: FastAPI, method: str, path: str, status: int) -> Any:
    """Return the class of an answer by its route; None where there is no such route, or it has many forms."""
    for route in _routes(app):
        matched, _ = route.matches({"type": "http", "method": method, "path": path})
        if matched == Match.FULL:
            if not route.include_in_schema:
                return None
            documented = route.responses.get(status) or route.responses.get("default", {})
            if not documented and status >= 400:
                raise AssertionError(f"{method} {path} answers {status}, which its route does not document")
            error = next((class_ for class_ in ERRORS if documented.get("content") == error_content(class_)), None)
            return error or documented.get("model") or route.response_model
    return None


def _routes(app: FastAPI) -> list[APIRoute]:
    found: list[APIRoute] = []
    open_ = list(app.routes)
    while open_:
        route: Any = open_.pop(0)
        if isinstance(route, APIRoute):
            found.append(route)
        elif hasattr(route, "original_router"):  # how FastAPI keeps an included router
            open_ += route.original_router.routes
    return found
