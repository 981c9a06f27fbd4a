"""Latents beside a model's own, in its channels: FLUX.1's classes for filling in and for control images."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kit.seeding import seeded_rng
from kit.tiny.classes import CASES, assembled
from kit.tiny.pipelines import saved
from unit.deployments.engines.stock.test_stock_pipelines import PROMPT, load, one_thread, run, split

from configs.options import Sampler
from deployments.engines.records.protocol import BesideLatents, EngineError, StockRequest
from deployments.engines.stock.engine import StockEngine

__all__ = ["one_thread"]
pytestmark = pytest.mark.slow  # imports diffusers
SIDE, SEED, LEVELS = 32, 3, (1.0, 0.8, 0.4, 0.0)


def opened(class_name: str, folder: Path) -> tuple[Any, StockEngine]:
    stock = saved(lambda: assembled(class_name, **CASES[class_name].parts()), folder)
    return stock, StockEngine(load(folder))


def asked(class_name: str, **changes: Any) -> StockRequest:
    options = split(
        class_name, {name: value for name, value in CASES[class_name].options.items() if name != "strength"}
    )
    fields = options["fields"] | {"width": SIDE, "height": SIDE, "guidance_scale": 5.0, "num_inference_steps": 3}
    sampler = Sampler(name="euler", sigmas=LEVELS)
    return replace(StockRequest("r", SEED, PROMPT, fields=fields, extra=options["extra"], sampler=sampler), **changes)


def drawn(stock: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return latents of an image, and soft masks in pixels."""
    rng, cell = seeded_rng(), stock.vae_scale_factor
    latents = rng.standard_normal((1, stock.vae.config.latent_channels, SIDE // cell, SIDE // cell))
    return latents.astype(np.float32), rng.random((1, SIDE, SIDE)).astype(np.float32)


def patches(images: torch.Tensor) -> torch.Tensor:
    """Return images as FLUX.1 reads them: two by two places are the channels of one."""
    return F.pixel_unshuffle(images, 2).flatten(2).transpose(1, 2)


def noised(stock: Any) -> Any:
    """Return the first noise of a seed."""
    cell = stock.vae_scale_factor
    shape = 1, stock.vae.config.latent_channels, SIDE // cell, SIDE // cell
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED))


def looped(stock: Any, beside: torch.Tensor, kept: Any = None) -> np.ndarray:
    """Return the image of a loop by Euler over the stock's own modules; `kept` has latents, and masks by step."""
    text, pooled, text_ids = stock.encode_prompt(PROMPT, max_sequence_length=16)
    x = noise = patches(noised(stock))
    half = SIDE // stock.vae_scale_factor // 2
    rows, columns = torch.meshgrid(torch.arange(half), torch.arange(half), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).to(x)
    for number, (level, following) in enumerate(itertools.pairwise(LEVELS)):
        mask = 1.0 if kept is None else kept[1][number]
        clean = 0.0 if kept is None else kept[0]
        seen = x * mask + (noise * level + clean * (1 - level)) * (1 - mask)
        with torch.no_grad():
            made = stock.transformer(
                hidden_states=torch.cat([seen, beside], 2),
                timestep=torch.tensor([level]),
                guidance=torch.tensor([5.0]),
                pooled_projections=pooled,
                encoder_hidden_states=text,
                txt_ids=text_ids,
                img_ids=ids,
                return_dict=False,
            )[0]
        found = (seen - level * made) * mask + clean * (1 - mask)
        x = x + (x - found) / level * (following - level)
    channels = x.shape[-1] // 4
    latents = F.pixel_shuffle(x.transpose(1, 2).reshape(1, 4 * channels, half, half), 2)
    latents = latents / stock.vae.config.scaling_factor + stock.vae.config.shift_factor
    with torch.no_grad():
        pixels = (stock.vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)
    return (pixels.permute(0, 2, 3, 1) * 255).round().numpy()


def scaled(stock: Any, latents: np.ndarray) -> torch.Tensor:
    config = stock.vae.config
    return (torch.from_numpy(latents) - config.shift_factor) * config.scaling_factor


def test_a_control_image_is_read_as_it_was_encoded(tmp_path: Path) -> None:
    name = "FluxControlPipeline"
    stock, engine = opened(name, tmp_path)
    latents, _ = drawn(stock)
    found = run(engine, asked(name, beside=BesideLatents(latents)))[0].images
    assert np.abs(found - looped(stock, patches(scaled(stock, latents)))).max() <= 1
    other = run(engine, asked(name, beside=BesideLatents(latents[:, ::-1].copy()), request_id="s"))[0].images
    assert (other != found).any()


@pytest.mark.parametrize("until", [None, 0.1])
def test_a_part_is_filled_in_under_a_soft_mask(until: float | None, tmp_path: Path) -> None:
    name = "FluxFillPipeline"
    stock, engine = opened(name, tmp_path)
    latents, mask = drawn(stock)
    cell = stock.vae_scale_factor
    shaped = F.pixel_unshuffle(torch.from_numpy(mask)[:, None], cell)
    beside = torch.cat([patches(scaled(stock, latents)), patches(shaped)], 2)
    request = asked(name, beside=BesideLatents(latents, mask))
    if until is None:
        plain = run(engine, request)[0].images
        assert np.abs(plain - looped(stock, beside)).max() <= 1
    whole, soft = -latents, seeded_rng().random((1, SIDE // cell, SIDE // cell)).astype(np.float32)
    sampler = Sampler(name="euler", sigmas=LEVELS, masks_until=until)
    kept = replace(request, latents=whole, noise_mask=soft, sampler=sampler, request_id="kept")
    found = run(engine, kept)[0].images
    wide = patches(torch.from_numpy(soft)[:, None].expand(-1, latents.shape[1], -1, -1))
    masks = [wide if until is None else (wide >= (level - until) / (1 - until)).float() for level in LEVELS[:-1]]
    assert np.abs(found - looped(stock, beside, (patches(scaled(stock, whole)), masks))).max() <= 1


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    name = "FluxFillPipeline"
    stock, engine = opened(name, tmp_path)
    latents, mask = drawn(stock)
    fitting = BesideLatents(latents, mask)
    plain = asked(name, beside=fitting)
    for changes, shown in [
        ({"sampler": None}, "come with a sampler"),
        ({"beside": BesideLatents(latents[..., :-1], mask)}, "whole patches"),
        ({"beside": BesideLatents(latents)}, "a mask comes with"),
        ({"beside": BesideLatents(latents, mask[:, :-1])}, "a mask of the shape"),
        ({"latents": latents[:, :1]}, "latents: their shape"),
        ({"noise_mask": np.zeros((2, 4, 4), np.float32)}, "2 of them"),
        ({"beside": None, "latents": latents}, "keeps none"),
    ]:
        with pytest.raises(EngineError, match=shown):
            run(engine, replace(plain, request_id=shown, **changes))
    assert isinstance(stock, diffusers.FluxFillPipeline)
