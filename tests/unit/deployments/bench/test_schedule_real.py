"""The parts of the bench of a real cluster that need none."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from cluster.control.state import Components
from cluster.simulator.scenario import Scenario, SimModel, SimRequest, SimWorker
from configs.loading import load_cluster_config
from deployments.bench import schedule_real as bench

DEMO = Path("configs/clusters/demo.yaml")


def test_six_models_of_which_a_worker_has_room_for_one(tmp_path: Path) -> None:
    config = bench._config_of(load_cluster_config(DEMO), tmp_path)
    assert {model.id for model in config.models} == set(bench.SHARES)
    assert sum(bench.SHARES.values()) == pytest.approx(1.0)
    assert config.worker.weights_budget_bytes == bench.WORKER_BYTES
    name = "transformer/diffusion_pytorch_model.safetensors"
    stock = load_file(Path("infra/demo/models/digits-flux") / name)
    copies = [load_file(tmp_path / f"tuned-{number}" / name) for number in range(2)]
    assert stock.keys() == copies[0].keys()
    assert all(copies[0][key].shape == stock[key].shape and copies[0][key].dtype == stock[key].dtype for key in stock)
    assert any((copies[0][key] != stock[key]).any() for key in stock)
    assert any((copies[0][key] != copies[1][key]).any() for key in stock)


async def test_every_request_is_sent_once_and_its_switch_is_counted() -> None:
    asked: list[tuple[str, int]] = []

    async def call(model: str, number: int):
        asked.append((model, number))
        await asyncio.sleep(0)
        built = ("transformer",) if number % 3 == 0 else ()
        return SimpleNamespace(switch=SimpleNamespace(built=built, attach_ms=10.0, build_ms=20.0))

    requests = [SimRequest(0.001 * number, f"m{number % 2}") for number in range(9)]
    latencies, built_s = await bench._run_trace(call, requests)
    assert sorted(asked, key=lambda each: each[1]) == [(f"m{number % 2}", number) for number in range(9)]
    assert len(latencies) == 9
    assert min(latencies) >= 0
    assert built_s == pytest.approx([0.03] * 3)


async def test_every_model_is_looked_at_while_it_is_there() -> None:
    asked: list[str] = []
    seen: list[str] = []

    async def call(model: str, number: int):
        asked.append(model)

    await bench._look_at_each(call, lambda: seen.append(asked[-1]))
    assert seen == list(bench.SHARES)
    assert min(Counter(asked).values()) > len(bench.WORDS)


def test_the_simulated_trace_begins_with_what_was_there() -> None:
    models = tuple(SimModel(id_, Components({id_: 1}), 0.5) for id_ in "abc")
    workers = tuple(SimWorker(f"w{number}", "n", 1, fixed_switch_s=0.2) for number in range(2))
    requests = tuple(SimRequest(float(at_s), "ab"[at_s % 2]) for at_s in range(10))
    for arm in ("latency-first", "no-controller"):
        measured = {"mean_s": 0.5, "switches": 1}
        row = bench._simulated(arm, "t", Scenario(models, workers, requests), measured, ["a", "b"])
        assert row["requests"] == 10
        assert row["mean_s"] >= 0.5
        assert row["mean_s_off"] == pytest.approx(row["mean_s"] / 0.5 - 1)
    row = bench._simulated("latency-first", "t", Scenario(models, workers, requests), measured, ["a", "b"])
    assert (row["switches"], row["mean_s"]) == (0, pytest.approx(0.5))
