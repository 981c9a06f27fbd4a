"""Images as input, from the record to the pixels: a digit becomes another, a ControlNet comes out of the store."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.cluster import ClusterConfig
from deployments.errors import InvalidRequest
from deployments.local import LocalModels
from deployments.records import ControlNetUse, ImageRequest
from weights.store import WeightStore

pytestmark = pytest.mark.slow  # imports diffusers

MODELS = Path(__file__).parents[3] / "infra" / "demo" / "models"
SDXL = "digits-sdxl"
FIVE = {"model": SDXL, "prompt": "a handwritten five", "seed": 1, "num_inference_steps": 4, "width": 32, "height": 32}


@pytest.fixture(scope="module")
def outline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ControlNet that begins as stock's training does, but for residuals that are not zero."""
    from diffusers import ControlNetModel, UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel.from_pretrained(MODELS / SDXL / "unet", torch_dtype=torch.float32)
    net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 8, 8))
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    folder = tmp_path_factory.mktemp("outline")
    net.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def style(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of kohya's trainer, which changes the UNet and both text encoders."""
    from diffusers import StableDiffusionXLPipeline
    from safetensors.torch import save_file

    stock = StableDiffusionXLPipeline.from_pretrained(MODELS / SDXL)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for prefix, module, ending in [
        ("lora_unet_", stock.unet, "attn2.to_k"),
        ("lora_te1_text_model_", stock.text_encoder, "out_proj"),
        ("lora_te2_text_model_", stock.text_encoder_2.text_model, "fc1"),
    ]:
        for path, layer in module.named_modules():
            if path.endswith(ending):
                name = prefix + path.replace(".", "_")
                tensors[f"{name}.lora_down.weight"] = torch.randn(2, layer.in_features, generator=generator) * 0.3
                tensors[f"{name}.lora_up.weight"] = torch.randn(layer.out_features, 2, generator=generator) * 0.3
                tensors[f"{name}.alpha"] = torch.tensor(2.0)
    file = tmp_path_factory.mktemp("style") / "style.safetensors"
    save_file(tensors, file)
    return file


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outline: Path, style: Path) -> LocalModels:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    config = {
        "store": {"path": str(tmp_path / "store")},
        "models": [{"id": SDXL, "path": str(MODELS / SDXL), "dtype": "float32"}],
        "adapters": [
            {"id": "outline", "path": str(outline), "base": [SDXL], "dtype": "float32"},
            {"id": "style", "path": str(style), "base": [SDXL], "dtype": "float32"},
        ],
    }
    return LocalModels(ClusterConfig.model_validate(config))


def test_an_image_and_a_mask(models):
    [five] = models.generate(ImageRequest(**FIVE)).images
    little = {**FIVE, "prompt": "a handwritten eight", "init_image": five, "strength": 0.3}
    [near] = models.generate(ImageRequest(**little)).images
    [far] = models.generate(ImageRequest(**{**little, "strength": 1.0})).images
    assert np.abs(near.astype(int) - five).mean() < np.abs(far.astype(int) - five).mean()
    mask = np.zeros((32, 32), np.uint8)
    mask[16:] = 255
    [half] = models.generate(ImageRequest(**{**little, "strength": 1.0, "mask_image": mask})).images
    assert np.abs(half[:8].astype(int) - five[:8]).mean() < np.abs(half[20:].astype(int) - five[20:]).mean()


def test_a_controlnet_is_a_component_of_the_store(models, tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    plain = models.generate(ImageRequest(**FIVE))
    control = (ControlNetUse(name="outline", image=image),)
    result = models.generate(ImageRequest(**FIVE, control=control))
    assert "outline" in result.switch.built
    assert np.abs(result.images[0].astype(int) - plain.images[0]).max() > 4
    off = (ControlNetUse(name="outline", image=image, scale=0),)
    assert np.array_equal(models.generate(ImageRequest(**FIVE, control=off)).images[0], plain.images[0])
    store = WeightStore(tmp_path / "store")
    net, pipeline = store.manifest("outline"), store.manifest(SDXL)
    assert (net.kind, net.class_name) == ("controlnet", "ControlNetModel")
    unet = {ref.sha256 for ref in pipeline.components["unet"].tensors.values()}
    shared = [ref for ref in net.components["controlnet"].tensors.values() if ref.sha256 in unet]
    assert len(shared) > 20  # its encoder is the UNet's own, and is stored once


def test_a_lora_of_denoiser_and_text_encoders_equals_stock(models, style):
    from diffusers import StableDiffusionXLPipeline

    stock = StableDiffusionXLPipeline.from_pretrained(MODELS / SDXL, dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    stock.load_lora_weights(str(style.parent), weight_name=style.name, adapter_name="style")
    options = {"prompt": FIVE["prompt"], "num_inference_steps": 4, "width": 32, "height": 32, "output_type": "np"}
    images = {}
    for scale in (0.0, 0.8):
        stock.set_adapters("style", scale)
        generator = torch.Generator().manual_seed(FIVE["seed"])
        [expected] = (stock(**options, generator=generator).images * 255).round()
        [images[scale]] = models.generate(ImageRequest(**FIVE, lora=({"name": "style", "scale": scale},))).images
        assert np.abs(images[scale] - expected).max() <= 1
    assert np.abs(images[0.0].astype(int) - images[0.8]).max() > 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_image": np.zeros((16, 16, 3), np.uint8)}, "init_image: 16x16 pixels, expected the 32x32"),
        ({"control": [{"name": "outline", "image": np.zeros((8, 8, 3), np.uint8)}]}, "control: 8x8 pixels"),
        ({"lora": [{"name": "outline"}]}, "unknown adapter 'outline'"),
    ],
)
def test_what_is_refused(models, fields, message):
    with pytest.raises(InvalidRequest, match=message):
        models.generate(ImageRequest(**FIVE, **fields))
