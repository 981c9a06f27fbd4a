"""The parts of the bench of a real cluster that need none."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from cluster.placement.state import Components
from configs.loading import load_cluster_config
from infra.bench import schedule_real as bench
from infra.simulator.scenario import Scenario, SimModel, SimRequest, SimWorker

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


class Workers:
    """The handle of two workers, of which each switches whenever it is asked for a slice's third request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def call(self, model: str, number: int):
        self.asked.append((model, number))
        await asyncio.sleep(0)
        built = ("transformer",) if number % 3 == 0 else ()
        return SimpleNamespace(switch=SimpleNamespace(built=built, attach_ms=10.0, build_ms=20.0))

    def broadcast(self, method: str):
        num = sum(number % 3 == 0 for _, number in self.asked)

        async def answers(timeout_s: float):
            return [{"num_switches": num, "arena": {"moved_bytes": 7 * num}} for _ in range(2)]

        assert method == "describe"
        return SimpleNamespace(results_async=answers)


def test_every_arm_gets_every_slice_and_its_switches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SLICE_S", 0.01)
    workers = {name: Workers() for name in "ab"}
    arms = [bench._Arm(name, each.call, each) for name, each in workers.items()]
    requests = [SimRequest(0.003 * number, f"m{number % 2}") for number in range(9)]
    rows = bench._measure_in_turn(arms, "t", requests)
    num_built = sum(number % 3 == 0 for number in [0, 1, 2, 3, 0, 1, 2, 0, 1])  # numbered anew in each slice
    for row, each, arm in zip(rows, workers.values(), arms, strict=True):
        assert [model for model, _ in each.asked] == [request.model for request in requests]
        assert (row["requests"], row["switches"], row["moved_bytes"]) == (9, 2 * num_built, 14 * num_built)
        assert row["duration_s"] == pytest.approx(0.03)
        assert row["mean_s"] >= 0
        assert arm.built_s == pytest.approx([0.03] * num_built)


async def test_what_a_request_takes_alone_is_measured_one_at_a_time() -> None:
    running = asked = 0

    async def call(model: str, number: int) -> None:
        nonlocal running, asked
        assert (running, model) == (0, "digits-flux")
        running, asked = running + 1, asked + 1
        await asyncio.sleep(0)
        running -= 1

    arms = [bench._Arm(name, call, None) for name in "ab"]  # type: ignore[arg-type]
    await bench._measure_alone(arms)
    assert asked == 2 * bench.NUM_ALONE
    assert all(arm.alone_s > 0 for arm in arms)


def test_answers_count_as_good_within_the_target() -> None:
    row = bench._figures("a", "t", [("x", 0.5), ("x", 0.5), ("y", 0.5), ("y", 1.5)], 3, 2.0, 0)
    assert (row["goodput"], row["slo_attainment"]) == (1.5, 0.75)
    assert row["jain"] == pytest.approx(1.5**2 / (2 * (1 + 0.25)))


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
    measured = {"trace": "t", "duration_s": 10.0, "mean_s": 0.5, "switches": 1}
    row = bench._simulated(Scenario(models, workers, requests), measured, ["c", "c"])
    assert row["requests"] == 10
    assert row["mean_s_off"] == pytest.approx(row["mean_s"] / 0.5 - 1)
    assert row["switches"] >= 2
    row = bench._simulated(Scenario(models, workers, requests), measured, ["a", "b"])
    assert (row["switches"], row["mean_s"]) == (0, pytest.approx(0.5))
