"""Running the application of a cluster config until told to stop: `atelier up`, the demo and the tests."""

from __future__ import annotations

import contextlib
import importlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import ray

from cluster.actor_names import APP_NAME, NAMESPACE, registry_name
from cluster.door.door_plan import DoorPlan, plan_door
from cluster.errors import ProxyUnavailable, SessionError
from cluster.registry.directory import ModelRecord
from cluster.session import SessionFile, check_can_start, end_actors, ray_session, record_folder
from configs.cluster import ClusterConfig
from deployments.cli.progress import StartState

__all__ = ["APP_NAME", "START_TIMEOUT_S", "check_devices", "cluster_up", "stop_on_signals"]

_logger = logging.getLogger("atelier")

START_TIMEOUT_S = 300.0
_POLL_S = 0.2
_PROGRESS_POLL_S = 0.5
_ANSWER_TIMEOUT_S = 2.0


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
    # Serve and the application take a second to import; Ray's own start is mostly waiting.
    threading.Thread(target=importlib.import_module, args=("deployments.app",), daemon=True).start()
    with SessionFile(config, url, config_path, folder) as session, ray_session(config):
        if stop:
            stop_on_signals(stop)  # again: Ray has put a handler of its own in place
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        with _http_door(config) as door, _left_clean(config):
            with _shown_progress(config, show):
                _start_serve(config, door)
                _wait_ready(url, START_TIMEOUT_S, stop)
            session.mark_ready()
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
    _stop_serving()
    end_actors(config.name)
    try:
        yield
    finally:
        try:
            _stop_serving()
        finally:
            end_actors(config.name)


@contextlib.contextmanager
def _http_door(config: ClusterConfig) -> Iterator[DoorPlan | None]:
    """Yield the plan of HAProxy, or None for Serve's own proxy. Says why when the config asks for HAProxy.

    Raises SessionError when a port that the config asks for is taken.
    """
    door = None
    if config.http.proxy == "haproxy":
        try:
            door = plan_door(config, sum(node["Alive"] for node in ray.nodes()))
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
    """Start Serve with the config's HTTP options, and the application on it. Needs a connected Ray.

    Raises SessionError when a deployment does not start.
    """
    from ray import serve

    from cluster.door.serve_proxy import ENVIRONMENT
    from deployments.app import AppArgs, build_app

    environment = door.environment(config) if door else dict(ENVIRONMENT)
    app = build_app(AppArgs(config=config.model_dump(mode="json")))  # models enter the store while Serve starts
    serve.start(
        http_options={
            "host": config.http.haproxy.replica_host if door else config.http.host,
            "port": config.http.port,
            "request_timeout_s": config.http.proxy_timeout_s,
        },
        controller_options={"runtime_env": {"env_vars": environment}},
    )
    try:
        scales = config.controller.scaling is not None
        serve.run(app, name=APP_NAME, route_prefix="/", external_scaler_enabled=scales)
    except RuntimeError as error:
        raise SessionError(f"the application did not start: {error}") from error


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
