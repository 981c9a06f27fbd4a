"""The pages and the API over fake replicas, on a port of this machine, for tests with a real browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import uvicorn
from kit.waiting import wait_until
from unit.deployments.ingress.http_fakes import CONFIG, Replicas
from unit.deployments.ingress.jobs.job_fakes import RegistryWithJobs, owner_in
from unit.deployments.serve_fakes import FakeHandle

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service
from infra.ports import free_port


class PageServer(NamedTuple):
    """A server, and the replicas behind it."""

    url: str
    replicas: Any


@contextmanager
def page_server_over(replicas: Replicas, jobs: Path | None = None) -> Iterator[PageServer]:
    """Serve the pages and the API over replicas, in a thread, without a controller; with a folder, it runs `jobs`."""
    changes = {"access": {"allowed_hosts": ["127.0.0.1"]}, "controller": {"enabled": False}}
    config = ClusterConfig.model_validate(CONFIG.model_dump(mode="json", exclude_unset=True) | changes)
    owner = None if jobs is None else owner_in(jobs)
    registry = replicas if owner is None else RegistryWithJobs(replicas, owner)
    watch, handle, port = RegistrySnapshot(NamedActor(lambda: registry)), FakeHandle(replicas), free_port()
    app = create_http_app(Service(config, watch, handle, handle), config)
    lifespan: Literal["on", "off"] = "off" if owner is None else "on"
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, lifespan=lifespan))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, "the server has started")
    try:
        yield PageServer(f"http://127.0.0.1:{port}", replicas)
    finally:
        server.should_exit = True
        thread.join()
        watch.close()
        if owner is not None:
            owner.close()
