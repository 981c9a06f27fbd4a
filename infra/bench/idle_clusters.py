"""The clusters that the bench of an idle one measures, each below a process of its own: ours, or Ray and Serve alone.

`python -m infra.bench.idle_clusters` reads a line of JSON, says "ready" once the cluster answers, and ends it with its
standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil

from configs.cluster import ClusterConfig


@contextlib.contextmanager
def running_cluster(which: str, config: ClusterConfig) -> Iterator[psutil.Process]:
    """Run the cluster "ours" or "floor" for the length of the block, and yield the process above all of its own.

    Raises OSError when it does not start.
    """
    with subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"which": which, "config": config.model_dump(mode="json")}) + "\n")
        process.stdin.flush()
        if all(line != "ready\n" for line in process.stdout):
            raise OSError(f"the cluster {which!r} does not start: exit code {process.wait()}")
        yield psutil.Process(process.pid)


@contextlib.contextmanager
def _ours(config: ClusterConfig) -> Iterator[None]:
    from deployments.console.running import cluster_up

    with cluster_up(config, "none"):
        yield


@contextlib.contextmanager
def _floor(config: ClusterConfig) -> Iterator[None]:
    """Run Ray with the same room and Serve with one deployment that answers itself, as their defaults have them.

    Without Ray's dashboard and statistics of usage, which our clusters have neither.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import httpx
    import ray
    from ray import serve

    class Echo:
        async def __call__(self, request: Any) -> str:
            return str(request.url.path)

    echo: Any = serve.deployment(Echo)
    ray.init(
        address="local",
        num_cpus=config.ray.num_cpus,
        object_store_memory=config.ray.object_store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        serve.start(http_options={"host": config.http.host, "port": config.http.port})
        serve.run(echo.bind())
        answer = httpx.get(f"http://{config.http.host}:{config.http.port}/", trust_env=False)
        if answer.text != "/":
            raise OSError(f"Serve answers {answer.status_code} {answer.text[:200]!r}")
        yield
    finally:
        ray.shutdown()


def _main() -> None:
    given = json.loads(sys.stdin.readline())
    config = ClusterConfig.model_validate(given["config"])
    with {"ours": _ours, "floor": _floor}[given["which"]](config):
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _main()
