"""An upscaler on a device: the images of the host, or of its rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from kit.hosting import Host
from kit.seeding import seeded_rng
from safetensors.torch import save_file
from unit.deployments.engines.upscaler_files import enlarged, rrdb

from deployments.records import ImageRequest, ImageResult
from deployments.replicas.step_loop import DeviceThread
from deployments.requests.defaults import as_upscale
from deployments.services.image_service import ImageService
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore


async def test_an_image_is_enlarged_where_the_weights_are(device: torch.device, tmp_path: Path) -> None:
    save_file(tensors := rrdb(num_read=12), tmp_path / "x2.safetensors")
    store = WeightStore(tmp_path / "store")
    externalize(store, "x2", tmp_path / "x2.safetensors")
    host = Host(store, str(device))
    image = seeded_rng().integers(0, 256, (22, 30, 3), dtype=np.uint8)
    request, _ = as_upscale(ImageRequest(model="x2", prompt=" ", init_image=image))

    async def no_text(_: Any) -> Any:
        raise AssertionError("an upscaler has no text")

    result = await ImageService(host, host.settings, DeviceThread()).generate(request, no_text)
    assert isinstance(result, ImageResult)
    assert result.switch is not None
    assert result.switch.device_bytes > 0
    most = 1 if device.type == "sim" else 2
    assert np.abs(result.images[0] - enlarged(tensors, image).clip(0, 255).round()).max() <= most
