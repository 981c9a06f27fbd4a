"""An application over fake replicas whose registry keeps jobs, without Ray."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from kit.waiting import until
from ray.exceptions import ActorDiedError, RayTaskError
from unit.deployments.ingress.http_fakes import CONFIG, client_over
from unit.deployments.serve_fakes import FakeHandle

from cluster.jobs.owner import JobOwner
from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from configs.jobs import JobsConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service

ENDED = ("done", "failed", "cancelled")


class RegistryWithJobs:
    """Replicas, and a registry with jobs: what the owner has is asked of it, all else of the replicas.

    dying: The methods whose next call it dies of; the value says whether it has acted by then.
    """

    def __init__(self, replicas: Any, owner: JobOwner, dying: dict[str, bool] | None = None) -> None:
        self.owner = owner
        self._dying = {} if dying is None else dying
        self._replicas = replicas
        self._began_s = time.monotonic()

    async def on_up_s(self) -> float:
        return time.monotonic() - self._began_s

    def __getattr__(self, name: str) -> Any:
        if name == "up_s":
            return SimpleNamespace(remote=self.on_up_s)
        parts = (self.owner, self.owner.files, self.owner.hooks, self.owner.parts)
        part = next((part for part in parts if hasattr(type(part), name)), None)
        if part is None:
            return getattr(self._replicas, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            has_acted = self._dying.pop(name, None)
            if has_acted is False:
                raise ActorDiedError
            try:
                answer = await getattr(part, name)(*arguments, **options)
            except Exception as error:
                raise RayTaskError(name, "Traceback of the actor", error) from None
            if has_acted:
                raise ActorDiedError
            return answer

        return SimpleNamespace(remote=call)


@asynccontextmanager
async def ingress_over(
    replicas: Any,
    owner: JobOwner,
    as_described: Any,
    config: ClusterConfig = CONFIG,
    num_runners: int = 1,
    dying: dict[str, bool] | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of one more ingress replica. `num_runners` 0: it runs no jobs."""
    registry, handle = RegistryWithJobs(replicas, owner, dying), FakeHandle(replicas)
    watch = RegistrySnapshot(NamedActor(lambda: registry))
    app = create_http_app(Service(config, watch, handle, handle), config.model_copy(update={"grpc": None}))
    async with AsyncExitStack() as stack:
        if num_runners:
            await stack.enter_async_context(app.router.lifespan_context(app))
        yield await stack.enter_async_context(client_over(app, event_hooks=as_described(app)))
    watch.close()


def config_with_jobs(config: ClusterConfig = CONFIG, **jobs: Any) -> ClusterConfig:
    """Return a config with other settings of jobs."""
    return config.model_copy(update={"jobs": JobsConfig.model_validate(jobs)})


def owner_in(folder: Path, **jobs: Any) -> JobOwner:
    """Return the owner of a folder."""
    return JobOwner(folder / "jobs", JobsConfig.model_validate(jobs))


async def ended(http: httpx.AsyncClient, id_: str, **options: Any) -> dict[str, Any]:
    """Return a job once it has ended."""

    async def look() -> Any:
        job = (await http.get(f"/v1/jobs/{id_}", **options)).json()
        return job if job["status"] in ENDED else None

    found: dict[str, Any] = await until(look)
    return found
