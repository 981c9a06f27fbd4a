"""Audio goes to the parameters that take it, at the rate and with the channels of the model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from kit.seeding import seeded_random, seeded_rng
from kit.tiny.classes import assembled
from kit.tiny.clips import stable_audio
from kit.tiny.further import FURTHER_CASES
from kit.tiny.pipelines import saved
from unit.deployments.engines.stock.test_stock_pipelines import load, run

from deployments.engines.records.protocol import EngineError, StockRequest
from deployments.engines.records.sounds import Sound
from deployments.engines.stock.engine import StockEngine
from deployments.engines.stock.inputs import CallInputs

AGAIN = "StableAudio3AudioToAudioPipeline"


def noise(channels: int, number: int, rate: int) -> Sound:
    return Sound(seeded_rng().uniform(-1, 1, (channels, number)).astype(np.float32), rate)


def tone(hertz: float, rate: int, seconds: float) -> np.ndarray:
    """A tone that swells and dies away."""
    times = np.arange(math.ceil(seconds * rate)) / rate
    return np.sin(2 * np.pi * hertz * times) * np.sin(np.pi * times / seconds) ** 2


@pytest.mark.parametrize(
    ("rate", "new_rate"), [(44_100, 48_000), (48_000, 44_100), (44_100, 16_000), (16_000, 44_100), (44_099, 16_001)]
)
def test_a_tone_is_the_same_tone_at_another_rate(rate: int, new_rate: int) -> None:
    rng = seeded_random()
    seconds, hertz = rng.uniform(0.3, 0.6), [rng.uniform(100, 0.45 * min(rate, new_rate)) for _ in range(2)]
    samples = np.stack([tone(one, rate, seconds) for one in hertz]).astype(np.float32)
    found = Sound(samples, rate).fitted(new_rate, None)
    expected = np.stack([tone(one, new_rate, seconds) for one in hertz])
    assert found.rate == new_rate
    assert found.samples.dtype == np.float32
    assert abs(found.seconds - samples.shape[1] / rate) <= 1 / new_rate
    number = min(found.samples.shape[1], expected.shape[1])
    np.testing.assert_allclose(found.samples[:, :number], expected[:, :number], atol=2e-3)


def test_what_the_new_rate_cannot_say_is_left_out() -> None:
    found = Sound(tone(7000, 44_100, 0.5)[None].astype(np.float32), 44_100).fitted(8000, None)
    assert np.abs(found.samples).max() < 1e-3


@pytest.mark.parametrize("number", [1, 2, 7])
def test_the_shortest_of_sounds_has_a_sample_at_any_rate(number: int) -> None:
    for rate, new_rate in ((1, 192_000), (192_000, 1), (3, 7)):
        if number * new_rate // rate < 10**7:
            found = noise(1, number, rate).fitted(new_rate, None)
            assert found.samples.shape == (1, -(-number * new_rate // rate))
            assert np.isfinite(found.samples).all()


def test_channels_are_repeated_or_their_mean() -> None:
    one, two = noise(1, 9, 8000), noise(2, 9, 8000)
    np.testing.assert_array_equal(one.fitted(8000, 2).samples, one.samples.repeat(2, axis=0))
    np.testing.assert_allclose(two.fitted(8000, 1).samples[0], two.samples.mean(axis=0))
    np.testing.assert_array_equal(two.fitted(8000, 2).samples, two.samples)
    np.testing.assert_array_equal(two.fitted(8000, None).samples, two.samples)


def request_of(class_name: str, audio: dict[str, Sound], **extra: Any) -> StockRequest:
    options = FURTHER_CASES[class_name].options if class_name in FURTHER_CASES else {}
    return StockRequest("r", 5, "a cat", fields={"num_inference_steps": 2}, extra={**options, **extra}, audio=audio)


def made(pipeline: Any, options: Any, **more: Any) -> np.ndarray:
    torch.manual_seed(5)  # for what a pipeline draws without the generator
    generator = torch.Generator("cpu").manual_seed(5)
    found = pipeline("a cat", num_inference_steps=2, generator=generator, output_type="np", **options, **more)
    return np.asarray(found.audios[0])


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("class_name", "name", "axes"),
    [
        (AGAIN, "audio", 3),
        ("StableAudio3InpaintPipeline", "audio", 3),
        ("AceStepPipeline", "reference_audio", 2),
        ("AceStepPipeline", "src_audio", 2),
    ],
)
def test_audio_is_heard_as_diffusers_hears_it(class_name: str, name: str, axes: int, tmp_path: Path) -> None:
    case = FURTHER_CASES[class_name]
    stock = saved(lambda: assembled(class_name, **case.parts()), tmp_path)
    config, engine = stock.vae.config, StockEngine(load(tmp_path))
    sound = noise(config.audio_channels, config.sampling_rate, config.sampling_rate)
    more = {"task_type": "repaint", "repainting_start": 0.1, "repainting_end": 0.3} if name == "src_audio" else {}
    given = torch.from_numpy(sound.samples) if axes == 2 else torch.from_numpy(sound.samples)[None]
    expected = made(stock, {**case.options, **more}, **{name: given})
    found, _ = run(engine, request_of(class_name, {name: sound}, **more))
    np.testing.assert_allclose(found.samples, expected, rtol=0, atol=1e-6)
    assert found.sample_rate == config.sampling_rate
    if class_name != "AceStepPipeline" or name == "src_audio":  # a tiny timbre encoder hears one frame of it
        silent, _ = run(engine, request_of(class_name, {name: replace(sound, samples=sound.samples * 0)}, **more))
        assert np.abs(silent.samples - found.samples).max() > 1e-4


@pytest.mark.drawn
@pytest.mark.parametrize("channels", [1, 2])
def test_audio_of_another_rate_and_form_is_made_the_models(channels: int, tmp_path: Path) -> None:
    stock, name = saved(stable_audio, tmp_path), "initial_audio_waveforms"
    sound = noise(channels, 300, 150)
    fitted = sound.fitted(stock.vae.config.sampling_rate, 2)
    assert fitted.samples.shape == (2, 8)
    rate = {"initial_audio_sampling_rate": fitted.rate}
    options = {"audio_end_in_s": 1.5}
    expected = made(stock, options, **{name: torch.from_numpy(fitted.samples)[None]}, **rate)
    found, _ = run(StockEngine(load(tmp_path)), request_of("StableAudioPipeline", {name: sound}, **options))
    np.testing.assert_allclose(found.samples, expected, rtol=0, atol=1e-6)
    assert np.abs(expected - made(stock, options)).max() > 1e-4


@pytest.mark.parametrize(
    ("cls", "audio", "extra", "words"),
    [
        (diffusers.AudioLDMPipeline, "audio", {}, r"audio: AudioLDMPipeline takes no such audio .*: none\)"),
        (diffusers.AceStepPipeline, "audio", {}, r"\(audio that it takes: reference_audio, src_audio\)"),
        (diffusers.AceStepPipeline, None, {"src_audio": "UklG"}, "extra: src_audio is audio: send it as a WAV file"),
        (diffusers.StableAudioPipeline, None, {"initial_audio_sampling_rate": 4}, "takes no 'initial_audio_sampling"),
    ],
)
def test_audio_that_the_class_does_not_take_is_refused(cls: Any, audio: Any, extra: Any, words: str) -> None:
    given = {audio: noise(1, 4, 8000)} if audio else {}
    with pytest.raises(EngineError, match=words):
        CallInputs(cls).arguments_of(StockRequest("r", 0, "a cat", extra=extra, audio=given))


def test_a_class_says_which_audio_it_takes(tmp_path: Path) -> None:
    assert "prompt, audio, num_inference_steps" in CallInputs(diffusers.StableAudio3AudioToAudioPipeline).describe()
    saved(lambda: assembled(AGAIN, **FURTHER_CASES[AGAIN].parts()), tmp_path)
    with pytest.raises(EngineError, match=f"{AGAIN}: `audio` .* is required"):
        run(StockEngine(load(tmp_path)), request_of(AGAIN, {}))


def test_audio_that_is_shorter_than_a_frame_is_refused(tmp_path: Path) -> None:
    parts, more = FURTHER_CASES["AceStepPipeline"].parts(), {"task_type": "repaint"}
    parts = {**parts, "vae": type(parts["vae"]).from_config({**parts["vae"].config, "downsampling_ratios": [2, 2]})}
    stock = saved(lambda: assembled("AceStepPipeline", **parts), tmp_path)
    short = noise(2, 1, stock.vae.config.sampling_rate)
    with pytest.raises(RuntimeError):
        stock("a cat", num_inference_steps=2, src_audio=torch.from_numpy(short.samples), **more)
    with pytest.raises(EngineError, match=r"src_audio: 0\.02 seconds of audio, the model hears 0\.08 at least"):
        run(StockEngine(load(tmp_path)), request_of("AceStepPipeline", {"src_audio": short}, **more))
