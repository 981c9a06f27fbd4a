"""The number of workers: up at once, down after a while, to zero and back, and nothing wanted is lost on the way."""

from __future__ import annotations

import math
import random

from unit.cluster.placement.random_states import cluster, random_records

from cluster.placement.autoscaling import ScalePlan, ScalingMemory, _can_leave, target_replicas
from cluster.placement.state import ClusterState, Components, ModelState, WorkerState
from configs.admission import ScalingConfig

GB = 10**9
POLICY = ScalingConfig(
    min_workers=0,
    max_workers=20,
    spare_workers=0,
    target_utilization=0.5,
    drain_s=10.0,
    downscale_delay_s=60.0,
    to_zero_delay_s=300.0,
)


def model(id_: str, waiting: int = 0, **more) -> ModelState:
    return ModelState(id_, Components({f"own-{id_}": 10 * GB}), waiting, **more)


def worker(id_: str, *models: ModelState, **more) -> WorkerState:
    sizes = {key: size for each in models for key, size in each.components.sizes.items()}
    return WorkerState(id_, "n", 10 * GB, Components(sizes), tuple(each.id for each in models), **more)


class Scaling:
    """Calls the function as Serve does: again and again, with what it returned."""

    def __init__(self, current: int) -> None:
        self.memory, self.current = ScalingMemory(), current

    def ask(self, state: ClusterState, now_s: float) -> ScalePlan:
        plan = target_replicas(state, POLICY, self.memory, self.current, now_s)
        self.memory, self.current = plan.memory, plan.target
        return plan


def test_a_burst_scales_up_at_once_with_what_it_wants_preloaded() -> None:
    hot, warm = model("hot", 200, service_s=0.5), model("warm", 20, service_s=0.5)
    plan = Scaling(1).ask(cluster([hot, warm], [worker("w0", hot)]), 0.0)
    assert plan.target == 11  # 110 s of work in 10 s
    assert plan.preloads.count("hot") > plan.preloads.count("warm") > 0
    assert len(plan.preloads) == 10


def test_rates_keep_workers_busy_at_the_wanted_utilization() -> None:
    hot = model("hot", rate_long=3.0, rate_short=2.0, service_s=1.0)
    assert Scaling(2).ask(cluster([hot], [worker("w0", hot)]), 0.0).target == 6


def test_down_only_after_the_target_was_lower_for_a_while_by_the_highest_since() -> None:
    scaling = Scaling(10)
    quiet = cluster([model("hot", rate_long=0.5, service_s=1.0)], [])
    middle = cluster([model("hot", rate_long=2.0, service_s=1.0)], [])
    assert scaling.ask(quiet, 0.0).target == 10
    assert scaling.ask(middle, 30.0).target == 10
    assert scaling.ask(quiet, 59.0).target == 10
    assert scaling.ask(quiet, 61.0).target == 4
    assert scaling.ask(quiet, 100.0).target == 4
    assert scaling.ask(quiet, 161.0).target == 1


def test_to_zero_after_silence_and_back_with_one_request() -> None:
    scaling = Scaling(1)
    silent = cluster([model("a")], [worker("w0")])
    assert [scaling.ask(silent, now_s).target for now_s in (0.0, 100.0, 299.0)] == [1, 1, 1]
    scaling.ask(silent, 301.0)
    assert scaling.ask(silent, 362.0).target == 0
    plan = scaling.ask(cluster([model("a", 1, service_s=0.01)], []), 400.0)
    assert (plan.target, plan.preloads) == (1, ("a",))


def test_a_rate_that_fades_is_no_reason_for_the_last_worker() -> None:
    scaling = Scaling(1)

    def faded(now_s: float) -> ClusterState:  # sixty requests at 0 s, as the queue counts them
        rates = {"rate_short": 12 * math.exp(-now_s / 5), "rate_long": math.exp(-now_s / 60)}
        return cluster([model("a", **rates)], [worker("w0", model("a"))])

    targets = {now_s: scaling.ask(faded(now_s), now_s).target for now_s in range(0, 500, 5)}
    assert targets[300] == 1
    assert targets[400] == 0


def test_a_request_meanwhile_starts_the_silence_anew() -> None:
    scaling = Scaling(1)
    silent = cluster([model("a")], [worker("w0")])
    for now_s in range(0, 290, 10):
        scaling.ask(silent, float(now_s))
    scaling.ask(cluster([model("a", 1)], [worker("w0")]), 290.0)
    assert [scaling.ask(silent, now_s).target for now_s in (300.0, 500.0)] == [1, 1]


def test_running_work_keeps_a_worker() -> None:
    scaling = Scaling(1)
    busy = model("a")
    state = cluster([busy], [worker("w0", busy, running={"a": 1})])
    assert [scaling.ask(state, now_s).target for now_s in (0.0, 400.0, 800.0, 1200.0)] == [1] * 4


def test_a_worker_may_leave_unless_it_runs_something_or_has_what_is_wanted_and_nobody_else_has() -> None:
    hot, rare, dead = model("hot", rate_long=0.4), model("rare", rate_long=0.01), model("dead")
    workers = [worker("w0", hot), worker("w1", rare), worker("w2", hot), worker("w3", dead)]
    state = cluster([hot, rare, dead], workers)
    assert [_can_leave(state, each) for each in workers] == [True, False, True, True]
    handed = cluster([hot, rare, dead], [*workers, worker("w5", rare)])
    assert _can_leave(handed, handed.workers["w1"])
    running = worker("w3", dead, running={"dead": 1})
    assert not _can_leave(cluster([hot, rare, dead], [running]), running)
    assert _can_leave(cluster([rare], [workers[1]]), workers[1])  # nobody else stays who could take it over


def test_bounds_hold_however_much_time_passes() -> None:
    for seed in range(500):
        chance = random.Random(seed)
        models, workers, held = random_records(seed)
        state = cluster(models, workers, held)
        policy = ScalingConfig(min_workers=chance.randrange(0, 3), max_workers=chance.randrange(3, 9), spare_workers=0)
        memory, current, now_s = ScalingMemory(), len(workers), 0.0
        for _ in range(6):
            now_s += chance.choice([0.0, 0.1, 100.0, 1e9])
            plan = target_replicas(state, policy, memory, current, now_s)
            assert policy.min_workers <= plan.target <= policy.max_workers
            assert len(plan.preloads) <= max(0, plan.target - current)
            memory = plan.memory
