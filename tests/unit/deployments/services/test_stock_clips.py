"""Videos and audio through the image service: files with diffusers' own frames and samples in them."""

from __future__ import annotations

import asyncio
import io
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.classes import AGAIN, assembled
from kit.tiny.clips import AUDIOS, VIDEOS
from kit.tiny.pipelines import make, saved
from kit.tiny.videos_in import T5_SIZE, VIDEO_CASES
from kit.waiting import until

from configs.cluster import LimitsConfig, WorkerConfig
from deployments.engines.records.clip_files import encode_audio, encode_video
from deployments.engines.records.protocol import EngineError
from deployments.engines.stock.known import PipelineSource, check_class
from deployments.ingress.openai.uploads import decode_named
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import ComponentBuilder
from deployments.records import ClipRequest, ClipResult, ImageProgress
from deployments.records.errors import InvalidRequest
from deployments.replicas.step_loop import DeviceThread
from deployments.services.clips import clip_request, frame_rate
from deployments.services.image_service import EncodeText, ImageService
from deployments.text.fallback import FallbackEncoder

pytestmark = pytest.mark.slow  # imports diffusers
OpenHost = Callable[..., ModuleCache]
STEPS = 2
FIELDS = ("height", "width", "num_frames", "max_sequence_length")
LEAST_PSNR = 30.0  # decibels; random weights make noise, which compresses worst


def service_of(open_host: OpenHost, **folders: Path) -> ImageService:
    return ImageService(open_host(ComponentBuilder(WorkerConfig()), folders), WorkerConfig(), DeviceThread())


def decode(file: bytes) -> tuple[np.ndarray, float, str]:
    """The frames of a video, its frames per second, and its codec."""
    with av.open(io.BytesIO(file)) as container:
        stream = container.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        return frames, float(stream.average_rate or 0), stream.codec_context.name


def psnr(found: np.ndarray, expected: np.ndarray) -> float:
    """Return it of the brightness, in decibels: colours have half the size in a file."""
    assert found.shape == expected.shape
    error = (found.astype(float) - expected) @ (0.299, 0.587, 0.114)  # ITU-R BT.601
    return float(10 * np.log10(255**2 / max(1e-9, np.square(error).mean())))


def encoder_of(service: ImageService) -> EncodeText:
    return FallbackEncoder(service._module_cache, DeviceThread(), warnings=()).condition


async def pieces_of(service: ImageService, request: ClipRequest) -> tuple[list[ImageProgress], ClipResult]:
    told: list[ImageProgress] = []
    return told, await service.make_clip(request, encoder_of(service), told.append)


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", VIDEOS)
async def test_videos_have_the_frames_of_diffusers(class_name: str, tmp_path: Path, open_host: OpenHost) -> None:
    build, options = VIDEOS[class_name]
    stock, service = saved(build, tmp_path), service_of(open_host, video=tmp_path)
    seed = int(seeded_rng().integers(2**32))
    fields: dict[str, Any] = {name: options[name] for name in FIELDS if name in options}
    fields["extra"] = {name: value for name, value in options.items() if name not in FIELDS}
    request = ClipRequest(
        model="video", prompt="a cat", seed=seed, num_inference_steps=STEPS, reports_steps=True, **fields
    )
    told, result = await pieces_of(service, request)
    generator = torch.Generator("cpu").manual_seed(seed)
    made = stock("a cat", num_inference_steps=STEPS, generator=generator, output_type="np", **options).frames[0]
    frames, fps, codec = decode(result.file)
    assert psnr(frames, (np.asarray(made) * 255).round().astype(np.uint8)) > LEAST_PSNR
    assert (codec, result.media_type) == ("vp9", "video/mp4")
    assert (result.length, result.height, result.width) == frames.shape[:3]
    assert fps == pytest.approx(result.rate)
    assert result.seconds == pytest.approx(len(frames) / fps)
    assert [one.step for one in told] == list(range(1, len(told) + 1))
    assert told[-1].num_steps == STEPS
    assert result.timings_ms["encode_file"] > 0


async def test_a_video_is_made_of_the_file_that_was_sent(tmp_path: Path, open_host: OpenHost) -> None:
    case = VIDEO_CASES["WanVideoToVideoPipeline"]
    stock = saved(lambda: assembled("WanVideoToVideoPipeline", **case.parts()), tmp_path)
    # Dark frames and bright ones: what the weights make of noise may be grey, and the same for other noise.
    noise = seeded_rng().integers(0, 64, (9, 4, 4, 3), np.uint8).repeat(8, axis=1).repeat(8, axis=2)
    sent = noise + np.where(np.arange(9) < 4, 0, 191).astype(np.uint8)[:, None, None, None]
    file = encode_video(sent, 16, "webm")
    fields = {**T5_SIZE, **AGAIN, "num_inference_steps": 3}
    images = decode_named({"video": file}, LimitsConfig())
    request = ClipRequest(model="video", prompt="a cat", seed=4, images=images, **fields)
    _, result = await pieces_of(service_of(open_host, video=tmp_path), request)
    seen = [PIL.Image.fromarray(frame) for frame in decode(file)[0]]
    frames, _, _ = decode(result.file)

    def likeness(video: list[PIL.Image.Image]) -> float:
        generator = torch.Generator("cpu").manual_seed(4)
        made = stock(video=video, prompt="a cat", generator=generator, output_type="np", **fields).frames[0]
        return psnr(frames, (np.asarray(made) * 255).round().astype(np.uint8))

    assert likeness(seen) > LEAST_PSNR
    # Drawn weights may hardly tell frames in another order, or hardly inverted ones, but do tell one of the two.
    inverted = [PIL.ImageOps.invert(frame) for frame in seen]
    assert likeness(seen) > min(likeness(seen[::-1]), likeness(inverted)) + 1


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", AUDIOS)
async def test_audio_has_the_samples_of_diffusers(class_name: str, tmp_path: Path, open_host: OpenHost) -> None:
    build, options = AUDIOS[class_name]
    stock, service = saved(build, tmp_path), service_of(open_host, audio=tmp_path)
    _, result = await pieces_of(
        service, ClipRequest(model="audio", prompt="a cat", seed=3, num_inference_steps=STEPS, extra=options)
    )
    prompt = {} if class_name == "DanceDiffusionPipeline" else {"prompt": "a cat", "output_type": "np"}
    generator = torch.Generator("cpu").manual_seed(3)
    made = np.asarray(stock(num_inference_steps=STEPS, generator=generator, **options, **prompt).audios[0])
    with wave.open(io.BytesIO(result.file)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getnframes()) == (len(made), 2, made.shape[1])
        assert file.getframerate() == result.rate
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, len(made)).T
    np.testing.assert_allclose(samples / 32767, np.clip(made, -1, 1), atol=0.51 / 32767)
    assert (result.media_type, result.width) == ("audio/wav", 0)
    assert result.seconds == pytest.approx(made.shape[1] / result.rate)


@pytest.mark.parametrize("format_", ["mp4", "webm"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (5, 17, 33), (12, 64, 48)])
def test_videos_of_any_size_are_written_and_read_again(format_: Any, shape: tuple[int, int, int]) -> None:
    rng = seeded_rng()
    coarse = rng.integers(0, 256, (shape[0], -(-shape[1] // 8), -(-shape[2] // 8), 3), np.uint8)
    frames = coarse.repeat(8, axis=1).repeat(8, axis=2)[:, : shape[1], : shape[2]]
    fps = float(rng.integers(1, 60))
    found, rate, codec = decode(encode_video(frames, fps, format_))
    assert psnr(found, frames) > LEAST_PSNR
    assert codec == "vp9"
    if len(frames) > 1:
        assert rate == pytest.approx(fps, rel=0.01)


def test_audio_that_is_too_loud_is_cut_off() -> None:
    with wave.open(io.BytesIO(encode_audio(np.array([[0.5, 7.0, -7.0]], np.float32), 8000))) as file:
        assert np.frombuffer(file.readframes(3), "<i2").tolist() == [16384, 32767, -32767]


WAN = check_class("WanPipeline")


@pytest.mark.parametrize(
    ("class_name", "more", "extra", "fps"),
    [
        ("WanPipeline", {"seconds": 2.0}, {"num_frames": 33}, 16),
        ("WanPipeline", {"seconds": 2.0, "fps": 8}, {"num_frames": 17}, 8),
        ("LTXPipeline", {"seconds": 2.0, "fps": 24}, {"num_frames": 49, "frame_rate": 24}, 24),
        ("LTXPipeline", {}, {}, 25),
        ("AnimateDiffPipeline", {"seconds": 2.0, "fps": 8}, {"num_frames": 16}, 8),
        ("CogVideoXPipeline", {"num_frames": 9}, {"num_frames": 9}, 8),
        ("StableAudioPipeline", {"seconds": 2.5}, {"audio_end_in_s": 2.5}, 10),
        ("AudioLDM2Pipeline", {"seconds": 2.5}, {"audio_length_in_s": 2.5}, 10),
        ("LongCatAudioDiTPipeline", {"seconds": 2.5}, {"audio_duration_s": 2.5}, 10),
        ("StableAudio3AudioToAudioPipeline", {"seconds": 2.5}, {"duration": 2.5}, 10),
    ],
)
def test_durations_become_parameters_of_the_class(class_name: str, more: Any, extra: Any, fps: float) -> None:
    source = check_class(class_name)
    request = ClipRequest(model="m", prompt="a cat", **more)
    assert clip_request(request, class_name, source).extra == extra
    assert frame_rate(request, source) == fps


@pytest.mark.parametrize(
    ("source", "more", "words"),
    [
        (WAN, {"seconds": 2.0, "num_frames": 9}, "give either num_frames or seconds"),
        (WAN, {"seconds": 2.0, "extra": {"num_frames": 9}}, "extra: 'num_frames' is set by a field of the request"),
        (PipelineSource((), {}, frozenset({"frames"})), {"seconds": 2.0}, "seconds: X takes no duration"),
        (PipelineSource((), {}, frozenset({"frames"})), {"num_frames": 2}, "num_frames: X takes no duration"),
    ],
)
def test_durations_that_make_no_sense_are_refused(source: PipelineSource, more: Any, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        clip_request(ClipRequest(model="m", prompt="a cat", **more), "X", source)


async def test_what_the_class_does_not_take_and_who_leaves(tmp_path: Path, open_host: OpenHost) -> None:
    build, options = VIDEOS["WanPipeline"]
    saved(build, tmp_path / "wan")
    make("DDPMPipeline", tmp_path / "ddpm")
    service = service_of(open_host, video=tmp_path / "wan", images=tmp_path / "ddpm")
    asked = {"model": "video", "prompt": "a cat", **{name: options[name] for name in FIELDS}}
    with pytest.raises(InvalidRequest, match="extra: WanPipeline takes no 'frames'; it takes prompt"):
        await pieces_of(service, ClipRequest(**asked, extra={"frames": 3}))
    with pytest.raises(InvalidRequest, match="image: WanPipeline takes no such image"):
        await pieces_of(service, ClipRequest(**asked, images={"image": np.zeros((16, 16, 3), np.uint8)}))
    told: list[ImageProgress] = []
    making = asyncio.ensure_future(
        service.make_clip(
            ClipRequest(**asked, num_inference_steps=30, reports_steps=True), encoder_of(service), told.append
        )
    )
    await until(lambda: told)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert told[-1].step < 30
    assert service.num_running == 0
