"""Folders of older versions, beside stock pipelines that are loaded from the same files."""

from __future__ import annotations

import json
import shutil

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

TASKS = {"": "StableDiffusionPipeline", "image": "StableDiffusionImg2ImgPipeline"} | {
    "mask": "StableDiffusionInpaintPipeline"
}
# Solver configs as the files of 2022 have them: what they lack has defaults for pixels, not for latents.
PNDM = {"skip_prk_steps": False}
WRITTEN = {"clip_sample": True, "steps_offset": 0, "skip_prk_steps": True}
SILENT: dict[str, bool] = {}
NONE = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor", "image_encoder"))
XL_NONE = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "image_encoder"))
IMAGE = np.random.default_rng(3).integers(0, 256, (32, 32, 3), np.uint8)
MASK = np.zeros((32, 32), np.uint8)
MASK[:, 12:] = 255


def old_folder(folder, pair, solver: str, config: dict[str, object]):
    """Return a copy of a pair's folder whose solver config says nothing but this."""
    shutil.copytree(pair.folder, folder)
    values = {"_class_name": solver, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(values | config))
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", solver]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def stock_latents(stock, job, conditioning, **options):
    stock.set_progress_bar_config(disable=True)
    return stock(
        **{name: tensor.clone() for name, tensor in conditioning.items()},
        num_inference_steps=job.num_inference_steps,
        guidance_scale=job.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(job.seed),
        output_type="latent",
        **options,
    ).images


def our_latents(pipeline, job, conditioning):
    state = pipeline.start_request(job, conditioning)
    while not state.done:
        pipeline.step([state])
    return state.latents


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("solver", "config"),
    [
        ("PNDMScheduler", PNDM),
        ("PNDMScheduler", WRITTEN),
        ("DDIMScheduler", SILENT),
        ("DDIMScheduler", WRITTEN),
        ("DDPMScheduler", SILENT),
        ("EulerDiscreteScheduler", {"timestep_spacing": "leading"}),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value) or "nothing",
)
@pytest.mark.parametrize("task", TASKS)
def test_a_solver_config_of_2022_makes_stocks_image(
    tmp_path, stable_diffusion, load_pipeline, make_request, task, solver, config
):
    folder = old_folder(tmp_path / "model", stable_diffusion, solver, config)
    stock = getattr(diffusers, TASKS[task]).from_pretrained(folder, **NONE)
    conditioning = stable_diffusion.conditioning(negative=True)
    job, options = in_task(make_request, task, num_inference_steps=5, guidance_scale=3.0)
    expected = stock_latents(stock, job, conditioning, **options)
    found = our_latents(load_pipeline(folder, "StableDiffusionPipeline", "unet"), job, conditioning)
    assert (found - expected).abs().max() <= 3e-5 * max(1.0, float(expected.abs().max()))


def in_task(make_request, task: str, **changes):
    """Return a request of a task, and the same in the words of the stock pipeline."""
    if task == "":
        return make_request(**changes), {"width": 32, "height": 32}
    images = {"init_image": IMAGE} | ({"mask_image": MASK} if task == "mask" else {})
    options = {"image": Image.fromarray(IMAGE), "strength": 0.8}
    if task == "mask":
        options |= {"mask_image": Image.fromarray(MASK), "width": 32, "height": 32}
    return make_request(**changes, **images, strength=0.8), options


@pytest.mark.drawn
@pytest.mark.parametrize("named", ["DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "LCMScheduler"])
@pytest.mark.parametrize("config", [SILENT, WRITTEN], ids=["nothing", "all"])
def test_a_solver_that_a_request_names_is_as_the_pipelines_own(
    tmp_path, stable_diffusion, load_pipeline, make_request, named, config
):
    folder = old_folder(tmp_path / "model", stable_diffusion, "EulerDiscreteScheduler", config)
    own = diffusers.EulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    other = getattr(diffusers, named).from_config(own.config)
    stock = diffusers.StableDiffusionPipeline.from_pretrained(folder, scheduler=other, **NONE)
    conditioning, job = stable_diffusion.conditioning(), make_request(scheduler=named, num_inference_steps=5)
    expected = stock_latents(stock, job, conditioning, width=32, height=32)
    found = our_latents(load_pipeline(folder, "StableDiffusionPipeline", "unet"), job, conditioning)
    assert (found - expected).abs().max() <= 3e-5 * max(1.0, float(expected.abs().max()))


def test_other_families_keep_their_solvers_config(tmp_path, sdxl, load_pipeline, make_request):
    folder = old_folder(tmp_path / "model", sdxl, "DDIMScheduler", SILENT)
    stock = diffusers.StableDiffusionXLPipeline.from_pretrained(
        folder, add_watermarker=False, **XL_NONE, feature_extractor=None
    )
    assert stock.scheduler.config.clip_sample
    conditioning, job = sdxl.conditioning(), make_request(num_inference_steps=5)
    expected = stock_latents(stock, job, conditioning, width=32, height=32)
    found = our_latents(load_pipeline(folder, "StableDiffusionXLPipeline", "unet"), job, conditioning)
    assert (found - expected).abs().max() <= 3e-5 * max(1.0, float(expected.abs().max()))
