"""A device smaller than the denoiser: its blocks come one after the other, and the image is the same.

Beside it, ControlNets and LoRAs where denoiser and VAE take turns.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from kit.hosting import DEMO, Host, demo_store
from kit.tiny.parts import save_controlnet

from deployments.engines.diffusion.families import family_of
from deployments.modules.loading import is_denoise_component
from deployments.records import ImageRequest, ImageResult
from deployments.records.errors import ServiceError
from deployments.replicas.step_loop import DeviceThread
from deployments.services.image_service import ImageService
from deployments.text.fallback import FallbackEncoder
from deployments.text.requests import Conditioning, ConditioningRequest
from infra.offline.fp8_pipeline import export_fp8
from weights.operations.externalize import externalize
from weights.operations.intake import import_model
from weights.storage.store import WeightStore

# Each test takes another kind of request through a model that is streamed.
pytestmark = [pytest.mark.usefixtures("learned_once"), pytest.mark.drawn(2, of="file")]
FLUX, SDXL = "digits-flux", "digits-sdxl"
DENOISERS = {FLUX: "transformer", SDXL: "unet", "fp8": "transformer"}
PIXELS = np.random.default_rng(2).integers(0, 256, (32, 32, 3), np.uint8)


def request_of(model: str, **fields: Any) -> ImageRequest:
    sizes = {"width": 32, "height": 32, "num_inference_steps": 2, "guidance_scale": 4.0, "seed": 5}
    return ImageRequest(model=model, prompt="a handwritten seven", **(sizes | fields))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    folder = tmp_path_factory.mktemp("streamed")
    found = demo_store(folder / "store", FLUX, SDXL)
    import_model(found, "bold", DEMO / "bold", dtype="float32")
    family = family_of("FluxPipeline")
    export_fp8(DEMO / FLUX, folder / "fp8", family.denoiser_name, family.network.keeps_precision)
    externalize(found, "fp8", folder / "fp8", dtype="float32")
    import_model(found, "outline", save_controlnet(DEMO / SDXL / "unet", folder / "outline"), dtype="float32")
    return found


def device_bytes(store: WeightStore, model: str, *names: str) -> int:
    """Return the device's bytes of these components; without a name, of all that a worker builds."""
    parts = store.manifest(model).components.values()
    wanted = [part for part in parts if part.name in names or (not names and is_denoise_component(part))]
    refs = {ref.sha256: ref for part in wanted for ref in part.tensors.values()}
    return sum(-(-ref.nbytes // 512) * 512 for ref in refs.values())


_texts: dict[tuple[str, str, bool], Conditioning] = {}


class Studio:
    """An image service whose texts are encoded on the host, as by another replica."""

    def __init__(self, store: WeightStore, device: torch.device, budget_bytes: int = 2**30) -> None:
        self.host = Host(store, str(device), budget_bytes)
        thread = DeviceThread()
        self._encoder = FallbackEncoder(Host(store, "cpu"), thread)
        self.images = ImageService(self.host, self.host.settings, thread)

    async def _encode(self, request: ConditioningRequest) -> Conditioning:
        key = request.model, request.prompt, request.use_negative
        if key not in _texts:
            _texts[key] = await self._encoder.condition(request)
        return _texts[key]

    async def draw(self, request: ImageRequest) -> ImageResult:
        async with asyncio.timeout(120):
            return await self.images.generate(request, self._encode)


@pytest.mark.drawn
@pytest.mark.parametrize("model", DENOISERS)
async def test_a_denoiser_larger_than_the_budget_makes_the_same_images(
    store: WeightStore, device: torch.device, model: str
) -> None:
    request = request_of(model, n=2)
    whole = await Studio(store, device).draw(request)
    pipeline = device_bytes(store, model)
    for share in (0.6, 0.3):
        budget = int(pipeline * share)
        assert budget < device_bytes(store, model, DENOISERS[model])
        small = Studio(store, device, budget)
        found = await small.draw(request)
        for image, other in zip(found.images, whole.images, strict=True):
            assert np.array_equal(image, other)
        assert small.host.describe()["charged_bytes"] <= budget
        assert small.host.arena["resident_bytes"] <= budget
        assert small.host.evict(model) == []
        assert not +small.host.provider.leases
        assert small.host.arena["leased_bytes"] == 0
    with pytest.raises(ServiceError, match="budget"):
        await Studio(store, device, pipeline // 50).draw(request)


async def test_a_streamed_denoiser_gives_its_memory_back(store: WeightStore, device: torch.device, module: Any) -> None:
    budget = int(device_bytes(store, FLUX) * 0.3)
    small, before = Studio(store, device, budget), module.memory_allocated(device)
    async with small.host.lease(FLUX, lambda part: part.name == "transformer") as lease:
        denoiser = lease.modules["transformer"]
        assert {parameter.device.type for parameter in denoiser.parameters()} == {"meta", device.type}
        assert +small.host.provider.leases
        assert module.memory_allocated(device) - before <= budget
    small.host.evict(FLUX)
    del lease
    assert not [hook for part in denoiser.modules() for hook in (*part._forward_hooks, *part._forward_pre_hooks)]
    async with Host(store, str(device)).lease(FLUX, lambda part: part.name == "transformer") as lease:
        assert not any(parameter.is_meta for parameter in lease.modules["transformer"].parameters())
    small.host.builder.skeletons = denoiser = lease = None


async def test_requests_of_one_streamed_model_share_forwards_and_are_those_of_a_large_device(
    store: WeightStore, device: torch.device
) -> None:
    small = Studio(store, device, int(device_bytes(store, FLUX) * 0.4))
    whole = Studio(store, device)
    requests = [request_of(FLUX, seed=n, num_inference_steps=1 + n % 3) for n in range(5)]
    running = [asyncio.ensure_future(small.draw(one)) for one in requests]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED, timeout=0.05)
    running[3].cancel()
    results = await asyncio.gather(*running, return_exceptions=True)
    for request, result in zip(requests, results, strict=True):
        if isinstance(result, asyncio.CancelledError):
            continue
        assert isinstance(result, ImageResult), result
        assert np.array_equal(result.images[0], (await whole.draw(request)).images[0])
    assert small.host.describe()["leased_bytes"] == 0


ADAPTED = {
    "a LoRA": (FLUX, "bold", {"lora": [{"name": "bold", "scale": 0.8}]}),
    "a ControlNet": (SDXL, "outline", {"control": [{"name": "outline", "image": PIXELS, "scale": 0.7}]}),
    "a ControlNet and an image": (
        SDXL,
        "outline",
        {"control": [{"name": "outline", "image": PIXELS}], "init_image": PIXELS, "strength": 0.7},
    ),
}


@pytest.mark.drawn
@pytest.mark.parametrize("what", ADAPTED)
async def test_adapters_where_denoiser_and_vae_take_turns_and_where_the_denoiser_streams(
    store: WeightStore, device: torch.device, what: str
) -> None:
    model, adapter, fields = ADAPTED[what]
    request = request_of(model, **fields)
    expected = await Studio(store, device).draw(request)
    plain = await Studio(store, device).draw(request.model_copy(update={"lora": (), "control": ()}))
    assert not np.array_equal(expected.images[0], plain.images[0])
    denoiser, vae = (device_bytes(store, model, name) for name in (DENOISERS[model], "vae"))
    extra = device_bytes(store, adapter)
    for budget in (denoiser + extra + vae // 2, max(vae, extra + denoiser * 2 // 5)):
        small = Studio(store, device, budget)
        found = await small.draw(request)
        assert np.array_equal(found.images[0], expected.images[0]), budget
        assert found.switch is not None
        assert adapter in found.switch.built
        assert small.host.describe()["charged_bytes"] <= budget
        assert small.host.describe()["leased_bytes"] == 0


async def test_a_merged_lora_has_its_room_on_the_device(store: WeightStore, device: torch.device, module: Any) -> None:
    side = request_of(FLUX, lora=[{"name": "bold"}])
    merged = side.model_copy(update={"merges_lora": True})
    studio = Studio(store, device)
    expected = await studio.draw(side)
    gc.collect()  # what an earlier test left goes now, and not between the two looks
    before_bytes, before_allocated = studio.host.describe()["charged_bytes"], module.memory_allocated(device)
    found = await studio.draw(merged)
    assert np.abs(found.images[0].astype(int) - expected.images[0]).max() <= 1
    assert "bold" in found.switch.built
    manifest = store.manifest("bold")
    shapes = {name: ref.shape for part in manifest.components.values() for name, ref in part.tensors.items()}
    changed = [
        4 * shape[0] * shapes[name.replace("lora_B", "lora_A")][1] for name, shape in shapes.items() if "lora_B" in name
    ]
    merged_bytes = sum(-(-nbytes // 512) * 512 for nbytes in changed)
    assert studio.host.describe()["charged_bytes"] - before_bytes == merged_bytes > 0
    assert module.memory_allocated(device) - before_allocated == merged_bytes
    assert studio.host.evict("bold") == []
    gc.collect()
    assert module.memory_allocated(device) <= before_allocated
