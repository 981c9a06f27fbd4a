"""Families whose prompts are read by a language model make the images of the stock pipelines, from prompt to pixels."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.parts import byte_tokenizer
from kit.tiny.pipelines import make
from tokenizers import processors
from unit.deployments.engines.diffusion.reader_pairs import ReaderPair

from configs.options import Sampler
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.records.protocol import ConditionedRequest, DiffusionRequest, EngineError, PromptForm
from deployments.engines.servable import why_unservable
from deployments.engines.text.tokens import TextTokenizer
from weights.formats.checkpoint import read_checkpoint
from weights.formats.pipeline_parts import pipeline_variant

KLEIN, DEV = "Flux2KleinPipeline", "Flux2Pipeline"
FLUX_2 = (KLEIN, DEV)  # which take no negative prompt in stock
UNDER_NOISE = ["QwenImagePipeline", "ZImagePipeline"]  # they begin at an image; klein reads it beside its latents
CLASSES = [*FLUX_2, *UNDER_NOISE]
# The prefix of Qwen-Image is 185 tokens of one byte each, of which stock drops 34.
PROMPTS = ["a grey cat", "two red birds on a wire, at dawn", "x"]


def make_pair(class_name: str, folder: Path) -> ReaderPair:
    return ReaderPair(make(class_name, folder), folder)


@pytest.fixture(scope="module", params=CLASSES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReaderPair:
    return make_pair(request.param, tmp_path_factory.mktemp(request.param))


def request_of(**options: Any) -> DiffusionRequest:
    settings = {
        "request_id": "r",
        "height": 32,
        "width": 32,
        "num_inference_steps": 3,
        "seed": 7,
        "guidance_scale": 1.0,
    }
    return DiffusionRequest(**(settings | options))  # type: ignore[arg-type]


@pytest.mark.drawn
@pytest.mark.parametrize("negative", [None, "a dull dog"])
@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_images_are_those_of_stock(pair: ReaderPair, scale: float, negative: str | None) -> None:
    if pair.class_name in FLUX_2:
        negative = None  # of stock it is always empty, or none
    request = request_of(num_images=2, guidance_scale=scale, true_cfg_scale=scale, height=48)
    conditioning = pair.conditioning(request, PROMPTS[0], negative)
    stock = pair.stock_run(request, PROMPTS[0], negative)
    pair.assert_equal_to_stock(pair.ours.start_request(request, conditioning), stock)


@pytest.mark.drawn
@pytest.mark.parametrize("pair", FLUX_2, indirect=True)
def test_latents_beside_those_of_a_sampler_are_read_as_stocks_images(pair: ReaderPair) -> None:
    sizes = [(64, 96), (80, 64)]  # stock takes none below 64 pixels
    images = [seeded_rng().integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    latents = []
    for image in images:
        pixels = torch.from_numpy(image.astype(np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
        latents.append(pair.ours._codec.most_likely(pixels, pair.family.latents.scale).numpy())
    request = request_of(num_images=2)
    conditioning = pair.conditioning(request, PROMPTS[0], None)
    stock = pair.stock_run(request, PROMPTS[0], None, image=[PIL.Image.fromarray(image) for image in images])
    sampler = Sampler(name="euler", sigmas=tuple(float(sigma) for sigma in pair.stock.scheduler.sigmas))
    sampled = replace(request, sampler=sampler, reference_latents=tuple(latents))
    pair.assert_equal_to_stock(pair.ours.start_request(sampled, conditioning), stock)
    for given, shown in [
        ({"reference_latents": (latents[0][:, :-1],)}, "their shape"),
        ({"reference_latents": tuple(latents), "sampler": None}, "reference_latents is of a request with a sampler"),
    ]:
        with pytest.raises(EngineError, match=shown):
            pair.ours.start_request(replace(sampled, **given), conditioning)  # type: ignore[arg-type]


@pytest.mark.parametrize("pair", UNDER_NOISE, indirect=True)
def test_an_image_to_begin_at(pair: ReaderPair) -> None:
    image = seeded_rng().integers(0, 256, (32, 32, 3), dtype=np.uint8)
    request = request_of(num_inference_steps=4, strength=0.5, init_image=image, guidance_scale=2.0, true_cfg_scale=2.0)
    conditioning = pair.conditioning(request, PROMPTS[1], "dull")
    class_ = getattr(diffusers, pair.class_name.replace("Pipeline", "Img2ImgPipeline"))
    options = {"image": PIL.Image.fromarray(image), "strength": 0.5}
    stock = pair.stock_run(request, PROMPTS[1], "dull", class_, **options)
    pair.assert_equal_to_stock(pair.ours.start_request(request, conditioning), stock)


@pytest.mark.drawn
@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("pair", UNDER_NOISE, indirect=True)
def test_a_part_of_an_image_painted_anew(pair: ReaderPair, strength: float) -> None:
    rng = seeded_rng()
    image = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    mask = np.where(rng.random((32, 32)) < 0.5, np.uint8(255), np.uint8(0))
    request = request_of(
        num_inference_steps=4, strength=strength, init_image=image, mask_image=mask, guidance_scale=2.0,
        true_cfg_scale=2.0,
    )  # fmt: skip
    conditioning = pair.conditioning(request, PROMPTS[1], "dull")
    class_ = getattr(diffusers, pair.class_name.replace("Pipeline", "InpaintPipeline"))
    images = {"image": PIL.Image.fromarray(image), "mask_image": PIL.Image.fromarray(mask)}
    stock = pair.stock_run(request, PROMPTS[1], "dull", class_, strength=strength, **images)
    pair.assert_equal_to_stock(pair.ours.start_request(request, conditioning), stock)


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_a_solver_of_noise_by_name(pair: ReaderPair, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A UI names Euler whatever the model is."""
    request = request_of(num_inference_steps=4, scheduler=name)
    if name != "EulerDiscreteScheduler":
        own = pair.stock.scheduler.config
        of_flows = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": own["shift"]}
        other = getattr(diffusers, name).from_config(own, **of_flows)
        make = other.set_timesteps
        mu = {} if own["use_dynamic_shifting"] else {"mu": None}

        def set_timesteps(num_inference_steps: Any = None, device: Any = None, sigmas: Any = (), **more: Any) -> None:
            make(num_inference_steps or len(sigmas), device, **(more | mu))  # it has its own sigmas

        other.set_timesteps = set_timesteps
        monkeypatch.setattr(pair.stock, "scheduler", other)
    conditioning = pair.conditioning(request, PROMPTS[0], None)
    stock = pair.stock_run(request, PROMPTS[0], None)
    monkeypatch.undo()
    pair.assert_equal_to_stock(pair.ours.start_request(request, conditioning), stock)


@pytest.fixture(scope="module", params=FLUX_2)
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReaderPair:
    return make_pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.drawn
def test_an_image_that_is_read(reader: ReaderPair) -> None:
    image = seeded_rng().integers(0, 256, (80, 64, 3), dtype=np.uint8)  # stock takes none below 64
    request = request_of(init_image=image, height=80, width=64, guidance_scale=2.0, num_images=2)
    conditioning = reader.conditioning(request, PROMPTS[1], None)
    stock = reader.stock_run(request, PROMPTS[1], None, image=PIL.Image.fromarray(image))
    reader.assert_equal_to_stock(reader.ours.start_request(request, conditioning), stock)
    # Where denoiser and VAE are not on the device together, one encodes for the other.
    told = reader.ours.encode_inputs(request, conditioning, {})
    vae = copy.deepcopy(reader.ours._codec.vae).to("meta")
    blank = DenoisePipeline(reader.family, reader.folder, {"transformer": reader.ours.denoiser, "vae": vae})
    apart = blank.start_request(request, conditioning, {}, told)
    both = reader.ours.start_request(request, conditioning)
    assert apart.extra_channels is not None
    assert both.extra_channels is not None
    assert torch.equal(apart.extra_channels, both.extra_channels)


@pytest.mark.drawn
def test_requests_with_and_without_an_image_to_read_share_a_batch(reader: ReaderPair) -> None:
    image = seeded_rng().integers(0, 256, (32, 32, 3), dtype=np.uint8)
    requests = [request_of(request_id=f"r{n}", seed=n, init_image=image if n % 2 else None) for n in range(4)]
    conditioning = reader.conditioning(requests[0], PROMPTS[0], None)
    alone = [reader.ours.generate(request, conditioning) for request in requests]
    states = [reader.ours.start_request(request, conditioning) for request in requests]
    while not states[0].done:
        reader.ours.step(states)
    for found, expected in zip(reader.ours.decode(states), alone, strict=True):
        assert isinstance(found, np.ndarray)
        assert np.array_equal(found, expected)


def test_a_distilled_model_is_not_guided(tmp_path: Path) -> None:
    pair = make_pair(KLEIN, tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["is_distilled"] is False
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))
    distilled = pair.family.variant(index | {"is_distilled": True})
    assert pair.family.guidance.uses_negative(request_of(guidance_scale=4.0), has_negative=False)
    assert not distilled.guidance.uses_negative(request_of(guidance_scale=4.0), has_negative=True)
    defaults = pair.family.defaults.of(pipeline_variant(tmp_path))
    assert (defaults.num_inference_steps, defaults.guidance_scale) == (4, 1.0)


@pytest.mark.drawn(2)
def test_encodings_are_those_of_stock_alone_and_in_a_batch(pair: ReaderPair) -> None:
    request = request_of()
    plans = [pair.family.texts.plan({}, prompt, None, use_negative=False) for prompt in PROMPTS]
    together = pair.encode([item for plan in plans for item in plan])
    for prompt, plan, batched in zip(PROMPTS, plans, together, strict=True):
        expected = pair.stock.encode_prompt(prompt)[0][0]
        (alone,) = pair.encode(plan)
        for found in (alone, batched):
            assert found["hidden"].shape == expected.shape
            torch.testing.assert_close(found["hidden"], expected, rtol=1e-4, atol=1e-5)
    cut = pair.conditioning(request, PROMPTS[1], None, max_sequence_length=20)["prompt_embeds"][0]
    stock = pair.stock.encode_prompt(PROMPTS[1], max_sequence_length=20)[0][0]
    torch.testing.assert_close(cut, stock, rtol=1e-4, atol=1e-5)


@pytest.mark.drawn
def test_a_request_has_the_same_bits_in_any_batch(pair: ReaderPair) -> None:
    rng = seeded_rng()
    requests = {
        f"r{number}": request_of(
            request_id=f"r{number}",
            seed=int(rng.integers(1 << 30)),
            guidance_scale=float(rng.choice([0.0, 2.5])),
            true_cfg_scale=float(rng.choice([1.0, 2.5])),
            num_inference_steps=int(rng.integers(2, 5)),
        )
        for number in range(5)
    }
    conditioned = {
        name: ConditionedRequest(
            request, pair.conditioning(request, PROMPTS[number % 3] + "!" * int(rng.integers(9)), "dull")
        )
        for number, (name, request) in enumerate(requests.items())
    }
    alone = {name: pair.ours.generate(one.request, one.conditioning) for name, one in conditioned.items()}
    engine = DiffusionEngine(pair.ours)
    for one in conditioned.values():
        engine.add_request(one)
    found = {}
    while engine.has_work:
        for output in engine.step():
            if output.is_last:
                found[output.request_id] = output.images
    assert found.keys() == alone.keys()
    assert all(np.array_equal(found[name], alone[name]) for name in alone)


def test_what_import_reads_of_it_can_be_served(pair: ReaderPair) -> None:
    assert why_unservable(read_checkpoint(pair.folder)) is None


def test_a_text_encoder_that_lacks_what_its_pipeline_asks_for(tmp_path: Path) -> None:
    pair = make_pair("ZImagePipeline", tmp_path)
    plan = pair.family.texts.plan({}, "x", None, use_negative=False)
    assert plan[0].form is not None
    pair.encoder._tokenizer._tokenizer.chat_template = None
    with pytest.raises(EngineError, match="has no chat template"):
        pair.encode(plan)
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert pair.family.network.text_widths(pair.ours.denoiser) == (config["cap_feat_dim"], None)
    with pytest.raises(EngineError, match="max_sequence_length 513: expected 1 to 512"):
        pair.family.texts.plan({}, "x", None, use_negative=False, max_sequence_length=513)
    with pytest.raises(EngineError, match="'chunk' is for CLIP"):
        pair.family.texts.plan({}, "x", None, use_negative=False, long_text="chunk")


def test_a_text_begins_once_where_template_and_tokenizer_both_say_so() -> None:
    tokenizer = byte_tokenizer(chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    add_begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer._tokenizer.post_processor = add_begin
    ours, form = TextTokenizer(tokenizer, 64, 64), PromptForm(layers=(-1,))
    (found,) = ours.tokenize([ours.fill_form(PROMPTS[1], form)], None)
    expected = tokenizer.apply_chat_template([{"role": "user", "content": PROMPTS[1]}], return_dict=True)["input_ids"]
    assert list(found.token_ids) == expected
    assert expected.count(tokenizer.bos_token_id) == 1
