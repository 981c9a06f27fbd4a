"""Pipelines that diffusers' own code runs, on a device with hardly room for them: what their calls take is counted."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from kit.hosting import Host
from kit.tiny.pipelines import make

from deployments.engines.records.protocol import EngineError
from deployments.engines.stock.engine import StockEngine
from deployments.engines.stock.footprints import CallTwin
from deployments.modules.loading import is_denoise_component
from deployments.modules.parts import WORKSPACE, workspace_pieces
from deployments.records import ImageRequest, ImageResult
from deployments.records.errors import Overloaded
from deployments.replicas.step_loop import DeviceThread
from deployments.services.image_service import ImageService
from deployments.text.fallback import FallbackEncoder
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

MODEL = "PixArtSigmaPipeline"
REQUEST = ImageRequest(
    model=MODEL,
    prompt="a cat",
    width=64,
    height=64,
    num_inference_steps=2,
    guidance_scale=4.0,
    seed=5,
    max_sequence_length=16,
    extra={"use_resolution_binning": False},
)
BETWEEN_BYTES = 512 * 1024  # latents, texts and the image, which are there between calls of modules


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        folder = tmp_path_factory.mktemp("stock")
        make(MODEL, folder / MODEL)
        store = WeightStore(folder / "store")
        externalize(store, MODEL, folder / MODEL, dtype="float32")
        return store


@pytest.fixture
def filled(device: torch.device) -> Callable[[int], None]:
    """Return a function that leaves so many bytes of the device free."""
    taken: list[torch.Tensor] = []

    def fill(free_bytes: int) -> None:
        taken.clear()
        free = torch.get_device_module(device).mem_get_info(device)[0]
        taken.append(torch.empty(free - free_bytes, dtype=torch.uint8, device=device))

    return fill


async def draw(host: Host, request: ImageRequest = REQUEST) -> ImageResult:
    texts = FallbackEncoder(Host(host.store, "cpu"), DeviceThread())  # as another replica
    result = await ImageService(host, host.settings, DeviceThread()).generate(request, texts.condition)
    assert isinstance(result, ImageResult)
    return result


async def test_a_call_has_room_or_is_refused_before_its_first_step(
    store: WeightStore, device: torch.device, filled: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = Host(store, str(device))
    whole = await draw(roomy)
    (planned,) = roomy.forwards.footprints._entry(await roomy.manifests.newest(MODEL)).calls.values()
    assert planned["vae.decode"] > planned["transformer.forward"]
    decode = sum(workspace_pieces(planned["vae.decode"]).values())
    weights = sum(-(-nbytes // 512) * 512 for nbytes in roomy.tensors_of(MODEL).values())
    del roomy
    filled(weights + decode + BETWEEN_BYTES)
    fits = Host(store, str(device), weights + decode)
    fits.forwards.memory._beside_bytes = 0.0  # what is there is for latents and texts
    for _ in range(2):
        result = await draw(fits)
        np.testing.assert_array_equal(result.images[0], whole.images[0])
    del fits
    lacks = Host(store, str(device), weights + decode // 2)
    lacks.forwards.memory._beside_bytes = 0.0
    monkeypatch.setattr(StockEngine, "step", lambda engine: pytest.fail("it has begun"))
    with pytest.raises(Overloaded, match=rf"vae, {WORKSPACE} of '{MODEL}' need .*, .* are missing"):
        await draw(lacks)
    async with lacks.lease(MODEL, is_denoise_component):  # nothing of the request is left
        pass


async def test_what_cannot_be_rehearsed_is_made_as_before(
    store: WeightStore, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = await draw(Host(store, str(device)))

    def fail(*_: Any) -> None:
        raise EngineError("of blocks of ggml")

    monkeypatch.setattr(CallTwin, "__init__", fail)
    host = Host(store, str(device))
    with caplog.at_level("INFO", "atelier.replica"):
        for _ in range(2):
            np.testing.assert_array_equal((await draw(host)).images[0], expected.images[0])
    told = [one.getMessage() for one in caplog.records if "not planned" in one.getMessage()]
    assert told == [f"the memory of {MODEL!r} is not planned: of blocks of ggml"]
    assert not any(slot.component.name == WORKSPACE for slot in host._modules.slots.values())
