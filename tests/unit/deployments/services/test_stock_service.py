"""Images by pipelines without a family, through the image service: diffusers' own, from weights of the store."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.parts import clip, clip_tokenizer, unet, vae
from kit.tiny.pipelines import PIPELINES, make, saved
from peft.tuners.lora import LoraLayer
from PIL import Image
from safetensors.torch import save_file
from unit.deployments.engine_loops import stream_images
from unit.deployments.engines.diffusion.ip_adapter_files import write_ip_adapter

from configs.cluster import ClusterConfig, WorkerConfig
from configs.model import GenerationDefaults
from deployments.engines.stock.inputs import FIELDS
from deployments.local import LocalModels
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import ComponentBuilder
from deployments.records import ImageProgress, ImagePromptUse, ImageRequest, ImageResult
from deployments.records.errors import InvalidRequest
from deployments.replicas.step_loop import DeviceThread
from deployments.requests.defaults import with_image_defaults
from deployments.services.image_service import EncodeText, ImageService
from deployments.text.fallback import FallbackEncoder

pytestmark = pytest.mark.slow  # imports diffusers
OpenHost = Callable[..., ModuleCache]
LCM, LDM = "LatentConsistencyModelPipeline", "LDMTextToImagePipeline"


def service_of(cache: ModuleCache) -> ImageService:
    return ImageService(cache, WorkerConfig(), DeviceThread())


def encoder_of(service: ImageService) -> EncodeText:
    """A text encoder in the service's own cache, that has encoded nothing yet."""
    return FallbackEncoder(service._module_cache, DeviceThread(), warnings=()).condition


def request_of(class_name: str, **more: Any) -> ImageRequest:
    asked = ImageRequest(model=class_name, prompt="a cat", **more)
    return with_image_defaults(asked, GenerationDefaults(), class_name)


def stock_images(pipeline: Any, seed: int | None, **options: Any) -> np.ndarray:
    generator = torch.Generator("cpu").manual_seed(seed or 0)
    found = pipeline("a cat", generator=generator, output_type="np", **options).images
    return (found * 255).round().astype(np.uint8)


@pytest.fixture
def lcm(tmp_path: Path, open_host: OpenHost) -> tuple[Any, ModuleCache]:
    stock = make(LCM, tmp_path / LCM)
    return stock, open_host(ComponentBuilder(WorkerConfig()), {LCM: tmp_path / LCM})


async def test_images_are_those_of_diffusers_and_steps_are_told(lcm: Any) -> None:
    stock, cache = lcm
    service, rng = service_of(cache), seeded_rng()
    request = request_of(
        LCM, seed=int(rng.integers(2**32)), width=16, height=24, n=2, num_inference_steps=3, reports_steps=True,
        extra={"original_inference_steps": 30}, partial_images=1,
    )  # fmt: skip
    told: list[ImageProgress] = []

    def on_progress(progress: ImageProgress) -> None:
        assert service.num_running == 1
        told.append(progress)

    result = await service.generate(request, encoder_of(service), on_progress)
    assert isinstance(result, ImageResult)
    assert service.num_running == 0
    assert [(one.step, one.num_steps) for one in told] == [(1, 3), (2, 3), (3, 3)][: len(told)]
    assert len(told) >= 2
    expected = stock_images(
        stock, request.seed, width=16, height=24, num_images_per_prompt=2, num_inference_steps=3,
        original_inference_steps=30,
    )  # fmt: skip
    np.testing.assert_array_equal(np.stack(result.images), expected)
    assert (result.seed, result.num_inference_steps) == (request.seed, 3)
    assert any("partial_images: none were made" in warning for warning in result.warnings)
    assert result.switch is not None
    assert set(result.switch.built) == {"vae", "unet"}


@pytest.mark.drawn
@pytest.mark.parametrize(("syntax", "prompt"), [("weighted", "(a:1.2) [cat]"), ("compel", "a cat++")])
async def test_weights_of_a_prompt_are_left_out_and_told(lcm: Any, syntax: str, prompt: str) -> None:
    stock, cache = lcm
    service = service_of(cache)
    asked = request_of(LCM, seed=3, width=32, height=32, num_inference_steps=2, prompt_syntax=syntax)
    asked = asked.model_copy(update={"prompt": prompt})
    result = await service.generate(asked, encoder_of(service), lambda progress: None)
    assert isinstance(result, ImageResult)
    expected = stock_images(stock, 3, width=32, height=32, num_inference_steps=2)
    assert np.abs(np.stack(result.images).astype(int) - expected).max() <= 1
    assert f"weights in the prompt had no effect: {LCM} reads it with encoders that take none" in result.warnings


def test_an_image_is_a_prompt_through_the_store(tmp_path: Path) -> None:
    stock = make(LCM, tmp_path / "model")
    folder = write_ip_adapter(tmp_path / "look", stock.unet)
    config = {
        "store": {"path": str(tmp_path / "store")},
        "models": [{"id": LCM, "path": str(tmp_path / "model"), "dtype": "float32"}],
        "adapters": [{"id": "look", "path": str(folder), "base": [LCM]}],
    }
    models = LocalModels(ClusterConfig.model_validate(config))
    image = seeded_rng().integers(0, 256, (40, 32, 3), dtype=np.uint8)
    asked: dict[str, Any] = {"model": LCM, "prompt": "a cat", "seed": 3, "width": 32, "height": 32}
    asked["num_inference_steps"] = 2
    [plain] = models.generate(ImageRequest(**asked)).images
    use = ImagePromptUse(name="look", image=image, scale=0.8)
    [found] = models.generate(ImageRequest(**asked, ip_adapter=(use,))).images
    stock.load_ip_adapter(str(folder), subfolder="", weight_name="ip-adapter.safetensors")
    stock.set_ip_adapter_scale(0.8)
    rest = {"width": 32, "height": 32, "num_inference_steps": 2, "ip_adapter_image": Image.fromarray(image)}
    [expected] = stock_images(stock, 3, **rest)
    assert np.abs(found.astype(int) - expected).max() <= 1
    assert np.abs(found.astype(int) - plain).max() > 3
    with pytest.raises(InvalidRequest, match=r"ip_adapter: diffusers' own code runs a .*, and takes none here"):
        request_of("PixArtSigmaPipeline", ip_adapter=(use,))


async def test_what_a_request_leaves_open_is_left_to_the_class(tmp_path: Path, open_host: OpenHost) -> None:
    stock, request = make(LDM, tmp_path / LDM), request_of(LDM, seed=3)
    assert (request.num_inference_steps, request.width, request.guidance_scale) == (50, None, None)
    service = service_of(open_host(ComponentBuilder(WorkerConfig()), {LDM: tmp_path / LDM}))
    result = await service.generate(request, encoder_of(service))
    np.testing.assert_array_equal(np.stack(result.images), stock_images(stock, 3))


async def test_a_second_request_builds_and_reads_nothing(lcm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(lcm[1])
    first = await service.generate(request_of(LCM, seed=1, width=16, height=16), encoder_of(service))
    monkeypatch.setattr(
        "deployments.services.stock_service.StockModel", lambda *_: pytest.fail("the pipeline is loaded again")
    )
    again = await service.generate(request_of(LCM, seed=1, width=16, height=16), encoder_of(service))
    np.testing.assert_array_equal(first.images[0], again.images[0])
    assert again.switch is not None
    assert not again.switch.built


async def test_a_text_encoder_that_a_family_has_too_is_a_module_of_its_own(tmp_path: Path, open_host: OpenHost) -> None:
    torch.manual_seed(0)
    shared = {"vae": vae().eval(), "text_encoder": clip().eval(), "tokenizer": clip_tokenizer()}
    none = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    family = diffusers.StableDiffusionPipeline(
        **shared, unet=unet(sample_size=8).eval(), scheduler=diffusers.DDIMScheduler(steps_offset=1), **none
    )
    lcm = diffusers.LatentConsistencyModelPipeline(
        **shared, unet=unet(time_cond_proj_dim=32).eval(), scheduler=diffusers.LCMScheduler(), **none
    )
    names = {"StableDiffusionPipeline": family, LCM: lcm}
    for name, pipeline in names.items():
        pipeline.save_pretrained(tmp_path / name)
    cache = open_host(ComponentBuilder(WorkerConfig()), {name: tmp_path / name for name in names})
    device = DeviceThread()
    service, encoder = ImageService(cache, WorkerConfig(), device), FallbackEncoder(cache, device)
    for _ in range(2):
        for name, pipeline in names.items():
            request = request_of(name, seed=5, width=16, height=16, num_inference_steps=2, guidance_scale=3.0)
            result = await service.generate(request, encoder.condition, encode_first=True)
            expected = stock_images(pipeline, 5, width=16, height=16, num_inference_steps=2, guidance_scale=3.0)
            assert np.abs(np.stack(result.images).astype(int) - expected).max() <= 1
    kept = [slot.component for slot in cache._modules.slots.values() if slot.component.name in ("vae", "text_encoder")]
    assert sorted(one.name for one in kept) == ["text_encoder", "text_encoder", "vae"]


async def test_a_request_that_is_left_ends_and_leases_nothing(lcm: Any) -> None:
    cache = lcm[1]
    service = service_of(cache)
    request = request_of(LCM, seed=1, width=16, height=16, num_inference_steps=40, reports_steps=True)
    async with stream_images(service, request, encoder_of(service)) as stream:
        piece = await anext(stream)
        assert isinstance(piece, ImageProgress)
        assert piece.step < 40
    assert service.num_running == 0
    assert not any(slot.leases for slot in cache._modules.slots.values())
    result = await service.generate(request_of(LCM, seed=1, width=16, height=16), encoder_of(service))
    assert isinstance(result, ImageResult)


async def test_requests_for_two_stock_models_take_turns_on_one_device(tmp_path: Path, open_host: OpenHost) -> None:
    stock = {name: make(name, tmp_path / name) for name in (LCM, LDM)}
    service = service_of(open_host(ComponentBuilder(WorkerConfig()), {name: tmp_path / name for name in stock}))
    requests = [
        request_of(name, seed=seed, num_inference_steps=3, **PIPELINES[name][1]) for name in stock for seed in (1, 2)
    ]
    results = await asyncio.gather(*(service.generate(one, encoder_of(service)) for one in requests))
    for request, result in zip(requests, results, strict=True):
        options = PIPELINES[request.model][1]
        expected = stock_images(stock[request.model], request.seed, num_inference_steps=3, **options)
        np.testing.assert_array_equal(np.stack(result.images), expected)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"extra": {"guidance": 3}}, f"extra: {LCM} takes no 'guidance'; it takes prompt"),
        ({"extra": {"clip_skip": "two"}}, 'extra: clip_skip is "two", expected int | None'),
        ({"images": {"control_image": np.zeros((8, 8, 3), np.uint8)}}, "control_image: .* takes no such image"),
        ({"strength": 0.5}, f"strength: {LCM} takes none"),
        ({"scheduler": "NoScheduler"}, "scheduler"),
    ],
)
async def test_what_the_class_does_not_take_is_refused_with_what_it_takes(lcm: Any, more: Any, words: str) -> None:
    service = service_of(lcm[1])
    with pytest.raises(InvalidRequest, match=words.replace("|", r"\|")):
        await service.generate(request_of(LCM, width=16, height=16, **more), encoder_of(service))
    assert service.num_running == 0


async def test_a_tokenizer_that_cannot_be_loaded_is_told_and_tried_again(
    tmp_path: Path, open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(LCM, tmp_path / LCM)
    cache = open_host(ComponentBuilder(WorkerConfig()), {LCM: tmp_path / LCM})
    service, request = service_of(cache), request_of(LCM, seed=1, width=16, height=16)
    folder = cache.skeleton(await cache.manifests.find_version(LCM)) / "tokenizer"
    shutil.move(folder, tmp_path / "kept")
    with pytest.raises(InvalidRequest, match="tokenizer: there is no tokenizer"):
        await service.generate(request, encoder_of(service))
    shutil.move(tmp_path / "kept", folder)
    assert isinstance(await service.generate(request, encoder_of(service)), ImageResult)


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", ["ChromaPipeline", "CogView4Pipeline", "StableDiffusionPAGPipeline"])
async def test_previews_are_the_latents_on_the_way_decoded_as_the_class_does(
    class_name: str, tmp_path: Path, open_host: OpenHost
) -> None:
    build, options = PIPELINES[class_name]

    def built() -> Any:
        pipeline = build()
        if class_name == "StableDiffusionPAGPipeline":  # of a kind that scales the noise before the first step
            pipeline.scheduler = diffusers.EulerDiscreteScheduler()
        return pipeline

    stock, steps = saved(built, tmp_path / class_name), 4
    service = service_of(open_host(ComponentBuilder(WorkerConfig()), {class_name: tmp_path / class_name}))
    given: dict[str, Any] = {name: value for name, value in options.items() if name in FIELDS}
    given["extra"] = {name: value for name, value in options.items() if name not in FIELDS}
    seed = int(seeded_rng().integers(2**32))
    request = request_of(class_name, seed=seed, num_inference_steps=steps, partial_images=2, **given)
    told: list[ImageProgress] = []
    result = await service.generate(request, encoder_of(service), told.append)
    assert [(one.step, one.preview_index) for one in told] == [(1, 0), (3, 1)]
    assert not any("partial_images" in warning for warning in result.warnings)
    latents: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: Any, given: dict[str, Any]) -> dict[str, Any]:
        latents.append(given["latents"].clone())
        return {}

    expected = stock_images(stock, request.seed, num_inference_steps=steps, callback_on_step_end=keep, **options)
    np.testing.assert_array_equal(np.stack(result.images), expected)
    for progress, made in zip(told, (latents[0], latents[2]), strict=True):
        np.testing.assert_array_equal(np.stack(progress.previews), decoded(stock, made, **options))
    assert (told[0].previews[0] != result.images[0]).any()


def decoded(pipeline: Any, latents: torch.Tensor, **options: Any) -> np.ndarray:
    """Return the image that a pipeline makes of latents, by the formulas of its class."""
    vae, config = pipeline.vae, pipeline.vae.config
    if type(pipeline).__name__ == "ChromaPipeline":
        latents = pipeline._unpack_latents(latents, options["height"], options["width"], pipeline.vae_scale_factor)
        latents = latents / config.scaling_factor + config.shift_factor
    else:
        latents = latents / config.scaling_factor
    with torch.no_grad():
        images = vae.decode(latents, return_dict=False)[0]
    return (pipeline.image_processor.postprocess(images, output_type="np") * 255).round().astype(np.uint8)


async def test_a_lora_of_the_text_encoder_is_where_the_text_is_encoded(
    lcm: Any, tmp_path: Path, open_host: OpenHost
) -> None:
    stock, _ = lcm
    folder, generator, tensors = tmp_path / "style", torch.Generator().manual_seed(5), {}
    folder.mkdir()
    for component in ("unet", "text_encoder"):
        for path, layer in getattr(stock, component).named_modules():
            if isinstance(layer, torch.nn.Linear):
                sides = {"A": (2, layer.in_features), "B": (layer.out_features, 2)}
                named = {f"{component}.{path}.lora_{half}.weight": one for half, one in sides.items()}
                tensors |= {name: torch.randn(sides, generator=generator) / 3 for name, sides in named.items()}
    save_file(tensors, folder / "pytorch_lora_weights.safetensors")
    cache = open_host(ComponentBuilder(WorkerConfig()), {LCM: tmp_path / LCM, "style": folder})
    service, given = service_of(cache), {"seed": 3, "width": 32, "height": 32, "num_inference_steps": 2}
    made = [
        await service.generate(request_of(LCM, **given, lora=lora), encoder_of(service))
        for lora in ((), ({"name": "style", "scale": 0.7, "text_scale": 0.5},), ())
    ]
    images = [np.stack(one.images) for one in made]
    options = {"width": 32, "height": 32, "num_inference_steps": 2}
    for plain in (images[0], images[2]):
        np.testing.assert_array_equal(plain, stock_images(stock, 3, **options))
    stock.load_lora_weights(folder, adapter_name="style")
    for component, scale in (("unet", 0.7), ("text_encoder", 0.5)):
        for part in getattr(stock, component).modules():
            if isinstance(part, LoraLayer):
                part.set_scale("style", scale)
    expected = stock_images(stock, 3, **options)
    assert np.abs(images[1].astype(int) - expected).max() <= 1
    assert (images[1] != images[0]).any()
    assert not any(slot.leases for slot in cache._modules.slots.values())
