"""Tiny random pipelines: the stock object and the same weights in the engine's loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from kit.tiny.parts import random_vae, sdxl_unet, unet
from safetensors.torch import load_file

from deployments.engines.building.build import build_module
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.records.protocol import DiffusionRequest

TEXT_LENGTH = 5
Conditioning = dict[str, torch.Tensor]


@dataclass
class Pair:
    """The same model twice."""

    stock: Any
    ours: DenoisePipeline
    folder: Path
    conditioning: Callable[..., Conditioning]

    def stock_images(self, request: DiffusionRequest, conditioning: Conditioning, **options: Any) -> np.ndarray:
        """uint8 (n, H, W, 3) of the stock pipeline."""
        return self.stock_outputs(request, conditioning, **options)[1]

    def stock_outputs(
        self, request: DiffusionRequest, conditioning: Conditioning, **options: Any
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Return the latents and the images of the stock pipeline."""
        latents: list[torch.Tensor] = []

        def note(_: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
            latents.append(tensors["latents"])
            return {}

        if self.ours.family.class_name == "FluxPipeline":
            options["true_cfg_scale"] = request.true_cfg_scale
        images = self.stock(
            **self.stock_texts(request, conditioning),
            width=request.width,
            height=request.height,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            output_type="pil",
            callback_on_step_end=note,
            **options,
        ).images
        return latents[-1], np.stack([np.asarray(image) for image in images])

    def assert_equals_stock(
        self, request: DiffusionRequest, conditioning: Conditioning, adapters: Any = None, **options: Any
    ) -> np.ndarray:
        """Check latents and images beside the stock pipeline, whose options these are. Return our images."""
        return assert_near(
            self.ours, request, conditioning, self.stock_outputs(request, conditioning, **options), adapters
        )

    def stock_texts(self, request: DiffusionRequest, conditioning: Conditioning) -> dict[str, Any]:
        """The texts as the stock pipeline takes them: SD3 does not repeat given embeddings for several images."""
        if self.ours.family.class_name == "StableDiffusion3Pipeline":
            return {
                name: tensor.repeat(request.num_images, *[1] * (tensor.ndim - 1))
                for name, tensor in conditioning.items()
            }
        texts = {name: tensor.clone() for name, tensor in conditioning.items()}
        return {**texts, "num_images_per_prompt": request.num_images}

    @property
    def denoiser_name(self) -> str:
        return self.ours.family.denoiser_name


def assert_near(
    ours: DenoisePipeline,
    request: DiffusionRequest,
    conditioning: Conditioning,
    stock: tuple[torch.Tensor, np.ndarray],
    adapters: Any = None,
) -> np.ndarray:
    """Check that latents are within 6e-5 of stock's, and images within 1. Return our images.

    Latents, because images have 8 bits, in which most differences are lost. A first step of DDIM divides by a small
    square root, and guidance multiplies: last bits of convolutions, another processor's, were 1.3e-5, and 3.4e-5 where
    the first sigma stands for no signal at all.
    """
    state = ours.start_request(request, conditioning, adapters)
    while not state.done:
        ours.step([state])
    latents, stock_images = stock
    assert (state.latents - latents).abs().max() <= 6e-5 * max(1.0, float(latents.abs().max()))
    (images,) = ours.decode([state])
    assert isinstance(images, np.ndarray)
    assert images.shape == stock_images.shape
    assert np.abs(images.astype(int) - stock_images.astype(int)).max() <= 1
    assert images.std() > 3  # the random VAE has something to show
    return images


def load_ours(folder: Path, class_name: str, denoiser: str, dtype: torch.dtype | None = None) -> DenoisePipeline:
    modules = {}
    for component in (denoiser, "vae"):
        tensors = load_file(folder / component / "diffusion_pytorch_model.safetensors")
        if dtype is not None:
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        modules[component] = build_module("diffusers", None, folder / component, tensors)
    return create_pipeline(class_name, folder, modules)


def make_flux(folder: Path, vae_levels: int = 2, **transformer: Any) -> Pair:
    torch.manual_seed(0)
    solver = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    options = {"guidance_embeds": True, **transformer}
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,  # 32 elements: see batch_invariant.py
        joint_attention_dim=12,
        pooled_projection_dim=6,
        axes_dims_rope=(2, 2, 4),
        **options,
    ).eval()
    stock = diffusers.FluxPipeline(solver, random_vae(vae_levels), None, None, None, None, model)
    stock.set_progress_bar_config(disable=True)
    stock.save_pretrained(folder)
    return Pair(stock, load_ours(folder, "FluxPipeline", "transformer"), folder, _conditioner(12, 6))


def make_sdxl(folder: Path, solver: str = "EulerDiscreteScheduler", **vae: Any) -> Pair:
    torch.manual_seed(0)
    model = sdxl_unet()
    config = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    stock = diffusers.StableDiffusionXLPipeline(
        random_vae(**vae),
        None,
        None,
        None,
        None,
        model,
        getattr(diffusers, solver)(**config),
        add_watermarker=False,
    )
    stock.set_progress_bar_config(disable=True)
    stock.save_pretrained(folder)
    return Pair(stock, load_ours(folder, "StableDiffusionXLPipeline", "unet"), folder, _conditioner(12, 6))


def make_stable_diffusion(folder: Path, solver: str = "PNDMScheduler", in_channels: int = 4) -> Pair:
    torch.manual_seed(0)
    model = unet(
        in_channels=in_channels,
        sample_size=64,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
    ).eval()
    config = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    skip = {"skip_prk_steps": True, "steps_offset": 1} if solver == "PNDMScheduler" else {}
    stock = diffusers.StableDiffusionPipeline(
        random_vae(shift_factor=None),
        None,
        None,
        model,
        getattr(diffusers, solver)(**config, **skip),
        None,
        None,
        requires_safety_checker=False,
    )
    stock.set_progress_bar_config(disable=True)
    stock.save_pretrained(folder)
    return Pair(stock, load_ours(folder, "StableDiffusionPipeline", "unet"), folder, _conditioner(12, None))


def make_stable_diffusion_3(folder: Path, **solver: Any) -> Pair:
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=16,  # stock inpaints with 16 or 33 only
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=12,
        pooled_projection_dim=6,
        out_channels=16,
        pos_embed_max_size=24,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ).eval()
    stock = diffusers.StableDiffusion3Pipeline(
        model,
        diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **solver}),
        random_vae(latent_channels=16),
        *[None] * 6,
    )
    stock.set_progress_bar_config(disable=True)
    stock.save_pretrained(folder)
    return Pair(stock, load_ours(folder, "StableDiffusion3Pipeline", "transformer"), folder, _conditioner(12, 6))


def _conditioner(width: int, pooled_width: int | None) -> Callable[..., Conditioning]:
    def make(seed: int = 0, negative: bool = False, length: int = TEXT_LENGTH) -> Conditioning:
        generator = torch.Generator().manual_seed(seed)
        conditioning = {}
        for prefix in ("", "negative_") if negative else ("",):
            conditioning[f"{prefix}prompt_embeds"] = torch.randn(1, length, width, generator=generator)
            if pooled_width is not None:
                conditioning[f"{prefix}pooled_prompt_embeds"] = torch.randn(1, pooled_width, generator=generator)
        return conditioning

    return make


def request(**changes: Any) -> DiffusionRequest:
    values: Mapping[str, Any] = {
        "request_id": "r",
        "width": 32,
        "height": 32,
        "num_inference_steps": 3,
        "guidance_scale": 1.0,
        "seed": 7,
        **changes,
    }
    return DiffusionRequest(**values)


@pytest.fixture
def make_request() -> Callable[..., DiffusionRequest]:
    return request


def each_once(make: Callable[..., Pair], folders: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Return `make` without its folder. Who asks for the same model again gets the same pair."""
    made: dict[str, Pair] = {}

    def make_once(*arguments: Any, **options: Any) -> Pair:
        asked = repr((arguments, options))
        if asked not in made:
            made[asked] = make(folders.mktemp(make.__name__), *arguments, **options)
        return made[asked]

    return make_once


@pytest.fixture(scope="session")
def make_flux_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    return each_once(make_flux, tmp_path_factory)


@pytest.fixture(scope="session")
def make_sdxl_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    return each_once(make_sdxl, tmp_path_factory)


@pytest.fixture(scope="session")
def make_stable_diffusion_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    return each_once(make_stable_diffusion, tmp_path_factory)


@pytest.fixture(scope="session")
def make_stable_diffusion_3_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    return each_once(make_stable_diffusion_3, tmp_path_factory)


@pytest.fixture(scope="session")
def flux(make_flux_pair: Callable[..., Pair]) -> Pair:
    return make_flux_pair()


@pytest.fixture(scope="session")
def sdxl(make_sdxl_pair: Callable[..., Pair]) -> Pair:
    return make_sdxl_pair("EulerDiscreteScheduler")


@pytest.fixture(scope="session")
def stable_diffusion(make_stable_diffusion_pair: Callable[..., Pair]) -> Pair:
    return make_stable_diffusion_pair("DDIMScheduler")


@pytest.fixture(scope="session")
def stable_diffusion_3(make_stable_diffusion_3_pair: Callable[..., Pair]) -> Pair:
    return make_stable_diffusion_3_pair()


@pytest.fixture(params=["flux", "sdxl", "stable_diffusion", "stable_diffusion_3"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return request.getfixturevalue(request.param)


@pytest.fixture
def equals_stock() -> Callable[..., np.ndarray]:
    return assert_near


@pytest.fixture(scope="session")
def load_pipeline() -> Callable[..., DenoisePipeline]:
    return load_ours
