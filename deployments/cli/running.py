"""Running the application of a cluster config until told to stop: `atelier up`, the demo and the tests."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httpx

from cluster.actor_names import APP_NAME, NAMESPACE, names_of_cluster, registry_name
from cluster.door.door_plan import DoorPlan, plan_door
from cluster.ending import end_actors
from cluster.errors import ProxyUnavailable, SessionError
from cluster.session import SessionFile, check_can_start, ray_session, record_folder
from cluster.templates.launch import BASE
from cluster.templates.starting import running_templates, say_ordinary, template_environment, template_problems
from cluster.templates.template import Template
from configs.cluster import ClusterConfig
from deployments.cli.progress import StartState
from deployments.services.replica_classes import TEXT_ENCODER, WORKER

if TYPE_CHECKING:
    from cluster.registry.directory import ModelRecord

__all__ = ["APP_NAME", "START_TIMEOUT_S", "check_devices", "cluster_up", "stop_on_signals"]

_logger = logging.getLogger("atelier")

START_TIMEOUT_S = 300.0
_POLL_S = 0.1
_PROGRESS_POLL_S = 0.5
_ANSWER_TIMEOUT_S = 2.0
_SERVE_TEMPLATE = "serve"  # of Serve's own actors and of the ingress


@contextlib.contextmanager
def cluster_up(
    config: ClusterConfig,
    config_path: str,
    stop: threading.Event | None = None,
    show: Callable[[StartState], None] | None = None,
) -> Iterator[str]:
    """Run the cluster for the length of the block, and yield its URL once it answers; nothing of it stays after.

    `show` is told of the progress meanwhile, in a thread. Raises SessionError when something is in the way, it does
    not come up, or `stop` is set before it does.
    """
    check_devices(config)
    folder = record_folder()
    check_can_start(config, folder)
    url = f"http://{config.http.host}:{config.http.port}"
    with SessionFile(config, url, config_path, folder) as session, _ray_and_door(config) as door:
        if stop:
            stop_on_signals(stop)  # again: Ray has put a handler of its own in place
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        with _left_clean(config):
            with _shown_progress(config, show):
                _start_serve(config, door)
                _wait_running(START_TIMEOUT_S, stop)
                _wait_ready(url, START_TIMEOUT_S, stop)
            session.mark_ready()
            for problem in template_problems():
                _logger.warning(f"a process has imported everything itself: {problem}")
            yield url


def check_devices(config: ClusterConfig) -> None:
    """Raise SessionError for a device that replicas could not open: they would say so late, and in Serve's words.

    Only of a private Ray is it known: other nodes have other devices.
    """
    services = {"worker": config.worker.device, "text_encoder": config.text_encoder.device}
    if config.ray.address is not None or all(name.startswith("cpu") for name in services.values()):
        return
    from weights.errors import WeightsError
    from weights.memory.devices import check_device

    for service, name in services.items():
        try:
            check_device(name, config.simulated)
        except WeightsError as error:
            raise SessionError(f"{service}.device: {error}") from None


@contextlib.contextmanager
def _left_clean(config: ClusterConfig) -> Iterator[None]:
    """Remove what is left of the cluster from a Ray that was there before, at the start of the block and after it.

    An `up` that was killed leaves all of its own. Replicas go before actors, which they would start again.
    Raises SessionError when something would not end.
    """
    if config.ray.address is None:  # a private one ends with everything on it
        yield
        return
    of_cluster = functools.partial(names_of_cluster, config.name)
    _stop_serving()
    end_actors(of_cluster)
    try:
        yield
    finally:
        try:
            _stop_serving()
        finally:
            end_actors(of_cluster)


@contextlib.contextmanager
def _ray_and_door(config: ClusterConfig) -> Iterator[DoorPlan | None]:
    """Start Ray, or connect to it, for the length of the block, and yield the plan of HAProxy (`_http_door`).

    The workers of a private Ray are copies of templates, which import what they need while Ray starts.
    """
    if config.ray.address is not None:
        import ray

        if config.ray.templates:
            say_ordinary(f"the Ray at {config.ray.address} was started by others, who start its processes as well")
        _import_application()
        with ray_session(config), _http_door(config, sum(node["Alive"] for node in ray.nodes())) as door:
            yield door
        return
    with _http_door(config) as door, contextlib.ExitStack() as stack:
        if config.ray.templates:
            stack.enter_context(running_templates(_templates(config, _serve_environment(config, door))))
        _import_application()
        stack.enter_context(ray_session(config))
        yield door


def _templates(config: ClusterConfig, serve_environment: Mapping[str, str]) -> Template:
    """Return the templates of all processes of a cluster: those of the replicas are named after their deployments."""
    actors = [f"cluster.{actor}.actor" for actor in ("registry", "keeper", "encodings", "controller")]
    of_serve = [f"ray.serve._private.{part}" for part in ("controller", "haproxy", "proxy", "replica")]
    # `module:name`, at whose last dot an import path ends.
    replicas = [
        Template(name, [":".join(path.rsplit(".", 1))])
        for name, path in (("worker", WORKER), ("text_encoder", TEXT_ENCODER))
    ]
    torch = [Template("", ["torch"], further=replicas)] if config.worker.standby else []
    serve = Template(_SERVE_TEMPLATE, [*of_serve, "deployments.ingress.http"], serve_environment, torch)
    return Template(BASE, ["ray", *actors], further=[serve])


def _import_application() -> None:
    """Begin to import Serve and the application in a thread: a second's work, while Ray's own start mostly waits."""
    threading.Thread(target=importlib.import_module, args=("deployments.app",), daemon=True).start()


def _serve_environment(config: ClusterConfig, door: DoorPlan | None) -> dict[str, str]:
    """Return the environment of Serve's controller, which its proxies and replicas inherit."""
    if door:
        return door.environment(config)
    from cluster.door.serve_proxy import ENVIRONMENT  # it imports Serve

    return dict(ENVIRONMENT)


@contextlib.contextmanager
def _http_door(config: ClusterConfig, num_nodes: int = 1) -> Iterator[DoorPlan | None]:
    """Yield the plan of HAProxy, or None for Serve's own proxy. Says why when the config asks for HAProxy.

    Raises SessionError when a port that the config asks for is taken.
    """
    door = None
    if config.http.proxy == "haproxy":
        try:
            door = plan_door(config, num_nodes)
        except ProxyUnavailable as reason:
            _logger.warning(f"Serve's own proxy answers, which is slower than HAProxy: {reason}")
    try:
        yield door
    finally:
        if door:
            door.remove_files()


@contextlib.contextmanager
def _shown_progress(config: ClusterConfig, show: Callable[[StartState], None] | None) -> Iterator[None]:
    """Tell `show` of every change of the cluster's state, for the length of the block."""
    if show is None:
        yield
        return
    done = threading.Event()

    def follow() -> None:
        last = StartState()
        while not done.wait(_PROGRESS_POLL_S):
            state = _start_state(config)
            if state != last:
                show(state)
            last = state

    # HAZARD: it must end before Ray does, since calls without a Ray would start another one.
    following = threading.Thread(target=follow, name="progress", daemon=True)
    following.start()
    try:
        yield
    finally:
        done.set()
        following.join()
    show(_start_state(config))


def _start_state(config: ClusterConfig) -> StartState:
    """Ask Serve for the replicas and the registry for the models; who does not answer yet is left out."""
    import ray

    replicas: dict[str, tuple[int, int]] = {}
    records: Sequence[ModelRecord] = ()
    roles = {"ingress": config.ingress, "text_encoder": config.text_encoder, "worker": config.worker}
    with contextlib.suppress(Exception):  # Serve's own, while its controller starts
        from ray import serve
        from ray.serve.schema import ReplicaState

        deployments = serve.status().applications[APP_NAME].deployments
        running = {name: found.replica_states.get(ReplicaState.RUNNING, 0) for name, found in deployments.items()}
        replicas = {name: (running.get(name, 0), role.num_replicas) for name, role in roles.items()}
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        registry = ray.get_actor(registry_name(config), namespace=NAMESPACE)
        records = ray.get(registry.list_models.remote(), timeout=_ANSWER_TIMEOUT_S)
    states = {record.id: record.state for record in records}
    return StartState(replicas, states, {record.id: record.error for record in records if record.error})


def _start_serve(config: ClusterConfig, door: DoorPlan | None) -> None:
    """Start Serve with the config's HTTP options, and begin to deploy the application on it. Needs a connected Ray."""
    from ray import serve
    from ray.serve.api import _run  # what `serve.run` calls; that one looks once a second whether all replicas run

    from deployments.app import AppArgs, build_app

    environment = _serve_environment(config, door) | template_environment(_SERVE_TEMPLATE)
    app = build_app(AppArgs(config=config.model_dump(mode="json")))  # models enter the store while Serve starts
    serve.start(
        http_options={
            "host": config.http.haproxy.replica_host if door else config.http.host,
            "port": config.http.port,
            "request_timeout_s": config.http.proxy_timeout_s,
        },
        controller_options={"runtime_env": {"env_vars": environment}},
    )
    scales = config.controller.scaling is not None
    _run(app, name=APP_NAME, route_prefix="/", external_scaler_enabled=scales, _blocking=False)


def _wait_running(timeout_s: float, stop: threading.Event | None = None) -> None:
    """Return once all deployments run.

    Raises SessionError when one does not start, after `timeout_s`, or when `stop` is set before.
    """
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ApplicationStatus

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = _get_global_client().get_serve_status(APP_NAME).app_status
        if found.status == ApplicationStatus.RUNNING:
            return
        if found.status == ApplicationStatus.DEPLOY_FAILED:
            raise SessionError(f"the application did not start: {found.message}")
        if stop and stop.is_set():
            raise SessionError("stopped before it was ready")
        time.sleep(_POLL_S)
    raise SessionError(f"the application did not start within {timeout_s:.0f} s: {found.message}")


def _stop_serving() -> None:
    """Take the application off a Ray that goes on, and Serve itself when nobody else serves there."""
    from ray import serve

    if APP_NAME in serve.status().applications:
        serve.delete(APP_NAME)
    if not serve.status().applications:
        serve.shutdown()


def _wait_ready(url: str, timeout_s: float, stop: threading.Event | None = None) -> dict[str, Any]:
    """Return what /healthz answers once every model is in the store, or known to be unusable.

    Raises SessionError after `timeout_s`, or when `stop` is set before.
    """
    deadline = time.monotonic() + timeout_s
    last = "no answer"
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = httpx.get(f"{url}/healthz", timeout=5).json()
            if answer.get("status") in ("ok", "degraded"):
                return answer
            last = str(answer)
        if stop and stop.is_set():
            raise SessionError("stopped before it was ready")
        time.sleep(_POLL_S)
    raise SessionError(f"{url}/healthz was not ready within {timeout_s:.0f} s: {last}")


def stop_on_signals(stop: threading.Event) -> None:
    """Make Ctrl-C, SIGTERM and a closed terminal set `stop` instead of ending the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
