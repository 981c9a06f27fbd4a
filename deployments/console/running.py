"""Running the application of a cluster config until told to stop: `atelier up`, the demo and the tests."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import httpx
from rich.filesize import decimal

from cluster.process.logs import serve_logging
from cluster.process.tracing import serve_tracing, tracing_environment
from cluster.ray_seam.ray_files import SERVE_MODULES
from cluster.ray_seam.serve_control import DeployedApp, demand_of, deployed_app, unplaced_demands
from cluster.ray_seam.shims import why_untried
from cluster.ray_seam.template_records import BASE, Template, say_ordinary
from cluster.records.actor_names import NAMESPACE, registry_name
from cluster.records.errors import ProxyUnavailable, RayIncompatible, SessionError
from cluster.start.door_plan import DoorPlan, plan_door
from cluster.start.node_checks import Wanted, node_problems, wanted_of
from cluster.start.process_starts import quick_starts, template_environment, template_stats
from cluster.start.session import check_can_start, check_http_ports, ray_session
from cluster.start.session_records import SessionFile, record_folder
from configs.cluster import ClusterConfig
from deployments.console.applications import check_beside_others, end_cluster
from deployments.console.progress import MAX_MODELS, StartState, StartWatch, unplaced_line, usable_line
from deployments.preflight import device_mistakes
from deployments.services.replica_classes import TEMPLATE, TEXT_ENCODER, WORKER
from weights.operations.externalize import unpacked_bytes
from weights.platform.durable import make_folder
from weights.records.errors import listed

if TYPE_CHECKING:
    from ray.serve import Application

    from cluster.registry.directory import ModelRecord
    from cluster.registry.importing import ImportProgress

__all__ = [
    "check_devices",
    "cluster_up",
    "run_application",
    "stop_on_signals",
    "unpacked_line",
    "unplaced_lines",
    "widened_line",
]

_logger = logging.getLogger("atelier")

_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 2.0
_HEALTH_TIMEOUT_S = 5.0
_SERVE_TEMPLATE = "serve"  # of Serve's own actors and of the ingress


@contextlib.contextmanager
def cluster_up(
    config: ClusterConfig,
    config_path: str,
    stop: threading.Event | None = None,
    show: Callable[[StartState], None] | None = None,
    timeout_s: float | None = None,
) -> Iterator[str]:
    """Run the cluster for the length of the block, and yield its URL once it answers; nothing of it stays after.

    `show` gets the progress. Raises SessionError if the start is blocked, the cluster does not come up
    (within `timeout_s`), or `stop` is set before it does.
    """
    begin_step = partial(_begin_step, show=show, stop=stop)
    begin_step("devices, store and ports are looked at")
    check_devices(config)
    check_store(config)
    if untried := why_untried():
        _logger.warning(untried)
    folder = record_folder()
    check_can_start(config, folder)
    url = f"http://{config.http.host}:{config.http.port}{config.http.route_prefix}".rstrip("/")
    begin_step("Ray starts" if config.ray.address is None else "Ray is joined")
    with SessionFile(config, url, config_path, folder) as session, _ray_and_door(config) as door:
        if stop:
            stop_on_signals(stop, says=True)  # again: Ray has put a handler of its own in place
        if config.ray.address is None:
            session.note_ray()
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        watch = StartWatch(time.monotonic(), is_private=config.ray.address is None, timeout_s=timeout_s)
        begin_step("Serve and the control plane start")
        _start_serve(config, door)
        state = _wait_ready(config, url, watch, show, stop)
        session.mark_ready(usable_line(state))
        for line in state.unplaced.values():
            _logger.warning(line)
        records = _model_records(config)
        for line in filter(None, (widened_line(records), unpacked_line(records))):
            _logger.warning(line)
        for problem in (template_stats() or ((), ()))[1]:
            _logger.warning(f"a process was not forked from a template: {problem}")
        if stop:
            stop_on_signals(stop)
        yield url


def _begin_step(step: str, show: Callable[[StartState], None] | None, stop: threading.Event | None) -> None:
    """Show the next step. Raises SessionError if the start was stopped."""
    if stop and stop.is_set():
        raise SessionError("stopped before it was ready")
    if show:
        show(StartState(step=step))


def check_devices(config: ClusterConfig) -> None:
    """Raise SessionError for a device that replicas could not open: they would fail late, with Serve's message."""
    for keys, text in device_mistakes(config):
        raise SessionError(f"{'.'.join(map(str, keys))}: {text}")


def check_store(config: ClusterConfig) -> None:
    """Raise SessionError for an unwritable store without models. A store with models may be read-only.

    On a Ray that others started, another machine may have it.
    """
    store = config.store.path
    try:
        make_folder(store)
        with tempfile.TemporaryFile(dir=store):
            return
    except OSError as error:
        has_models = os.access(store / "models", os.R_OK) and any((store / "models").iterdir())
        if config.ray.address is None and not has_models:
            raise SessionError(f"store.path: {store} cannot be written: {error.strerror or error}") from None


@contextlib.contextmanager
def _left_clean(config: ClusterConfig) -> Iterator[None]:
    """Remove remains of the cluster from an existing Ray, before the block and after it.

    A killed `up` leaves all its actors. Raises SessionError if one does not end.
    """
    end_cluster(config.name)
    try:
        yield
    finally:
        end_cluster(config.name)


@contextlib.contextmanager
def _ray_and_door(config: ClusterConfig) -> Iterator[DoorPlan | None]:
    """Start Ray, or connect to it, for the length of the block, and yield the plan of HAProxy (`_http_door`).

    A Serve that runs keeps the proxy that it has. The workers of a private Ray are copies of templates, which import
    what they need while Ray starts.
    """
    if config.ray.address is not None:
        import ray

        if config.ray.templates:
            say_ordinary(
                f"the Ray at {config.ray.address} was started by another user, who starts its processes as well"
            )
        _import_application()
        with ray_session(config), _left_clean(config):
            if check_beside_others(config):
                _say_of_nodes(wanted_of(config, has_serve=True, needs_haproxy=False))
                yield None
                return
            check_http_ports(config.http)
            with _http_door(config, sum(node["Alive"] for node in ray.nodes())) as door:
                _say_of_nodes(wanted_of(config, has_serve=False, needs_haproxy=door is not None))
                yield door
        return
    with _http_door(config) as door, contextlib.ExitStack() as stack:
        if config.ray.templates:
            stack.enter_context(quick_starts(_templates(config, _serve_environment(config, door))))
        _import_application()
        stack.enter_context(ray_session(config))
        yield door


def _say_of_nodes(wanted: Wanted) -> None:
    """Log the problems of nodes. Other nodes serve; a shared Ray may have nodes that are not for Atelier."""
    for line in node_problems(wanted):
        _logger.warning(line)


def _templates(config: ClusterConfig, serve_environment: Mapping[str, str]) -> Template:
    """Return the templates of all processes of a cluster.

    Workers and text encoders have one together: what a text encoder imports, a worker does too, and copies of two
    templates would share none of it.
    """
    actors = [f"cluster.{actor}.actor" for actor in ("registry", "keeper", "placement.serving")]
    # `module:name`, at whose last dot an import path ends.
    classes = [":".join(path.rsplit(".", 1)) for path in (WORKER, TEXT_ENCODER)]
    replicas = [Template(TEMPLATE, classes)] if config.worker.standby else []
    serve = Template(_SERVE_TEMPLATE, [*SERVE_MODULES, "deployments.ingress.http"], serve_environment, replicas)
    return Template(BASE, ["ray", *actors], further=[serve])


def _import_application() -> None:
    """Begin to import Serve and the application in a thread: a second's work, while Ray's own start mostly waits."""
    threading.Thread(target=importlib.import_module, args=("deployments.app",), daemon=True).start()


def _serve_environment(config: ClusterConfig, door: DoorPlan | None) -> dict[str, str]:
    """Return the environment of Serve's controller, which its proxies and replicas inherit."""
    if door:
        return door.environment(config) | tracing_environment(config.tracing)
    from cluster.ray_seam.serve_proxy import ENVIRONMENT  # it imports Serve

    return dict(ENVIRONMENT) | tracing_environment(config.tracing)


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


def _start_state(config: ClusterConfig, door: httpx.Client) -> StartState:
    """Ask Serve for replicas, the registry for models and the cluster for its health; silent parts are left out.

    Raises SessionError when Serve says that the application cannot start.
    """
    import ray

    app = DeployedApp({})
    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # while Serve's controller starts
        app = deployed_app(config.name)
    if app.failure:
        raise SessionError(f"the application did not start: {app.failure}")
    records = _model_records(config)
    return StartState(
        {name: (count.num_running, count.num_wanted) for name, count in app.replicas.items()},
        {record.id: record.state for record in records},
        {record.id: record.error for record in records if record.error},
        _imports(config),
        unplaced_lines(config, app),
        _health(door),
    )


def unplaced_lines(config: ClusterConfig, app: DeployedApp) -> dict[str, str]:
    """Return a line for each deployment with replicas that no node has room for."""
    import ray

    counts = {name: count.num_unplaced for name, count in app.replicas.items() if count.num_unplaced}
    if not counts:
        return {}
    lines = {}
    with contextlib.suppress(RayIncompatible, ray.exceptions.RayError, OSError):
        waiting, nodes = unplaced_demands(), [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for name, num_unplaced in counts.items():
            demand = demand_of(getattr(config, name))
            if demand in waiting:
                lines[name] = unplaced_line(name, num_unplaced, demand, nodes)
    return lines


def _imports(config: ClusterConfig) -> dict[str, tuple[int, int]]:
    """Return the registry's imports; nothing if it does not answer."""
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        registry = ray.get_actor(registry_name(config), namespace=NAMESPACE)
        found: Sequence[ImportProgress] = ray.get(registry.import_progress.remote(), timeout=_ANSWER_TIMEOUT_S)
        return {one.id: (one.done_bytes, one.total_bytes) for one in found}
    return {}


def _door_client(url: str) -> httpx.Client:
    """Return a client of the cluster's address. The address is asked directly, and by a new connection each time: an
    old one would lead to a HAProxy that has been replaced.
    """
    return httpx.Client(
        base_url=url, timeout=_HEALTH_TIMEOUT_S, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
    )


def _health(door: httpx.Client) -> str:
    """Return the status of /healthz, "" without an answer."""
    with contextlib.suppress(httpx.HTTPError, ValueError, AttributeError):
        return str(door.get("/healthz").json().get("status", ""))
    return ""


def _model_records(config: ClusterConfig) -> Sequence[ModelRecord]:
    """Return the registry's models; nothing if it does not answer."""
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        registry = ray.get_actor(registry_name(config), namespace=NAMESPACE)
        records: Sequence[ModelRecord] = ray.get(registry.list_models.remote(), timeout=_ANSWER_TIMEOUT_S)
        return records
    return ()


def widened_line(records: Sequence[ModelRecord]) -> str | None:
    """Return a line on the models that `dtype: auto` made float32, None without one."""
    names = {"F16": "float16", "BF16": "bfloat16"}
    records = [record for record in records if not names.keys().isdisjoint(record.widened)]
    types = sorted({names[name] for record in records for name in record.widened if name in names})
    if not types:
        return None
    models = [record.id for record in records]
    shown = listed(models, MAX_MODELS)
    return (
        f"{shown}: run in float32, for this processor computes {' and '.join(types)} about ten times slower "
        f"(dtype: auto; dtype: {types[-1]} keeps the type of the files)"
    )


def unpacked_line(records: Sequence[ModelRecord]) -> str | None:
    """Return a line on the models whose quantized weights have no packed form here, None without one."""
    sizes = {record.id: unpacked_bytes(record.widened) for record in records}
    found = [f"{id_} ({decimal(nbytes)})" for id_, nbytes in sizes.items() if nbytes]
    shown = listed(found, MAX_MODELS)
    return (
        f"{shown}: quantized in a way that nothing here computes with, so the weights are stored unpacked"
        if found
        else None
    )


def _start_serve(config: ClusterConfig, door: DoorPlan | None) -> None:
    """Start Serve with the config's HTTP options, and begin to deploy the application on it. Needs a connected Ray."""
    from ray import serve

    from deployments.app import start_control_plane, versioned_app

    environment = _serve_environment(config, door) | template_environment(_SERVE_TEMPLATE)
    tracing = serve_tracing(config.tracing)
    start_control_plane(config)  # models enter the store while Serve starts
    serve.start(
        http_options={
            "host": config.http.haproxy.replica_host if door else config.http.host,
            "port": config.http.port,
            "request_timeout_s": config.http.proxy_timeout_s,
        },
        controller_options={"runtime_env": {"env_vars": environment}},
        **serve_logging(config.logging.format),
        **tracing,
    )
    run_application(config, versioned_app(config))


def run_application(config: ClusterConfig, app: Application) -> None:
    """Make Serve run the application of a cluster, in place of its present one."""
    from ray import serve

    scales = config.controller.scaling is not None
    target = serve.RunTarget(
        app, name=config.name, route_prefix=config.http.route_prefix, external_scaler_enabled=scales
    )
    serve.run_many([target], wait_for_applications_running=False)  # waiting looks once a second only


def _wait_ready(
    config: ClusterConfig,
    url: str,
    watch: StartWatch,
    show: Callable[[StartState], None] | None,
    stop: threading.Event | None,
) -> StartState:
    """Return when every startable part is up; `show` gets every change.

    Raises SessionError when the start fails, or `stop` is set before it is over.
    """
    last = StartState()
    with _door_client(url) as door:  # one for all looks: a client reads the machine's certificates when it is made
        while True:
            state, now_s = _start_state(config, door), time.monotonic()
            state = watch.look(state, now_s)
            if show and state != last:
                show(state)
            last = state
            if watch.is_over(state, now_s):
                return state
            if stop and stop.is_set():
                raise SessionError("stopped before it was ready")
            time.sleep(_POLL_S)


def stop_on_signals(stop: threading.Event, *, says: bool = False) -> None:
    """Make Ctrl-C, SIGTERM and a closed terminal set `stop` instead of ending the process.

    With `says`, the first signal is acknowledged at once, because a begun step takes time to end.
    """

    def set_stop(*_: object) -> None:
        if says and not stop.is_set():
            with contextlib.suppress(OSError):  # not by a file object, which the interrupted code may hold
                os.write(2, b"\nstopping: what has begun is ended first\n")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, set_stop)
