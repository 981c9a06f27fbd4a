"""The example of two passes that ships, against diffusers' pipelines one after the other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from PIL import Image
from unit.deployments.engine_loops import AskedModels

from configs.cluster import LimitsConfig
from deployments.local import LocalModels
from deployments.pipelines.functions import enlarge_image
from deployments.pipelines.pipelines import Pipelines
from deployments.pipelines.records import PipelineRequest, TensorValue
from deployments.preflight import check_config

ROOT = Path(__file__).parents[4]
PROMPT, SEED = "a handwritten five", 3


def by_diffusers(folder: Path) -> np.ndarray:
    from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline

    first = StableDiffusionXLPipeline.from_pretrained(folder, dtype=torch.float32)
    second = StableDiffusionXLImg2ImgPipeline(**first.components)
    call: dict[str, Any] = {"prompt": PROMPT, "num_inference_steps": 20, "guidance_scale": 4.0}
    for pipeline in (first, second):
        pipeline.set_progress_bar_config(disable=True)
    image = first(**call, width=32, height=32, generator=torch.Generator().manual_seed(SEED)).images[0]
    larger = image.resize((64, 64), Image.Resampling.LANCZOS)
    found = second(**call, image=larger, strength=0.5, generator=torch.Generator().manual_seed(SEED)).images[0]
    return np.asarray(found)


@pytest.mark.slow
async def test_two_passes_are_those_of_diffusers(tmp_path: Path) -> None:
    config, sources, problems = check_config(ROOT / "configs" / "clusters" / "hires.yaml")
    assert (config is not None, problems) == (True, [])
    assert config is not None
    config = config.model_copy(update={"store": config.store.model_copy(update={"path": tmp_path / "store"})})
    records = {id_: source.record for id_, source in sources.items()}
    ask: Any = AskedModels(LocalModels(config))
    pipelines = Pipelines(config.pipelines, ask, SimpleNamespace(records=records), limits=LimitsConfig())
    inputs = {
        "prompt": TensorValue("prompt", "BYTES", np.array([PROMPT.encode()], dtype=object)),
        "seed": TensorValue("seed", "INT64", np.array([SEED])),
    }
    result = await pipelines.run_pipeline(PipelineRequest("digits-hires", inputs))
    [image] = np.asarray(result.outputs["image"].data)
    assert image.shape == (64, 64, 3)
    expected = await asyncio.to_thread(by_diffusers, Path(config.models[0].path))
    assert np.abs(image.astype(int) - expected).max() <= 1


def test_enlarged_images_are_those_of_pil() -> None:
    pixels = seeded_rng().integers(0, 256, (24, 16, 3), dtype=np.uint8)
    expected = Image.fromarray(pixels).resize((40, 56), Image.Resampling.LANCZOS)
    assert np.array_equal(enlarge_image(pixels, 2.5), np.asarray(expected))
    assert np.array_equal(enlarge_image(pixels, 1.0), pixels)


@pytest.mark.parametrize(
    ("shape", "factor", "words"),
    [((8, 8, 3), 5.0, "factor 5: expected 1 to 4"), ((4, 4, 3), 1.0, "0x0 pixels"), ((2000, 8, 3), 4.0, "32x8000")],
)
def test_what_cannot_be_enlarged(shape: tuple[int, ...], factor: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        enlarge_image(np.zeros(shape, np.uint8), factor)
