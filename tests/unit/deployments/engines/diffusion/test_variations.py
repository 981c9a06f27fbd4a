"""An image whose noise lies towards that of another seed: the Stable Diffusion WebUI's `subseed`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from configs.options import Variation
from deployments.engines.diffusion.first_latents import mixed_noise


def turned(low: np.ndarray, high: np.ndarray, share: float) -> np.ndarray:
    """Each column of each channel is turned towards the other's, in the plane of both."""
    found = np.empty_like(low)
    for place in np.ndindex(low.shape[0], low.shape[1], low.shape[3]):
        here = (place[0], place[1], slice(None), place[2])
        one, other = low[here], high[here]
        angle = np.arccos(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
        found[here] = (np.sin((1 - share) * angle) * one + np.sin(share * angle) * other) / np.sin(angle)
    return found


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_noises_are_turned_into_each_other(share: float) -> None:
    low, high = torch.randn(2, 4, 8, 6), torch.randn(2, 4, 8, 6)
    found = mixed_noise(low, high, share).numpy()
    np.testing.assert_allclose(found, turned(low.double().numpy(), high.double().numpy(), share), atol=1e-4)
    # Alike as they are, there is no plane: they are mixed, the other way round.
    np.testing.assert_allclose(mixed_noise(low, low, share), low, atol=1e-6)


@pytest.mark.parametrize("name", ["sdxl", "stable_diffusion_3"])
def test_an_image_varies_towards_another_seed(request, make_request, name):
    pair = request.getfixturevalue(name)
    conditioning, job = pair.conditioning(), make_request(num_images=2, variation=Variation(seed=77, strength=0.4))
    shape = pair.ours.family.latents.noise_shape(
        pair.ours.denoiser.config, pair.ours._codec.size(job.height, job.width)
    )
    noises = [torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed)) for seed in (job.seed, 77)]
    mixed = torch.from_numpy(turned(*(noise.numpy() for noise in noises), 0.4))
    ours = pair.assert_equals_stock(job, conditioning, latents=mixed)
    plain = pair.ours.generate(make_request(num_images=2), conditioning)
    assert np.abs(ours.astype(int) - plain.astype(int)).max() > 2
    apart = pair.ours.generate(make_request(num_images=2, variation=Variation(seed=77, strength=0.0)), conditioning)
    assert np.abs(apart.astype(int) - plain.astype(int)).max() <= 1
