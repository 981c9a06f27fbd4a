"""Forwards that are replayed in the engine's loop give the bits that the module gives, in any mix of requests."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest
import torch
from kit.seeding import seeded_rng
from unit.deployments.engines.diffusion.control_nets import controlnet, t2i_adapter, union
from unit.deployments.engines.diffusion.ip_adapter_files import write_ip_adapter
from unit.deployments.engines.diffusion.test_batch_invariance import check_random_traffic, random_adapter
from unit.deployments.engines.diffusion.test_image_prompts import image_of, opened

from deployments.engines.diffusion.pipeline import create_pipeline
from deployments.engines.graph.replay import Replays
from deployments.engines.records.protocol import AdapterUse, ControlUse, ImagePromptUse


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


@pytest.mark.drawn
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


def forwards_of(pipeline, monkeypatch):
    """Return a list that grows with each forward that the module of a pipeline runs itself."""
    forwards = []
    forward = pipeline._forward
    monkeypatch.setattr(pipeline, "_forward", lambda *rows: forwards.append(1) or forward(*rows))
    return forwards


def check_bits(pair, ours, requests, known, text):
    """Check that requests which step together have the latents that the module gives."""
    runs = [[one.start_request(request, text, known) for request in requests] for one in (ours, pair.ours)]
    while not runs[0][0].done:
        for pipeline, states in zip((ours, pair.ours), runs, strict=True):
            pipeline.step(states)
    for found, expected in zip(*runs, strict=True):
        assert torch.equal(found.latents, expected.latents)


@pytest.mark.drawn
@pytest.mark.parametrize("merges", [False, True])
def test_loras_are_replayed_and_those_of_equal_shapes_share_a_recording(pair, make_request, merges, monkeypatch):
    ours, replays = replaying(pair)
    adapters = {name: random_adapter(pair, name, seed) for seed, name in enumerate(("fine", "bold", "late"))}
    forwards, text = forwards_of(ours, monkeypatch), pair.conditioning(1)

    def run(*names):
        forwards.clear()
        requests = [
            make_request(
                seed=seed, adapters=(AdapterUse(name, 0.7),), merges_adapter=merges, guidance_scale=1.0, request_id=name
            )
            for seed, name in enumerate(names)
        ]
        check_bits(pair, ours, requests, adapters, text)
        return len(forwards)

    assert run("fine")
    assert run("fine", "late")
    run("fine"), run("late", "bold")
    assert run("fine") == 0
    if not merges:
        assert run("bold") == run("late") == run("bold", "fine") == 0
    adapters.clear()
    gc.collect()
    merged = [known for (_, owners), known in replays._known.items() if owners]
    assert bool(merged) == merges
    assert all(known.bound is None for known in merged)  # their copies went with the adapters
    assert not any(known.is_refused for known in replays._known.values())


def test_a_strength_is_no_other_strength(flux, make_request):
    ours, _ = replaying(flux)
    adapters, text = {"fine": random_adapter(flux, "fine", 0)}, flux.conditioning(1)
    for strength in (1.0, 0.3, 1.0, 0.3, -0.5):
        request = make_request(adapters=(AdapterUse("fine", strength),))
        check_bits(flux, ours, [request] if strength > 0 else [request, request], adapters, text)


def test_images_as_prompts_are_replayed_whatever_they_show(sdxl, make_request, tmp_path, monkeypatch):
    ours, replays = replaying(sdxl)
    known = {"a": opened(write_ip_adapter(tmp_path / "a", ours.denoiser, "plain"))}
    text, forwards = sdxl.conditioning(1), forwards_of(ours, monkeypatch)
    latents_of(ours, [(make_request(guidance_scale=1.0), text)])
    for seed in range(4):
        forwards.clear()
        prompted = make_request(
            seed=seed, guidance_scale=1.0, image_prompts=(ImagePromptUse("a", image_of(8 + seed, 8), 0.9),)
        )
        check_bits(sdxl, ours, [prompted], known, text)
    assert not forwards
    assert not any(one.is_refused for one in replays._known.values())


@pytest.mark.drawn
@pytest.mark.parametrize("kind", ["controlnet", "union", "t2i"])
def test_controlnets_are_replayed_until_they_are_gone(sdxl, make_request, kind, monkeypatch):
    ours, replays = replaying(sdxl)
    made = {
        "controlnet": lambda: controlnet(ours.denoiser),
        "union": lambda: union(ours.denoiser),
        "t2i": lambda: t2i_adapter("full_adapter_xl", (8, 16)),
    }
    known, forwards = {"edges": made[kind]()}, forwards_of(ours, monkeypatch)
    for seed in range(4):
        forwards.clear()
        uses = [
            ControlUse("edges", seeded_rng().integers(0, 256, (32, 32, 3), dtype="uint8"), mode=mode)
            for mode in ((0, 2) if kind == "union" else (None, None))
        ]
        requests = [
            make_request(seed=seed + place, guidance_scale=1.0, control=(replace(use, scale=0.5 + seed / 4),))
            for place, use in enumerate(uses)
        ]
        check_bits(sdxl, ours, requests, known, sdxl.conditioning(seed))
    assert not forwards
    assert not any(one.is_refused for one in replays._known.values())
    known.clear()
    gc.collect()
    assert not any(one.bound for (_, owners), one in replays._known.items() if owners)
