"""`infra.bench schedule --real`: six demo models on two workers of a real cluster, ours and `serve.multiplexed`.

Each worker has room for one model. The same three traces (Poisson, bursts, waves) go to our cluster with controller and
without, and to our workers under Serve's own multiplexing. All three are up together and get each slice of a trace
in turn, so that a machine that is slower for a minute is so for all of them. What a request takes alone is told beside
it: it passes an ingress in all of them, and what an ingress does counts little beside real models. What ours got goes
to the simulator then, with the costs that were measured on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from configs.model import ModelConfig
from deployments.console.client import Client
from deployments.console.output import Column, print_table
from deployments.records import ImageRequest, ImageResult
from infra.bench.command.figures import percentile
from infra.simulator.recorded import note_sizes, recorded_scenario
from infra.simulator.running import simulate
from infra.simulator.scenario import Scenario, SimRequest, bursts, diurnal, poisson, trace_lines

SHARES: Final = {"digits-flux": 0.5, "digits-sdxl": 0.25, "digits-flux-inverted": 0.15, "tuned-0": 0.04,
                 "tuned-1": 0.03, "tuned-2": 0.03}  # fmt: skip
WORKER_BYTES: Final = 9 * 2**20  # one of the models, two of them not
NUM_CPUS: Final = 8  # shares, for three times two workers, a text encoder and an ingress
STEPS: Final = 12
WORDS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
OURS: Final = "latency-first"
ARMS: Final = (OURS, "no-controller", "serve.multiplexed")
SLICE_S: Final = 10.0  # of a trace, before the next arm's turn
BURST_EVERY_S: Final = 5.0
TARGET_S: Final = 1.0  # what is answered within it is good
NUM_ALONE: Final = 20  # requests that tell what one takes when nothing else runs
_WARM_UPS: Final = 4  # requests for each model before the simulated trace

_Call = Callable[[str, int], Awaitable[ImageResult]]
_say = Console(stderr=True).print


@dataclass(slots=True)
class _Arm:
    """One way to serve: how it is asked, the handle of its workers, and its answers since `clear`.

    `alone_s` is the median latency of a request while nothing else runs: what all of them pay, whoever chooses workers.
    """

    name: str
    call: _Call
    workers: Any
    alone_s: float = 0.0
    latencies: list[tuple[str, float]] = field(default_factory=list)  # by model, in seconds
    built_s: list[float] = field(default_factory=list)  # what switches took that requests began

    def clear(self) -> None:
        """Forget the answers."""
        self.latencies, self.built_s = [], []

    async def count(self) -> tuple[int, int]:
        """Return the switches of all workers since they began, and the bytes that they moved."""
        found = await self.workers.broadcast("describe").results_async(timeout_s=30.0)
        return sum(one["num_switches"] for one in found), sum(one["arena"]["moved_bytes"] for one in found)


def measure_real(
    config_path: Path,
    rate: float,
    duration_s: float,
    seed: int,
    record: Path | None = None,
    arms: Collection[str] = ARMS,
) -> dict[str, Any]:
    """Return the figures of each arm on each trace, and of the simulator beside those of our cluster.

    What the simulator was given is written into the folder `record`, as trace files.
    """
    from deployments.console.running import cluster_up

    chance = random.Random(seed)
    traces = {
        "poisson": poisson(rate, SHARES, duration_s, chance),
        "bursty": bursts(max(1, round(rate * BURST_EVERY_S)), BURST_EVERY_S, list(SHARES), duration_s, chance),
        "waves": diurnal(rate, 0.9, duration_s / 2, SHARES, duration_s, chance),
    }
    rows: list[dict[str, Any]] = []
    # Ray prints when a process of it dies, and stdout is for figures.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        config = _config_of(load_cluster_config(config_path), Path(folder))
        with cluster_up(config, "bench") as url:
            client, up = Client(url), [_start_arm(name, config) for name in arms]
            sizes: dict[str, dict[str, int]] = {}
            for arm in up:
                _say(f"{arm.name}: every model is asked for")
                asyncio.run(_look_at_each(arm.call, lambda: note_sizes(sizes, client.cluster()["workers"])))
            asyncio.run(_measure_alone(up))
            for name, requests in traces.items():
                first = client.ended_requests()
                resident = [list(worker["last_switches"])[-1] for worker in client.cluster()["workers"]]
                measured = _measure_in_turn(up, name, requests)
                rows += measured
                ended = client.ended_requests(first["next_number"])["requests"]
                cluster = client.cluster()
                built_s = next((arm.built_s for arm in up if arm.name == OURS), [])
                scenario = recorded_scenario(
                    ended,
                    cluster["admission"]["models"],
                    cluster["workers"],
                    first["now_s"],
                    sizes,
                    statistics.median(built_s) if built_s else None,
                )
                if record is not None:
                    record.mkdir(parents=True, exist_ok=True)
                    (record / f"{name}.jsonl").write_text("".join(trace_lines(scenario)), encoding="utf-8")
                rows += [_simulated(scenario, row, resident) for row in measured if row["arm"] == OURS]
    return {"rate": rate, "duration_s": duration_s, "seed": seed, "rows": rows}


def _measure_in_turn(arms: Sequence[_Arm], trace: str, requests: Sequence[SimRequest]) -> list[dict[str, Any]]:
    """Send every slice of a trace to each arm, and return their figures. Who is first changes."""
    before = {}
    for arm in arms:
        arm.clear()
        before[arm.name] = asyncio.run(arm.count())
    slices: dict[int, list[SimRequest]] = defaultdict(list)
    for request in requests:
        number = int(request.at_s / SLICE_S)
        slices[number].append(replace(request, at_s=request.at_s - number * SLICE_S))
    for number, of_slice in slices.items():
        for turn in range(len(arms)):
            arm = arms[(number + turn) % len(arms)]
            num_before = len(arm.latencies)
            asyncio.run(_run_slice(arm, of_slice))
            mean_s = statistics.mean(latency_s for _, latency_s in arm.latencies[num_before:])
            _say(f"{trace}, slice {number}, {arm.name}: {len(of_slice)} requests, {mean_s:.3f} s in the mean")
    rows = []
    for arm in arms:
        now = asyncio.run(arm.count())
        switches, moved_bytes = (after - start for after, start in zip(now, before[arm.name], strict=True))
        figures = _figures(arm.name, trace, arm.latencies, switches, SLICE_S * len(slices), moved_bytes)
        rows.append(figures | {"alone_s": arm.alone_s})
    return rows


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
            "ray": demo.ray.model_copy(update={"num_cpus": NUM_CPUS}),
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


def _start_arm(name: str, config: ClusterConfig) -> _Arm:
    """Return an arm that is up: ours, which is up, or one beside it, with a control plane of its own."""
    from ray import serve

    from deployments.app import AppArgs, build_app

    off = config.model_copy(update={"controller": config.controller.model_copy(update={"enabled": False})})
    app = config.name if name == OURS else name
    if name == "no-controller":
        serve.run(build_app(AppArgs(config=off.model_dump(mode="json"))), name=app, route_prefix=None)
    elif name == "serve.multiplexed":
        serve.run(_multiplexed_app(off), name=app, route_prefix=None)
    handle = serve.get_app_handle(app)

    async def call(model: str, number: int) -> ImageResult:
        result: ImageResult = await handle.generate.remote(_request(config, model, number))
        return result

    return _Arm(name, call, serve.get_deployment_handle("worker", app))


def _multiplexed_app(config: ClusterConfig) -> Any:
    """Return as many workers under Serve's own multiplexing, the text encoder that they call, and an ingress."""
    from ray import serve

    from deployments.services.replica_classes import TEXT_ENCODER

    def deployment(path: str, name: str, max_ongoing_requests: int, num_replicas: int = 1) -> Any:
        return serve.deployment(
            name=name,
            num_replicas=num_replicas,
            max_ongoing_requests=max_ongoing_requests,
            ray_actor_options={"num_cpus": 0.5},
        )(path)

    encoder = deployment(TEXT_ENCODER, "text_encoder", 256).bind(config)
    slots, num_replicas = config.worker.max_running_images, config.worker.num_replicas
    worker = deployment("infra.bench.multiplexed_worker.MultiplexedWorker", "worker", slots, num_replicas)
    ingress = deployment("infra.bench.multiplexed_worker.MultiplexedIngress", "ingress", 256)
    return ingress.bind(worker.bind(config, encoder))


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


async def _measure_alone(arms: Sequence[_Arm]) -> None:
    """Ask each arm in turn for the same model, one request at a time."""
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(NUM_ALONE):
        for arm in arms:
            start = time.perf_counter()
            await arm.call(next(iter(SHARES)), number)
            found[arm.name].append(time.perf_counter() - start)
    for arm in arms:
        arm.alone_s = statistics.median(found[arm.name])


async def _run_slice(arm: _Arm, requests: Sequence[SimRequest]) -> None:
    """Send each request at its time, and await all answers."""
    start = time.perf_counter()

    async def send(number: int, request: SimRequest) -> None:
        await asyncio.sleep(start + request.at_s - time.perf_counter())
        result = await arm.call(request.model, number)
        arm.latencies.append((request.model, time.perf_counter() - start - request.at_s))
        if result.switch and result.switch.built:
            arm.built_s.append((result.switch.attach_ms + result.switch.build_ms) / 1e3)

    await asyncio.gather(*(send(number, request) for number, request in enumerate(requests)))


def _figures(
    arm: str, trace: str, latencies: Sequence[tuple[str, float]], switches: int, duration_s: float, moved_bytes: int
) -> dict[str, Any]:
    """Return the figures of (model, seconds) of each request. `jain` is over models' shares of good answers."""
    ordered = [latency_s for _, latency_s in latencies]
    good: dict[str, list[bool]] = defaultdict(list)
    for model, latency_s in latencies:
        good[model].append(latency_s <= TARGET_S)
    shares = [statistics.mean(of_model) for of_model in good.values()]
    return {
        "arm": arm,
        "trace": trace,
        "source": "measured",
        "duration_s": duration_s,
        "requests": len(ordered),
        "mean_s": statistics.mean(ordered),
        "p50_s": percentile(ordered, 0.5),
        "p95_s": percentile(ordered, 0.95),
        "p99_s": percentile(ordered, 0.99),
        "switches": switches,
        "moved_bytes": moved_bytes,
        "goodput": sum(map(sum, good.values())) / duration_s,
        "slo_attainment": sum(map(sum, good.values())) / len(ordered),
        "jain": sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)) if any(shares) else 0.0,
    }


def _simulated(scenario: Scenario, measured: dict[str, Any], resident: Sequence[str]) -> dict[str, Any]:
    """Return the simulator's figures for what was recorded, and how far they are from the measured ones.

    As in the real cluster, requests for each model came before, those that were `resident` last: the queue knows what
    they take.
    """
    pause_s = 2 * max(model.service_s for model in scenario.models) + max(w.fixed_switch_s for w in scenario.workers)
    known = [model.id for model in scenario.models]
    models = known * _WARM_UPS + [model for model in resident if model in known]
    before = [SimRequest(number * pause_s, model) for number, model in enumerate(models)]
    began_s = len(before) * pause_s
    after = [replace(request, at_s=request.at_s + began_s) for request in scenario.requests]
    _, world = simulate(replace(scenario, requests=(*before, *after)), OURS)
    latencies = [(one.request.model, one.latency_s) for one in world.served if one.request.at_s >= began_s]
    switches = sum(span.is_switch and span.start_s >= began_s for span in world.spans)
    row = _figures(OURS, measured["trace"], latencies, switches, measured["duration_s"], 0) | {"source": "simulated"}
    for key in ("mean_s", "switches"):
        row[f"{key}_off"] = row[key] / measured[key] - 1 if measured[key] else None
    return row


def print_real_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print a table, or one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    # The rest is in the JSON.
    shown = {"mean_s": "mean s", "mean_s_off": "off", "p95_s": "p95 s", "p99_s": "p99 s", "goodput": "goodput",
             "switches": "switches", "switches_off": "off"}  # fmt: skip
    rows = []
    for row in figures["rows"]:
        found = (row.get(key, "") for key in shown)
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in found]
        rows.append([f"{row['arm']}, {row['trace']}, {row['source']}", *cells])
    title = f"{figures['rate']:g} requests/s for {figures['duration_s']:g} s, two workers"
    columns = [Column("arm, trace", "text"), *(Column(header, align="right") for header in shown.values())]
    print_table(columns, rows, title=title)
