"""`atelier up`: run the application of a cluster config until told to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from ray import serve

from cluster.errors import SessionError
from cluster.session import check_can_start, ray_session, record_folder, recorded
from configs.cluster import ClusterConfig
from deployments.app import APP_NAME, AppArgs, build_app

START_TIMEOUT_S = 300.0
_POLL_S = 0.2


@contextlib.contextmanager
def cluster_up(config: ClusterConfig, config_path: str) -> Iterator[str]:
    """The cluster, answering at the yielded URL for the length of the block; nothing of it stays after.

    Raises SessionError when something is in the way or it does not come up.
    """
    folder = record_folder()
    check_can_start(config, folder)
    url = f"http://{config.http.host}:{config.http.port}"
    with ray_session(config), recorded(config, url, config_path, folder):
        try:
            start_serve(config)
            wait_ready(url, START_TIMEOUT_S)
            yield url
        finally:
            serve.shutdown()


def start_serve(config: ClusterConfig) -> None:
    """Serve with the config's HTTP options, and the application on it. Needs a connected Ray."""
    serve.start(
        http_options={
            "host": config.http.host,
            "port": config.http.port,
            "request_timeout_s": config.http.request_timeout_s,
        }
    )
    app = build_app(AppArgs(config=config.model_dump(mode="json")))
    try:
        serve.run(app, name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        raise SessionError(f"the application did not start: {error}") from error


def wait_ready(url: str, timeout_s: float) -> dict[str, Any]:
    """Until /healthz says that every model is in the store, or known to be unusable."""
    deadline = time.monotonic() + timeout_s
    last = "no answer"
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = httpx.get(f"{url}/healthz", timeout=5).json()
            if answer.get("status") in ("ok", "degraded"):
                return answer
            last = str(answer)
        time.sleep(_POLL_S)
    raise SessionError(f"{url}/healthz was not ready within {timeout_s:.0f} s: {last}")


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, instead of ending the process in the middle of something."""
    stop = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def read_log_tail(path: Path, num_lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])
