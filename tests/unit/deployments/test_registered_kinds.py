"""Adapters and weights of kinds that few models take answer a request, registered as they are published."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.classes import assembled, sd3
from kit.tiny.pipelines import make, saved
from PIL import Image
from safetensors.torch import save_file
from unit.deployments.engines.diffusion.control_nets import stirred
from unit.deployments.engines.diffusion.ip_adapter_files import write_ip_adapter
from unit.deployments.engines.diffusion.test_reader_controls import Z_KEYS
from unit.weights.formats.test_svdquant import NEW, svd

from configs.cluster import ClusterConfig
from deployments.local import LocalModels
from deployments.records import ControlNetUse, ImagePromptUse, ImageRequest

pytestmark = pytest.mark.slow  # imports diffusers

FLUX = Path(__file__).parents[3] / "infra/demo/models/digits-flux"
ASKED: dict[str, Any] = {
    "model": "m",
    "prompt": "a five",
    "num_inference_steps": 2,
    "width": 32,
    "height": 32,
    "seed": 1,
}


def registered(folder: Path, store: Path, adapter: Path | None = None) -> LocalModels:
    adapters = [{"id": "a", "path": str(adapter), "base": ["m"]}] if adapter else []
    models = [{"id": "m", "path": str(folder), "dtype": "float32"}]
    fields = {"store": {"path": str(store)}, "models": models, "adapters": adapters}
    return LocalModels(ClusterConfig.model_validate(fields))


def image_of(models: LocalModels, **more: Any) -> np.ndarray:
    [image] = models.generate(ImageRequest(**ASKED | more)).images
    return image.astype(int)


def stock_image(pipeline: Any, **more: Any) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    options = {key: one for key, one in ASKED.items() if key not in ("model", "seed")}
    generator = torch.Generator().manual_seed(ASKED["seed"])
    [image] = pipeline(**options | more, generator=generator, output_type="np").images
    return np.asarray((image * 255).round())


def test_a_controlnet_of_z_image_answers_as_diffusers_does(tmp_path: Path) -> None:
    stock = make("ZImagePipeline", tmp_path / "m")
    config = stock.transformer.config
    own = {key: config[key] for key in Z_KEYS}
    net = stirred(
        diffusers.ZImageControlNetModel(**own, control_layers_places=[0], control_in_dim=config.in_channels), 1
    )
    net.save_pretrained(tmp_path / "net")
    models = registered(tmp_path / "m", tmp_path / "store", tmp_path / "net")
    picture = seeded_rng().integers(0, 256, (32, 32, 3), dtype=np.uint8)
    found = image_of(models, control=(ControlNetUse(name="a", image=picture, scale=0.8),), guidance_scale=0.0)
    judge = diffusers.ZImageControlNetPipeline(**stock.components, controlnet=copy.deepcopy(net))
    call = {"control_image": Image.fromarray(picture), "controlnet_conditioning_scale": 0.8, "guidance_scale": 0.0}
    assert np.abs(found - stock_image(judge, **call)).max() <= 1
    assert np.abs(found - image_of(models, guidance_scale=0.0)).max() > 4


def test_an_image_as_a_prompt_to_stable_diffusion_3_changes_its_image(tmp_path: Path) -> None:
    stock = saved(lambda: assembled("StableDiffusion3Pipeline", **sd3()), tmp_path / "m")
    folder = write_ip_adapter(tmp_path / "look", stock.transformer, "sd3")
    models = registered(tmp_path / "m", tmp_path / "store", folder)
    picture = seeded_rng().integers(0, 256, (40, 32, 3), dtype=np.uint8)
    plain = image_of(models)
    assert np.abs(plain - stock_image(stock)).max() <= 1
    found = image_of(models, ip_adapter=(ImagePromptUse(name="a", image=picture, scale=0.8),))
    assert np.abs(found - plain).max() > 4
    assert np.array_equal(plain, image_of(models, ip_adapter=(ImagePromptUse(name="a", image=picture, scale=0.0),)))


def test_a_transformer_in_svdquant_answers_as_its_wide_values_do(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(FLUX, folder)
    stock = diffusers.FluxPipeline.from_pretrained(folder, dtype=torch.float32)
    config = {key: one for key, one in stock.transformer.config.items() if not key.startswith("_")}
    sides = {"num_attention_heads": 4, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)}
    model = diffusers.FluxTransformer2DModel(**config | sides | {"num_layers": 1, "num_single_layers": 1}).eval()
    state = {name: one.bfloat16() for name, one in model.state_dict().items()}  # as such checkpoints are published
    wide = {name: one.float() for name, one in state.items()}
    targets = ["transformer_blocks.0.ff.net.2", "single_transformer_blocks.0.proj_out"]
    for target in targets:
        made = svd(*wide[f"{target}.weight"].shape)
        wide |= {f"{target}.weight": made.weight.bfloat16().float(), f"{target}.bias": made.bias}  # as we keep them
        del state[f"{target}.weight"]
        state |= {f"{target}.{NEW.get(end, end)}": one for end, one in made.parts.items() if end != "smooth_orig"}
    model.save_pretrained(folder / "transformer")
    save_file(
        {name: one.contiguous() for name, one in state.items()},
        folder / "transformer/diffusion_pytorch_model.safetensors",
    )
    file = folder / "transformer/config.json"
    said = {"precision": "int4", "group_size": 64, "rank": 16, "targets": targets}
    quantization = {"quant_method": "nunchaku_lite", "svdq_w4a4": said}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    model.load_state_dict(wide)
    judge = diffusers.FluxPipeline(**stock.components | {"transformer": model})
    found = image_of(registered(folder, tmp_path / "store"), max_sequence_length=16)
    assert np.abs(found - stock_image(judge, max_sequence_length=16)).max() <= 1
