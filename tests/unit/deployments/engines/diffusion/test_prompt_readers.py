"""Families whose prompts are read by a language model make the images of the stock pipelines, from prompt to pixels."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
from kit.seeding import seeded_rng
from safetensors.torch import load_file
from tokenizers import processors
from unit.deployments.engines.stock.tiny_pipelines import byte_tokenizer, make

from deployments.engines.build import build_module
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.families import family_of
from deployments.engines.diffusion.families.texts import EncodeItem
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.protocol import ConditionedRequest, DiffusionRequest, EngineError, PromptForm
from deployments.engines.servable import why_unservable
from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.loading import load_text_encoder
from deployments.engines.text.tokens import TextTokenizer
from weights.formats.checkpoint import read_checkpoint
from weights.formats.pipeline_parts import pipeline_variant

KLEIN, DEV = "Flux2KleinPipeline", "Flux2Pipeline"
FLUX_2 = (KLEIN, DEV)  # which take no negative prompt in stock
UNDER_NOISE = ["QwenImagePipeline", "ZImagePipeline"]  # they begin at an image; klein reads it beside its latents
CLASSES = [*FLUX_2, *UNDER_NOISE]
# The prefix of Qwen-Image is 185 tokens of one byte each, of which stock drops 34.
PROMPTS = ["a grey cat", "two red birds on a wire, at dawn", "x"]


class Pair:
    """The same pipeline twice: stock's object, and the parts that replicas build of its folder."""

    def __init__(self, class_name: str, folder: Path) -> None:
        self.class_name, self.folder = class_name, folder
        self.stock = make(class_name, folder)
        self.family = family_of(class_name)
        modules = {}
        for name in ("transformer", "vae"):
            tensors = load_file(folder / name / "diffusion_pytorch_model.safetensors")
            modules[name] = build_module("diffusers", None, folder / name, tensors)
        self.ours: DenoisePipeline = create_pipeline(class_name, folder, modules)
        part = next(one for one in read_checkpoint(folder).components if one.name == "text_encoder")
        tensors = load_file(folder / "text_encoder" / "model.safetensors")
        self.encoder: TextEncoder = load_text_encoder(
            folder / "text_encoder", "transformers", part.class_name, folder / "tokenizer", tensors
        )

    def conditioning(
        self, request: DiffusionRequest, prompt: str, negative: str | None, **options: Any
    ) -> dict[str, torch.Tensor]:
        guides = self.family.uses_negative(request, negative is not None)
        plan = self.family.plan_texts({}, prompt, negative, use_negative=guides, **options)
        outputs = dict(zip(plan, self.encode(plan), strict=True))
        return self.family.assemble_conditioning({}, outputs, use_negative=guides)

    def encode(self, plan: Sequence[EncodeItem]) -> list[dict[str, torch.Tensor]]:
        texts = [self.encoder.tokenize([item.text], item.max_length, form=item.form)[0] for item in plan]
        return self.encoder.encode(texts)

    def stock_run(
        self, request: DiffusionRequest, prompt: str, negative: str | None, class_: Any = None, **options: Any
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Return the latents and the images that stock makes of a request."""
        latents = []

        def note(_: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
            latents.append(tensors["latents"])
            return {}

        if self.class_name == "QwenImagePipeline":
            options["true_cfg_scale"] = request.true_cfg_scale
        else:
            options["guidance_scale"] = request.guidance_scale
        if self.class_name not in FLUX_2:
            options["negative_prompt"] = negative
        stock = self.stock if class_ is None else class_(**self.stock.components)
        stock.set_progress_bar_config(disable=True)
        images = stock(
            prompt=prompt,
            height=request.height,
            width=request.width,
            num_inference_steps=request.num_inference_steps,
            num_images_per_prompt=request.num_images,
            generator=torch.Generator().manual_seed(request.seed),
            callback_on_step_end=note,
            **options,
        ).images
        return latents[-1], np.stack([np.asarray(image) for image in images])


@pytest.fixture(scope="module", params=CLASSES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


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


def assert_equal_to_stock(ours: DenoisePipeline, state: Any, stock: tuple[torch.Tensor, np.ndarray]) -> None:
    while not state.done:
        ours.step([state])
    latents, images = stock
    assert (state.latents - latents).abs().max() <= 3e-5 * max(1.0, float(latents.abs().max()))
    (decoded,) = ours.decode([state])
    assert isinstance(decoded, np.ndarray)
    assert decoded.shape == images.shape
    assert np.abs(decoded.astype(int) - images.astype(int)).max() <= 1


@pytest.mark.parametrize("negative", [None, "a dull dog"])
@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_images_are_those_of_stock(pair: Pair, scale: float, negative: str | None) -> None:
    if pair.class_name in FLUX_2:
        negative = None  # of stock it is always empty, or none
    request = request_of(num_images=2, guidance_scale=scale, true_cfg_scale=scale, height=48)
    conditioning = pair.conditioning(request, PROMPTS[0], negative)
    stock = pair.stock_run(request, PROMPTS[0], negative)
    assert_equal_to_stock(pair.ours, pair.ours.start_request(request, conditioning), stock)


@pytest.mark.parametrize("pair", UNDER_NOISE, indirect=True)
def test_an_image_to_begin_at(pair: Pair) -> None:
    image = seeded_rng().integers(0, 256, (32, 32, 3), dtype=np.uint8)
    request = request_of(num_inference_steps=4, strength=0.5, init_image=image, guidance_scale=2.0, true_cfg_scale=2.0)
    conditioning = pair.conditioning(request, PROMPTS[1], "dull")
    class_ = getattr(diffusers, pair.class_name.replace("Pipeline", "Img2ImgPipeline"))
    options = {"image": PIL.Image.fromarray(image), "strength": 0.5}
    stock = pair.stock_run(request, PROMPTS[1], "dull", class_, **options)
    assert_equal_to_stock(pair.ours, pair.ours.start_request(request, conditioning), stock)


@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("pair", UNDER_NOISE, indirect=True)
def test_a_part_of_an_image_painted_anew(pair: Pair, strength: float) -> None:
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
    assert_equal_to_stock(pair.ours, pair.ours.start_request(request, conditioning), stock)


@pytest.fixture(scope="module", params=FLUX_2)
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


def test_an_image_that_is_read(reader: Pair) -> None:
    image = seeded_rng().integers(0, 256, (80, 64, 3), dtype=np.uint8)  # stock takes none below 64
    request = request_of(init_image=image, height=80, width=64, guidance_scale=2.0, num_images=2)
    conditioning = reader.conditioning(request, PROMPTS[1], None)
    stock = reader.stock_run(request, PROMPTS[1], None, image=PIL.Image.fromarray(image))
    assert_equal_to_stock(reader.ours, reader.ours.start_request(request, conditioning), stock)
    # Where denoiser and VAE are not on the device together, one encodes for the other.
    told = reader.ours.encode_inputs(request, conditioning, {})
    vae = copy.deepcopy(reader.ours._codec.vae).to("meta")
    blank = DenoisePipeline(reader.family, reader.folder, {"transformer": reader.ours.denoiser, "vae": vae})
    apart = blank.start_request(request, conditioning, {}, told)
    both = reader.ours.start_request(request, conditioning)
    assert apart.extra_channels is not None
    assert both.extra_channels is not None
    assert torch.equal(apart.extra_channels, both.extra_channels)


def test_requests_with_and_without_an_image_to_read_share_a_batch(reader: Pair) -> None:
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
    pair = Pair(KLEIN, tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["is_distilled"] is False
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))
    distilled = pair.family.variant(index | {"is_distilled": True})
    assert pair.family.uses_negative(request_of(guidance_scale=4.0), has_negative=False)
    assert not distilled.uses_negative(request_of(guidance_scale=4.0), has_negative=True)
    defaults = pair.family.defaults_of(pipeline_variant(tmp_path))
    assert (defaults.num_inference_steps, defaults.guidance_scale) == (4, 1.0)


def test_encodings_are_those_of_stock_alone_and_in_a_batch(pair: Pair) -> None:
    request = request_of()
    plans = [pair.family.plan_texts({}, prompt, None, use_negative=False) for prompt in PROMPTS]
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


def test_a_request_has_the_same_bits_in_any_batch(pair: Pair) -> None:
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


def test_what_import_reads_of_it_can_be_served(pair: Pair) -> None:
    assert why_unservable(read_checkpoint(pair.folder)) is None


def test_a_text_encoder_that_lacks_what_its_pipeline_asks_for(tmp_path: Path) -> None:
    pair = Pair("ZImagePipeline", tmp_path)
    plan = pair.family.plan_texts({}, "x", None, use_negative=False)
    assert plan[0].form is not None
    pair.encoder._tokenizer._tokenizer.chat_template = None
    with pytest.raises(EngineError, match="has no chat template"):
        pair.encode(plan)
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert pair.family.text_widths(pair.ours.denoiser) == (config["cap_feat_dim"], None)
    with pytest.raises(EngineError, match="max_sequence_length 513: expected 1 to 512"):
        pair.family.plan_texts({}, "x", None, use_negative=False, max_sequence_length=513)
    with pytest.raises(EngineError, match="'chunk' is for CLIP"):
        pair.family.plan_texts({}, "x", None, use_negative=False, long_text="chunk")


def test_a_text_begins_once_where_template_and_tokenizer_both_say_so() -> None:
    tokenizer = byte_tokenizer(chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    add_begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer._tokenizer.post_processor = add_begin
    ours, form = TextTokenizer(tokenizer, 64, 64), PromptForm(layers=(-1,))
    (found,) = ours.tokenize([ours.fill_form(PROMPTS[1], form)], None)
    expected = tokenizer.apply_chat_template([{"role": "user", "content": PROMPTS[1]}], return_dict=True)["input_ids"]
    assert list(found.token_ids) == expected
    assert expected.count(tokenizer.bos_token_id) == 1
