"""The disturbances of a soak: deaths, models that come and go, settings, a full disk, a clock that steps."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import yaml
from integration.harness import ROOT, shifted_adder
from kit.waiting import wait_until
from soak.deaths import Deaths
from soak.schedule import DISTURBANCES, KILLED, Event

ATELIER: Final = (sys.executable, "-m", "deployments.cli.main")
TIMEOUT_S, RECOVERY_S, COMMAND_S = 120.0, 120.0, 300.0
CLOCK: Final = "wall_clock.so"  # preloaded into all processes of the cluster: tests/nodes/wall_clock.c
GOES: Final = "comes-and-goes"  # a model, of which each version answers differently
SUM: Final = {"messages": [{"role": "user", "content": "What is 12 + 7?"}], "max_tokens": 8}
PINNED: Final = ("digits-flux", "digits-sdxl", "adder", "texts-bert")
SWITCHED: Final = ("digits-flux", "digits-flux-inverted", "digits-sdxl")
TITLES: Final = {
    "worker": "ray::ServeReplica:soak:worker",
    "text_encoder": "ray::ServeReplica:soak:text_encoder",
    "ingress": "ray::ServeReplica:soak:ingress",
    "keeper": "ray::NodeKeeper",
    "registry": "ray::WeightRegistry",
    "controller": "ray::Controller",
    "haproxy": "haproxy",
}


class Cluster:
    """The cluster that is disturbed, as its operator has it: by its config, its store, its processes and its API."""

    def __init__(self, url: str, file: Path, folder: Path, deaths: Deaths) -> None:
        self.url, self.file, self.folder, self.deaths = url, file, folder, deaths
        self.fields: dict[str, Any] = yaml.safe_load(file.read_text())
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT_S)

    @property
    def store(self) -> Path:
        return Path(self.fields["store"]["path"])

    def asked(self, method: str, path: str, *expected: int, **options: Any) -> httpx.Response:
        """Return the answer to an operator's request. Raises OSError unless its status is an expected one."""
        with contextlib.suppress(httpx.TransportError):  # a connection that was kept when HAProxy died
            self.http.get("/healthz")
        answer = self.http.request(method, path, **options)
        if answer.status_code not in expected:
            raise OSError(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        return answer

    def lacks(self) -> list[str]:
        """Return the parts of the cluster that do not run or answer."""
        try:
            shown = self.http.get("/admin/cluster").json()
        except (httpx.HTTPError, ValueError) as error:
            return [f"/admin/cluster: {error!r}"]
        replicas = {name: shown.get(f"{name}s", ()) for name in ("worker", "text_encoder")}
        numbers = {name: sum("modules" in one for one in those) for name, those in replicas.items()}
        numbers |= {name: len(processes(name)) for name in ("ingress", "controller", "registry", "keeper")}
        numbers["haproxy"] = min(len(processes("haproxy")), 1)  # an older one may still finish its requests
        found = [f"{name}: {number}" for name, number in numbers.items() if number != self._wanted(name)]
        nodes = shown.get("nodes") or [{}]
        return (
            found + ["the keeper's figures"] * (not nodes[0].get("num_extents")) + ["registry"] * ("registry" in shown)
        )

    def wait_whole(self) -> None:
        """Raises TimeoutError."""
        lacking: list[str] = []

        def is_whole() -> bool:
            lacking[:] = self.lacks()
            return not lacking

        try:
            wait_until(is_whole, "", RECOVERY_S)
        except TimeoutError:
            raise TimeoutError(f"not whole after {RECOVERY_S:g} s: {lacking}") from None

    def work(self) -> dict[str, int]:
        """Return the workers' counts of work for requests, without those that are 0."""
        workers = self.http.get("/admin/cluster").json()["workers"]
        sums = {name: sum(worker.get(name, 0) for worker in workers) for name in ("denoising", "num_waiting")}
        return {name: number for name, number in sums.items() if number}

    def workers(self) -> list[str]:
        return wait_until(self._reporting, "reports of all workers", RECOVERY_S)

    def _reporting(self) -> list[str] | None:
        found = [worker["name"] for worker in self.asked("GET", "/admin/decisions", 200).json()["workers"]]
        return found if len(found) == self._wanted("worker") else None

    def _wanted(self, deployment: str) -> int:
        return int(self.fields.get(deployment, {}).get("num_replicas", 1))


def processes(victim: str) -> list[psutil.Process]:
    """Return the processes of a kind in this namespace."""
    pattern, found = re.compile(TITLES[victim]), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_one = process.name() == victim if victim == "haproxy" else pattern.match(" ".join(process.cmdline()))
            if is_one and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def run(*command: str) -> str:
    """Run `atelier` and return what it printed. Raises OSError with that where it fails."""
    done = subprocess.run(
        [*ATELIER, *command],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
    )
    if done.returncode:
        raise OSError(
            f"atelier {' '.join(command)}: exit code {done.returncode}: {(done.stdout + done.stderr)[-1000:]}"
        )
    return done.stdout


def disturb(cluster: Cluster, event: Event) -> None:
    """Do what the event says, and return when the cluster is whole again. Raises OSError, TimeoutError, HTTPError."""
    random_ = random.Random(event.draw)
    if event.what.startswith("kill "):
        kill(cluster, event.what.removeprefix("kill "), random_)
    else:
        OTHERS[event.what](cluster, random_)
    cluster.wait_whole()


def kill(cluster: Cluster, victim: str, random_: random.Random) -> None:
    """Kill -9 one of its kind, and wait for another one in its place."""
    before = processes(victim)
    chosen = random_.choice(sorted(before, key=lambda process: process.pid))
    least = 1 if victim == "haproxy" else len(before)  # a reload displaces HAProxy, which lives on for its requests
    cluster.deaths.begin(victim)
    try:
        chosen.send_signal(signal.SIGKILL)
        wait_until(
            lambda: chosen not in (now := processes(victim)) and len(now) >= least,
            f"another {victim}",
            RECOVERY_S,
        )
        cluster.wait_whole()
    finally:
        cluster.deaths.end()


def register_and_remove(cluster: Cluster, random_: random.Random) -> None:
    path = version(cluster, random_)
    cluster.asked("POST", "/admin/models", 201, json={"id": GOES, "path": str(path), "dtype": "float32"})
    first = said(cluster)
    if said(cluster) != first:
        raise OSError("a model that was registered answers differently each time")
    cluster.asked("DELETE", f"/admin/models/{GOES}?purge=true", 200)
    wait_until(lambda: not knows(cluster), f"the end of {GOES}", RECOVERY_S)
    shutil.rmtree(path)


def replace(cluster: Cluster, random_: random.Random) -> None:
    """Two versions under one id: the second one answers differently."""
    shift = random_.randrange(1, 20)
    for number in (shift, shift + 1):
        path = shifted_adder(cluster.folder / "models" / GOES, number)
        cluster.asked("POST", "/admin/models", 200, 201, json={"id": GOES, "path": str(path), "dtype": "float32"})
        answers = {said(cluster) for _ in range(2)}
        if number == shift:
            first = answers
        elif answers & first:
            raise OSError(f"a replaced model answers {answers} as its version before")
    cluster.asked("DELETE", f"/admin/models/{GOES}?purge=true", 200)
    wait_until(lambda: not knows(cluster), f"the end of {GOES}", RECOVERY_S)


def version(cluster: Cluster, random_: random.Random) -> Path:
    return shifted_adder(cluster.folder / "models" / GOES, random_.randrange(1, 40))


def said(cluster: Cluster) -> str:
    answer = cluster.asked("POST", "/v1/chat/completions", 200, json={"model": GOES, **SUM})
    return str(answer.json()["choices"][0]["message"]["content"])


def knows(cluster: Cluster) -> bool:
    """Return whether some ingress still lists the model: the answers of several connections are asked."""
    return any(GOES in httpx.get(f"{cluster.url}/v1/models", timeout=TIMEOUT_S).text for _ in range(4))


def change_config(cluster: Cluster, random_: random.Random) -> None:
    """Other bounds and descriptions at run time, and at times other replicas."""
    changed = cluster.fields | {"admission": {"max_waiting": random_.randrange(200, 400)}}
    models = [dict(model) for model in cluster.fields["models"]]
    models[0]["description"] = f"digits, {random_.getrandbits(16)}"
    changed["models"] = models
    if random_.random() < 0.3:
        changed["text_encoder"] = cluster.fields["text_encoder"] | {"cache_bytes": f"{random_.randrange(1, 4)} MiB"}
    cluster.file.write_text(yaml.safe_dump(changed))
    cluster.fields = changed
    cluster.deaths.begin("ingress" if "ingress" in (told := run("apply", str(cluster.file))) else "apply")
    cluster.deaths.end()
    if "max_waiting" not in told:
        raise OSError(f"apply said {told}")
    if "nothing to change" not in (again := run("apply", str(cluster.file))):
        raise OSError(f"apply, the second time, said {again}")


def pin(cluster: Cluster, random_: random.Random) -> None:
    model = random_.choice(PINNED)
    cluster.asked("POST", f"/admin/models/{model}/pin", 200)
    cluster.asked("POST", f"/admin/models/{random_.choice(PINNED)}/prefetch", 200, json={"tier": "host"})
    cluster.asked("DELETE", f"/admin/models/{model}/pin", 200)


def unload(cluster: Cluster, random_: random.Random) -> None:
    """Take models out of memory; 409 says that a request has one just now."""
    for model in random_.sample(SWITCHED, 2):
        cluster.asked("POST", f"/v2/repository/models/{model}/unload", 200, 409)


def switch_by_hand(cluster: Cluster, random_: random.Random) -> None:
    """Pin a model to a worker, and drain the other one for a moment."""
    first, second = random_.sample(sorted(cluster.workers()), 2)
    model = random_.choice(SWITCHED)
    cluster.asked("POST", f"/admin/workers/{first}/models/{model}/pin", 200)
    cluster.asked("POST", f"/admin/workers/{second}/drain", 200)
    time.sleep(1.0)
    cluster.asked("DELETE", f"/admin/workers/{second}/drain", 200)
    cluster.asked("DELETE", f"/admin/workers/{first}/models/{model}/pin", 200)


def fill_disk(cluster: Cluster, random_: random.Random) -> None:
    """A registration on a full disk is refused and says why; when there is room it succeeds."""
    path = version(cluster, random_)
    body = {"id": GOES, "path": str(path), "dtype": "float32"}
    with full(cluster.store):
        answer = cluster.asked("POST", "/admin/models", 422, 503, json=body)
        if "disk full" not in answer.text and "No space left" not in answer.text:
            raise OSError(f"a registration on a full disk: {answer.text[:300]}")
    cluster.asked("POST", "/admin/models", 200, 201, json=body)
    said(cluster)
    cluster.asked("DELETE", f"/admin/models/{GOES}?purge=true", 200)
    shutil.rmtree(path)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Leave no byte of the folder's disk for the length of the block."""
    filler = folder / ".filler"
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))
        yield
    finally:
        filler.unlink()


def collect_garbage(cluster: Cluster, _: random.Random) -> None:
    run("weights", "gc", "--store", str(cluster.store))


def step_clock(least_s: int, most_s: int) -> Callable[[Cluster, random.Random], None]:
    """Return a step of the wall clock of all processes of the cluster, which stays there.

    HAZARD: Ray's timers go by that clock. They stand still for as long as it is set back, and deaths are told late.
    """

    def step(cluster: Cluster, random_: random.Random) -> None:
        for process in (one for kind in KILLED for one in processes(kind)):
            if CLOCK not in Path(f"/proc/{process.pid}/maps").read_text():
                raise OSError(f"{process} has the clock of the machine")
        file = cluster.folder / "clock"
        (off_s,) = struct.unpack("q", file.read_bytes())
        with file.open("r+b") as opened:  # in place: processes have it mapped
            opened.write(struct.pack("q", off_s + random_.randint(least_s, most_s)))

    return step


OTHERS: Final[dict[str, Callable[[Cluster, random.Random], None]]] = {
    "register and remove": register_and_remove,
    "replace": replace,
    "apply": change_config,
    "pin": pin,
    "unload": unload,
    "switch by hand": switch_by_hand,
    "full disk": fill_disk,
    "clock forward": step_clock(600, 7200),
    "clock back": step_clock(-30, -5),
    "collect garbage": collect_garbage,
}
assert {*OTHERS, *(f"kill {victim}" for victim in KILLED)} == {*DISTURBANCES}
