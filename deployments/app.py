"""The composition root: a cluster config -> a Serve application, and every actor kind that the cluster has.

    actor kind          how many                     started by
    registry            one per cluster              a replica, or `start_control_plane`
    keeper              one per node with replicas   the registry, when `ModelReplica` asks for its node's keeper
    controller          one, unless it is off        a worker or an ingress, or `start_control_plane`
                        and there is one ingress
    text encoder        config.text_encoder          Serve; bound below
    worker              config.worker                Serve; bound below
    ingress             config.ingress               Serve; bound below

The first three are named, detached actors. Whoever needs one gets it by name, and starts it when it is not there: all
of them are back after a crash. They end with the last replica (`cluster/registry/users.py`).
`serve run deployments.app:build_app config=configs/clusters/demo.yaml` and `atelier up`
both come through here.
"""

# No `from __future__ import annotations` here: Serve reads the builder's annotation to validate its arguments.
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.placement.serving.actor import connect_controller
from cluster.process.logs import serve_logging
from cluster.ray_seam.placed_router import CLASS as PLACED_ROUTER
from cluster.ray_seam.serve_control import demand_of, replaced_by_version
from cluster.records.actor_names import hash_of
from cluster.registry.actor import connect_registry, tell_registry
from cluster.start.process_starts import template_environment
from configs.changes import BEYOND, Concern
from configs.cluster import ClusterConfig, LoggingConfig, ReplicaConfig, WorkerConfig
from deployments.ingress.http import Ingress
from deployments.pipelines.planning import load_checked_config
from deployments.services.replica_classes import TEMPLATE, TEXT_ENCODER, WORKER

__all__ = ["AppArgs", "build_app", "start_control_plane", "versioned_app"]

_CONCERNS: Final = {"text_encoder": Concern.TEXT_ENCODER, "worker": Concern.WORKER, "ingress": Concern.INGRESS}
ENCODER_CHECK_S: Final = 2.0  # workers that wait for it learn from Serve's own checks that it is gone


class AppArgs(BaseModel, extra="forbid"):
    """Arguments of the builder: the path of a cluster YAML, or its contents."""

    config: str | dict[str, Any]


def build_app(args: AppArgs) -> Application:
    """Bind the text encoder, the worker that calls it and the ingress in front of both.

    A control plane that goes on under this config learns of it here. Raises ConfigFileError or pydantic's
    ValidationError for a config that cannot be used.
    """
    config = (
        load_checked_config(args.config) if isinstance(args.config, str) else ClusterConfig.model_validate(args.config)
    )
    tell_registry(config)
    return _bind(config, {})


def versioned_app(config: ClusterConfig, environments: Mapping[str, Mapping[str, str]] | None = None) -> Application:
    """Return the application such that Serve, where it runs already, replaces what its config now concerns alone.

    `environments` are those of the replicas by deployment; default: those of this process's templates.
    """
    return _bind(config, {name: hash_of(config, concern, *BEYOND) for name, concern in _CONCERNS.items()}, environments)


def _bind(
    config: ClusterConfig, versions: Mapping[str, str], environments: Mapping[str, Mapping[str, str]] | None = None
) -> Application:
    def deployment(class_: type | str, name: str, settings: ReplicaConfig) -> serve.Deployment:
        variables = template_environment(TEMPLATE) if environments is None else environments.get(name, {})
        made = _deployment(class_, name, settings, variables if isinstance(class_, str) else {}, config.logging)
        return replaced_by_version(made, versions[name]) if name in versions else made

    encoder = deployment(TEXT_ENCODER, "text_encoder", config.text_encoder)
    encoder = encoder.options(health_check_period_s=ENCODER_CHECK_S).bind(config)
    worker = deployment(WORKER, "worker", config.worker).bind(config, encoder)
    return deployment(Ingress, "ingress", config.ingress).bind(config, encoder, worker)


def start_control_plane(config: ClusterConfig) -> None:
    """Start what the replicas would start: models are imported while Serve starts.

    For who ends it, too, where no replica comes. Needs a connected Ray.
    """
    connect_registry(config)
    if config.has_controller:
        connect_controller(config)


def _deployment(
    class_: type | str, name: str, settings: ReplicaConfig, variables: Mapping[str, str], logs: LoggingConfig
) -> serve.Deployment:
    """Return the deployment of a class, which Serve also takes as an import path that only replicas follow."""
    options = settings.ray_options
    if variables:
        options["runtime_env"] = {"env_vars": dict(variables)}
    placed = RequestRouterConfig(request_router_class=PLACED_ROUTER)
    return serve.deployment(
        name=name,
        request_router_config=placed if class_ is not Ingress else RequestRouterConfig(),
        num_replicas=settings.num_replicas,
        max_ongoing_requests=settings.max_ongoing_requests,
        ray_actor_options=options,
        **_places_of_ranks(settings),
        **serve_logging(logs.format),
    )(class_)


def _places_of_ranks(settings: ReplicaConfig) -> dict[str, Any]:
    """Return Serve's options for a replica of several ranks: a place for each, reserved together; rank 0 has the first.

    HAZARD: what such a replica starts has these places too, and ends with them, unless Ray is told otherwise
    (`OWN_PLACE`).
    """
    if settings.num_processes == 1 or not isinstance(settings, WorkerConfig):
        return {}
    labels = settings.placement.labels
    return {
        "placement_group_bundles": [dict(demand_of(settings))] * settings.num_processes,
        "placement_group_strategy": settings.ranks.strategy,
        **({"placement_group_bundle_label_selector": [dict(labels)]} if labels else {}),
    }
