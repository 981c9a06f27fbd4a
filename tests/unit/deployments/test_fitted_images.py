"""Images of any size become what a pipeline takes, as diffusers' own preprocessing has it."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image

from configs.model import GenerationDefaults
from deployments.engines.records.input_images import resize_pixels
from deployments.records import ControlNetUse, ImageRequest
from deployments.requests.defaults import with_image_defaults
from deployments.requests.fitted_images import with_fitting_images

FLUX, SDXL, SD = "FluxPipeline", "StableDiffusionXLPipeline", "StableDiffusionPipeline"


def fitted(given: dict[str, Any], class_name: str = SD, **variant: int) -> tuple[ImageRequest, tuple[str, ...]]:
    asked = ImageRequest(model="m", prompt="p", **given)
    return with_fitting_images(asked, with_image_defaults(asked, GenerationDefaults(), class_name), class_name, variant)


@pytest.mark.slow  # imports diffusers
def test_images_and_masks_are_scaled_as_by_stock() -> None:
    import torch
    from diffusers.image_processor import VaeImageProcessor

    seed = random.randrange(2**32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    images = VaeImageProcessor(vae_scale_factor=8)
    masks = VaeImageProcessor(
        vae_scale_factor=8, do_normalize=False, do_binarize=True, do_convert_grayscale=True
    )  # as StableDiffusionInpaintPipeline makes it
    for _ in range(8):
        height, width = (int(side) for side in rng.integers(9, 200, 2))
        image = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
        mask = np.asarray(Image.fromarray(rng.integers(0, 256, (5, 5)).astype(np.uint8)).resize((width, height)))
        request, warnings = fitted({"init_image": image, "mask_image": mask})
        expected = images.preprocess(Image.fromarray(image))[0]
        ours = torch.from_numpy(request.init_image.astype(np.float32)).permute(2, 0, 1) / 255 * 2 - 1
        assert torch.allclose(ours, expected, atol=1e-6)
        white = masks.preprocess(Image.fromarray(mask))[0, 0].numpy().astype(bool)
        assert ((request.mask_image >= 128) == white).all(), (
            "a mask that fits already keeps its greys, as its image does"
        )
        assert bool(warnings) == (height % 8 + width % 8 > 0)


@pytest.mark.parametrize(
    ("class_name", "variant", "size", "expected"),
    [
        (SD, {}, (100, 67), (96, 64)),
        (SDXL, {"pixels_per_latent": 8}, (1023, 769), (1016, 768)),
        (FLUX, {}, (100, 67), (96, 64)),
        (FLUX, {"pixels_per_latent": 4}, (100, 67), (96, 64)),
        (FLUX, {"pixels_per_latent": 8}, (1000, 1000), (992, 992)),
        (SD, {}, (3, 9), (8, 8)),
        (SD, {}, (64, 48), (64, 48)),
    ],
)
def test_sides_are_rounded_down_with_a_warning(
    class_name: str, variant: dict[str, int], size: tuple[int, int], expected: tuple[int, int]
) -> None:
    pixels = np.full((size[1], size[0], 3), 77, np.uint8)
    control = (ControlNetUse(name="edges", image=pixels),)
    for given in ({"init_image": pixels}, {"control": control}, {"init_image": pixels, "control": control}):
        request, warnings = fitted(given, class_name, **variant)
        assert (request.width, request.height) == expected
        for found in (request.init_image, *(use.image for use in request.control)):
            assert found is None or (found.shape[:2] == expected[::-1] and (found == 77).all())
        shown = "images of {}x{} pixels were scaled to {}x{}: sides of 'm' are multiples of".format(*size, *expected)
        assert [warning.startswith(shown) for warning in warnings] == ([True] if size != expected else [])


def test_what_a_request_says_itself_is_not_changed() -> None:
    pixels = np.zeros((30, 50, 3), np.uint8)
    request, warnings = fitted({"init_image": pixels, "width": 50})
    assert (request.width, request.height, len(warnings)) == (50, 24, 1), "the worker refuses 50 by name"
    plain = ImageRequest(model="m", prompt="p", width=50, height=30)
    assert with_fitting_images(plain, plain, SD, {}) == (plain, ())


def test_a_resize_needs_no_more_memory_than_its_images() -> None:
    """PIL's own way from 16x32768 to 32768x16 pixels is by 32768x32768: 3 GiB."""
    code = """
import resource, numpy as np
from deployments.engines.records.input_images import resize_pixels
pixels = np.zeros((32768, 16, 3), np.uint8)
held = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (held + 2**28, -1))
print(resize_pixels(pixels, (32768, 16)).shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "(16, 32768, 3)\n", done.stderr


def test_a_mask_stays_black_and_white() -> None:
    mask = np.zeros((16, 16), np.uint8)
    mask[:, 8:] = 255
    assert set(np.unique(resize_pixels(mask, (40, 24)))) == {0, 255}
