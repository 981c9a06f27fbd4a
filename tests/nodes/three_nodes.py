"""A cluster of the demo models over three nodes of this machine, and requests that count what a disturbance costs.

Only the head's disk has the store: weights, configs and tokenizers come to the others from it. The clocks of the nodes
are 5 s apart.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import httpx
import psutil
import yaml
from integration.harness import DEMO_MODELS, ROOT
from kit.waiting import wait_until
from nodes.namespaces import Network, Node

NAMES: Final = ("head", "second", "third")
PORT, RAY_PORT = 8000, 6379
NUM_CPUS: Final = 3  # that a node claims: one worker fits, and all text encoders and ingresses that there are
CLOCKS_OFF_S: Final = {"second": -5, "third": 5} if shutil.which("cc") else {}
OBJECT_STORE_BYTES: Final = 160 * 2**20
ENVIRONMENT: Final = {
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # Serve stops replicas 20 s before: of Ray's 30, 10 would be left to start others.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "100",
    "RAY_AUTH_MODE": "disabled",  # or a token of this user's would lock the head, and the others have none
    "COLUMNS": "200",
}
ATELIER: Final = (sys.executable, "-m", "deployments.cli.main")
START_S, WHOLE_S, END_S, ANSWER_S = 420.0, 300.0, 120.0, 60.0
APPLY_S: Final = 400.0
MAX_STARTS: Final = 3  # of Ray on a node
NUM_CLIENTS: Final = 2
QUESTIONS: Final[list[tuple[str, dict[str, Any]]]] = [
    ("chat/completions", {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}]}),
    ("images/generations", {"model": "digits-flux", "prompt": "a handwritten three", "seed": 3}),
    ("chat/completions", {"model": "adder", "messages": [{"role": "user", "content": "What is 31 + 48?"}]}),
    ("embeddings", {"model": "texts-bert", "input": "the old river runs slowly past every quiet house"}),
]


class ThreeNodes:
    """Three Ray nodes, and `atelier up` on the head, for the length of a `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.network = Network(folder)
        self._rays: dict[str, subprocess.Popen[str]] = {}
        self.nodes: dict[str, Node] = {}

    def __enter__(self) -> Self:
        self.network.__enter__()
        try:
            for name in NAMES:
                self.join(name)
            self.up("studio")
            self.wait_whole()
        except BaseException:
            self.network.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.network.__exit__()

    @property
    def head(self) -> Node:
        return self.nodes["head"]

    def join(self, name: str, *beside: str) -> None:
        """Start a node and its Ray, or another one in the place of one that is gone, and return once it has joined.

        A command that runs `beside` its Ray begins before.
        Ray's processes wait 15 s for each other. Where a busy machine takes longer, Ray is started again, as whoever
        watches a node does. Raises OSError.
        """
        for _ in range(MAX_STARTS):
            self.nodes[name] = node = self.network.add(name, CLOCKS_OFF_S.get(name, 0))
            if beside:
                self._start(node, "beside", *beside)
            log = self._folder / f"ray-{len([*self._folder.glob('ray-*.log')])}.log"
            self._rays[name] = self._start(node, log.stem, *self._ray_command(node))
            wait_until(partial(self._has_begun, name, log), f"Ray on {name}", START_S)
            if self.runs_ray(name):
                return
        raise OSError(f"Ray does not start on {name}: {log.read_text()[-4000:]}")

    def _has_begun(self, name: str, log: Path) -> bool:
        return "Ray runtime started" in log.read_text() or not self.runs_ray(name)

    def _ray_command(self, node: Node) -> list[str]:
        joins = (
            [f"--address={self.nodes['head'].address}:{RAY_PORT}"]
            if node.name != "head"
            else ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        )
        room = [f"--num-cpus={NUM_CPUS}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        where = f"--node-ip-address={node.address}"
        return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *joins, *room, where]

    def up(self, name: str, **changed: Any) -> None:
        """Start `atelier up` of a cluster with that name on the head, and return once all of it runs."""
        fields = fields_of(name) | changed
        (self._folder / "head" / f"{name}.yaml").write_text(yaml.safe_dump(fields))
        process = self._start(self.head, name, *ATELIER, "up", f"/mnt/{name}.yaml", "--insecure")
        log = self._folder / f"{name}.log"

        def is_ready() -> bool:
            if process.poll() is not None:
                raise OSError(log.read_text()[-4000:])
            return f"cluster {name!r} is up" in log.read_text()

        wait_until(is_ready, f"cluster {name}", START_S)

    def down(self, name: str) -> str:
        """Run `atelier down NAME` on the head, and return what it printed."""
        return self.head.run(*ATELIER, "down", name, env=ENVIRONMENT)

    def apply(self, fields: dict[str, Any]) -> str:
        """Run `atelier apply` of the first cluster's config with these fields, and return what it printed."""
        (self._folder / "head" / "studio.yaml").write_text(yaml.safe_dump(fields))
        return self.head.run(*ATELIER, "apply", "/mnt/studio.yaml", "--insecure", env=ENVIRONMENT, timeout_s=APPLY_S)

    def _start(self, node: Node, name: str, *command: str) -> subprocess.Popen[str]:
        with (self._folder / f"{name}.log").open("a") as log:
            return node.start(*command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def url(self, name: str = "head") -> str:
        """Return where HAProxy of that node listens."""
        return f"http://{self.nodes[name].address}:{PORT}"

    def asked(self, url: str) -> dict[str, Any]:
        """Return the JSON at the address, asked from the switch; nothing where there is no sound answer."""
        return self.from_switch(lambda: _json_of(url))

    def from_switch(self, call: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1, initializer=self.network.switch.enter_network) as pool:
            return pool.submit(call).result()

    def wait_whole(self) -> None:
        """Wait until all replicas say so, and each node has a worker."""
        wait_until(self.is_whole, "a cluster on all nodes", WHOLE_S)

    def is_whole(self) -> bool:
        shown = self.asked(f"{self.url()}/admin/cluster")
        answering = [
            one for kind in ("workers", "text_encoders") for one in shown.get(kind, ()) if "budget_bytes" in one
        ]
        ingresses = [process for name in NAMES for process in self.replicas(name, "ingress")]
        return (
            len(answering) == 2 * len(NAMES)
            and len(ingresses) == len(NAMES)
            and all(self.replicas(name, "worker") for name in NAMES)
        )

    def replicas(self, name: str, deployment: str = "") -> list[psutil.Process]:
        """Return the processes of the first cluster's replicas on the node."""
        return self.nodes[name].processes(f"ray::ServeReplica:studio:{deployment}")

    def fullest(self) -> str:
        """Return the node beside the head with the most replicas: Serve leaves them where they are."""
        return max(NAMES[1:], key=lambda name: len(self.replicas(name)))

    def end_by_sigterm(self, name: str) -> None:
        """End the node's Ray as systemd and Kubernetes do, and the node once nothing of Ray runs there."""
        (ray,) = [one for one in self.nodes[name].processes() if "--block" in one.cmdline()]
        ray.terminate()
        wait_until(lambda: not self.runs_ray(name), f"the end of {name}", END_S)
        self.nodes[name].kill()

    @property
    def ray_log(self) -> str:
        """Return the lines that Ray has printed on all nodes."""
        return "".join(log.read_text() for log in self._folder.glob("ray-*.log"))

    def runs_ray(self, name: str) -> bool:
        """Return whether `ray start --block` still runs on the node: it ends when any of Ray's own processes does."""
        return self._rays[name].poll() is None

    def answers(self, url: str, timeout_s: float | None = None) -> list[Any]:
        """Return the answers to all questions, asked at that address. Raises HTTPError, ValueError."""
        return [self.from_switch(partial(ask, url, *question, timeout_s)) for question in QUESTIONS]


@dataclass(frozen=True)
class Figures:
    """The outcomes of the requests. The gap is the longest time in which none was answered rightly, in s."""

    requests: int
    lost: list[str]
    wrong: list[str]
    gap_s: float


class Load:
    """Clients at a node that ask the addresses in turn until the `with` block ends.

    `expected` has the answer to each question.
    """

    def __init__(self, where: Node, urls: Sequence[str], expected: Sequence[Any]) -> None:
        self._urls, self._expected, self._stop = urls, expected, threading.Event()
        self._pool = ThreadPoolExecutor(NUM_CLIENTS, initializer=where.enter_network)
        self._clients: list[Future[None]] = []
        self._right_s: list[float] = []
        self._lost: list[str] = []
        self._wrong: list[str] = []

    def __enter__(self) -> Self:
        self._start_s = time.monotonic()
        self._clients = [self._pool.submit(self._client, number) for number in range(NUM_CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    def _client(self, number: int) -> None:
        while not self._stop.wait(0.1):
            number += 1
            url, which = self._urls[number % len(self._urls)], number % len(QUESTIONS)
            began_s = time.monotonic() - self._start_s
            try:
                answer = ask(url, *QUESTIONS[which])
            except (httpx.HTTPError, ValueError) as error:
                self._lost.append(f"{QUESTIONS[which][0]} at {began_s:.1f} s: {error!r}")
                continue
            if answer == self._expected[which]:
                self._right_s.append(time.monotonic())
            else:
                self._wrong.append(f"{QUESTIONS[which][0]} at {began_s:.1f} s: {str(answer)[:200]}")

    def more(self, number: int = 20, timeout_s: float = 120) -> None:
        """Return after so many more right answers."""
        goal = len(self._right_s) + number
        wait_until(lambda: len(self._right_s) >= goal, f"{number} answers", timeout_s)

    @property
    def figures(self) -> Figures:
        """Return the observations; to be asked for after the block."""
        times = [self._start_s, *sorted(self._right_s)]
        gap_s = max(later - earlier for earlier, later in itertools.pairwise(times))
        number = len(self._right_s) + len(self._lost) + len(self._wrong)
        return Figures(number, self._lost, self._wrong, gap_s)


def ask(url: str, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
    """Return the content of the answer, without the parts that differ each time. Raises HTTPError, ValueError."""
    answer = posted(url, path, body, timeout_s)
    if answer.status_code != 200:
        raise ValueError(f"{answer.status_code} {answer.text[:300]}")
    found = answer.json()
    return found["data"] if "data" in found else found["choices"][0]["message"]["content"]


def posted(url: str, path: str, body: dict[str, Any], timeout_s: float | None = None) -> httpx.Response:
    """Return the answer to a request, which may say its own timeout. Raises HTTPError."""
    headers = {} if timeout_s is None else {"x-request-timeout-seconds": str(timeout_s)}
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=ANSWER_S, headers=headers)


def _json_of(url: str) -> dict[str, Any]:
    with suppress(httpx.HTTPError, ValueError):
        answer = httpx.get(url, timeout=10)
        found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        return found
    return {}


def fields_of(name: str) -> dict[str, Any]:
    """Return the config of the demo's models on three nodes: a worker, a text encoder and an ingress for each."""
    models = [model | {"path": str(DEMO_MODELS / Path(model["path"]).name)} for model in demo_fields()["models"]]
    few = {"num_replicas": len(NAMES)}
    return {
        "name": name,
        "http": {"host": "0.0.0.0", "port": PORT, "haproxy": {"replica_host": "0.0.0.0"}},
        "ray": {"address": "auto"},
        "store": {"path": f"/mnt/{name}", "node_budget_bytes": "64 MiB"},
        "ingress": few | {"num_cpus": 0.15},
        "text_encoder": few | {"num_cpus": 0.15},
        "worker": few | {"num_cpus": 2, "num_threads": 1, "resident_bytes": "64 MiB", "kv_cache_bytes": "16 MiB"},
        "models": models,
    }


def demo_fields() -> dict[str, Any]:
    """Return the demo's config as its file has it."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "configs/clusters/demo.yaml").read_text())
    return found
