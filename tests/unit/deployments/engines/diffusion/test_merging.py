"""Requests that share forwards get the pictures that they get alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deployments.engines.protocol import EngineError


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
            states.append(pipeline.start(*waiting.pop(0)))
        for _ in range(join_every):
            running = [state for state in states if not state.done]
            if running:
                pipeline.step(running)
    return pipeline.decode(states)


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


def test_rows_that_fit_share_one_forward(pair, make_request, count_forwards):
    sizes = count_forwards(pair.ours)
    guided = {"guidance_scale": 2.0, "true_cfg_scale": 2.0}
    early = pair.ours.start(make_request(num_inference_steps=5), pair.conditioning())
    pair.ours.step([early])
    late = pair.ours.start(make_request(num_images=2, **guided), pair.conditioning(negative=True))
    other_size = pair.ours.start(make_request(width=16, height=64), pair.conditioning())
    other_text = pair.ours.start(make_request(), pair.conditioning(length=9))
    sizes.clear()
    pair.ours.step([early, late, other_size, other_text])
    assert sizes == [1 + 2 * 2, 1, 1]
    assert [early.step_index, late.step_index] == [2, 1]


def test_equal_patch_counts_of_other_shapes_stay_apart(flux, make_request, count_forwards):
    jobs = [
        (make_request(width=16, height=64), flux.conditioning()),
        (make_request(width=64, height=16), flux.conditioning()),
    ]
    sizes = count_forwards(flux.ours)
    together = run_together(flux.ours, jobs)
    assert max(sizes) == 1
    for job, picture in zip(jobs, together, strict=True):
        assert np.array_equal(picture, flux.ours.generate(*job))


def test_no_state_moves_when_a_forward_fails(pair, make_request, monkeypatch):
    states = [
        pair.ours.start(make_request(), pair.conditioning()),
        pair.ours.start(make_request(width=64), pair.conditioning()),
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


def test_a_request_goes_on_from_its_latents(pair, make_request):
    job = make_request(num_inference_steps=4, num_images=2), pair.conditioning()
    whole = pair.ours.generate(*job)
    state = pair.ours.start(*job)
    pair.ours.step([state])
    pair.ours.step([state])
    resumed = pair.ours.start(*job, resume_from=(state.latents.clone(), state.step_index))
    while not resumed.done:
        pair.ours.step([resumed])
    assert np.array_equal(pair.ours.decode([resumed])[0], whole)


def test_a_solver_with_history_cannot_resume(make_sdxl_pair, make_request, tmp_path):
    pair = make_sdxl_pair(tmp_path, "DPMSolverMultistepScheduler")
    assert not pair.ours.resumable
    latents = torch.zeros(1, 4, 16, 16)
    with pytest.raises(EngineError, match="DPMSolverMultistepScheduler keeps history"):
        pair.ours.start(make_request(), pair.conditioning(), resume_from=(latents, 1))


def test_on_step_sees_every_step(pair, make_request):
    seen: list[int] = []
    pair.ours.generate(make_request(), pair.conditioning(), on_step=lambda state: seen.append(state.step_index))
    assert seen == [1, 2, 3]


def test_a_finished_state_cannot_step(pair, make_request):
    state = pair.ours.start(make_request(num_inference_steps=1), pair.conditioning())
    pair.ours.step([state])
    with pytest.raises(EngineError, match="'r' has no steps left"):
        pair.ours.step([state])
