"""A device without room for a whole pipeline: encoders go before the denoiser comes, and the image is the same."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from device.conftest import SIMULATED
from diffusers import UNet2DConditionModel
from kit.hosting import DEMO, Host, demo_store
from unit.deployments.engine_loops import stream_images
from unit.deployments.engines.diffusion.ip_adapter_files import write_ip_adapter

from configs.cluster import ClusterConfig
from deployments.engines.diffusion.families import family_of
from deployments.local import LocalModels
from deployments.modules.loading import is_denoise_component
from deployments.records import ImageProgress, ImagePromptUse, ImageRequest, ImageResult
from deployments.records.errors import ServiceError
from deployments.replicas.step_loop import DeviceThread
from deployments.services.image_service import ImageService
from deployments.text.fallback import FallbackEncoder
from infra.offline.fp8_pipeline import export_fp8
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

# Each test takes another kind of request through a device that is too small for it.
pytestmark = [pytest.mark.usefixtures("learned_once"), pytest.mark.drawn(3, of="file")]
REQUEST = ImageRequest(
    model="digits-sdxl",
    prompt="a handwritten seven",
    width=32,
    height=32,
    num_inference_steps=3,
    guidance_scale=4.0,
    seed=5,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    folder = tmp_path_factory.mktemp("small")
    found = demo_store(folder / "store", "digits-sdxl")
    family = family_of("StableDiffusionXLPipeline")
    export_fp8(DEMO / "digits-sdxl", folder / "fp8", family.denoiser_name, family.network.keeps_precision)
    externalize(found, "fp8", folder / "fp8", dtype="float32")
    return found


async def draw(host: Host, request: ImageRequest) -> ImageResult:
    thread = DeviceThread()
    encoder = FallbackEncoder(host, thread)
    return await ImageService(host, host.settings, thread).generate(request, encoder.condition, encode_first=True)


def sizes(store: WeightStore) -> tuple[int, int]:
    """Return the device's bytes of the text encoders, and of what a denoise needs."""
    parts = store.manifest("digits-sdxl").components.values()

    def of(wanted: bool) -> int:
        refs = {
            ref.sha256: ref for part in parts if is_denoise_component(part) is wanted for ref in part.tensors.values()
        }
        return sum(-(-ref.nbytes // 512) * 512 for ref in refs.values())

    return of(False), of(True)


async def test_a_pipeline_larger_than_the_budget_makes_the_same_image(store: WeightStore, device: torch.device) -> None:
    encoders, denoiser = sizes(store)
    budget = max(encoders, denoiser) + min(encoders, denoiser) // 2
    small, large = Host(store, str(device), budget), Host(store, str(device))
    whole = await draw(large, REQUEST)
    for _ in range(2):
        result = await draw(small, REQUEST)
        assert np.array_equal(result.images[0], whole.images[0])
        assert result.switch is not None
        assert result.switch.device_bytes > 0  # the encoders had taken its room, and give it back each time
        assert small.describe()["charged_bytes"] <= budget < encoders + denoiser
    with pytest.raises(ServiceError, match="budget"):
        await draw(Host(store, str(device), denoiser // 50), REQUEST)


@pytest.mark.drawn
@pytest.mark.parametrize("share", ["in turn", "streamed"])
def test_the_library_alone_makes_the_same_image_again_and_again(
    store: WeightStore, device: torch.device, share: str
) -> None:
    """Modules that are evicted are let go at once: nothing waits for a collection of garbage to get its room."""
    unet = device_bytes(store, ["unet"])
    budget = smallest_budget(store) if share == "in turn" else unet * 2 // 3

    def models(**worker: Any) -> LocalModels:
        entry = {"id": "digits-sdxl", "path": str(DEMO / "digits-sdxl"), "dtype": "float32"}
        config = {"store": {"path": str(store.path)}, "models": [entry], "worker": worker}
        simulated = SIMULATED.model_dump(mode="json")
        return LocalModels(ClusterConfig.model_validate(config | {"simulated": simulated}))

    small = models(device=str(device), device_budget_bytes=budget)
    [whole] = models().generate(REQUEST).images
    gc.disable()
    try:
        for _ in range(2):
            [found] = small.generate(REQUEST).images
            assert np.array_equal(found, whole)
    finally:
        gc.enable()


async def test_float8_weights_are_uploaded_as_they_are(store: WeightStore, device: torch.device) -> None:
    request = REQUEST.model_copy(update={"model": "fp8"})
    host = Host(store, str(device))
    found, expected = await draw(host, request), await draw(Host(store, "cpu"), request)
    most = 0 if device.type == "sim" else 2
    assert np.abs(found.images[0].astype(int) - expected.images[0]).max() <= most
    async with host.lease("fp8", is_denoise_component) as lease:
        kinds = {parameter.dtype for parameter in lease.modules["unet"].parameters()}
    assert kinds == {torch.float8_e4m3fn, torch.float32}


async def test_a_deterministic_image_is_the_same_in_any_company(store: WeightStore, device: torch.device) -> None:
    host = Host(store, str(device))
    thread = DeviceThread()
    encoder, images = FallbackEncoder(host, thread), ImageService(host, host.settings, thread)
    mine = REQUEST.model_copy(update={"deterministic": True})
    others = [
        REQUEST.model_copy(update={"prompt": f"{n} threes", "seed": n, "deterministic": n == 1}) for n in range(3)
    ]
    together = await asyncio.gather(*(images.generate(one, encoder.condition) for one in (*others, mine)))
    alone = await draw(Host(store, str(device)), mine)
    assert np.array_equal(together[-1].images[0], alone.images[0])


# Denoiser and VAE in turn


PIXELS = np.random.default_rng(2).integers(0, 256, (32, 32, 3), np.uint8)
MASK = np.where(np.arange(32) < 16, np.uint8(255), np.uint8(0))[:, None].repeat(32, axis=1)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"init_image": PIXELS, "strength": 0.7, "guidance_scale": 1.0},
    {"init_image": PIXELS, "mask_image": MASK, "strength": 1.0, "deterministic": True, "seed": 9},
    {"n": 2, "num_inference_steps": 2, "partial_images": 1},
]


def smallest_budget(store: WeightStore) -> int:
    """Return room for the largest of UNet, VAE and all text encoders, and less than UNet and VAE take together."""
    sizes = {name: device_bytes(store, [name]) for name in ("unet", "vae")}
    texts = device_bytes(store, ["text_encoder", "text_encoder_2"])
    budget = max(*sizes.values(), texts)
    assert budget < sum(sizes.values())
    return budget


def device_bytes(store: WeightStore, names: list[str]) -> int:
    parts = store.manifest("digits-sdxl").components
    refs = {ref.sha256: ref for name in names for ref in parts[name].tensors.values()}
    return sum(-(-ref.nbytes // 512) * 512 for ref in refs.values())


async def test_denoiser_and_vae_in_turn_make_the_same_image(store: WeightStore, device: torch.device) -> None:
    host, whole = Host(store, str(device), smallest_budget(store)), Host(store, str(device))
    for variant in VARIANTS:
        request = REQUEST.model_copy(update=variant)
        found, expected = await draw(host, request), await draw(whole, request)
        assert len(found.images) == request.n
        for image, other in zip(found.images, expected.images, strict=True):
            assert np.array_equal(image, other)
        assert found.switch is not None
        assert {"unet", "vae"} <= {*found.switch.built, *found.switch.reused}
        assert host.describe()["charged_bytes"] <= smallest_budget(store)
    thread = DeviceThread()
    images, encoder = ImageService(host, host.settings, thread), FallbackEncoder(host, thread)
    told = REQUEST.model_copy(update={"partial_images": 2, "reports_steps": True})
    *steps, last = [piece async for piece in stream_images(images, told, encoder.condition, encode_first=True)]
    assert [(piece.step, piece.previews) for piece in steps if isinstance(piece, ImageProgress)] == [
        (1, ()),
        (2, ()),
        (3, ()),
    ]
    assert isinstance(last, ImageResult)
    assert any("partial_images" in text for text in last.warnings)
    both = Host(store, str(device), device_bytes(store, ["unet", "vae"]))
    first = await draw(both, REQUEST)
    async with both.lease("digits-sdxl", is_denoise_component) as lease:  # where both fit, they come and stay together
        assert set(lease.report.reused) == {"unet", "vae"}
    assert np.array_equal(first.images[0], (await draw(whole, REQUEST)).images[0])


async def test_an_image_prompt_goes_with_the_denoiser(store: WeightStore, device: torch.device, tmp_path: Path) -> None:
    unet = UNet2DConditionModel.from_pretrained(DEMO / "digits-sdxl" / "unet")
    externalize(store, "style", write_ip_adapter(tmp_path / "style", unet), dtype="float32")
    (adapter,) = store.manifest("style").components.values()
    budget = smallest_budget(store) + sum(-(-ref.nbytes // 512) * 512 for ref in adapter.tensors.values())
    assert budget < device_bytes(store, ["unet", "vae"]) + adapter.nbytes
    host, whole = Host(store, str(device), budget), Host(store, str(device))
    uses = (ImagePromptUse(name="style", image=PIXELS, scale=0.8),)
    request = REQUEST.model_copy(update={"ip_adapter": uses, "init_image": PIXELS, "strength": 0.9})
    found, expected = await draw(host, request), await draw(whole, request)
    assert np.array_equal(found.images[0], expected.images[0])
    plain = await draw(whole, request.model_copy(update={"ip_adapter": ()}))
    assert not np.array_equal(plain.images[0], expected.images[0])


async def test_requests_that_take_turns_end_and_leave_nothing(store: WeightStore, device: torch.device) -> None:
    """Some are given up on the way; the others' images are those of a large device."""
    host = Host(store, str(device), smallest_budget(store))
    thread = DeviceThread()
    encoder, images = FallbackEncoder(host, thread), ImageService(host, host.settings, thread)
    whole = Host(store, str(device))
    requests = [REQUEST.model_copy(update=VARIANTS[n % 4] | {"seed": n}) for n in range(8)]
    running = [asyncio.ensure_future(images.generate(one, encoder.condition, encode_first=True)) for one in requests]
    for number, place in enumerate((1, 4, 6)):
        async with asyncio.timeout(60):
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED, timeout=0.02 * number)
        running[place].cancel()
    async with asyncio.timeout(60):
        results = await asyncio.gather(*running, return_exceptions=True)
    assert sum(isinstance(result, ImageResult) for result in results) >= 5
    for request, result in zip(requests, results, strict=True):
        if isinstance(result, asyncio.CancelledError):
            continue
        assert isinstance(result, ImageResult), result
        assert np.array_equal(result.images[0], (await draw(whole, request)).images[0])
    assert host.describe()["leased_bytes"] == 0
    assert images.num_running == 0
