"""The ingress deployment. Light on purpose: no torch, so that this replica starts fast and stays small."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.models.watching import DirectoryWatch
from cluster.registry import connect_registry
from configs.cluster import ClusterConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.service import Service


@serve.ingress()
class Ingress(Service):
    """The HTTP edge, and the methods of `serve.get_app_handle("atelier")`: generate, embed, chat, complete."""

    def __init__(self, config: ClusterConfig, encoder: DeploymentHandle, worker: DeploymentHandle) -> None:
        super().__init__(config, DirectoryWatch(lambda: connect_registry(config)), encoder, worker)

    def __serve_build_asgi_app__(self) -> Any:
        return create_http_app(self, self._config)
