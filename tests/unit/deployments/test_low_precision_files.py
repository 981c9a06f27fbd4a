"""Pipelines with matrices in low precision answer a request as those with the values that the matrices stand for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.weights.formats.test_low_precision import WRITERS, Written

from configs.cluster import ClusterConfig
from deployments.local import LocalModels
from deployments.records import ImageRequest

pytestmark = pytest.mark.slow  # imports diffusers
FLUX = Path(__file__).parents[3] / "infra" / "demo" / "models" / "digits-flux"
FILE = Path("transformer", "diffusion_pytorch_model.safetensors")


def plain_fp8(wide: torch.Tensor) -> Written:
    """Floats of 8 bits without scales, as they are published for ComfyUI."""
    values = wide.to(torch.float8_e4m3fn)
    return {"x.weight": values}, values.float()


def image_of(folder: Path, tensors: dict[str, torch.Tensor], tmp_path: Path) -> np.ndarray:
    shutil.copytree(FLUX, folder)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / FILE)
    config = {"store": {"path": str(tmp_path / "store")}, "models": [{"id": folder.name, "path": str(folder)}]}
    request = ImageRequest(
        model=folder.name, prompt="a five", seed=1, num_inference_steps=2, width=32, height=32, max_sequence_length=32
    )
    (found,) = LocalModels(ClusterConfig.model_validate(config)).generate(request).images
    return found


@pytest.mark.drawn(3)
@pytest.mark.parametrize("write", [plain_fp8, *WRITERS], ids=lambda write: write.__name__)
def test_a_pipeline_in_low_precision_answers_a_request(
    write: Callable[[torch.Tensor], Written], tmp_path: Path
) -> None:
    plain = load_file(FLUX / FILE)
    short, values = dict(plain), dict(plain)
    matrices = [name for name, one in plain.items() if name.endswith(".ff.net.2.weight")]
    assert len(matrices) >= 2
    for name in matrices:
        parts, values[name] = write(plain[name].float())
        del short[name]
        short |= {name.removesuffix("weight").removesuffix(".") + end[1:]: one for end, one in parts.items()}
        values[name] = values[name].to(torch.bfloat16)
    found = image_of(tmp_path / "short", short, tmp_path)
    assert found.std() > 1
    expected = image_of(tmp_path / "values", values, tmp_path)
    # What is rounded to 16 bits may be rounded the other way, most of all what was turned back.
    assert np.abs(found.astype(int) - expected).max() <= (6 if write.__name__ == "int4_rotated" else 3)
