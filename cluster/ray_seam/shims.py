"""The private names of Ray that Atelier depends on, by purpose, and the check that this Ray still has and reads them.

A name that Ray no longer reads can be assigned without an error: the patch would have no effect, and nobody would
notice. Every file of this folder therefore calls `require` before it changes anything, and `atelier doctor` prints
`problems` of all shims.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

from cluster.records.errors import RayIncompatible
from configs.distribution import DISTRIBUTION
from weights.platform.private_names import Shim, problems

__all__ = ["ALL", "Shim", "problems", "require", "unknown_variables", "why_untried"]

_CONTROLLER: Final = "ray.serve._private.controller"
_HAPROXY: Final = "ray.serve._private.haproxy"
_REPLICA: Final = "ray.serve._private.replica"
_ROUTER: Final = "ray.serve.request_router:RequestRouter"
_LOCALITY: Final = "ray.serve.request_router:LocalityMixin"

HAPROXY: Final = Shim(
    "HAProxy: its addresses, its private admin socket, its rules, its restart",
    "Serve does not start",
    changed={
        f"{_CONTROLLER}:HAProxyManager": _CONTROLLER,
        f"{_HAPROXY}:HAProxyApi": _HAPROXY,
        f"{_HAPROXY}:HAProxyApi.start": _HAPROXY,
        f"{_HAPROXY}:HAProxyApi._graceful_reload": _HAPROXY,
        f"{_HAPROXY}:get_haproxy_binary": _HAPROXY,
    },
    used=(
        f"{_HAPROXY}:HAProxyApi._proc",
        f"{_HAPROXY}:HAProxyApi.config_file_path",
        f"{_HAPROXY}:HAProxyManager.__ray_actor_class__",
    ),
)
PROXY_HTTP: Final = Shim(
    "Serve's own proxy: its connections are bounded",
    "Serve's proxy does not start",
    public={"uvicorn.config:HTTP_PROTOCOLS": "uvicorn.config"},
)
REPLICA_HTTP: Final = Shim(
    "an ingress replica's HTTP server: the gate before it",
    "the ingress does not start",
    changed={f"{_REPLICA}:start_asgi_http_server": _REPLICA},
)
REPLICA_LOOPBACK: Final = Shim(
    "calls between replicas on loopback",
    "replicas do not start",
    changed={f"{_REPLICA}:add_port_to_grpc_server": _REPLICA},
)
RAY_LOOPBACK: Final = Shim(
    "a private Ray on loopback",
    "Ray does not start",
    changed={"ray._private.ray_constants:ENABLE_RAY_CLUSTER": "ray._private.services"},
)
ROUTER: Final = Shim(
    "calls to the replica that was chosen",
    "the application does not start",
    changed={f"{_ROUTER}._choose_replica_for_request": "ray.serve._private.router"},
    public={
        f"{_ROUTER}.on_replica_actor_died": "ray.serve._private.router",
        f"{_ROUTER}.on_replica_actor_unavailable": "ray.serve._private.router",
        f"{_ROUTER}.on_request_routed": "ray.serve._private.router",
        f"{_ROUTER}.on_request_completed": "ray.serve._private.router",
        f"{_ROUTER}.on_new_queue_len_info": "ray.serve._private.router",
        f"{_ROUTER}.update_replicas": "ray.serve._private.request_router.request_router",
        f"{_ROUTER}.curr_replicas": "ray.serve._private.router",
        f"{_ROUTER}.create_replica_wrapper": "ray.serve._private.request_router.request_router",
        f"{_LOCALITY}.apply_locality_routing": "ray.serve._private.request_router.pow_2_router",
    },
)
HANDLES: Final = Shim(
    "cheap calls of replicas (gRPC)",
    "calls go through Ray's actors, which is three times as dear",
    used=("ray.serve._private.common:RequestMetadata._by_reference",),  # what the option of a handle sets
    is_needed=False,
)
CHANNELS: Final = Shim(
    "connections between replicas without an answer: they are given up soon; and no proxy of the environment",
    "a node that is gone holds calls up for 20 s, and calls go to an `http_proxy`",
    public={f"grpc.aio:{name}": "ray._private.grpc_utils" for name in ("insecure_channel", "secure_channel")},
    is_needed=False,
)
REQUEST_CONTEXT: Final = Shim(
    "ids of requests in log lines and in calls of replicas",
    "the ingress answers no request",
    used=(
        "ray.serve.context:_serve_request_context",
        "ray.serve.context:_RequestContext.request_id",
    ),
)
SERVE_CONTROL: Final = Shim(
    "the number of replicas, and Serve's HTTP options",
    "the application does not start",
    used=(
        f"{_CONTROLLER}:ServeController.get_serve_instance_details",
        f"{_CONTROLLER}:ServeController.update_deployment_replicas",
        "ray.serve._private.constants:SERVE_CONTROLLER_NAME",
        "ray.serve._private.constants:SERVE_NAMESPACE",
    ),
)
DEMANDS: Final = Shim(
    "replicas that no node has room for",
    "a start that waits for a node does not say so",
    public={"ray.autoscaler.v2.sdk:get_cluster_status": "ray.autoscaler.v2.sdk"},
    is_needed=False,
)
NODE_LOOKS: Final = Shim(
    "Serve's list of nodes, which it looks up each second",
    "it does so ten times a second",
    changed={"ray.serve._private.cluster_node_info_cache:ClusterNodeInfoCache.update": _CONTROLLER},
    is_needed=False,
)
_NODE: Final = {"ray._private.node:Node": "ray._private.worker"}
_NODE_SETTINGS: Final = "ray._private.parameter:RayParams.update"  # which refuses a setting that Ray does not have
SPARE_PROCESSES: Final = Shim(
    "a private Ray without its monitor, log monitor and dashboard's processes",
    "they are started",
    changed={**_NODE, "ray._private.node:Node.start_api_server": "ray._private.node"},
    used=(_NODE_SETTINGS,),
    is_needed=False,
)
TEMPLATES: Final = Shim(
    "workers as copies of templates",
    "workers start in Ray's own way",
    changed={**_NODE, "ray.actor:ActorClassID": "ray.actor"},
    used=(_NODE_SETTINGS, "ray._raylet:Config.initialize"),
    is_needed=False,
)
_SERIALIZATION: Final = "ray._private.serialization"
UNFILLED: Final = Shim(
    "objects that are written where they lie, without being cleared before",
    "they are cleared, and a cold load takes more of the processor",
    changed={f"{_SERIALIZATION}:MessagePackSerializedObject": _SERIALIZATION},
    is_needed=False,
)
ALL: Final = (
    HAPROXY,
    PROXY_HTTP,
    REPLICA_HTTP,
    REPLICA_LOOPBACK,
    RAY_LOOPBACK,
    ROUTER,
    HANDLES,
    CHANNELS,
    REQUEST_CONTEXT,
    SERVE_CONTROL,
    DEMANDS,
    NODE_LOOKS,
    SPARE_PROCESSES,
    TEMPLATES,
    UNFILLED,
)


def require(shim: Shim) -> None:
    """Return when this Ray has and reads everything that the shim needs.

    Raises RayIncompatible, which names what is missing.
    """
    if found := problems(shim):
        import ray

        raise RayIncompatible(f"Ray {ray.__version__} does not fit ({shim.purpose}): {'; '.join(found)}")


def why_untried() -> str:
    """Return why the installed Ray is none that this Atelier was tried with, "" where it is one. Ray is not imported.

    What was tried is in Atelier's own requirements; a checkout that is not installed has none.
    """
    from packaging.requirements import Requirement  # every process imports this file, and few ask

    try:
        wanted = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
        number = metadata.version("ray")
    except metadata.PackageNotFoundError:
        return ""
    for one in wanted:
        if one.name == "ray" and not one.specifier.contains(number, prereleases=True):
            return f"Ray {number} is none that Atelier was tried with ({one.specifier}): pip install '{one}'"
    return ""


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Return those of Serve's environment variables that this Ray does not know. Ray is not imported."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        return sorted(names)
    known = Path(spec.origin).with_name("serve") / "_private" / "constants.py"
    text = known.read_text() if known.is_file() else ""
    return sorted(name for name in names if f'"{name}"' not in text)
