"""Forwards that are replayed in the engine's loop give the bits that the module gives, in any mix of requests."""

from __future__ import annotations

import random

import pytest
import torch
from unit.deployments.engines.diffusion.ip_adapter_files import write_ip_adapter
from unit.deployments.engines.diffusion.test_batch_invariance import check_random_traffic, random_adapter
from unit.deployments.engines.diffusion.test_image_prompts import image_of, opened

from deployments.engines.diffusion.pipeline import create_pipeline
from deployments.engines.graph.replay import Replays
from deployments.engines.records.protocol import AdapterUse, ImagePromptUse


def replaying(pair, **options):
    """Return the same modules once more, with replays."""
    modules = {pair.denoiser_name: pair.ours.denoiser, "vae": pair.ours._codec.vae}
    replays = Replays(min_forwards=2, **options)
    return create_pipeline(type(pair.stock).__name__, pair.folder, modules, replays=replays), replays


def latents_of(pipeline, jobs):
    """Return the latents of requests that step together, and leave when they are done."""
    states = [pipeline.start_request(request, text) for request, text in jobs]
    while running := [state for state in states if not state.done]:
        pipeline.step(running)
    return [state.latents for state in states]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("num_requests", [1, 3])
def test_latents_are_the_modules_own_and_few_forwards_are_its(pair, make_request, num_requests, monkeypatch):
    ours, _ = replaying(pair)
    forwards = []
    predict = ours.family.network.predict_noise
    monkeypatch.setattr(ours.family.network, "predict_noise", lambda *rows: forwards.append(1) or predict(*rows))
    for turn in range(4):
        jobs = [
            (
                make_request(seed=turn * 10 + place, num_inference_steps=4 + place, guidance_scale=3.0),
                pair.conditioning(turn * 10 + place, negative=True),
            )
            for place in range(num_requests)
        ]
        expected = latents_of(pair.ours, jobs)
        forwards.clear()
        for found, latents in zip(latents_of(ours, jobs), expected, strict=True):
            assert torch.equal(found, latents)
    assert not forwards  # of the last turn


@pytest.mark.drawn
def test_any_company_gives_the_same_bits_where_some_of_it_is_replayed(pair, make_request):
    chance = random.Random(pair.ours.family.class_name)
    pair.request = make_request
    ours, replays = replaying(pair, is_checked=True)
    adapters = {name: random_adapter(pair, name, place) for place, name in enumerate(("fine", "bold"))}
    check_random_traffic(pair, ours, chance, adapters, num_jobs=5)
    assert any(known.is_tried for known in replays._known.values())
    assert not any(known.is_refused for known in replays._known.values())


def test_a_lora_and_a_merged_one_run_in_the_module(flux, make_request):
    ours, replays = replaying(flux)
    adapters = {"fine": random_adapter(flux, "fine", 0)}
    for merges in (False, True):
        uses = (AdapterUse("fine", 1.0),)
        request = make_request(adapters=uses, merges_adapter=merges)
        for _ in range(3):
            states = [one.start_request(request, flux.conditioning(1), adapters) for one in (ours, flux.ours)]
            while not states[0].done:
                for pipeline, state in zip((ours, flux.ours), states, strict=True):
                    pipeline.step([state])
            assert torch.equal(states[0].latents, states[1].latents)
    assert not replays._known


def test_an_image_as_a_prompt_runs_in_the_module_also_where_equal_forwards_are_replayed(sdxl, make_request, tmp_path):
    ours, replays = replaying(sdxl)
    known = {"a": opened(write_ip_adapter(tmp_path / "a", ours.denoiser, "plain"))}
    text, uses = sdxl.conditioning(1), (ImagePromptUse("a", image_of(8, 8), 0.9),)
    for _ in range(2):
        latents_of(ours, [(make_request(guidance_scale=1.0), text)])
    assert any(one.is_tried for one in replays._known.values())
    prompted = make_request(guidance_scale=1.0, image_prompts=uses)
    states = [one.start_request(prompted, text, known) for one in (ours, sdxl.ours)]
    while not states[0].done:
        for pipeline, state in zip((ours, sdxl.ours), states, strict=True):
            pipeline.step([state])
    assert torch.equal(states[0].latents, states[1].latents)
