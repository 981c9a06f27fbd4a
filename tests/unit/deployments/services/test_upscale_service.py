"""Enlarged images through the image service, from weights of the store, and through the models of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.seeding import seeded_rng
from PIL import Image
from safetensors.torch import save_file
from unit.deployments.engine_loops import AskedModels
from unit.deployments.engines.upscaler_files import compact, enlarged, rrdb

from cluster.registry.manifests import variant_of
from configs.cluster import ClusterConfig, LimitsConfig, WorkerConfig
from deployments.local import LocalModels
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import ComponentBuilder
from deployments.pipelines.pipelines import Pipelines
from deployments.pipelines.records import PipelineRequest, TensorValue
from deployments.preflight import check_config
from deployments.records import ImageProgress, ImageRequest, ImageResult, LoraUse
from deployments.records.errors import InvalidRequest, ModelUnavailable
from deployments.replicas.step_loop import DeviceThread
from deployments.requests.defaults import as_upscale
from deployments.requests.limits import check_upscale
from deployments.services import upscale_service
from deployments.services.image_service import ImageService
from deployments.text.requests import Conditioning

pytestmark = pytest.mark.slow  # imports diffusers
OpenHost = Callable[..., ModuleCache]


def image_of(height: int, width: int) -> np.ndarray:
    return seeded_rng().integers(0, 256, (height, width, 3), dtype=np.uint8)


def request_of(image: np.ndarray, **more: Any) -> ImageRequest:
    return as_upscale(ImageRequest(model="larger", prompt=" ", init_image=image, **more))[0]


async def no_text(_: Any) -> Conditioning:
    raise AssertionError("an upscaler has no text")


@pytest.fixture
def larger(tmp_path: Path, open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ImageService, Any]:
    monkeypatch.setattr(upscale_service, "core_of", lambda *_, **__: 16)
    save_file(tensors := compact(), tmp_path / "larger.safetensors")
    cache = open_host(ComponentBuilder(WorkerConfig()), {"larger": tmp_path / "larger.safetensors"})
    device = DeviceThread()
    return tensors, ImageService(cache, WorkerConfig(), device), device


async def test_an_image_is_enlarged_in_tiles_that_are_told(larger: Any) -> None:
    tensors, service, _ = larger
    image, told = image_of(20, 36), list[ImageProgress]()
    result = await service.generate(request_of(image, reports_steps=True), no_text, told.append)
    assert isinstance(result, ImageResult)
    expected = enlarged(tensors, image).clip(0, 255).round()
    assert np.abs(result.images[0] - expected).max() <= 1
    assert [(one.step, one.num_steps) for one in told] == [(number, 6) for number in range(1, 7)]
    assert result.seed is None
    assert {"switch", "upscale", "total"} == set(result.timings_ms)
    assert (await service.generate(request_of(image), no_text)).switch.built == ()
    assert service.num_running == 0


async def test_others_have_the_device_between_two_tiles_and_who_leaves_ends_it(larger: Any) -> None:
    _, service, device = larger
    order, begun = list[str](), asyncio.Event()

    def told(progress: ImageProgress) -> None:
        order.append("tile")
        begun.set()

    running = asyncio.ensure_future(service.generate(request_of(image_of(64, 64), reports_steps=True), no_text, told))
    await begun.wait()
    await device.run_work(lambda: order.append("other"))
    assert order.index("other") < 16  # of 16 tiles
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (service.num_running, order.count("tile") < 16) == (0, True)


def test_what_an_upscaler_does_not_take() -> None:
    image, limits = image_of(8, 8), LimitsConfig()
    for name, value in {"width": 64, "lora": (LoraUse(name="x"),), "extra": {"x": 1}, "n": 2}.items():
        with pytest.raises(InvalidRequest, match=f"^{name}: "):
            request_of(image, **{name: value})
    asked = ImageRequest(model="larger", prompt="a cat", init_image=image, seed=3, strength=0.5, scaled_from=(90, 90))
    request, warnings = as_upscale(asked)
    assert (request.prompt, request.width, request.height) == (" ", 8, 8)
    assert warnings == (
        "without effect on an upscaler: prompt, strength",
        "the image of 90x90 pixels was scaled to 8x8: the largest allowed",
    )
    with pytest.raises(InvalidRequest, match="an upscaler enlarges an image, and the request has none"):
        check_upscale(as_upscale(ImageRequest(model="larger", prompt="a cat"))[0], limits, 4)
    with pytest.raises(InvalidRequest, match="64000000 pixels, 4 times 2000x2000, at most 36000000 are allowed"):
        check_upscale(request_of(np.zeros((2000, 2000, 3), np.uint8)), limits, 4)
    with pytest.raises(InvalidRequest, match="at most 4194304 are allowed"):
        check_upscale(request_of(np.zeros((2000, 4000, 3), np.uint8)), limits, 1)


def models_of(path: Path, **more: Any) -> LocalModels:
    config = {"store": {"path": str(path.parent / "store")}, "models": [{"id": "larger", "path": str(path)}], **more}
    return LocalModels(ClusterConfig.model_validate(config))


def test_a_float16_network_by_old_names_in_one_process(tmp_path: Path) -> None:
    tensors = {name: one.half() for name, one in rrdb().items()}
    save_file({f"params.{name}": one for name, one in tensors.items()}, tmp_path / "x.safetensors")
    models, image, steps = models_of(tmp_path / "x.safetensors"), image_of(9, 14), list[tuple[int, int]]()
    asked = ImageRequest(model="larger", prompt="a cat", init_image=image)
    result = models.generate(asked, lambda *step: steps.append(step))
    assert result.images[0].shape == (36, 56, 3)
    # A processor without float16 has it in float32; one that has it rounds.
    assert np.abs(result.images[0] - enlarged(tensors, image).clip(0, 255)).max() <= 3
    assert steps == [(1, 1)]
    assert result.warnings == ("without effect on an upscaler: prompt",)


def test_tensors_of_several_types_are_refused(tmp_path: Path) -> None:
    tensors = rrdb()
    save_file(tensors | {"conv_hr.bias": tensors["conv_hr.bias"].half()}, tmp_path / "x.safetensors")
    asked = ImageRequest(model="larger", prompt=" ", init_image=image_of(8, 8))
    with pytest.raises(ModelUnavailable, match=r"an upscaler with tensors of F16, F32; expected one of BF16, F16, F32"):
        models_of(tmp_path / "x.safetensors").generate(asked)


def test_the_scale_is_known_of_the_stored_model(tmp_path: Path, open_host: OpenHost) -> None:
    save_file(rrdb(num_read=12), tmp_path / "x2.safetensors")
    cache = open_host(ComponentBuilder(WorkerConfig()), {"x2": tmp_path / "x2.safetensors"})
    manifest = asyncio.run(cache.manifests.newest("x2"))
    assert variant_of(manifest, tmp_path) == {"scale": 2}


async def test_an_upscaler_is_a_stage(tmp_path: Path) -> None:
    save_file(tensors := compact(), tmp_path / "x.safetensors")
    file = tmp_path / "c.yaml"
    file.write_text(
        """
store: {path: store}
models: [{id: larger, path: x.safetensors, dtype: float32}]
pipelines:
  - id: twice
    inputs: {picture: image}
    stages:
      - {name: first, model: larger, inputs: {image: $picture}}
      - {name: fitting, function: resize_image, inputs: {image: $first, width: 24, height: 16}}
    outputs: {image: $fitting, full: $first}
"""
    )
    config, sources, problems = check_config(file)
    assert (config is not None, problems) == (True, [])
    assert config is not None
    records = {id_: source.record for id_, source in sources.items()}
    ask: Any = AskedModels(LocalModels(config))
    pipelines = Pipelines(config.pipelines, ask, SimpleNamespace(records=records), limits=LimitsConfig())
    pictures = np.stack([image_of(8, 12), image_of(8, 12)])
    result = await pipelines.run_pipeline(
        PipelineRequest("twice", {"picture": TensorValue("picture", "UINT8", pictures)})
    )
    found = np.asarray(result.outputs["full"].data)
    for picture, one, small in zip(pictures, found, np.asarray(result.outputs["image"].data), strict=True):
        assert np.abs(one - enlarged(tensors, picture).clip(0, 255).round()).max() <= 1
        assert np.array_equal(small, np.asarray(Image.fromarray(one).resize((24, 16), Image.Resampling.LANCZOS)))
