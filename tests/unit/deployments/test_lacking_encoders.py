"""Pipelines that stock saves without one of their text encoders, from the folder to the pixels, beside stock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from configs.cluster import ClusterConfig
from deployments.local import LocalModels
from deployments.records import ImageRequest
from deployments.records.errors import InvalidRequest

pytestmark = pytest.mark.slow  # imports diffusers

SIDE = 32
LONG = "one two three four five six"  # more letters than the CLIPs have tokens
IMAGE = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
LocalPipeline = Callable[[Any], LocalModels]


@pytest.fixture
def local(tmp_path: Path) -> LocalPipeline:

    def make(stock: Any) -> LocalModels:
        stock.set_progress_bar_config(disable=True)
        stock.save_pretrained(tmp_path / "folder")
        models = [{"id": "tiny", "path": str(tmp_path / "folder")}]
        return LocalModels(ClusterConfig.model_validate({"store": {"path": str(tmp_path / "store")}, "models": models}))

    return make


def _clip(tokenizer: Any) -> Any:
    from kit.tiny.parts import clip_config
    from transformers import CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(clip_config(tokenizer, 8, 6)).eval()


def _refiner(**config: Any) -> Any:
    """SDXL's refiner in small: the second encoder alone, and five time ids."""
    import diffusers
    from kit.tiny.parts import clip_tokenizer, random_vae, sdxl_unet

    torch.manual_seed(0)
    unet, tokenizer = sdxl_unet(text_width=8, num_time_ids=5), clip_tokenizer()
    solver = diffusers.EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    options = {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False, **config}
    parts = (random_vae(shift_factor=None), None, _clip(tokenizer), None, tokenizer, unet, solver)
    return diffusers.StableDiffusionXLImg2ImgPipeline(*parts, add_watermarker=False, **options)


def _stable_diffusion_3() -> Any:
    """Stable Diffusion 3 in small, without its T5."""
    import diffusers
    from kit.tiny.parts import clip_tokenizer, random_vae

    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=20,
        caption_projection_dim=32,
        pooled_projection_dim=12,
        pos_embed_max_size=16,
    ).eval()
    tokenizer, solver = clip_tokenizer(), diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    clips = _clip(tokenizer), tokenizer, _clip(tokenizer), tokenizer
    return diffusers.StableDiffusion3Pipeline(transformer, solver, random_vae(), *clips, None, None)


def _assert_equal(models: LocalModels, request: dict[str, Any], stock: Any, **options: Any) -> np.ndarray:
    """Check our image beside stock's. Return it."""
    request = {"model": "tiny", "prompt": "a 7", "seed": 3, "num_inference_steps": 4, "guidance_scale": 4.0} | request
    steps, scale = request["num_inference_steps"], request["guidance_scale"]
    options |= {"num_inference_steps": steps, "guidance_scale": scale, "output_type": "np"}
    generator = torch.Generator().manual_seed(request["seed"])
    [expected] = stock(request["prompt"], generator=generator, **options).images
    [ours] = models.generate(ImageRequest(**request)).images
    assert np.abs(ours - (expected * 255).round()).max() <= 1
    assert ours.std() > 3
    return ours


@pytest.mark.drawn
@pytest.mark.parametrize("force_zeros", [False, True])
def test_the_refiner_of_sdxl(local: LocalPipeline, force_zeros: bool) -> None:
    stock = _refiner(force_zeros_for_empty_prompt=force_zeros)
    models = local(stock)
    asked = {"init_image": IMAGE, "strength": 0.6}
    options = {"image": Image.fromarray(IMAGE), "strength": 0.6}
    ours = _assert_equal(models, asked, stock, **options)
    with_negative = _assert_equal(models, asked | {"negative_prompt": "grey"}, stock, negative_prompt="grey", **options)
    assert np.abs(ours.astype(int) - with_negative).max() > 1
    unguided = asked | {"guidance_scale": 1.0}
    _assert_equal(models, unguided, stock, **options)
    stock.register_to_config(requires_aesthetics_score=True)
    [other] = stock(
        "a 7", **options, generator=torch.Generator().manual_seed(3), num_inference_steps=4, guidance_scale=4.0,
        aesthetic_score=1.0, output_type="np",
    ).images  # fmt: skip
    assert np.abs(ours - (other * 255).round()).max() > 1  # the score says something here


def test_the_refiner_needs_an_image(local: LocalPipeline) -> None:
    with pytest.raises(InvalidRequest, match=r"this model refines images.*give it an init_image"):
        local(_refiner()).generate(ImageRequest(model="tiny", prompt="a 7", width=SIDE, height=SIDE))


def test_stable_diffusion_3_without_its_t5(local: LocalPipeline) -> None:
    stock = _stable_diffusion_3()
    models = local(stock)
    size = {"width": SIDE, "height": SIDE}
    ours = _assert_equal(models, size, stock, **size)
    longer = _assert_equal(models, size | {"max_sequence_length": 40}, stock, max_sequence_length=40, **size)
    assert np.abs(ours.astype(int) - longer).max() > 1  # zeros are tokens too


def test_a_text_that_no_t5_reads_is_not_cut_where_that_is_refused(tmp_path: Path, local: LocalPipeline) -> None:
    models = local(_stable_diffusion_3())
    request = ImageRequest(model="tiny", prompt=LONG, width=SIDE, height=SIDE, num_inference_steps=1)
    assert any("was cut to" in warning for warning in models.generate(request).warnings)
    entry = {"id": "tiny", "path": str(tmp_path / "folder"), "long_text": "error"}
    strict = ClusterConfig.model_validate({"store": {"path": str(tmp_path / "store")}, "models": [entry]})
    with pytest.raises(InvalidRequest, match=r"tokens, and at most \d+ can be encoded"):
        LocalModels(strict).generate(request)
