"""`atelier bench schedule --real`: six demo models on two workers of a real cluster, ours and `serve.multiplexed`.

Each worker has room for one model. The same two traces (Poisson, and bursts) go to our cluster with its controller,
without it, and to our workers under Serve's own multiplexing, and then to the simulator with the costs that were
measured on the way.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from cluster.simulator.recorded import note_sizes, recorded_scenario
from cluster.simulator.running import PolicyName, simulate
from cluster.simulator.scenario import Scenario, SimRequest, trace_lines
from cluster.simulator.traces import bursts, poisson
from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from configs.model import ModelConfig
from deployments.cli.client import Client, ClientError
from deployments.records import ImageRequest, ImageResult

SHARES: Final = {"digits-flux": 0.5, "digits-sdxl": 0.25, "digits-flux-inverted": 0.15, "tuned-0": 0.04,
                 "tuned-1": 0.03, "tuned-2": 0.03}  # fmt: skip
WORKER_BYTES: Final = 9 * 2**20  # one of the models, two of them not
STEPS: Final = 12
WORDS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PEER: Final = "peer"
_WARM_UPS: Final = 4  # requests for each model before the simulated trace

_Call = Callable[[str, int], Awaitable[ImageResult]]
_say = Console(stderr=True).print


def measure_real(
    config_path: Path, rate: float, duration_s: float, seed: int, record: Path | None = None
) -> dict[str, Any]:
    """Return the figures of each arm on each trace, and of the simulator beside those of our cluster.

    What the simulator was given is written into the folder `record`, as trace files.
    """
    chance = random.Random(seed)
    size = max(1, round(rate * 5))
    traces = {
        "poisson": poisson(rate, SHARES, duration_s, chance),
        "bursty": bursts(size, 5.0, list(SHARES), duration_s, chance),
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        base = _config_of(load_cluster_config(config_path), Path(folder))
        for arm, config in _arms(base).items():
            _say(f"{arm}: starting a cluster")
            rows += _measure_ours(arm, config, traces, record)
            if arm == "no-controller":
                rows += _measure_peer(config, traces)
    return {"rate": rate, "duration_s": duration_s, "seed": seed, "rows": rows}


def _config_of(demo: ClusterConfig, folder: Path) -> ClusterConfig:
    """Return the demo's image models and three fine-tunes of the first, for two workers with room for one each."""
    models = [model for model in demo.models if model.id in SHARES and isinstance(model, ModelConfig)]
    first = next(model for model in models if model.id == "digits-flux")
    for number in range(3):
        path = _tuned_copy(Path(str(first.path)), folder / f"tuned-{number}", number)
        models.append(first.model_copy(update={"id": f"tuned-{number}", "path": path, "preload": False}))
    models = [model.model_copy(update={"preload": False}) for model in models]
    worker = {"num_replicas": 2, "num_cpus": 0.5, "device": "cpu-private", "device_budget_bytes": WORKER_BYTES,
              "num_threads": 1}  # fmt: skip
    return demo.model_copy(
        update={
            "models": tuple(models),
            "adapters": (),
            "pipelines": (),
            "grpc": None,
            "store": demo.store.model_copy(update={"path": folder / "store"}),
            "worker": demo.worker.model_copy(update=worker),
        }
    )


def _tuned_copy(source: Path, target: Path, seed: int) -> Path:
    """Copy a pipeline, with a little noise on the weights of its transformer."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    for file in (target / "transformer").glob("*.safetensors"):
        tensors = load_file(file)
        noisy = {
            name: (tensor + 1e-3 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
            for name, tensor in tensors.items()
        }
        save_file(noisy, file, metadata={"format": "pt"})
    return target


def _arms(config: ClusterConfig) -> dict[str, ClusterConfig]:
    """Return our cluster with the controller, where there is one, and without it."""
    controller = getattr(config, "controller", None)
    if controller is None:
        return {"no-controller": config}
    return {
        arm: config.model_copy(update={"controller": controller.model_copy(update={"enabled": enabled})})
        for arm, enabled in (("latency-first", True), ("no-controller", False))
    }


def _measure_ours(
    arm: str, config: ClusterConfig, traces: dict[str, list[SimRequest]], record: Path | None
) -> list[dict[str, Any]]:
    from ray import serve

    from deployments.cli.running import APP_NAME, cluster_up

    rows = []
    with cluster_up(config, "bench") as url:
        client, handle = Client(url), serve.get_app_handle(APP_NAME)

        async def call(model: str, number: int) -> ImageResult:
            result: ImageResult = await handle.generate.remote(_request(config, model, number))
            return result

        sizes: dict[str, dict[str, int]] = {}
        asyncio.run(_look_at_each(call, lambda: note_sizes(sizes, client.cluster()["workers"])))
        for name, requests in traces.items():
            first, before = client.ended_requests(), _orders_done(client)
            resident = [list(worker["last_switches"])[-1] for worker in client.cluster()["workers"]]
            _say(f"{arm}: {len(requests)} requests, {name}")
            outcomes, built_s = asyncio.run(_run_trace(call, requests))
            switches = len(built_s) + _orders_done(client) - before
            switch_s = statistics.median(built_s) if built_s else None
            ended = client.ended_requests(first["next_number"])["requests"]
            cluster = client.cluster()
            loads = cluster["admission"]["models"]
            scenario = recorded_scenario(ended, loads, cluster["workers"], first["now_s"], sizes, switch_s)
            if record is not None:
                record.mkdir(parents=True, exist_ok=True)
                (record / f"{arm}-{name}.jsonl").write_text("".join(trace_lines(scenario)), encoding="utf-8")
            measured = _figures(arm, name, outcomes, switches)
            rows += [measured, _simulated(arm, name, scenario, measured, resident)]
            _say(*rows[-2:], sep="\n")
    return rows


def _measure_peer(config: ClusterConfig, traces: dict[str, list[SimRequest]]) -> list[dict[str, Any]]:
    """Measure Serve's multiplexing in place of our application."""
    from ray import serve

    from deployments.cli.running import APP_NAME, cluster_up
    from deployments.services.replica_classes import TEXT_ENCODER

    rows = []
    with cluster_up(config, "bench"):
        serve.delete(APP_NAME)
        options = {"num_cpus": 0.5}
        encoder = serve.deployment(name="text_encoder", max_ongoing_requests=256, ray_actor_options=options)
        worker = serve.deployment(
            name="worker",
            num_replicas=config.worker.num_replicas,
            max_ongoing_requests=config.worker.max_running_images,
            ray_actor_options=options,
        )
        path = "deployments.bench.multiplexed_worker.MultiplexedWorker"
        handle = serve.run(worker(path).bind(config, encoder(TEXT_ENCODER).bind(config)), name=PEER, route_prefix=None)

        async def call(model: str, number: int) -> ImageResult:
            chosen = handle.options(multiplexed_model_id=model)
            result: ImageResult = await chosen.generate.remote(_request(config, model, number))
            return result

        async def num_switches() -> int:
            return sum(await handle.broadcast("count_switches").results_async(timeout_s=30.0))

        asyncio.run(_warm_up(call))
        for name, requests in traces.items():
            _say(f"serve.multiplexed: {len(requests)} requests, {name}")
            before = asyncio.run(num_switches())
            outcomes, _ = asyncio.run(_run_trace(call, requests))
            rows.append(_figures("serve.multiplexed", name, outcomes, asyncio.run(num_switches()) - before))
            _say(rows[-1])
        serve.delete(PEER)
    return rows


def _request(config: ClusterConfig, model: str, number: int) -> ImageRequest:
    """Return a request with all that an ingress would fill in. Texts are few: the encoders have them cached."""
    guidance = 4.0 if "sdxl" in model else 1.0
    length = config.defaults_of(model).max_sequence_length
    return ImageRequest(
        model=model, prompt=f"a handwritten {WORDS[number % len(WORDS)]}", seed=number, width=32, height=32,
        num_inference_steps=STEPS, guidance_scale=guidance, max_sequence_length=length,
    )  # fmt: skip


async def _warm_up(call: _Call) -> None:
    """Ask every model for every text, so that encoders and skeletons are there."""
    for model in SHARES:
        await asyncio.gather(*(call(model, number) for number in range(len(WORDS))))


async def _look_at_each(call: _Call, look: Callable[[], None]) -> None:
    """Warm up, and call `look` while each model is there."""
    await _warm_up(call)
    for model in SHARES:
        await call(model, 0)
        look()


async def _run_trace(call: _Call, requests: Sequence[SimRequest]) -> tuple[list[float], list[float]]:
    """Send each request at its time. Return the latencies, and the seconds of the switches that requests began."""
    start = time.perf_counter()
    latencies: list[float] = []
    built_s: list[float] = []

    async def send(number: int, request: SimRequest) -> None:
        await asyncio.sleep(start + request.at_s - time.perf_counter())
        result = await call(request.model, number)
        latencies.append(time.perf_counter() - start - request.at_s)
        if result.switch and result.switch.built:
            built_s.append((result.switch.attach_ms + result.switch.build_ms) / 1e3)

    await asyncio.gather(*(send(number, request) for number, request in enumerate(requests)))
    return latencies, built_s


def _orders_done(client: Client) -> int:
    """Return how many switches the controller's orders have made; 0 without a controller."""
    try:
        decisions = client.decisions(500)["decisions"]
    except ClientError:
        return 0
    return sum(one["action"] == "switch" and one["state"] == "done" for one in decisions)


def _figures(arm: str, trace: str, latencies: Sequence[float], switches: int) -> dict[str, Any]:
    ordered = sorted(latencies)
    return {
        "arm": arm,
        "trace": trace,
        "source": "measured",
        "requests": len(ordered),
        "mean_s": statistics.mean(ordered),
        "p50_s": ordered[len(ordered) // 2],
        "p95_s": ordered[int(0.95 * (len(ordered) - 1))],
        "p99_s": ordered[int(0.99 * (len(ordered) - 1))],
        "switches": switches,
    }


def _simulated(
    arm: str, trace: str, scenario: Scenario, measured: dict[str, Any], resident: Sequence[str]
) -> dict[str, Any]:
    """Return the simulator's figures for what was recorded, and how far they are from the measured ones.

    As in the real cluster, requests for each model came before, those that were `resident` last: the queue knows what
    they take.
    """
    policy: PolicyName = "latency-first" if arm == "latency-first" else "no-controller"
    pause_s = 2 * max(model.service_s for model in scenario.models) + max(w.fixed_switch_s for w in scenario.workers)
    known = [model.id for model in scenario.models]
    models = known * _WARM_UPS + [model for model in resident if model in known]
    before = [SimRequest(number * pause_s, model) for number, model in enumerate(models)]
    began_s = len(before) * pause_s
    after = [replace(request, at_s=request.at_s + began_s) for request in scenario.requests]
    _, world = simulate(replace(scenario, requests=(*before, *after)), policy)
    latencies = [served.latency_s for served in world.served if served.request.at_s >= began_s]
    switches = sum(span.is_switch and span.start_s >= began_s for span in world.spans)
    row = _figures(arm, trace, latencies, switches) | {"source": "simulated"}
    for key in ("mean_s", "switches"):
        row[f"{key}_off"] = row[key] / measured[key] - 1 if measured[key] else None
    return row


def print_real_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print a table, or one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    keys = ("arm", "trace", "source", "requests", "mean_s", "p50_s", "p95_s", "p99_s", "switches", "mean_s_off",
            "switches_off")  # fmt: skip
    table = Table(*keys, title=f"{figures['rate']:g} requests/s for {figures['duration_s']:g} s, two workers")
    for row in figures["rows"]:
        table.add_row(*(f"{value:.3g}" if isinstance(value := row.get(key, ""), float) else str(value) for key in keys))
    Console().print(table)
