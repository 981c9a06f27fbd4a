"""kill -9 of each rank of a worker in turn, under load: no answer is lost or wrong, and the worker is back.

`make faults` runs as many kills as fit into half a minute for each layout; this file as a script runs KILLS of them:
`PYTHONPATH=.:tests python tests/e2e/rank_kills.py --kills 50` takes some ten seconds for each.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import httpx
from integration.harness import DEMO_MODELS
from kit.seeding import seeded_random
from kit.waiting import wait_until

from configs.cluster import ClusterConfig
from deployments.console.running import cluster_up
from infra.ports import free_port

NUM_CLIENTS: Final = 3
LONGEST_PAUSE_S: Final = 0.5
WHOLE_S: Final = 120.0
ANSWER_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose answer is the same each time: its path below /v1, its body, and where in the answer it is."""

    path: str
    body: Mapping[str, Any]

    def ask(self, client: httpx.Client) -> str:
        """Return the text, or the image as it is sent. Raises HTTPError, and ValueError for another answer."""
        answer = client.post(f"/v1/{self.path}", json=dict(self.body))
        if answer.status_code != 200:
            raise ValueError(f"{answer.status_code} {answer.text[:300]}")
        content = answer.json()
        found: str = content["choices"][0]["text"] if "choices" in content else content["data"][0]["b64_json"]
        return found


def texts() -> list[Question]:
    """Return prompts of the demo's language model."""
    rng = seeded_random()
    prompts = [[rng.randrange(4, 104) for _ in range(rng.randint(3, 40))] for _ in range(6)]
    fixed = {"model": "adder", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return [Question("completions", {**fixed, "prompt": prompt}) for prompt in prompts]


def images() -> list[Question]:
    """Return prompts of an image model with guidance."""
    fixed = {"model": "digits-sdxl", "guidance_scale": 4.0, "num_inference_steps": 12, "width": 32, "height": 32}
    return [Question("images/generations", {**fixed, "prompt": f"a {seed}", "seed": seed}) for seed in range(4)]


LAYOUTS: Final[Mapping[str, tuple[dict[str, int], str]]] = {
    "tensor": ({"tensor": 2}, "adder"),
    "cfg": ({"cfg": 2}, "digits-sdxl"),
}
QUESTIONS: Final = {"tensor": texts, "cfg": images}


def config_of(folder: Path, ranks: Mapping[str, Any], *models: str) -> ClusterConfig:
    """Return the config of a cluster of one worker with these ranks."""
    return ClusterConfig.model_validate(
        {
            "name": "ranks",
            "http": {"port": free_port()},
            "ray": {"num_cpus": 4},
            "store": {"path": str(folder / "store")},
            "worker": {"num_cpus": 1, "ranks": {"timeout_s": 120, **ranks}, "kv_cache_bytes": "1 MiB"},
            "models": [{"id": Path(name).name, "path": str(DEMO_MODELS / name), "dtype": "float32"} for name in models],
        }
    )


@contextmanager
def running(config: ClusterConfig) -> Iterator[httpx.Client]:
    """Have a cluster for the length of the block."""
    with cluster_up(config, "ranks.yaml") as url, httpx.Client(base_url=url, timeout=ANSWER_S) as client:
        yield client


def ranks_of(client: httpx.Client) -> dict[str, Any]:
    """Return the worker's ranks; {} while there is no worker that answers."""
    found = client.get("/admin/cluster").json().get("workers")
    return found[0].get("ranks", {}) if found else {}


def processes_of(client: httpx.Client) -> list[int]:
    """Return the processes of the ranks in their order; [] unless all of them answer."""
    found = [one.get("process") for one in ranks_of(client).get("processes", ())]
    return [] if None in found else found


def wait_whole(client: httpx.Client, without: Sequence[int] = ()) -> list[int]:
    """Wait for all ranks, none of which is one of these processes, and return theirs."""

    def found() -> list[int]:
        processes = processes_of(client)
        return processes if set(processes).isdisjoint(without) else []

    processes: list[int] = wait_until(found, "a worker with all its ranks", WHOLE_S)
    return processes


class Load:
    """Clients that ask the questions again and again, for the length of a block."""

    def __init__(self, url: str, questions: Sequence[Question], expected: Sequence[str]) -> None:
        self._url, self._questions, self._expected = url, questions, expected
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)]
        self._right: Counter[int] = Counter()
        self.lost: list[str] = []
        self.wrong: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def num_right(self) -> int:
        """Return the number of right answers."""
        return sum(self._right.values())

    def more(self) -> None:
        """Wait until each client has an answer of a request that it sent after now."""
        begun = Counter(self._right)
        wait_until(
            lambda: self.lost or all(self._right[one] >= begun[one] + 2 for one in range(NUM_CLIENTS)),
            "answers for all clients",
            ANSWER_S,
        )

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=ANSWER_S) as client:
            place = number
            while not self._stop.is_set():
                place = (place + 1) % len(self._questions)
                try:
                    found = self._questions[place].ask(client)
                except (httpx.HTTPError, ValueError) as error:
                    self.lost.append(f"{time.strftime('%H:%M:%S')} {error!r}")
                    continue
                if found == self._expected[place]:
                    self._right[number] += 1
                else:
                    self.wrong.append(f"{self._questions[place]}: {found[:80]!r}")


@dataclass(slots=True)
class Kills:
    """The kills of one cluster, by rank: the seconds until all ranks were back, beside those of the cluster's start."""

    start_s: float
    back_s: list[tuple[int, float]] = field(default_factory=list)
    num_right: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        slowest = max((took for _, took in self.back_s), default=0.0)
        by_rank = dict(sorted(Counter(rank for rank, _ in self.back_s).items()))
        answers = f"{self.num_right} answers right, {len(self.lost)} lost, {len(self.wrong)} wrong"
        times = f"back after {slowest:.1f} s at most, the cluster's start took {self.start_s:.1f} s"
        return f"{len(self.back_s)} kills (by rank {by_rank}); {answers}; {times}"


def kill_ranks(folder: Path, layout: str, num_kills: int, within_s: float, draws: random.Random) -> Kills:
    """Kill ranks in turn, under load, so many times or for so long, once each rank has been killed at least."""
    ranks, model = LAYOUTS[layout]
    questions, begun_s = QUESTIONS[layout](), time.monotonic()
    with running(config_of(folder, ranks, model)) as client:
        processes = wait_whole(client)
        kills = Kills(time.monotonic() - begun_s)
        expected = [question.ask(client) for question in questions]
        begun_s = time.monotonic()
        with Load(str(client.base_url), questions, expected) as load:
            while len(kills.back_s) < num_kills:
                if len(kills.back_s) >= len(processes) and time.monotonic() - begun_s > within_s:
                    break
                load.more()
                threading.Event().wait(draws.uniform(0, LONGEST_PAUSE_S))
                rank, struck_s = len(kills.back_s) % len(processes), time.monotonic()
                os.kill(processes[rank], signal.SIGKILL)
                try:
                    processes = wait_whole(client, processes)
                except TimeoutError as error:
                    kills.lost.append(f"rank {rank} of the killed {processes}: {error}")
                    break
                kills.back_s.append((rank, time.monotonic() - struck_s))
                if load.lost or load.wrong:
                    break
            if not kills.lost:
                load.more()
    kills.num_right, kills.wrong = load.num_right, load.wrong
    kills.lost += load.lost
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="kills for each layout")
    parser.add_argument("--layouts", nargs="+", default=[*LAYOUTS], choices=LAYOUTS)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="draws the same again")
    options = parser.parse_args()
    is_right = True
    for layout in options.layouts:
        print(f"{layout}: --seed {options.seed}", flush=True)
        random.seed(f"{options.seed} {layout}")
        with tempfile.TemporaryDirectory(prefix="rank-kills-") as folder:
            kills = kill_ranks(Path(folder), layout, options.kills, float("inf"), seeded_random())
        print(f"{layout}: {kills}", *kills.lost, *kills.wrong, sep="\n  ", flush=True)
        is_right = is_right and not kills.lost and not kills.wrong and len(kills.back_s) == options.kills
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
