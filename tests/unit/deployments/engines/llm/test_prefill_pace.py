"""Prompts beside running streams, under a virtual clock: a machine says what a step takes, and the pace finds out."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from kit.drawing import seeds

from deployments.engines.llm.prefill_pace import MAX_BESIDE, PrefillPace
from deployments.engines.llm.scheduler import Scheduler
from deployments.engines.llm.sequences.block_manager import BlockPool
from deployments.engines.llm.sequences.sequence import Sequence

Cost = Callable[[int, int], float]  # seconds of a step of so many decoding sequences and prompt tokens


def fused(rows: int, tokens: int) -> float:
    """All tokens in one pass over the weights, which takes 39 ms; from then on each token takes its time."""
    return max(0.039, 0.0085 * (rows + tokens)) + 0.0005 * (rows + tokens)


def two_passes(rows: int, tokens: int) -> float:
    """Prompts take a pass of their own, of which the first token costs most."""
    return fused(rows, 0) + (0.11 + 0.007 * tokens if tokens else 0.0)


def dense(rows: int, tokens: int) -> float:
    return 0.18 + 0.0065 * tokens + 0.002 * rows


def two_ways(rows: int, tokens: int) -> float:
    """A few tokens share the pass of those that decode; more of them take one of their own."""
    return two_passes(rows, tokens) if rows + tokens > 16 else 0.04 + 0.003 * (rows + tokens)


@dataclass
class Machine:
    """Runs the scheduler's steps; a step takes what `cost` says, with noise, and a long one now and then."""

    cost: Cost
    delay: float = 2.0
    most: int = 512
    budget: int = 512
    noise: float = 0.05
    seed: int = 0
    learned: PrefillPace | None = None
    now: float = 0.0
    gaps: list[float] = field(default_factory=list)
    ends: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pace = self.learned or PrefillPace(self.delay, self.most)
        self.scheduler = Scheduler(
            BlockPool(10_000), max_num_seqs=64, max_num_batched_tokens=self.budget, pace=self.pace
        )

    def add(self, name: str, num_tokens: int) -> Sequence:
        sequence = Sequence(name, [self.random.randrange(10**6) for _ in range(num_tokens)], num_tokens)
        self.scheduler.add_sequence(sequence)
        return sequence

    def step(self, other_step_s: float | None = None) -> tuple[int, int]:
        plan = self.scheduler.schedule(other_step_s)
        seconds = self.cost(plan.num_decoding, plan.num_prompt_tokens) * self.random.lognormvariate(0, self.noise)
        seconds *= 3 if self.noise and self.random.random() < 0.02 else 1
        self.now += seconds
        for chunk in plan.chunks:
            self.scheduler.complete(chunk, 7 if chunk.is_last else None)
            if chunk.is_last and not chunk.sequence.request_id.startswith("stream"):
                self.ends[chunk.sequence.request_id] = self.now
                self.scheduler.finish(chunk.sequence)
        if plan.chunks:
            self.pace.note_step(plan.num_decoding, plan.num_prompt_tokens, seconds)
        if plan.num_decoding or other_step_s is not None:
            self.gaps.append(seconds)
        return plan.num_decoding, plan.num_prompt_tokens

    def run_beside(self, num_steps: int, num_streams: int = 1, prompt: int = 1900) -> list[int]:
        """Return the prompt tokens of each step, with streams that go on and always one prompt that waits."""
        sizes = []
        for number in range(num_streams):
            self.add(f"stream {len(self.ends)} {number}", 16)
        while self.scheduler.num_waiting:
            self.step()
        self.gaps.clear()
        for number in range(num_steps):
            if not self.scheduler.num_waiting:
                self.add(f"prompt {number} {len(self.ends)}", prompt)
            sizes.append(self.step()[1])
        return sizes


@seeds(50)
@pytest.mark.parametrize("num_streams", [1, 3, 8])
@pytest.mark.parametrize("cost", [fused, dense])
def test_a_stream_waits_twice_as_long_beside_prompts_and_prompts_get_what_is_left(
    cost: Cost, num_streams: int, seed: int
) -> None:
    machine = Machine(cost, seed=seed)
    sizes = machine.run_beside(600, num_streams)
    idle = cost(num_streams, 0)
    fitting = max(tokens for tokens in range(512) if cost(num_streams, tokens) <= 2 * idle)
    assert statistics.median(machine.gaps) <= 2.1 * idle
    assert statistics.quantiles(machine.gaps, n=20)[17] <= 2.5 * idle
    assert statistics.fmean(sizes[100:]) >= 0.6 * fitting, f"{fitting} tokens would fit"


@seeds(50)
def test_what_lies_before_a_jump_of_the_cost_is_found(seed: int) -> None:
    assert two_ways(1, 16) > 2 * two_ways(1, 0) > two_ways(1, 12)
    assert statistics.median(Machine(two_ways, noise=0, seed=seed).run_beside(400)[60:]) == 12
    machine = Machine(two_ways, seed=seed)
    sizes = machine.run_beside(400)
    assert statistics.fmean(sizes[60:]) >= 0.6 * 12, "12 are 8 % below what is allowed: noise may make them seem dear"
    assert statistics.median(machine.gaps) <= 2.1 * two_ways(1, 0)


@pytest.mark.parametrize("delay", [1.2, 1.5, 3.0, 8.0])
def test_a_greater_delay_gives_prompts_more(delay: float) -> None:
    machine = Machine(dense, delay=delay)
    sizes = machine.run_beside(400)
    fitting = max(tokens for tokens in range(512) if dense(1, tokens) <= delay * dense(1, 0))
    assert statistics.median(machine.gaps) <= 1.05 * delay * dense(1, 0)
    assert 0.5 * fitting <= statistics.fmean(sizes[60:]) <= 1.1 * fitting


@seeds(50)
def test_prompts_go_on_where_any_of_their_tokens_takes_too_long(seed: int) -> None:
    machine = Machine(two_passes, seed=seed)
    sizes = machine.run_beside(400)
    least = two_passes(1, 4)
    assert least > 2 * two_passes(1, 0)
    assert statistics.fmean(sizes[60:]) >= 4.5, "more than the fewest, since they cost hardly more"
    assert statistics.median(machine.gaps) <= 1.1 * (least + two_passes(1, 0))
    assert sum(size == 0 for size in sizes) <= 8 + len(sizes) / MAX_BESIDE


def test_no_two_steps_in_a_row_go_without_a_prompt_that_waits() -> None:
    for streams in (1, 2, 5):
        sizes = Machine(lambda rows, tokens: 1.0 if not tokens else 100.0 * tokens, noise=0).run_beside(500, streams)
        assert all(one or other for one, other in pairwise(sizes))
        assert min(size for size in sizes if size) >= 4


def test_without_a_stream_a_prompt_gets_the_whole_step() -> None:
    machine = Machine(fused)
    machine.run_beside(100)
    other = Machine(fused, learned=machine.pace)
    other.add("prompt", 1900)
    assert [other.step() for _ in range(4)] == [(0, 512), (0, 512), (0, 512), (0, 364)]


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_another_speed_is_found_out(factor: float) -> None:
    """The price of a prompt's token changes: of longer contexts, say, or since others work on the same cores."""
    price = [1.0]
    machine = Machine(lambda rows, tokens: 0.1 + 0.005 * price[0] * tokens)
    machine.run_beside(300)
    price[0] = factor
    machine.gaps.clear()
    sizes = [
        machine.step()[1] if machine.scheduler.num_waiting else machine.add("more", 10**5) and 0 for _ in range(900)
    ]
    fitting = 0.1 / (0.005 * factor)
    assert statistics.median(machine.gaps[300:]) <= 0.215
    assert statistics.fmean(sizes[300:]) >= 0.5 * min(512, fitting)


def test_a_slow_while_is_forgotten() -> None:
    """The pace is the right one again after any measurements of both kinds of steps."""
    slowness = [1.0]
    machine = Machine(lambda rows, tokens: slowness[0] * dense(rows, tokens))
    before = statistics.fmean(machine.run_beside(300)[100:])
    for slow in (6.0, 1.0):
        slowness[0] = slow
        machine.gaps.clear()
        for _ in range(700):
            if not machine.scheduler.num_waiting:
                machine.add(f"more {machine.now}", 1900)
            machine.step()
    assert statistics.median(machine.gaps[300:]) <= 2.1 * dense(1, 0)
    machine.add("last", 10**4)
    sizes = [machine.step()[1] for _ in range(100)]
    assert statistics.fmean(sizes) >= 0.6 * before


def test_a_first_step_that_took_long_does_not_count_for_long() -> None:
    machine = Machine(
        lambda rows, tokens: dense(rows, tokens) + (5.0 if machine.now == 0 or not machine.gaps else 0), noise=0
    )
    machine.run_beside(120)
    assert statistics.median(machine.gaps[20:]) <= 2.05 * dense(1, 0)


@pytest.mark.parametrize("most", [1, 3, 5, 64])
def test_the_maximum_holds_whatever_a_step_takes(most: int) -> None:
    sizes = Machine(lambda rows, tokens: 1.0, most=most, noise=0).run_beside(300)
    assert max(sizes) == most
    assert statistics.fmean(sizes[50:]) > 0.8 * most


def test_a_first_measurement_in_a_bad_moment_holds_up_no_other_engine() -> None:
    """The time of the fewest tokens is free: it is no more than what more of them took."""
    pace = PrefillPace(2.0, 512)
    for tokens, seconds in ((4, 0.6), (24, 0.33), (64, 0.6)):
        pace.note_step(0, tokens, seconds)
    assert pace.tokens_beside(0, 0.2, 512) <= 32
    assert pace.tokens_beside(0, 0.01, 512) <= 32


@seeds(50)
@pytest.mark.parametrize("num_streams", [0, 2])
@pytest.mark.parametrize(("cost", "other_s"), [(fused, 0.1), (dense, 0.2), (two_ways, 0.2)])
def test_another_engine_waits_for_two_of_its_steps_at_most_and_prompts_get_what_is_left(
    cost: Cost, other_s: float, num_streams: int, seed: int
) -> None:
    machine = Machine(cost, delay=8.0, seed=seed)
    for number in range(num_streams):
        machine.add(f"stream {number}", 16)
    machine.add("alone", 1500)
    while machine.scheduler.num_waiting:
        machine.step()
    machine.gaps.clear()
    sizes = []
    for number in range(300):
        if not machine.scheduler.num_waiting:
            machine.add(f"prompt {number}", 1900)
        sizes.append(machine.step(other_s)[1])
    held_s = 2 * other_s
    fitting = max(tokens for tokens in range(512) if cost(num_streams, tokens) <= held_s)
    assert statistics.median(machine.gaps) <= 1.05 * held_s
    assert statistics.quantiles(machine.gaps[10:], n=20)[17] <= 1.25 * held_s
    assert statistics.fmean(sizes[100:]) >= 0.6 * fitting, f"{fitting} tokens would fit"
    machine.add("alone again", 1900)
    assert max(machine.step()[1] for _ in range(5)) > 4 * fitting or num_streams, "alone, it goes on as before"


def test_prompts_go_on_beside_an_engine_with_steps_shorter_than_any_of_theirs() -> None:
    machine = Machine(dense, noise=0.0)
    for number in range(200):
        if not machine.scheduler.num_waiting:
            machine.add(f"prompt {number}", 1900)
        _, size = machine.step(0.01)
        assert machine.gaps[-1] <= 1.25 * dense(0, 4)
    assert size >= 8, "some are free"
