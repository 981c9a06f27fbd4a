"""plan -> tokenize -> encode -> assemble gives what the stock pipelines' encode_prompt gives."""

from __future__ import annotations

import diffusers
import pytest
import torch

from deployments.engines.diffusion.families import family_of
from deployments.engines.diffusion.families.texts import EncodeItem, lacking_encoders
from deployments.engines.records.protocol import LAST, PENULTIMATE, DiffusionRequest, EngineError

FLUX, SDXL = family_of("FluxPipeline"), family_of("StableDiffusionXLPipeline")
STABLE_DIFFUSION_3 = family_of("StableDiffusion3Pipeline")
STABLE_DIFFUSION = family_of("StableDiffusionPipeline")
PROMPT = "a small 7 and more words than fit"


def run(encoders, family, model_index, prompt, negative_prompt, **options):
    """The walk that a service does, with a cache that must not be asked twice for one text."""
    plan = family.texts.plan(model_index, prompt, negative_prompt, **options)
    cache: dict[tuple[str, tuple[int, ...]], dict[str, torch.Tensor]] = {}
    outputs = {}
    for item in plan:
        encoder = encoders[item.component].ours
        [ids] = encoder.tokenize([item.text], item.max_length, layer=item.layer)
        if (item.component, ids) not in cache:
            [cache[item.component, ids]] = encoder.encode([ids])
        outputs[item] = cache[item.component, ids]
    return family.texts.assemble(model_index, outputs, use_negative=options["use_negative"])


def assert_equal(ours, names, stock):
    assert sorted(ours) == sorted(names)
    for name, tensor in zip(names, stock, strict=True):
        assert ours[name].shape == tensor.shape
        assert torch.allclose(ours[name], tensor, atol=1e-5)


@pytest.mark.parametrize("negative", [None, "", "blurry"])
def test_flux_equals_stock(clip, t5, negative):
    encoders = {"text_encoder": clip, "text_encoder_2": t5}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    parts = (clip.stock, clip.tokenizer, t5.stock, t5.tokenizer)
    stock = diffusers.FluxPipeline(scheduler, None, *parts, None)
    ours = run(encoders, FLUX, {}, PROMPT, negative, max_sequence_length=20, use_negative=True)
    with torch.no_grad():
        expected = [*stock.encode_prompt(PROMPT, max_sequence_length=20)[:2]]
        if negative is not None:
            expected += stock.encode_prompt(negative, max_sequence_length=20)[:2]
    names = [
        "prompt_embeds",
        "pooled_prompt_embeds",
        "negative_prompt_embeds",
        "negative_pooled_prompt_embeds",
    ]
    assert_equal(ours, names[: len(expected)], expected)


@pytest.mark.parametrize("force_zeros", [True, False])
@pytest.mark.parametrize("negative", [None, "", "blurry"])
def test_sdxl_equals_stock(clip, clip_projection, negative, force_zeros):
    encoders = {"text_encoder": clip, "text_encoder_2": clip_projection}
    stock = diffusers.StableDiffusionXLPipeline(
        None,
        clip.stock,
        clip_projection.stock,
        clip.tokenizer,
        clip_projection.tokenizer,
        None,
        diffusers.EulerDiscreteScheduler(),
        force_zeros_for_empty_prompt=force_zeros,
        add_watermarker=False,
    )
    index = {"force_zeros_for_empty_prompt": force_zeros}
    ours = run(encoders, SDXL, index, PROMPT, negative, use_negative=True)
    with torch.no_grad():
        expected = stock.encode_prompt(PROMPT, negative_prompt=negative)
    names = [
        "prompt_embeds",
        "negative_prompt_embeds",
        "pooled_prompt_embeds",
        "negative_pooled_prompt_embeds",
    ]
    assert_equal(ours, names, expected)


@pytest.mark.parametrize("negative", [None, "", "blurry"])
def test_stable_diffusion_3_equals_stock(clip_projection, t5, negative):
    clips = [clip_projection.stock, clip_projection.tokenizer] * 2
    stock = diffusers.StableDiffusion3Pipeline(
        None, diffusers.FlowMatchEulerDiscreteScheduler(), None, *clips, t5.stock, t5.tokenizer
    )
    encoders = {"text_encoder": clip_projection, "text_encoder_2": clip_projection, "text_encoder_3": t5}
    ours = run(encoders, STABLE_DIFFUSION_3, {}, PROMPT, negative, max_sequence_length=20, use_negative=True)
    with torch.no_grad():
        expected = stock.encode_prompt(PROMPT, None, None, negative_prompt=negative, max_sequence_length=20)
    names = [
        "prompt_embeds",
        "negative_prompt_embeds",
        "pooled_prompt_embeds",
        "negative_pooled_prompt_embeds",
    ]
    assert_equal(ours, names, expected)


@pytest.mark.parametrize("negative", [None, "", "blurry"])
def test_stable_diffusion_equals_stock(clip, negative):
    stock = diffusers.StableDiffusionPipeline(
        None,
        clip.stock,
        clip.tokenizer,
        None,
        diffusers.PNDMScheduler(),
        None,
        None,
        requires_safety_checker=False,
    )
    ours = run({"text_encoder": clip}, STABLE_DIFFUSION, {}, PROMPT, negative, use_negative=True)
    with torch.no_grad():
        expected = stock.encode_prompt(PROMPT, "cpu", 1, True, negative_prompt=negative)
    assert_equal(ours, ["prompt_embeds", "negative_prompt_embeds"], expected)


@pytest.mark.parametrize("clip_skip", [0, 1, 2])
@pytest.mark.parametrize("negative", [None, "blurry"])
def test_stable_diffusion_skips_layers_as_stock(clip, negative, clip_skip):
    parts = (clip.stock, clip.tokenizer, None, diffusers.PNDMScheduler(), None, None)
    stock = diffusers.StableDiffusionPipeline(None, *parts, requires_safety_checker=False)
    if not hasattr(clip.stock, "text_model"):  # where this diffusers looks for the final norm
        clip.stock.__dict__["text_model"] = clip.stock
    skips = {"prompt": clip_skip}
    ours = run({"text_encoder": clip}, STABLE_DIFFUSION, {}, PROMPT, negative, use_negative=True, clip_skips=skips)
    with torch.no_grad():
        expected = stock.encode_prompt(PROMPT, "cpu", 1, True, negative_prompt=negative, clip_skip=clip_skip)
    assert_equal(ours, ["prompt_embeds", "negative_prompt_embeds"], expected)


@pytest.mark.parametrize("clip_skip", [0, 1])
def test_sdxl_skips_layers_as_stock(clip, clip_projection, clip_skip):
    parts = (clip.stock, clip_projection.stock, clip.tokenizer, clip_projection.tokenizer, None)
    stock = diffusers.StableDiffusionXLPipeline(None, *parts, diffusers.EulerDiscreteScheduler(), add_watermarker=False)
    encoders, skips = {"text_encoder": clip, "text_encoder_2": clip_projection}, {"prompt": clip_skip}
    ours = run(encoders, SDXL, {}, PROMPT, "blurry", use_negative=True, clip_skips=skips)
    with torch.no_grad():
        expected = stock.encode_prompt(PROMPT, device="cpu", negative_prompt="blurry", clip_skip=clip_skip)
    names = ["prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds"]
    assert_equal(ours, names, expected)


def test_more_layers_than_there_are_cannot_be_skipped(clip):
    [text] = clip.ours.tokenize(["7"], layer=LAST.before(40))
    with pytest.raises(EngineError, match=r"clip_skip: 40 layers were to be left out of a text encoder that has \d"):
        clip.ours.encode([text])


def test_the_layers_of_one_clip_are_told_apart(clip):
    [penultimate], [last] = (clip.ours.tokenize(["7"], layer=layer) for layer in (PENULTIMATE, LAST))
    assert clip.ours.variant(penultimate) != clip.ours.variant(last)
    first, second = clip.ours.encode([penultimate, last])
    assert (sorted(first), sorted(second)) == (["penultimate", "pooled"], ["hidden", "pooled"])
    assert torch.equal(first["pooled"], second["pooled"])


def test_no_guidance_no_negative(clip, clip_projection):
    encoders = {"text_encoder": clip, "text_encoder_2": clip_projection}
    ours = run(encoders, SDXL, {}, PROMPT, "blurry", use_negative=False)
    assert sorted(ours) == ["pooled_prompt_embeds", "prompt_embeds"]


def test_the_plan_is_data():
    assert FLUX.texts.plan({}, "7", "no", max_sequence_length=None, use_negative=True) == (
        EncodeItem("text_encoder", "7", None, "prompt"),
        EncodeItem("text_encoder_2", "7", 512, "prompt"),
        EncodeItem("text_encoder", "no", None, "negative"),
        EncodeItem("text_encoder_2", "no", 512, "negative"),
    )


@pytest.mark.parametrize(
    ("family", "guidance", "true_cfg", "negative", "expected"),
    [
        (FLUX, 7.0, 1.0, "no", False),
        (FLUX, 7.0, 2.0, "no", True),
        (FLUX, 7.0, 2.0, None, False),
        (SDXL, 7.0, 1.0, None, True),
        (SDXL, 1.0, 9.0, "no", False),
        (STABLE_DIFFUSION, 7.0, 1.0, None, True),
        (STABLE_DIFFUSION, 1.0, 9.0, "no", False),
    ],
)
def test_when_guidance_needs_a_negative(family, guidance, true_cfg, negative, expected):
    request = DiffusionRequest("r", 32, 32, 1, guidance, 0, true_cfg_scale=true_cfg)
    assert family.guidance.uses_negative(request, negative is not None) is expected


def test_refusals():
    with pytest.raises(
        EngineError,
        match=r"'PixelPipeline' \(known: FluxPipeline, StableDiffusionXLPipeline, StableDiffusion3Pipeline, ",
    ):
        family_of("PixelPipeline")
    with pytest.raises(EngineError, match="max_sequence_length 513: expected 1 to 512"):
        FLUX.texts.plan({}, "7", None, max_sequence_length=513, use_negative=False)
    item = EncodeItem("text_encoder", "7", None, "prompt")
    with pytest.raises(EngineError, match="the prompt has no 'hidden' of 'text_encoder_2'"):
        FLUX.texts.assemble({}, {item: {"pooled": torch.zeros(3)}})
    short, long = (
        {"penultimate": torch.zeros(3, 4)},
        {"penultimate": torch.zeros(5, 4), "pooled": torch.zeros(6)},
    )
    second = EncodeItem("text_encoder_2", "7", None, "prompt")
    with pytest.raises(EngineError, match="text_encoder gave 3 tokens and text_encoder_2 5"):
        SDXL.texts.assemble({}, {item: short, second: long})


def test_an_encoder_that_was_saved_as_nothing_lacks():
    saved, lacking = ["transformers", "CLIPTextModel"], [None, None]
    index = {"text_encoder": saved, "text_encoder_2": lacking, "text_encoder_3": None, "vae": lacking}
    assert lacking_encoders(index) == {"text_encoder_2"}
