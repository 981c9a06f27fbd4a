"""`infra.bench door`: what a request pays between its client and the model, and what happens when too many come.

The demo cluster with a MiniLM is measured through our door and through Serve's own proxy, a cluster after the other;
beside each, in turn with it, one stock process and infinity-emb. No text of a measured request was there before,
unless the row says so. Loads come from a process of its own. All share the machine's cores. What is measured is told on
stderr as it comes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from ray import serve

from configs.cluster import ClusterConfig
from deployments.console.running import cluster_up
from infra.bench.command.peers import Peer
from infra.bench.door_figures import latency_figures
from infra.bench.door_load import Ask, LoadGenerator, Outcome
from infra.bench.door_overload import (
    OverloadSettings,
    measure_cancelled_step,
    measure_cancels,
    measure_kill,
    measure_overload,
)
from infra.bench.door_report import DOORS, INFINITY, STOCK, find_targets, print_latencies, say
from infra.bench.door_requests import ADDER, FLUX, MINILM, NUM_CACHED, STEPS, Requests
from infra.bench.encode_servers import infinity_environment, infinity_server, minilm_folder
from infra.ports import free_port

MOST_REPEATED: Final = 8  # callers; loads of more are measured once
MOST_OF_PEERS: Final = 64  # callers
CHEAP_KINDS: Final = ("empty endpoint", "cached embedding")  # no model runs: there are no peers
CHEAP: Final = 4  # times as many requests of these
NUM_WARM: Final = 16


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """The sizes of the measurement. `requests`: of a round, by the number of callers.

    `doors`: with the most callers that ask for what runs a model. `num_ingresses`: in the clusters that are measured;
    the one whose ingress is killed has two at least.
    """

    rounds: int = 2
    requests: tuple[tuple[int, int], ...] = ((1, 8), (8, 16), (64, 64), (512, 512))
    doors: tuple[tuple[str, int], ...] = (("serve", 64), ("haproxy", 512))
    has_peers: bool = True
    num_ingresses: int = 1
    overload: OverloadSettings = field(default_factory=OverloadSettings)
    step_rounds: int = 3
    kill_s: float = 9.0
    kill_callers: int = 16


QUICK: Final = DoorSettings(
    rounds=1,
    requests=((1, 6), (8, 16)),
    doors=(("haproxy", 8),),
    has_peers=False,
    num_ingresses=2,
    overload=OverloadSettings(num_costs=16, capacity_s=2.0, factors=(3.0,), load_s=5.0, bursts=(300,), num_cancels=500),
    step_rounds=2,
    kill_s=4.0,
)


def measure_door(
    config: ClusterConfig, config_path: str, settings: DoorSettings, seed: int, cache: Path
) -> dict[str, Any]:
    """Measure, and return the figures and targets as one JSON-able object. `cache` keeps infinity-emb's environment."""
    requests = Requests(seed)
    load_average, start_s = [os.getloadavg()], time.monotonic()
    found: dict[str, Any] = {"doors": {}}
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as running:  # Ray prints when a process dies
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        load = LoadGenerator()
        running.callback(load.close)
        peers = running.enter_context(_peers(config, cache)) if settings.has_peers else _Peers()
        for door, most_callers in settings.doors:
            say(f"a cluster behind {door} starts")
            with _cluster(_bench_config(config, folder, door, settings.num_ingresses), config_path) as url:
                sides = _Sides(load, peers.stock, {DOORS[door]: url, **peers.urls})
                found["doors"][door] = _latencies(sides, requests, settings, most_callers)
                if (door, most_callers) == settings.doors[-1]:
                    found |= _under_load(load, url, requests, settings)
                    if settings.num_ingresses > 1:
                        found["kill"] = measure_kill(load, url, requests, settings.kill_s, settings.kill_callers)
        if "kill" not in found:
            say("a cluster with two ingress replicas starts")
            with _cluster(_bench_config(config, folder, settings.doors[-1][0], num_ingresses=2), config_path) as url:
                _warm(load, url, requests)
                found["kill"] = measure_kill(load, url, requests, settings.kill_s, settings.kill_callers)
    load_average.append(os.getloadavg())
    targets = [target.as_dict() for target in find_targets(found)]
    run = {"seed": seed, "rounds": settings.rounds, "load_average": load_average, "took_s": time.monotonic() - start_s}
    return found | {"targets": targets} | run


def measure_overload_alone(
    config: ClusterConfig, config_path: str, settings: DoorSettings, num_ingresses: int, seed: int
) -> dict[str, Any]:
    """Measure only what happens when too many come, with so many ingress replicas, as one JSON-able object."""
    load_average, requests = [os.getloadavg()], Requests(seed)
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as running:  # Ray prints when a process dies
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        load = LoadGenerator()
        running.callback(load.close)
        door = settings.doors[-1][0]
        url = running.enter_context(_cluster(_bench_config(config, folder, door, num_ingresses), config_path))
        _warm(load, url, requests)
        found = {"overload": measure_overload(load, url, requests, settings.overload)}
        if num_ingresses > 1:
            found["kill"] = measure_kill(load, url, requests, settings.kill_s, settings.kill_callers)
    return found | {"seed": seed, "load_average": [*load_average, os.getloadavg()]}


@dataclass(frozen=True, slots=True)
class _Peers:
    """One stock process, and the URLs of other servers by name."""

    stock: Peer | None = None
    urls: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def _peers(config: ClusterConfig, cache: Path) -> Iterator[_Peers]:
    """Start the peers. Without infinity-emb where it cannot be installed."""
    say("the peers start")
    stock = Peer(num_threads=1)
    with contextlib.closing(stock):
        _load_stock(stock, config)
        try:
            environment = infinity_environment(cache)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            say(f"without infinity-emb, which cannot be installed: {error}")
            yield _Peers(stock)
            return
        with infinity_server(environment, {MINILM: minilm_folder()}, 1) as infinity:
            yield _Peers(stock, {INFINITY: infinity})


@contextlib.contextmanager
def _cluster(config: ClusterConfig, config_path: str) -> Iterator[str]:
    with cluster_up(config, config_path) as url:
        yield url
        serve.shutdown()  # here: Serve would connect to the next Ray to do it later


def _bench_config(config: ClusterConfig, folder: Path, door: str, num_ingresses: int = 1) -> ClusterConfig:
    """Return the demo's config with free ports, a store of the bench, the MiniLM, and this proxy."""
    fields = config.model_dump(mode="json")
    fields |= {"name": "bench-door", "store": fields["store"] | {"path": str(folder / "store")}}
    fields["http"] |= {"port": free_port(), "proxy": door}
    fields["grpc"] = fields["grpc"] and fields["grpc"] | {"port": free_port()}
    fields["ingress"] |= {"num_replicas": num_ingresses}
    fields["models"] += [{"id": MINILM, "path": str(minilm_folder()), "dtype": "float32", "preload": True}]
    return ClusterConfig.model_validate(fields)


def _load_stock(peer: Peer, config: ClusterConfig) -> None:
    paths = {model.id: str(model.path) for model in config.models}
    for model in (FLUX, ADDER):
        peer.run_order("load_model", model=model, path=paths[model], drop=[])
    peer.run_order("load_sentence_model", model=MINILM, path=str(minilm_folder()))


@dataclass(frozen=True, slots=True)
class _Sides:
    """The servers that are measured in turn, by name, and the stock process."""

    load: LoadGenerator
    stock: Peer | None
    urls: Mapping[str, str]

    def ways(self, kind: str, asks: Sequence[Ask], num_callers: int) -> Mapping[str, Callable[[], list[Outcome]]]:
        """Return what can answer requests of one kind: servers, and for one caller the model in a process."""
        has_peers = kind not in CHEAP_KINDS and num_callers <= MOST_OF_PEERS
        ways = {
            name: partial(self.load.run, "closed", url, asks, num_callers=num_callers)
            for name, url in self.urls.items()
            if name != INFINITY or (has_peers and kind == "new embedding")
        }
        has_stock = self.stock and has_peers and num_callers == 1
        return ways | ({STOCK: partial(self._call_stock, self.stock, asks)} if has_stock and self.stock else {})

    def _call_stock(self, stock: Peer, asks: Sequence[Ask]) -> list[Outcome]:
        """Call stock for each request, one after the other. An answer of one token says when a stream's first comes."""
        outcomes, now_s = list[Outcome](), 0.0
        for ask in asks:
            body = ask.body or {}
            if "messages" in body:
                limit = 1 if body["stream"] else body["max_tokens"]
                order = {"do": "answer_question", "question": body["messages"][-1]["content"], "max_new_tokens": limit}
            elif "prompt" in body:
                options = {"height": 32, "width": 32, "num_inference_steps": STEPS, "max_sequence_length": 16}
                order = {"do": "make_image", "prompt": body["prompt"], "seed": 0, "options": options}
            else:
                order = {"do": "embed_sentence", "text": body["input"]}
            end_s = now_s + stock.run_order(model=body["model"], **order) / 1e3
            outcomes.append(Outcome(ask.kind, 200, now_s, end_s, end_s))
            now_s = end_s
        return outcomes


def _latencies(sides: _Sides, requests: Requests, settings: DoorSettings, most_callers: int) -> dict[str, Any]:
    """Return figures by kind, number of callers and side. Sides take turns, and none is always first."""
    for name, url in sides.urls.items():
        if name != INFINITY:
            _warm(sides.load, url, requests)
    found: dict[str, Any] = {}
    for kind, draw in requests.makers.items():
        found[kind] = {}
        for num_callers, number in settings.requests:
            if num_callers > most_callers and kind not in CHEAP_KINDS:
                continue
            rounds: dict[str, list[list[Outcome]]] = {}
            for turn in range(settings.rounds if num_callers <= MOST_REPEATED else 1):
                # The same new texts for all sides. Only ours would know them again, and is asked once.
                ways = sides.ways(kind, draw(number * (CHEAP if kind in CHEAP_KINDS else 1)), num_callers)
                for name in list(ways)[:: -1 if turn % 2 else 1]:
                    rounds.setdefault(name, []).append(ways[name]())
            found[kind][str(num_callers)] = {name: latency_figures(outcomes) for name, outcomes in rounds.items()}
        print_latencies({kind: found[kind]}, is_error=True)
    return found


def _warm(load: LoadGenerator, url: str, requests: Requests) -> None:
    """Ask for everything that is measured: this builds models, fills the cache and imports classes."""
    for kind, draw in requests.makers.items():
        number = NUM_CACHED if kind in CHEAP_KINDS else NUM_WARM
        latency_figures([load.run("closed", url, draw(number), num_callers=8)])
    for asks in requests.draw_kinds(NUM_WARM).values():
        latency_figures([load.run("closed", url, asks, num_callers=8)])


def _under_load(load: LoadGenerator, url: str, requests: Requests, settings: DoorSettings) -> dict[str, Any]:
    sizes = settings.overload
    found = {"cancelled_step": measure_cancelled_step(url, FLUX, settings.step_rounds)}
    found["overload"] = measure_overload(load, url, requests, sizes)
    found["cancels"] = measure_cancels(load, url, requests, sizes)
    return found
