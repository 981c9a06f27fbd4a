"""`make abuse`: one client with a key, or without one, attacks a cluster; the chats of another key go on as before.

The demo's models behind HAProxy, and two keys. Before and during each attack the other key asks for chats, and the
99th percentile of their times stays within three times what it is when nobody attacks. A flood of equal rank may take
its share: one that calls itself urgent takes no more. Both are asked through three times, since of a hundred chats the
percentile is the second slowest. Prints a table; exit code 1 when an attack was felt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from abuse.attacks import ATTACKS
from integration.harness import ROOT

from cluster.start.ray_folders import ray_logs
from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from deployments.console.running import cluster_up
from deployments.ingress.access.keys import KeyEntry, add_key, hash_of
from infra.ports import free_port

ATTACKER, OTHER = "atl_attacker", "atl_other"
NAME = "abuse"  # of the cluster
MOST_TIMES = 3.0
PAUSE_S = 0.05  # between two chats
IDLE_S, ATTACK_S, REST_S, READY_S = 6.0, 10.0, 2.0, 60.0
TIMEOUT_S = 30.0
CHAT = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "max_tokens": 8}
HEAD = {"inputs": [{"name": "features", "datatype": "FP32", "shape": [1, 128], "data": [0.5] * 128}]}
EQUAL, URGENT = "A5 a flood, equal", "A5 a flood, urgent"
NUM_PARTS = {EQUAL: 3, URGENT: 3}  # of ten seconds each; of other attacks one


@dataclass
class Times:
    """The times of requests, and what went wrong."""

    seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def p99_ms(self) -> float:
        ordered = sorted(self.seconds)
        return 1e3 * ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else math.inf


@dataclass(frozen=True)
class Row:
    """A line of the table: how long the other key's chats took in the parts of an attack, and how long they may."""

    name: str
    before_ms: float
    parts: list[Times]
    log_bytes: int

    @property
    def p99_ms(self) -> float:
        return statistics.median(part.p99_ms for part in self.parts)

    @property
    def ratio(self) -> float:
        return self.p99_ms / self.before_ms

    @property
    def problems(self) -> list[str]:
        return [problem for part in self.parts for problem in part.problems]

    @property
    def is_felt(self) -> bool:
        return self.name != EQUAL and (self.ratio > MOST_TIMES or bool(self.problems))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="the beginnings of the attacks' names, such as A1")
    only = tuple(parser.parse_args().only)
    names = [name for name in ATTACKS if not only or name.startswith(only)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        config = _config(Path(folder))
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints when a process dies
            url = running.enter_context(cluster_up(config, str(ROOT / "configs/clusters/demo.yaml")))
        assert config.grpc is not None
        rows = list(_attacked(names, url, f"{config.grpc.host}:{config.grpc.port}"))
        _print(rows)
    return int(any(row.is_felt for row in rows))


def _config(folder: Path) -> ClusterConfig:
    folder.chmod(0o700)
    keys = folder / "keys"
    for name, key in (("attacker", ATTACKER), ("other", OTHER)):
        add_key(keys, KeyEntry(name=name, sha256=hash_of(key), tenant=name))
    fields = load_cluster_config(ROOT / "configs/clusters/demo.yaml").model_dump(mode="json")
    fields |= {"name": NAME, "store": fields["store"] | {"path": str(folder / "store")}}
    fields |= {"http": {"port": free_port()}, "grpc": {"port": free_port()}, "access": {"keys_file": str(keys)}}
    return ClusterConfig.model_validate(fields)


def _attacked(names: list[str], url: str, grpc: str) -> Iterator[Row]:
    """Yield a row for each attack, one after the other."""
    with httpx.Client(base_url=url, headers={"x-api-key": OTHER}, timeout=TIMEOUT_S) as http:
        _ask(http, IDLE_S)  # it learns what a chat costs
        idle_ms, equal_ms = list[float](), None
        for name in names:
            idle = _ask(http, IDLE_S)
            if idle.problems:
                raise RuntimeError(f"before {name}: {idle.problems[0]}")
            idle_ms.append(idle.p99_ms)
            log_bytes = _log_bytes(NAME)
            with _running(name, url, grpc):
                parts = [_ask(http, ATTACK_S) for _ in range(NUM_PARTS.get(name, 1))]
            _check_head(http, parts[-1])
            before_ms = equal_ms if name == URGENT and equal_ms else statistics.median(idle_ms)
            row = Row(name, before_ms, parts, _log_bytes(NAME) - log_bytes)
            equal_ms = row.p99_ms if name == EQUAL else equal_ms
            print(f"{name}: {row.p99_ms:.0f} ms, {row.ratio:.1f} x", file=sys.stderr, flush=True)
            yield row
            time.sleep(REST_S)


def _ask(http: httpx.Client, length_s: float) -> Times:
    """Ask for chats, one after the other."""
    times, end_s = Times(), time.monotonic() + length_s
    while time.monotonic() < end_s:
        start_s = time.monotonic()
        try:
            answer = http.post("/v1/chat/completions", json=CHAT)
            if answer.status_code != 200:
                times.problems.append(f"{answer.status_code} {answer.text[:200]}")
        except httpx.HTTPError as error:
            times.problems.append(repr(error))
        times.seconds.append(time.monotonic() - start_s)
        time.sleep(PAUSE_S)
    return times


def _check_head(http: httpx.Client, times: Times) -> None:
    """Ask for the model that an attack may have broken."""
    answer = http.post("/v2/models/texts-head/infer", json=HEAD)
    if answer.status_code != 200:
        times.problems.append(f"texts-head: {answer.status_code} {answer.text[:200]}")


@contextlib.contextmanager
def _running(name: str, url: str, grpc: str) -> Iterator[None]:
    """Let an attack run; the block begins when it is in full swing."""
    command = [sys.executable, str(Path(__file__).with_name("attacks.py")), name, url, grpc, ATTACKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise RuntimeError(f"{name}: the attack did not begin")
            yield
        finally:
            process.kill()


def _log_bytes(cluster: str) -> int:
    """Return the bytes of all logs of a cluster's Ray."""
    return sum(path.stat().st_size for path in ray_logs(cluster).rglob("*") if path.is_file())


def _print(rows: list[Row]) -> None:
    print(f"{'attack':<32}{'before':>10}{'during':>10}{'ratio':>8}{'log':>10}  p99 of another key's chats in ms; bytes")
    for row in rows:
        mark = "FELT" if row.is_felt else ""
        text = f"{row.name:<32}{row.before_ms:>10.0f}{row.p99_ms:>10.0f}{row.ratio:>8.1f}{row.log_bytes:>10}  {mark}"
        print(text + (f"  {len(row.problems)} x {row.problems[0]}" if row.problems else ""))
    print(json.dumps({row.name: round(row.ratio, 2) for row in rows}))


if __name__ == "__main__":
    sys.exit(main())
