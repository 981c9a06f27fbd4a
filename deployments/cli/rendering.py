"""A cluster config as plain Ray Serve YAML: what `serve deploy` and KubeRay take."""

from __future__ import annotations

import yaml

from configs.cluster import ClusterConfig

_HEADER = (
    "# Rendered by `atelier render`; deploy with `serve deploy` or as the serveConfigV2 of a KubeRay RayService.\n"
)


def render_serve_yaml(config: ClusterConfig) -> str:
    """The config travels inside as the builder's argument, so this one file is all that a deploy needs."""
    roles = {"ingress": config.ingress, "text_encoder": config.text_encoder, "worker": config.worker}
    document = {
        "http_options": {
            "host": config.http.host,
            "port": config.http.port,
            "request_timeout_s": config.http.proxy_timeout_s,
        },
        "applications": [
            {
                "name": "atelier",
                "route_prefix": "/",
                "import_path": "deployments.app:build_app",
                "args": {"config": config.model_dump(mode="json", exclude_defaults=True)},
                "deployments": [
                    {
                        "name": name,
                        "num_replicas": role.num_replicas,
                        "max_ongoing_requests": role.num_places,
                        "ray_actor_options": {"num_cpus": role.num_cpus, "num_gpus": role.num_gpus},
                    }
                    for name, role in roles.items()
                ],
            }
        ],
    }
    return _HEADER + yaml.safe_dump(document, sort_keys=False)
