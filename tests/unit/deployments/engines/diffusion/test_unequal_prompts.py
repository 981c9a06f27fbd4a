"""Guidance between a prompt and a negative prompt of another length, as trimmed prompts of Flux are."""

from __future__ import annotations

import copy

import torch

from deployments.engines.records.protocol import DiffusionRequest


def unequal(pair, seed):
    conditioning = pair.conditioning(seed=seed, negative=True, length=5)
    longer = pair.conditioning(seed=seed + 1, negative=True, length=9)
    return conditioning | {name: tensor for name, tensor in longer.items() if name.startswith("negative")}


@torch.no_grad()
def plain_loop(stock, state, texts):
    """Both texts apart, each through the stock transformer (stock's pipeline refuses unequal lengths)."""
    latents, solver, count = state.latents, copy.deepcopy(state.solver), len(state.latents)
    side = 32 // (2 * stock.vae_scale_factor)
    images = stock._prepare_latent_image_ids(1, side, side, "cpu", torch.float32)
    for timestep in solver.timesteps:
        noises = []
        for prefix in ("", "negative_"):
            prompt = texts[f"{prefix}prompt_embeds"]
            noises += stock.transformer(
                hidden_states=latents,
                timestep=(timestep / 1000).expand(count),
                guidance=torch.full([count], state.request.guidance_scale),
                pooled_projections=texts[f"{prefix}pooled_prompt_embeds"].expand(count, -1),
                encoder_hidden_states=prompt.expand(count, -1, -1),
                txt_ids=torch.zeros(prompt.shape[1], 3),
                img_ids=images,
                return_dict=False,
            )
        noise = noises[1] + state.request.true_cfg_scale * (noises[0] - noises[1])
        latents = solver.step(noise, timestep, latents, return_dict=False)[0]
    return latents


def test_equals_a_plain_loop_and_shares_forwards(flux, monkeypatch):
    requests = [
        DiffusionRequest(str(seed), 32, 32, 3, guidance_scale=2.0, seed=seed, num_images=count, true_cfg_scale=3.0)
        for seed, count in ((1, 2), (2, 1))
    ]
    conditionings = [unequal(flux, 10 * request.seed) for request in requests]
    states = [flux.ours.start_request(request, texts) for request, texts in zip(requests, conditionings, strict=True)]
    expected = [plain_loop(flux.stock, state, texts) for state, texts in zip(states, conditionings, strict=True)]
    sizes = []
    forward = flux.ours._forward
    monkeypatch.setattr(
        flux.ours, "_forward", lambda rows, *size: sizes.append(tuple(rows.prompts.shape[:2])) or forward(rows, *size)
    )
    while not states[0].done:
        flux.ours.step(states)
    assert sizes == [(6, 16)] * 3  # negative prompts and prompts, padded
    for state, latents in zip(states, expected, strict=True):
        assert torch.allclose(state.latents, latents, atol=1e-4)
