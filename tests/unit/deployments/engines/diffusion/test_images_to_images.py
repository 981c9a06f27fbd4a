"""Image-to-image and inpainting give the latents and images of the stock pipelines."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from deployments.engines.diffusion.checkpoints import restore_checkpoint, save_checkpoint
from deployments.engines.diffusion.pipeline import create_pipeline
from deployments.engines.records.protocol import EngineError

STOCK = {
    ("FluxPipeline", False): diffusers.FluxImg2ImgPipeline,
    ("FluxPipeline", True): diffusers.FluxInpaintPipeline,
    ("StableDiffusionXLPipeline", False): diffusers.StableDiffusionXLImg2ImgPipeline,
    ("StableDiffusionXLPipeline", True): diffusers.StableDiffusionXLInpaintPipeline,
    ("StableDiffusion3Pipeline", False): diffusers.StableDiffusion3Img2ImgPipeline,
    ("StableDiffusion3Pipeline", True): diffusers.StableDiffusion3InpaintPipeline,
    ("StableDiffusionPipeline", False): diffusers.StableDiffusionImg2ImgPipeline,
    ("StableDiffusionPipeline", True): diffusers.StableDiffusionInpaintPipeline,
}


def random_image(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def random_mask(height: int, width: int) -> np.ndarray:
    """Greys around stock's threshold, in blocks, since a pixel of latents is several pixels."""
    blocks = np.random.default_rng(1).choice(np.array([0, 127, 128, 255], np.uint8), (height // 4, width // 4))
    return np.repeat(np.repeat(blocks, 4, 0), 4, 1)


def stock_pipeline(pair, has_mask: bool, **changes: Any) -> Any:
    components = {**pair.stock.components, **changes}
    cls = STOCK[pair.ours.family.class_name, has_mask]
    if "safety_checker" in components:
        pipeline = cls(**components, requires_safety_checker=False)
    elif "XL" in cls.__name__:
        pipeline = cls(**components, add_watermarker=False)
    else:
        pipeline = cls(**{name: part for name, part in components.items() if part is not None or "image" not in name})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stock_outputs(pair, pipeline: Any, request: Any, conditioning: Any) -> tuple[torch.Tensor, list[Image.Image]]:
    """Return the latents and the images of the stock pipeline."""
    latents: list[torch.Tensor] = []

    def note(_: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        latents.append(tensors["latents"])
        return {}

    schedules = {"sigmas": request.sigmas, "timesteps": request.timesteps}
    is_flux = pair.ours.family.class_name == "FluxPipeline"
    options = {"true_cfg_scale": request.true_cfg_scale} if is_flux else {}
    options |= {name: list(values) for name, values in schedules.items() if values is not None}
    if request.mask_image is not None:
        options["mask_image"] = Image.fromarray(request.mask_image)
    if request.mask_image is not None or pair.denoiser_name == "transformer":
        options |= {"height": request.height, "width": request.width}
    images = pipeline(
        **pair.stock_texts(request, conditioning),
        **options,
        image=Image.fromarray(request.init_image),
        strength=request.strength,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        callback_on_step_end=note,
    ).images
    return latents[-1], images


def assert_equals_stock(pair, ours, pipeline: Any, request: Any, conditioning: Any) -> None:
    state = ours.start_request(request, conditioning)
    while not state.done:
        ours.step([state])
    latents, stock_images = stock_outputs(pair, pipeline, request, conditioning)
    assert (state.latents - latents).abs().max() <= 1e-5 * max(1.0, float(latents.abs().max()))
    (images,) = ours.decode([state])
    if isinstance(pipeline, diffusers.StableDiffusion3InpaintPipeline):  # it forgets the VAE's shift
        config = pipeline.vae.config
        decoded = pipeline.vae.decode(latents / config.scaling_factor + config.shift_factor)[0].detach()
        stock_images = pipeline.image_processor.postprocess(decoded)
    stock = np.stack([np.asarray(image) for image in stock_images])
    assert np.abs(images.astype(int) - stock.astype(int)).max() <= 1
    assert images.std() > 0.5  # the random VAE has something to show, if little; latents were compared above


@pytest.mark.drawn(2)
@pytest.mark.parametrize("strength", [0.3, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_image_to_image(pair, make_request, strength, guidance):
    request = make_request(
        init_image=random_image(48, 32),
        strength=strength,
        height=48,
        num_inference_steps=5,
        guidance_scale=guidance,
        true_cfg_scale=guidance,
        num_images=2,
    )
    conditioning = pair.conditioning(negative=True)
    assert_equals_stock(pair, pair.ours, stock_pipeline(pair, False), request, conditioning)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_inpainting(pair, make_request, strength, guidance):
    request = make_request(
        init_image=random_image(48, 32),
        mask_image=random_mask(48, 32),
        strength=strength,
        height=48,
        num_inference_steps=4,
        guidance_scale=guidance,
        true_cfg_scale=guidance,
        num_images=2,
    )
    conditioning = pair.conditioning(negative=True)
    assert_equals_stock(pair, pair.ours, stock_pipeline(pair, True), request, conditioning)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "solver",
    ["PNDMScheduler", "DPMSolverMultistepScheduler", "EulerAncestralDiscreteScheduler", "HeunDiscreteScheduler"],
)
@pytest.mark.parametrize("has_mask", [False, True])
def test_solvers(make_stable_diffusion_pair, make_request, solver, has_mask):
    pair = make_stable_diffusion_pair(solver)
    request = make_request(
        init_image=random_image(32, 32),
        mask_image=random_mask(32, 32) if has_mask else None,
        strength=0.6,
        num_inference_steps=5,
        guidance_scale=4.0,
    )
    conditioning = pair.conditioning(negative=True)
    assert_equals_stock(pair, pair.ours, stock_pipeline(pair, has_mask), request, conditioning)


OF_NOISE, OF_FLOW = {"sigmas": (10.0, 4.0, 1.5, 0.6, 0.2)}, {"sigmas": (1.0, 0.8, 0.45, 0.2, 0.1)}
OF_TIMES = {"timesteps": (900, 700, 520, 320, 40)}


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("name", "solver", "schedule"),
    [
        ("stable_diffusion", "EulerDiscreteScheduler", OF_NOISE),  # a step less than there are sigmas
        ("sdxl", "EulerDiscreteScheduler", OF_NOISE),
        ("sdxl", "EulerDiscreteScheduler", OF_TIMES),
        ("sdxl", "HeunDiscreteScheduler", OF_TIMES),  # two steps for most, of which stock counts each
        ("stable_diffusion", "DPMSolverMultistepScheduler", OF_TIMES),
        ("flux", None, OF_FLOW),
        ("stable_diffusion_3", None, OF_FLOW),
    ],
)
@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_schedule_by_request_begins_where_stock_does(
    request, make_request, name, solver, schedule, strength, has_mask
):
    pair = request.getfixturevalue(name)
    saved = {"pretrained_model_name_or_path": pair.folder, "subfolder": "scheduler"}
    solvers = {"scheduler": getattr(diffusers, solver).from_pretrained(**saved)} if solver else {}
    is_heun = solver == "HeunDiscreteScheduler"
    job = make_request(
        init_image=random_image(32, 32),
        mask_image=random_mask(32, 32) if has_mask else None,
        strength=max(strength, 0.7) if is_heun else strength,
        num_inference_steps=5,
        scheduler=solver,
        **schedule,
    )
    assert_equals_stock(pair, pair.ours, stock_pipeline(pair, has_mask, **solvers), job, pair.conditioning())
    if is_heun:
        with pytest.raises(EngineError, match=r"strength 0.4 of 9 steps leaves no step to take"):
            pair.ours.start_request(replace(job, strength=0.4), pair.conditioning())


@pytest.mark.drawn
@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("solver", ["DDIMScheduler", "EulerAncestralDiscreteScheduler"])
def test_unet_that_reads_the_mask(make_stable_diffusion_pair, make_request, strength, solver):
    pair = make_stable_diffusion_pair(solver, in_channels=9)
    request = make_request(
        init_image=random_image(32, 32),
        mask_image=random_mask(32, 32),
        strength=strength,
        num_inference_steps=4,
        guidance_scale=4.0,
        num_images=2,
    )
    conditioning = pair.conditioning(negative=True)
    assert_equals_stock(pair, pair.ours, stock_pipeline(pair, True), request, conditioning)
    with pytest.raises(EngineError, match="give it an init_image and a mask_image"):
        pair.ours.start_request(make_request(), conditioning)


def test_vae_with_latent_statistics(make_sdxl_pair, make_request):
    pair = make_sdxl_pair(latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.5, 1.0, 2.0])
    request = make_request(init_image=random_image(32, 32), strength=0.7)
    assert_equals_stock(pair, pair.ours, stock_pipeline(pair, False), request, pair.conditioning())


def test_bfloat16_encodes_as_stock(sdxl, load_pipeline, make_request):
    """SDXL's VAE encodes in float32 whatever its dtype, and the noise of a float32 sample is another one."""
    ours = load_pipeline(sdxl.folder, "StableDiffusionXLPipeline", "unet", torch.bfloat16)
    parts = {
        name: type(part).from_pretrained(sdxl.folder / name, dtype=torch.bfloat16)
        for name, part in (("vae", sdxl.stock.vae), ("unet", sdxl.stock.unet))
    }
    request = make_request(init_image=random_image(32, 32), strength=0.7)
    conditioning = {name: tensor.bfloat16() for name, tensor in sdxl.conditioning().items()}
    stock, _ = stock_outputs(sdxl, stock_pipeline(sdxl, False, **parts), request, conditioning)
    state = ours.start_request(request, conditioning)
    while not state.done:
        ours.step([state])
    assert (state.latents.float() - stock.float()).abs().max() <= 0.05  # noise of another sample differs by more than 1


def tiny_vae(pair) -> Any:
    """As TAESD, which has latents and no distribution of them. What it shows is grey, and differs enough to be seen."""
    widths = {f"{half}_block_out_channels": (8, 8) for half in ("encoder", "decoder")}
    counts = {f"num_{half}_blocks": (1, 1) for half in ("encoder", "decoder")}
    channels = pair.stock.vae.config.latent_channels
    vae = diffusers.AutoencoderTiny(latent_channels=channels, **widths, **counts).eval().requires_grad_(False)
    vae.decoder.layers[-1].weight.mul_(8)
    vae.decoder.layers[-1].bias.fill_(0.5)
    return vae


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "solver"),
    [
        ("flux", None),
        ("stable_diffusion_3", None),
        ("sdxl", None),
        ("stable_diffusion", "EulerAncestralDiscreteScheduler"),  # which goes on drawing
    ],
)
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_small_vae_encodes_without_drawing(request, make_request, name, solver, has_mask):
    pair = request.getfixturevalue(name)
    vae = tiny_vae(pair)
    modules = {pair.denoiser_name: pair.ours.denoiser, "vae": vae}
    ours = create_pipeline(pair.ours.family.class_name, pair.folder, modules)
    job = make_request(
        init_image=random_image(32, 32),
        mask_image=random_mask(32, 32) if has_mask else None,
        strength=0.6,
        num_inference_steps=4,
        num_images=2,
        scheduler=solver,
    )
    parts = {"vae": vae}
    if solver:
        parts["scheduler"] = getattr(diffusers, solver).from_pretrained(pair.folder, subfolder="scheduler")
    assert_equals_stock(pair, ours, stock_pipeline(pair, has_mask, **parts), job, pair.conditioning())
    # Where denoiser and VAE are not on the device together, one encodes for the other.
    told = ours.encode_inputs(job, pair.conditioning(), {})
    blank = create_pipeline(ours.family.class_name, pair.folder, modules | {"vae": copy.deepcopy(vae).to("meta")})
    apart = blank.start_request(job, pair.conditioning(), {}, told)
    both = ours.start_request(job, pair.conditioning())
    assert torch.equal(apart.latents, both.latents)
    assert torch.equal(apart.generator.get_state(), both.generator.get_state())


@pytest.mark.drawn(2)
def test_tasks_share_a_batch(pair, make_request):
    """Requests from text, from an image and with a mask are those that each is alone, up to rounding."""
    image, mask = random_image(32, 32), random_mask(32, 32)
    requests = [
        make_request(num_inference_steps=4),
        make_request(request_id="i", init_image=image, strength=0.5, num_inference_steps=6),
        make_request(request_id="m", init_image=image, mask_image=mask, strength=1.0, num_inference_steps=4),
    ]
    conditioning = pair.conditioning()
    alone = [pair.ours.generate(request, conditioning) for request in requests]
    states = [pair.ours.start_request(request, conditioning) for request in requests]
    while running := [state for state in states if not state.done]:
        pair.ours.step(running)
    for together, expected in zip(pair.ours.decode(states), alone, strict=True):
        assert np.abs(together.astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.drawn(4)
@pytest.mark.parametrize("has_mask", [False, True])
def test_resumes_between_steps(pair, make_request, has_mask):
    request = make_request(
        init_image=random_image(32, 32),
        mask_image=random_mask(32, 32) if has_mask else None,
        strength=0.7,
        num_inference_steps=6,
    )
    conditioning = pair.conditioning()
    state = pair.ours.start_request(request, conditioning)
    pair.ours.step([state])
    pair.ours.step([state])
    resumed = pair.ours.start_request(request, conditioning)
    restore_checkpoint(resumed, save_checkpoint(state, conditioning))
    assert resumed.step_index == 2
    while not resumed.done:
        pair.ours.step([resumed])
        pair.ours.step([state])
    assert torch.equal(resumed.latents, state.latents)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_image": random_image(32, 40)}, "init_image: 40x32 pixels, expected the 32x32 of the request"),
        ({"init_image": random_image(32, 32)[..., :2]}, r"init_image: expected uint8 \(height, width, 3\)"),
        ({"init_image": np.zeros((32, 32, 3))}, "init_image: expected uint8 .*, got float64"),
        ({"mask_image": random_mask(32, 32)}, "mask_image: a mask needs an init_image"),
        (
            {"init_image": random_image(32, 32), "mask_image": random_mask(40, 32)},
            "mask_image: 32x40 pixels, expected the 32x32",
        ),
        ({"init_image": random_image(32, 32), "mask_image": random_image(32, 32)}, "mask_image: expected uint8"),
        ({"init_image": random_image(32, 32), "strength": 0.0}, "strength: 0.0: expected more than 0 and at most 1"),
        ({"init_image": random_image(32, 32), "strength": 1.5}, "strength: 1.5"),
        ({"init_image": random_image(32, 32), "strength": float("nan")}, "strength: nan"),
    ],
)
def test_what_is_refused(pair, make_request, changes, message):
    with pytest.raises(EngineError, match=message):
        pair.ours.start_request(make_request(**changes), pair.conditioning())


def test_a_strength_that_leaves_no_step(stable_diffusion, make_request):
    request = make_request(init_image=random_image(32, 32), strength=0.1)
    with pytest.raises(EngineError, match=r"strength 0.1 of 3 steps leaves no step to take"):
        stable_diffusion.ours.start_request(request, stable_diffusion.conditioning())
