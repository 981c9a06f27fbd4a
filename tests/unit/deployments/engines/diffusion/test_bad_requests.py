"""Every refusal says what came and what was expected."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from deployments.engines.diffusion.pipeline import create_pipeline
from deployments.engines.records.protocol import AdapterUse, EngineError

BAD = [
    ({"width": 0}, "width 0: expected an integer from 1 to 4096"),
    ({"height": -32}, "height -32"),
    ({"width": 33}, "width 33: expected a multiple of"),
    ({"height": 8192}, "height 8192"),
    ({"width": 32.0}, "width 32.0"),
    ({"num_inference_steps": 0}, "num_inference_steps 0: expected an integer from 1 to 1000"),
    ({"num_inference_steps": True}, "num_inference_steps True"),
    ({"num_images": 0}, "num_images 0: expected an integer from 1 to 32"),
    ({"guidance_scale": math.nan}, "guidance_scale nan: expected a finite number"),
    ({"true_cfg_scale": math.inf}, "true_cfg_scale inf"),
    ({"guidance_scale": "3"}, "guidance_scale '3'"),
    ({"seed": 2**64}, "seed 18446744073709551616: expected an integer of 64 bits"),
    ({"seed": 1.5}, "seed 1.5"),
    ({"adapters": (AdapterUse("bold"),)}, r"unknown adapter 'bold' \(known: none\)"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_request(pair, make_request, changes, message):
    with pytest.raises(EngineError, match=message):
        pair.ours.start_request(make_request(**changes), pair.conditioning())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_embeds": None}, r"conditioning lacks 'prompt_embeds' \(given: (pooled|negative)_prompt_embeds"),
        ({"prompt_embeds": torch.zeros(1, 5, 99)}, r"shape \(1, 5, 99\), expected \(1, any, 12\)"),
        ({"prompt_embeds": torch.zeros(2, 5, 12)}, r"shape \(2, 5, 12\)"),
        ({"prompt_embeds": torch.zeros(1, 0, 12)}, r"shape \(1, 0, 12\)"),
    ],
)
def test_bad_conditioning(pair, make_request, change, message):
    conditioning = {**pair.conditioning(negative=True), **change}
    conditioning = {name: tensor for name, tensor in conditioning.items() if tensor is not None}
    with pytest.raises(EngineError, match=message):
        pair.ours.start_request(make_request(guidance_scale=2.0, true_cfg_scale=2.0), conditioning)


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_bad_pooled_text(request, make_request, name):
    pair = request.getfixturevalue(name)
    conditioning = {**pair.conditioning(), "pooled_prompt_embeds": torch.zeros(1, 7)}
    with pytest.raises(EngineError, match=r"shape \(1, 7\), expected \(1, 6\)"):
        pair.ours.start_request(make_request(), conditioning)


def test_sdxl_guidance_needs_a_negative(sdxl, make_request):
    with pytest.raises(EngineError, match="conditioning lacks 'negative_prompt_embeds'"):
        sdxl.ours.start_request(make_request(guidance_scale=2.0), sdxl.conditioning())


def test_unknown_pipeline_class(flux):
    with pytest.raises(
        EngineError,
        match=r"'PixelPipeline' \(known: FluxPipeline, StableDiffusionXLPipeline, StableDiffusion3Pipeline, ",
    ):
        create_pipeline("PixelPipeline", flux.folder, {})


def test_missing_module(flux):
    with pytest.raises(EngineError, match=r"module 'vae' is missing \(given: transformer\)"):
        create_pipeline("FluxPipeline", flux.folder, {"transformer": flux.ours.denoiser})


def test_unknown_solver(flux, tmp_path):
    shutil.copytree(flux.folder, tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", "AutoencoderKL"]}))
    modules = {"transformer": flux.ours.denoiser, "vae": flux.ours._codec.vae}
    with pytest.raises(EngineError, match=r"names solver diffusers.AutoencoderKL"):
        create_pipeline("FluxPipeline", tmp_path, modules)


def test_a_folder_without_model_index(flux, tmp_path):
    modules = {"transformer": flux.ours.denoiser, "vae": flux.ours._codec.vae}
    with pytest.raises(EngineError, match=r"model_index.json: cannot be read as JSON"):
        create_pipeline("FluxPipeline", tmp_path, modules)
