"""Requests that share forwards get the images that they get alone, and fail by themselves."""

from __future__ import annotations

import asyncio
from unittest import mock

import numpy as np
import pytest
import torch
from unit.deployments.engine_loops import last_output

from deployments.engines.costs.step_costs import StepCosts
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.rows import BatchBounds, memory_kind, parts_of
from deployments.engines.records.protocol import ComputationFailed, ConditionedRequest, EngineError
from deployments.replicas.step_loop import DeviceThread, EngineLoop


@pytest.fixture
def count_forwards(monkeypatch):
    def count(pipeline):
        sizes: list[int] = []
        forward = pipeline._forward

        def counted(rows, height, width):
            sizes.append(len(rows.latents))
            return forward(rows, height, width)

        monkeypatch.setattr(pipeline, "_forward", counted)
        return sizes

    return count


def run_together(pipeline, jobs, join_every: int = 1):
    """All jobs through one loop; one more joins every `join_every` steps."""
    waiting, states = list(jobs), []
    while waiting or any(not state.done for state in states):
        if waiting:
            states.append(pipeline.start_request(*waiting.pop(0)))
        for _ in range(join_every):
            running = [state for state in states if not state.done]
            if running:
                pipeline.step(running)
    return pipeline.decode(states)


@pytest.mark.drawn
def test_a_mixed_batch_is_the_same_as_alone(pair, make_request):
    jobs = [
        (
            make_request(seed=1, guidance_scale=5.0, num_inference_steps=4),
            pair.conditioning(1, negative=True),
        ),
        (make_request(seed=2, guidance_scale=1.0, num_images=2), pair.conditioning(2)),
        (
            make_request(seed=3, guidance_scale=3.0, num_inference_steps=2),
            pair.conditioning(3, negative=True),
        ),
        (make_request(seed=4, width=48, true_cfg_scale=2.0), pair.conditioning(4, negative=True)),
        (make_request(seed=5), pair.conditioning(5, length=7)),
    ]
    alone = [pair.ours.generate(*job) for job in jobs]
    together = run_together(pair.ours, jobs)
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one.astype(int) - other.astype(int)).max() <= 1


@pytest.mark.drawn(2)
def test_rows_that_fit_share_one_forward(pair, make_request, count_forwards):
    sizes = count_forwards(pair.ours)
    guided = {"guidance_scale": 2.0, "true_cfg_scale": 2.0}
    early = pair.ours.start_request(make_request(num_inference_steps=5), pair.conditioning())
    pair.ours.step([early])
    late = pair.ours.start_request(make_request(num_images=2, **guided), pair.conditioning(negative=True))
    other_size = pair.ours.start_request(make_request(width=32, height=64), pair.conditioning())
    other_text = pair.ours.start_request(make_request(), pair.conditioning(length=40))
    sizes.clear()
    pair.ours.step([early, late, other_size, other_text])
    assert sizes == [1 + 2 * 2, 1, 1]
    assert [early.step_index, late.step_index] == [2, 1]


def test_no_state_moves_when_a_forward_fails(pair, make_request, monkeypatch):
    states = [
        pair.ours.start_request(make_request(), pair.conditioning()),
        pair.ours.start_request(make_request(width=64), pair.conditioning()),
    ]
    before = [state.latents.clone() for state in states]
    forward = pair.ours._forward

    def fail(rows, height, width):
        if width == 64:
            raise RuntimeError("out of memory")
        return forward(rows, height, width)

    monkeypatch.setattr(pair.ours, "_forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        pair.ours.step(states)
    assert [state.step_index for state in states] == [0, 0]
    assert all(torch.equal(state.latents, old) for state, old in zip(states, before, strict=True))
    pair.ours.step(states[:1])  # alone it goes on


def test_on_step_sees_every_step(pair, make_request):
    seen: list[int] = []
    pair.ours.generate(make_request(), pair.conditioning(), on_step=lambda state: seen.append(state.step_index))
    assert seen == [1, 2, 3]


def test_a_finished_state_cannot_step(pair, make_request):
    state = pair.ours.start_request(make_request(num_inference_steps=1), pair.conditioning())
    pair.ours.step([state])
    with pytest.raises(EngineError, match="'r' has no steps left"):
        pair.ours.step([state])


class CostsOfMerging(StepCosts):
    """Costs by which all who can share a turn do, whatever turns take here."""

    def note_call(self, kind, rows, seconds):
        pass

    def seconds(self, kind, rows):
        return 1.0

    def max_rows_to_try(self, kind):
        return 64


async def outcomes(pipeline, states):
    """Serve states that have been started already through one engine and its loop."""
    started = {state.request.request_id: state for state in states}
    with mock.patch.object(pipeline, "start_request", lambda request, *_: started[request.request_id]):
        loop = EngineLoop(DeviceThread(), DiffusionEngine(pipeline, CostsOfMerging()))
        runs = [last_output(loop, ConditionedRequest(state.request, {})) for state in states]
        found = await asyncio.gather(*runs, return_exceptions=True)
    return [outcome if isinstance(outcome, BaseException) else outcome.images for outcome in found]


def start(pair, make_request, count, **changes):
    return [
        pair.ours.start_request(make_request(seed=seed, request_id=str(seed), **changes), pair.conditioning(seed))
        for seed in range(count)
    ]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("fails_at", [1, 3])
async def test_a_solver_that_fails_takes_no_neighbour_with_it(pair, make_request, monkeypatch, fails_at):
    alone = [pair.ours.generate(make_request(seed=seed), pair.conditioning(seed)) for seed in range(3)]
    states = start(pair, make_request, 3)
    solver, done = states[1].solver, []
    step = solver.step

    def fail(*args, **options):
        done.append(1)
        if len(done) == fails_at:
            raise ArithmeticError("singular")
        return step(*args, **options)

    monkeypatch.setattr(solver, "step", fail)
    first, error, last = await outcomes(pair.ours, states)
    assert isinstance(error, ComputationFailed)
    assert str(error) == f"step {fails_at} of 3: the solver failed: ArithmeticError: singular"
    for image, expected in ((first, alone[0]), (last, alone[2])):
        assert np.abs(image.astype(int) - expected.astype(int)).max() <= 1


def test_a_state_that_failed_is_not_stepped_again(pair, make_request, monkeypatch):
    (state,) = start(pair, make_request, 1)
    monkeypatch.setattr(state.solver, "step", lambda *args, **options: 1 / 0)
    pair.ours.step([state])
    with pytest.raises(ComputationFailed, match="step 1 of 3: the solver failed: ZeroDivisionError"):
        pair.ours.step([state])


@pytest.mark.drawn(2)
async def test_latents_that_are_not_finite_are_no_image(pair, make_request, monkeypatch):
    alone = [pair.ours.generate(make_request(seed=seed), pair.conditioning(seed)) for seed in range(3)]
    states = start(pair, make_request, 3)
    step = states[1].solver.step

    def spoilt(prediction, timestep, latents, **options):
        stepped = step(prediction, timestep, latents, **options)
        if states[1].step_index == 1:
            stepped[0].flatten()[5] = float("nan")
        return stepped

    monkeypatch.setattr(states[1].solver, "step", spoilt)
    first, error, last = await outcomes(pair.ours, states)
    assert isinstance(error, ComputationFailed)
    assert str(error) == "the latents are not finite from step 2 of 3 on"
    for image, expected in ((first, alone[0]), (last, alone[2])):
        assert np.abs(image.astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_image_that_is_not_finite_is_none(pair, make_request, monkeypatch, value):
    states = start(pair, make_request, 2, num_inference_steps=1)
    pair.ours.step(states)
    decode = pair.ours._codec.vae.decode

    def spoilt(latents, **options):
        (images,) = decode(latents, **options)
        images = images.clone()
        images[1, 0, 3, 3] = value
        return (images,)

    monkeypatch.setattr(pair.ours._codec.vae, "decode", spoilt)
    good, bad = pair.ours.decode(states)
    assert good.shape == (1, 32, 32, 3)
    assert isinstance(bad, ComputationFailed)
    assert "the image that the VAE made of them is not" in str(bad)


def test_a_request_alone_fails_with_the_same_words(pair, make_request, monkeypatch):
    monkeypatch.setattr(pair.ours, "_forward", lambda rows, height, width: rows.latents * float("inf"))
    with pytest.raises(ComputationFailed, match="not finite from step 1 of 3 on"):
        pair.ours.generate(make_request(), pair.conditioning())


def test_nothing_of_a_step_is_read_back_from_the_device(pair, make_request, monkeypatch):
    """A check that made the device wait would cost each step its overlap."""
    (state,) = start(pair, make_request, 1)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: pytest.fail("read back"))
    pair.ours._advance(state, torch.zeros_like(state.latents))
    assert [flag.shape for flag in state.are_finite] == [()]


def bounded(pair, load_pipeline, bounds):
    pipeline = load_pipeline(pair.folder, type(pair.stock).__name__, pair.denoiser_name)
    pipeline._bounds = pipeline._decoder._bounds = bounds
    return pipeline


@pytest.mark.drawn
def test_forwards_and_decodes_are_bounded_from_the_start(
    pair, make_request, load_pipeline, count_forwards, monkeypatch
):
    ours = bounded(pair, load_pipeline, BatchBounds(max_rows=4, max_decode_pixels=3 * 32 * 32))
    jobs = [(make_request(seed=seed, num_images=1 + seed % 3), pair.conditioning(seed)) for seed in range(9)]
    expected = [pair.ours.generate(*job) for job in jobs]
    sizes, decoded = count_forwards(ours), []
    decode = ours._codec.decode
    monkeypatch.setattr(
        ours._codec, "decode", lambda latents, **options: decoded.append(len(latents)) or decode(latents, **options)
    )
    states = [ours.start_request(*job) for job in jobs]
    for _ in range(3):
        ours.step(states)
    images = ours.decode(states)
    assert sizes == [4, 4, 4, 4, 2] * 3
    assert decoded == [3] * 6
    for image, alone in zip(images, expected, strict=True):
        assert np.abs(image.astype(int) - alone.astype(int)).max() <= 1


async def test_a_crowd_is_served_in_bounded_batches(sdxl, make_request, load_pipeline, count_forwards, monkeypatch):
    ours = bounded(sdxl, load_pipeline, BatchBounds(max_rows=8, max_decode_pixels=4 * 32 * 32))
    guided = {"guidance_scale": 3.0, "num_inference_steps": 2}
    jobs = [
        (make_request(seed=seed, request_id=str(seed), **guided), sdxl.conditioning(seed, negative=True))
        for seed in range(20)
    ]
    sizes, decoded = count_forwards(ours), []
    decode = ours._codec.decode
    monkeypatch.setattr(
        ours._codec, "decode", lambda latents, **options: decoded.append(len(latents)) or decode(latents, **options)
    )
    loop = EngineLoop(DeviceThread(), DiffusionEngine(ours))
    found = await asyncio.gather(*(last_output(loop, ConditionedRequest(*job)) for job in jobs))
    assert max(sizes) <= 8
    assert sum(sizes) == 20 * 2 * 2
    assert max(decoded) <= 4
    assert sum(decoded) == 20
    for output, job in list(zip(found, jobs, strict=True))[::7]:
        assert np.abs(output.images.astype(int) - sdxl.ours.generate(*job).astype(int)).max() <= 1


def test_a_large_image_is_a_forward_of_its_own():
    bounds = BatchBounds(max_rows=64, max_pixels=2**20, max_decode_pixels=2**19)
    assert [bounds.denoise_rows(side * side) for side in (32, 512, 2048)] == [64, 4, 1]
    assert [bounds.decode_rows(side * side) for side in (32, 512, 2048)] == [512, 2, 1]


@pytest.mark.drawn(2)
def test_batches_are_as_large_as_bounds_and_memory_allow(pair, make_request, load_pipeline):
    ours = bounded(pair, load_pipeline, BatchBounds(max_rows=16, max_pixels=8 * 64 * 64))
    small = ours.start_request(make_request(num_images=2), pair.conditioning())
    large = ours.start_request(make_request(width=64, height=64, num_images=2), pair.conditioning())
    guided = {"guidance_scale": 2.0, "true_cfg_scale": 2.0, "num_images": 2}
    twice = ours.start_request(make_request(**guided), pair.conditioning(negative=True))

    def sizes():
        return [(work.rows, work.max_rows) for work in map(ours.step_work, (small, large, twice))]

    assert sizes() == [(2, 16), (2, 8), (4, 16)]
    ours._memory.ran_out(memory_kind(parts_of([small])[0]), 8)
    assert sizes() == [(2, 4), (2, 8), (4, 4)]


@pytest.mark.drawn
def test_a_batch_that_finds_no_memory_is_tried_once(pair, make_request, load_pipeline, monkeypatch):
    """16 requests of 6 steps where 8 fit."""
    ours = bounded(pair, load_pipeline, BatchBounds())
    calls = {"fits": 0, "fails": 0}

    def limited(work):
        def run(latents, *args, **options):
            count = len(getattr(latents, "latents", latents))
            calls["fits" if count <= 8 else "fails"] += 1
            if count > 8:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return work(latents, *args, **options)

        return run

    monkeypatch.setattr(ours, "_forward", limited(ours._forward))
    states = start(pair, make_request, 16, num_inference_steps=6)
    expected = pair.ours.generate(make_request(seed=15, num_inference_steps=6), pair.conditioning(15))
    images = asyncio.run(outcomes(ours, states))
    assert calls["fails"] == 1
    assert 2 * 6 <= calls["fits"] <= 2 * 6 + 4, "the last batches need not be full"
    assert np.abs(images[15].astype(int) - expected.astype(int)).max() <= 1
    monkeypatch.setattr(ours._codec, "decode", limited(ours._codec.decode))
    calls |= {"fits": 0, "fails": 0}
    for _ in range(3):
        ours.decode(states)
    assert calls == {"fits": 6, "fails": 1}


@pytest.mark.drawn(2)
async def test_what_does_not_fit_even_alone_fails_alone(pair, make_request, load_pipeline, monkeypatch):
    ours = bounded(pair, load_pipeline, BatchBounds())
    forward = ours._forward

    def limited(rows, height, width):
        if width > 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(rows, height, width)

    monkeypatch.setattr(ours, "_forward", limited)
    good, large = await outcomes(
        ours, [*start(pair, make_request, 1), ours.start_request(make_request(width=64), pair.conditioning())]
    )
    assert good.shape == (1, 32, 32, 3)
    assert isinstance(large, torch.OutOfMemoryError)
