"""A request's images are the same bits alone and in any batch: mixes, joins, leaves, cancels and splits at random."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.families.flux import FLUX
from deployments.engines.diffusion.rows import BatchBounds
from deployments.engines.records.protocol import AdapterUse, ConditionedRequest
from weights.operations.adapters import LoraAdapter, LoraPair

MAX_TURNS = 2000


def random_adapter(pair, name, seed):
    """Return a LoRA on every linear layer of the denoiser's attention."""
    generator = torch.Generator().manual_seed(seed)
    targets = {
        path: module
        for path, module in pair.ours.denoiser.named_modules()
        if isinstance(module, torch.nn.Linear) and ("attn" in path or "time_emb" in path or "embedder" in path)
    }
    pairs = {
        path: LoraPair(
            torch.randn(2, module.in_features, generator=generator) * 0.3,
            torch.randn(module.out_features, 2, generator=generator) * 0.3,
            1.0,
        )
        for path, module in targets.items()
    }
    return LoraAdapter(name, {pair.denoiser_name: pairs})


def random_job(pair, chance, number, adapters, is_text_free):
    is_guided = chance.random() < 0.5
    used = chance.sample(sorted(adapters), chance.choice([0, 0, 1, 2]))
    request = pair.request(
        request_id=str(number),
        seed=chance.randrange(2**32),
        width=chance.choice([32, 32, 32, 64]),
        height=chance.choice([32, 32, 32, 64]),
        num_images=chance.choice([1, 1, 2, 3]),
        num_inference_steps=chance.randrange(1, 6),
        guidance_scale=chance.uniform(1.5, 6.0) if is_guided else 1.0,
        true_cfg_scale=chance.uniform(1.5, 6.0) if is_guided else 1.0,
        adapters=tuple(AdapterUse(name, chance.choice([1.0, chance.uniform(-1, 1)])) for name in used),
        merges_adapter=len(used) == 1 and chance.random() < 0.5,
    )
    length = chance.choice([1, 3, 5, 9, 16, 17, 30, 32]) if is_text_free else 5
    text = pair.conditioning(chance.randrange(10**6), negative=is_guided, length=length)
    return ConditionedRequest(request, text, adapters)


def check_random_traffic(pair, ours, chance, adapters, num_jobs=8):
    is_text_free = ours.family.texts.masks
    jobs = [random_job(pair, chance, number, adapters, is_text_free) for number in range(num_jobs)]
    decode, latents = ours.decode, {}

    def noting_decode(states):  # images have 8 bits, in which most differences are lost
        latents.update((state.request.request_id, state.latents) for state in states)
        return decode(states)

    ours.decode = noting_decode
    alone = {}
    for job in jobs:
        engine = DiffusionEngine(ours)
        engine.add_request(job)
        while engine.has_work:
            for output in engine.step():
                alone[output.request_id] = output.images
    latents_alone = dict(latents)
    engine, waiting, found, gone = DiffusionEngine(ours), list(jobs), {}, set()
    for _ in range(MAX_TURNS):
        while waiting and chance.random() < 0.6:
            engine.add_request(waiting.pop())
        if chance.random() < 0.08 and (
            running := sorted(set(alone) - set(found) - {job.request_id for job in waiting})
        ):
            gone.add(chosen := chance.choice(running))
            engine.abort(chosen)
        if engine.has_work:
            found |= {output.request_id: output.images for output in engine.step()}
        elif not waiting:
            break
    assert not engine.failures
    assert set(found) | gone == set(alone)
    for name, images in found.items():
        assert np.array_equal(images, alone[name]), name
        assert torch.equal(latents[name], latents_alone[name]), name


@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_company_gives_the_same_bits(pair, make_request, load_pipeline, dtype, seed):
    chance = random.Random(f"{seed} {dtype}")
    pair.request = make_request
    ours = load_pipeline(pair.folder, type(pair.stock).__name__, pair.denoiser_name, dtype)
    ours._bounds = BatchBounds(
        max_rows=chance.choice([3, 7, 64]), max_decode_pixels=chance.choice([1, 3, 64]) * 32 * 32
    )
    adapters = {name: random_adapter(pair, name, place) for place, name in enumerate(("fine", "bold"))}
    check_random_traffic(pair, ours, chance, adapters)


def test_six_lengths_of_text_share_their_forwards(flux, make_request, monkeypatch):
    sizes, forward = [], flux.ours._forward
    monkeypatch.setattr(
        flux.ours, "_forward", lambda rows, *size: sizes.append(tuple(rows.prompts.shape[:2])) or forward(rows, *size)
    )
    lengths = [18, 20, 23, 25, 29, 31]
    states = [
        flux.ours.start_request(make_request(seed=length), flux.conditioning(length, length=length))
        for length in lengths
    ]
    flux.ours.step(states)
    assert sizes == [(6, 32)]


def test_images_of_as_many_patches_share_their_forwards(flux, make_request, monkeypatch):
    """Upright and lying ones of Flux, each with positions of its own, two to a forward; those of stock at the end."""
    sizes, forward = [], flux.ours._forward
    monkeypatch.setattr(
        flux.ours, "_forward", lambda rows, *size: sizes.append([one[:2] for one in rows.sizes]) or forward(rows, *size)
    )
    monkeypatch.setattr(flux.ours, "_bounds", BatchBounds(max_rows=2))
    shapes = [(32, 64), (64, 32), (32, 64), (32, 32), (16, 128)]
    requests = [make_request(seed=seed, height=h, width=w) for seed, (h, w) in enumerate(shapes)]
    texts = [flux.conditioning(seed) for seed in range(len(shapes))]
    states = [flux.ours.start_request(*job) for job in zip(requests, texts, strict=True)]
    while not states[0].done:
        flux.ours.step(states)
    assert sizes == [[(32, 64), (64, 32)], [(32, 64), (16, 128)], [(32, 32)]] * 3
    for state, request, text in zip(states, requests, texts, strict=True):
        latents, _ = flux.stock_outputs(request, text)
        assert (state.latents - latents).abs().max() <= 1e-5 * max(1.0, float(latents.abs().max()))


def test_a_padded_text_gives_what_the_text_alone_gives(flux, make_request):
    """Beside the stock transformer, which gets the text without padding and without mask."""
    for length in (1, 5, 16, 17, 40):
        state = flux.ours.start_request(make_request(seed=length), text := flux.conditioning(length, length=length))
        assert state.branches[0].prompt.shape[1] == FLUX.texts.padded_length(length)
        latents, timestep = state.latents.clone(), state.timestep
        with torch.no_grad():
            stock = flux.stock.transformer(
                hidden_states=latents,
                timestep=timestep.view(1) / 1000,
                guidance=torch.tensor([1.0]),
                pooled_projections=text["pooled_prompt_embeds"],
                encoder_hidden_states=text["prompt_embeds"],
                txt_ids=torch.zeros(length, 3),
                img_ids=flux.stock._prepare_latent_image_ids(1, 8, 8, "cpu", torch.float32),
                return_dict=False,
            )[0]
        expected = state.solver.__class__.from_config(state.solver.config)
        expected.set_timesteps(sigmas=np.linspace(1.0, 1 / 3, 3), mu=_mu(flux))
        stepped = expected.step(stock, expected.timesteps[0], latents, return_dict=False)[0]
        flux.ours.step([state])
        assert torch.allclose(state.latents, stepped, atol=1e-5)


def _mu(pair):
    from deployments.engines.diffusion.families.flow_matching import dynamic_shift

    return dynamic_shift(64, pair.stock.scheduler.config, max_shift=1.15)


@pytest.mark.parametrize(
    ("num_tokens", "length"), [(1, 16), (15, 16), (16, 16), (17, 32), (77, 128), (256, 256), (257, 512), (512, 512)]
)
def test_the_padded_length_follows_from_the_text_alone(num_tokens, length):
    assert FLUX.texts.padded_length(num_tokens) == length
