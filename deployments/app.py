"""The composition root: a cluster config -> a Serve application, and every actor kind that the cluster has.

    actor kind          how many                     started by
    registry            one per cluster              `connect_registry`, below
    keeper              one per node with replicas   the registry, when `ModelReplica` asks for its node's keeper
    shared encodings    one per cluster              `connect_shared_encodings`, below
    admission queue     one, for several ingresses   `connect_shared_queue`, below
    controller          one, unless it is off        `connect_controller`, below
    text encoder        config.text_encoder          Serve; bound below
    worker              config.worker                Serve; bound below
    ingress             config.ingress               Serve; bound below

The first five are named, detached actors. Whoever needs one gets it by name, and starts it when it is not there: all
of them are back after a crash. `serve run deployments.app:build_app config=configs/clusters/demo.yaml` and `atelier up`
both come through here.
"""

# No `from __future__ import annotations` here: Serve reads the builder's annotation to validate its arguments.
from typing import Any, Final

import ray
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.actor_names import cluster_key
from cluster.control.shared_queue import connect_shared_queue
from cluster.controller.actor import connect_controller
from cluster.encodings.actor import connect_shared_encodings
from cluster.ray_calls import call_actor
from cluster.registry.actor import WeightRegistry, connect_registry
from cluster.templates.starting import template_environment
from configs.cluster import ClusterConfig, ReplicaConfig
from deployments.ingress.http import Ingress
from deployments.pipelines.checked_config import load_checked_config
from deployments.services.placed_router import CLASS as PLACED_ROUTER
from deployments.services.replica_classes import TEXT_ENCODER, WORKER

ENCODER_CHECK_S: Final = 2.0  # workers that wait for it learn from Serve's own checks that it is gone


class AppArgs(BaseModel):
    """Arguments of the builder: the path of a cluster YAML, or its contents."""

    model_config = ConfigDict(extra="forbid")
    config: str | dict[str, Any]


def build_app(args: AppArgs) -> Application:
    """Start the control plane, and bind the text encoder, the worker that calls it and the ingress in front of both.

    Raises ConfigFileError or pydantic's ValidationError for a config that cannot be used.
    """
    config = (
        load_checked_config(args.config) if isinstance(args.config, str) else ClusterConfig.model_validate(args.config)
    )
    if ray.is_initialized():  # `serve run` and `serve build` come here before Ray: then the replicas start them
        call_actor(connect_registry(config), WeightRegistry.expect_replicas)
        if config.text_encoder.shared_cache_bytes:
            connect_shared_encodings(cluster_key(config), config.text_encoder.shared_cache_bytes)
        if config.ingress.num_replicas > 1:
            connect_shared_queue(config)
        if config.controller.enabled:
            connect_controller(config)

    encoder = _deployment(TEXT_ENCODER, "text_encoder", config.text_encoder)
    encoder = encoder.options(health_check_period_s=ENCODER_CHECK_S).bind(config)
    worker = _deployment(WORKER, "worker", config.worker).bind(config, encoder)
    return _deployment(Ingress, "ingress", config.ingress).bind(config, encoder, worker)


def _deployment(class_: type | str, name: str, settings: ReplicaConfig) -> serve.Deployment:
    """Return the deployment of a class, which Serve also takes as an import path that only replicas follow."""
    options: dict[str, Any] = {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus}
    if isinstance(class_, str) and (variables := template_environment(name)):
        options["runtime_env"] = {"env_vars": variables}
    placed = RequestRouterConfig(request_router_class=PLACED_ROUTER)
    return serve.deployment(
        name=name,
        request_router_config=placed if class_ is not Ingress else RequestRouterConfig(),
        num_replicas=settings.num_replicas,
        max_ongoing_requests=settings.max_ongoing_requests,
        ray_actor_options=options,
    )(class_)
