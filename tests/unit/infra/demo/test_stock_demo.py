"""The demo's model that diffusers' own code runs: its images, and that it takes no bytes of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from kit.seeding import seeded_random

from configs.loading import load_cluster_config
from deployments.local import LocalModels
from deployments.records import ImageRequest
from weights.storage.store import WeightStore

ROOT = Path(__file__).parents[4]
MODEL = "digits-sdxl-pag"


@pytest.mark.slow  # imports diffusers
def test_images_are_those_of_diffusers_and_weights_those_of_the_plain_model(tmp_path: Path) -> None:
    from diffusers import StableDiffusionXLPAGPipeline

    config = load_cluster_config(ROOT / "configs/clusters/demo.yaml")
    config = config.model_copy(update={"store": config.store.model_copy(update={"path": tmp_path / "store"})})
    models, seed = LocalModels(config), seeded_random().getrandbits(32)
    asked = {"prompt": "a handwritten five", "num_inference_steps": 3}
    [found] = models.generate(ImageRequest(model=MODEL, seed=seed, **asked)).images
    folder = ROOT / "infra/demo/models" / MODEL
    stock = StableDiffusionXLPAGPipeline.from_pretrained(folder, dtype=torch.float32, add_watermarker=False)
    stock.set_progress_bar_config(disable=True)
    options = {"width": 32, "height": 32, "guidance_scale": 4.0, "generator": torch.Generator().manual_seed(seed)}
    assert np.array_equal(found, np.asarray(stock(**asked, **options).images[0]))
    models.generate(ImageRequest(model="digits-sdxl", seed=seed, **asked))
    store = WeightStore(tmp_path / "store")
    plain, own = (store.manifest(name).components for name in ("digits-sdxl", MODEL))
    assert {name: part.module_key for name, part in own.items()} == {n: part.module_key for n, part in plain.items()}
