"""The texts of stock pipelines are encoded by the text encoders alone, and the pictures are diffusers' to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.clips import VIDEOS
from kit.tiny.pipelines import PIPELINES, saved

from configs.cluster import WorkerConfig
from configs.model import GenerationDefaults
from deployments.engines.records.protocol import EngineError, StockRequest
from deployments.engines.stock.inputs import FIELDS
from deployments.engines.stock.known import check_class
from deployments.engines.stock.text_parts import text_parts
from deployments.engines.stock.texts import (
    ModuleRan,
    NotApart,
    TextPlanner,
    from_tensors,
    to_tensors,
    weightless_modules,
)
from deployments.modules.cache import ModuleCache
from deployments.modules.encoders import TextEncoderBuilder
from deployments.modules.loading import ComponentBuilder
from deployments.modules.stock_parts import is_stock_text
from deployments.records import ClipRequest, ImageRequest
from deployments.records.errors import ModelUnavailable
from deployments.replicas.step_loop import DeviceThread
from deployments.requests.defaults import with_image_defaults
from deployments.services.image_service import ImageService
from deployments.text.fallback import FallbackEncoder
from deployments.text.requests import Conditioning, ConditioningRequest

pytestmark = pytest.mark.slow  # imports diffusers
OpenHost = Callable[..., ModuleCache]
STEPS = 2
CLASSES = {name: one for name, one in (PIPELINES | VIDEOS).items() if text_parts(name)}
FAMILIES = ("QwenImagePipeline", "ZImagePipeline", "Flux2KleinPipeline")
APART = [name for name in CLASSES if name not in FAMILIES]


def test_classes_of_many_kinds_have_their_texts_encoded_elsewhere() -> None:
    assert len(APART) >= 15, APART


@dataclass
class Host:
    """A worker's image service and a text encoder, with caches of their own."""

    images: ImageService
    worker: ModuleCache
    texts: ModuleCache
    encoder: FallbackEncoder
    asked: list[ConditioningRequest]

    async def encode(self, request: ConditioningRequest) -> Conditioning:
        self.asked.append(request)
        return await self.encoder.condition(request)

    def built(self, cache: ModuleCache) -> set[str]:
        return {slot.component.name for slot in cache._modules.slots.values()}


@pytest.fixture
def host_of(open_host: OpenHost) -> Callable[..., Host]:
    def host(**folders: Path) -> Host:
        worker, texts = open_host(ComponentBuilder(WorkerConfig()), folders), open_host(TextEncoderBuilder(), folders)
        encoder = FallbackEncoder(texts, DeviceThread(), warnings=())
        return Host(ImageService(worker, WorkerConfig(), DeviceThread()), worker, texts, encoder, [])

    return host


def words() -> str:
    """Fresh text."""
    rng = seeded_rng()
    return " ".join("".join(rng.choice(list("abcdefghij"), 4)) for _ in range(3))


def parted(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call as a request has them."""
    named = {name: value for name, value in options.items() if name in FIELDS}
    return {**named, "extra": {name: value for name, value in options.items() if name not in named}}


async def frames_of(
    host: Host, class_name: str, prompt: str, seed: int, options: dict[str, Any], frames: list[np.ndarray]
) -> Any:
    """The result of a request; images, or the frames of a video, are put into `frames`."""
    given = {"prompt": prompt, "seed": seed, "num_inference_steps": STEPS, **parted(options)}
    if class_name in VIDEOS:
        return await host.images.make_clip(ClipRequest(model="m", **given), host.encode, lambda _: None)
    asked = ImageRequest(model="m", **given)
    request = with_image_defaults(asked, GenerationDefaults(), class_name)
    result = await host.images.generate(request, host.encode)
    frames.append(np.stack(result.images))
    return result


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", APART)
async def test_pictures_are_those_of_diffusers_to_the_bit(
    class_name: str, tmp_path: Path, host_of: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, options = CLASSES[class_name]
    if "negative_prompt" in check_class(class_name).parameters:
        options = {**options, "negative_prompt": "dull"}
    stock, host, seed = saved(build, tmp_path / "m"), host_of(m=tmp_path / "m"), int(seeded_rng().integers(2**32))
    frames: list[np.ndarray] = []
    monkeypatch.setattr(
        "deployments.services.stock_service.encode_video", lambda made, *_: frames.append(made) or b"file"
    )
    prompt = words()
    for again in (False, True):  # the second time, the encodings are there
        result = await frames_of(host, class_name, prompt, seed, options, frames)
        call = {"generator": torch.Generator("cpu").manual_seed(seed), "num_inference_steps": STEPS, **options}
        output = stock(prompt, output_type="np", **call)
        expected = output.frames[0] if class_name in VIDEOS else output.images
        np.testing.assert_array_equal(frames[-1], (np.asarray(expected) * 255).round().astype(np.uint8))
        assert frames[-1].std() > 1
        if class_name not in VIDEOS:
            assert (result.cache.hits > 0, result.cache.misses > 0) == (again, not again)
    parts = set(text_parts(class_name)) & set(host.built(host.texts))
    assert parts == host.built(host.texts)
    assert not parts & host.built(host.worker)
    assert {request.model for request in host.asked} == {"m"}


async def test_a_class_that_encodes_itself_has_its_encoders_in_the_worker(
    tmp_path: Path, host_of: Callable[..., Host]
) -> None:
    name = "StableDiffusionInstructPix2PixPipeline"
    saved(PIPELINES[name][0], tmp_path / "m")
    host, image = host_of(m=tmp_path / "m"), seeded_rng().integers(0, 256, (16, 16, 3), np.uint8)
    request = with_image_defaults(
        ImageRequest(model="m", prompt="a cat", seed=1, init_image=image, num_inference_steps=STEPS),
        GenerationDefaults(),
        name,
    )
    result = await host.images.generate(request, host.encode)
    assert host.asked == []
    assert "text_encoder" in host.built(host.worker)
    assert result.timings_ms["encode"] == 0


async def test_what_turns_out_not_to_be_told_before_is_encoded_by_the_pipeline(
    tmp_path: Path, host_of: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, host = saved(PIPELINES["AuraFlowPipeline"][0], tmp_path / "m"), host_of(m=tmp_path / "m")

    def refuse(*_: Any) -> Any:
        raise NotApart("a module runs before the text is encoded")

    monkeypatch.setattr(TextPlanner, "next_text", refuse)
    options, frames = PIPELINES["AuraFlowPipeline"][1], list[np.ndarray]()
    await frames_of(host, "AuraFlowPipeline", "a cat", 3, options, frames)
    expected = stock(
        "a cat", generator=torch.Generator("cpu").manual_seed(3), num_inference_steps=STEPS, output_type="np", **options
    )
    np.testing.assert_array_equal(frames[-1], (expected.images * 255).round().astype(np.uint8))
    assert host.asked == []
    assert {"text_encoder", "transformer"} <= host.built(host.worker)


async def test_models_that_share_their_encoder_share_encodings(tmp_path: Path, host_of: Callable[..., Host]) -> None:
    build, options = PIPELINES["PixArtAlphaPipeline"]
    saved(build, tmp_path / "m")
    other = build()
    first = saved(build, tmp_path / "unused")
    other.register_modules(text_encoder=first.text_encoder)  # and another transformer
    torch.manual_seed(1)
    for parameter in other.transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    other.save_pretrained(tmp_path / "n")
    host, frames = host_of(m=tmp_path / "m", n=tmp_path / "n"), list[np.ndarray]()
    await frames_of(host, "PixArtAlphaPipeline", "a cat", 3, options, frames)
    request = with_image_defaults(
        ImageRequest(model="n", prompt="a cat", seed=3, num_inference_steps=STEPS, **parted(options)),
        GenerationDefaults(),
        "PixArtAlphaPipeline",
    )
    result = await host.images.generate(request, host.encode)
    assert (result.cache.hits, result.cache.misses) == (1, 0)
    assert (np.stack(result.images) != frames[0]).any()
    changed = request.model_copy(update={"prompt": "a dog"})
    assert (await host.images.generate(changed, host.encode)).cache.misses == 1


async def test_a_text_encoder_that_fails_is_the_requests_error_and_leaves_nothing_leased(
    tmp_path: Path, host_of: Callable[..., Host]
) -> None:
    saved(PIPELINES["AuraFlowPipeline"][0], tmp_path / "m")
    host = host_of(m=tmp_path / "m")

    async def fail(request: ConditioningRequest) -> Conditioning:
        raise ModelUnavailable("no text encoder answers", "model")

    request = with_image_defaults(
        ImageRequest(model="m", prompt="a cat", seed=1, num_inference_steps=STEPS),
        GenerationDefaults(),
        "AuraFlowPipeline",
    )
    with pytest.raises(ModelUnavailable, match="no text encoder answers"):
        await host.images.generate(request, fail)
    assert not any(slot.leases for slot in host.worker._modules.slots.values())
    assert host.images.num_running == 0


async def test_a_worker_alone_encodes_before_it_leases_the_rest(tmp_path: Path, open_host: OpenHost) -> None:
    stock = saved(PIPELINES["AuraFlowPipeline"][0], tmp_path / "m")
    cache, device = open_host(ComponentBuilder(WorkerConfig()), {"m": tmp_path / "m"}), DeviceThread()
    encoder, leased = FallbackEncoder(cache, device), list[set[str]]()

    async def encode(request: ConditioningRequest) -> Conditioning:
        leased.append({slot.component.name for slot in cache._modules.slots.values() if slot.leases})
        return await encoder.condition(request)

    options = PIPELINES["AuraFlowPipeline"][1]
    request = with_image_defaults(
        ImageRequest(model="m", prompt="a cat", seed=5, num_inference_steps=STEPS, **parted(options)),
        GenerationDefaults(),
        "AuraFlowPipeline",
    )
    result = await ImageService(cache, WorkerConfig(), device).generate(request, encode, encode_first=True)
    made = stock(
        "a cat", generator=torch.Generator("cpu").manual_seed(5), num_inference_steps=STEPS, output_type="np", **options
    )
    np.testing.assert_array_equal(np.stack(result.images), (made.images * 255).round().astype(np.uint8))
    assert leased == [set()]
    assert any("the worker encoded the text itself" in warning for warning in result.warnings)


def same(found: Any, result: Any) -> bool:
    if isinstance(result, torch.Tensor):
        return found.dtype == result.dtype and torch.equal(found, result)
    if isinstance(result, list | tuple):
        return type(found) is type(result) and all(map(same, found, result)) and len(found) == len(result)
    return bool(found == result)


def test_results_of_any_form_travel_as_tensors() -> None:
    rng = seeded_rng()
    one, two = (torch.from_numpy(rng.standard_normal((2, 3), np.float32)) for _ in range(2))
    for result in (one, (one, None, two), [one, [two]], (None, [one.half()], ("a", 3, True)), ()):
        found = from_tensors(to_tensors(result), torch.device("cpu"))
        assert same(found, result)
    back = from_tensors(to_tensors(one), torch.device("cpu"))
    back.zero_()
    assert one.abs().sum() > 0
    with pytest.raises(TypeError, match="encode_prompt returned a object"):
        to_tensors((one, object()))


@pytest.mark.parametrize(
    ("class_name", "parts"),
    [
        ("WanPipeline", {"text_encoder"}),
        ("StableDiffusionXLPAGPipeline", {"text_encoder", "text_encoder_2"}),
        ("HiDreamImagePipeline", {"text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4"}),
        ("QwenImageEditPlusPipeline", set()),  # its encoder sees the image
        ("StableDiffusionGLIGENPipeline", set()),  # encodes phrases as well
        ("TextToVideoZeroPipeline", set()),  # changes its denoiser before
        ("DiTPipeline", set()),
        ("StableCascadeCombinedPipeline", set()),
    ],
)
def test_what_encodes_the_text_is_read_from_the_source(class_name: str, parts: set[str]) -> None:
    assert text_parts(class_name) == parts


async def test_a_request_that_the_class_refuses_is_refused_before_anything_is_built(
    tmp_path: Path, host_of: Callable[..., Host]
) -> None:
    saved(PIPELINES["AuraFlowPipeline"][0], tmp_path / "m")
    host = host_of(m=tmp_path / "m")
    planner = await host.images._stock._planner_of(await host.worker.manifests.find_version("m"))
    with pytest.raises(EngineError, match="AuraFlowPipeline: `height` and `width` have to be divisible by"):
        planner.next_text(StockRequest("r", 1, "a cat", fields={"height": 13, "width": 13}), {})
    assert host.built(host.worker) == set()
    manifest = await host.worker.manifests.find_version("m")
    assert [name for name, one in manifest.components.items() if is_stock_text(one)] == ["text_encoder"]


async def test_modules_without_weights_are_where_the_others_are_and_never_run(
    tmp_path: Path, host_of: Callable[..., Host]
) -> None:
    """A pipeline takes the device of its first module for its own."""
    stock = saved(PIPELINES["AuraFlowPipeline"][0], tmp_path / "m")
    host = host_of(m=tmp_path / "m")
    manifest = await host.worker.manifests.find_version("m")
    planner = await host.images._stock._planner_of(manifest)
    folder, there = host.worker.skeleton(manifest), torch.device("cuda", 0)
    text = {"text_encoder": manifest.components["text_encoder"]}
    blank = weightless_modules(text, folder, there)
    encoder = blank["text_encoder"]
    assert (encoder.device, encoder.dtype, encoder.config.d_model) == (there, torch.float32, 16)
    assert isinstance(encoder, type(stock.text_encoder))
    assert {one.is_meta for one in encoder.parameters() if one.numel() > 1024} == {True}  # small ones are zeros
    pipeline = planner.model.over({}, blank).create_pipeline()
    assert pipeline.device == there
    with pytest.raises(ModuleRan):
        encoder(torch.ones((1, 4), dtype=torch.long))
