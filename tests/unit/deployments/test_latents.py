"""Latents in and out of requests: from the record through the store to the engine, whole and phase by phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng

from configs.cluster import ClusterConfig
from configs.options import Sampler
from deployments.local import LocalModels
from deployments.records import NO_PROMPT, ImageRequest
from deployments.records.errors import InvalidRequest, ServiceError
from weights.storage.store import WeightStore

pytestmark = pytest.mark.slow  # imports diffusers

MODELS = Path(__file__).parents[3] / "infra" / "demo" / "models"
SDXL, FLUX = "digits-sdxl", "digits-flux"


def local_models(tmp_path: Path, **worker: Any) -> LocalModels:
    models = [{"id": name, "path": str(MODELS / name), "dtype": "float32"} for name in (SDXL, FLUX)]
    config = {"store": {"path": str(tmp_path / "store")}, "models": models, "worker": worker}
    return LocalModels(ClusterConfig.model_validate(config))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    return local_models(tmp_path_factory.mktemp("latents"))


def vae_of(name: str) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(MODELS / name / "vae", torch_dtype=torch.float32)


def of_vae(model: str, output: str, **given: Any) -> ImageRequest:
    return ImageRequest(model=model, prompt=NO_PROMPT, output=output, **given)


@pytest.mark.drawn
@pytest.mark.parametrize("name", [SDXL, FLUX])
def test_the_vae_alone_encodes_and_decodes(models, name):
    pixels, vae = seeded_rng().random((2, 32, 48, 3), np.float32), vae_of(name)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) * 2 - 1
    with torch.no_grad():
        expected = vae.encode(images).latent_dist.mode()
        shown = (vae.decode(expected).sample / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    encoded = models.generate(of_vae(name, "encoded", pixels=pixels))
    assert encoded.images == []
    assert np.abs(encoded.array - expected.numpy()).max() < 1e-4
    decoded = models.generate(of_vae(name, "decoded", latents=encoded.array))
    assert decoded.array.dtype == np.float32
    assert np.abs(decoded.array - shown.numpy()).max() < 1e-4


SAMPLED = {
    SDXL: Sampler(name="dpmpp_2m", sigmas=(14.614643, 5.0, 2.0, 0.7, 0.0), cfg=3.0, noise_seed=5),
    FLUX: Sampler(name="euler", sigmas=(1.0, 0.8, 0.5, 0.0), noise_seed=5),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", [SDXL, FLUX])
def test_latents_are_handed_on_and_decoded(models, name):
    """Handed latents decode to the image of a request for one, and a second pass begins where one ended."""
    sampler = SAMPLED[name]
    asked = {"model": name, "prompt": "a handwritten five", "negative_prompt": "", "width": 32, "height": 32, "n": 2}
    [image, _] = models.generate(ImageRequest(**asked, sampler=sampler)).images
    latents = models.generate(ImageRequest(**asked, sampler=sampler, output="latent"))
    assert latents.num_inference_steps == sampler.num_steps
    decoded = models.generate(of_vae(name, "decoded", latents=latents.array)).array
    assert np.abs(decoded[0] * 255 - image).max() < 1
    again = sampler.model_copy(update={"sigmas": sampler.sigmas[2:]})
    second = models.generate(ImageRequest(**asked, sampler=again, latents=latents.array, output="latent"))
    assert second.array.shape == latents.array.shape
    assert np.abs(second.array - latents.array).max() > 0.01
    both = models.generate(ImageRequest(**asked, sampler=again, latents=latents.array, output="latent_and_clean"))
    assert np.abs(both.array[:2] - second.array).max() < 1e-5
    assert np.abs(both.array[2:] - second.array).max() < 1e-4  # no noise is left over


def test_a_device_without_room_for_all_gives_the_same_latents(models, tmp_path):
    """Denoiser and VAE take turns: the VAE's turn scales what goes in, and what comes out."""
    small = local_models(tmp_path, resident_bytes=5_600_000)
    rng, sampler = seeded_rng(), SAMPLED[FLUX]
    asked = {"model": FLUX, "prompt": "a handwritten five", "sampler": sampler, "output": "latent_and_clean"}
    start = models.generate(of_vae(FLUX, "encoded", pixels=rng.random((1, 32, 32, 3), np.float32))).array
    mask = rng.random((1, 16, 16), np.float32)
    request = ImageRequest(**asked, latents=start, noise_mask=mask)
    expected, found = models.generate(request), small.generate(request)
    parts = WeightStore(tmp_path / "store").manifest(FLUX).components
    assert found.switch.attached_bytes == 2 * parts["vae"].nbytes + parts["transformer"].nbytes
    assert np.abs(found.array - expected.array).max() < 1e-5


def test_a_model_beyond_a_budget_names_its_key(tmp_path):
    with pytest.raises(ServiceError, match=r"worker\.resident_bytes is "):
        local_models(tmp_path, resident_bytes=2_000).generate(ImageRequest(model=SDXL, prompt="a"))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"output": "decoded"}, "latents"),
        ({"output": "encoded"}, "pixels"),
        ({"output": "decoded", "latents": np.zeros((1, 3, 4, 4), np.float32)}, "latents"),
        ({"output": "encoded", "pixels": np.zeros((1, 33, 32, 3), np.float32)}, "pixels"),
        ({"output": "latent"}, "sampler"),
        ({"latents": np.zeros((1, 4, 4, 4), np.float32)}, "sampler"),
        ({"sampler": SAMPLED[SDXL], "num_inference_steps": 3}, "num_inference_steps"),
    ],
)
def test_what_cannot_be_done_is_refused(models, given, shown):
    with pytest.raises(InvalidRequest, match=shown):
        models.generate(ImageRequest(model=SDXL, prompt="a", **given))


@pytest.mark.parametrize(
    "given",
    [
        {"latents": np.full((1, 4, 4, 4), np.nan, np.float32)},
        {"latents": np.zeros((1, 4, 4, 4))},
        {"latents": np.zeros((4, 4, 4), np.float32)},
        {"pixels": np.zeros((0, 4, 4, 3), np.float32)},
        {"noise_mask": np.zeros((4, 4), np.float32)},
        {"output": "video"},
        {"sampler": {"name": "uni", "sigmas": (1.0, 0.0)}},
        {"sampler": {"name": "euler", "sigmas": (1.0,)}},
        {"sampler": {"name": "euler", "sigmas": (float("inf"), 0.0)}},
    ],
)
def test_a_record_takes_only_finite_arrays(given):
    with pytest.raises(InvalidRequest, match=next(iter(given))):
        ImageRequest(model=SDXL, prompt="a", **given)
