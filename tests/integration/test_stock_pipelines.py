"""Pipelines without a family, registered while the cluster runs: images, videos and audio are diffusers' own."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
import torch
from integration.harness import Cluster
from kit.seeding import seeded_rng
from kit.tiny.clips import stable_audio, wan
from kit.tiny.pipelines import PIPELINES, saved
from PIL import Image

PIXART, STEPS, TIMEOUT_S = "PixArtSigmaPipeline", 3, 240.0


@pytest.fixture(scope="module")
def stock(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The pipelines by the ids that the cluster has them under."""
    found = {}
    for name, build in {"tiny-pixart": PIPELINES[PIXART][0], "tiny-wan": wan, "tiny-sound": stable_audio}.items():
        folder = tmp_path_factory.mktemp("stock") / name
        found[name] = saved(build, folder)
        answer = httpx.post(f"{cluster.url}/admin/models", json={"id": name, "path": str(folder)}, timeout=TIMEOUT_S)
        assert answer.is_success, answer.text
    return found


def made_by(pipeline: Any, seed: int, **options: Any) -> Any:
    generator = torch.Generator("cpu").manual_seed(seed)
    return pipeline("a cat", num_inference_steps=STEPS, generator=generator, output_type="np", **options)


def test_images_are_those_of_diffusers_and_models_say_how_they_are_asked(cluster: Cluster, stock: Any) -> None:
    options, seed = PIPELINES[PIXART][1], int(seeded_rng().integers(2**32))
    expected = (made_by(stock["tiny-pixart"], seed, **options).images * 255).round().astype(np.uint8)
    answer = cluster.openai.images.generate(
        model="tiny-pixart",
        prompt="a cat",
        size="16x16",
        extra_body={
            "seed": seed, "num_inference_steps": STEPS, "max_sequence_length": options["max_sequence_length"],
            "extra": {"use_resolution_binning": False},
        },
    )  # fmt: skip
    assert answer.data is not None
    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or ""))))
    assert np.abs(found.astype(int) - expected[0]).max() <= 1
    models = {model["id"]: model for model in httpx.get(f"{cluster.url}/v1/models").json()["data"]}
    assert [models[name]["endpoints"] for name in stock] == [
        ["/v1/images/generations"],
        ["/v1/videos"],
        ["/v1/audio/generations"],
    ]
    with pytest.raises(openai.BadRequestError, match="PixArtSigmaPipeline takes no 'shift'; it takes prompt"):
        cluster.openai.images.generate(model="tiny-pixart", prompt="a cat", extra_body={"extra": {"shift": 3}})


def test_videos_are_those_of_diffusers(cluster: Cluster, stock: Any) -> None:
    seed = int(seeded_rng().integers(2**32))
    sizes = {"width": 32, "height": 16, "num_frames": 9, "max_sequence_length": 16}
    made = made_by(stock["tiny-wan"], seed, **sizes).frames[0]
    video = cluster.openai.videos.create_and_poll(
        model="tiny-wan",
        prompt="a cat",
        poll_interval_ms=50,
        extra_body={"seed": seed, "num_inference_steps": STEPS, **sizes},
    )
    assert video.status == "completed", video.error
    with av.open(io.BytesIO(cluster.openai.videos.download_content(video.id).content)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    error = (frames - np.asarray(made) * 255.0) @ (0.299, 0.587, 0.114)
    assert 10 * np.log10(255**2 / np.square(error).mean()) > 30  # decibels of brightness
    assert (video.size, video.seconds) == ("32x16", f"{9 / 16:.6g}")
    cluster.openai.videos.delete(video.id)


def test_audio_is_that_of_diffusers(cluster: Cluster, stock: Any) -> None:
    made = np.asarray(made_by(stock["tiny-sound"], 5, audio_end_in_s=1.5).audios[0])
    body = {"model": "tiny-sound", "prompt": "a cat", "seed": 5, "num_inference_steps": STEPS, "seconds": 1.5}
    answer = httpx.post(f"{cluster.url}/v1/audio/generations", json=body, timeout=TIMEOUT_S)
    assert answer.is_success, answer.text
    with wave.open(io.BytesIO(answer.content)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels()).T
    np.testing.assert_allclose(samples / 32767, np.clip(made, -1, 1), atol=1e-3)


def test_classes_that_cannot_be_served_are_refused_when_they_are_registered(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "misspelt"
    saved(wan, folder)
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("WanPipeline", "WanVidPipeline"))
    body = {"id": "misspelt", "path": str(folder)}
    answer = httpx.post(f"{cluster.url}/admin/models", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 422
    assert "has no pipeline class 'WanVidPipeline' (near names: WanPipeline" in answer.text
