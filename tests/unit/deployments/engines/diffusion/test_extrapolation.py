"""Extrapolated steps: diffusers' TaylorSeer and plain polynomials judge values; other batches and checkpoints, bits."""

from __future__ import annotations

import copy
import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import diffusers
import pytest
import torch
from kit.seeding import seeded_rng
from torch.multiprocessing.reductions import StorageWeakRef
from unit.deployments.engines.diffusion.conftest import load_ours, make_flux

from configs.options import Acceleration
from deployments.engines.diffusion.checkpoints import conditioning_of, restore_checkpoint, save_checkpoint
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.extrapolation import Extrapolation, noise_levels
from deployments.engines.graph.workspace import Workspace
from deployments.engines.records.protocol import ConditionedRequest

SOLVERS = ["EulerDiscreteScheduler", "DDIMScheduler", "DPMSolverMultistepScheduler", "HeunDiscreteScheduler"]
THIRDS = Acceleration(interval=3, order=1, warmup=3)


def run_to_end(pipeline, *states):
    while running := [state for state in states if not state.done]:
        pipeline.step(running)
    return [state.latents for state in states]


@pytest.fixture(scope="module")
def even_flux(tmp_path_factory):
    """Noise levels at equal distances: only then a polynomial over them is one over the number of the step."""
    folder = tmp_path_factory.mktemp("even")
    pair = make_flux(folder)
    pair.stock.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
    pair.stock.save_pretrained(folder)
    pair.ours = load_ours(folder, "FluxPipeline", "transformer")
    return pair


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("order", "interval"), [(0, 2), (1, 3), (2, 3), (2, 5)])
def test_steps_and_values_are_those_of_diffusers_taylorseer(even_flux, make_request, order, interval):
    request = make_request(num_inference_steps=14, true_cfg_scale=random.choice([1.0, 2.5]), num_images=2)
    conditioning = even_flux.conditioning(random.randrange(99), negative=True)
    plain = even_flux.stock_outputs(request, conditioning)[0]
    config = diffusers.TaylorSeerCacheConfig(
        cache_interval=interval,
        disable_cache_before_step=3,
        max_order=order,
        taylor_factors_dtype=torch.float32,
        use_lite_mode=True,
    )
    even_flux.stock.transformer.enable_cache(config)
    try:
        expected = even_flux.stock_outputs(request, conditioning)[0]
    finally:
        even_flux.stock.transformer.disable_cache()
    rule = Acceleration(interval=interval, order=order, warmup=3)
    state = even_flux.ours.start_request(replace(request, acceleration=rule), conditioning)
    (latents,) = run_to_end(even_flux.ours, state)
    assert (latents - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert (plain - expected).abs().max() > 1e-3, "it makes a difference"


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_line_and_a_constant_are_continued_exactly_over_uneven_levels(order):
    rng = seeded_rng()
    levels = (14 - rng.uniform(0.6, 1.4, size=12).cumsum()).tolist()  # quotients of tiny differences would be noise
    start, slope = torch.from_numpy(rng.normal(size=(2, 3, 4))).float()
    line = start + (slope if order else 0) * torch.tensor(levels).view(-1, 1, 1)
    subject = Extrapolation(Acceleration(interval=4, order=order, warmup=4), levels)
    for step in range(12):
        assert subject.skips(step) == (step not in (0, 1, 2, 3, 5, 9))
        if subject.skips(step):
            assert torch.allclose(subject.predict(step), line[step], atol=1e-4)
        else:
            subject.note(step, line[step])


def test_the_polynomial_is_taylors():
    levels = [float(level) for level in range(10, 0, -1)]
    subject = Extrapolation(Acceleration(interval=5, order=2, warmup=4), levels)
    outputs = [torch.tensor([level**2]) for level in levels]
    for step in range(4):
        subject.note(step, outputs[step])
    slope, bend = (49 - 64) / -1, (((49 - 64) / -1) - ((64 - 81) / -1)) / -1
    assert float(subject.predict(6)) == pytest.approx(49 - 3 * slope + 9 / 2 * bend)


def test_what_is_noted_twice_is_noted_once():
    subject, again = (Extrapolation(THIRDS, [4.0, 3.0, 2.0, 1.0]) for _ in range(2))
    for step in range(3):
        subject.note(step, torch.tensor([float(step)]))
        for _ in range(2):
            again.note(step, torch.tensor([float(step)]))
    assert torch.equal(subject.predict(3), again.predict(3))


def test_the_interval_follows_the_error():
    levels = [1 - step / 40 for step in range(40)]
    counts = []
    for frequency in (0.0, 2.0, 60.0):
        subject = Extrapolation(Acceleration(interval=6, order=1, warmup=3, max_error=0.01), levels)
        computed = []
        for step, level in enumerate(levels):
            if not subject.skips(step):
                computed.append(step)
                assert subject.num_computed(step) <= 40 - step
                subject.note(step, torch.tensor([2 + math.sin(frequency * level), 1.0]))
        assert computed[:3] == [0, 1, 2]
        assert max(b - a for a, b in itertools.pairwise(computed)) <= 6
        counts.append(len(computed))
    assert counts[0] < counts[1] < counts[2] == 40
    assert counts[0] == 3 + math.ceil(37 / 6) - 1


@pytest.mark.drawn(2)
@pytest.mark.parametrize("solver", SOLVERS)
def test_each_solver_has_a_noise_level_for_each_step(make_sdxl_pair, make_request, solver):
    pair = make_sdxl_pair(solver)
    state = pair.ours.start_request(make_request(num_inference_steps=6), pair.conditioning())
    levels = noise_levels(state.solver)
    assert len(levels) == len(state.solver.timesteps)
    assert levels == sorted(levels, reverse=True)
    assert noise_levels(SimpleNamespace(timesteps=torch.tensor([9, 4]), sigmas=torch.tensor([1.0]))) == [9.0, 4.0]


@pytest.mark.drawn
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_checkpoint_between_extrapolated_steps_goes_on_bit_for_bit(
    make_sdxl_pair, make_request, load_pipeline, solver
):
    pair = make_sdxl_pair(solver)
    rule = random.choice([THIRDS, Acceleration(interval=4, order=2, warmup=2, max_error=0.2)])
    request = make_request(num_inference_steps=9, guidance_scale=3.0, acceleration=rule)
    text = pair.conditioning(3, negative=True)
    (whole,) = run_to_end(pair.ours, pair.ours.start_request(request, text))
    state, saved = pair.ours.start_request(request, text), []
    while not state.done:
        saved.append(save_checkpoint(state, text))
        pair.ours.step([state])
    elsewhere = load_pipeline(pair.folder, type(pair.stock).__name__, pair.denoiser_name)
    for checkpoint in random.sample(saved, 3):
        other = elsewhere.start_request(request, conditioning_of(checkpoint))
        restore_checkpoint(other, checkpoint)
        (latents,) = run_to_end(elsewhere, other)
        assert torch.equal(latents, whole)


@pytest.mark.drawn
def test_requests_with_and_without_it_share_forwards_and_keep_their_bits(pair, make_request, monkeypatch):
    rules = [THIRDS, None, Acceleration(interval=2, order=2, warmup=1), Acceleration(max_error=0.3, interval=5)]
    jobs = [
        (
            make_request(
                request_id=str(number),
                seed=number,
                num_inference_steps=random.randint(7, 11),
                guidance_scale=random.choice([1.0, 4.0]),
                acceleration=rule,
            ),
            pair.conditioning(number, negative=True),
        )
        for number, rule in enumerate(rules)
    ]
    alone = {}
    for request, text in jobs:
        state = pair.ours.start_request(request, text)
        run_to_end(pair.ours, state)
        alone[request.request_id] = pair.ours.decode([state])[0]
    rows: list[int] = []
    forward = pair.ours._forward

    def counted(given, height, width):
        rows.append(len(given.latents))
        return forward(given, height, width)

    monkeypatch.setattr(pair.ours, "_forward", counted)
    engine = DiffusionEngine(pair.ours)
    outputs = {}
    for request, text in jobs:
        engine.add_request(ConditionedRequest(request, text, reports_steps=True, num_previews=2))
    reported = []
    while engine.has_work:
        for output in engine.step():
            reported.append((output.request_id, output.step_index))
            outputs[output.request_id] = output
        assert not engine.failures
    for request, _ in jobs:
        assert (outputs[request.request_id].images == alone[request.request_id]).all()
        steps = [step for name, step in reported if name == request.request_id]
        assert steps == [*range(1, request.num_inference_steps + 1), request.num_inference_steps]
    computed = {
        request.request_id: rule.num_computed(request.num_inference_steps) if rule else request.num_inference_steps
        for (request, _), rule in zip(jobs, rules, strict=True)
    }
    branches = {request.request_id: len(pair.ours.start_request(request, text).branches) for request, text in jobs}
    most = sum(computed[name] * branches[name] for name in computed)
    least = most - (computed["3"] - 3) * branches["3"]  # whose interval adapts
    assert least <= sum(rows) <= most
    rows.clear()
    states = [pair.ours.start_request(*job) for job in jobs]
    run_to_end(pair.ours, *states)
    assert rows[0] == sum(branches.values()), "they share forwards"
    for state in states:
        assert (pair.ours.decode([state])[0] == alone[state.request.request_id]).all()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("what", ["note", "predict"])
def test_where_an_output_cannot_be_had_no_state_has_moved(pair, make_request, monkeypatch, what):
    """A step that memory ends is taken again: whoever had moved would move twice."""
    plain, extrapolated = (
        (make_request(request_id=str(rule), num_inference_steps=7, acceleration=rule), pair.conditioning(number))
        for number, rule in enumerate([None, THIRDS])
    )
    alone = [run_to_end(pair.ours, pair.ours.start_request(*job))[0] for job in (plain, extrapolated)]
    states = [pair.ours.start_request(*job) for job in (plain, extrapolated)]
    while states[1].is_extrapolated == (what == "note"):
        pair.ours.step(states)
    steps = [state.step_index for state in states]

    def fail(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Extrapolation, what, fail)
        with pytest.raises(torch.OutOfMemoryError):
            pair.ours.step(states)
    assert [state.step_index for state in states] == steps
    for latents, expected in zip(run_to_end(pair.ours, *states), alone, strict=True):
        assert torch.equal(latents, expected)


def test_only_computed_steps_are_counted_as_work(pair, make_request):
    request = make_request(num_inference_steps=12, acceleration=THIRDS)
    state = pair.ours.start_request(request, pair.conditioning())
    assert THIRDS.num_computed(12) == 6  # 0, 1, 2, 4, 7, 10
    assert state.num_forwards_left == 6
    pair.ours.step([state])
    assert (state.num_steps_left, state.num_forwards_left) == (11, 5)


class Beside:
    """The books of a device that has so many bytes free beside its budget."""

    def __init__(self, nbytes: int) -> None:
        self.free_bytes = nbytes
        self._taken: list[tuple[StorageWeakRef, int]] = []

    def take_unbudgeted(self, holder: torch.UntypedStorage, nbytes: int) -> bool:
        if nbytes > self.free_bytes - self.taken_bytes:
            return False
        self._taken.append((StorageWeakRef(holder), nbytes))
        return True

    @property
    def taken_bytes(self) -> int:
        return sum(nbytes for holder, nbytes in self._taken if not holder.expired())


def test_what_a_request_keeps_is_counted_as_long_as_it_lives():
    memory, levels = Beside(10**6), [float(level) for level in range(12, 0, -1)]
    subject = Extrapolation(Acceleration(interval=3, order=2, warmup=3), levels, Workspace(memory))
    batch = torch.randn(7, 25)
    for step in range(6):
        if not subject.skips(step):
            subject.note(step, batch[step : step + 1])
            subject.note(step, batch[step : step + 1])
            assert memory.taken_bytes == min(step + 1, 3) * 100, "order + 1 rows in float32, and no batch"
    saved = copy.deepcopy(subject.save())  # as a checkpoint has them
    del subject
    again = Extrapolation(Acceleration(interval=3, order=2, warmup=3), levels, Workspace(memory))
    again.restore(saved, torch.device("cpu"))
    assert memory.taken_bytes == 300
    del saved, again
    assert memory.taken_bytes == 0


@pytest.mark.parametrize("max_error", [None, 0.5])
def test_a_device_without_room_for_them_computes_all_steps(max_error):
    levels = [float(level) for level in range(12, 0, -1)]
    rule = Acceleration(interval=3, order=1, warmup=3, max_error=max_error)
    memory = Beside(10**6)
    subject = Extrapolation(rule, levels, Workspace(memory))
    for step in range(4):
        if not subject.skips(step):
            subject.note(step, torch.ones(1, 25))
    memory.free_bytes = 0
    computed = []
    for step in range(4, 12):
        if not subject.skips(step):
            computed.append(step)
            subject.note(step, torch.ones(1, 25))
    assert computed[1:] == list(range(computed[0] + 1, 12)), "all from the one on whose output had no room"
    assert memory.taken_bytes == 0


def test_an_adapting_interval_begins_with_every_step():
    subject = Extrapolation(Acceleration(interval=6, order=1, warmup=1, max_error=0.5), [4.0, 3.0, 2.0, 1.0])
    assert [subject.num_computed(step) for step in range(4)] == [4, 3, 2, 1]
    subject.note(0, torch.tensor([1.0]))
    assert not subject.skips(1)  # one output tells of no error yet


@pytest.mark.parametrize(("order", "distance"), [(1, 4), (2, 2)])
def test_an_error_is_expected_to_grow_by_the_power_of_the_distance(order, distance):
    levels = [20.0 - step for step in range(20)]
    subject = Extrapolation(Acceleration(interval=18, order=order, warmup=order + 1, max_error=0.17), levels)
    for step in range(order + 1):
        subject.note(step, torch.tensor([1.0]))
    subject.note(order + 1, torch.tensor([1 / 0.99]))  # not 1: an error of 0.01, a 17th of what it may be
    skipped = [subject.skips(order + 1 + step) for step in range(1, distance + 1)]
    assert skipped == [True] * (distance - 1) + [False]


def test_outputs_that_are_no_numbers_make_every_step_a_computed_one():
    subject = Extrapolation(Acceleration(interval=6, order=1, warmup=2, max_error=0.5), [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    for step, value in enumerate((1.0, 2.0, math.nan)):
        subject.note(step, torch.tensor([value]))
    assert not subject.skips(3)
