"""Images that are changed: from the request to pixels by a worker and a text encoder, as diffusers does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.classes import assembled
from kit.tiny.pipelines import saved
from kit.tiny.seeing import edit_small_areas, qwen_edit

from configs.cluster import WorkerConfig
from configs.model import GenerationDefaults
from deployments.modules.cache import ModuleCache
from deployments.modules.encoders import TextEncoderBuilder
from deployments.modules.loading import ComponentBuilder
from deployments.records import ImageRequest
from deployments.replicas.step_loop import DeviceThread
from deployments.requests.defaults import with_image_defaults
from deployments.services.image_service import ImageService
from deployments.text.fallback import FallbackEncoder
from deployments.text.requests import Conditioning, ConditioningRequest

pytestmark = pytest.mark.slow  # imports diffusers
PLUS = "QwenImageEditPlusPipeline"


async def test_images_are_changed_as_by_diffusers_and_what_was_seen_is_not_seen_again(
    tmp_path: Path, open_host: Callable[..., ModuleCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_small_areas(monkeypatch)
    folders, rng = {"m": tmp_path / "m"}, seeded_rng()
    stock = saved(lambda: assembled(PLUS, **qwen_edit()), folders["m"])
    worker, texts = open_host(ComponentBuilder(WorkerConfig()), folders), open_host(TextEncoderBuilder(), folders)
    encoder = FallbackEncoder(texts, DeviceThread(), warnings=())
    service, asked = ImageService(worker, WorkerConfig(), DeviceThread()), list[ConditioningRequest]()

    async def encode(request: ConditioningRequest) -> Conditioning:
        asked.append(request)
        return await encoder.condition(request)

    first, second, third = (rng.integers(0, 256, (side, 64, 3), np.uint8) for side in (48, 100, 64))
    options: dict[str, Any] = {"prompt": "as one", "negative_prompt": "dull", "num_inference_steps": 2}
    options |= {"width": 64, "height": 128}

    async def made(seed: int, *images: Any) -> Any:
        request = ImageRequest(model="m", seed=seed, init_image=images[0], images={"image": images[1:]}, **options)
        return await service.generate(with_image_defaults(request, GenerationDefaults(), PLUS), encode)

    for seed, images, misses in ((1, (first, second), 2), (2, (first, second), 0), (3, (second, first), 2)):
        result = await made(seed, *images)
        assert (result.cache.hits, result.cache.misses) == (2 - misses, misses)
        (expected,) = stock(
            image=[PIL.Image.fromarray(image) for image in images],
            generator=torch.Generator("cpu").manual_seed(seed),
            **options,
        ).images
        (image,) = result.images
        assert np.abs(image.astype(int) - np.asarray(expected).astype(int)).max() <= 1
        assert image.std() > 1
    assert (await made(1, first, third)).cache.misses == 2
    largest = max(image.size for one in asked for image in one.images)
    assert largest < 2 * 3 * 384 * 384, "a text encoder is sent what it sees, and no more"
