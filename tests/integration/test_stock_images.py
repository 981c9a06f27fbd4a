"""Images of the cluster against the stock diffusers pipelines on the same folders."""

from __future__ import annotations

import base64
import io
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, StableDiffusionXLPipeline
from integration.harness import DEMO_MODELS, Cluster
from PIL import Image

from deployments.records import ImageRequest, LoraUse

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(scope="module")
def flux() -> Any:
    return FluxPipeline.from_pretrained(DEMO_MODELS / "digits-flux", torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def sdxl() -> Any:
    return StableDiffusionXLPipeline.from_pretrained(
        DEMO_MODELS / "digits-sdxl", torch_dtype=torch.float32, add_watermarker=False
    )


def stock_images(pipeline: Any, request: ImageRequest, **options: Any) -> list[np.ndarray]:
    """Return the image that diffusers makes of the same request."""
    pipeline.set_progress_bar_config(disable=True)
    result = pipeline(
        request.prompt,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        height=32,
        width=32,
        num_images_per_prompt=request.n,
        generator=torch.Generator("cpu").manual_seed(request.seed or 0),
        **options,
    )
    return [np.asarray(image) for image in result.images]


def draw_request(model: str, **more: Any) -> ImageRequest:
    fields = {
        "prompt": f"a handwritten {random.choice(WORDS)}",
        "seed": random.getrandbits(40),
        "num_inference_steps": random.randint(2, 8),
        "guidance_scale": round(random.uniform(2.0, 6.0), 2),
    }
    return ImageRequest(model=model, **(fields | more))


def assert_same(ours: list[np.ndarray], stock: list[np.ndarray]) -> None:
    assert len(ours) == len(stock)
    for ours_HWC, stock_HWC in zip(ours, stock, strict=True):
        assert ours_HWC.shape == stock_HWC.shape
        assert np.abs(ours_HWC.astype(int) - stock_HWC.astype(int)).max() <= 1


def test_flux_equals_stock(cluster: Cluster, flux: Any) -> None:
    request = draw_request("digits-flux", n=2)
    result = cluster.handle.generate.remote(request).result(timeout_s=120)
    assert_same(result.images, stock_images(flux, request, max_sequence_length=16))


def test_sdxl_equals_stock_with_and_without_a_negative_prompt(cluster: Cluster, sdxl: Any) -> None:
    plain = draw_request("digits-sdxl", n=2)
    negative = draw_request("digits-sdxl", negative_prompt="a handwritten one")
    for request in (plain, negative):
        result = cluster.handle.generate.remote(request).result(timeout_s=120)
        assert_same(result.images, stock_images(sdxl, request, negative_prompt=request.negative_prompt))


def test_flux_with_lora_equals_stock(cluster: Cluster) -> None:
    pipeline = FluxPipeline.from_pretrained(DEMO_MODELS / "digits-flux", torch_dtype=torch.float32)
    pipeline.load_lora_weights(DEMO_MODELS / "bold", adapter_name="bold")
    for scale in (1.0, 0.6):
        pipeline.set_adapters("bold", scale)
        request = draw_request("digits-flux", lora=(LoraUse(name="bold", scale=scale),))
        result = cluster.handle.generate.remote(request).result(timeout_s=120)
        assert_same(result.images, stock_images(pipeline, request, max_sequence_length=16))


def test_a_lora_leaves_no_trace_in_the_shared_weights(cluster: Cluster, flux: Any) -> None:
    bold = draw_request("digits-flux", lora=(LoraUse(name="bold", scale=2.0),))
    plain = bold.model_copy(update={"lora": ()})
    for _ in range(2):  # once for each worker, most likely
        cluster.handle.generate.remote(bold).result(timeout_s=120)
        result = cluster.handle.generate.remote(plain).result(timeout_s=120)
        assert_same(result.images, stock_images(flux, plain, max_sequence_length=16))


def test_batch_mates_do_not_change_an_image(cluster: Cluster, flux: Any, sdxl: Any) -> None:
    """Different models, steps, seeds and LoRAs at once: each image is the one that it is alone."""
    requests = [draw_request("digits-flux") for _ in range(4)] + [draw_request("digits-sdxl") for _ in range(3)]
    with ThreadPoolExecutor(len(requests)) as pool:
        results = list(pool.map(lambda r: cluster.handle.generate.remote(r).result(timeout_s=120), requests))
    for request, result in zip(requests, results, strict=True):
        if request.model == "digits-flux":
            assert_same(result.images, stock_images(flux, request, max_sequence_length=16))
        else:
            assert_same(result.images, stock_images(sdxl, request))


def test_the_openai_client_gets_the_same_image(cluster: Cluster, flux: Any) -> None:
    request = draw_request("digits-flux")
    answer = cluster.openai.images.generate(
        model=request.model,
        prompt=request.prompt,
        size="32x32",
        extra_body={
            "seed": request.seed,
            "num_inference_steps": request.num_inference_steps,
            "guidance_scale": request.guidance_scale,
        },
    )
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))))
    assert_same([image], stock_images(flux, request, max_sequence_length=16))
    assert answer.timings_ms["denoise"] > 0
    assert answer.seed == request.seed
