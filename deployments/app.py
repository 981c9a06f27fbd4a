"""The composition root: a cluster config -> a Serve application.

`serve run deployments.app:build_app config=configs/clusters/demo.yaml` and `atelier up` both come through here.
"""

# No `from __future__ import annotations` here: Serve reads the builder's annotation to validate its arguments.
from typing import Any, Final

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application

from configs.cluster import ClusterConfig, ReplicaConfig
from deployments.checked_config import load_checked_config
from deployments.ingress.deployment import Ingress
from deployments.services.text_encoder import TextEncoderService
from deployments.services.worker import Worker

ENCODER_CHECK_S: Final = 2.0  # workers that wait for it learn from Serve's own checks that it is gone


class AppArgs(BaseModel):
    """Arguments of the builder: the path of a cluster YAML, or its contents."""

    model_config = ConfigDict(extra="forbid")
    config: str | dict[str, Any]


def build_app(args: AppArgs) -> Application:
    """The text-encoder service, the worker that calls it, and the ingress in front of both.

    Raises ConfigFileError or pydantic's ValidationError for a config that cannot be used.
    """
    config = (
        load_checked_config(args.config) if isinstance(args.config, str) else ClusterConfig.model_validate(args.config)
    )
    encoder = _deployment(TextEncoderService, "text_encoder", config.text_encoder)
    encoder = encoder.options(health_check_period_s=ENCODER_CHECK_S).bind(config)
    worker = _deployment(Worker, "worker", config.worker).bind(config, encoder)
    return _deployment(Ingress, "ingress", config.ingress).bind(config, encoder, worker)


def _deployment(class_: type, name: str, settings: ReplicaConfig) -> serve.Deployment:
    resources = {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus}
    return serve.deployment(class_).options(
        name=name,
        num_replicas=settings.num_replicas,
        max_ongoing_requests=settings.num_places,
        ray_actor_options=resources,
    )
