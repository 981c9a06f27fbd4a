"""From a client's request to diffusers' own frames: the HTTP edge over a real worker's image service, without Ray."""

from __future__ import annotations

import base64
import io
import struct
import wave
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.classes import assembled
from kit.tiny.clips import wan
from kit.tiny.further import FURTHER_CASES
from kit.tiny.pipelines import PIPELINES, saved
from PIL import Image
from safetensors.torch import load_file, save_file
from unit.deployments.engine_loops import stream_images
from unit.deployments.ingress.http_fakes import STATUSES, Replicas
from unit.deployments.ingress.jobs.job_fakes import ingress_over, owner_in

from configs.cluster import WorkerConfig
from configs.model import AdapterConfig, GenerationDefaults
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import ComponentBuilder
from deployments.replicas.step_loop import DeviceThread
from deployments.services.image_service import ImageService
from deployments.text.fallback import FallbackEncoder

pytestmark = [pytest.mark.slow, pytest.mark.drawn(2, of="file")]  # slow: imports diffusers
PIX2PIX = "StableDiffusionInstructPix2PixPipeline"
VARY = "StableAudio3AudioToAudioPipeline"


class Worker(Replicas):
    """The registry of the fakes, and a worker whose image service is real."""

    def __init__(self, cache: ModuleCache, classes: dict[str, str]) -> None:
        super().__init__()
        self._images = ImageService(cache, WorkerConfig(), DeviceThread())
        self._encode = FallbackEncoder(cache, DeviceThread(), warnings=()).condition
        for name, class_name in classes.items():
            entry = STATUSES["flux"].entry.model_copy(update={"defaults": GenerationDefaults()})
            self.states[name] = replace(STATUSES["flux"], id=name, class_name=class_name, entry=entry)

    async def on_stream_images(self, request: Any) -> AsyncIterator[Any]:
        async with stream_images(self._images, request, self._encode) as pieces:
            async for piece in pieces:
                yield piece

    async def on_stream_clip(self, request: Any) -> AsyncIterator[Any]:
        told: list[Any] = []
        result = await self._images.make_clip(request, self._encode, told.append)
        for piece in (*told, result):
            yield piece


def write_style(folder: Path, pipeline: Any) -> None:
    """Write a LoRA of a pipeline's transformer."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(5), {}
    for path, layer in pipeline.transformer.named_modules():
        if isinstance(layer, torch.nn.Linear):
            sides = {"A": (2, layer.in_features), "B": (layer.out_features, 2)}
            tensors |= {
                f"transformer.{path}.lora_{half}.weight": torch.randn(one, generator=generator)
                for half, one in sides.items()
            }
    save_file(tensors, folder / "pytorch_lora_weights.safetensors")


@pytest.fixture
def stock(tmp_path: Path) -> dict[str, Any]:
    builders = {"wan": wan, "pix": PIPELINES[PIX2PIX][0]}
    builders["vary"] = lambda: assembled(VARY, **FURTHER_CASES[VARY].parts())
    return {name: saved(build, tmp_path / name) for name, build in builders.items()}


@pytest.fixture
async def client(
    stock: dict[str, Any], tmp_path: Path, open_host: Callable[..., ModuleCache]
) -> AsyncIterator[openai.AsyncOpenAI]:
    write_style(tmp_path / "style", stock["wan"])
    cache = open_host(ComponentBuilder(WorkerConfig()), {name: tmp_path / name for name in (*stock, "style")})
    worker = Worker(cache, {"wan": "WanPipeline", "pix": PIX2PIX, "vary": VARY})
    worker.states["style"] = replace(
        STATUSES["flux"],
        id="style",
        kind="adapter",
        class_name=None,
        entry=AdapterConfig(id="style", path="/", base=("wan",)),
    )
    owner = owner_in(tmp_path)
    async with ingress_over(worker, owner, lambda _: {}) as http:
        yield openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)
    owner.close()


async def test_a_video_of_the_openai_client_has_the_frames_of_diffusers(
    client: openai.AsyncOpenAI, stock: dict[str, Any]
) -> None:
    seed = int(seeded_rng().integers(2**32))
    video = await client.videos.create_and_poll(
        model="wan", prompt="a cat", seconds="0.5", size="32x16", poll_interval_ms=5,
        extra_body={"seed": seed, "num_inference_steps": 2, "guidance_scale": 3.0, "max_sequence_length": 16},
    )  # fmt: skip
    assert video.status == "completed", video.error
    file = (await client.videos.download_content(video.id)).content
    with av.open(io.BytesIO(file)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    made = stock["wan"](
        "a cat", num_frames=9, width=32, height=16, num_inference_steps=2, guidance_scale=3.0, max_sequence_length=16,
        generator=torch.Generator("cpu").manual_seed(seed), output_type="np",
    ).frames[0]  # fmt: skip
    error = (frames - np.asarray(made) * 255.0) @ (0.299, 0.587, 0.114)
    assert 10 * np.log10(255**2 / np.square(error).mean()) > 30  # decibels of brightness
    assert (video.size, video.seconds) == ("32x16", f"{9 / 16:.6g}")


async def test_a_video_is_asked_for_with_a_lora(
    client: openai.AsyncOpenAI, stock: dict[str, Any], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"model": "wan", "prompt": "a cat", "seconds": "0.5", "size": "32x16"}
    given = {"seed": 4, "num_inference_steps": 2, "guidance_scale": 3.0, "max_sequence_length": 16}
    body = {**given, "lora": '[{"name": "style", "scale": 0.5}]'}  # JSON in a form
    video = await client.videos.create_and_poll(**asked, poll_interval_ms=5, extra_body=body)
    assert video.status == "completed", video.error
    file = (await client.videos.download_content(video.id)).content
    with av.open(io.BytesIO(file)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])

    def distance() -> float:
        more = {**given, "num_frames": 9, "width": 32, "height": 16, "output_type": "np"}
        generator = torch.Generator("cpu").manual_seed(more.pop("seed"))
        made = stock["wan"]("a cat", **more, generator=generator).frames[0]
        return float(np.square((frames - np.asarray(made) * 255.0) @ (0.299, 0.587, 0.114)).mean())

    from_plain = distance()
    stock["wan"].load_lora_weights(
        load_file(tmp_path / "style" / "pytorch_lora_weights.safetensors"), adapter_name="style"
    )
    stock["wan"].set_adapters("style", 0.5)
    assert 3 * distance() < from_plain
    body["lora"] = '[{"name": "nobody"}]'
    with pytest.raises(openai.NotFoundError, match=r"no adapter 'nobody' for 'wan' \(known: style\)"):
        await client.videos.create(**asked, extra_body=body)


async def test_an_image_and_further_parameters_reach_the_class(
    client: openai.AsyncOpenAI, stock: dict[str, Any]
) -> None:
    pixels = seeded_rng().integers(0, 256, (16, 16, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    more = {"init_image": base64.b64encode(buffer.getvalue()).decode(), "seed": 3, "num_inference_steps": 2}
    more |= {"guidance_scale": 3.0, "extra": {"image_guidance_scale": 1.2}}
    answer = await client.images.generate(model="pix", prompt="a cat", extra_body=more)
    assert answer.data is not None
    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or ""))))
    made = stock["pix"](
        "a cat", image=Image.fromarray(pixels), num_inference_steps=2, guidance_scale=3.0, image_guidance_scale=1.2,
        generator=torch.Generator("cpu").manual_seed(3),
    ).images[0]  # fmt: skip
    np.testing.assert_array_equal(found, np.asarray(made))
    with pytest.raises(openai.BadRequestError, match=f"{PIX2PIX} takes no 'image_scale'; it takes"):
        await client.images.generate(model="pix", prompt="a cat", extra_body={**more, "extra": {"image_scale": 1.2}})


async def test_audio_is_made_of_the_file_of_a_form(client: openai.AsyncOpenAI, stock: dict[str, Any]) -> None:
    """Written by another program: one channel of floats, at the model's own rate."""
    samples, rate = seeded_rng().uniform(-1, 1, (1, 100)).astype("<f4"), stock["vary"].vae.config.sampling_rate
    head = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, rate, 4 * rate, 4, 32)
    body = b"WAVE" + head + struct.pack("<4sI", b"data", samples.nbytes) + samples.tobytes()
    form = {"model": "vary", "prompt": "a harp", "seconds": "1", "seed": "7", "num_inference_steps": "2"}
    answer = await client._client.post(
        "/v1/audio/generations",
        data=form | {"extra": '{"init_noise_level": 0.4}'},
        files={"audio": ("piano.wav", struct.pack("<4sI", b"RIFF", len(body)) + body)},
    )
    assert answer.status_code == 200, answer.text
    with wave.open(io.BytesIO(answer.content)) as file:
        found = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels()).T
    made = stock["vary"](
        "a harp", duration=1.0, audio=torch.from_numpy(samples.repeat(2, axis=0))[None], init_noise_level=0.4,
        num_inference_steps=2, generator=torch.Generator("cpu").manual_seed(7), output_type="np",
    ).audios[0]  # fmt: skip
    np.testing.assert_allclose(found / 32767, np.clip(made, -1, 1), atol=0.51 / 32767)
    unheard = {"model": "vary", "prompt": "a harp", "seconds": 1}
    without = await client._client.post("/v1/audio/generations", json=unheard)
    assert without.status_code == 400
    assert f"{VARY}: `audio` (reference waveform) is required" in without.json()["error"]["message"]
