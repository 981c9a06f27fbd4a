"""The HTTP edge over fake replicas, with settings of its own, for the clients of other servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from unit.deployments.ingress.http_fakes import CONFIG, Replicas
from unit.deployments.serve_fakes import FakeHandle

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service

OpenApp = Callable[..., AbstractAsyncContextManager[FastAPI]]


@pytest.fixture
def open_app(replicas: Replicas) -> OpenApp:
    """Return a function that makes an application; `fields` replace those of the config."""

    @asynccontextmanager
    async def opened(**fields: Any) -> AsyncIterator[FastAPI]:
        config = ClusterConfig.model_validate(CONFIG.model_dump(exclude_unset=True) | fields)
        watch, handle = RegistrySnapshot(NamedActor(lambda: replicas)), FakeHandle(replicas)
        yield create_http_app(Service(config, watch, handle, handle), config)
        watch.close()

    return opened
