"""The models of a config in one process, under the same limits as the cluster."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.cluster import ClusterConfig
from deployments.local import LocalModels
from deployments.records import ImageRequest
from deployments.records.errors import InvalidRequest, ModelUnavailable

pytestmark = pytest.mark.slow  # imports diffusers

MODELS = Path(__file__).parents[3] / "infra" / "demo" / "models"


@pytest.mark.drawn
@pytest.mark.parametrize(("model", "steps", "side"), [("digits-flux", 4, 512), ("digits-sdxl", 50, 32)])
def test_what_a_request_leaves_open_is_bounded(tmp_path: Path, model: str, steps: int, side: int) -> None:
    config = ClusterConfig.model_validate(
        {
            "store": {"path": str(tmp_path / "store")},
            "ingress": {"limits": {"max_pixels": 16 * 16, "max_inference_steps": 3}},
            "models": [{"id": model, "path": str(MODELS / model), "dtype": "float32"}],
        }
    )
    models, size = LocalModels(config), {"width": 16, "height": 16}
    with pytest.raises(InvalidRequest, match=rf"size: {side**2} pixels .the model's default., at most 256"):
        models.generate(ImageRequest(model=model, prompt="a handwritten five", num_inference_steps=2))
    with pytest.raises(InvalidRequest, match=rf"num_inference_steps: {steps} .the model's default., at most 3"):
        models.generate(ImageRequest(model=model, prompt="a handwritten five", **size))
    result = models.generate(ImageRequest(model=model, prompt="a handwritten five", num_inference_steps=2, **size))
    assert result.images[0].shape == (16, 16, 3)
    assert 0 <= result.seed < 2**32


def test_what_no_engine_runs_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = shutil.copytree(MODELS / "digits-sdxl", tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer_2"))
    config = {"store": {"path": str(tmp_path / "store")}, "models": [{"id": "m", "path": str(folder)}]}
    with pytest.raises(ModelUnavailable, match=r"model 'm': .*its text_encoder_2 has no tokenizer"):
        LocalModels(ClusterConfig.model_validate(config)).generate(ImageRequest(model="m", prompt="a five"))
    assert not list((tmp_path / "store").rglob("*pack*/*"))


def test_a_flux_like_schnell_is_drawn_by_its_own_defaults(tmp_path: Path) -> None:
    """The demo's flux has what tells FLUX.1-schnell apart: no embedded guidance, and a schedule that is not shifted."""
    import diffusers

    folder = MODELS / "digits-flux"
    config = {
        "store": {"path": str(tmp_path / "store")},
        "models": [{"id": "schnell", "path": str(folder), "dtype": "float32"}],
    }
    fields = {"prompt": "a handwritten five", "width": 32, "height": 32}
    result = LocalModels(ClusterConfig.model_validate(config)).generate(ImageRequest(model="schnell", seed=3, **fields))
    stock = diffusers.FluxPipeline.from_pretrained(folder, dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    few = {"num_inference_steps": 4, "guidance_scale": 0.0, "max_sequence_length": 256}  # by its model card
    generator = torch.Generator().manual_seed(3)
    [expected] = (stock(**fields, **few, generator=generator, output_type="np").images * 255).round()
    assert np.abs(result.images[0] - expected).max() <= 1
    assert result.num_inference_steps == 4
