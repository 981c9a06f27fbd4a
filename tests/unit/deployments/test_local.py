"""The models of a config in one process, under the same limits as the cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs.cluster import ClusterConfig
from deployments.errors import InvalidRequest
from deployments.local import LocalModels
from deployments.records import ImageRequest

pytestmark = pytest.mark.slow  # imports diffusers

MODELS = Path(__file__).parents[3] / "infra" / "demo" / "models"


@pytest.mark.parametrize(("model", "steps"), [("digits-flux", 28), ("digits-sdxl", 50)])
def test_what_a_request_leaves_open_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, steps: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    config = ClusterConfig.model_validate(
        {
            "store": {"path": str(tmp_path / "store")},
            "ingress": {"limits": {"max_pixels": 64 * 64, "max_inference_steps": 20}},
            "models": [{"id": model, "path": str(MODELS / model), "dtype": "float32"}],
        }
    )
    models, size = LocalModels(config), {"width": 32, "height": 32}
    with pytest.raises(InvalidRequest, match=r"size: 1048576 pixels .the model's default., at most 4096"):
        models.generate(ImageRequest(model=model, prompt="a handwritten five", num_inference_steps=2))
    with pytest.raises(InvalidRequest, match=rf"num_inference_steps: {steps} .the model's default., at most 20"):
        models.generate(ImageRequest(model=model, prompt="a handwritten five", **size))
    result = models.generate(ImageRequest(model=model, prompt="a handwritten five", num_inference_steps=2, **size))
    assert result.images[0].shape == (32, 32, 3)
    assert 0 <= result.seed < 2**32
