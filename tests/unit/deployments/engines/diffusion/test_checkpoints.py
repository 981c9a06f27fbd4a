"""A request that goes on from a checkpoint, in another pipeline over the same weights, ends with the same latents."""

from __future__ import annotations

import random

import pytest
import torch

from deployments.engines.diffusion.checkpoints import conditioning_of, restore_checkpoint, save_checkpoint
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.stochastic_solvers import SOLVERS as SOLVERS_OF_OUR_OWN
from deployments.engines.records.protocol import ConditionedRequest, EngineError

SOLVERS = [  # without and with history, of first and second order, with noise of their own
    "EulerDiscreteScheduler",
    "DDIMScheduler",
    "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
    "PNDMScheduler",
    "HeunDiscreteScheduler",
    "LMSDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "DEISMultistepScheduler",
    "KDPM2DiscreteScheduler",
]


def run_to_end(pipeline, state):
    while not state.done:
        pipeline.step([state])
    return state.latents


def check_resumed(pair, load_pipeline, job, stops):
    whole = run_to_end(pair.ours, pair.ours.start_request(*job))
    state, checkpoints = pair.ours.start_request(*job), []
    while state.step_index < max(stops):
        pair.ours.step([state])
        if state.step_index in stops:
            checkpoints.append((state.step_index, save_checkpoint(state, job[1])))
    elsewhere = load_pipeline(pair.folder, type(pair.stock).__name__, pair.denoiser_name)
    assert len(checkpoints) == len(stops)
    for step_index, checkpoint in checkpoints:
        other = elsewhere.start_request(job[0], conditioning_of(checkpoint))
        restore_checkpoint(other, checkpoint)
        assert other.step_index == step_index
        assert torch.equal(run_to_end(elsewhere, other), whole)


@pytest.mark.drawn
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_kind_of_solver_goes_on_bit_for_bit(make_sdxl_pair, make_request, load_pipeline, solver):
    pair = make_sdxl_pair(solver)
    chance = random.Random(solver)
    request = make_request(num_inference_steps=7, num_images=2, guidance_scale=3.0, seed=chance.randrange(2**32))
    check_resumed(pair, load_pipeline, (request, pair.conditioning(3, negative=True)), {1, chance.randrange(2, 7)})


@pytest.mark.drawn
@pytest.mark.parametrize("solver", list(SOLVERS_OF_OUR_OWN))
def test_a_solver_of_our_own_goes_on_in_the_middle_of_a_step(sdxl, make_request, load_pipeline, solver):
    request = make_request(num_inference_steps=4, guidance_scale=3.0, seed=random.randrange(2**32), scheduler=solver)
    check_resumed(sdxl, load_pipeline, (request, sdxl.conditioning(3, negative=True)), {1, 2, 3})


@pytest.mark.drawn(2)
def test_every_family_goes_on(pair, make_request, load_pipeline):
    check_resumed(pair, load_pipeline, (make_request(num_inference_steps=5), pair.conditioning(2)), {3})


@pytest.mark.drawn(2)
def test_the_engine_saves_every_few_steps_and_resumes(pair, make_request):
    request, text = make_request(num_inference_steps=7), pair.conditioning(5)
    first, second = DiffusionEngine(pair.ours), DiffusionEngine(pair.ours)
    first.add_request(ConditionedRequest(request, text, checkpoint_steps=3))
    outputs = []
    while first.has_work:
        outputs += first.step()
    assert [(output.step_index, output.checkpoint is not None) for output in outputs] == [
        (3, True),
        (6, True),
        (7, False),
    ]
    saved = outputs[0].checkpoint
    second.add_request(ConditionedRequest(request, conditioning_of(saved), resume_from=saved, reports_steps=True))
    later = []
    while second.has_work:
        later += second.step()
    assert [output.step_index for output in later] == [4, 5, 6, 7, 7]
    assert (later[-1].images == outputs[-1].images).all()


@pytest.mark.drawn(2)
def test_the_engine_saves_whenever_so_much_time_has_passed_since_the_last(pair, make_request, monkeypatch):
    """Waiting is no work that could be lost; a step takes a second here."""
    now = 0.0
    engine = DiffusionEngine(pair.ours, clock=lambda: now)
    request = ConditionedRequest(make_request(num_inference_steps=9), pair.conditioning(), checkpoint_interval_s=2.5)
    engine.add_request(request)
    now = 100.0
    step = pair.ours.step

    def slow_step(states, *check):
        nonlocal now
        now += 1
        step(states, *check)

    monkeypatch.setattr(pair.ours, "step", slow_step)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.step_index for output in outputs if output.checkpoint] == [3, 6], "none after the last step"
    assert len(outputs) == 3


def test_nothing_is_saved_of_latents_that_are_not_finite(pair, make_request, monkeypatch):
    state = pair.ours.start_request(make_request(), pair.conditioning())
    monkeypatch.setattr(pair.ours, "_forward", lambda rows, height, width: rows.latents * float("inf"))
    pair.ours.step([state])
    assert save_checkpoint(state, {}) is None


def test_bytes_that_fit_nothing_are_refused(pair, make_request):
    text = pair.conditioning()
    small, large = (pair.ours.start_request(make_request(width=width), text) for width in (32, 64))
    pair.ours.step([small])
    saved = save_checkpoint(small, text)
    with pytest.raises(EngineError, match=r"the checkpoint has latents .* expected"):
        restore_checkpoint(large, saved)
    brief = pair.ours.start_request(make_request(num_inference_steps=1), text)
    small_again = pair.ours.start_request(make_request(num_inference_steps=5), text)
    for _ in range(3):
        pair.ours.step([small_again])
    with pytest.raises(EngineError, match="of step 3, expected 0 to 1"):
        restore_checkpoint(brief, save_checkpoint(small_again, text))
    for broken in (b"", b"nonsense", saved[:50], saved[: len(saved) // 2], b"\xff" * 200):
        with pytest.raises(EngineError, match="are no checkpoint"):
            conditioning_of(broken)
