"""Made-up pipelines: stock libraries open and run them, and they share what real ones share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

from infra.bench.command.synthetic import ALIAS, FLUX, SDXL, TUNED, Scale, write_pipelines
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

STOCK = Path(__file__).parents[4] / "infra/demo/models"
TINY = Scale(
    flux_heads=1,
    flux_layers=(1, 2),
    t5_width=64,
    t5_layers=1,
    clip_width=64,
    clip_layers=1,
    big_clip_width=128,
    big_clip_layers=2,
    unet_channels=(32, 64, 64),
    unet_depths=(1, 1, 2),
    vae_channels=(32, 32),
    vocabulary=(571, 137),
)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_pipelines(tmp_path_factory.mktemp("pipelines"), STOCK, TINY)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", [FLUX, TUNED, ALIAS, SDXL])
def test_diffusers_opens_and_runs_them(pipelines: dict[str, Path], name: str) -> None:
    pipeline = DiffusionPipeline.from_pretrained(pipelines[name], torch_dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {} if name == SDXL else {"max_sequence_length": 16}
    (image,) = pipeline("7", height=16, width=16, num_inference_steps=1, output_type="pt", **options).images
    assert image.shape == (3, 16, 16)


def test_the_weights_are_finite(pipelines: dict[str, Path]) -> None:
    for file in pipelines[SDXL].rglob("*.safetensors"):
        assert all(tensor.isfinite().all() and tensor.dtype == torch.bfloat16 for tensor in load_file(file).values())


def test_a_fine_tune_differs_in_its_transformer_alone(pipelines: dict[str, Path]) -> None:
    for file in pipelines[FLUX].rglob("*.safetensors"):
        other = pipelines[TUNED] / file.relative_to(pipelines[FLUX])
        assert (file.read_bytes() == other.read_bytes()) == (file.parent.name != "transformer")


def test_the_store_finds_what_is_shared(pipelines: dict[str, Path], tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    flux, alias, sdxl = (externalize(store, name, pipelines[name]) for name in (FLUX, ALIAS, SDXL))
    keys = {
        m.model: {c.name: (c.config_hash, c.module_key) for c in m.components.values()} for m in (flux, alias, sdxl)
    }
    assert keys[FLUX] == keys[ALIAS]
    assert [name for name in keys[FLUX] if keys[FLUX][name] == keys[SDXL].get(name)] == ["vae"]


def test_another_seed_gives_other_weights(pipelines: dict[str, Path], tmp_path: Path) -> None:
    again = write_pipelines(tmp_path / "again", STOCK, TINY)
    other = write_pipelines(tmp_path / "other", STOCK, TINY, seed=1)
    file = Path("vae/diffusion_pytorch_model.safetensors")
    assert (again[FLUX] / file).read_bytes() == (pipelines[FLUX] / file).read_bytes()
    assert (other[FLUX] / file).read_bytes() != (pipelines[FLUX] / file).read_bytes()
